"""A bundle: a folder from which a trial's compressor can be rebuilt, here or in another codebase, and the port proved right.

- ``compressor.json``: every convention, with this variant's numbers; ``compressor.schema.json`` is its JSON Schema.
- ``compressor.safetensors``: the compressors' weights; ``model.safetensors``: the model's as trained (training changes all of them, so no delta).
- ``SPEC.md``: the equations; ``reference.py``: the model in plain PyTorch, without this project.
- ``golden/``: inputs and answers by level. ``row.json``: the trial's Row. ``MANIFEST.json``: sha256 of every other file.

JSON, safetensors and text; nothing has to be run in order to read it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mitigate import __version__, bases
from mitigate.config import ConfigError, TrialConfig
from mitigate.config_files import from_dict
from mitigate.export import describe, golden, spec
from mitigate.results import read_row, read_rows
from mitigate.rows import Row
from mitigate.surgery import Attachment, attach
from mitigate.trial import COMPRESSOR_FILE, MODEL_FILE, restore

MANIFEST, DESCRIPTION, ROW, REFERENCE, SPEC = "MANIFEST.json", "compressor.json", "row.json", "reference.py", "SPEC.md"
PRETRAINED = "pretrained.json"  # stands for `DESCRIPTION` in the other kind of bundle, `export.pretrained`


class DamagedBundle(ConfigError):
    """A file of a bundle is missing, unexpected, or not what it should be; the message names it."""


def write(study_dir: Path, trial: int, to: Path) -> Path:
    """Export a finished trial of a study.

    Args:
        to: a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: no such study or trial, the trial is full attention or has no weights, or `to` holds something. Nothing is written then.
    """
    row, attached = trained(study_dir, trial)
    return into_folder(to, lambda folder: write_parts(folder, row, attached))


def trained(study_dir: Path, trial: int) -> tuple[Row, Attachment]:
    """A finished trial's Row and its model with the compressor attached; ConfigError as in `write`."""
    row = _finished(study_dir, trial)
    weights = study_dir / "trials" / f"{trial:04d}"
    config = from_dict(TrialConfig, row.config)
    if not config.variant.compress:
        raise ConfigError(f"trial {trial} of {study_dir} is full attention: it has no compressor to export")
    for name in (MODEL_FILE, COMPRESSOR_FILE):
        if not (weights / name).is_file():
            raise ConfigError(f"trial {trial} of {study_dir} has no {name}; run it again to export it")
    return row, restore(config, weights)


