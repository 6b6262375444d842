"""Every kernel against the reference in fp64 on small shapes: what `mitigate doctor` runs, and a GPU's bench before it times anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

from mitigate.kernels import ops, reference, stream, visibility
from mitigate.kernels.cases import AttendCase, PoolCase

PACKED = (40, 1, 0, 93)  # lengths of packed sequences


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kernel against the reference in fp64: largest error of output and gradients, and what the tolerance rule allows."""

    kernel: str
    backend: str
    error: float
    allowed: float
    seconds: float

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= self.allowed


def _worst(
    fast: Callable[..., torch.Tensor], plains: Sequence[Callable[..., torch.Tensor]], parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """The error of output and gradients that comes nearest to, or farthest over, what is allowed, and that."""

    def results(run: Callable[..., torch.Tensor], kind: torch.dtype, where: torch.device) -> list[torch.Tensor]:
        leaves = [x.to(dtype).to(where, kind).requires_grad_() for x in parts]
        out = run(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(where, kind)
        return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, weight))]

    exact = results(plains[0], torch.float64, torch.device("cpu"))
    ours, theirs = results(fast, dtype, device), [results(plain, dtype, device) for plain in plains]
    found = []
    for index, (mine, right) in enumerate(zip(ours, exact, strict=True)):
        plain = max(float((way[index] - right).abs().max()) for way in theirs)
        allowed = 2 * (plain + torch.finfo(dtype).eps * float(right.abs().max()))
        error = float((mine - right).abs().max()) if bool(torch.isfinite(mine).all()) else float("inf")
        found.append((error, allowed))
    return max(found, key=lambda pair: pair[0] / max(pair[1], 1e-300))


