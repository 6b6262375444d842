"""Gated pooling without gathers: windows are views of the token grid, gate logits one batched product per offset.

Shapes: B batch, T rows, N summaries, W window, C hidden width, F features, G kv heads, D head dim, E gate channels (1 or D),
X gate outputs (branches x kv heads x gate channels).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


def windows(x_BTF: torch.Tensor, *, window: int, stride: int, start: int, count: int) -> torch.Tensor:
    """Windows ``start + j*stride .. + window-1`` for ``j < count`` as [B, count, W, F].

    Args:
        x_BTF: rows; rows before row 0 read as zeros.
        start: row of the first window's first token, may be negative.
        count: windows; the last one must end inside ``x``.

    Returns:
        A view of the (padded) rows where window == stride, else one concatenation of views.
    """
    batch, length, features = x_BTF.shape
    if count == 0:
        return x_BTF.new_zeros(batch, 0, window, features)
    if start + (count - 1) * stride + window > length:
        raise ValueError(f"windows.count: window {count - 1} must end inside the {length} rows, it ends at row {start + (count - 1) * stride + window - 1}")
    roles = math.ceil(window / stride)
    groups = count + roles - 1
    stop = start + groups * stride
    grid_BTF = x_BTF[:, max(start, 0) : stop]
    if start < 0 or stop > length:
        grid_BTF = F.pad(grid_BTF, (0, 0, max(-start, 0), max(stop - length, 0)))
    grid_BgSF = grid_BTF.reshape(batch, groups, stride, features)
    if roles == 1:
        return grid_BgSF
    return torch.cat([grid_BgSF[:, r : r + count, : window - r * stride] for r in range(roles)], dim=2)


def exists(*, window: int, stride: int, first: int, count: int, device: torch.device | None = None) -> torch.Tensor | None:
    """Which offsets of windows that start at positions ``first + j*stride`` hold a real token: bool [count, W], None if all do."""
    if first >= 0 or count == 0:
        return None
    position_NW = first + stride * torch.arange(count, device=device)[:, None] + torch.arange(window, device=device)[None, :]
    return position_NW >= 0


def gate_weights(h_BNWC: torch.Tensor, weight_WCX: torch.Tensor, bias_WX: torch.Tensor | None, exists_NW: torch.Tensor | None) -> torch.Tensor:
    """``alpha = softmax_i(Z_i . h_{j,i} + b_i)`` over the offsets that exist, in fp32 or wider: [B, N, W, X]. No bias: b = 0."""
    wide = torch.promote_types(h_BNWC.dtype, torch.float32)
    with torch.autocast(h_BNWC.device.type, enabled=False):
        s_BNWX = torch.einsum("bnwc,wcx->bnwx", h_BNWC.to(wide), weight_WCX.to(wide))
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
