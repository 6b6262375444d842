"""Write a trial's compressor for another codebase. Each target says what it can carry, and refuses the rest in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mitigate.config import ConfigError
from mitigate.config_files import did_you_mean
from mitigate.export import bundle
from mitigate.export.targets import deepseek_v4, transformers, vllm

TARGETS: dict[str, Callable[..., list[str]]] = {"transformers": transformers.write, "deepseek-v4": deepseek_v4.write, "vllm": vllm.write}


def write(target: str, study_dir: Path, trial: int, to: Path) -> list[str]:
    """Write a finished trial of a study for a target.

    Args:
        target: a name in `TARGETS`.
        to: a folder that does not exist yet, or is empty.

    Returns:
        Lines to print: what was written, and what it does not carry.

    Raises:
        ConfigError: no such target, study or trial; the target cannot express the variant (the field is named); `to` holds something. Nothing is written.
    """
    if target not in TARGETS:
        raise ConfigError(f"--target {target!r} is not known{did_you_mean(target, list(TARGETS))}")
    row, attached = bundle.trained(study_dir, trial)
    return TARGETS[target](row, attached, to)
