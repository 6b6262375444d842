"""Joint attention over [summaries | exact tokens | bypassed tokens] on a GPU: one online softmax over three banks, and the gradients of all of them.

A bank is a list of entries with a number each: the index of a summary, the position of a token. A query at position t sees those with
``lower(t) <= number < upper(t)``: summaries from 0 below ``num_completed(t)``, exact tokens from ``exact_lo(t)`` to t, bypassed tokens below
``exact_lo(t)``. All bounds grow with t, so that a block of queries reads a range of each bank, and a block of entries is read by a range of queries.

Backward: the query kernel repeats the forward loops; the entry kernel runs once per bank. Summaries and bypassed tokens have a program per query head,
whose fp32 partial sums are added per kv head in a fixed order; exact tokens, which are many, loop over the query heads of their kv head instead.
No atomics: two runs agree to the bit.

Shapes: B batch, Tq queries, Tk exact tokens, N summaries, P bypassed tokens, H query heads, G kv heads, D head dim of q and k, V of v and out. Packed sequences
(`cu_seqlens`, int [sequences + 1]) have B = 1 and stand one after another in every tensor. Only the last dimension needs stride 1; nothing is copied.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from mitigate.kernels import arguments, tiles, visibility
from mitigate.kernels.visibility import end_jit, exact_lo_jit, num_completed_jit, reader_end_jit, sequence_rows_jit

# Numbers that differ from call to call: no kernel is compiled anew for them.
SIZES = ["Tq", "Tk", "N", "P", "H", "rows", "rows_saved", "q_start", "k_start", "first"]
COUNTS = [*SIZES, "window", "stride", "origin", "local", "scale", "stride_lb", "stride_lt", "stride_pb"]


@triton.jit
def count_below(p_pos, P, limit, BP: tl.constexpr):
    """How many of P sorted positions are below a limit."""
    count = tl.zeros([BP], tl.int32)
    for start in range(0, P, BP):
        o_p = start + tl.arange(0, BP)
        count += (tl.load(p_pos + o_p, mask=o_p < P, other=2147483647) < limit).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def load_rows(p_base, o_row, stride_row, m_row, X: tl.constexpr, BX: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a matrix as [rows, BX], zeros where masked and beyond X columns."""
    o_x = tl.arange(0, BX)
    p_x = p_base + o_row[:, None].to(tl.int64) * stride_row + o_x[None, :]
    if MASKED:
        return tl.load(p_x, mask=m_row[:, None] & (o_x < X)[None, :], other=0.0)
    elif X == BX:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_x < X)[None, :], other=0.0)


@triton.jit
def base(b_x):
    """What logits are multiplied by besides the scale: log2(e) for 16-bit inputs, which saves a product per element, 1 where fp32 accuracy is wanted."""
    if b_x.dtype == tl.float32:
        return 1.0
    else:
        return 1.4426950408889634


@triton.jit
def exponential(b_s, b_x):
    """exp of logits in the base of `base`."""
    if b_x.dtype == tl.float32:
        return tl.exp(b_s)
    else:
        return tl.exp2(b_s)


