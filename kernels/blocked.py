"""Joint attention over [summaries | bypassed tokens | exact tokens] through scaled_dot_product_attention.

`attend` takes any mask. `attend_blocked` is for a whole sequence: each block of queries reads the summaries, the bypassed tokens, and only those
exact tokens that its interval can reach, so that work grows with T * (T/S + local) and not with T * T.
K and V are never repeated for grouped heads: the query heads of a kv head become rows.

Shapes: B batch, H query heads, G kv heads, R = H/G, T tokens, N summaries, P bypassed tokens, M entries, D head dim, n blocks, Q block length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from mitigate.kernels import reference, visibility


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a sequence is cut into blocks; depends on integers only, so a caller can keep it.

    Attributes:
        block, blocks, lookback: queries per block, blocks, and previous blocks whose exact tokens a block can reach.
        bypassed: positions of the bypass bank, int64 [P].
        mask: additive, [1, blocks, R*block, N + P + (lookback + 1)*block].
    """

    block: int
    blocks: int
    lookback: int
    bypassed: torch.Tensor
    mask: torch.Tensor


def plan(length: int, *, window: int, stride: int, origin: int, local: int, bypass: tuple[int, ...], repeat: int, like: torch.Tensor, block: int = 32) -> Plan:
    """Blocks of a sequence of `length` tokens from position 0; `like` gives dtype and device of the mask."""
    grid = (window, stride, origin)
    blocks = -(-length // block)
    t_nQ = torch.arange(blocks * block).reshape(blocks, block)
    lo_nQ = visibility.exact_lo(t_nQ, *grid, local)
    lookback = math.ceil(int((t_nQ[:, 0] - lo_nQ[:, 0]).max()) / block)
    everything = torch.arange(length)
    bank_P = everything[reference.is_bypassed(everything, stride=stride, origin=origin, phases=bypass)]
    summary_N = torch.arange(visibility.num_windows(length, *grid))
    exact_nK = (torch.arange(blocks)[:, None] - lookback) * block + torch.arange((lookback + 1) * block)
    t, lo = t_nQ[:, :, None], lo_nQ[:, :, None]
    visible = torch.cat(
        [
            summary_N < visibility.num_completed(t, *grid),
            (bank_P <= t) & (bank_P < lo),
            (exact_nK[:, None] >= lo) & (exact_nK[:, None] <= t),
        ],
        dim=2,
    )
    mask = additive_mask(visible, repeat, like.dtype)[None].to(like.device)
    return Plan(block=block, blocks=blocks, lookback=lookback, bypassed=bank_P.to(like.device), mask=mask)


def attend_blocked(
    q_BHTD: torch.Tensor, ks_BGND: torch.Tensor, vs_BGND: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """Attention of a whole sequence under a `Plan`. Returns [B, H, T, Dv]."""
    batch, heads, length, dim = q_BHTD.shape
    groups, n, block = k_BGTD.shape[1], plan.blocks, plan.block
    repeat = heads // groups
    q_BHTD = F.pad(q_BHTD, (0, 0, 0, n * block - length))
    # Blocks stand beside kv heads in the head dimension, so that one mask per block serves the whole batch.
    q = q_BHTD.reshape(batch, groups, repeat, n, block, dim).transpose(2, 3).reshape(batch, groups * n, repeat * block, dim)
    k, v = _entries(ks_BGND, k_BGTD, plan), _entries(vs_BGND, v_BGTD, plan)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask.repeat(1, groups, 1, 1), scale=scale)
    out = out.reshape(batch, groups, n, repeat, block, -1).transpose(2, 3)
    return out.reshape(batch, heads, n * block, -1)[:, :, :length]


def _entries(summary_BGND: torch.Tensor, exact_BGTD: torch.Tensor, plan: Plan) -> torch.Tensor:
    """[summaries | bypass bank | exact tokens in reach] of each block: [B, G*n, M, D]."""
    batch, groups, length, dim = exact_BGTD.shape
    n, block, back = plan.blocks, plan.block, plan.lookback
    padded = F.pad(exact_BGTD, (0, 0, back * block, n * block - length)).reshape(batch, groups, n + back, block, dim)
    parts = [padded[:, :, shift : shift + n] for shift in range(back + 1)]
    bank = [summary_BGND] + ([exact_BGTD[:, :, plan.bypassed]] if plan.bypassed.numel() else [])
    shared = [x[:, :, None].expand(-1, -1, n, -1, -1) for x in bank]
    return torch.cat([*shared, *parts], dim=3).flatten(1, 2)
