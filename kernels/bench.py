"""Bytes, flops, floor, time and achieved fraction of the floor of the kernels, beside dense attention and the plain PyTorch reference.

    python -m mitigate.kernels.bench [--quick] [--scaling] [--json FILE]
    python -m mitigate.kernels.bench --gpu-check [--json FILE]    # on a GPU: right first, then how fast; within five minutes

On a GPU times are medians between events. On a CPU they are CPU time of one thread (set OMP_NUM_THREADS=1); since other work still disturbs
through the caches, the ways of a case take turns in one run and their medians are compared. The floor of a CPU comes from a matrix product and a
copy in the same run. The table for an H200-class card is computed, not measured.

Shapes: B batch, T tokens, N summaries, P pairs of a query and an entry it sees, H query heads, G kv heads, D head dim, W window, S stride, L local
length, R = ceil(W/S), Z and U roles of logits and payload, E gate channels.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mitigate.kernels import blocked, by_role, ops, reference, stream, visibility

Way = Callable[[], Any]
H200 = {"bytes_per_s": 4.3e12, "flops_per_s": 790e12}  # copy and bf16 rates of an H200-class card
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of the scaling table


# cases -----------------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttendCase:
    """One attention shape; origin 0."""

    batch: int
    heads: int
    groups: int
    length: int
    dim: int
    window: int
    stride: int
    local: int

    @property
    def windows(self) -> int:
        """N."""
        return visibility.num_windows(self.length, self.window, self.stride, 0)

    @property
    def pairs(self) -> int:
        """P: entries seen, summed over queries."""
        t = torch.arange(self.length)
        grid = (self.window, self.stride, 0)
        return int((visibility.num_completed(t, *grid) + t - visibility.exact_lo(t, *grid, self.local) + 1).sum())

    def flops(self, part: str) -> float:
        """Of the forward pass, ``4BHDP``, or of the backward pass, ``10BHDP`` (fused) or ``14BHDP`` (dq and dk/dv apart, as on a GPU)."""
        return {"fwd": 4, "bwd": 10, "bwd-split": 14}[part] * self.batch * self.heads * self.dim * self.pairs

    def bytes(self, part: str, element: int) -> float:
        """Least traffic: q, out, keys and values once; backward also dout, dq and the gradients of keys and values."""
        once = self.batch * self.dim * (2 * self.length * self.heads + 2 * (self.windows + self.length) * self.groups) * element
        return once if part == "fwd" else 2 * once


@dataclass(frozen=True, kw_only=True)
class PoolCase:
    """One pooling shape, one branch; origin 0."""

    batch: int
    groups: int
    length: int
    dim: int
    window: int
    stride: int
    channels: int
    roles_u: int = 1

    @property
    def windows(self) -> int:
        """N."""
        return visibility.num_windows(self.length, self.window, self.stride, 0)

    @property
    def roles(self) -> int:
        """R."""
        return -(-self.window // self.stride)

    def bytes(self, part: str, element: int) -> float:
        """Least traffic of one branch: payload and logits once and the results; backward also their gradients."""
        rows = element * self.length * (self.roles_u * self.dim + self.roles * self.channels)
        if part == "fwd":
            return self.batch * self.groups * (rows + element * self.windows * self.dim + 4 * self.windows * self.channels)
        return self.batch * self.groups * (2 * rows + self.windows * (2 * element * self.dim + 4 * self.channels))


ATTEND = (
    AttendCase(batch=16, heads=4, groups=4, length=256, dim=32, window=16, stride=8, local=32),
    AttendCase(batch=4, heads=4, groups=4, length=1024, dim=32, window=16, stride=8, local=32),
    AttendCase(batch=32, heads=4, groups=1, length=128, dim=32, window=8, stride=8, local=16),
)
POOL = tuple(PoolCase(batch=16, groups=4, length=256, dim=32, window=16, stride=8, channels=channels) for channels in (1, 32))


COMPILED_FROM = 10  # rounds from which the compiled way, which takes half a minute to make, is timed too


# timing ----------------------------------------------------------------------------------------------------------------------------------------------


def medians(ways: dict[str, Way], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each way; they take turns, another one first in every round, and the first two rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    timed = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    names = list(ways)
    for turn in range(repeats + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(timed(ways[name]))
    return {name: statistics.median(found[2:]) for name, found in seconds.items()}


def _cpu_seconds(way: Way) -> float:
    """CPU time of this process, so that waiting for a core does not count; use one thread."""
    start = time.process_time()
    way()
    return time.process_time() - start


def _cuda_seconds(way: Way) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.empty(64 * 2**20, dtype=torch.int8, device="cuda").zero_()  # what the last round left in the L2 cache goes
    before.record()
    way()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Rates of this machine, measured: a large matrix product and a copy that no cache holds."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    x = torch.empty(2**25 if device.type == "cpu" else 2**29, dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    seconds = medians({"product": lambda: a @ a, "copy": lambda: y.copy_(x)}, 7, device)
    return {"flops_per_s": 2 * size**3 / seconds["product"], "bytes_per_s": 2 * x.numel() / seconds["copy"]}


def floor(flops: float, traffic: float, rates: dict[str, float]) -> float:
    """Seconds that neither the arithmetic nor the memory can beat."""
    return max(flops / rates["flops_per_s"], traffic / rates["bytes_per_s"])


def forward_backward(run: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], weight: torch.Tensor) -> Way:
    """Both passes as one call."""
    return lambda: torch.autograd.grad(run(*leaves), leaves, weight, allow_unused=True)


# attend ----------------------------------------------------------------------------------------------------------------------------------------------


def attend_inputs(case: AttendCase, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, ks, vs, k, v as [B, heads, tokens, D] leaves."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.heads, case.length), *[(case.groups, case.windows)] * 2, *[(case.groups, case.length)] * 2)
    made = [torch.randn(case.batch, h, n, case.dim, generator=generator) for h, n in sizes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def attend_ways(case: AttendCase, device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    """The same attention in several ways, and dense causal attention, which keeps every token."""
    grid, scale, repeat = (case.window, case.stride, 0), case.dim**-0.5, case.heads // case.groups
    t = torch.arange(case.length, device=device)
    visible = reference.visible(t, t, case.windows, window=case.window, stride=case.stride, origin=0, local=case.local)
    plan = blocked.plan_with_bank(case.length, grid, local=case.local, bank_P=t[:0], repeat=repeat, like=torch.empty((), device=device))

    def joined(ks: torch.Tensor, vs: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2)

    def masked(q: torch.Tensor, *banks: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, *joined(*banks), attn_mask=visible, scale=scale, enable_gqa=repeat > 1)

    def operator(q: torch.Tensor, *banks: torch.Tensor) -> torch.Tensor:
        parts = [x.transpose(1, 2) for x in (q, *banks)]
        return ops.attend(*parts, window=case.window, stride=case.stride, local=case.local, scale=scale)[0].transpose(1, 2)

    ways: dict[str, Callable[..., torch.Tensor]] = {
        "dense causal SDPA": lambda q, ks, vs, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=repeat > 1),
        "masked SDPA": masked,
        "reference": lambda q, *banks: reference.attend(q, *joined(*banks), visible, scale),
        "operator": operator,
    }
    if device.type == "cpu":
        ways["training path"] = lambda *parts: blocked.attend_blocked(*parts, plan, scale)  # type: ignore[call-arg]
    return ways


def bench_attend(case: AttendCase, device: torch.device, dtype: torch.dtype, rates: dict[str, float], repeats: int) -> dict[str, Any]:
    """Forward and backward together, every way."""
    leaves = attend_inputs(case, device, dtype)
    weight = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    seconds = medians({name: forward_backward(run, leaves, weight) for name, run in attend_ways(case, device).items()}, repeats, device)
    element = leaves[0].element_size()
    flops = case.flops("fwd") + case.flops("bwd" if device.type == "cpu" else "bwd-split")
    traffic = case.bytes("fwd", element) + case.bytes("bwd", element)
    return _entry("attend", asdict(case), flops, traffic, floor(flops, traffic, rates), seconds, "masked SDPA")


# pool ------------------------------------------------------------------------------------------------------------------------------------------------


def unfolded(z_BTRGE: torch.Tensor, u_BTGD: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """Pooling with `Tensor.unfold`, as one would write it first."""
    s = z_BTRGE.unfold(1, window, stride)
    s = torch.cat([s[:, :, r, :, :, r * stride : (r + 1) * stride] for r in range(z_BTRGE.shape[2])], dim=-1)
    return (s.softmax(dim=-1) * u_BTGD.unfold(1, window, stride)).sum(dim=-1)


def gathered(z_BTRGE: torch.Tensor, u_BTGD: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """Pooling with windows gathered by index, as the reference does."""
    token = reference.window_index(z_BTRGE.shape[1], window, stride, 0).to(z_BTRGE.device)
    role = torch.arange(window, device=z_BTRGE.device) // stride
    return (z_BTRGE[:, token, role].softmax(dim=2) * u_BTGD[:, token]).sum(dim=2)


def by_roles(z_BTRGE: torch.Tensor, u_BTGD: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """Pooling role by role without windows, for `torch.compile` to fuse; window is a multiple of stride and stride one of T."""
    roles, count = window // stride, z_BTRGE.shape[1] // stride - window // stride + 1
    z, u = z_BTRGE.unflatten(1, (-1, stride)), u_BTGD.unflatten(1, (-1, stride))
    parts = [(z[:, r : r + count, :, r], u[:, r : r + count]) for r in range(roles)]
    largest = reduce(torch.maximum, [part.amax(2) for part, _ in parts])[:, :, None]
    weights = [(part - largest).exp() for part, _ in parts]
    total = reduce(torch.add, [w.sum(2) for w in weights])
    return reduce(torch.add, [(w * payload).sum(2) for w, (_, payload) in zip(weights, parts, strict=True)]) / total


def bench_pool(case: PoolCase, device: torch.device, dtype: torch.dtype, rates: dict[str, float], repeats: int) -> dict[str, Any]:
    """Forward and backward together, every way; one branch."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(case.batch, case.length, case.roles, case.groups, case.channels, generator=generator)
    u = torch.randn(case.batch, case.length, case.groups, case.dim, generator=generator)
    leaves = [x.to(device, dtype).requires_grad_() for x in (z, u)]
    weight = torch.randn(case.batch, case.windows, case.groups, case.dim, generator=generator).to(device, dtype)
    window, stride = case.window, case.stride
    runs: dict[str, Callable[..., torch.Tensor]] = {
        "unfold": lambda z, u: unfolded(z, u, window, stride),
        "gather": lambda z, u: gathered(z, u, window, stride),
        "operator": lambda z, u: ops.pool(z, u[:, :, None], window=window, stride=stride)[0],
    }
    if device.type == "cpu":
        runs["training path"] = lambda z, u: by_role.pool(z, u[:, :, None], window=window, stride=stride)
        if shutil.which("g++") and repeats >= COMPILED_FROM:
            fused = torch.compile(by_roles, dynamic=False)
            runs["roles, torch.compile"] = lambda z, u: fused(z, u, window, stride)
    seconds = medians({name: forward_backward(run, leaves, weight) for name, run in runs.items()}, repeats, device)
    element = leaves[0].element_size()
    traffic = case.bytes("fwd", element) + case.bytes("bwd", element)
    flops = 16.0 * case.batch * case.groups * case.windows * case.window * case.dim
    return _entry("pool", asdict(case), flops, traffic, floor(flops, traffic, rates), seconds, "unfold")


