"""Gated pooling without gathers: windows are views of the token grid, gate logits one batched product per offset.

Where windows overlap, views must be copied together; logits by role and the sums here avoid that: a token's logits are made once per role in which windows
read it, and where a weight serves a whole head, `pool` sums rows by a table of who reads whom, `band_sum` through a product with a band matrix.

Shapes: B batch, T rows, N summaries, W window, S stride, C hidden width, F features, G kv heads, D head dim, E gate channels (1 or D),
X gate outputs (branches x kv heads x gate channels), R = ceil(W/S) roles, Z and U roles of logits and payload (1 or R), g groups of S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mitigate.kernels import visibility

Grid = tuple[int, int, int]  # window, stride, origin


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
    grid_BgSF = _token_groups(x_BTF, stride=stride, start=start, groups=count + roles - 1)
    if roles == 1:
        return grid_BgSF
    return torch.cat([grid_BgSF[:, r : r + count, : window - r * stride] for r in range(roles)], dim=2)


def _token_groups(x_BTF: torch.Tensor, *, stride: int, start: int, groups: int) -> torch.Tensor:
    """Rows from `start` on in groups of S: [B, g, S, F]; rows outside read as zeros."""
    batch, length, features = x_BTF.shape
    stop = start + groups * stride
    rows = x_BTF[:, max(start, 0) : stop]
    if start < 0 or stop > length:
        rows = F.pad(rows, (0, 0, max(-start, 0), max(stop - length, 0)))
    return rows.reshape(batch, groups, stride, features)


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


def gate_weights_of_rows(
    h_BTC: torch.Tensor,
    weight_WCX: torch.Tensor,
    bias_WX: torch.Tensor | None,
    exists_NW: torch.Tensor | None,
    *,
    window: int,
    stride: int,
    start: int,
    count: int,
) -> torch.Tensor:
    """`gate_weights` of the windows that `windows` would cut, without cutting: each row's logits are made once per role. [B, N, W, X].

    Args:
        weight_WCX: one map per offset, or a single one for all.
    """
    wide = torch.promote_types(h_BTC.dtype, torch.float32)
    cut = {"window": window, "stride": stride, "start": start, "count": count}
    with torch.autocast(h_BTC.device.type, enabled=False):
        if weight_WCX.shape[0] == 1:
            s_BNWX = windows(h_BTC.to(wide) @ weight_WCX[0].to(wide), **cut)
        elif window == stride or count == 0 or 2 * weight_WCX.shape[2] > h_BTC.shape[2]:  # logits as wide as the rows: nothing to gain
            return gate_weights(windows(h_BTC, **cut), weight_WCX, bias_WX, exists_NW)
        else:
            s_BNWX = _logits_by_role(h_BTC.to(wide), weight_WCX.to(wide), **cut)
        return _softmax(s_BNWX if bias_WX is None else s_BNWX + bias_WX.to(wide), exists_NW)


def _logits_by_role(h_BTC: torch.Tensor, weight_WCX: torch.Tensor, *, window: int, stride: int, start: int, count: int) -> torch.Tensor:
    z_BgSRX = _mapped_by_role(h_BTC, weight_WCX, window=window, stride=stride, start=start, count=count)
    return torch.cat([z_BgSRX[:, r : r + count, : window - r * stride, r] for r in range(z_BgSRX.shape[3])], dim=2)


def _mapped_by_role(x_BTC: torch.Tensor, map_WCF: torch.Tensor, *, window: int, stride: int, start: int, count: int) -> torch.Tensor:
    """Each row through the map of its offset, once per role in which a window may read it: [B, g, S, R, F]. Offsets beyond the window give zeros."""
    roles, features = math.ceil(window / stride), map_WCF.shape[2]
    x_BgSC = _token_groups(x_BTC, stride=stride, start=start, groups=count + roles - 1)
    by_phase_SCRF = F.pad(map_WCF, (0, 0, 0, 0, 0, roles * stride - window)).unflatten(0, (roles, stride)).permute(1, 2, 0, 3)
    return torch.einsum("bgsc,scy->bgsy", x_BgSC, by_phase_SCRF.flatten(2)).unflatten(3, (roles, features))


def rows_by_role(x_BTC: torch.Tensor, map_WCF: torch.Tensor, bias_WF: torch.Tensor | None, *, window: int, stride: int, start: int, count: int) -> torch.Tensor:
    """What `pool` takes, of the rows that the windows read: each row through the map of its offset, plus that offset's bias. [B, rows, R, F].

    The rows are those from `start` (or row 0, where it is negative) to the last one of the last window; there must be a window.

    Args:
        map_WCF: one map per offset, or a single one for all; without a bias too, that is one role for all.
    """
    first, stop = max(start, 0), start + (count - 1) * stride + window
    if map_WCF.shape[0] == 1 and bias_WF is None:
        return (x_BTC[:, first:stop] @ map_WCF[0])[:, :, None]
    cut = {"window": window, "stride": stride, "start": start, "count": count}
    y_BgSRF = _mapped_by_role(x_BTC, map_WCF.expand(window, -1, -1), **cut)
    if bias_WF is not None:
        roles = y_BgSRF.shape[3]
        y_BgSRF = y_BgSRF + F.pad(bias_WF, (0, 0, 0, roles * stride - window)).unflatten(0, (roles, stride)).transpose(0, 1)
    return y_BgSRF.flatten(1, 2)[:, first - start : stop - start]


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


# pooling from logits by role -------------------------------------------------------------------------------------------------------------------------


def pool(z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, *, window: int, stride: int, origin: int = 0) -> torch.Tensor:
    """``summary_j = sum_i alpha_{j,i} * u_{j,i}`` with ``alpha_j = softmax_i`` of the logits, over the offsets that exist: [B, N, G, D].

    Token ``t = origin + g*S + p`` stands in window ``g - r`` in role r, at offset ``i = r*S + p``.

    Args:
        z_BTZGE: gate logits by role, bias included; Z = 1: one logit for all roles; None or Z = 0: uniform gates.
        u_BTUGD: payload by role; U = 1: one payload for all roles.
    """
    z = u_BTUGD.new_empty(*u_BTUGD.shape[:2], 0, u_BTUGD.shape[3], 1) if z_BTZGE is None else z_BTZGE
    out: torch.Tensor = _Pool.apply(z, u_BTUGD, (window, stride, origin))  # type: ignore[no-untyped-call]
    return out


class _Pool(torch.autograd.Function):
    """`pool_forward` and `pool_backward`, joined for autograd; the weights are kept in between."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, u: torch.Tensor, grid: Grid) -> torch.Tensor:
        out, _, weights = pool_forward(z, u, grid)
        ctx.save_for_backward(z, u, out, weights)
        ctx.grid = grid
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, u, out, weights = ctx.saved_tensors
        return (*pool_backward(dout, z, u, out, None, ctx.grid, weights), None)


