"""Pool, attend, decode and append as PyTorch operators: the one door to the kernels, for every device, under autograd and `torch.compile`.

Forward and backward are separate operators, each with a fake that shares the counts of `visibility`. On a CUDA device they run the Triton kernels,
elsewhere, and where Triton is not installed, the plain PyTorch of `by_role`, `blocked` and `stream`. Triton is imported on the first CUDA call.
The log-sum-exp that pool and attend return has no gradient, and append has none at all.

A model with a variant goes through these operators on the kinds of device in `OPERATED`; on others it calls `views`, `by_role` and `blocked` directly,
which is faster there: weights are kept for the backward pass, and no dispatch stands in between.

Shapes: B batch, T tokens, N summaries, H query heads, G kv heads, D head dim of keys, V of values, P bypassed tokens, E gate channels (1 or D),
Z and U roles of logits and payload. Packed sequences (`cu_seqlens`) have B = 1 and one length of tokens, and of summaries, after another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mitigate.kernels import arguments, blocked, by_role, stream, visibility

OPERATED = frozenset({"cuda"})  # kinds of device on which a model's pooling and attention are these operators
TRITON = frozenset({"cuda"})  # kinds of device on which the operators run Triton kernels, where it is installed


def backend(device: torch.device | str) -> str:
    """What really runs on a device; recorded with every result."""
    where = torch.device(device)
    if runs_triton(where):
        return f"triton-{metadata.version('triton')}"
    return f"torch-{where.type}-blocked"


def operated(device: torch.device) -> bool:
    """Whether a model on this device pools and attends through the operators."""
    return device.type in OPERATED


def runs_triton(device: torch.device) -> bool:
    """Whether the operators run Triton kernels on this device."""
    return device.type in TRITON and has_triton()


def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False


# pool ------------------------------------------------------------------------------------------------------------------------------------------------


def pool(z_BTZGE: Tensor | None, u_BTUGD: Tensor, *, window: int, stride: int, origin: int = 0, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``summary_j = sum_i alpha_{j,i} * u_{j,i}`` with ``alpha_j = softmax_i`` of the logits over the tokens of window j that exist.

    Args:
        z_BTZGE: gate logits by role, bias included; Z = 1: one logit for all roles; None: uniform gates.
        u_BTUGD: payload by role; U = 1: one payload for all roles.
        cu_seqlens: first token of each packed sequence and the total, int [sequences + 1]; read on the host.

    Returns:
        summaries [B, N, G, D] in the payload's dtype; log-sum-exp [B, N, G, E] in fp32 (fp64 for fp64 logits).

    Raises:
        TypeError: numbers that are not floating-point.
        ValueError: a grid out of its bounds, shapes that do not fit it, sequences that are not all of the tokens.
    """
    arguments.check_grid("pool", window, stride, origin)
    arguments.check_pool("pool", z_BTZGE, u_BTUGD, window, stride)
    z = u_BTUGD.new_empty(*u_BTUGD.shape[:2], 0, u_BTUGD.shape[3], 1) if z_BTZGE is None else z_BTZGE
    if cu_seqlens is None:
        windows = visibility.num_windows(u_BTUGD.shape[1], window, stride, origin)
    else:
        windows = sum(visibility.num_windows(n, window, stride, origin) for n in arguments.packed_lengths(cu_seqlens, u_BTUGD))
    found: tuple[Tensor, Tensor] = _pool(z, u_BTUGD, window, stride, origin, windows, cu_seqlens)
    return found