def _entry(kind: str, case: dict[str, Any], flops: float, traffic: float, least: float, seconds: dict[str, float], against: str) -> dict[str, Any]:
    ways = {
        name: {"ms": 1e3 * value, "faster": seconds[against] / value, "of_floor": None if name.startswith("dense") else least / value}
        for name, value in seconds.items()
    }
    return {"kernel": kind, "case": case, "flops": flops, "bytes": traffic, "floor_ms": 1e3 * least, "against": against, "ways": ways}


# scaling ---------------------------------------------------------------------------------------------------------------------------------------------


def scaling_case(length: int) -> AttendCase:
    """W16 S16, one sequence of four heads."""
    return AttendCase(batch=1, heads=4, groups=4, length=length, dim=32, window=16, stride=16, local=32)


def one_length(length: int, way: str, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward in this process, and the peak of its resident memory over what it held before, in MiB."""
    case, device = scaling_case(length), torch.device("cpu")
    small = attend_inputs(scaling_case(64), device, torch.float32)
    forward_backward(attend_ways(scaling_case(64), device)[way], small, torch.ones_like(small[0]))()  # loads the libraries
    leaves = attend_inputs(case, device, torch.float32)
    weight = torch.randn(leaves[0].shape)
    held = _resident_kib("VmRSS")
    _reset_peak()
    if way == "training path":
        plan = blocked.plan_with_bank(length, (16, 16, 0), local=32, bank_P=torch.arange(0), repeat=1, like=weight)
        run = forward_backward(lambda *parts: blocked.attend_blocked(*parts, plan, case.dim**-0.5), leaves, weight)  # type: ignore[call-arg]
    else:
        run = forward_backward(attend_ways(case, device)[way], leaves, weight)
    run()
    peak = _resident_kib("VmHWM") - held
    seconds = statistics.median(_cpu_seconds(run) for _ in range(repeats))
    return {"length": length, "seconds": seconds, "us_per_query": 1e6 * seconds / length, "peak_mib": peak / 1024}


def _resident_kib(field: str) -> int:
    """Resident memory of this process on Linux, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def bench_scaling(lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Each length and way in a process of its own, since peak memory never falls again; masked SDPA stops at 4,096 tokens."""
    found = []
    for way in ("training path", "masked SDPA"):
        for length in lengths:
            if way == "masked SDPA" and length > 4096:
                continue
            command = [sys.executable, "-m", "mitigate.kernels.bench", "--one-length", str(length), way, str(repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append({"way": way, **json.loads(done.stdout.splitlines()[-1])})
    return found


# expected on a card that nobody measured yet ---------------------------------------------------------------------------------------------------------


def expected() -> list[dict[str, Any]]:
    """Floors on an H200-class card, bf16: computed, not measured."""
    long = 65536
    found = []
    shape = {"batch": 1, "groups": 8, "length": long, "dim": 128, "window": 32, "stride": 16}
    pools = {
        "pool T=64k G=8 W=32 S=16 scalar, two branches": (2, PoolCase(**shape, channels=1)),
        "pool T=64k G=8 W=32 S=16 vector, two branches": (2, PoolCase(**shape, channels=128)),
        "pool T=64k G=8 W=32 S=16 scalar, payload per role, two branches": (2, PoolCase(**shape, channels=1, roles_u=2)),
        "pool T=64k G=8 W=32 S=16 vector, payload per role, two branches": (2, PoolCase(**shape, channels=128, roles_u=2)),
        "pool CSA T=64k G=1 D=512 W=8 S=4 vector, tied": (
            1,
            PoolCase(batch=1, groups=1, length=long, dim=512, window=8, stride=4, channels=512, roles_u=2),
        ),
    }
    for name, (branches, case) in pools.items():
        times = {part: branches * case.bytes(part, 2) / H200["bytes_per_s"] for part in ("fwd", "bwd")}
        found.append({"case": name, "fwd_us": 1e6 * times["fwd"], "bwd_us": 1e6 * times["bwd"], "dense_fwd_us": None})
    for length in (long, 8192):
        attended = AttendCase(batch=1, heads=32, groups=8, length=length, dim=128, window=16, stride=16, local=512)
        times = {part: floor(attended.flops(part), attended.bytes(part, 2), H200) for part in ("fwd", "bwd-split")}
        dense = 2 * attended.heads * attended.dim * length**2 / H200["flops_per_s"]
        name = f"attend T={length // 1024}k H=32 W=S=16 L=512"
        found.append({"case": name, "fwd_us": 1e6 * times["fwd"], "bwd_us": 1e6 * times["bwd-split"], "dense_fwd_us": 1e6 * dense})
    entries = 131072 // 16 + 512
    traffic = [2 * 2 * 32 * 8 * 128 * n for n in (entries, 131072)]
    seconds = [n / H200["bytes_per_s"] for n in traffic]
    found.append({"case": "decode B=32 T=128k G=8 S=16 L=512", "fwd_us": 1e6 * seconds[0], "bwd_us": None, "dense_fwd_us": 1e6 * seconds[1]})
    return found


# self-check ------------------------------------------------------------------------------------------------------------------------------------------


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
    name = f"pool {'scalar' if case.channels == 1 else 'vector'} W{case.window} S{case.stride} D{case.dim} {_short(dtype)}"
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
    name = f"attend H{case.heads} G{case.groups} W{case.window} S{case.stride} D{case.dim} {_short(dtype)}"
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
    found = torch.cat([stream.append(state, *piece) for piece in pieces], dim=1).cpu().double()
    allowed = 2 * (float((plain - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max()))
    error = float((found - right).abs().max())
    return Check(kernel=f"stream {_short(dtype)}", backend=f"torch-{device.type}", error=error, allowed=allowed, seconds=time.perf_counter() - start)


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
    return Check(kernel=f"decode {_short(dtype)}", backend=ops.backend(device), error=error, allowed=allowed, seconds=time.perf_counter() - start)


def small_checks(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Check]:
    """Every kernel that this device runs, on small shapes: about a second on a CPU."""
    pools = [check_pool(PoolCase(batch=2, groups=2, length=93, dim=16, window=16, stride=8, channels=channels), device, dtype) for channels in (1, 16)]
    attends = [check_attend(AttendCase(batch=2, heads=4, groups=groups, length=93, dim=16, window=16, stride=8, local=5), device, dtype) for groups in (1, 4)]
    decodes = [check_decode(device, dtype)] if device.type == "cuda" and ops.has_triton() else []
    return [*pools, *attends, *decodes, check_stream(device, dtype)]


class NoGpu(RuntimeError):
    """A GPU and Triton are needed."""


def gpu_check(minutes: float = 5.0) -> dict[str, Any]:
    """All Triton kernels on this GPU: checks on small and large shapes in three precisions first, times only if they pass.

    Raises:
        NoGpu: there is no CUDA device, or Triton is not installed.
    """
    if not torch.cuda.is_available() or not ops.has_triton():
        raise NoGpu("bench --gpu-check needs a CUDA device and Triton")
    device, stop = torch.device("cuda"), time.monotonic() + 60 * minutes
    checks: list[Check] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        checks += small_checks(device, dtype)
    for dim in (64, 80, 128, 256):
        checks.append(check_attend(AttendCase(batch=1, heads=8, groups=2, length=1001, dim=dim, window=16, stride=16, local=64), device, torch.bfloat16))
        checks.append(check_pool(PoolCase(batch=1, groups=2, length=1001, dim=dim, window=32, stride=16, channels=dim), device, torch.bfloat16))
    found: dict[str, Any] = {"checks": [asdict(check) | {"passed": check.passed} for check in checks], "times": [], "left_out": []}
    if not all(check.passed for check in checks):
        return found | {"left_out": ["times: a check failed"]}
    rates = machine(device, torch.bfloat16)
    found["rates"] = rates
    shape = {"batch": 1, "groups": 8, "dim": 128}
    attends = [AttendCase(**shape, heads=32, length=n, window=16, stride=16, local=512) for n in (8192, 65536)]
    pools = [PoolCase(**shape, length=65536, window=32, stride=16, channels=channels) for channels in (1, 128)]
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *[(f"pool {case.channels}", lambda case=case: _gpu_pool(case, device, rates)) for case in pools],
        *[(f"attend {case.length}", lambda case=case: _gpu_attend(case, device, rates)) for case in attends],
    ]
    for name, job in jobs:
        if time.monotonic() > stop - 60:
            found["left_out"].append(f"{name}: out of time")
            continue
        found["times"].append(job())
    return found


def _gpu_pool(case: PoolCase, device: torch.device, rates: dict[str, float]) -> dict[str, Any]:
    return bench_pool(case, device, torch.bfloat16, rates, 20)


def _gpu_attend(case: AttendCase, device: torch.device, rates: dict[str, float]) -> dict[str, Any]:
    """The operator beside dense attention; the ways that hold a T x T mask are left out where it would not fit."""
    leaves = attend_inputs(case, device, torch.bfloat16)
    weight = torch.randn_like(leaves[0])
    scale = case.dim**-0.5

    def operator(*parts: torch.Tensor) -> torch.Tensor:
        turned = [x.transpose(1, 2) for x in parts]
        return ops.attend(*turned, window=case.window, stride=case.stride, local=case.local, scale=scale)[0].transpose(1, 2)

    def dense(q: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    runs: dict[str, Callable[..., torch.Tensor]] = {"dense causal SDPA": dense, "operator": operator}
    seconds = medians({name: forward_backward(run, leaves, weight) for name, run in runs.items()}, 10, device)
    flops, traffic = case.flops("fwd") + case.flops("bwd-split"), case.bytes("fwd", 2) + case.bytes("bwd", 2)
    return _entry("attend", asdict(case), flops, traffic, floor(flops, traffic, rates), seconds, "dense causal SDPA")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# tables ----------------------------------------------------------------------------------------------------------------------------------------------


def measure(device: torch.device, *, quick: bool = False, scaling: bool = False) -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    repeats = 3 if quick else 30
    rates = machine(device, dtype)
    attend = [bench_attend(case, device, dtype, rates, repeats) for case in ATTEND]
    pool = [bench_pool(case, device, dtype, rates, repeats) for case in POOL]
    lengths = LENGTHS[:3] if quick else LENGTHS
    return {
        "device": {"kind": device.type, "name": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()},
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "backend": ops.backend(device),
        "dtype": _short(dtype),
        "repeats": repeats,
        "rates": rates,
        "kernels": [*attend, *pool],
        "scaling": bench_scaling(lengths, 1 if quick else 3) if scaling else [],
        "expected": expected(),
    }


def table(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of text: one block per case."""
    lines = []
    for entry in entries:
        case = " ".join(f"{key} {value}" for key, value in entry["case"].items())
        lines.append(f"{entry['kernel']} forward+backward: {case}")
        lines.append(f"  {entry['flops'] / 1e9:.2f} GFLOP, {entry['bytes'] / 1e6:.1f} MB, floor {entry['floor_ms']:.2f} ms")
        for name, way in entry["ways"].items():
            share = "" if way["of_floor"] is None else f"   {100 * way['of_floor']:5.1f} % of the floor"
            lines.append(f"  {name:20s} {way['ms']:9.2f} ms  {way['faster']:6.2f}x {entry['against']}{share}")
    return lines


def scaling_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Time per query and peak memory over the length."""
    head = f"  {'way':16s} {'T':>7s} {'ms':>10s} {'us/query':>10s} {'peak MiB':>10s} {'MiB/1K':>8s}"
    body = []
    for row in rows:
        length, peak = row["length"], row["peak_mib"]
        body.append(f"  {row['way']:16s} {length:7d} {1e3 * row['seconds']:10.1f} {row['us_per_query']:10.2f} {peak:10.1f} {1024 * peak / length:8.1f}")
    return ["attend W16 S16 L32 B1 H4 D32 over the length, forward+backward, fp32", head, *body]


def expected_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Computed times."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.0f}"

    head = f"  {'case':64s} {'fwd us':>8s} {'bwd us':>8s} {'dense fwd us':>13s}"
    body = [f"  {row['case']:64s} {cell(row['fwd_us']):>8s} {cell(row['bwd_us']):>8s} {cell(row['dense_fwd_us']):>13s}" for row in rows]
    return ["expected on an H200-class card (4.3 TB/s, 790 TFLOP/s bf16): computed from the floors, not measured", head, *body]


def check_table(checks: Sequence[Check]) -> list[str]:
    """One line per check."""
    lines = []
    for check in checks:
        verdict = "ok  " if check.passed else "FAIL"
        numbers = f"error {check.error:.2e}, allowed {check.allowed:.2e}, {check.seconds:.2f} s"
        lines.append(f"  {verdict} {check.kernel:40s} {check.backend:20s} {numbers}")
    return lines


def report(found: dict[str, Any]) -> list[str]:
    """What the command prints."""
    lines = []
    if "checks" in found:
        lines += check_table([Check(**{k: v for k, v in check.items() if k != "passed"}) for check in found["checks"]])
        return [*lines, *table(found["times"]), *[f"left out: {what}" for what in found["left_out"]]]
    rates = found["rates"]
    lines.append(
        f"{found['backend']} on {found['device']['name']}, {found['threads']} threads, {found['dtype']}, torch {found['versions']['torch']}: "
        f"{rates['flops_per_s'] / 1e9:.0f} GFLOP/s, {rates['bytes_per_s'] / 1e9:.1f} GB/s measured in this run"
    )
    lines += table(found["kernels"])
    if found["scaling"]:
        lines += scaling_table(found["scaling"])
    return lines + expected_table(found["expected"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 done, 1 a check failed, 2 there is no GPU to check."""
    parser = argparse.ArgumentParser(prog="python -m mitigate.kernels.bench", description="Time the kernels beside dense attention and plain PyTorch.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--quick", action="store_true", help="few repeats and short sequences")
    parser.add_argument("--scaling", action="store_true", help="also attend from 1,024 to 16,384 tokens, time and peak memory (CPU)")
    parser.add_argument("--gpu-check", action="store_true", help="check all Triton kernels on a GPU, then time them, within five minutes")
    parser.add_argument("--one-length", nargs=3, metavar=("T", "WAY", "REPEATS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one_length:
        length, way, repeats = arguments.one_length
        print(json.dumps(one_length(int(length), way, int(repeats))))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = gpu_check() if arguments.gpu_check else measure(device, quick=arguments.quick, scaling=arguments.scaling)
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report(found)))
    return int(any(not check["passed"] for check in found.get("checks", [])))


if __name__ == "__main__":
    sys.exit(main())
