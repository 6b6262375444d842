"""What the kernels ask of their arguments, the same on every device: each refusal names the argument, the bound and what came.

Shapes: B batch, T tokens, N summaries, X exact tokens, P bypassed tokens, H query heads, G kv heads, D head dim of keys, V of values, E gate channels
(1 or D), R = ceil(W/S), Z and U roles of logits and payload.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mitigate.kernels import visibility

Grid = tuple[int, int, int]  # window, stride, origin


def check_grid(kernel: str, window: int, stride: int, origin: int) -> None:
    """ValueError unless windows of `window` tokens, `stride` apart, cover every token from position 0 on."""
    if not (1 <= stride <= window and -window < origin <= 0):
        raise ValueError(f"{kernel}: needs 1 <= stride <= window and -window < origin <= 0, got window {window}, stride {stride}, origin {origin}")


def check_local(kernel: str, local: int) -> None:
    """ValueError unless `local` is a length."""
    if local < 0:
        raise ValueError(f"{kernel}: local must be at least 0, got {local}")


def check_dims(kernel: str, wanted: str, **tensors: torch.Tensor | None) -> None:
    """Unless each is a tensor (TypeError) with as many dimensions as the layout has letters, such as "BTHD", the last not empty (ValueError)."""
    for name, x in tensors.items():
        if x is None:
            continue
        check_tensor(kernel, name, x)
        if x.dim() != len(wanted) or x.shape[-1] < 1:
            raise ValueError(f"{kernel}: {name} must be [{', '.join(wanted)}] with {wanted[-1]} of at least 1, got shape {tuple(x.shape)}")


def check_tensor(kernel: str, name: str, x: object) -> None:
    """TypeError for anything but a tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{kernel}: {name} must be a tensor, got {type(x).__name__}")


def check_pool(kernel: str, z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, window: int, stride: int, channels: int | None = None) -> None:
    """Logits and payload by role; Z = 0 or None for uniform gates. `channels` that the gate must have, if they are known."""
    check_dims(kernel, "BTUGD", u=u_BTUGD)
    check_dims(kernel, "BTZGE", z=z_BTZGE)
    roles, groups, dim = math.ceil(window / stride), u_BTUGD.shape[3], u_BTUGD.shape[4]
    if u_BTUGD.shape[2] not in (1, roles):
        raise ValueError(f"{kernel}: u must have {_roles(window, stride)}, got {u_BTUGD.shape[2]}: {tuple(u_BTUGD.shape)}")
    if z_BTZGE is None or z_BTZGE.shape[2] == 0:
        return check_floats(kernel, u=u_BTUGD)
    if z_BTZGE.shape[2] not in (1, roles):
        raise ValueError(f"{kernel}: z must have {_roles(window, stride)}, got {z_BTZGE.shape[2]}: {tuple(z_BTZGE.shape)}")
    allowed = dict.fromkeys((1, dim) if channels is None else (channels,))
    if z_BTZGE.shape[4] not in allowed:
        raise ValueError(f"{kernel}: z must have {' or '.join(map(str, allowed))} gate channels, got {z_BTZGE.shape[4]}: {tuple(z_BTZGE.shape)}")
    if (z_BTZGE.shape[:2], z_BTZGE.shape[3]) != (u_BTUGD.shape[:2], groups):
        raise ValueError(f"{kernel}: z and u must agree in batch, tokens and kv heads, got {tuple(z_BTZGE.shape)} and {tuple(u_BTUGD.shape)}")
    check_floats(kernel, z=z_BTZGE, u=u_BTUGD)


def _roles(window: int, stride: int) -> str:
    roles = math.ceil(window / stride)
    return f"{'1 role' if roles == 1 else f'1 role or {roles}'}, window {window} over stride {stride}"


def check_floats(kernel: str, **tensors: torch.Tensor | None) -> None:
    """TypeError unless all are of a floating-point dtype."""
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{kernel}: {name} must be of a floating-point dtype, got {x.dtype}")


def check_banks(
    kernel: str,
    q: torch.Tensor,
    layout: str,
    *,
    ks: torch.Tensor,
    vs: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kb: torch.Tensor | None,
    vb: torch.Tensor | None,
    pos_b: torch.Tensor | None,
) -> None:
    """Queries of a layout such as "BTHD" against banks of keys [B, ·, G, D] and values [B, ·, G, V]: whole, of one dtype, of shapes that fit.

    Raises:
        TypeError: of several dtypes, or none of floating-point numbers.
        ValueError: shapes that do not fit, or a bank without its values or positions.
    """
    if len({x is None for x in (kb, vb, pos_b)}) > 1:
        raise ValueError(f"{kernel}: kb, vb and pos_b come together")
    tensors = {"ks": ks, "vs": vs, "k": k, "v": v, "kb": kb, "vb": vb}
    check_dims(kernel, layout, q=q)
    for name, x in tensors.items():
        rows = {"s": "N", "b": "P"}.get(name[1:], "T")
        check_dims(kernel, f"B{rows}G{'D' if name[0] == 'k' else 'V'}", **{name: x})
    if kb is not None and pos_b is not None:
        check_tensor(kernel, "pos_b", pos_b)
        if pos_b.shape[-1:] != kb.shape[1:2]:
            raise ValueError(f"{kernel}: pos_b must name {kb.shape[1]} positions, got shape {tuple(pos_b.shape)}")
    check_floats(kernel, q=q)
    check_dtype(kernel, q, **tensors)
    heads, groups = q.shape[-2], k.shape[2]
    if heads % max(groups, 1) or (groups == 0 and heads):
        raise ValueError(f"{kernel}: {groups} kv heads must divide {heads} query heads")
    for keys, values in ((ks, vs), (k, v), (kb, vb)):
        if keys is None or values is None:
            continue
        if (keys.shape[0], keys.shape[2:], values.shape) != (q.shape[0], (groups, q.shape[-1]), (*keys.shape[:3], v.shape[3])):
            raise ValueError(f"{kernel}: q {tuple(q.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit")


