"""The ahead-of-time gate: its rules see what they should, and the default tiles pass it; `python -m mitigate.kernels.aot` compiles the whole table."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: nothing is compiled (pip install mitigate[gpu])")


def run(code: str, cache: Path, limit_s: int = 200) -> str:
    """Run code in a process that does not interpret kernels, with a cache of its own."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_see_a_planted_violation() -> None:
    from mitigate.kernels import aot

    good = aot.Built("k", "c", 90, "h", 4, registers=100, stack=0, shared=227 * 1024, mma=0, wgmma=1, f64=0, tf32=0, narrow=0, seconds=0.0)
    assert good.violations(tensor_cores=True, aligned=True) == []
    planted = {"stack": 8, "shared": 227 * 1024 + 1, "wgmma": 0, "f64": 1, "tf32": 1, "narrow": 2}
    words = ("registers spill", "the limit is", "no tensor-core", "doubles", "tf32", "two-byte")
    for (field, value), complaint in zip(planted.items(), words, strict=True):
        found = dataclasses.replace(good, **{field: value}).violations(tensor_cores=True, aligned=True)
        assert len(found) == 1, (field, found)
        assert complaint in found[0]
    assert dataclasses.replace(good, wgmma=0).violations(tensor_cores=False, aligned=True) == []


@pytest.mark.parametrize("arch", [80, 90])
def test_the_default_tiles_pass_the_gate(arch: int, tmp_path: Path) -> None:
    code = f"""
import torch
from mitigate.kernels import aot
with aot.recorded({arch}, "bf16 D=128") as found:
    aot.run_attend(128, torch.bfloat16)
    aot.run_decode(128, torch.bfloat16)
    aot.run_pool(128, torch.bfloat16)
    aot.run_append(128, torch.bfloat16)
print(aot.table(found))
names = {{kernel.name.split("_")[0] for kernel in found}}
assert names == {{"append", "attend", "decode", "pool"}}, names
for kernel in found:
    dots = aot.has_products(kernel.name)
    assert not (wrong := kernel.violations(tensor_cores=dots, aligned=dots)), wrong
    assert {arch} < 90 or "attend" not in kernel.name or kernel.wgmma, kernel
# No length and no origin makes another binary, but that a batch stride of narrow gates is a multiple of 16 or not.
counts = {{}}
for length, origin in ((1000, 0), (1001, -1), (1008, -7), (2049, -4)):
    with aot.recorded({arch}) as again:
        aot.run_attend(128, torch.bfloat16, length=length, origin=origin)
        aot.run_decode(128, torch.bfloat16, length=length, origin=origin)
        aot.run_pool(128, torch.bfloat16, length=length, origin=origin)
        aot.run_append(128, torch.bfloat16, length=length % 7 + 1, seen=length, origin=origin)
    for kernel in again:
        counts.setdefault(kernel.name, set()).add(kernel.hash)
assert all(len(hashes) <= 1 + name.startswith("pool") for name, hashes in counts.items()), {{name: len(hashes) for name, hashes in counts.items()}}
"""
    print(run(code, tmp_path))