@triton.jit
def fwd_bank(
    b_q, b_acc, b_m, b_l, p_k, p_v, p_pos, stride_kt, stride_vt, row_lo, row_hi, first, lower, upper, scale_s,
    D: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, LOADED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take rows [row_lo, row_hi) of one bank into the online softmax; row i has number first + i, or p_pos[i] if LOADED."""
    for start in range(row_lo, row_hi, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < row_hi
        # [BN, BD]
        b_k = load_rows(p_k, o_n, stride_kt, m_n, D, BD, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_s
        if MASKED:
            number = first + o_n
            if LOADED:
                number = tl.load(p_pos + o_n, mask=m_n, other=2147483647)
            m_s = (number[None, :] >= lower[:, None]) & (number[None, :] < upper[:, None]) & m_n[None, :]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_keep = exponential(b_m - b_safe, b_q)
        b_p = exponential(b_s - b_safe[:, None], b_q)
        b_l = b_l * b_keep + tl.sum(b_p, 1)
        # [BN, BV]
        b_v = load_rows(p_v, o_n, stride_vt, m_n, V, BV, MASKED)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
        b_m = b_new
    return b_acc, b_m, b_l


@triton.jit(do_not_specialize=COUNTS)
def attend_fwd_kernel(
    q, ks, vs, k, v, kb, vb, pos_b, out, lse, cu_tokens, cu_windows, cu_bypass,
    Tq, Tk, N, P, H, q_start, k_start, window, stride, origin, local, scale,
    stride_qb, stride_qt, stride_qh, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_kbb, stride_kbt, stride_kbg, stride_vbb, stride_vbt, stride_vbg,
    stride_pb, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt,
    REPEAT: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    HAS_BYPASS: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: BM queries of one head. Later blocks see more and start first."""
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_m, i_g = tl.num_programs(0) - 1 - tl.program_id(0), i_h // REPEAT
    q0, Tq = sequence_rows_jit(cu_tokens, i_b, Tq, VARLEN)
    n0, N = sequence_rows_jit(cu_windows, i_b, N, VARLEN)
    if i_m * BM >= Tq:
        return
    if VARLEN:
        i_b = i_b * 0
        Tk = Tq
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < Tq
    t = q_start + o_m
    t_first = q_start + i_m * BM
    t_last = tl.minimum(t_first + BM, q_start + Tq) - 1
    zero = tl.zeros([BM], tl.int32)
    completed = num_completed_jit(t, window, stride, origin)
    lo = exact_lo_jit(t, window, stride, origin, local)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BV], tl.float32)
    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + q0 * stride_qt + i_h * stride_qh, o_m, stride_qt, m_m, D, BD, True)
    scale_s = scale * base(b_q)

    p_k, p_v = ks + i_b * stride_ksb + n0 * stride_ksn + i_g * stride_ksg, vs + i_b * stride_vsb + n0 * stride_vsn + i_g * stride_vsg
    n_all = tl.minimum(num_completed_jit(t_first, window, stride, origin), N) // BN * BN
    n_some = tl.minimum(num_completed_jit(t_last, window, stride, origin), N)
    b_acc, b_m, b_l = fwd_bank(
        b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_ksn, stride_vsn, 0, n_all, 0, zero, completed, scale_s, D, V, BN, BD, BV, False, False
    )
    b_acc, b_m, b_l = fwd_bank(
        b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_ksn, stride_vsn, n_all, n_some, 0, zero, completed, scale_s, D, V, BN, BD, BV, False, True
    )
    p_k, p_v = k + i_b * stride_kb + q0 * stride_kt + i_g * stride_kg, v + i_b * stride_vb + q0 * stride_vt + i_g * stride_vg
    row_lo = tl.maximum(exact_lo_jit(t_first, window, stride, origin, local) - k_start, 0)
    row_hi = tl.minimum(t_last + 1 - k_start, Tk)
    b_acc, b_m, b_l = fwd_bank(
        b_q, b_acc, b_m, b_l, p_k, p_v, None, stride_kt, stride_vt, row_lo, row_hi, k_start, lo, t + 1, scale_s, D, V, BN, BD, BV, False, True
    )
    if HAS_BYPASS:
        p0, P = sequence_rows_jit(cu_bypass, tl.program_id(2).to(tl.int64), P, VARLEN)
        p_k, p_v = kb + i_b * stride_kbb + p0 * stride_kbt + i_g * stride_kbg, vb + i_b * stride_vbb + p0 * stride_vbt + i_g * stride_vbg
        p_pos = pos_b + i_b * stride_pb + p0
        row_hi = count_below(p_pos, P, exact_lo_jit(t_last, window, stride, origin, local), 1024)
        b_acc, b_m, b_l = fwd_bank(b_q, b_acc, b_m, b_l, p_k, p_v, p_pos, stride_kbt, stride_vbt, 0, row_hi, 0, zero, lo, scale_s, D, V, BN, BD, BV, True, True)

    b_l = tl.where(b_l == 0.0, 1.0, b_l)
    o_v = tl.arange(0, BV)
    o_row = q0 + o_m.to(tl.int64)
    # [BM, BV]
    p_out = out + i_b * stride_ob + i_h * stride_oh + o_row[:, None] * stride_ot + o_v[None, :]
    tl.store(p_out, (b_acc / b_l[:, None]).to(out.dtype.element_ty), mask=m_m[:, None] & (o_v < V)[None, :])
    # [BM]
    tl.store(lse + i_b * stride_lb + o_row * stride_lt + i_h, b_m / base(b_q) + tl.log(b_l), mask=m_m)