def check_dtype(kernel: str, q: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """TypeError unless all are of the dtype of q."""
    for name, x in tensors.items():
        if x is not None and x.dtype != q.dtype:
            raise TypeError(f"{kernel}: {name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def check_positions(grid: Grid, local: int, *, queries: int, q_start: int, exact: int, k_start: int, summaries: int) -> None:
    """ValueError unless the banks hold all that `queries` from `q_start` on see: `exact` tokens from `k_start` on, the first `summaries`."""
    last = q_start + queries - 1
    low = visibility.exact_lo(q_start, *grid, local) if q_start >= 0 else 0
    if k_start < 0 or q_start < 0 or k_start > low or last >= k_start + exact:
        raise ValueError(f"attend: queries {q_start} .. {last} need exact tokens from {low} on, held are [{k_start}, {k_start + exact})")
    if visibility.num_completed(last, *grid) > summaries:
        raise ValueError(f"attend: the query at {last} sees {visibility.num_completed(last, *grid)} summaries, held are {summaries}")


def check_places(pos_b: torch.Tensor) -> None:
    """ValueError unless positions of bypassed tokens are integers [P] that grow; reads them."""
    got = f"{pos_b.dtype} of shape {tuple(pos_b.shape)}"
    if pos_b.dim() == 1 and _whole(pos_b):
        places = [-1, *map(int, pos_b.tolist())]
        if all(before < after for before, after in pairwise(places)):
            return
        got = _shown(places[1:])
    raise ValueError(f"attend: pos_b must be integers that grow from 0 on, got {got}")


def sequence_lengths(kernel: str, name: str, cu: torch.Tensor, total: int) -> list[int]:
    """Lengths of packed sequences from where they start; read on the host. ValueError unless they begin at 0, never fall and end at `total`."""
    check_tensor(kernel, name, cu)
    if cu.dim() != 1 or not _whole(cu):
        raise ValueError(f"{kernel}: {name} must be integers [sequences + 1], got {cu.dtype} of shape {tuple(cu.shape)}")
    starts = [int(x) for x in cu.tolist()]
    lengths = [stop - start for start, stop in pairwise(starts)]
    if not starts or starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{kernel}: {name} must begin with 0, not fall and end with {total}, got {_shown(starts)}")
    return lengths


def _whole(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _shown(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") or "nothing"


def packed_lengths(cu_seqlens: torch.Tensor, u_BTUGD: torch.Tensor) -> list[int]:
    """Tokens of each packed sequence that is pooled. ValueError unless there is one row and they are all of it."""
    if u_BTUGD.shape[0] != 1:
        raise ValueError(f"pool: packed sequences need a batch of 1, got {u_BTUGD.shape[0]}")
    return sequence_lengths("pool", "cu_seqlens", cu_seqlens, u_BTUGD.shape[1])


def check_packed(q_BTHD: torch.Tensor, k_BTGD: torch.Tensor, ks_BNGD: torch.Tensor, windows: int) -> None:
    """ValueError unless packed sequences are one row, with as many exact tokens as queries and the summaries of all."""
    if q_BTHD.shape[0] != 1 or k_BTGD.shape[1] != q_BTHD.shape[1] or ks_BNGD.shape[1] != windows:
        shapes = f"q {tuple(q_BTHD.shape)}, k {tuple(k_BTGD.shape)}, ks {tuple(ks_BNGD.shape)}"
        raise ValueError(f"attend: packed sequences need a batch of 1, as many exact tokens as queries and {windows} summaries, got {shapes}")


def bypass_lengths(cu_bypass: torch.Tensor | None, bypassed: int, *, sequences: int) -> list[int]:
    """How many of the bypassed tokens each packed sequence has. ValueError where `cu_bypass` is missing or does not fit."""
    if cu_bypass is None:
        if bypassed:
            raise ValueError("attend: packed sequences with bypassed tokens need cu_bypass")
        return [0] * sequences
    lengths = sequence_lengths("attend", "cu_bypass", cu_bypass, bypassed)
    if len(lengths) != sequences:
        raise ValueError(f"attend: cu_bypass must name {sequences} sequences, as cu_seqlens does, got {len(lengths)}")
    return lengths
