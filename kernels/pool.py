"""Gated pooling on a GPU: every window's softmax-weighted sum of its payload, and the gradients of both.

Token ``t = origin + g*S + p`` has group ``g`` and phase ``p``; window ``j`` reads group ``j + r`` in role ``r``, at offset ``i = r*S + p < W``. Gate logits and
payload come *by role*: what a token contributes to the window that reads it in role r. Each such element belongs to one window, so overlap
re-reads nothing, and the backward pass gathers: no atomics, every gradient element is written once, two runs agree to the bit.

The bias belongs to the logits: the caller adds it, and its gradient is the caller's sum of ``dz`` over tokens.

Shapes: B batch, T tokens, N summaries, R = ceil(W/S) roles, G kv heads, D head dim, E gate channels (1 or D), Z gate roles (0: uniform gates;
1: all roles share the logits; R), U payload roles (1 or R). Packed sequences (`cu_seqlens`, int [sequences + 1]) have B = 1 and one length of summaries
after another. Only the last dimension needs stride 1; nothing is copied.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from mitigate.kernels import arguments, tiles, visibility
from mitigate.kernels.visibility import sequence_rows_jit

LENGTHS = ["T", "N", "origin", "group0", "stride_lb", "stride_ln", "stride_lg"]


@triton.jit(do_not_specialize=LENGTHS)
def pool_fwd_kernel(
    z, u, out, lse, cu_tokens, cu_windows, T, N, origin, group0,
    stride_zb, stride_zt, stride_zr, stride_zg,
    stride_ub, stride_ut, stride_ur, stride_ug,
    stride_ob, stride_on, stride_og,
    stride_lb, stride_ln, stride_lg,
    W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, U: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: BN windows of one kv head, BD channels."""
    i_n, i_d = tl.program_id(0) // tl.cdiv(D, BD), tl.program_id(0) % tl.cdiv(D, BD)
    i_g, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token0, T = sequence_rows_jit(cu_tokens, i_b, T, VARLEN)
    window0, N = sequence_rows_jit(cu_windows, i_b, N, VARLEN)
    if i_n * BN >= N:
        return
    if VARLEN:
        i_b = i_b * 0
    o_n, o_d = i_n * BN + tl.arange(0, BN), i_d * BD + tl.arange(0, BD)
    o_e = (i_d * BD if E > 1 else 0) + tl.arange(0, BE)
    if Z > 0:
        p_z = z + i_b * stride_zb + token0 * stride_zt + i_g * stride_zg
    p_u = u + i_b * stride_ub + token0 * stride_ut + i_g * stride_ug
    b_m = tl.full([BN, BE], float("-inf"), tl.float32)
    b_l = tl.zeros([BN, BE], tl.float32)
    b_acc = tl.zeros([BN, BD], tl.float32)
    for r in range(R):
        for phase0 in range(0, S, BS):
            o_p = phase0 + tl.arange(0, BS)
            o_t = origin + (o_n[:, None] + r) * S + o_p[None, :]
            m_t = (o_n < N)[:, None] & ((o_p < S) & (r * S + o_p < W))[None, :] & (o_t >= 0) & (o_t < T)
            o_t = o_t.to(tl.int64)
            # [BN, BS, BE]
            if Z > 0:
                i_r = r if Z > 1 else 0
                m_s = m_t[:, :, None] & (o_e < E)[None, None, :]
                b_s = tl.load(p_z + i_r * stride_zr + o_t[:, :, None] * stride_zt + o_e[None, None, :], mask=m_s, other=float("-inf")).to(tl.float32)
            else:
                b_s = tl.where(m_t[:, :, None], tl.zeros([BN, BS, BE], tl.float32), float("-inf"))
            # [BN, BS, BD]
            i_u = r if U > 1 else 0
            m_u = m_t[:, :, None] & (o_d < D)[None, None, :]
            b_u = tl.load(p_u + i_u * stride_ur + o_t[:, :, None] * stride_ut + o_d[None, None, :], mask=m_u, other=0.0).to(tl.float32)
            b_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_keep = tl.exp(b_m - b_safe)
            b_w = tl.exp(b_s - b_safe[:, None, :])
            b_l = b_l * b_keep + tl.sum(b_w, 1)
            b_acc = b_acc * b_keep + tl.sum(b_w * b_u, 1)
            b_m = b_new
    b_l = tl.where(b_l == 0.0, float("nan"), b_l)  # no logit above -inf: as softmax has it
    o_n64 = o_n.to(tl.int64)
    # [BN, BD]
    p_out = out + i_b * stride_ob + (window0 + o_n64[:, None]) * stride_on + i_g * stride_og + o_d[None, :]
    tl.store(p_out, (b_acc / b_l).to(out.dtype.element_ty), mask=(o_n < N)[:, None] & (o_d < D)[None, :])
    # [BN, BE]
    p_lse = lse + i_b * stride_lb + (window0 + o_n64[:, None]) * stride_ln + i_g * stride_lg + o_e[None, :]
    tl.store(p_lse, b_m + tl.log(b_l), mask=(o_n < N)[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def pool_bwd_kernel(
    dout, z, u, out, lse, dz, du, cu_tokens, cu_windows, T, N, origin, group0,
    stride_gb, stride_gn, stride_gg, stride_gd,
    stride_zb, stride_zt, stride_zr, stride_zg,
    stride_ub, stride_ut, stride_ur, stride_ug,
    stride_ob, stride_on, stride_og,
    stride_lb, stride_ln, stride_lg,
    stride_dzb, stride_dzt, stride_dzr, stride_dzg,
    stride_dub, stride_dut, stride_dur, stride_dug,
    W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, U: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """One program: BN groups x BS phases of tokens of one kv head, BD channels; it visits the windows that read them."""
    i_x = tl.program_id(0)
    i_d, i_x = i_x % tl.cdiv(D, BD), i_x // tl.cdiv(D, BD)
    i_p, i_n = i_x % tl.cdiv(S, BS), i_x // tl.cdiv(S, BS)
    i_g, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token0, T = sequence_rows_jit(cu_tokens, i_b, T, VARLEN)
    window0, N = sequence_rows_jit(cu_windows, i_b, N, VARLEN)
    if origin + (group0 + i_n * BN) * S >= T:
        return
    if VARLEN:
        i_b = i_b * 0
    o_g, o_p = group0 + i_n * BN + tl.arange(0, BN), i_p * BS + tl.arange(0, BS)
    o_d = i_d * BD + tl.arange(0, BD)
    o_e = (i_d * BD if E > 1 else 0) + tl.arange(0, BE)
    o_t = origin + o_g[:, None] * S + o_p[None, :]
    m_t = (o_p < S)[None, :] & (o_t >= 0) & (o_t < T)
    o_t = token0 + o_t.to(tl.int64)
    m_d, m_e = m_t[:, :, None] & (o_d < D)[None, None, :], m_t[:, :, None] & (o_e < E)[None, None, :]
    if Z > 0:
        p_z = z + i_b * stride_zb + i_g * stride_zg + o_t[:, :, None] * stride_zt + o_e[None, None, :]
        p_dz = dz + i_b * stride_dzb + i_g * stride_dzg + o_t[:, :, None] * stride_dzt + o_e[None, None, :]
    p_u = u + i_b * stride_ub + i_g * stride_ug + o_t[:, :, None] * stride_ut + o_d[None, None, :]
    p_du = du + i_b * stride_dub + i_g * stride_dug + o_t[:, :, None] * stride_dut + o_d[None, None, :]
    p_dout = dout + i_b * stride_gb + i_g * stride_gg + o_d[None, :].to(tl.int64) * stride_gd
    p_out = out + i_b * stride_ob + i_g * stride_og + o_d[None, :]
    p_lse = lse + i_b * stride_lb + i_g * stride_lg + o_e[None, :]
    b_dz = tl.zeros([BN, BS, BE], tl.float32)
    b_du = tl.zeros([BN, BS, BD], tl.float32)
    for r in range(R):
        o_n = o_g - r
        m_n = (o_n >= 0) & (o_n < N)
        m_r = m_t & m_n[:, None] & (r * S + o_p < W)[None, :]
        o_n = window0 + o_n.to(tl.int64)
        # [BN, BD]
        b_dout = tl.load(p_dout + o_n[:, None] * stride_gn, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
        # [BN, BE]
        b_lse = tl.load(p_lse + o_n[:, None] * stride_ln, mask=m_n[:, None] & (o_e < E)[None, :], other=0.0)
        # [BN, BS, BE]
        b_s = tl.zeros([BN, BS, BE], tl.float32)
        if Z > 0:
            i_r = r if Z > 1 else 0
            b_s = tl.load(p_z + i_r * stride_zr, mask=m_e & m_r[:, :, None], other=0.0).to(tl.float32)
        b_w = tl.exp(tl.where(m_r[:, :, None], b_s - b_lse[:, None, :], float("-inf")))
        # [BN, BS, BD]
        b_g = b_w * b_dout[:, None, :]
        b_du += b_g
        if U > 1:
            tl.store(p_du + r * stride_dur, b_g.to(du.dtype.element_ty), mask=m_d)
        if Z > 0:
            i_u = r if U > 1 else 0
            b_u = tl.load(p_u + i_u * stride_ur, mask=m_d & m_r[:, :, None], other=0.0).to(tl.float32)
            b_out = tl.load(p_out + o_n[:, None] * stride_on, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
            b_g *= b_u - b_out[:, None, :]
            if E == 1:
                b_g = tl.sum(b_g, 2, keep_dims=True)
            b_dz += b_g
            if Z > 1:
                tl.store(p_dz + r * stride_dzr, b_g.to(dz.dtype.element_ty), mask=m_e)
    if U == 1:
        tl.store(p_du, b_du.to(du.dtype.element_ty), mask=m_d)
    if Z == 1:
        tl.store(p_dz, b_dz.to(dz.dtype.element_ty), mask=m_e)


def pool_fwd(
    z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, *, window: int, stride: int, origin: int = 0, cu_seqlens: torch.Tensor | None = None,
    tile: tiles.PoolTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``summary_j = sum_i alpha_{j,i} * u_{j,i}`` with ``alpha_j = softmax_i`` of the logits, over the tokens of window j that exist.

    Args:
        z_BTZGE: gate logits by role, bias included; None or Z = 0 for uniform gates.
        u_BTUGD: payload by role.
        cu_seqlens: first token of each packed sequence and the total; read on the host. B must be 1.
        tile: instead of the one in the table.

    Returns:
        summaries [B, N, G, D] in the payload's dtype; log-sum-exp of the logits [B, N, G, E], fp32.

    Raises:
        ValueError: shapes that do not fit, a last dimension that is not contiguous, tensors on several devices.
    """
    shape = _Shape(z_BTZGE, u_BTUGD, window, stride, origin, cu_seqlens)
    batch, _, roles_u, groups, dim = u_BTUGD.shape
    tile = tile or tiles.pool(stride, dim, whole=False)
    out = torch.empty(batch, shape.windows, groups, dim, dtype=u_BTUGD.dtype, device=u_BTUGD.device)
    lse = torch.empty(batch, shape.windows, groups, shape.channels, dtype=torch.float32, device=u_BTUGD.device)
    if out.numel() == 0:
        return out, lse
    grid = (triton.cdiv(shape.most_windows, tile.groups) * triton.cdiv(dim, tile.channels), groups, shape.sequences)
    z, strides_z = shape.gate(z_BTZGE)
    with tiles.on_device(z_BTZGE, u_BTUGD):
        pool_fwd_kernel[grid](
            z, u_BTUGD, out, lse, shape.cu_tokens, shape.cu_windows, u_BTUGD.shape[1], shape.windows, origin, 0,
            *strides_z, *u_BTUGD.stride()[:4], *out.stride()[:3], *lse.stride()[:3],
            W=window, S=stride, R=shape.roles, D=dim, E=shape.channels, Z=shape.roles_z, U=roles_u,
            BN=tile.groups, BS=tile.phases, BD=tile.channels, BE=tile.channels if shape.channels > 1 else 1, VARLEN=cu_seqlens is not None,
            **tile.options(),
        )  # fmt: skip
    return out, lse


def pool_bwd(
    dout_BNGD: torch.Tensor, z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, out_BNGD: torch.Tensor, lse_BNGE: torch.Tensor, *,
    window: int, stride: int, origin: int = 0, cu_seqlens: torch.Tensor | None = None, tile: tiles.PoolTile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Gradients of `pool_fwd`; the incoming one may have any strides (expanded, transposed).

    Returns:
        dz [B, T, Z, G, E] in the logits' dtype (None for uniform gates) and du [B, T, U, G, D] in the payload's. Exactly 0 where no window reads.
    """
    shape = _Shape(z_BTZGE, u_BTUGD, window, stride, origin, cu_seqlens)
    length, roles_u, groups, dim = u_BTUGD.shape[1:]
    tile = tile or tiles.pool(stride, dim, whole=shape.roles_z > 0 and shape.channels == 1)
    tiles.unit_last(out=out_BNGD)
    dz = None if z_BTZGE is None else torch.empty(z_BTZGE.shape, dtype=z_BTZGE.dtype, device=z_BTZGE.device)
    du = torch.empty(u_BTUGD.shape, dtype=u_BTUGD.dtype, device=u_BTUGD.device)
    if du.numel() == 0:
        return dz, du
    group0 = -origin // stride
    groups_t = (shape.most_tokens - 1 - origin) // stride - group0 + 1
    grid = (triton.cdiv(groups_t, tile.groups) * triton.cdiv(stride, tile.phases) * triton.cdiv(dim, tile.channels), groups, shape.sequences)
    z, strides_z = shape.gate(z_BTZGE)
    grad_z, strides_dz = shape.gate(dz)
    with tiles.on_device(dout_BNGD, z_BTZGE, u_BTUGD, out_BNGD, lse_BNGE):
        pool_bwd_kernel[grid](
            dout_BNGD, z, u_BTUGD, out_BNGD, lse_BNGE, grad_z, du, shape.cu_tokens, shape.cu_windows, length, shape.windows, origin, group0,
            *dout_BNGD.stride(), *strides_z, *u_BTUGD.stride()[:4], *out_BNGD.stride()[:3], *lse_BNGE.stride()[:3], *strides_dz, *du.stride()[:4],
            W=window, S=stride, R=shape.roles, D=dim, E=shape.channels, Z=shape.roles_z, U=roles_u,
            BN=tile.groups, BS=tile.phases, BD=tile.channels, BE=tile.channels if shape.channels > 1 else 1, VARLEN=cu_seqlens is not None,
            **tile.options(),
        )  # fmt: skip
    return dz, du


class _Shape:
    """Sizes of one call, checked: roles, gate channels, and where packed sequences start."""

    def __init__(self, z: torch.Tensor | None, u: torch.Tensor, window: int, stride: int, origin: int, cu_seqlens: torch.Tensor | None) -> None:
        arguments.check_grid("pool", window, stride, origin)
        arguments.check_pool("pool", z, u, window, stride)
        self.roles = triton.cdiv(window, stride)
        batch, length = u.shape[:2]
        self.roles_z, self.channels = (0, 1) if z is None or z.shape[2] == 0 else (z.shape[2], z.shape[4])
        tiles.unit_last(z=z, u=u)
        self.cu_tokens = self.cu_windows = None
        self.sequences, self.most_tokens = batch, length
        self.windows = self.most_windows = visibility.num_windows(length, window, stride, origin)
        if cu_seqlens is not None:
            lengths = arguments.packed_lengths(cu_seqlens, u)
            counts = [visibility.num_windows(n, window, stride, origin) for n in lengths]
            self.sequences, self.most_tokens = len(lengths), max(lengths, default=0)
            self.windows, self.most_windows = sum(counts), max(counts, default=0)
            self.cu_tokens = cu_seqlens.to(torch.int32)
            self.cu_windows = visibility.cu_windows(cu_seqlens, window, stride, origin)

    def gate(self, z: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """A gate tensor and its strides without the last; None and zeros for uniform gates."""
        return (None, (0, 0, 0, 0)) if z is None or self.roles_z == 0 else (z, z.stride()[:4])
