"""Joint attention over [bypassed tokens | summaries | exact tokens] in plain PyTorch: the path that runs on CPUs.

`attend` takes any mask. `attend_blocked` is for queries at known positions, usually all of a sequence: each block of queries reads only the
summaries that one of its queries sees, its bypassed tokens and one interval of exact tokens, and masks only what not all of its queries see. Work
grows with T * (T/S + local), memory with T. A block is a few large batched products over all sequences and heads, the softmax between them is exact
and in fp32 or wider, and the backward pass is written out, so that nothing is padded, gathered or scattered.
K and V are never repeated for grouped heads: the query heads of a kv head become rows, token by token.

Shapes: B batch, H query heads, G kv heads, R = H/G, T tokens, N summaries, P bypassed tokens, M entries, D head dim, Q queries of a block,
X = B*G problems of a batched product, Y = rows of one of them (T*R or Q*R).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mitigate.kernels import reference, visibility

KEPT_ENTRIES = 128  # mean entries per query up to which the backward pass finds the weights kept; beyond, they are made again and memory stays linear
LONG = 4096  # tokens from which blocks are wider: what a block reads is copied once, and that copy grows with T/S


def additive_mask(visible_TM: torch.Tensor, repeat: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere, stacked once per query head of a group: [..., repeat*T, M]."""
    mask_TM = torch.zeros(visible_TM.shape, dtype=dtype, device=visible_TM.device).masked_fill(~visible_TM, float("-inf"))
    return torch.cat([mask_TM] * repeat, dim=-2)


