"""The ahead-of-time gate: every kernel with the shipped tiles compiles for GPUs that are not here, and fits them.

`python -m mitigate.kernels.aot` prints a table of resources and exits with 1 where a rule is broken. The launches are the real ones: a stand-in
driver names the target, and each run of a kernel becomes a warm-up, so that the ordinary wrappers on CPU tensors compile what a GPU would run.
Needs Triton, which brings the assembler, and no GPU. Not for a process under TRITON_INTERPRET.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mitigate.kernels import append, attend, decode, pool, stream, tiles, visibility

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
ARCHITECTURES = (80, 90)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = (16, 64, 96, 128, 256)
LENGTHS = (1000, 1001, 1008, 1024, 2048, 2049)
ORIGINS = (0, -1, -2, -3, -4, -5, -7)
MOST_BINARIES = 2


@dataclass(frozen=True)
class Built:
    """One compiled kernel: its name and launch, and what it takes of a multiprocessor.

    Attributes:
        registers: per thread.
        stack: bytes per thread in local memory; spilled registers live there.
        shared: bytes per program.
        mma, wgmma: tensor-core instructions in the PTX.
        f64, tf32, narrow: instructions on doubles; on fp32 rounded to tf32; global loads of two bytes.
        seconds: compile time, 0 from the cache.
    """

    name: str
    case: str
    arch: int
    hash: str
    warps: int
    registers: int
    stack: int
    shared: int
    mma: int
    wgmma: int
    f64: int
    tf32: int
    narrow: int
    seconds: float

    def violations(self, *, tensor_cores: bool, aligned: bool) -> list[str]:
        """Broken rules, in words."""
        rules = [
            (self.stack > 0, f"{self.stack} bytes of stack: registers spill"),
            (self.shared > SHARED_LIMIT[self.arch], f"{self.shared} bytes of shared memory, the limit is {SHARED_LIMIT[self.arch]}"),
            (self.f64 > 0, "instructions on doubles"),
            (self.tf32 > 0, "fp32 rounded to tf32"),
            (tensor_cores and self.mma + self.wgmma == 0, "no tensor-core instruction"),
            (aligned and self.narrow > 0, f"{self.narrow} two-byte global loads"),
        ]
        return [f"sm_{self.arch} {self.name} {self.case}: {words}" for broken, words in rules if broken]


class StandIn:
    """Names a target where Triton asks the driver; nothing can be launched on it."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # kernels are kept per device: another number for each architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def recorded(arch: int, case: str = "") -> Iterator[list[Built]]:
    """Compile every kernel that is launched inside for an architecture, and launch none."""
    found: list[Built] = []
    plain_run, plain_driver = JITFunction.run, driver._active

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        start = time.perf_counter()
        kernel = plain_run(self, *args, grid=grid, warmup=True, **kwargs)
        bank = f" {kwargs['BANK']}" if "BANK" in kwargs else ""
        found.append(_built(kernel, self.fn.__name__ + bank, case, arch, time.perf_counter() - start))
        return kernel

    driver.set_active(StandIn(arch))
    JITFunction.run = run
    try:
        with tiles.standing_in_for(arch):
            yield found
    finally:
        JITFunction.run, driver._active = plain_run, plain_driver


def _built(kernel: Any, name: str, case: str, arch: int, seconds: float) -> Built:
    ptx = kernel.asm["ptx"]
    registers, stack, local = _usage(kernel.asm["cubin"])
    return Built(
        name=name, case=case, arch=arch, hash=kernel.hash, warps=kernel.metadata.num_warps, registers=registers, stack=stack + local,
        shared=kernel.metadata.shared, mma=len(re.findall(r"\bmma\.sync", ptx)), wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        f64=len(re.findall(r"\.f64\b", ptx)),
        tf32=len(re.findall(r"\.tf32\b", ptx)), narrow=len(re.findall(r"\bld\.global\S*\.[busf]16\b", ptx)),
        seconds=seconds,
    )  # fmt: skip


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack and local bytes per thread, as the assembler wrote them into the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = shown.stdout + shown.stderr
    registers, stack, local = (re.search(rf"\b{field}:(\d+)", text) for field in ("REG", "STACK", "LOCAL"))
    assert registers and stack and local, text
    return int(registers[1]), int(stack[1]), int(local[1])


# ---------------------------------------------------------------------------------------------------------------------- the launches


