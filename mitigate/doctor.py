"""What this installation runs on, and whether its kernels are right: devices, versions, backends, and a check of each kernel against the reference."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from mitigate.cores import usable_cores
from mitigate.kernels import ops
from mitigate.kernels.checks import Check, check_table, small_checks
from mitigate.rows import installed_versions


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, in words, and the backend that the kernels use on it."""

    name: str
    details: str
    backend: str


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that `mitigate doctor` found."""

    versions: dict[str, str]
    devices: tuple[Device, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether every kernel is as close to the reference as the tolerance rule asks."""
        return all(check.passed for check in self.checks)


def examine() -> Examination:
    """Look at devices and versions and check each kernel on each device: about a second on a CPU, longer where Triton must compile first."""
    cuda = torch.cuda.is_available()
    kinds = ["cpu", *(["cuda"] if cuda else [])]
    checks = tuple(check for kind in kinds for check in small_checks(torch.device(kind)))
    return Examination(versions=installed_versions(), devices=devices(), checks=checks, notes=notes(cuda=cuda, triton=ops.has_triton()))


def devices() -> tuple[Device, ...]:
    """The CPU first, then every CUDA device."""
    words = f"{platform.machine()}, {usable_cores()} cores to use, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}"
    found = [Device(name="cpu", details=words, backend=ops.backend("cpu"))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        details = f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB"
        found.append(Device(name=f"cuda:{index}", details=details, backend=ops.backend("cuda")))
    return tuple(found)


def notes(*, cuda: bool, triton: bool) -> tuple[str, ...]:
    """What a user may want to know about this combination."""
    if cuda and not triton:
        return ("Triton is not installed: the GPU runs plain PyTorch. Install the extra: pip install 'mitigate[gpu]'",)
    if triton and not cuda:
        return ("Triton is installed, but there is no CUDA device: its kernels are not used.",)
    return ()


def text(found: Examination) -> str:
    """The examination as the command prints it."""
    lines = ["versions"]
    lines += [f"  {name:14s} {version}" for name, version in found.versions.items()]
    lines.append("devices")
    lines += [f"  {device.name:14s} {device.details}\n  {'':14s} kernels: {device.backend}" for device in found.devices]
    lines.append("kernels against the reference in fp64")
    lines += check_table(found.checks)
    lines += [f"note: {note}" for note in found.notes]
    failed = [check.kernel for check in found.checks if not check.passed]
    lines.append("all kernels agree with the reference" if found.healthy else f"WRONG: {', '.join(failed)}; do not trust results of this installation")
    return "\n".join(lines)


def run() -> int:
    """Print the examination; 0 if every kernel is right, else 1."""
    found = examine()
    print(text(found))
    return 0 if found.healthy else 1