def attend(q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, mask_RTM: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Softmax attention with an additive mask [R*T, M], None for all visible. Returns [B, H, T, Dv]."""
    batch, heads, length, dim = q_BHTD.shape
    groups = k_BGMD.shape[1]
    q_BGRD = q_BHTD.reshape(batch, groups, heads // groups * length, dim)
    out_BGRD = F.scaled_dot_product_attention(q_BGRD, k_BGMD, v_BGMD, attn_mask=mask_RTM, scale=scale)
    return out_BGRD.reshape(batch, heads, length, v_BGMD.shape[-1])


# plans -----------------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block of queries reads: columns ``[bank[:bank] | summaries[:summaries] | exact[low:stop]]``.

    Attributes:
        first, last: its queries are rows ``first .. last-1`` of those of the plan.
        bank, summaries, low, stop: entries it reads; low and stop are rows of the exact tokens held.
        masks: (first column, one past the last, additive mask [Q*R, columns]) for the columns that not all of its queries see.
    """

    first: int
    last: int
    bank: int
    summaries: int
    low: int
    stop: int
    masks: tuple[tuple[int, int, torch.Tensor], ...]

    @property
    def entries(self) -> int:
        """Columns M."""
        return self.bank + self.summaries + self.stop - self.low


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the queries of a sequence are cut into blocks; depends on integers only, so a caller can keep it.

    Attributes:
        length, queries: exact tokens held, and queries.
        repeat: query heads per kv head.
        bypassed: positions of the bypass bank, int64 [P].
        keep: whether the weights are few enough to be kept for the backward pass.
    """

    length: int
    queries: int
    repeat: int
    bypassed: torch.Tensor
    blocks: tuple[Block, ...]
    keep: bool


def block_length(length: int, repeat: int) -> int:
    """Queries per block. About 64 rows measured best, 32 where that makes the masked edge too wide; no fewer than 16 queries."""
    return 64 if length >= LONG else min(max(64 // repeat, 16), 32)


def plan(
    length: int,
    *,
    window: int,
    stride: int,
    origin: int,
    local: int,
    bypass: tuple[int, ...],
    repeat: int,
    like: torch.Tensor,
    block: int | None = None,
    queries: Sequence[int] | None = None,
) -> Plan:
    """Blocks of a sequence of `length` tokens; `like` gives dtype and device of the masks.

    Args:
        bypass: phases whose tokens stay exact for good.
        repeat: query heads per kv head.
        block: queries per block; None for `block_length`.
        queries: positions of the queries, not decreasing; None for every token.
    """
    everything = torch.arange(length)
    bank_P = everything[reference.is_bypassed(everything, stride=stride, origin=origin, phases=bypass)]
    return plan_with_bank(length, (window, stride, origin), local=local, bank_P=bank_P, repeat=repeat, like=like, block=block, queries=queries)


def plan_with_bank(
    length: int,
    grid: tuple[int, int, int],
    *,
    local: int,
    bank_P: torch.Tensor,
    repeat: int,
    like: torch.Tensor,
    block: int | None = None,
    queries: Sequence[int] | None = None,
    held_from: int = 0,
) -> Plan:
    """The same with the bank's positions given, increasing. `grid` is (window, stride, origin); `held_from` the position of the first exact row.

    Raises:
        ValueError: queries decrease or lie outside the sequence, or need exact tokens before `held_from`.
    """
    asked = range(length) if queries is None else queries if isinstance(queries, range) else tuple(queries)
    wide = torch.promote_types(like.dtype, torch.float32)
    if asked and visibility.exact_lo(asked[0], *grid, local) < held_from:
        raise ValueError(f"plan.held_from must be at most {visibility.exact_lo(asked[0], *grid, local)} for the query at {asked[0]}, got {held_from}")
    size = block or block_length(len(asked), repeat)
    return _plan(length, held_from, asked, grid, local, tuple(bank_P.tolist()), repeat, wide, like.device, size)


@lru_cache(maxsize=64)
def _plan(
    length: int,
    held_from: int,
    queries: Sequence[int],
    grid: tuple[int, int, int],
    local: int,
    bank: tuple[int, ...],
    repeat: int,
    dtype: torch.dtype,
    device: torch.device,
    block: int,
) -> Plan:
    if queries and (queries[0] < 0 or queries[-1] >= length or any(after < before for before, after in pairwise(queries))):
        raise ValueError(f"plan.queries must not decrease and lie in [0, {length}), got {list(queries)}")
    shared: dict[Any, torch.Tensor] = {}
    with torch.inference_mode(False):  # what is kept must also serve a later backward pass
        bank_P = torch.tensor(bank, dtype=torch.int64)
        blocks = tuple(
            _block(first, queries[first : first + block], held_from, grid, local, bank_P, lambda visible: _shared_mask(visible, repeat, dtype, device, shared))
            for first in range(0, len(queries), block)
        )
        bank_P = bank_P.to(device)
    weights = sum(one.entries * (one.last - one.first) for one in blocks)
    return Plan(length=length - held_from, queries=len(queries), repeat=repeat, bypassed=bank_P, blocks=blocks, keep=weights <= KEPT_ENTRIES * len(queries))


def _block(
    first: int,
    queries: Sequence[int],
    held_from: int,
    grid: tuple[int, int, int],
    local: int,
    bank_P: torch.Tensor,
    mask: Callable[[torch.Tensor], torch.Tensor],
) -> Block:
    t_Q1 = torch.tensor(queries)[:, None]
    start, stop = queries[0], queries[-1] + 1
    lo_Q1 = visibility.exact_lo(t_Q1, *grid, local)
    low, high = int(lo_Q1[0]), int(lo_Q1[-1])
    full, summaries = visibility.num_completed(start, *grid), visibility.num_completed(stop - 1, *grid)
    # A bypassed token below exact_lo(t) is seen through the bank. The positions increase, so every count is a prefix.
    bank_full, bank = (int(torch.searchsorted(bank_P, limit)) for limit in (min(low, start + 1), min(high, stop)))
    exact_K = torch.arange(low, stop)
    tail_QM = torch.cat([torch.arange(full, summaries) < visibility.num_completed(t_Q1, *grid), (exact_K >= lo_Q1) & (exact_K <= t_Q1)], dim=1)
    masks = [(bank + full, bank + summaries + stop - low, mask(tail_QM))]
    if bank > bank_full:
        late_P = bank_P[bank_full:bank]
        masks.append((bank_full, bank, mask((late_P < lo_Q1) & (late_P <= t_Q1))))
    rows = {"low": low - held_from, "stop": stop - held_from}
    return Block(first=first, last=first + len(queries), bank=bank, summaries=summaries, masks=tuple(masks), **rows)


def _shared_mask(visible_QM: torch.Tensor, repeat: int, dtype: torch.dtype, device: torch.device, shared: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The additive mask, a row per token and query head. Blocks repeat, so that a long sequence has a few different ones."""
    key = (visible_QM.shape, visible_QM.numpy().tobytes())
    if key not in shared:
        shared[key] = additive_mask(visible_QM, 1, dtype).repeat_interleave(repeat, dim=0).to(device)
    return shared[key]


# attention -------------------------------------------------------------------------------------------------------------------------------------------


def attend_blocked(
    q_BHTD: torch.Tensor, ks_BGND: torch.Tensor, vs_BGND: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """Attention under a `Plan`; the bypass bank is taken from k and v. Returns [B, H, T, Dv], T the plan's queries."""
    kb_BGPD, vb_BGPD = k_BGTD[:, :, plan.bypassed], v_BGTD[:, :, plan.bypassed]
    return attend_banks((q_BHTD, ks_BGND, vs_BGND, k_BGTD, v_BGTD, kb_BGPD, vb_BGPD), plan, scale)


def attend_banks(parts: Sequence[torch.Tensor], plan: Plan, scale: float) -> torch.Tensor:
    """The same with the bank's keys and values given: `parts` are q, ks, vs, k, v, kb, vb."""
    check(parts, plan)
    keep = plan.keep and torch.is_grad_enabled() and any(x.requires_grad for x in parts)
    out: torch.Tensor = _Attend.apply(*parts, plan, scale, keep)  # type: ignore[no-untyped-call]
    return out


def check(parts: Sequence[torch.Tensor], plan: Plan) -> None:
    """Refuse tensors that do not fit the plan.

    Raises:
        ValueError: names the tensor, what it must hold and what it holds.
    """
    q, ks, vs, k, v, kb, vb = parts
    least = max((block.summaries for block in plan.blocks), default=0)
    for name, x, need in (("q", q, plan.queries), ("k", k, plan.length), ("v", v, plan.length)):
        if x.shape[2] != need:
            raise ValueError(f"attend.{name} must hold {need} tokens, got {x.shape[2]}")
    for name, x in (("ks", ks), ("vs", vs)):
        if x.shape[2] < least:
            raise ValueError(f"attend.{name} must hold at least {least} summaries, got {x.shape[2]}")
    for name, x in (("kb", kb), ("vb", vb)):
        if x.shape[2] != len(plan.bypassed):
            raise ValueError(f"attend.{name} must hold {len(plan.bypassed)} bypassed tokens, got {x.shape[2]}")
    if q.shape[1] != k.shape[1] * plan.repeat:
        raise ValueError(f"attend.q must hold {plan.repeat} heads per kv head ({k.shape[1]}), got {q.shape[1]}")


class _Attend(torch.autograd.Function):
    """`forward` and `backward` below, joined for autograd."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *parts, plan, scale, keep = args
        out, _, weights = forward(parts, plan, scale, keep=keep)
        ctx.save_for_backward(*parts, *weights)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BHTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (*backward(saved[:7], dout_BHTD, ctx.plan, ctx.scale, saved[7:]), None, None, None)


def forward(
    parts: Sequence[torch.Tensor], plan: Plan, scale: float, *, keep: bool = False, want_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Output [B, H, T, Dv], log-sum-exp [B, H, T] in fp32 or wider where wanted, and the weights of each block where kept."""
    q = parts[0]
    batch, heads = q.shape[:2]
    groups, repeat = heads // plan.repeat, plan.repeat
    q_XYD, ks, vs, k, v, kb, vb = _all_rows(parts, groups)
    out_XYD = q_XYD.new_empty(*q_XYD.shape[:2], v.shape[-1])
    lse_XY = q_XYD.new_empty(q_XYD.shape[:2]) if want_lse else None
    kept = []
    with torch.autocast(q.device.type, enabled=False):
        for block in plan.blocks:
            rows = _block_rows(block, plan)
            logits = _logits(q_XYD[:, rows], _columns(block, kb, ks, k), block, scale)
            weights = logits.softmax(dim=-1)
            out_XYD[:, rows] = torch.bmm(weights, _columns(block, vb, vs, v))
            if lse_XY is not None:  # the largest weight is exp(largest logit - lse)
                lse_XY[:, rows] = logits.amax(dim=-1) - weights.amax(dim=-1).log()
            if keep:
                kept.append(weights)
    out = _heads(out_XYD, batch, groups, repeat).to(q.dtype)
    return out, None if lse_XY is None else _heads(lse_XY[..., None], batch, groups, repeat)[..., 0], kept


def backward(parts: Sequence[torch.Tensor], dout_BHTD: torch.Tensor, plan: Plan, scale: float, kept: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
    """Gradients of q, ks, vs, k, v, kb, vb; weights that were not kept are made again. Blocks add up in order, so reruns are bit-equal."""
    batch, groups = parts[3].shape[:2]
    q_XYD, ks, vs, k, v, kb, vb = _all_rows(parts, groups)
    dout_XYD = _rows(dout_BHTD, groups).to(q_XYD.dtype)
    dq = torch.empty_like(q_XYD, memory_format=torch.contiguous_format)
    dks, dvs, dk, dv, dkb, dvb = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (ks, vs, k, v, kb, vb))
    with torch.autocast(dout_BHTD.device.type, enabled=False):
        for index, block in enumerate(plan.blocks):
            rows = _block_rows(block, plan)
            q, dout, keys = q_XYD[:, rows], dout_XYD[:, rows], _columns(block, kb, ks, k)
            weights = kept[index] if kept else _logits(q, keys, block, scale).softmax(dim=-1)
            dweights = torch.bmm(dout, _columns(block, vb, vs, v).mT)
            dlogits = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
            dq[:, rows] = torch.bmm(dlogits, keys)
            _add_columns(torch.bmm(dlogits.mT, q), block, dkb, dks, dk)
            _add_columns(torch.bmm(weights.mT, dout), block, dvb, dvs, dv)
    for x in (dq, dks, dk, dkb):
        x.mul_(scale)
    found = (dq, dks, dvs, dk, dv, dkb, dvb)
    repeats = (plan.repeat, *[1] * 6)
    return tuple(_heads(x, batch, groups, repeat).to(part.dtype) for x, part, repeat in zip(found, parts, repeats, strict=True))


def _rows(x_BHTD: torch.Tensor, groups: int) -> torch.Tensor:
    """[B*G, T*R, D], token by token; a view where the strides allow it."""
    return x_BHTD.unflatten(1, (groups, x_BHTD.shape[1] // groups)).transpose(2, 3).flatten(2, 3).flatten(0, 1)


def _all_rows(parts: Sequence[torch.Tensor], groups: int) -> list[torch.Tensor]:
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return [_rows(x, groups).to(wide) for x in parts]


def _heads(x_XYD: torch.Tensor, batch: int, groups: int, repeat: int) -> torch.Tensor:
    """Back to [B, H, T, D]."""
    return x_XYD.unflatten(0, (batch, groups)).unflatten(2, (x_XYD.shape[1] // repeat, repeat)).transpose(2, 3).flatten(1, 2)


def _block_rows(block: Block, plan: Plan) -> slice:
    return slice(block.first * plan.repeat, block.last * plan.repeat)


def _columns(block: Block, bank: torch.Tensor, summary: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """What the block reads, side by side: [X, M, D]."""
    return torch.cat([bank[:, : block.bank], summary[:, : block.summaries], exact[:, block.low : block.stop]], dim=1)


def _add_columns(gradient_XMD: torch.Tensor, block: Block, bank: torch.Tensor, summary: torch.Tensor, exact: torch.Tensor) -> None:
    """The reverse of `_columns`: add each entry's gradient where the entry came from."""
    counts = (block.bank, block.summaries, block.stop - block.low)
    places = (bank[:, : block.bank], summary[:, : block.summaries], exact[:, block.low : block.stop])
    for place, count, gradient in zip(places, counts, gradient_XMD.split(counts, dim=1), strict=True):
        if count:
            place.add_(gradient)


def _logits(q_XYD: torch.Tensor, keys_XMD: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    # Into a contiguous tensor, here and above: only then is a batched product one call of the BLAS and not one per problem.
    logits_XYM = q_XYD.new_empty(*q_XYD.shape[:2], keys_XMD.shape[1])
    torch.baddbmm(logits_XYM, q_XYD, keys_XMD.mT, beta=0, alpha=scale, out=logits_XYM)
    for first, stop, mask in block.masks:
        logits_XYM[:, :, first:stop] += mask
    return logits_XYM