@triton.jit
def dq_bank(
    b_q, b_do, b_dq, b_lse_s, b_delta, p_k, p_v, p_pos, stride_kt, stride_vt, row_lo, row_hi, first, lower, upper, scale_s,
    D: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, LOADED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what rows [row_lo, row_hi) of one bank contribute to the gradient of the queries, without the scale."""
    for start in range(row_lo, row_hi, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < row_hi
        # [BN, BD]
        b_k = load_rows(p_k, o_n, stride_kt, m_n, D, BD, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_s - b_lse_s[:, None]
        if MASKED:
            number = first + o_n
            if LOADED:
                number = tl.load(p_pos + o_n, mask=m_n, other=2147483647)
            m_s = (number[None, :] >= lower[:, None]) & (number[None, :] < upper[:, None]) & m_n[None, :]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p = exponential(b_s, b_q)
        # [BN, BV]
        b_v = load_rows(p_v, o_n, stride_vt, m_n, V, BV, MASKED)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit(do_not_specialize=COUNTS)
def attend_bwd_dq_kernel(
    q, ks, vs, k, v, kb, vb, pos_b, out, lse, dout, dq, lse_s, delta, cu_tokens, cu_windows, cu_bypass,
    Tq, Tk, N, P, H, rows_saved, q_start, k_start, window, stride, origin, local, scale,
    stride_qb, stride_qt, stride_qh, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_kbb, stride_kbt, stride_kbg, stride_vbb, stride_vbt, stride_vbg,
    stride_pb, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_gb, stride_gt, stride_gh, stride_gv, stride_dqb, stride_dqt, stride_dqh,
    REPEAT: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    HAS_BYPASS: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: BM queries of one head. Leaves log-sum-exp and delta = rowsum(out * dout) as [B, H, Tq] for the entry kernels."""
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_m, i_g = tl.num_programs(0) - 1 - tl.program_id(0), i_h // REPEAT
    q0, Tq = sequence_rows_jit(cu_tokens, i_b, Tq, VARLEN)
    n0, N = sequence_rows_jit(cu_windows, i_b, N, VARLEN)
    if i_m * BM >= Tq:
        return
    if VARLEN:
        i_b = i_b * 0
        Tk = Tq
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < Tq
    t = q_start + o_m
    t_first = q_start + i_m * BM
    t_last = tl.minimum(t_first + BM, q_start + Tq) - 1
    zero = tl.zeros([BM], tl.int32)
    completed = num_completed_jit(t, window, stride, origin)
    lo = exact_lo_jit(t, window, stride, origin, local)
    # [BM, BD]
    b_q = load_rows(q + i_b * stride_qb + q0 * stride_qt + i_h * stride_qh, o_m, stride_qt, m_m, D, BD, True)
    scale_s = scale * base(b_q)
    o_row, o_v = q0 + o_m.to(tl.int64), tl.arange(0, BV)
    m_v = m_m[:, None] & (o_v < V)[None, :]
    # [BM, BV]
    b_out = tl.load(out + i_b * stride_ob + i_h * stride_oh + o_row[:, None] * stride_ot + o_v[None, :], mask=m_v, other=0.0)
    p_do = dout + i_b * stride_gb + i_h * stride_gh + o_row[:, None] * stride_gt + o_v[None, :].to(tl.int64) * stride_gv
    b_do = tl.load(p_do, mask=m_v, other=0.0)
    # [BM]
    b_delta = tl.sum(b_out.to(tl.float32) * b_do.to(tl.float32), 1)
    b_lse_s = tl.load(lse + i_b * stride_lb + o_row * stride_lt + i_h, mask=m_m, other=0.0) * base(b_q)
    o_saved = (i_b * H + i_h) * rows_saved + o_row
    tl.store(lse_s + o_saved, b_lse_s, mask=m_m)
    tl.store(delta + o_saved, b_delta, mask=m_m)
    b_dq = tl.zeros([BM, BD], tl.float32)

    p_k, p_v = ks + i_b * stride_ksb + n0 * stride_ksn + i_g * stride_ksg, vs + i_b * stride_vsb + n0 * stride_vsn + i_g * stride_vsg
    n_all = tl.minimum(num_completed_jit(t_first, window, stride, origin), N) // BN * BN
    n_some = tl.minimum(num_completed_jit(t_last, window, stride, origin), N)
    b_dq = dq_bank(
        b_q, b_do, b_dq, b_lse_s, b_delta, p_k, p_v, None, stride_ksn, stride_vsn, 0, n_all, 0, zero, completed, scale_s, D, V, BN, BD, BV, False, False
    )
    b_dq = dq_bank(
        b_q, b_do, b_dq, b_lse_s, b_delta, p_k, p_v, None, stride_ksn, stride_vsn, n_all, n_some, 0, zero, completed, scale_s, D, V, BN, BD, BV, False, True
    )
    p_k, p_v = k + i_b * stride_kb + q0 * stride_kt + i_g * stride_kg, v + i_b * stride_vb + q0 * stride_vt + i_g * stride_vg
    row_lo = tl.maximum(exact_lo_jit(t_first, window, stride, origin, local) - k_start, 0)
    row_hi = tl.minimum(t_last + 1 - k_start, Tk)
    b_dq = dq_bank(
        b_q, b_do, b_dq, b_lse_s, b_delta, p_k, p_v, None, stride_kt, stride_vt, row_lo, row_hi, k_start, lo, t + 1, scale_s, D, V, BN, BD, BV, False, True
    )
    if HAS_BYPASS:
        p0, P = sequence_rows_jit(cu_bypass, tl.program_id(2).to(tl.int64), P, VARLEN)
        p_k, p_v = kb + i_b * stride_kbb + p0 * stride_kbt + i_g * stride_kbg, vb + i_b * stride_vbb + p0 * stride_vbt + i_g * stride_vbg
        p_pos = pos_b + i_b * stride_pb + p0
        row_hi = count_below(p_pos, P, exact_lo_jit(t_last, window, stride, origin, local), 1024)
        b_dq = dq_bank(
            b_q, b_do, b_dq, b_lse_s, b_delta, p_k, p_v, p_pos, stride_kbt, stride_vbt, 0, row_hi, 0, zero, lo, scale_s, D, V, BN, BD, BV, True, True
        )
    o_d = tl.arange(0, BD)
    # [BM, BD]
    p_dq = dq + i_b * stride_dqb + i_h * stride_dqh + o_row[:, None] * stride_dqt + o_d[None, :]
    tl.store(p_dq, (b_dq * scale).to(dq.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def attend_bwd_dkv_kernel(
    q, k, v, pos, dout, dk, dv, lse_s, delta, cu_tokens, cu_rows,
    Tq, rows, H, rows_saved, q_start, first, window, stride, origin, local, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_pb,
    stride_gb, stride_gt, stride_gh, stride_gv, stride_dkb, stride_dkt, stride_dkh, stride_dvb, stride_dvt, stride_dvh,
    REPEAT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BANK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: BN entries of one bank, and HEADS query heads whose gradients it sums (1, or all of the kv head)."""
    i_x, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_n, i_g = tl.program_id(0), i_x * HEADS // REPEAT
    q0, Tq = sequence_rows_jit(cu_tokens, i_b, Tq, VARLEN)
    r0, rows = sequence_rows_jit(cu_rows, i_b, rows, VARLEN)
    if i_n * BN >= rows:
        return
    if VARLEN:
        i_b = i_b * 0
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < rows
    # [BN, BD], [BN, BV]
    b_k = load_rows(k + i_b * stride_kb + r0 * stride_kt + i_g * stride_kg, o_n, stride_kt, m_n, D, BD, True)
    b_v = load_rows(v + i_b * stride_vb + r0 * stride_vt + i_g * stride_vg, o_n, stride_vt, m_n, V, BV, True)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BV], tl.float32)
    number = first + o_n
    t_hi = q_start + Tq
    if BANK == "summary":
        t_lo = end_jit(i_n * BN, window, stride, origin)
    elif BANK == "exact":
        t_lo = first + i_n * BN
        last = first + tl.minimum(i_n * BN + BN, rows) - 1
        t_hi = tl.minimum(t_hi, reader_end_jit(last, window, stride, origin, local))
    else:
        number = tl.load(pos + i_b * stride_pb + r0 + o_n, mask=m_n, other=2147483647)
        t_lo = reader_end_jit(tl.load(pos + i_b * stride_pb + r0 + i_n * BN), window, stride, origin, local)
    scale_s = scale * base(b_k)
    for i_r in range(HEADS):
        i_h = i_x * HEADS + i_r
        p_q = q + i_b * stride_qb + q0 * stride_qt + i_h * stride_qh
        p_do = dout + i_b * stride_gb + q0 * stride_gt + i_h * stride_gh
        o_saved = (i_b * H + i_h) * rows_saved + q0
        for start in range(tl.maximum(t_lo - q_start, 0), t_hi - q_start, BM):
            o_m = start + tl.arange(0, BM)
            m_m = o_m < Tq
            t = q_start + o_m
            # [BM, BD], [BM, BV]
            b_q = load_rows(p_q, o_m, stride_qt, m_m, D, BD, True)
            o_v = tl.arange(0, BV)
            p_rows = p_do + o_m[:, None].to(tl.int64) * stride_gt + o_v[None, :].to(tl.int64) * stride_gv
            b_do = tl.load(p_rows, mask=m_m[:, None] & (o_v < V)[None, :], other=0.0)
            # [BM]
            b_lse_s = tl.load(lse_s + o_saved + o_m, mask=m_m, other=0.0)
            b_delta = tl.load(delta + o_saved + o_m, mask=m_m, other=0.0)
            if BANK == "summary":
                m_s = number[:, None] < num_completed_jit(t, window, stride, origin)[None, :]
            else:
                lo = exact_lo_jit(t, window, stride, origin, local)
                if BANK == "exact":
                    m_s = (number[:, None] >= lo[None, :]) & (number[:, None] <= t[None, :])
                else:
                    m_s = number[:, None] < lo[None, :]
            # [BN, BM]
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * scale_s - b_lse_s[None, :]
            b_p = exponential(tl.where(m_s & m_m[None, :], b_s, float("-inf")), b_k)
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
            b_ds = b_p * (b_dp - b_delta[None, :])
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    o_d, o_v = tl.arange(0, BD), tl.arange(0, BV)
    o_row = r0 + o_n.to(tl.int64)
    # [BN, BD]
    p_dk = dk + i_b * stride_dkb + i_x * stride_dkh + o_row[:, None] * stride_dkt + o_d[None, :]
    tl.store(p_dk, (b_dk * scale).to(dk.dtype.element_ty), mask=m_n[:, None] & (o_d < D)[None, :])
    # [BN, BV]
    p_dv = dv + i_b * stride_dvb + i_x * stride_dvh + o_row[:, None] * stride_dvt + o_v[None, :]
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_n[:, None] & (o_v < V)[None, :])


def attend_fwd(
    q_BTHD: torch.Tensor, ks_BNGD: torch.Tensor, vs_BNGV: torch.Tensor, k_BTGD: torch.Tensor, v_BTGV: torch.Tensor, *,
    window: int, stride: int, origin: int = 0, local: int, scale: float,
    kb_BPGD: torch.Tensor | None = None, vb_BPGV: torch.Tensor | None = None, pos_b: torch.Tensor | None = None,
    q_start: int | None = None, k_start: int = 0, cu_seqlens: torch.Tensor | None = None, cu_bypass: torch.Tensor | None = None,
    tile: tiles.Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of Tq queries over summaries, exact tokens and bypassed tokens in one softmax.

    Args:
        q_BTHD: queries [B, Tq, H, D]; G divides H.
        ks_BNGD, vs_BNGV: summaries, window 0 first; those not complete at a query are not seen by it. vs may have another head dim than ks.
        k_BTGD, v_BTGV: exact tokens; row 0 stands at position k_start.
        local: how many last tokens stay exact, 0 or more.
        scale: of the logits.
        kb_BPGD, vb_BPGV, pos_b: bypassed tokens and their positions, int32 [P] or [B, P], growing; 2^30 or more is padding that nobody sees. A query
            sees those before its exact interval, so that none counts twice.
        q_start: position of the first query; by default the queries are the last Tq of the exact tokens.
        k_start: with a cached prefix, the exact tokens that are left may start later: at exact_lo(q_start) at the latest.
        cu_seqlens: first token of each packed sequence and the total; read on the host. Positions count from 0 in each, and Tq = Tk.
        cu_bypass: likewise for bypassed tokens.
        tile: instead of the one in the table.

    Returns:
        out [B, Tq, H, V] in the dtype of q, and the log-sum-exp of each query's logits, fp32 [B, Tq, H].

    Raises:
        TypeError: tensors of different dtypes.
        ValueError: shapes or positions that do not fit, a last dimension that is not contiguous, tensors on several devices.
    """
    call = _Call(q_BTHD, ks_BNGD, vs_BNGV, k_BTGD, v_BTGV, kb_BPGD, vb_BPGV, pos_b, (window, stride, origin), local, q_start, k_start, cu_seqlens, cu_bypass)
    batch, length, heads, dim = q_BTHD.shape
    dim_v = v_BTGV.shape[-1]
    out = torch.empty(batch, length, heads, dim_v, dtype=q_BTHD.dtype, device=q_BTHD.device)
    lse = torch.empty(batch, length, heads, dtype=torch.float32, device=q_BTHD.device)
    if out.numel() == 0:
        return out, lse.zero_()
    tile = tile or tiles.attend("fwd", tiles.arch(q_BTHD.device), max(dim, dim_v), q_BTHD.dtype)
    with tiles.on_device(*call.tensors):
        attend_fwd_kernel[(triton.cdiv(call.most_tokens, tile.rows), heads, call.sequences)](
            *call.tensors, out, lse, *call.starts, *call.counts, heads, *call.positions, scale,
            *call.strides, *out.stride()[:3], *lse.stride()[:2],
            BM=tile.rows, BN=tile.cols, HAS_BYPASS=call.bypassed > 0, **call.constants, **tile.options(),
        )  # fmt: skip
    return out, lse


def attend_bwd(
    dout_BTHV: torch.Tensor, q_BTHD: torch.Tensor, ks_BNGD: torch.Tensor, vs_BNGV: torch.Tensor, k_BTGD: torch.Tensor, v_BTGV: torch.Tensor,
    out_BTHV: torch.Tensor, lse_BTH: torch.Tensor, *,
    window: int, stride: int, origin: int = 0, local: int, scale: float,
    kb_BPGD: torch.Tensor | None = None, vb_BPGV: torch.Tensor | None = None, pos_b: torch.Tensor | None = None,
    q_start: int | None = None, k_start: int = 0, cu_seqlens: torch.Tensor | None = None, cu_bypass: torch.Tensor | None = None,
    tile: tiles.Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients of `attend_fwd`: dq, dks, dvs, dk, dv, and dkb, dvb (None without bypassed tokens), each in its input's dtype and shape.

    The incoming gradient may have any strides (expanded, transposed). Entries that no query sees get exactly 0. A bypassed token's gradient is apart
    from that of its exact row; positions are distinct, so the caller adds them by index.
    """
    call = _Call(q_BTHD, ks_BNGD, vs_BNGV, k_BTGD, v_BTGV, kb_BPGD, vb_BPGV, pos_b, (window, stride, origin), local, q_start, k_start, cu_seqlens, cu_bypass)
    arguments.check_dtype("attend", q_BTHD, dout=dout_BTHV, out=out_BTHV)
    tiles.unit_last(out=out_BTHV)
    batch, length, heads, dim = q_BTHD.shape
    widest = max(dim, v_BTGV.shape[-1])
    dq = torch.empty(q_BTHD.shape, dtype=q_BTHD.dtype, device=q_BTHD.device)
    lse_s, delta = (torch.empty(batch, heads, length, dtype=torch.float32, device=q_BTHD.device) for _ in range(2))
    if q_BTHD.numel() == 0:
        pairs = [(torch.zeros_like(a), torch.zeros_like(b)) for a, b in ((ks_BNGD, vs_BNGV), (k_BTGD, v_BTGV))]
        last = (None, None) if kb_BPGD is None or vb_BPGV is None else (torch.zeros_like(kb_BPGD), torch.zeros_like(vb_BPGV))
        return dq, *pairs[0], *pairs[1], *last
    chosen = tile or tiles.attend("dq", tiles.arch(q_BTHD.device), widest, q_BTHD.dtype)
    with tiles.on_device(dout_BTHV, out_BTHV, lse_BTH, *call.tensors):
        attend_bwd_dq_kernel[(triton.cdiv(call.most_tokens, chosen.rows), heads, call.sequences)](
            *call.tensors, out_BTHV, lse_BTH, dout_BTHV, dq, lse_s, delta, *call.starts, *call.counts, heads, length, *call.positions, scale,
            *call.strides, *out_BTHV.stride()[:3], *lse_BTH.stride()[:2], *dout_BTHV.stride(), *dq.stride()[:3],
            BM=chosen.rows, BN=chosen.cols, HAS_BYPASS=call.bypassed > 0, **call.constants, **chosen.options(),
        )  # fmt: skip
        chosen = tile or tiles.attend("dkv", tiles.arch(q_BTHD.device), widest, q_BTHD.dtype)
        passed = (dout_BTHV, lse_s, delta, scale, chosen)
        dks, dvs = _bank_bwd(call, "summary", *passed)
        dk, dv = _bank_bwd(call, "exact", *passed)
        dkb, dvb = (None, None) if kb_BPGD is None else _bank_bwd(call, "bypass", *passed)
    return dq, dks, dvs, dk, dv, dkb, dvb


def _bank_bwd(
    call: _Call, bank: str, dout: torch.Tensor, lse_s: torch.Tensor, delta: torch.Tensor, scale: float, tile: tiles.Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the keys and values of one bank."""
    k, v, cu_rows, most_rows, first = call.bank(bank)
    batch, rows, groups, dim = k.shape
    heads = call.q.shape[2]
    repeat = heads // groups
    loops = bank == "exact" and repeat > 1
    programs = groups if loops else heads
    kept = k.dtype if programs == groups else torch.float32
    dk = torch.empty(batch, rows, programs, dim, dtype=kept, device=k.device)
    dv = torch.empty(batch, rows, programs, v.shape[-1], dtype=kept, device=k.device)
    if rows > 0:
        attend_bwd_dkv_kernel[(triton.cdiv(most_rows, tile.rows), programs, call.sequences)](
            call.q, k, v, call.pos_b if bank == "bypass" else None, dout, dk, dv, lse_s, delta, call.starts[0], cu_rows,
            call.counts[0], rows, heads, call.q.shape[1], call.positions[0], first, *call.positions[2:], scale,
            *call.q.stride()[:3], *k.stride()[:3], *v.stride()[:3], call.stride_pb, *dout.stride(), *dk.stride()[:3], *dv.stride()[:3],
            HEADS=repeat if loops else 1, BM=tile.cols, BN=tile.rows, BANK=bank, **call.constants, **tile.options(),
        )  # fmt: skip
    if programs == groups:
        return dk, dv
    return (
        dk.view(batch, rows, groups, repeat, dim).sum(3).to(k.dtype),
        dv.view(batch, rows, groups, repeat, v.shape[-1]).sum(3).to(v.dtype),
    )


class _Call:
    """Tensors and numbers of one call, checked, in the order in which the kernels take them."""

    def __init__(
        self, q: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        kb: torch.Tensor | None, vb: torch.Tensor | None, pos_b: torch.Tensor | None,
        grid: tuple[int, int, int], local: int, q_start: int | None, k_start: int, cu_seqlens: torch.Tensor | None, cu_bypass: torch.Tensor | None,
    ) -> None:  # fmt: skip
        arguments.check_grid("attend", *grid)
        arguments.check_local("attend", local)
        arguments.check_banks("attend", q, "BTHD", ks=ks, vs=vs, k=k, v=v, kb=kb, vb=vb, pos_b=pos_b)
        tiles.unit_last(q=q, ks=ks, vs=vs, k=k, v=v, kb=kb, vb=vb)
        self.q, self.ks, self.vs, self.k, self.v, self.kb, self.vb = q, ks, vs, k, v, kb, vb
        self.bypassed = 0 if kb is None else kb.shape[1]
        self.pos_b = None if pos_b is None or kb is None else pos_b.to(torch.int32)
        self.stride_pb = 0 if self.pos_b is None or self.pos_b.dim() == 1 else self.pos_b.stride(0)
        queries, rows = q.shape[1], k.shape[1]
        self.sequences, self.most_tokens, self.most_windows, self.most_bypassed = q.shape[0], queries, ks.shape[1], self.bypassed
        self.starts: tuple[torch.Tensor | None, ...] = (None, None, None)
        start = k_start + rows - queries if q_start is None else q_start
        if cu_seqlens is not None:
            self._pack(cu_seqlens, cu_bypass, grid)
            start = k_start = 0
        elif queries:
            arguments.check_positions(grid, local, queries=queries, q_start=start, exact=rows, k_start=k_start, summaries=ks.shape[1])
        self.packed = cu_seqlens is not None
        # A longer local window than there are positions is no different, and stays clear of the integers' end.
        self.positions = (start, k_start, *grid, min(local, start + queries))
        self.counts = (queries, rows, ks.shape[1], self.bypassed)
        self.tensors = (q, ks, vs, k, v, kb, vb, self.pos_b)
        bank_strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in self.tensors[:7]]
        self.strides = (*(number for strides in bank_strides for number in strides), self.stride_pb)
        dim, dim_v = q.shape[3], v.shape[3]
        self.constants = {
            "REPEAT": q.shape[2] // max(k.shape[2], 1), "D": dim, "V": dim_v, "BD": tiles.power(dim, 16), "BV": tiles.power(dim_v, 16), "VARLEN": self.packed,
        }  # fmt: skip

    def _pack(self, cu_seqlens: torch.Tensor, cu_bypass: torch.Tensor | None, grid: tuple[int, int, int]) -> None:
        q, k = self.q, self.k
        lengths = arguments.sequence_lengths("attend", "cu_seqlens", cu_seqlens, q.shape[1])
        counts = [visibility.num_windows(n, *grid) for n in lengths]
        arguments.check_packed(q, k, self.ks, sum(counts))
        bypassed = arguments.bypass_lengths(cu_bypass, self.bypassed, sequences=len(lengths))
        self.sequences, self.most_tokens, self.most_windows = len(lengths), max(lengths, default=0), max(counts, default=0)
        if cu_bypass is not None:
            self.most_bypassed = max(bypassed, default=0)
            cu_bypass = cu_bypass.to(torch.int32)
        self.starts = (cu_seqlens.to(torch.int32), visibility.cu_windows(cu_seqlens, *grid), cu_bypass)

    def bank(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
        """Keys, values, where sequences start, rows of the longest one, number of the first row."""
        if name == "summary":
            return self.ks, self.vs, self.starts[1], self.most_windows, 0
        if name == "exact":
            return self.k, self.v, self.starts[0], self.k.shape[1] if self.starts[0] is None else self.most_tokens, self.positions[1]
        assert self.kb is not None and self.vb is not None
        return self.kb, self.vb, self.starts[2], self.most_bypassed, 0