@torch.library.custom_op("mitigate::pool", mutates_args=())
def _pool(z: Tensor, u: Tensor, window: int, stride: int, origin: int, windows: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if runs_triton(u.device):
        from mitigate.kernels import pool as kernel

        return kernel.pool_fwd(_unit(z), _unit(u), window=window, stride=stride, origin=origin, cu_seqlens=cu_seqlens)
    grid = (window, stride, origin)
    if cu_seqlens is None:
        return _pooled(z, u, grid)
    parts = [_pooled(z[:, rows], u[:, rows], grid) for rows in _slices(cu_seqlens)]
    return _joined(parts, like=(u.new_empty(1, 0, *u.shape[3:]), u.new_empty(1, 0, u.shape[3], _channels(z), dtype=_wide(z, u))))


def _pooled(z: Tensor, u: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    out, lse, _ = by_role.pool_forward(z, u, grid, want_lse=True)
    assert lse is not None
    return out.contiguous(), lse.contiguous()


@_pool.register_fake
def _(z: Tensor, u: Tensor, window: int, stride: int, origin: int, windows: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, _, _, groups, dim = u.shape
    return u.new_empty(batch, windows, groups, dim), u.new_empty(batch, windows, groups, _channels(z), dtype=_wide(z, u))


@torch.library.custom_op("mitigate::pool_backward", mutates_args=())
def _pool_backward(
    dout: Tensor, z: Tensor, u: Tensor, out: Tensor, lse: Tensor, window: int, stride: int, origin: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if runs_triton(u.device):
        from mitigate.kernels import pool as kernel

        dz, du = kernel.pool_bwd(dout, _unit(z), _unit(u), out, lse, window=window, stride=stride, origin=origin, cu_seqlens=cu_seqlens)
        return torch.zeros_like(z) if dz is None else dz, du
    grid = (window, stride, origin)
    if cu_seqlens is None:
        return _contiguous(by_role.pool_backward(dout, z, u, out, lse, grid))
    counts = [visibility.num_windows(n, *grid) for n in _lengths(cu_seqlens)]
    banks = zip(dout.split(counts, dim=1), out.split(counts, dim=1), lse.split(counts, dim=1), _slices(cu_seqlens), strict=True)
    parts = [by_role.pool_backward(g, z[:, rows], u[:, rows], o, m, grid) for g, o, m, rows in banks]
    return _joined(parts, like=(z[:, :0], u[:, :0]))


@_pool_backward.register_fake
def _(dout: Tensor, z: Tensor, u: Tensor, out: Tensor, lse: Tensor, window: int, stride: int, origin: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), u.new_empty(u.shape)


def _pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, u, window, stride, origin, _, cu_seqlens = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(z, u, out, lse)
    ctx.grid, ctx.cu_seqlens = (window, stride, origin), cu_seqlens


def _pool_autograd(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dz, du = _pool_backward(dout, *ctx.saved_tensors, *ctx.grid, ctx.cu_seqlens)
    return dz, du, None, None, None, None, None


_pool.register_autograd(_pool_autograd, setup_context=_pool_context)


# attend ----------------------------------------------------------------------------------------------------------------------------------------------


def attend(
    q_BTHD: Tensor,
    ks_BNGD: Tensor,
    vs_BNGV: Tensor,
    k_BTGD: Tensor,
    v_BTGV: Tensor,
    *,
    window: int,
    stride: int,
    origin: int = 0,
    local: int,
    scale: float,
    kb_BPGD: Tensor | None = None,
    vb_BPGV: Tensor | None = None,
    pos_b: Tensor | None = None,
    q_start: int | None = None,
    k_start: int = 0,
    cu_seqlens: Tensor | None = None,
    cu_bypass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One joint softmax over summaries, exact tokens and bypassed tokens.

    Args:
        q_BTHD: queries; G divides H.
        ks_BNGD, vs_BNGV: summaries, window 0 first.
        k_BTGD, v_BTGV: exact tokens from position `k_start` on.
        local: how many last tokens stay exact.
        kb_BPGD, vb_BPGV, pos_b: bypassed tokens and their positions, int [P], increasing. Seen before the exact interval, so that none counts twice.
        q_start: position of the first query; by default the queries are the last of the exact tokens.
        cu_seqlens, cu_bypass: where packed sequences start among tokens and bypassed tokens, int [sequences + 1]; read on the host.

    Returns:
        out [B, T, H, V]; log-sum-exp of the logits [B, T, H] in fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError: several dtypes.
        ValueError: a grid out of its bounds, shapes that do not fit, banks that lack what a query sees.
    """
    arguments.check_grid("attend", window, stride, origin)
    arguments.check_local("attend", local)
    arguments.check_banks("attend", q_BTHD, "BTHD", ks=ks_BNGD, vs=vs_BNGV, k=k_BTGD, v=v_BTGV, kb=kb_BPGD, vb=vb_BPGV, pos_b=pos_b)
    if cu_seqlens is not None and (q_start is not None or k_start):
        raise ValueError(f"attend: packed sequences start at position 0, so q_start and k_start must not be given, got {q_start} and {k_start}")
    kb = k_BTGD[:, :0] if kb_BPGD is None else kb_BPGD
    vb = v_BTGV[:, :0] if vb_BPGV is None else vb_BPGV
    pos = torch.empty(0, dtype=torch.int32, device=q_BTHD.device) if pos_b is None else pos_b
    first = k_start + k_BTGD.shape[1] - q_BTHD.shape[1] if q_start is None else q_start
    found: tuple[Tensor, Tensor] = _attend(
        q_BTHD, ks_BNGD, vs_BNGV, k_BTGD, v_BTGV, kb, vb, pos, window, stride, origin, local, scale, first, k_start, cu_seqlens, cu_bypass
    )
    return found


@torch.library.custom_op("mitigate::attend", mutates_args=())
def _attend(
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    pos: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    cu_bypass: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if runs_triton(q.device):
        from mitigate.kernels import attend as kernel

        rest = (window, stride, origin, local, scale, q_start, k_start, cu_seqlens, cu_bypass)
        return kernel.attend_fwd(_unit(q), _unit(ks), _unit(vs), _unit(k), _unit(v), **_named(rest, kb, vb, pos))

    def one(parts: Sequence[Tensor], plan: blocked.Plan) -> tuple[Tensor, ...]:
        out, lse, _ = blocked.forward(parts, plan, scale, want_lse=True)
        assert lse is not None
        return out.transpose(1, 2), lse.transpose(1, 2)

    if not q.shape[2]:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=_wide(q))
    grid = (window, stride, origin)
    if cu_seqlens is None:
        arguments.check_places(pos)
    if cu_seqlens is None and q.shape[1]:
        arguments.check_positions(grid, local, queries=q.shape[1], q_start=q_start, exact=k.shape[1], k_start=k_start, summaries=ks.shape[1])
    calls = _calls((q, ks, vs, k, v, kb, vb), pos, grid, local, q_start, k_start, cu_seqlens, cu_bypass)
    empty = (q.new_empty(q.shape[0], 0, q.shape[2], v.shape[3]), q.new_empty(q.shape[0], 0, q.shape[2], dtype=_wide(q)))
    return _joined([one(parts, plan) for parts, plan in calls], like=empty)


@_attend.register_fake
def _(
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    pos: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    cu_bypass: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[3]), q.new_empty(batch, length, heads, dtype=_wide(q))


@torch.library.custom_op("mitigate::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    pos: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    cu_bypass: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(q.device):
        from mitigate.kernels import attend as kernel

        rest = (window, stride, origin, local, scale, q_start, k_start, cu_seqlens, cu_bypass)
        found = kernel.attend_bwd(dout, _unit(q), _unit(ks), _unit(vs), _unit(k), _unit(v), out, lse, **_named(rest, kb, vb, pos))
        dq, dks, dvs, dk, dv, dkb, dvb = found
        return dq, dks, dvs, dk, dv, torch.zeros_like(kb) if dkb is None else dkb, torch.zeros_like(vb) if dvb is None else dvb
    parts = (q, ks, vs, k, v, kb, vb)
    if not q.shape[2]:
        dq, dks, dvs, dk, dv, dkb, dvb = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in parts)
        return dq, dks, dvs, dk, dv, dkb, dvb
    calls = _calls(parts, pos, (window, stride, origin), local, q_start, k_start, cu_seqlens, cu_bypass)
    douts = [dout] if cu_seqlens is None else [dout[:, rows] for rows in _slices(cu_seqlens)]
    each = [
        tuple(x.transpose(1, 2) for x in blocked.backward(banks, incoming.transpose(1, 2), plan, scale))
        for (banks, plan), incoming in zip(calls, douts, strict=True)
    ]
    dq, dks, dvs, dk, dv, dkb, dvb = _joined(each, like=tuple(x[:, :0] for x in parts))
    return dq, dks, dvs, dk, dv, dkb, dvb


@_attend_backward.register_fake
def _(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    pos: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    cu_bypass: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dks, dvs, dk, dv, dkb, dvb = (x.new_empty(x.shape) for x in (q, ks, vs, k, v, kb, vb))
    return dq, dks, dvs, dk, dv, dkb, dvb


def _attend_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *inputs[:8])
    ctx.rest = inputs[8:]


def _attend_autograd(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_attend_backward(dout, *ctx.saved_tensors, *ctx.rest), *[None] * 10)


_attend.register_autograd(_attend_autograd, setup_context=_attend_context)


# decode ----------------------------------------------------------------------------------------------------------------------------------------------


def decode(
    q_BHD: Tensor,
    ks_BNGD: Tensor,
    vs_BNGV: Tensor,
    k_BXGD: Tensor,
    v_BXGV: Tensor,
    *,
    window: int,
    stride: int,
    origin: int = 0,
    local: int,
    scale: float,
    position: int,
    kb_BPGD: Tensor | None = None,
    vb_BPGV: Tensor | None = None,
) -> Tensor:
    """One query per sequence, at the same position, over banks that hold what it sees and nothing else, as a cache does.

    Args:
        q_BHD: queries; G divides H.
        ks_BNGD, vs_BNGV: the ``num_completed(position)`` summaries, window 0 first.
        k_BXGD, v_BXGV: the exact tokens from ``exact_lo(position)`` to the query's own.
        kb_BPGD, vb_BPGV: bypassed tokens, all before those.

    Returns:
        out [B, H, V].

    Raises:
        TypeError: several dtypes.
        ValueError: a grid out of its bounds, shapes that do not fit, a bank that does not hold what the query sees.
    """
    arguments.check_grid("decode", window, stride, origin)
    arguments.check_local("decode", local)
    if (kb_BPGD is None) != (vb_BPGV is None):
        raise ValueError("decode: kb and vb come together")
    none_bypassed = {"kb": None, "vb": None, "pos_b": None}
    bypassed = none_bypassed if kb_BPGD is None else {"kb": kb_BPGD, "vb": vb_BPGV, "pos_b": kb_BPGD.new_empty(kb_BPGD.shape[1])}
    arguments.check_banks("decode", q_BHD, "BHD", ks=ks_BNGD, vs=vs_BNGV, k=k_BXGD, v=v_BXGV, **bypassed)
    if position < 0:
        raise ValueError(f"decode: position must be at least 0, got {position}")
    low = visibility.exact_lo(position, window, stride, origin, local)
    counts = (visibility.num_completed(position, window, stride, origin), position + 1 - low)
    if (ks_BNGD.shape[1], k_BXGD.shape[1]) != counts:
        held = f"{ks_BNGD.shape[1]} and {k_BXGD.shape[1]}"
        raise ValueError(f"decode: the query at {position} sees {counts[0]} summaries and {counts[1]} exact tokens, the banks hold {held}")
    kb = k_BXGD[:, :0] if kb_BPGD is None else kb_BPGD
    vb = v_BXGV[:, :0] if vb_BPGV is None else vb_BPGV
    if kb.shape[1] and not low:
        raise ValueError(f"decode: the query at {position} sees every token exactly, but the banks hold {kb.shape[1]} bypassed ones")
    out: Tensor = _decode(q_BHD, ks_BNGD, vs_BNGV, k_BXGD, v_BXGV, kb, vb, window, stride, origin, local, scale, position)
    return out


@torch.library.custom_op("mitigate::decode", mutates_args=())
def _decode(
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    position: int,
) -> Tensor:
    if runs_triton(q.device):
        from mitigate.kernels import decode as kernel

        # Every bypassed token given is seen; position 0 says so without a list of them.
        bank: dict[str, Any] = {"kb_BPGD": _unit(kb), "vb_BPGV": _unit(vb), "pos_b": kb.new_zeros(kb.shape[1], dtype=torch.int32)} if kb.shape[1] else {}
        first = position + 1 - k.shape[1]
        grid: dict[str, Any] = {"window": window, "stride": stride, "origin": origin, "local": local, "scale": scale}
        return kernel.decode_fwd(_unit(q), _unit(ks), _unit(vs), _unit(k), _unit(v), **grid, position=position, k_start=first, **bank)[0]
    keys, values = _entries(ks, kb, k), _entries(vs, vb, v)
    return blocked.attend(q[:, :, None], keys, values, None, scale)[:, :, 0].contiguous()


@_decode.register_fake
def _(
    q: Tensor,
    ks: Tensor,
    vs: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    window: int,
    stride: int,
    origin: int,
    local: int,
    scale: float,
    position: int,
) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[3])


@torch.library.custom_op("mitigate::decode_backward", mutates_args=())
def _decode_backward(
    dout: Tensor, q: Tensor, ks: Tensor, vs: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In plain PyTorch on every device: training reads whole sequences, so that a gradient through a decode step is rare."""
    wide, groups = _wide(q), k.shape[2]
    keys, values = _entries(ks, kb, k).to(wide), _entries(vs, vb, v).to(wide)
    q_BGRD, dout_BGRV = (x.unflatten(1, (groups, -1)).to(wide) for x in (q, dout))
    alpha = (q_BGRD @ keys.mT * scale).softmax(dim=-1)
    dlogits = torch._softmax_backward_data(dout_BGRV @ values.mT, alpha, -1, wide) * scale
    counts = [x.shape[1] for x in (ks, kb, k)]
    dks, dkb, dk = (dlogits.mT @ q_BGRD).transpose(1, 2).split(counts, dim=1)
    dvs, dvb, dv = (alpha.mT @ dout_BGRV).transpose(1, 2).split(counts, dim=1)
    found = ((dlogits @ keys).flatten(1, 2), dks, dvs, dk, dv, dkb, dvb)
    dq, dks, dvs, dk, dv, dkb, dvb = (x.to(q.dtype, copy=True, memory_format=torch.contiguous_format) for x in found)
    return dq, dks, dvs, dk, dv, dkb, dvb


@_decode_backward.register_fake
def _(
    dout: Tensor, q: Tensor, ks: Tensor, vs: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dks, dvs, dk, dv, dkb, dvb = (x.new_empty(x.shape) for x in (q, ks, vs, k, v, kb, vb))
    return dq, dks, dvs, dk, dv, dkb, dvb


def _entries(summary: Tensor, bypass: Tensor, exact: Tensor) -> Tensor:
    """Banks side by side, heads first: [B, G, M, D]."""
    return torch.cat([x.transpose(1, 2) for x in (summary, bypass, exact)], dim=2)


def _decode_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scale = inputs[11]


def _decode_autograd(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return (*_decode_backward(dout, *ctx.saved_tensors, ctx.scale), *[None] * 6)


_decode.register_autograd(_decode_autograd, setup_context=_decode_context)


# append ----------------------------------------------------------------------------------------------------------------------------------------------


def append(state: stream.State, z_BTZGE: Tensor | None, u_BTUGD: Tensor) -> Tensor:
    """Take in the next T tokens of a stream; changes the state in place.

    Args:
        state: of `stream.start`, on the device of the tokens; sums wider than fp32 are plain PyTorch's on every device.
        z_BTZGE: gate logits by role, bias included; Z = 1: one logit for all roles; None: uniform gates.
        u_BTUGD: payload by role; U = 1: one payload for all roles.

    Returns:
        the summaries that became complete, [B, n, G, D] in the payload's dtype: windows ``num_windows(seen before) ..``, in order.

    Raises:
        TypeError: numbers that are not floating-point.
        ValueError: shapes that do not fit the state.
    """
    stream.check(state, z_BTZGE, u_BTUGD)
    z = u_BTUGD.new_empty(*u_BTUGD.shape[:2], 0, u_BTUGD.shape[3], 1) if z_BTZGE is None else z_BTZGE
    grid = (state.window, state.stride, state.origin)
    seen, after = state.seen, state.seen + u_BTUGD.shape[1]
    count = visibility.num_windows(after, *grid) - visibility.num_windows(seen, *grid)
    found: Tensor = _append(z, u_BTUGD, state.most, state.total, state.weighted, *grid, seen, count)
    state.seen = after
    return found


@torch.library.custom_op("mitigate::append", mutates_args=("most", "total", "weighted"))
def _append(z: Tensor, u: Tensor, most: Tensor, total: Tensor, weighted: Tensor, window: int, stride: int, origin: int, seen: int, count: int) -> Tensor:
    if runs_triton(u.device) and most.dtype == torch.float32:
        from mitigate.kernels import append as kernel

        return kernel.append(_unit(z), _unit(u), most, total, weighted, window=window, stride=stride, origin=origin, seen=seen)
    state = stream.State(window=window, stride=stride, origin=origin, seen=seen, most=most, total=total, weighted=weighted)
    return stream.append(state, z, u)


@_append.register_fake
def _(z: Tensor, u: Tensor, most: Tensor, total: Tensor, weighted: Tensor, window: int, stride: int, origin: int, seen: int, count: int) -> Tensor:
    return u.new_empty(u.shape[0], count, *u.shape[3:])


# helpers ---------------------------------------------------------------------------------------------------------------------------------------------


def _calls(
    parts: Sequence[Tensor],
    pos: Tensor,
    grid: tuple[int, int, int],
    local: int,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    cu_bypass: Tensor | None,
) -> list[tuple[list[Tensor], blocked.Plan]]:
    """Heads before tokens, and the plan: once, or for each packed sequence."""
    turned = [x.transpose(1, 2) for x in parts]
    q, k = turned[0], turned[3]
    repeat = q.shape[1] // max(k.shape[1], 1)

    def planned(banks: list[Tensor], positions: Tensor, start: int, held_from: int) -> tuple[list[Tensor], blocked.Plan]:
        queries = range(start, start + banks[0].shape[2])
        length = held_from + banks[3].shape[2]
        plan = blocked.plan_with_bank(length, grid, local=local, bank_P=positions, repeat=repeat, like=q, queries=queries, held_from=held_from)
        blocked.check(banks, plan)
        return banks, plan

    if cu_seqlens is None:
        return [planned(turned, pos, q_start, k_start)]
    lengths = arguments.sequence_lengths("attend", "cu_seqlens", cu_seqlens, parts[0].shape[1])
    counts = [visibility.num_windows(n, *grid) for n in lengths]
    arguments.check_packed(parts[0], parts[3], parts[1], sum(counts))
    bypassed = arguments.bypass_lengths(cu_bypass, parts[5].shape[1], sequences=len(lengths))
    sizes = (lengths, counts, counts, lengths, lengths, bypassed, bypassed)
    split = zip(*[x.split(size, dim=2) for x, size in zip(turned, sizes, strict=True)], strict=True)
    return [planned(list(banks), positions, 0, 0) for banks, positions in zip(split, pos.split(bypassed), strict=True)]


def _named(rest: tuple[Any, ...], kb: Tensor, vb: Tensor, pos: Tensor) -> dict[str, Any]:
    """Keyword arguments of the Triton launchers."""
    names = ("window", "stride", "origin", "local", "scale", "q_start", "k_start", "cu_seqlens", "cu_bypass")
    bank = {"kb_BPGD": _unit(kb), "vb_BPGV": _unit(vb), "pos_b": pos} if kb.shape[1] else {}
    found = dict(zip(names, rest, strict=True)) | bank
    return found | ({"q_start": None, "k_start": 0} if found["cu_seqlens"] is not None else {})


def _unit(x: Tensor) -> Tensor:
    """The Triton kernels take any strides but the last, which must be 1."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _wide(*tensors: Tensor) -> torch.dtype:
    kind = tensors[0].dtype
    for x in tensors[1:]:
        kind = torch.promote_types(kind, x.dtype)
    return torch.promote_types(kind, torch.float32)


def _channels(z: Tensor) -> int:
    return z.shape[4] if z.shape[2] else 1


def _lengths(cu: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(cu.tolist())]


def _slices(cu: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(cu.tolist())]


def _joined(parts: Sequence[tuple[Tensor, ...]], like: tuple[Tensor, ...]) -> Any:
    """Results of packed sequences one after another, contiguous; `like` where there is no sequence."""
    if len(parts) == 1:
        return _contiguous(parts[0])
    return tuple(torch.cat(list(x), dim=1) for x in zip(*parts, strict=True)) if parts else tuple(x.clone() for x in like)


def _contiguous(tensors: tuple[Tensor, ...]) -> Any:
    return tuple(x.contiguous() for x in tensors)