def run_attend(
    dim: int, dtype: torch.dtype, *, dim_v: int | None = None, length: int = 1000, origin: int = -3, bypass: bool = True, packed: bool = False,
    heads: int = 4, groups: int = 2,
) -> None:  # fmt: skip
    """Forward and backward of the attention wrappers; packed: one sequence with `cu_seqlens`."""
    window, stride = 32, 16
    rows = visibility.num_windows(length, window, stride, origin)
    positions = torch.arange(0, length, stride, dtype=torch.int32)
    q = torch.empty(1, length, heads, dim, dtype=dtype)
    ks, vs, k, v, kb, vb = (torch.empty(1, n, groups, d, dtype=dtype) for n in (rows, length, len(positions)) for d in (dim, dim_v or dim))
    options: dict[str, Any] = {"window": window, "stride": stride, "origin": origin, "local": 64, "scale": dim**-0.5}
    if bypass:
        options |= {"kb_BPGD": kb, "vb_BPGV": vb, "pos_b": positions}
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, length]), "cu_bypass": torch.tensor([0, len(positions)]) if bypass else None}
    out, lse = attend.attend_fwd(q, ks, vs, k, v, **options)
    attend.attend_bwd(out, q, ks, vs, k, v, out, lse, **options)


def run_decode(
    dim: int, dtype: torch.dtype, *, length: int = 1000, origin: int = -3, bypass: bool = True, ring: bool = False, heads: int = 8, groups: int = 2
) -> None:
    """Both decode kernels."""
    window, stride, held = 32, 16, 96
    rows = visibility.num_windows(length, window, stride, origin)
    positions = torch.arange(0, length, stride, dtype=torch.int32)
    ks, k, kb = (torch.empty(2, n, groups, dim, dtype=dtype) for n in (rows, held, len(positions)))
    options: dict[str, Any] = {"window": window, "stride": stride, "origin": origin, "local": 64, "scale": dim**-0.5, "position": length - 1}
    options |= {"pos_x": torch.zeros(2, held, dtype=torch.int32)} if ring else {"k_start": length - held}
    options |= {"kb_BPGD": kb, "vb_BPGV": kb, "pos_b": positions} if bypass else {}
    decode.decode_fwd(torch.empty(2, heads, dim, dtype=dtype), ks, ks, k, k, **options)


