"""A bundle: a folder from which a trial's compressed model is rebuilt to identical logits. JSON and safetensors only, nothing to run in order to read.

- ``compressor.json``: the variant with its window grid per layer, the base's config and weights hash, the whole trial config.
- ``compressor.safetensors``: the compressors' weights; ``model.safetensors``: the fine-tuned model's.
- ``golden.safetensors``: a prompt and the logits it must give.
- ``row.json``: the trial's Row. ``MANIFEST.json``: sha256 of every other file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mitigate import registry
from mitigate.config import ConfigError, TrialConfig, from_dict, to_dict
from mitigate.results import read_rows
from mitigate.rows import Row
from mitigate.surgery import Attachment
from mitigate.tasks import retrieval
from mitigate.trial import COMPRESSOR_FILE, MODEL_FILE, restore

SCHEMA_VERSION = 1
TOLERANCE = 1e-3  # absolute, of fp32 logits on another processor
MANIFEST = "MANIFEST.json"


class DamagedBundle(ConfigError):
    """A file of a bundle is missing, unexpected, or not what its manifest says."""


def write(study_dir: Path, trial: int, to: Path) -> Path:
    """Export a finished trial of a study.

    Args:
        to: a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: no such study or trial, the trial has no weights, or `to` holds something. Nothing is written then.
    """
    row = _finished(study_dir, trial)
    weights = study_dir / "trials" / f"{trial:04d}"
    for name in (MODEL_FILE, COMPRESSOR_FILE):
        if not (weights / name).is_file():
            raise ConfigError(f"trial {trial} of {study_dir} has no {name}; run it again to export it")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is there already and is not empty; choose another folder")
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (MODEL_FILE, COMPRESSOR_FILE):
        shutil.copyfile(weights / name, partial / name)
    config = from_dict(TrialConfig, row.config)
    _write_json(partial / "compressor.json", describe(config, row))
    _write_json(partial / "row.json", row.model_dump(mode="json"))
    attached = restore(config, partial)
    tokens = _probe(config)
    save_file({"tokens": tokens, "logits": _logits(attached, tokens)}, partial / "golden.safetensors")
    _write_json(partial / MANIFEST, {"files": {path.name: _sha256(path) for path in sorted(partial.iterdir())}})
    if to.exists():
        to.rmdir()
    partial.replace(to)
    return to


def describe(config: TrialConfig, row: Row) -> dict[str, Any]:
    """What `compressor.json` holds."""
    variant, layers = config.variant, config.base.layers
    grids = [dataclasses.asdict(grid) for grid in registry.grids(variant, layers=layers)] if variant.compress else []
    return {
        "schema_version": SCHEMA_VERSION,
        "label": row.label,
        "variant": to_dict(variant),
        "layers": [{**grid, "bypass_phases": list(registry.bypass_phases(variant))} for grid in grids],
        "visibility": "summary j is visible to the query at t iff origin + j*stride + window - 1 <= t",
        "base": {"config": to_dict(config.base), "weights_sha256": row.base_sha256},
        "trial": to_dict(config),
    }


def load(folder: Path) -> Attachment:
    """Rebuild a bundle's model with its compressor attached.

    Raises:
        DamagedBundle: the folder is no bundle, or a file differs from the manifest; the message names the first one.
    """
    return restore(read_config(folder), folder)


def read_config(folder: Path) -> TrialConfig:
    """The trial that a bundle was exported from; DamagedBundle as in `load`."""
    check_manifest(folder)
    return from_dict(TrialConfig, json.loads((folder / "compressor.json").read_text(encoding="utf-8"))["trial"])


def check_manifest(folder: Path) -> None:
    """Compare every file with the manifest; DamagedBundle names the first that is missing, unexpected or changed."""
    try:
        expected: dict[str, str] = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedBundle(f"{folder} is no bundle: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedBundle(f"{folder / MANIFEST} is damaged") from None
    found = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(expected.keys() | found):
        if name not in found:
            raise DamagedBundle(f"{folder / name} is missing")
        if name not in expected:
            raise DamagedBundle(f"{folder / name} is not in the manifest")
        if _sha256(folder / name) != expected[name]:
            raise DamagedBundle(f"{folder / name} is not what the manifest says: one of the two was changed")


def largest_difference(folder: Path, attached: Attachment) -> float:
    """Largest absolute difference between a rebuilt model's logits and the bundle's golden ones; 0 where it was exported."""
    golden = load_file(folder / "golden.safetensors")
    return float((_logits(attached, golden["tokens"]) - golden["logits"]).abs().max())


def _finished(study_dir: Path, trial: int) -> Row:
    rows = {row.trial: row for row in read_rows(study_dir)}
    if trial not in rows:
        known = ", ".join(str(number) for number in sorted(n for n in rows if n is not None)) or "none"
        raise ConfigError(f"{study_dir} has no finished trial {trial}; finished: {known}")
    if rows[trial].status != "ok":
        error = rows[trial].error
        raise ConfigError(f"trial {trial} of {study_dir} is infeasible ({error.kind if error else 'no result'}) and cannot be exported")
    return rows[trial]


def _probe(config: TrialConfig) -> torch.Tensor:
    """Two prompts of the trial's task."""
    prompts = retrieval.training_batch(config.task, np.random.default_rng(config.score.seed), 2, "in_sequence")
    return torch.from_numpy(prompts.tokens)


@torch.inference_mode()
def _logits(attached: Attachment, tokens: torch.Tensor) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums must not depend on the machine's cores
    try:
        logits: torch.Tensor = attached.model(input_ids=tokens, use_cache=False).logits
    finally:
        torch.set_num_threads(threads)
    return logits.contiguous()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