def into_folder(to: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write a new folder: `to` is whole or not there. ConfigError if `to` is there and not an empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is there already and is not empty; choose another folder")
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if to.exists():
        to.rmdir()
    partial.replace(to)
    return to


def write_parts(folder: Path, row: Row, attached: Attachment) -> None:
    """Every file of a bundle into an empty folder. Changes the attached model (to fp64) for good."""
    config = from_dict(TrialConfig, row.config)
    describe.save_tensors(attached.model.state_dict(), folder / MODEL_FILE)
    describe.save_tensors(describe.to_plain(attached), folder / COMPRESSOR_FILE)
    described = describe.describe(config, row, attached, weights_sha256=sha256(folder / MODEL_FILE))
    describe.check_schema(described)
    (folder / DESCRIPTION).write_text(describe.dump(described), encoding="utf-8")
    (folder / describe.SCHEMA_FILE).write_text(resource(describe.SCHEMA_FILE), encoding="utf-8")
    (folder / ROW).write_text(describe.dump(row.model_dump(mode="json")), encoding="utf-8")
    (folder / REFERENCE).write_text(resource(REFERENCE), encoding="utf-8")
    (folder / SPEC).write_text(spec.render(described), encoding="utf-8")
    golden.write(folder, described, attached)
    write_manifest(folder)


def resource(name: str) -> str:
    """Text of a file that stands beside this module."""
    return resources.files("mitigate.export").joinpath(name).read_text(encoding="utf-8")


def load(folder: Path) -> Attachment:
    """Rebuild a bundle's model in eval mode with its compressor attached.

    Raises:
        DamagedBundle: the folder is no bundle, or a file differs from the manifest or does not fit the others; the message names it.
    """
    check_manifest(folder)
    return rebuild(folder, read_description(folder))


def read_config(folder: Path) -> TrialConfig:
    """The trial that a bundle was exported from; DamagedBundle as in `load`."""
    check_manifest(folder)
    return from_dict(TrialConfig, read_description(folder)["trial"])


def read_description(folder: Path) -> dict[str, Any]:
    """`compressor.json`, checked against its schema; DamagedBundle names the field."""
    path = folder / DESCRIPTION
    if (folder / PRETRAINED).is_file() and not path.is_file():
        raise ConfigError(f"{folder} is a compressor for a pretrained base, without golden vectors: `mitigate generate --bundle` checks its files and its base")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedBundle(f"{path} is missing") from None
    except ValueError as error:
        raise DamagedBundle(f"{path} is not valid JSON: {error}") from None
    try:
        describe.check_schema(data, where=str(path))
    except ConfigError as error:
        raise DamagedBundle(str(error)) from None
    found: dict[str, Any] = data
    return found


def rebuild(folder: Path, described: dict[str, Any]) -> Attachment:
    """The model of a bundle whose `compressor.json` was read, with its weights; DamagedBundle names a tensor that does not fit."""
    try:
        config = from_dict(TrialConfig, described["trial"])
    except ConfigError as error:
        raise DamagedBundle(f"{folder / DESCRIPTION}: trial: {error}") from None
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten at once
        model = bases.build(config.base)
        attached = attach(model, config.variant)
    try:
        model.load_state_dict(read_tensors(folder / MODEL_FILE))
        describe.from_plain(attached, read_tensors(folder / COMPRESSOR_FILE))
    except RuntimeError as error:
        raise DamagedBundle(f"{folder / MODEL_FILE}: {' '.join(str(error).split())[:240]}") from None
    except ConfigError as error:
        raise DamagedBundle(f"{folder}: {error}") from None
    model.eval()
    return attached


def check_consistency(folder: Path, described: dict[str, Any], attached: Attachment) -> None:
    """Write the description anew from `row.json`, the trial's config and the weights; DamagedBundle names the first field that differs.

    This catches a field that was changed, and the manifest with it: a window off by one, another base's hash, a tensor's shape.
    """
    try:
        row = read_row(folder / ROW)
    except FileNotFoundError:
        raise DamagedBundle(f"{folder / ROW} is missing") from None
    except ConfigError as error:
        raise DamagedBundle(str(error)) from None
    if row.config != described["trial"]:
        raise DamagedBundle(f"{folder / ROW}: its config differs from that in {DESCRIPTION} at {first_difference(row.config, described['trial'])}")
    config = from_dict(TrialConfig, described["trial"])
    again = json.loads(describe.dump(describe.describe(config, row, attached, weights_sha256=sha256(folder / MODEL_FILE))))
    if again != described:
        raise DamagedBundle(f"{folder / DESCRIPTION}: {first_difference(described, again)} by the trial's config, its Row and the weights")


def first_difference(found: Any, expected: Any, path: str = "") -> str:
    """'path is X, must be Y' for the first place where two plain structures differ; empty if they are equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            where = f"{path}.{key}" if path else key
            if key not in found or key not in expected:
                return f"{where} is {'missing' if key not in found else 'unexpected'}"
            if text := first_difference(found[key], expected[key], where):
                return text
        return ""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return next((text for i, pair in enumerate(zip(found, expected, strict=True)) if (text := first_difference(*pair, f"{path}[{i}]"))), "")
    return "" if found == expected else f"{path} is {json.dumps(found)}, must be {json.dumps(expected)}"


def write_manifest(folder: Path) -> None:
    """sha256 of every file in the folder, the manifest aside."""
    files = {name: sha256(folder / name) for name in sorted(_files(folder) - {MANIFEST})}
    exporter = {"name": "mitigate", "version": __version__}
    (folder / MANIFEST).write_text(describe.dump({"exporter": exporter, "files": files}), encoding="utf-8")


def check_manifest(folder: Path) -> None:
    """Compare every file with the manifest; DamagedBundle names the first that is missing, unexpected or changed."""
    try:
        expected: dict[str, str] = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedBundle(f"{folder} is no bundle: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedBundle(f"{folder / MANIFEST} is damaged") from None
    found = _files(folder) - {MANIFEST}
    for name in sorted(expected.keys() | found):
        if name not in found:
            raise DamagedBundle(f"{folder / name} is missing")
        if name not in expected:
            raise DamagedBundle(f"{folder / name} is not in the manifest")
        if sha256(folder / name) != expected[name]:
            raise DamagedBundle(f"{folder / name} is not what the manifest says: one of the two was changed")


def sha256(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() and "__pycache__" not in path.parts}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file of a bundle; DamagedBundle if it is missing or none."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise DamagedBundle(f"{path} is missing") from None
    except SafetensorError as error:
        raise DamagedBundle(f"{path} is no safetensors file: {' '.join(str(error).split())}") from None


def _finished(study_dir: Path, trial: int) -> Row:
    rows = {row.trial: row for row in read_rows(study_dir)}
    if trial not in rows:
        known = ", ".join(str(number) for number in sorted(n for n in rows if n is not None)) or "none"
        raise ConfigError(f"{study_dir} has no finished trial {trial}; finished: {known}")
    if rows[trial].status != "ok":
        error = rows[trial].error
        raise ConfigError(f"trial {trial} of {study_dir} is infeasible ({error.kind if error else 'no result'}) and cannot be exported")
    return rows[trial]
