"""Streaming append on a GPU: the next tokens enter the windows that are open, and the windows that end are emitted.

Window ``j`` lives in slot ``j mod R`` of the state, and two windows of a slot never overlap in time. One program owns one slot and goes through its
windows in order, so that the state is changed in place without a race and two runs agree to the bit. It is made for decoding, where few tokens come at
once; a long prefill is pooled at once by `pool`.

Shapes: B batch, T new tokens, n emitted summaries, R = ceil(W/S) slots, G kv heads, D head dim, E gate channels (1 or D), Z gate roles (0: uniform
gates; 1: all roles share the logits; R), U payload roles (1 or R).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from mitigate.kernels import tiles, visibility

COUNTS = ["T", "seen", "origin", "first", "last", "count", "stride_zb", "stride_zt", "stride_zr", "stride_ub"]


@triton.jit(do_not_specialize=COUNTS)
def append_kernel(
    z, u, most, total, weighted, out, T, seen, origin, first, last, count,
    stride_zb, stride_zt, stride_zr, stride_zg,
    stride_ub, stride_ut, stride_ur, stride_ug,
    W: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, U: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One program: one slot of one kv head of one sequence, BD channels. State and out are contiguous."""
    i_r, i_d = tl.program_id(0) // tl.cdiv(D, BD), tl.program_id(0) % tl.cdiv(D, BD)
    i_g, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(1)
    o_s, o_d = tl.arange(0, BS), i_d * BD + tl.arange(0, BD)
    o_e = (i_d * BD if E > 1 else 0) + tl.arange(0, BE)
    i_x = (i_r.to(tl.int64) * tl.num_programs(2) + i_b) * groups + i_g
    # [BE], [BE], [BD]
    b_m = tl.load(most + i_x * E + o_e, mask=o_e < E, other=float("-inf"))
    b_l = tl.load(total + i_x * E + o_e, mask=o_e < E, other=0.0)
    b_acc = tl.load(weighted + i_x * D + o_d, mask=o_d < D, other=0.0)
    if Z > 0:
        p_z = z + i_b * stride_zb + i_g * stride_zg
    p_u = u + i_b * stride_ub + i_g * stride_ug
    for window in range(first + (i_r + R - first % R) % R, last + 1, R):
        start = origin + window * S - seen  # row of this call that its offset 0 has
        for offset in range(tl.maximum(-start, 0) // BS * BS, tl.minimum(W, T - start), BS):
            o_i = offset + o_s
            m_t = (o_i < W) & (start + o_i >= 0) & (start + o_i < T)
            o_t = (start + o_i).to(tl.int64)
            # [BS, BE]
            if Z > 0:
                o_r = o_i // S if Z > 1 else o_i * 0
                p_s = p_z + o_t[:, None] * stride_zt + o_r.to(tl.int64)[:, None] * stride_zr + o_e[None, :]
                b_s = tl.load(p_s, mask=m_t[:, None] & (o_e < E)[None, :], other=float("-inf")).to(tl.float32)
            else:
                b_s = tl.where(m_t[:, None], tl.zeros([BS, BE], tl.float32), float("-inf"))
            # [BS, BD]
            o_r = o_i // S if U > 1 else o_i * 0
            p_y = p_u + o_t[:, None] * stride_ut + o_r.to(tl.int64)[:, None] * stride_ur + o_d[None, :]
            b_u = tl.load(p_y, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
            b_new = tl.maximum(b_m, tl.max(b_s, 0))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_keep = tl.exp(b_m - b_safe)
            b_w = tl.exp(b_s - b_safe[None, :])
            b_l = b_l * b_keep + tl.sum(b_w, 0)
            b_acc = b_acc * b_keep + tl.sum(b_w * b_u, 0)
            b_m = b_new
        ended = tl.full([1], start + W, tl.int32) <= T
        # [BD]
        b_out = b_acc / tl.where(b_l == 0.0, float("nan"), b_l)
        p_out = out + ((i_b * count + window - first) * groups + i_g) * D + o_d
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_d < D) & ended)
        b_m = tl.where(ended, float("-inf"), b_m)
        b_l = tl.where(ended, 0.0, b_l)
        b_acc = tl.where(ended, 0.0, b_acc)
    tl.store(most + i_x * E + o_e, b_m, mask=o_e < E)
    tl.store(total + i_x * E + o_e, b_l, mask=o_e < E)
    tl.store(weighted + i_x * D + o_d, b_acc, mask=o_d < D)


def append(
    z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor, most: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor, *,
    window: int, stride: int, origin: int, seen: int, tile: tiles.PoolTile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Take in tokens ``seen .. seen + T - 1``; changes the state, which is that of `stream.State`, in place.

    Args:
        z_BTZGE: gate logits by role, bias included; Z = 0 for uniform gates.
        u_BTUGD: payload by role.
        most, total, weighted: fp32, contiguous, [R, B, G, E], [R, B, G, E] and [R, B, G, D].
        tile: instead of the one in the table; its groups are not used.

    Returns:
        the summaries that became complete, [B, n, G, D] in the payload's dtype.
    """
    batch, length, roles_u, groups, dim = u_BTUGD.shape
    roles_z, channels, slots = z_BTZGE.shape[2], most.shape[3], most.shape[0]
    first, stop = (visibility.num_windows(tokens, window, stride, origin) for tokens in (seen, seen + length))
    out = torch.empty(batch, stop - first, groups, dim, dtype=u_BTUGD.dtype, device=u_BTUGD.device)
    if length == 0 or weighted.numel() == 0:
        return out
    tiles.unit_last(z=z_BTZGE, u=u_BTUGD)
    tile = tile or tiles.pool(window, dim, whole=channels == 1)
    grid = (slots * triton.cdiv(dim, tile.channels), groups, batch)
    with tiles.on_device(z_BTZGE, u_BTUGD, most, total, weighted):
        append_kernel[grid](
            z_BTZGE if roles_z else None, u_BTUGD, most, total, weighted, out,
            length, seen, origin, first, (seen + length - 1 - origin) // stride, stop - first,
            *(z_BTZGE.stride()[:4] if roles_z else (0, 0, 0, 0)), *u_BTUGD.stride()[:4],
            W=window, S=stride, R=slots, D=dim, E=channels, Z=roles_z, U=roles_u,
            BS=tile.phases, BD=tile.channels, BE=tile.channels if channels > 1 else 1, **tile.options(),
        )  # fmt: skip
    return out
