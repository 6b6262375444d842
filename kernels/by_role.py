"""Gated pooling without windows, which would be copies where they overlap: from logits and payload by role.

Token ``t = origin + g*S + p`` stands in window ``g - r`` in role r, at offset ``i = r*S + p``, so a token needs one logit for each of R roles. On a CPU:
one weight per head: tables say which rows a window reads and who reads each row. One weight per channel: a few passes over a part of the batch that stays
in the cache.

Shapes: B batch, T rows, N summaries, W window, S stride, C hidden width, F features, G kv heads, D head dim, E gate channels (1 or D), R = ceil(W/S) roles,
Z and U roles of logits and payload (1 or R), g groups of S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mitigate.kernels import visibility
from mitigate.kernels.views import token_groups

Grid = tuple[int, int, int]  # window, stride, origin


def rows_by_role(x_BTC: torch.Tensor, map_WCF: torch.Tensor, bias_WF: torch.Tensor | None, *, window: int, stride: int, start: int, count: int) -> torch.Tensor:
    """What `pool` takes, of the rows that `count` windows read: each row through the map of its offset, plus that offset's bias. [B, rows, R, F].

    The rows are those from `start` (or row 0, where it is negative) to the last one of the last window; there must be a window. Offsets beyond the window
    give zeros.

    Args:
        map_WCF: one map per offset, or a single one for all; without a bias too, that is one role for all.
        start: row of the first window's first token.
    """
    first, stop = max(start, 0), start + (count - 1) * stride + window
    if map_WCF.shape[0] == 1 and bias_WF is None:
        return (x_BTC[:, first:stop] @ map_WCF[0])[:, :, None]
    roles, features = math.ceil(window / stride), map_WCF.shape[2]
    x_BgSC = token_groups(x_BTC, stride=stride, start=start, groups=count + roles - 1)
    beyond = (0, 0, 0, roles * stride - window)
    by_phase_SCRF = F.pad(map_WCF.expand(window, -1, -1), (0, 0, *beyond)).unflatten(0, (roles, stride)).permute(1, 2, 0, 3)
    y_BgSRF = torch.einsum("bgsc,scy->bgsy", x_BgSC, by_phase_SCRF.flatten(2)).unflatten(3, (roles, features))
    if bias_WF is not None:
        y_BgSRF = y_BgSRF + F.pad(bias_WF, beyond).unflatten(0, (roles, stride)).transpose(0, 1)
    return y_BgSRF.flatten(1, 2)[:, first - start : stop - start]


def gates(z_BTZF: torch.Tensor, *, window: int, stride: int, origin: int = 0) -> torch.Tensor:
    """The weights that `pool` pools with, as windows hold them: ``softmax_i`` of the logits over the offsets that exist, [B, N, W, F].

    Args:
        z_BTZF: as `pool` takes them, with F = G*E.
    """
    grid = (window, stride, origin)
    return torch.cat(_by_role(z_BTZF, grid, visibility.num_windows(z_BTZF.shape[1], *grid), float("-inf")), dim=2).softmax(dim=2)


def pool(z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, *, window: int, stride: int, origin: int = 0) -> torch.Tensor:
    """``summary_j = sum_i alpha_{j,i} * u_{j,i}`` with ``alpha_j = softmax_i`` of the logits, over the offsets that exist: [B, N, G, D].

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


def _groups_read(grid: Grid, count: int) -> int:
    """Groups of S tokens that `count` windows read."""
    return count + math.ceil(grid[0] / grid[1]) - 1 if count else 0


# one weight per offset and kv head: what takes time beside the two sums is the number of calls, so all that shapes decide stands in tables --------------


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """Where each element lies that a pooling of one shape takes up, counted through its tensor. Offsets come first, for the softmax's sake: [W, B, N, G]."""

    shape: tuple[int, int, int, int]  # W, B, N, G
    absent: torch.Tensor | None  # [W, 1, N, 1] which offsets may lie before position 0
    logit: torch.Tensor  # `_rows_read` of the logits; none for uniform gates
    row: torch.Tensor  # `_rows_read` of the payload, window by window
    row_from: torch.Tensor  # [B*N*G] where each window's begin
    logit_reader: torch.Tensor  # `_readers` of the logits
    reader: torch.Tensor  # `_readers` of the payload
    window: torch.Tensor  # their windows
    window_from: torch.Tensor  # [B*T*U*G] where each row's begin
    product: torch.Tensor  # `_products_read`


