"""Shapes that the kernels are timed on, their pairs, flops and bytes, and the least time that a machine could take.

Shapes: B batch, T tokens, N summaries, P pairs of a query and an entry it sees, H query heads, G kv heads, D head dim, W window, S stride, L local
length, R = ceil(W/S), Z and U roles of logits and payload, E gate channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mitigate.kernels import visibility

H200 = {"bytes_per_s": 4.3e12, "flops_per_s": 790e12}  # copy and bf16 rates of an H200-class card


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


def floor(flops: float, traffic: float, rates: dict[str, float]) -> float:
    """Seconds that neither the arithmetic nor the memory can beat."""
    return max(flops / rates["flops_per_s"], traffic / rates["bytes_per_s"])


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
