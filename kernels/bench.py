"""Bytes, flops, floor, time and achieved fraction of the floor of the kernels, beside dense attention and the plain PyTorch reference.

    python -m mitigate.kernels.bench [--quick] [--scaling] [--threads N] [--json FILE]
    python -m mitigate.kernels.bench --gpu-check [--json FILE]    # on a GPU: right first, then how fast; within five minutes

Times are medians: between events on a GPU, CPU time of one thread (what a worker of a search trains on), wall clock of several, since threads that wait
for each other would count as work. The ways of a case take turns in one run, in a random order, each timed right after an untimed
call of itself, so that a slow minute of the machine and the caches that another way left behind are nobody's fault. The floor of a CPU comes from a
matrix product and a copy in the same run. The table for an H200-class card is computed, not measured.

Shapes: B batch, T tokens, N summaries, P pairs of a query and an entry it sees, H query heads, G kv heads, D head dim, W window, S stride, L local
length, R = ceil(W/S), Z and U roles of logits and payload, E gate channels.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mitigate.kernels import blocked, by_role, ops, reference
from mitigate.kernels.cases import ATTEND, POOL, AttendCase, PoolCase, expected, floor
from mitigate.kernels.checks import Check, check_attend, check_pool, check_table, dtype_name, small_checks

Way = Callable[[], Any]
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of the scaling table
COMPILED_FROM = 10  # rounds from which the compiled way, which takes half a minute to make, is timed too


# timing ----------------------------------------------------------------------------------------------------------------------------------------------


def medians(ways: dict[str, Way], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each way; they take turns, in another order in every round, and each call timed follows one of its own that is not."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    timed = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    names, order = list(ways), random.Random(0)
    for _ in range(repeats + 1):
        order.shuffle(names)
        for name in names:
            ways[name]()
            seconds[name].append(timed(ways[name]))
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def _cpu_seconds(way: Way) -> float:
    """CPU time of one thread, so that waiting for a core does not count; wall clock of several."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    way()
    return clock() - start


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


# on a GPU ------------------------------------------------------------------------------------------------------------------------------------------


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
        "dtype": dtype_name(dtype),
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


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 done, 1 a check failed, 2 there is no GPU to check."""
    parser = argparse.ArgumentParser(prog="python -m mitigate.kernels.bench", description="Time the kernels beside dense attention and plain PyTorch.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--quick", action="store_true", help="few repeats and short sequences")
    parser.add_argument("--scaling", action="store_true", help="also attend from 1,024 to 16,384 tokens, time and peak memory (CPU)")
    parser.add_argument("--threads", type=_at_least_one, default=1, metavar="N", help="threads of the CPU; 1 unless told, as a search's worker has")
    parser.add_argument("--gpu-check", action="store_true", help="check all Triton kernels on a GPU, then time them, within five minutes")
    parser.add_argument("--one-length", nargs=3, metavar=("T", "WAY", "REPEATS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
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
