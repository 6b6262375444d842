"""One query per sequence over the same three banks, summaries split over programs, on a GPU.

Splits 0 .. n_split-1 share the summaries that a sequence's query sees; the last one takes the exact and the bypassed tokens. The query heads of a kv head are
the rows of one tile, so that each key and value is read once. Every split leaves an output and a log-sum-exp in fp32, and a second kernel merges
them in order: no atomics, two runs agree to the bit. The grid depends on tensor shapes alone, so that a captured graph stays valid as sequences grow.

Shapes: B batch, H query heads, G kv heads, D head dim of q and k, V of v and out, N summaries held, X exact tokens held, P bypassed tokens held, s splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from mitigate.kernels import arguments, tiles
from mitigate.kernels.attend import base, count_below, fwd_bank
from mitigate.kernels.visibility import exact_lo_jit, num_completed_jit

COUNTS = ["N", "X", "P", "splits", "window", "stride", "origin", "local", "scale", "stride_xb", "stride_pb"]


@triton.jit(do_not_specialize=COUNTS)
def decode_split_kernel(
    q, ks, vs, k, v, kb, vb, pos_b, positions, starts, pos_x, partial, lse,
    N, X, P, splits, window, stride, origin, local, scale,
    stride_qb, stride_qh, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_kbb, stride_kbt, stride_kbg, stride_vbb, stride_vbt, stride_vbg,
    stride_pb, stride_xb,
    REPEAT: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    HAS_BYPASS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """One program: one split of one kv head of one sequence, for its REPEAT query heads."""
    i_s, i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.load(positions + i_b)
    o_r, o_d, o_v = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BV)
    o_h = i_g * REPEAT + o_r.to(tl.int64)
    # [BH, BD]
    b_q = tl.load(q + i_b * stride_qb + o_h[:, None] * stride_qh + o_d[None, :], mask=(o_r < REPEAT)[:, None] & (o_d < D)[None, :], other=0.0)
    b_m = tl.full([BH], float("-inf"), tl.float32)
    b_l = tl.zeros([BH], tl.float32)
    b_acc = tl.zeros([BH, BV], tl.float32)
    zero = tl.zeros([BH], tl.int32)
    scale_s = scale * base(b_q)
    is_last = i_s == splits - 1

    seen = tl.minimum(num_completed_jit(t, window, stride, origin), N)
    share = tl.cdiv(tl.cdiv(seen, splits - 1), BN) * BN
    row_lo = tl.where(is_last, 0, tl.minimum(i_s * share, seen))
    row_hi = tl.where(is_last, 0, tl.minimum(i_s * share + share, seen))
    row_all = row_lo + (row_hi - row_lo) // BN * BN
    p_k, p_v = ks + i_b * stride_ksb + i_g * stride_ksg, vs + i_b * stride_vsb + i_g * stride_vsg
    b_acc, b_m, b_l = fwd_bank(
        b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_ksn, stride_vsn, row_lo, row_all, 0, zero, zero + seen, scale_s, D, V, BN, BD, BV, False, False
    )
    b_acc, b_m, b_l = fwd_bank(
        b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_ksn, stride_vsn, row_all, row_hi, 0, zero, zero + seen, scale_s, D, V, BN, BD, BV, False, True
    )
    lo = exact_lo_jit(t, window, stride, origin, local)
    p_k, p_v = k + i_b * stride_kb + i_g * stride_kg, v + i_b * stride_vb + i_g * stride_vg
    if RING:
        row_hi = tl.where(is_last, X, 0)
        b_acc, b_m, b_l = fwd_bank(
            b_q, b_acc, b_m, b_l, p_k, p_v, pos_x + i_b * stride_xb, stride_kt, stride_vt, 0, row_hi, 0, zero + lo, zero + t + 1, scale_s,
            D, V, BN, BD, BV, True, True,
        )  # fmt: skip
    else:
        first = tl.load(starts + i_b)
        row_lo = tl.maximum(lo - first, 0)
        row_hi = tl.where(is_last, tl.minimum(t + 1 - first, X), 0)
        b_acc, b_m, b_l = fwd_bank(
            b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_kt, stride_vt, row_lo, row_hi, first, zero + lo, zero + t + 1, scale_s,
            D, V, BN, BD, BV, False, True,
        )  # fmt: skip
    if HAS_BYPASS:
        p_k, p_v = kb + i_b * stride_kbb + i_g * stride_kbg, vb + i_b * stride_vbb + i_g * stride_vbg
        p_pos = pos_b + i_b * stride_pb
        row_hi = count_below(p_pos, tl.where(is_last, P, 0), lo, 1024)
        b_acc, b_m, b_l = fwd_bank(
            b_q, b_acc, b_m, b_l, p_k, p_v, p_pos, stride_kbt, stride_vbt, 0, row_hi, 0, zero, zero + lo, scale_s, D, V, BN, BD, BV, True, True
        )
    b_l = tl.where(b_l == 0.0, 1.0, b_l)
    o_out = (i_b * tl.num_programs(1) * REPEAT + o_h) * splits + i_s
    # [BH, BV]
    tl.store(partial + o_out[:, None] * V + o_v[None, :], b_acc / b_l[:, None], mask=(o_r < REPEAT)[:, None] & (o_v < V)[None, :])
    # [BH]
    tl.store(lse + o_out, b_m / base(b_q) + tl.log(b_l), mask=o_r < REPEAT)


@triton.jit(do_not_specialize=["splits"])
def decode_merge_kernel(partial, partial_lse, out, lse, splits, V: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr):
    """One program: the splits of one query head of one sequence."""
    i_x = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BV)
    b_m = tl.full([1], float("-inf"), tl.float32)
    b_l = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([BV], tl.float32)
    for start in range(0, splits, BS):
        o_s = start + tl.arange(0, BS)
        # [BS]
        b_s = tl.load(partial_lse + i_x * splits + o_s, mask=o_s < splits, other=float("-inf"))
        # [BS, BV]
        p_partial = partial + (i_x * splits + o_s)[:, None] * V + o_v[None, :]
        b_o = tl.load(p_partial, mask=(o_s < splits)[:, None] & (o_v < V)[None, :], other=0.0)
        b_new = tl.maximum(b_m, tl.max(b_s, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_keep = tl.exp(b_m - b_safe)
        b_w = tl.exp(b_s - b_safe)
        b_l = b_l * b_keep + tl.sum(b_w, 0)
        b_acc = b_acc * b_keep + tl.sum(b_w[:, None] * b_o, 0)
        b_m = b_new
    b_l = tl.where(b_l == 0.0, 1.0, b_l)
    tl.store(out + i_x * V + o_v, (b_acc / b_l).to(out.dtype.element_ty), mask=o_v < V)
    tl.store(lse + i_x + tl.arange(0, 1), b_m + tl.log(b_l))


def decode_fwd(
    q_BHD: torch.Tensor, ks_BNGD: torch.Tensor, vs_BNGV: torch.Tensor, k_BXGD: torch.Tensor, v_BXGV: torch.Tensor, *,
    window: int, stride: int, origin: int = 0, local: int, scale: float, position: int | torch.Tensor,
    k_start: int | torch.Tensor = 0, pos_x: torch.Tensor | None = None,
    kb_BPGD: torch.Tensor | None = None, vb_BPGV: torch.Tensor | None = None, pos_b: torch.Tensor | None = None,
    n_split: int | None = None, tile: tiles.Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query per sequence; rows of the banks beyond a sequence's own are not read.

    Args:
        q_BHD: queries [B, H, D]; G divides H.
        ks_BNGD, vs_BNGV: summaries, window 0 first, N at most held.
        k_BXGD, v_BXGV: exact tokens held, the query's own among them.
        position: of each query, int32 [B] or one for all; -1 for a slot without a sequence, whose output is 0 and log-sum-exp -inf.
        k_start: position of the first exact row, int32 [B] or one for all.
        pos_x: instead of k_start, the position of each exact row, int32 [B, X], in any order (a ring); negative for a row that holds nothing.
        kb_BPGD, vb_BPGV, pos_b: bypassed tokens and their positions, int32 [P] or [B, P], growing; 2^30 or more is padding.
        n_split: programs that share the summaries of a kv head, by default from shapes and device.
        tile: instead of the one in the table; its columns are the entries of one step.

    Returns:
        out [B, H, V] in the dtype of q, and the log-sum-exp of each query's logits, fp32 [B, H].

    Raises:
        TypeError: tensors of different dtypes.
        ValueError: shapes that do not fit, a last dimension that is not contiguous, tensors on several devices. Positions are not read on the host.
    """
    arguments.check_banks("decode", q_BHD, "BHD", ks=ks_BNGD, vs=vs_BNGV, k=k_BXGD, v=v_BXGV, kb=kb_BPGD, vb=vb_BPGV, pos_b=pos_b)
    tiles.unit_last(q=q_BHD, ks=ks_BNGD, vs=vs_BNGV, k=k_BXGD, v=v_BXGV, kb=kb_BPGD, vb=vb_BPGV)
    batch, heads, dim = q_BHD.shape
    summaries, groups, dim_v = ks_BNGD.shape[1], ks_BNGD.shape[2], v_BXGV.shape[-1]
    device = q_BHD.device
    out = torch.empty(batch, heads, dim_v, dtype=q_BHD.dtype, device=device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out, lse
    splits = 1 + (n_split or tiles.splits(device, batch * groups, summaries))
    partial = torch.empty(batch, heads, splits, dim_v, dtype=torch.float32, device=device)
    partial_lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=device)
    tile = tile or tiles.attend("decode", tiles.arch(device), max(dim, dim_v), q_BHD.dtype)
    positions, starts = (_per_sequence(x, batch, device) for x in (position, k_start))
    places, ring = (None if x is None else x.to(torch.int32) for x in (pos_b, pos_x))
    banks = (ks_BNGD, vs_BNGV, k_BXGD, v_BXGV, kb_BPGD, vb_BPGV)
    strides = [number for x in banks for number in ((0, 0, 0) if x is None else x.stride()[:3])]
    row_strides = [0 if x is None or x.dim() == 1 else x.stride(0) for x in (places, ring)]
    bypassed = 0 if kb_BPGD is None else kb_BPGD.shape[1]
    with tiles.on_device(q_BHD, *banks, positions, starts, places, ring):
        decode_split_kernel[(splits, groups, batch)](
            q_BHD, *banks, places, positions, starts, ring, partial, partial_lse,
            summaries, k_BXGD.shape[1], bypassed, splits, window, stride, origin, min(local, 2**30), scale,
            *q_BHD.stride()[:2], *strides, *row_strides,
            REPEAT=heads // groups, D=dim, V=dim_v, BH=tiles.power(heads // groups, 16), BN=tile.cols, BD=tiles.power(dim, 16), BV=tiles.power(dim_v, 16),
            HAS_BYPASS=bypassed > 0, RING=ring is not None, **tile.options(),
        )  # fmt: skip
        decode_merge_kernel[(batch * heads,)](
            partial, partial_lse, out, lse, splits, V=dim_v, BS=16, BV=tiles.power(dim_v), **tiles.Tile(1, 1, warps=1, stages=1).options()
        )
    return out, lse


def _per_sequence(value: int | torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int32).expand(batch).contiguous()
    return torch.full((batch,), value, dtype=torch.int32, device=device)