def _tables(z_shape: Sequence[int], u_shape: Sequence[int], grid: Grid, device: torch.device) -> _Tables:
    """Of logits [B, T, Z, G] and payload [B, T, U, G]. Kept: small ones (2 MB at most) of many shapes, as a training has them, large ones of a few."""
    keep = _small_tables if math.prod(u_shape) * math.ceil(grid[0] / grid[1]) <= 2**16 else _large_tables
    return keep(z_shape, u_shape, grid, device)


def _made_tables(z_shape: Sequence[int], u_shape: Sequence[int], grid: Grid, device: torch.device) -> _Tables:
    batch, length, roles, groups = u_shape
    window, stride, origin = grid
    count = visibility.num_windows(length, *grid)
    with torch.inference_mode(False):  # what is kept must also serve a later backward pass
        token_WN = origin + stride * torch.arange(count, device=device) + torch.arange(window, device=device)[:, None]
        reader, of_window = _readers(u_shape, grid, device)
        tables = {
            "logit": _rows_read(z_shape, grid, device).flatten() if z_shape[2] else torch.empty(0, device=device),
            "row": _rows_read(u_shape, grid, device).flatten(1).mT.flatten(),
            "row_from": torch.arange(batch * count * groups, device=device) * window,
            "logit_reader": _readers(z_shape, grid, device)[0] if z_shape[2] else torch.empty(0, device=device),
            "reader": reader,
            "window": of_window,
            "window_from": torch.arange(batch * length * roles * groups, device=device) * (math.ceil(window / stride) // roles),
            "product": _products_read(u_shape, grid, device).flatten(),
        }
        absent = (token_WN < 0)[:, None, :, None] if origin < 0 else None
        kept = _index_type(tables)
        return _Tables(shape=(window, batch, count, groups), absent=absent, **{name: x.to(kept).contiguous() for name, x in tables.items()})


_small_tables, _large_tables = lru_cache(maxsize=64)(_made_tables), lru_cache(maxsize=8)(_made_tables)


def _rows_read(shape: Sequence[int], grid: Grid, device: torch.device) -> torch.Tensor:
    """The row of [B, T, Z, G] that each offset of a window reads: [W, B, N, G]. One before position 0, whose weight is 0, has that of the window's last."""
    (batch, length, roles, groups), (window, stride, origin) = shape, grid
    offset_W1 = torch.arange(window, device=device)[:, None]
    token_WN = origin + stride * torch.arange(visibility.num_windows(length, *grid), device=device) + offset_W1
    row_WN = token_WN * roles + (offset_W1 // stride).clamp(max=roles - 1)
    row_WN = torch.where(token_WN < 0, row_WN[-1:], row_WN)
    row_WBN = torch.arange(batch, device=device)[:, None] * length * roles + row_WN[:, None]
    return row_WBN[..., None] * groups + torch.arange(groups, device=device)


def _readers(shape: Sequence[int], grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: the weights of [W, B, N, G] that each row of [B, T, Z, G] enters with, and their windows of [B, N, G]: [B*T*Z*G*(R/Z)] each.

    Where no window reads a row in a role, the weight is the one after the last, and the window any.
    """
    (batch, length, roles, groups), (window, stride, origin) = shape, grid
    count, spans = visibility.num_windows(length, *grid), math.ceil(window / stride)
    place_T1, role_R = torch.arange(length, device=device)[:, None] - origin, torch.arange(spans, device=device)
    n_TR, offset_TR = place_T1 // stride - role_R, role_R * stride + place_T1 % stride
    read_TR = (n_TR >= 0) & (n_TR < count) & (offset_TR < window)
    n_BTR = torch.arange(batch, device=device)[:, None, None] * count + n_TR.clamp(0, max(count - 1, 0))
    by_role = (length, roles, 1, spans // roles)
    window_BTZGR = n_BTR.view(batch, *by_role) * groups + torch.arange(groups, device=device)[:, None]
    weight_BTZGR = offset_TR.view(by_role) * (batch * count * groups) + window_BTZGR
    return weight_BTZGR.masked_fill(~read_TR.view(by_role), window * batch * count * groups).flatten(), window_BTZGR.flatten()


def _products_read(shape: Sequence[int], grid: Grid, device: torch.device) -> torch.Tensor:
    """Where `_products` has the product of a window's gradient and its payload of [B, T, U, G] at each offset: [W, B, N, G]."""
    (batch, length, roles, groups), (window, stride, _) = shape, grid
    count, per = visibility.num_windows(length, *grid), math.ceil(window / stride) // roles
    role, phase = (x.view(-1, 1, 1, 1) for x in (torch.arange(window, device=device) // stride, torch.arange(window, device=device) % stride))
    size, head = _groups_read(grid, count), torch.arange(groups, device=device)
    group = torch.arange(batch, device=device)[:, None, None] * size + torch.arange(count, device=device)[:, None] + role
    payload, turn = role // per, per - 1 - role % per
    if _heads_together(groups):
        return ((((payload * batch * size + group) * per + turn) * groups + head) * stride + phase) * groups + head
    return (((payload * groups + head) * batch * size + group) * per + turn) * stride + phase


def _index_type(tables: dict[str, torch.Tensor]) -> torch.dtype:
    """One for all tables, as the sums need; the narrower, the faster."""
    most = max((int(x.max()) for x in tables.values() if x.numel()), default=0)
    return torch.int32 if most < 2**31 else torch.int64


def _scalar_forward(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    tables = _tables(z_BTZGE.shape[:4], u_BTUGD.shape[:4], grid, u_BTUGD.device)
    weights, lse = _scalar_weights(z_BTZGE, u_BTUGD, tables, want_lse)
    alpha_WK = weights[:-1].view(tables.shape[0], -1)
    # Detached, or the sum would also keep what its own backward pass needs.
    out = _summed(u_BTUGD.detach().to(alpha_WK.dtype), tables.row, tables.row_from, alpha_WK.mT.reshape(-1))
    return out.view(*tables.shape[1:], u_BTUGD.shape[4]).to(u_BTUGD.dtype), lse, weights


def _scalar_backward(
    dout_BNGD: torch.Tensor, z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not dout_BNGD.shape[1]:
        return torch.zeros_like(z_BTZGE), torch.zeros_like(u_BTUGD)
    tables = _tables(z_BTZGE.shape[:4], u_BTUGD.shape[:4], grid, u_BTUGD.device)
    weights = _scalar_weights(z_BTZGE, u_BTUGD, tables, False)[0] if weights is None else weights
    wide = weights.dtype
    dout_BNGD = dout_BNGD.to(wide)
    if z_BTZGE.shape[2]:
        alpha_WK = weights[:-1].view(tables.shape[0], -1)
        dalpha_WK = _products(dout_BNGD, u_BTUGD.to(wide), grid).view(-1).index_select(0, tables.product).view(alpha_WK.shape)
        gradients, ds_WK = _and_zero(alpha_WK)
        torch._softmax_backward_data(dalpha_WK, alpha_WK, 0, wide, grad_input=ds_WK)
        read = gradients.index_select(0, tables.logit_reader)
        dz = (read if read.numel() == z_BTZGE.numel() else read.view(z_BTZGE.numel(), -1).sum(dim=1)).view(z_BTZGE.shape).to(z_BTZGE.dtype)
    else:
        dz = torch.zeros_like(z_BTZGE)
    du = _summed(dout_BNGD, tables.window, tables.window_from, weights.index_select(0, tables.reader))
    return dz, du.view(u_BTUGD.shape).to(u_BTUGD.dtype)


def _scalar_weights(z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, tables: _Tables, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax over W of [W, B, N, G], counted through and followed by a 0, in fp32 or wider; log-sum-exp of the logits [B, N, G, 1]."""
    wide = torch.promote_types(z_BTZGE.dtype if z_BTZGE.shape[2] else u_BTUGD.dtype, torch.float32)
    if z_BTZGE.shape[2]:
        s_WK = z_BTZGE.reshape(-1).index_select(0, tables.logit).view(tables.shape[0], -1).to(wide)
    else:
        s_WK = torch.zeros(tables.shape[0], math.prod(tables.shape[1:]), dtype=wide, device=u_BTUGD.device)
    if tables.absent is not None:
        s_WK.view(tables.shape).masked_fill_(tables.absent, float("-inf"))
    weights, alpha_WK = _and_zero(s_WK)
    torch.softmax(s_WK, dim=0, out=alpha_WK)
    # The largest weight is exp(largest logit - lse).
    return weights, (s_WK.amax(dim=0) - alpha_WK.amax(dim=0).log()).view(*tables.shape[1:], 1) if want_lse else None


def _and_zero(like_WK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for W*K values and a 0 after them, and the view [W, K] to fill."""
    room = like_WK.new_zeros(like_WK.numel() + 1)
    return room, room[:-1].view(like_WK.shape)


def _summed(x: torch.Tensor, row: torch.Tensor, row_from: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``sum_i weight[i] * x[row[i]]`` from each `row_from` to the next, rows of `x` [..., D] counted through: [K, D]. No other row is read."""
    return F.embedding_bag(row, x.reshape(-1, x.shape[-1]), row_from, mode="sum", per_sample_weights=weight)


def _heads_together(groups: int) -> bool:
    """Few heads share a product, of which the diagonal is taken: fewer and larger ones are faster."""
    return groups <= 4


def _products(dout_BNGD: torch.Tensor, u_BTUGD: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``<dout_j, u_t>`` of each group of S tokens and the windows that read it, the last role first.

    [U, B*g, R/U, G, S, G] where heads share a product, else [U, G, B*g, R/U, S].
    """
    stride = grid[1]
    batch, count, groups, dim = dout_BNGD.shape
    spans, roles, size = math.ceil(grid[0] / stride), u_BTUGD.shape[2], _groups_read(grid, count)
    many, per = batch * size, spans // roles  # groups; window roles that share a payload
    u_XSUGD = token_groups(u_BTUGD, stride=stride, start=grid[2], groups=size).flatten(0, 1)
    # With R - 1 rows before each sequence, the windows that read group x stand from row x on, the last role first.
    rows_XGD = dout_BNGD.new_zeros(many + spans - 1, groups, dim)
    rows_XGD[:many].view(batch, size, groups, dim)[:, spans - 1 :] = dout_BNGD
    together = _heads_together(groups)
    found = dout_BNGD.new_empty((roles, many, per * groups, stride * groups) if together else (roles, groups, many, per, stride))
    for role in range(roles):
        first = (spans - 1 - role * per - (per - 1)) * groups * dim
        if together:
            dout_XYD = rows_XGD.as_strided((many, per * groups, dim), (groups * dim, dim, 1), first)
            torch.bmm(dout_XYD, u_XSUGD[:, :, role].flatten(1, 2).mT, out=found[role])
        else:
            dout_XRGD = rows_XGD.as_strided((many, per, groups, dim), (groups * dim, groups * dim, dim, 1), first)
            for head in range(groups):
                torch.bmm(dout_XRGD[:, :, head], u_XSUGD[:, :, role, head].mT, out=found[role, head])
    return found


# one weight per channel: a few passes over a part of the batch that stays in the cache ---------------------------------------------------------------


def _by_role(x_BTZF: torch.Tensor, grid: Grid, count: int, fill: float) -> list[torch.Tensor]:
    """Of each role, what the windows find there: views [B, N, offsets of the role, F], `fill` before row 0. One stored role serves all where Z = 1."""
    window, stride, origin = grid
    x_BgSZF = token_groups(x_BTZF, stride=stride, start=origin, groups=_groups_read(grid, count), fill=fill)
    last = x_BTZF.shape[2] - 1
    return [x_BgSZF[:, r : r + count, : window - r * stride, min(r, last)] for r in range(math.ceil(window / stride))]


def _gradient_rows(like_BTZF: torch.Tensor, grid: Grid, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows [B, T, Z, F] for a gradient, and views of them as `_by_role` gives: [B, N, offsets of the role, F].

    Zeros stand where no window reads. The first role of each stored one must be written, later ones added; nothing is written twice.
    """
    window, stride, origin = grid
    batch, length, roles, features = like_BTZF.shape
    groups, spans = _groups_read(grid, count), math.ceil(window / stride)
    size = (batch, max(groups * stride, length - origin), roles, features)
    rows = torch.empty(size, dtype=dtype, device=like_BTZF.device)
    rows[:, groups * stride :] = 0
    read = rows[:, : groups * stride].unflatten(1, (groups, stride)) if groups else rows[:, :0].reshape(batch, 0, stride, roles, features)
    for role in range(roles):
        for unread in (read[:, :role, :, role], read[:, role + count :, :, role], read[:, :, window - role * stride :, role]):
            unread.zero_()
    return rows[:, -origin : length - origin], [read[:, r : r + count, : window - r * stride, min(r, roles - 1)] for r in range(spans)]


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


def _exp_(x: torch.Tensor) -> torch.Tensor:
    """``exp``, in place. Where `torch.exp` leaves it to a library of another maker than the CPU's, `exp2` takes a third of the time."""
    return x.mul_(1 / math.log(2)).exp2_()


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
            alphas = [_exp_(s - lse) for s in _by_role(z, grid, count, float("-inf"))]
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