def pool_forward(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, *, want_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`pool` without autograd: summaries; log-sum-exp of the logits [B, N, G, E] where wanted, fp32 or wider; weights, which `pool_backward` takes."""
    if z_BTZGE.shape[2] and z_BTZGE.shape[4] > 1:
        return _vector_forward(z_BTZGE, u_BTUGD, grid, want_lse)
    return _scalar_forward(z_BTZGE, u_BTUGD, grid, want_lse)


def pool_backward(
    dout_BNGD: torch.Tensor,
    z_BTZGE: torch.Tensor,
    u_BTUGD: torch.Tensor,
    out_BNGD: torch.Tensor,
    lse_BNGE: torch.Tensor | None,
    grid: Grid,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the logits and of the payload, exactly 0 where no window reads. Takes the weights that `pool_forward` gave, or makes them again."""
    if z_BTZGE.shape[2] and z_BTZGE.shape[4] > 1:
        return _vector_backward(dout_BNGD, z_BTZGE, u_BTUGD, out_BNGD, lse_BNGE, grid, weights)
    return _scalar_backward(dout_BNGD, z_BTZGE, u_BTUGD, grid, weights)


def _groups(grid: Grid, count: int) -> int:
    """Groups of S tokens that `count` windows read."""
    return count + math.ceil(grid[0] / grid[1]) - 1 if count else 0


def _grouped(x_BTZF: torch.Tensor, grid: Grid, count: int, fill: float) -> torch.Tensor:
    """The (padded) rows that the windows read, in groups: [B, g, S, Z, ...]. Rows before position 0 and after the last one hold `fill`."""
    _, stride, origin = grid
    length, groups = x_BTZF.shape[1], _groups(grid, count)
    stop = origin + groups * stride
    if not groups:
        return x_BTZF[:, :0].reshape(x_BTZF.shape[0], 0, stride, *x_BTZF.shape[2:])
    rows = x_BTZF[:, : min(stop, length)]
    if origin < 0 or stop > length:
        rows = F.pad(rows, (*[0, 0] * (rows.dim() - 2), -origin, max(stop - length, 0)), value=fill)
    return rows.unflatten(1, (groups, stride))


def _by_role(x_BTZF: torch.Tensor, grid: Grid, count: int, fill: float) -> list[torch.Tensor]:
    """Of each role, what the windows find there: views [B, N, offsets of the role, F]. One stored role serves all where Z = 1."""
    window, stride, _ = grid
    x_BgSZF, last = _grouped(x_BTZF, grid, count, fill), x_BTZF.shape[2] - 1
    return [x_BgSZF[:, r : r + count, : window - r * stride, min(r, last)] for r in range(math.ceil(window / stride))]


def _gradient_rows(like_BTZF: torch.Tensor, grid: Grid, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows [B, T, Z, F] for a gradient, and views of them as `_by_role` gives: [B, N, offsets of the role, F].

    Zeros stand where no window reads. The first role of each stored one must be written, later ones added; nothing is written twice.
    """
    window, stride, origin = grid
    batch, length, roles, features = like_BTZF.shape
    groups, spans = _groups(grid, count), math.ceil(window / stride)
    size = (batch, max(groups * stride, length - origin), roles, features)
    rows = torch.empty(size, dtype=dtype, device=like_BTZF.device)
    rows[:, groups * stride :] = 0
    grouped = rows[:, : groups * stride].unflatten(1, (groups, stride)) if groups else rows[:, :0].reshape(batch, 0, stride, roles, features)
    for role in range(roles):
        for unread in (grouped[:, :role, :, role], grouped[:, role + count :, :, role], grouped[:, :, window - role * stride :, role]):
            unread.zero_()
    return rows[:, -origin : length - origin], [grouped[:, r : r + count, : window - r * stride, min(r, roles - 1)] for r in range(spans)]


# one weight per offset and kv head: tables say which row each offset of a window reads, and who reads each row; offsets first, for the softmax's sake ----


def _scalar_forward(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    s_WBNG = _scalar_logits(z_BTZGE, u_BTUGD, grid)
    alpha_WBNG = s_WBNG.softmax(dim=0)
    # The largest weight is exp(largest logit - lse).
    lse = (s_WBNG.amax(dim=0) - alpha_WBNG.amax(dim=0).log())[..., None] if want_lse else None
    _, row_KW = _rows_read(u_BTUGD.shape[:4], grid, u_BTUGD.device)
    out = _weighted_rows(u_BTUGD.to(alpha_WBNG.dtype), row_KW, alpha_WBNG.flatten(1).mT.contiguous())
    return out.view(*alpha_WBNG.shape[1:], u_BTUGD.shape[4]).to(u_BTUGD.dtype), lse, alpha_WBNG


def _scalar_backward(
    dout_BNGD: torch.Tensor, z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, alpha_WBNG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not dout_BNGD.shape[1]:
        return torch.zeros_like(z_BTZGE), torch.zeros_like(u_BTUGD)
    alpha_WBNG = _scalar_logits(z_BTZGE, u_BTUGD, grid).softmax(dim=0) if alpha_WBNG is None else alpha_WBNG
    wide = alpha_WBNG.dtype
    dout_BNGD = dout_BNGD.to(wide)
    if z_BTZGE.shape[2]:
        dalpha_WBNG = _weight_gradients(dout_BNGD, u_BTUGD.to(wide), grid)
        ds_WBNG = torch._softmax_backward_data(dalpha_WBNG, alpha_WBNG, 0, wide)
        read = _picked(ds_WBNG, _readers(z_BTZGE.shape[:4], grid, u_BTUGD.device)[0])
        dz = (read if read.shape[1] == 1 else read.sum(dim=1)).view(z_BTZGE.shape).to(z_BTZGE.dtype)
    else:
        dz = torch.zeros_like(z_BTZGE)
    entry, window = _readers(u_BTUGD.shape[:4], grid, u_BTUGD.device)
    return dz, _weighted_rows(dout_BNGD, window, _picked(alpha_WBNG, entry)).view(u_BTUGD.shape).to(u_BTUGD.dtype)


def _scalar_logits(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[W, B, N, G] in fp32 or wider; zeros for uniform gates, -inf where no token is. Over a short last dimension a softmax takes ten times as long."""
    batch, length, roles, groups = z_BTZGE.shape[:4]
    wide = torch.promote_types(z_BTZGE.dtype if roles else u_BTUGD.dtype, torch.float32)
    count = visibility.num_windows(length, *grid)
    if roles:
        row_WBNG, _ = _rows_read(z_BTZGE.shape[:4], grid, u_BTUGD.device)
        s_WBNG = z_BTZGE.flatten().index_select(0, row_WBNG.flatten()).view(row_WBNG.shape).to(wide)
    else:
        s_WBNG = torch.zeros(grid[0], batch, count, groups, dtype=wide, device=u_BTUGD.device)
    exists_NW = exists(window=grid[0], stride=grid[1], first=grid[2], count=count, device=u_BTUGD.device)
    return s_WBNG if exists_NW is None else s_WBNG.masked_fill(~exists_NW.mT[:, None, :, None], float("-inf"))


def _weighted_rows(x: torch.Tensor, row_KI: torch.Tensor, weight_KI: torch.Tensor) -> torch.Tensor:
    """``sum_i weight[k, i] * x[row[k, i]]``, rows of `x` [..., D] counted through: [K, D]. No other row is read."""
    begin_K = torch.arange(0, row_KI.numel(), row_KI.shape[1], dtype=row_KI.dtype, device=x.device)
    return F.embedding_bag(row_KI.flatten(), x.reshape(-1, x.shape[-1]), begin_K, mode="sum", per_sample_weights=weight_KI.flatten())


def _picked(x: torch.Tensor, entry_KI: torch.Tensor) -> torch.Tensor:
    """Elements of `x`, counted through: [K, I]. The one after the last is 0."""
    return F.pad(x.flatten(), (0, 1)).index_select(0, entry_KI.flatten()).view(entry_KI.shape)


def _index_type(most: int) -> torch.dtype:
    """Of a table whose entries are at most `most`; the narrower, the faster."""
    return torch.int32 if most < 2**31 else torch.int64


@lru_cache(maxsize=8)
def _rows_read(shape: Sequence[int], grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which row of [B, T, Z, G] each offset of a window reads: [W, B, N, G], and the same window by window, [B*N*G, W].

    An offset before position 0, whose weight is 0, has the row of the window's last one.
    """
    (batch, length, roles, groups), (window, stride, origin) = shape, grid
    with torch.inference_mode(False):  # what is kept must also serve a later backward pass
        offset_W1 = torch.arange(window, device=device)[:, None]
        token_WN = origin + stride * torch.arange(visibility.num_windows(length, *grid), device=device) + offset_W1
        row_WN = token_WN * roles + (offset_W1 // stride).clamp(max=roles - 1)
        row_WN = torch.where(token_WN < 0, row_WN[-1:], row_WN)
        row_WBN = torch.arange(batch, device=device)[:, None] * length * roles + row_WN[:, None]
        row_WBNG = row_WBN[..., None] * groups + torch.arange(groups, device=device)
        row_WBNG = row_WBNG.to(_index_type(batch * length * roles * groups))
        return row_WBNG, row_WBNG.flatten(1).mT.contiguous()


@lru_cache(maxsize=8)
def _readers(shape: Sequence[int], grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: the entries of [W, B, N, G] that read each row of [B, T, Z, G], and their windows of [B, N, G]: [B*T*Z*G, R/Z] each.

    A row that no window reads in a role has the entry after the last one there, and any window.
    """
    (batch, length, roles, groups), (window, stride, origin) = shape, grid
    count, spans = visibility.num_windows(length, *grid), math.ceil(window / stride)
    with torch.inference_mode(False):  # as above
        place_T1 = torch.arange(length, device=device)[:, None] - origin
        role_R = torch.arange(spans, device=device)
        n_TR, offset_TR = place_T1 // stride - role_R, role_R * stride + place_T1 % stride
        read_TR = (n_TR >= 0) & (n_TR < count) & (offset_TR < window)
        n_BTR = torch.arange(batch, device=device)[:, None, None] * count + n_TR.clamp(0, max(count - 1, 0))
        by_role = (length, roles, 1, spans // roles)
        window_BTZGR = n_BTR.view(batch, *by_role) * groups + torch.arange(groups, device=device)[:, None]
        entry_BTZGR = offset_TR.view(by_role) * (batch * count * groups) + window_BTZGR
        entries = window * batch * count * groups
        entry_BTZGR = entry_BTZGR.masked_fill(~read_TR.view(by_role), entries)
        return entry_BTZGR.view(-1, spans // roles).to(_index_type(entries)), window_BTZGR.view(-1, spans // roles).to(_index_type(entries))


def _weight_gradients(dout_BNGD: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``<dout_j, u_{j,i}>``: [W, B, N, G]. Each group of S tokens meets the R windows that read it in one product."""
    window, stride, _ = grid
    batch, count, groups, dim = dout_BNGD.shape
    spans, roles, size = math.ceil(window / stride), u_BTUGD.shape[2], _groups(grid, count)
    u_XSUGD = _grouped(u_BTUGD, grid, count, 0.0).flatten(0, 1)
    # X = B*g groups. With R - 1 rows before each sequence, the windows that read group x stand from row x on, the last role first.
    rows_XGD = dout_BNGD.new_zeros(batch * size + spans - 1, groups, dim)
    rows_XGD[: batch * size].view(batch, size, groups, dim)[:, spans - 1 :] = dout_BNGD
    per = spans // roles  # window roles that share a payload
    parts = []
    for role in range(roles):
        last = (role + 1) * per - 1
        dout_XRGD = rows_XGD[spans - 1 - last :][: batch * size + per - 1].unfold(0, per, 1).movedim(3, 1)
        found_BgRSG = _products(dout_XRGD, u_XSUGD[:, :, role]).unflatten(0, (batch, size))
        parts += [found_BgRSG[:, r : r + count, last - r, : window - r * stride].movedim(2, 0) for r in range(role * per, last + 1)]
    return torch.cat(parts)


def _products(x_XRGD: torch.Tensor, y_XSGD: torch.Tensor) -> torch.Tensor:
    """``<x, y>`` over D, head by head: [X, R, S, G]. Few heads share a product, of which the diagonal is taken: fewer and larger ones are faster."""
    (many, spans, groups, _), stride = x_XRGD.shape, y_XSGD.shape[1]
    if groups <= 4:
        shared = torch.bmm(x_XRGD.flatten(1, 2), y_XSGD.flatten(1, 2).mT, out=x_XRGD.new_empty(many, spans * groups, stride * groups))
        return shared.view(many, spans, groups, stride, groups).diagonal(dim1=2, dim2=4)
    apart_GXRS = x_XRGD.new_empty(groups, many, spans, stride)
    for head, out in enumerate(apart_GXRS):
        torch.bmm(x_XRGD[:, :, head], y_XSGD[:, :, head].mT, out=out)
    return apart_GXRS.movedim(0, 3)


# one weight per offset and kv head: each group's tokens times their weights in the R windows that read it, one small product per group ----------------


def band_pays(groups: int, dim: int, *, window: int, stride: int) -> bool:
    """Whether `band_sum` beats cutting windows: they overlap, and a group's product is large enough for the BLAS (torch's bound, 400)."""
    roles = math.ceil(window / stride)
    heads = groups if _heads_inside(groups, roles) else 1
    return window > stride and stride * roles * heads**2 * dim >= 400


def band_sum(alpha_BNWG: torch.Tensor, u_BTUGD: torch.Tensor, *, window: int, stride: int, start: int) -> torch.Tensor:
    """``sum_i alpha_i * u_i`` without copies of overlapping windows: [B, N, G, D].

    Args:
        alpha_BNWG: weights, 0 where the token does not exist.
        u_BTUGD: payload rows, by role where U > 1.
        start: row of the first window's first token, may be negative. The last window must end inside the rows.
    """
    rows = u_BTUGD[:, start:] if start > 0 else u_BTUGD
    out: torch.Tensor = _BandSum.apply(alpha_BNWG, rows, (window, stride, min(start, 0)))  # type: ignore[no-untyped-call]
    return out


class _BandSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alpha_BNWG: torch.Tensor, u: torch.Tensor, grid: Grid) -> torch.Tensor:
        alpha_BNGW = alpha_BNWG.mT
        ctx.save_for_backward(alpha_BNGW, u)
        ctx.grid = grid
        with torch.autocast(u.device.type, enabled=False):
            return _bands_sum(_bands(alpha_BNGW, grid), u, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(dout.device.type, enabled=False):
            alpha_BNGW, u = ctx.saved_tensors
            dalphas, du = _bands_gradients(dout, _bands(alpha_BNGW, ctx.grid), u, ctx.grid)
        return torch.cat(dalphas, dim=2)[:, :, : ctx.grid[0]], du, None


def _heads_inside(groups: int, spans: int) -> bool:
    """Whether the heads of a token share one product, with zeros between them, or are brought apart by a copy first."""
    return groups * spans <= 16


def _bands(alpha_BNGW: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[X, g, R, H, S, H]: weight of a group's token p and head in the window that reads it in role r; zeros between heads and where none reads.

    X = B and H = G where the heads of a token share one product, else X = B*G and H = 1.
    """
    window, stride, _ = grid
    batch, count, groups, _ = alpha_BNGW.shape
    spans = math.ceil(window / stride)
    size = (batch, groups) if _heads_inside(groups, spans) else (batch * groups, 1)
    bands = alpha_BNGW.new_zeros(size[0], _groups(grid, count), spans, size[1], stride, size[1])
    for place, alpha in zip(_band_entries(bands, (batch, count, groups)), alpha_BNGW.mT.split(stride, dim=2), strict=True):
        place[:, :, : alpha.shape[2]] = alpha
    return bands


def _band_entries(bands_XgRHSH: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Of each role, the entries of the windows in it: views [B, N, S, G]; `shape` begins with B, N, G."""
    batch, count, groups = shape[:3]
    own_XgRSH = bands_XgRHSH.diagonal(dim1=3, dim2=5)
    entries = [own_XgRSH[:, r : r + count, r] for r in range(bands_XgRHSH.shape[2])]
    apart = bands_XgRHSH.shape[3] < groups
    return [x.squeeze(-1).unflatten(0, (batch, groups)).movedim(1, -1) for x in entries] if apart else entries


def _role_slices(roles: int) -> list[slice]:
    """Which window roles each payload role serves."""
    return [slice(None)] if roles == 1 else [slice(r, r + 1) for r in range(roles)]


def _apart(x: torch.Tensor, apart: bool, dim: int) -> torch.Tensor:
    """Heads (at `dim`) as sequences of their own: [B*G, ..., 1, ...]."""
    return x.movedim(dim, 1).flatten(0, 1).unsqueeze(dim) if apart else x


def _bands_sum(bands: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid) -> torch.Tensor:
    batch, _, roles, groups, _ = u_BTUGD.shape
    count = max(bands.shape[1] - bands.shape[2] + 1, 0)
    apart = bands.shape[3] < groups
    u_XgSUHD = _grouped(_apart(u_BTUGD, apart, 3).to(bands.dtype), grid, count, 0.0)
    out: torch.Tensor | None = None
    for role, served in enumerate(_role_slices(roles)):
        rows = bands[:, :, served].flatten(2, 3).flatten(3, 4)
        parts = _product(rows, u_XgSUHD[:, :, :, role].flatten(2, 3)).unflatten(2, (-1, bands.shape[3]))
        for r in range(parts.shape[2]):
            part = parts[:, role + r : role + r + count, r]
            out = part if out is None else out + part
    assert out is not None
    return (out.unflatten(0, (batch, groups)).squeeze(3).transpose(1, 2) if apart else out).to(u_BTUGD.dtype)


def _bands_gradients(dout_BNGD: torch.Tensor, bands: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of the weights, of each role [B, N, S, G], and [B, T, U, G, D] of the payload."""
    stride, origin = grid[1:]
    batch, count, groups, dim = dout_BNGD.shape
    length, roles = u_BTUGD.shape[1:3]
    apart = bands.shape[3] < groups
    u_XgSUHD = _grouped(_apart(u_BTUGD, apart, 3).to(bands.dtype), grid, count, 0.0)
    dout = bands.new_zeros(*bands.shape[:4], dim)
    for r in range(bands.shape[2]):
        dout[:, r : r + count, r] = _apart(dout_BNGD, apart, 2)
    du, dbands = [], []
    for role, served in enumerate(_role_slices(roles)):
        incoming, band = dout[:, :, served].flatten(2, 3), bands[:, :, served].flatten(2, 3).flatten(3, 4)
        du.append(_product(band.mT, incoming).unflatten(2, (stride, -1)))
        dbands.append(_product(incoming, u_XgSUHD[:, :, :, role].flatten(2, 3).mT).unflatten(3, (stride, -1)).unflatten(2, (-1, bands.shape[3])))
    found = torch.cat(dbands, dim=2) if roles > 1 else dbands[0]
    du_BTUGD = _ungrouped(torch.stack(du, dim=3) if roles > 1 else du[0].unsqueeze(3), length, origin)
    if apart:
        du_BTUGD = du_BTUGD.unflatten(0, (batch, groups)).squeeze(4).movedim(1, 3)
    return _band_entries(found, dout_BNGD.shape), du_BTUGD.to(u_BTUGD.dtype)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One small matrix product per sequence and group: [B, g, Y, K] x [B, g, K, M]. Into a contiguous tensor, or a turned factor costs a BLAS call each."""
    out = torch.empty(a.shape[0] * a.shape[1], a.shape[2], b.shape[3], dtype=a.dtype, device=a.device)
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out).unflatten(0, a.shape[:2])


def _ungrouped(x_BgSUGD: torch.Tensor, length: int, origin: int) -> torch.Tensor:
    """Groups back to rows [B, T, ...]: those at negative positions drop out, those that no window reads are zeros."""
    rows = x_BgSUGD.flatten(1, 2)[:, -origin:][:, :length]
    missing = length - rows.shape[1]
    return F.pad(rows, (*[0, 0] * (rows.dim() - 2), 0, missing)) if missing else rows


# one weight per channel: a few passes over a part of the batch that stays in the cache ---------------------------------------------------------------


def _parts(u_BTUGD: torch.Tensor) -> list[slice]:
    """The batch in slices of about 256 Ki payload elements."""
    each = max(u_BTUGD[:1].numel(), 1)
    size = max(262144 // each, 1)
    return [slice(b, b + size) for b in range(0, u_BTUGD.shape[0], size)]


def _vector_forward(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    batch, length, _, groups, dim = u_BTUGD.shape
    count, wide = visibility.num_windows(length, *grid), torch.promote_types(z_BTZGE.dtype, torch.float32)
    out = u_BTUGD.new_empty(batch, count, groups * dim, dtype=wide)
    lse = torch.empty_like(out) if want_lse else None
    weights = out.new_empty(batch, count, grid[0], groups * dim)
    terms: torch.Tensor | None = None  # one scratch for all parts: fresh memory costs as much as a pass over it
    for part in _parts(u_BTUGD):
        s_BNWF = torch.cat(_by_role(z_BTZGE[part].flatten(3).to(wide), grid, count, float("-inf")), dim=2, out=weights[part])
        if lse is not None:
            torch.amax(s_BNWF, dim=2, out=lse[part])
        alpha_BNWF = torch.softmax(s_BNWF, dim=2, out=s_BNWF)
        if lse is not None:
            lse[part] -= alpha_BNWF.amax(dim=2).log()  # the largest weight is exp(largest logit - lse)
        payload = _by_role(u_BTUGD[part].flatten(3), grid, count, 0.0)
        for r, (alpha, u) in enumerate(zip(alpha_BNWF.split(grid[1], dim=2), payload, strict=True)):
            terms = out.new_empty(alpha.numel()) if terms is None else terms
            term = torch.mul(alpha, u, out=terms[: alpha.numel()].view(alpha.shape))
            if r == 0:
                torch.sum(term, dim=2, out=out[part])
            else:
                out[part] += term.sum(dim=2)
    return out.unflatten(-1, (groups, dim)).to(u_BTUGD.dtype), None if lse is None else lse.unflatten(-1, (groups, dim)), weights


def _vector_backward(
    dout_BNGD: torch.Tensor,
    z_BTZGE: torch.Tensor,
    u_BTUGD: torch.Tensor,
    out_BNGD: torch.Tensor,
    lse_BNGE: torch.Tensor | None,
    grid: Grid,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, wide = out_BNGD.shape[1], torch.promote_types(z_BTZGE.dtype, torch.float32)
    dz_BTZF, into_z = _gradient_rows(z_BTZGE.flatten(3), grid, count, wide)
    du_BTUF, into_u = _gradient_rows(u_BTUGD.flatten(3), grid, count, wide)
    scratch: torch.Tensor | None = None
    for part in _parts(u_BTUGD):
        z, u = z_BTZGE[part].flatten(3), _by_role(u_BTUGD[part].flatten(3), grid, count, 0.0)
        dout, out = (x[part].flatten(2)[:, :, None].to(wide) for x in (dout_BNGD, out_BNGD))
        if weights is None:
            assert lse_BNGE is not None
            lse = lse_BNGE[part].flatten(2)[:, :, None]
            alphas = [(s - lse).exp_() for s in _by_role(z, grid, count, float("-inf"))]
        else:
            alphas = list(weights[part].split(grid[1], dim=2))
        for r, (alpha, payload) in enumerate(zip(alphas, u, strict=True)):
            place = into_u[r][part]
            if r > 0 and u_BTUGD.shape[2] == 1:
                scratch = torch.empty_like(alpha, memory_format=torch.contiguous_format) if scratch is None else scratch
                step = torch.mul(alpha, dout, out=scratch.flatten()[: alpha.numel()].view(alpha.shape))
                place += step
            else:
                step = torch.mul(alpha, dout, out=place)
            if r > 0 and z_BTZGE.shape[2] == 1:
                into_z[r][part] += (payload - out).mul_(step)
            else:
                torch.sub(payload, out, out=into_z[r][part]).mul_(step)
    return dz_BTZF.view(z_BTZGE.shape).to(z_BTZGE.dtype), du_BTUF.view(u_BTUGD.shape).to(u_BTUGD.dtype)
