"""How kernels are launched: the static tile table per architecture, head dim and dtype, and the device they run on. Nothing is tuned at run time.

An architecture is NVIDIA's compute capability times ten (80, 90, ...). The ahead-of-time gate (`python -m mitigate.kernels.aot`) compiles what is listed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

_stand_in: ContextVar[int] = ContextVar("stand_in", default=80)


@dataclass(frozen=True)
class Tile:
    """Rows of the tile that stays (`rows`), rows of the tiles that pass by (`cols`), and the launch options."""

    rows: int
    cols: int
    warps: int = 4
    stages: int = 2

    def options(self) -> dict[str, int | bool]:
        """Launch options for a kernel call."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def power(x: int, least: int = 1) -> int:
    """Smallest power of two that is at least `x` and `least`."""
    return max(least, 1 << (max(x, 1) - 1).bit_length())


def arch(device: torch.device) -> int:
    """Architecture of a device; for the CPU, the one that `standing_in_for` names (80 without it)."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major * 10 + minor
    return _stand_in.get()


def splits(device: torch.device, heads: int, entries: int) -> int:
    """Programs that share `entries` of one kv head when `heads` kv heads of all sequences are decoded: two waves, 256 entries each at least."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 108
    return max(1, min(-(-2 * processors // heads), -(-entries // 256)))


@contextlib.contextmanager
def standing_in_for(architecture: int) -> Iterator[None]:
    """Give CPU tensors the tiles of an architecture, to compile for it without the device."""
    token = _stand_in.set(architecture)
    try:
        yield
    finally:
        _stand_in.reset(token)


def on_device(*tensors: torch.Tensor | None) -> contextlib.AbstractContextManager[object]:
    """Make the device of these tensors the current one, whichever thread this is.

    Raises:
        ValueError: they are not all on one device.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise ValueError(f"kernels: all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def unit_last(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless each tensor's last dimension is contiguous: kernels take any other stride as it is and never copy."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"kernels: the last dimension of {name} must have stride 1, got shape {tuple(tensor.shape)} with strides {tensor.stride()}")


@dataclass(frozen=True)
class PoolTile:
    """Groups x phases x channels of one tile; channels below the head dim split it over programs."""

    groups: int
    phases: int
    channels: int
    warps: int = 4

    def options(self) -> dict[str, int | bool]:
        """Launch options for a kernel call."""
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": True}


def pool(stride: int, dim: int, *, whole: bool, elements: int = 2048) -> PoolTile:
    """Tile of the pool kernels, the same on every architecture: they are bound by memory.

    Args:
        stride: phases of a group.
        dim: head dim.
        whole: all channels must be in one program, as for the gradient of a scalar gate.
        elements: size of the tile.
    """
    channels = power(dim) if whole else min(power(dim), 128)
    phases = min(power(stride), max(1, elements // channels))
    return PoolTile(groups=max(1, elements // (channels * phases)), phases=phases, channels=channels)


# (kernel, 16-bit or not) -> architecture -> head dim up to -> tile. Compiled by the gate without a spill, not yet timed on a GPU.
_ATTEND: dict[tuple[str, bool], dict[int, dict[int, Tile]]] = {
    ("fwd", True): {
        80: {64: Tile(128, 64, 8), 128: Tile(64, 64, 8), 256: Tile(64, 32, 8)},
        90: {64: Tile(128, 64, 8), 128: Tile(128, 64, 8), 256: Tile(64, 32, 8)},
    },
    ("dq", True): {
        80: {64: Tile(64, 32, 4), 128: Tile(64, 32, 8), 256: Tile(64, 32, 8)},
        90: {64: Tile(64, 64, 4), 128: Tile(64, 64, 8), 256: Tile(64, 16, 8)},
    },
    ("dkv", True): {
        80: {64: Tile(64, 32, 4), 128: Tile(64, 32, 8), 256: Tile(32, 32, 8)},
        90: {64: Tile(64, 32, 4), 128: Tile(64, 32, 8), 256: Tile(32, 32, 8)},
    },
    ("decode", True): {80: {128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)}},
    ("fwd", False): {80: {64: Tile(32, 16, 4), 256: Tile(16, 16, 4)}},
    ("dq", False): {80: {64: Tile(32, 16, 8), 256: Tile(16, 16, 4)}},
    ("dkv", False): {80: {64: Tile(16, 16, 4), 256: Tile(16, 16, 8)}},
    ("decode", False): {80: {256: Tile(16, 16, 4, 2)}},
}


def attend(kernel: str, architecture: int, dim: int, dtype: torch.dtype) -> Tile:
    """Tile of an attention kernel.

    Args:
        kernel: "fwd" and "dq" (rows are queries), "dkv" (rows are entries), "decode" (cols are entries of a step).
        architecture: one that is not listed takes the tiles of the next lower one.
        dim: the larger head dim of keys and values.
        dtype: fp32 has its own tiles, since it does not use tensor cores.

    Raises:
        ValueError: a head dim beyond 256.
    """
    listed = _ATTEND[kernel, dtype != torch.float32]
    by_dim = listed[max((known for known in listed if known <= architecture), default=min(listed))]
    fitting = [most for most in by_dim if dim <= most]
    if not fitting:
        raise ValueError(f"attend: head dim must be at most {max(by_dim)}, got {dim}")
    return by_dim[min(fitting)]