def check_pool(case: PoolCase, device: torch.device, dtype: torch.dtype, *, packed: Sequence[int] = ()) -> Check:
    """Pool against the reference; without gate channels uniform gates. `packed`: lengths of sequences in one row, instead of the case's."""
    lengths, batch = list(packed) or [case.length], 1 if packed else case.batch
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(batch, sum(lengths), case.roles_u, case.groups, case.dim, generator=generator)
    gates = [torch.randn(batch, sum(lengths), case.roles, case.groups, case.channels, generator=generator)] if case.channels else []
    grid: dict[str, Any] = {"window": case.window, "stride": case.stride, "origin": 1 - case.stride}
    role = torch.arange(case.window) // case.stride

    def plain(u: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        logits = u.new_zeros(*u.shape[:2], 1, case.groups, 1).expand(-1, -1, case.window, -1, -1) if z is None else z[:, :, role.to(u.device)]
        payload = u if case.roles_u == 1 else u[:, :, role.to(u.device)]
        return torch.cat([reference.pool(*part, **grid)[0] for part in zip(logits.split(lengths, 1), payload.split(lengths, 1), strict=True)], dim=1)

    def fast(u: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        return ops.pool(z, u, **grid, cu_seqlens=_starts(lengths).to(u.device) if packed else None)[0]

    start = time.perf_counter()
    error, allowed = _worst(fast, [plain], [u, *gates], dtype, device)
    kind = {0: "uniform", 1: "scalar"}.get(case.channels, "vector") + (" per role" if case.roles_u > 1 else "") + (" packed" if packed else "")
    name = f"pool {kind} W{case.window} S{case.stride} D{case.dim} {dtype_name(dtype)}"
    return Check(kernel=name, backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def check_attend(case: AttendCase, device: torch.device, dtype: torch.dtype, *, packed: Sequence[int] = ()) -> Check:
    """Attend with every bank against the reference. `packed`: lengths of sequences in one row, instead of the case's."""
    lengths, batch = list(packed) or [case.length], 1 if packed else case.batch
    grid: dict[str, Any] = {"window": case.window, "stride": case.stride, "origin": 1 - case.stride}
    scale = case.dim**-0.5
    counts = [visibility.num_windows(n, **grid) for n in lengths]
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.heads, sum(lengths)), *[(case.groups, sum(counts))] * 2, *[(case.groups, sum(lengths))] * 2)
    parts = [torch.randn(batch, n, h, case.dim, generator=generator) for h, n in sizes]
    positions = [torch.arange(n) for n in lengths]
    banks = [t[reference.is_bypassed(t, stride=case.stride, origin=grid["origin"], phases=(0,))] for t in positions]

    def plain(*parts: torch.Tensor, fused: bool = False) -> torch.Tensor:
        split = [x.transpose(1, 2).split(n, dim=2) for x, n in zip(parts, (lengths, counts, counts, lengths, lengths), strict=True)]
        outs = []
        for t, count, q, ks, vs, k, v in zip(positions, counts, *split, strict=True):
            visible = reference.visible(t, t, count, **grid, local=case.local, bypass=(0,)).to(q.device)
            keys, values = torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2)
            if fused:
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale, enable_gqa=case.heads > case.groups)
            else:
                out = reference.attend(q, keys, values, visible, scale)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, dim=1)

    def fast(q: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([bank + first for bank, first in zip(banks, _starts(lengths).tolist(), strict=False)]).to(q.device)
        rest: dict[str, Any] = {"kb_BPGD": k[:, rows], "vb_BPGV": v[:, rows], "pos_b": torch.cat(banks).to(q.device)}
        if packed:
            rest |= {"cu_seqlens": _starts(lengths).to(q.device), "cu_bypass": _starts([len(bank) for bank in banks]).to(q.device)}
        return ops.attend(q, ks, vs, k, v, **grid, local=case.local, scale=scale, **rest)[0]

    start = time.perf_counter()
    error, allowed = _worst(fast, [plain, lambda *xs: plain(*xs, fused=True)], parts, dtype, device)
    name = f"attend H{case.heads} G{case.groups}{' packed' if packed else ''} W{case.window} S{case.stride} D{case.dim} {dtype_name(dtype)}"
    return Check(kernel=name, backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def check_stream(device: torch.device, dtype: torch.dtype) -> Check:
    """Streaming append in uneven pieces against one pass of the reference."""
    window, stride, origin, length = 8, 4, -3, 61
    generator = torch.Generator().manual_seed(0)
    z, u = (torch.randn(2, length, n, 2, d, generator=generator).to(dtype) for n, d in ((2, 1), (1, 16)))
    role = torch.arange(window) // stride

    def one_pass(kind: torch.dtype) -> torch.Tensor:
        return reference.pool(z.to(kind)[:, :, role], u.to(kind), window=window, stride=stride, origin=origin)[0].double()

    right, plain = one_pass(torch.float64), one_pass(dtype)
    start = time.perf_counter()
    state = stream.start(2, 2, 16, window=window, stride=stride, origin=origin, device=device)
    pieces = zip(z.to(device).split(7, dim=1), u.to(device).split(7, dim=1), strict=True)
    found = torch.cat([ops.append(state, *piece) for piece in pieces], dim=1).cpu().double()
    allowed = 2 * (float((plain - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max()))
    error = float((found - right).abs().max())
    return Check(kernel=f"append {dtype_name(dtype)}", backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def check_decode(device: torch.device, dtype: torch.dtype) -> Check:
    """One query at the end of a long sequence, with bypassed tokens, against the reference."""
    grid: dict[str, Any] = {"window": 16, "stride": 16, "origin": 0}
    local, scale, length, groups, dim = 32, 0.125, 3001, 2, 64
    generator = torch.Generator().manual_seed(0)
    count = visibility.num_windows(length, **grid)
    q, ks, vs, k, v = (torch.randn(2, n, h, dim, generator=generator).to(dtype) for n, h in ((1, 8), *[(count, groups)] * 2, *[(length, groups)] * 2))
    t = torch.arange(length)
    visible = reference.visible(t[-1:], t, count, **grid, local=local, bypass=(0,))
    low = visibility.exact_lo(length - 1, **grid, local=local)
    bypassed = t[:low][reference.is_bypassed(t[:low], stride=16, origin=0, phases=(0,))]

    def plain(kind: torch.dtype, where: torch.device) -> torch.Tensor:
        a, b, c, d, e = (x.to(where, kind).transpose(1, 2) for x in (q, ks, vs, k, v))
        out = reference.attend(a, torch.cat([b, d], dim=2), torch.cat([c, e], dim=2), visible.to(where), scale)
        return out[:, :, 0].double().cpu()

    right, other = plain(torch.float64, torch.device("cpu")), plain(dtype, device)
    banks = [x.to(device) for x in (q[:, 0], ks, vs, k[:, low:], v[:, low:], k[:, bypassed], v[:, bypassed])]
    start = time.perf_counter()
    found = ops.decode(*banks[:5], **grid, local=local, scale=scale, position=length - 1, kb_BPGD=banks[5], vb_BPGV=banks[6]).double().cpu()
    allowed = 2 * (float((other - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max()))
    error = float((found - right).abs().max())
    return Check(kernel=f"decode {dtype_name(dtype)}", backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def small_checks(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Check]:
    """Every operator and every kind of gate, payload and sequence, on small shapes: about a second on a CPU, longer where Triton must compile first."""
    pool: dict[str, Any] = {"batch": 2, "groups": 2, "length": 93, "dim": 16, "window": 16, "stride": 8}
    pools = [check_pool(PoolCase(**pool, channels=channels), device, dtype) for channels in (1, 16, 0)]
    pools.append(check_pool(PoolCase(**pool, channels=16, roles_u=2), device, dtype))
    pools.append(check_pool(PoolCase(**pool, channels=1), device, dtype, packed=PACKED))
    attend: dict[str, Any] = {"batch": 2, "heads": 4, "length": 93, "dim": 16, "window": 16, "stride": 8, "local": 5}
    attends = [check_attend(AttendCase(**attend, groups=groups), device, dtype) for groups in (1, 4)]
    attends.append(check_attend(AttendCase(**attend, groups=2), device, dtype, packed=PACKED))
    return [*pools, *attends, check_decode(device, dtype), check_stream(device, dtype)]


def check_table(checks: Sequence[Check]) -> list[str]:
    """One line per check."""
    lines = []
    for check in checks:
        verdict = "ok  " if check.passed else "FAIL"
        numbers = f"error {check.error:.2e}, allowed {check.allowed:.2e}, {check.seconds:.2f} s"
        lines.append(f"  {verdict} {check.kernel:40s} {check.backend:20s} {numbers}")
    return lines


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")