def run_pool(
    dim: int, dtype: torch.dtype, *, window: int = 32, stride: int = 16, length: int = 1000, origin: int = -3, gate: str = "scalar", roles_u: int = 1,
    gate_dtype: torch.dtype | None = None, packed: bool = False,
) -> None:  # fmt: skip
    """Forward and backward of the pool wrappers; gates are scalar, vector, shared (scalar, one for all roles) or uniform."""
    u = torch.empty(1, length, roles_u, 2, dim, dtype=dtype)
    roles = {"shared": 1, "uniform": 0}.get(gate, -(-window // stride))
    z = torch.empty(1, length, roles, 2, dim if gate == "vector" else 1, dtype=gate_dtype or dtype)
    options: dict[str, Any] = {"window": window, "stride": stride, "origin": origin, "cu_seqlens": torch.tensor([0, length]) if packed else None}
    out, lse = pool.pool_fwd(z, u, **options)
    pool.pool_bwd(out, z, u, out, lse, **options)


def run_append(
    dim: int,
    dtype: torch.dtype,
    *,
    window: int = 32,
    stride: int = 16,
    length: int = 1,
    seen: int = 1000,
    origin: int = -3,
    gate: str = "scalar",
    roles_u: int = 1,
) -> None:
    """The append kernel; gates as in `run_pool`."""
    u = torch.empty(2, length, roles_u, 2, dim, dtype=dtype)
    roles = {"shared": 1, "uniform": 0}.get(gate, -(-window // stride))
    z = torch.empty(2, length, roles, 2, dim if gate == "vector" else 1, dtype=dtype)
    state = stream.start(2, 2, dim, window=window, stride=stride, origin=origin, channels=z.shape[4])
    append.append(z, u, state.most, state.total, state.weighted, window=window, stride=stride, origin=origin, seen=seen)


POOL_SHAPES = ((32, 16, 128, 1), (8, 4, 128, 2), (8, 4, 512, 2), (128, 128, 512, 1))  # window, stride, head dim, payload roles


def launches(dims: Sequence[int], dtypes: Sequence[str]) -> Iterator[tuple[str, Callable[[], None], bool]]:
    """Every launch of the tile table, and every branch of each kernel at the default head dim: name, launch, whether wide loads are due."""
    for name in dtypes:
        dtype = DTYPES[name]
        for dim in dims:
            wide = dtype != torch.float32 and dim in (64, 128)
            yield f"{name} D={dim}", partial(run_attend, dim, dtype, bypass=False), wide
            yield f"{name} D={dim} bypass", partial(run_attend, dim, dtype), wide
            yield f"{name} D={dim} bypass", partial(run_decode, dim, dtype), wide
        for (window, stride, dim, roles), gate in product(POOL_SHAPES if name != "fp16" else (), ("scalar", "vector")):
            case = f"{name} W={window} S={stride} D={dim} U={roles} {gate}"
            yield case, partial(run_pool, dim, dtype, window=window, stride=stride, origin=0, gate=gate, roles_u=roles), False
            yield case, partial(run_append, dim, dtype, window=window, stride=stride, origin=0, gate=gate, roles_u=roles), False
    dtype = DTYPES[dtypes[0]]
    yield f"{dtypes[0]} D=128 V=64", partial(run_attend, 128, dtype, dim_v=64), False
    yield f"{dtypes[0]} D=128 H=G", partial(run_attend, 128, dtype, groups=4), False
    yield f"{dtypes[0]} D=128 packed", partial(run_attend, 128, dtype, packed=True), False
    yield f"{dtypes[0]} D=128 ring", partial(run_decode, 128, dtype, ring=True), False
    yield f"{dtypes[0]} D=128", partial(run_decode, 128, dtype, bypass=False), False
    yield f"{dtypes[0]} D=128 packed", partial(run_pool, 128, dtype, packed=True), False
    yield f"{dtypes[0]} D=128 fp32 gates", partial(run_pool, 128, dtype, gate_dtype=torch.float32), False
    for gate in ("shared", "uniform"):
        yield f"{dtypes[0]} D=128 {gate}", partial(run_pool, 128, dtype, gate=gate), False
        yield f"{dtypes[0]} D=128 {gate}", partial(run_append, 128, dtype, gate=gate), False


def has_products(name: str) -> bool:
    """Whether a kernel multiplies matrices; the others go over their elements."""
    return not any(word in name for word in ("pool", "append", "merge"))


def build(arch: int, dims: Sequence[int], dtypes: Sequence[str]) -> tuple[list[Built], list[str]]:
    """Compile the tile table of one architecture; everything built, and every broken rule."""
    built, broken = [], []
    for case, launch, wide in launches(dims, dtypes):
        with recorded(arch, case) as found:
            launch()
        for kernel in found:
            dots = has_products(kernel.name)
            broken.extend(kernel.violations(tensor_cores=dots and not case.startswith("fp32"), aligned=dots and wide))
        built.extend(found)
    return built, broken


def binaries(arch: int, dim: int = 128, lengths: Sequence[int] = LENGTHS, origins: Sequence[int] = ORIGINS) -> dict[str, int]:
    """How many distinct binaries each kernel needs over many lengths and origins."""
    seen: dict[str, set[str]] = {}
    for length in lengths:
        for origin in origins:
            with recorded(arch) as found:
                run_attend(dim, torch.bfloat16, length=length, origin=origin)
                run_decode(dim, torch.bfloat16, length=length, origin=origin)
                run_pool(dim, torch.bfloat16, length=length, origin=origin)
                for new in (1, 7):
                    run_append(dim, torch.bfloat16, length=new, seen=length, origin=origin)
            for kernel in found:
                seen.setdefault(kernel.name, set()).add(kernel.hash)
    return {name: len(hashes) for name, hashes in seen.items()}


def table(built: Sequence[Built]) -> str:
    """Resources as fixed-width text, each binary once."""
    head = f"{'kernel':<32} {'case':<38} {'arch':>5} {'warps':>5} {'regs':>4} {'stack':>5} {'shared':>7} {'mma':>4} {'wgmma':>5} {'s':>5}"
    lines, seen = [head, "-" * len(head)], set()
    for b in built:
        if (b.hash, b.arch) not in seen:
            seen.add((b.hash, b.arch))
            lines.append(
                f"{b.name:<32} {b.case:<38} sm_{b.arch} {b.warps:>5} {b.registers:>4} {b.stack:>5} {b.shared:>7} {b.mma:>4} {b.wgmma:>5} {b.seconds:>5.1f}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m mitigate.kernels.aot", description="Compile every kernel ahead of time and check what it takes.")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--dim", type=int, nargs="+", default=DIMS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    args = parser.parse_args(argv)
    start, broken = time.perf_counter(), []
    everything: list[Built] = []
    for arch in args.arch:
        built, violations = build(arch, args.dim, args.dtype)
        print(table(built), flush=True)
        everything += built
        counts = binaries(arch)
        print(f"\nbinaries over {len(LENGTHS)} lengths x {len(ORIGINS)} origins on sm_{arch}: {', '.join(f'{name} {n}' for name, n in counts.items())}\n")
        violations += [f"sm_{arch} {name}: {n} binaries over lengths and origins" for name, n in counts.items() if n > MOST_BINARIES]
        broken += violations
    print(f"Triton {triton.__version__}: {len({(b.hash, b.arch) for b in everything})} binaries in {time.perf_counter() - start:.0f} s")
    for line in broken:
        print(f"BROKEN {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
