"""Gated pooling of windows side by side, or of one alone: they are views of the rows. Windows that overlap are pooled `by_role`, without windows.

Shapes: B batch, T rows, N summaries, W window, S stride, C hidden width, F features, G kv heads, D head dim, E gate channels (1 or D),
X gate outputs (branches x kv heads x gate channels).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def windows(x_BTF: torch.Tensor, *, window: int, start: int, count: int) -> torch.Tensor:
    """Windows ``start + j*W .. + W-1`` for ``j < count`` as [B, count, W, F].

    Args:
        x_BTF: rows; rows before row 0 read as zeros.
        start: row of the first window's first token, may be negative.
        count: windows; the last one must end inside ``x``.

    Returns:
        A view of the (padded) rows.
    """
    if count and start + count * window > x_BTF.shape[1]:
        raise ValueError(f"windows.count: window {count - 1} must end inside the {x_BTF.shape[1]} rows, it ends at row {start + count * window - 1}")
    return token_groups(x_BTF, stride=window, start=start, groups=count)


def token_groups(x_BT: torch.Tensor, *, stride: int, start: int, groups: int, fill: float = 0.0) -> torch.Tensor:
    """Rows from `start` on, which may be negative, in groups of S: [B, groups, S, ...]. Rows before row 0 and after the last one hold `fill`."""
    length, stop = x_BT.shape[1], start + groups * stride
    if not groups:
        return x_BT[:, :0].reshape(x_BT.shape[0], 0, stride, *x_BT.shape[2:])
    rows = x_BT[:, max(start, 0) : stop] if start > 0 or stop < length else x_BT
    if start < 0 or stop > length:
        rows = F.pad(rows, (*[0, 0] * (rows.dim() - 2), max(-start, 0), max(stop - length, 0)), value=fill)
    return rows.unflatten(1, (groups, stride))


def exists(*, window: int, first: int, count: int, device: torch.device | None = None) -> torch.Tensor | None:
    """Which offsets of windows that start at positions ``first + j*W`` hold a real token: bool [count, W], None if all do."""
    if first >= 0 or count == 0:
        return None
    return (first + torch.arange(count * window, device=device) >= 0).view(count, window)


def gate_weights(h_BNWC: torch.Tensor, weight_WCX: torch.Tensor, bias_WX: torch.Tensor | None, exists_NW: torch.Tensor | None) -> torch.Tensor:
    """``alpha = softmax_i(Z_i . h_{j,i} + b_i)`` over the offsets that exist, in fp32 or wider: [B, N, W, X].

    Args:
        weight_WCX: Z, one map per offset, or a single one for all.
        bias_WX: b; None is 0.
    """
    wide = torch.promote_types(h_BNWC.dtype, torch.float32)
    with torch.autocast(h_BNWC.device.type, enabled=False):
        h_BNWC, weight_WCX = h_BNWC.to(wide), weight_WCX.to(wide)
        s_BNWX = h_BNWC @ weight_WCX[0] if weight_WCX.shape[0] == 1 else torch.einsum("bnwc,wcx->bnwx", h_BNWC, weight_WCX)
        return _softmax(s_BNWX if bias_WX is None else s_BNWX + bias_WX.to(wide), exists_NW)


def uniform_weights(batch: int, count: int, window: int, exists_NW: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Equal weights over the offsets that exist: [B, N, W, 1]."""
    return _softmax(torch.zeros(batch, count, window, 1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device), exists_NW)


def _softmax(s_BNWX: torch.Tensor, exists_NW: torch.Tensor | None) -> torch.Tensor:
    if exists_NW is not None:
        s_BNWX = s_BNWX.masked_fill(~exists_NW[None, :, :, None], float("-inf"))
    return s_BNWX.softmax(dim=2)


def weighted_sum(alpha_BNWGE: torch.Tensor, u_BNWGD: torch.Tensor) -> torch.Tensor:
    """``sum_i alpha_i * u_i`` accumulated in the gates' precision, returned in the payload's: [B, N, G, D]."""
    return (alpha_BNWGE * u_BNWGD).sum(dim=2).to(u_BNWGD.dtype)
