"""Every kernel against the reference in fp64 on small shapes: what `mitigate doctor` runs, and a GPU's bench before it times anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from mitigate.kernels import ops, reference, stream, visibility
from mitigate.kernels.cases import AttendCase, PoolCase


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


def check_pool(case: PoolCase, device: torch.device, dtype: torch.dtype) -> Check:
    """Pool against the reference."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(case.batch, case.length, case.roles, case.groups, case.channels, generator=generator)
    u = torch.randn(case.batch, case.length, case.groups, case.dim, generator=generator)
    window, stride, origin = case.window, case.stride, 1 - case.stride
    role = torch.arange(case.window, device=device) // case.stride

    def plain(z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return reference.pool(z[:, :, role.to(z.device)], u[:, :, None], window=window, stride=stride, origin=origin)[0]

    start = time.perf_counter()
    error, allowed = _worst(lambda z, u: ops.pool(z, u[:, :, None], window=window, stride=stride, origin=origin)[0], [plain], [z, u], dtype, device)
    name = f"pool {'scalar' if case.channels == 1 else 'vector'} W{case.window} S{case.stride} D{case.dim} {dtype_name(dtype)}"
    return Check(kernel=name, backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def check_attend(case: AttendCase, device: torch.device, dtype: torch.dtype) -> Check:
    """Attend with every bank against the reference."""
    grid, origin, scale = (case.window, case.stride, 1 - case.stride), 1 - case.stride, case.dim**-0.5
    count = visibility.num_windows(case.length, *grid)
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.heads, case.length), *[(case.groups, count)] * 2, *[(case.groups, case.length)] * 2)
    parts = [torch.randn(case.batch, n, h, case.dim, generator=generator) for h, n in sizes]
    t = torch.arange(case.length)
    bypass = t[reference.is_bypassed(t, stride=case.stride, origin=origin, phases=(0,))]
    seen = reference.visible(t, t, count, window=case.window, stride=case.stride, origin=origin, local=case.local, bypass=(0,))

    def plain(*parts: torch.Tensor, fused: bool = False) -> torch.Tensor:
        q, ks, vs, k, v = (x.transpose(1, 2) for x in parts)
        keys, values, visible = torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2), seen.to(q.device)
        if fused:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale, enable_gqa=case.heads > case.groups)
        else:
            out = reference.attend(q, keys, values, visible, scale)
        return out.transpose(1, 2)

    def fast(*parts: torch.Tensor) -> torch.Tensor:
        pos = bypass.to(parts[0].device)
        q, ks, vs, k, v = parts
        out, _ = ops.attend(
            q,
            ks,
            vs,
            k,
            v,
            window=case.window,
            stride=case.stride,
            origin=origin,
            local=case.local,
            scale=scale,
            kb_BPGD=k[:, pos],
            vb_BPGV=v[:, pos],
            pos_b=pos,
        )
        return out

    start = time.perf_counter()
    error, allowed = _worst(fast, [plain, lambda *xs: plain(*xs, fused=True)], parts, dtype, device)
    name = f"attend H{case.heads} G{case.groups} W{case.window} S{case.stride} D{case.dim} {dtype_name(dtype)}"
    return Check(kernel=name, backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


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
    """Split-K decoding of one query against the reference; needs Triton and its device."""
    from mitigate.kernels import decode

    grid, local, scale, length, groups, dim = (16, 16, 0), 32, 0.125, 3001, 2, 64
    generator = torch.Generator().manual_seed(0)
    count = visibility.num_windows(length, *grid)
    q, ks, vs, k, v = (torch.randn(2, n, h, dim, generator=generator).to(dtype) for n, h in ((1, 8), *[(count, groups)] * 2, *[(length, groups)] * 2))
    t = torch.arange(length)
    visible = reference.visible(t[-1:], t, count, window=16, stride=16, origin=0, local=local)

    def plain(kind: torch.dtype, where: torch.device) -> torch.Tensor:
        a, b, c, d, e = (x.to(where, kind).transpose(1, 2) for x in (q, ks, vs, k, v))
        out = reference.attend(a, torch.cat([b, d], dim=2), torch.cat([c, e], dim=2), visible.to(where), scale)
        return out.transpose(1, 2).double().cpu()

    start = time.perf_counter()
    right, other = plain(torch.float64, torch.device("cpu")), plain(dtype, device)
    low = visibility.exact_lo(length - 1, *grid, local)
    held = [x.to(device) for x in (q[:, 0], ks, vs, k[:, low:], v[:, low:])]
    found = decode.decode_fwd(*held, window=16, stride=16, local=local, scale=scale, position=length - 1, k_start=low)[0][:, None].double().cpu()
    allowed = 2 * (float((other - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max()))
    error = float((found - right).abs().max())
    return Check(kernel=f"decode {dtype_name(dtype)}", backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def small_checks(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Check]:
    """Every kernel that this device runs, on small shapes: about a second on a CPU."""
    pools = [check_pool(PoolCase(batch=2, groups=2, length=93, dim=16, window=16, stride=8, channels=channels), device, dtype) for channels in (1, 16)]
    attends = [check_attend(AttendCase(batch=2, heads=4, groups=groups, length=93, dim=16, window=16, stride=8, local=5), device, dtype) for groups in (1, 4)]
    decodes = [check_decode(device, dtype)] if device.type == "cuda" and ops.has_triton() else []
    return [*pools, *attends, *decodes, check_stream(device, dtype)]


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
