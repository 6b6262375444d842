"""A compressor for a pretrained base as a folder: the compressor and what training changed, never the base's own weights.

- ``pretrained.json``: format, variant, base (name, sha256, class, dtype), what was trained, on which text.
- ``compressor.safetensors``: the compressors' weights under the names of trial bundles (``layers.0.k.gate.weight``), fp32.
- ``base_delta.safetensors``: the base's tensors that training changed, whole, under the model's names; only where it changed some.
- ``row.json``: the Row after training. ``MANIFEST.json``: sha256 of every other file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mitigate.bases import Pretrained
from mitigate.config import ConfigError, VariantConfig, to_dict
from mitigate.config_files import from_dict
from mitigate.config_finetune import FineTuneConfig
from mitigate.evaluate import recorded
from mitigate.export import bundle, describe
from mitigate.rows import Row
from mitigate.surgery import Attachment, attach
from mitigate.trial import COMPRESSOR_FILE

DESCRIPTION, DELTA = bundle.PRETRAINED, "base_delta.safetensors"
FORMAT, FORMAT_VERSION = "mitigate-pretrained-compressor", 1
_KEYS = {"format", "format_version", "label", "base", "variant", "trained", "text_sha256", "config"}


def write(to: Path, attached: Attachment, config: FineTuneConfig, row: Row, *, base_sha256: str, text_sha256: str, changed: list[str]) -> Path:
    """Write a trained compressor into a new folder, whole or not at all.

    Args:
        base_sha256: of the base before it was trained. changed: names of its parameters that training changed.

    Raises:
        ConfigError: `to` is there and is not empty.
    """
    model: Any = attached.model
    described = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "label": row.label,
        "base": {
            "name": recorded(config).model,
            "sha256": base_sha256,
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "variant": to_dict(config.variant),
        "trained": {"what": config.train.what, "changed_tensors": sorted(changed)},
        "text_sha256": text_sha256,
        "config": to_dict(recorded(config)),
    }
    named = dict(model.named_parameters())

    def fill(folder: Path) -> None:
        describe.save_tensors(describe.to_plain(attached), folder / COMPRESSOR_FILE)
        if changed:
            describe.save_tensors({name: named[name] for name in changed}, folder / DELTA)
        (folder / DESCRIPTION).write_text(describe.dump(described), encoding="utf-8")
        (folder / bundle.ROW).write_text(describe.dump(row.model_dump(mode="json")), encoding="utf-8")
        bundle.write_manifest(folder)

    return bundle.into_folder(to, fill)


def read(folder: Path) -> dict[str, Any]:
    """`pretrained.json` of a bundle whose files are all as they were written; DamagedBundle names what is not."""
    if (folder / bundle.DESCRIPTION).is_file() and not (folder / DESCRIPTION).is_file():
        raise ConfigError(f"{folder} is the bundle of a trial and holds a whole tiny model; --bundle takes a compressor that was trained by mitigate finetune")
    bundle.check_manifest(folder)
    path = folder / DESCRIPTION
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bundle.DamagedBundle(f"{path} is missing") from None
    except ValueError as error:
        raise bundle.DamagedBundle(f"{path} is not valid JSON: {error}") from None
    version = (found.get("format"), found.get("format_version")) if isinstance(found, dict) else (None, None)
    if version != (FORMAT, FORMAT_VERSION) or set(found) != _KEYS:
        raise bundle.DamagedBundle(f"{path} must be {FORMAT} of version {FORMAT_VERSION} with {', '.join(sorted(_KEYS))}")
    return found


def variant_of(described: dict[str, Any]) -> VariantConfig:
    """The variant of a bundle."""
    return from_dict(VariantConfig, described["variant"])


@torch.no_grad()
def put_on(base: Pretrained, folder: Path, described: dict[str, Any]) -> Attachment:
    """Attach a bundle's compressor to its base, and put in the base's weights that training changed.

    Raises:
        ConfigError: the bundle was made for another base, or the base cannot carry the variant.
        DamagedBundle: a tensor is missing, unexpected, or of another shape.
    """
    made_for = described["base"]
    if made_for["sha256"] != base.sha256:
        raise ConfigError(
            f"{folder} was made for {made_for['name']} with weights {made_for['sha256'][:12]} in {made_for['dtype']}, and this model has {base.sha256[:12]}"
        )
    named, wanted = dict(base.model.named_parameters()), described["trained"]["changed_tensors"]
    changed = bundle.read_tensors(folder / DELTA) if wanted else {}
    for name in sorted({*wanted, *changed}):
        if name not in changed or name not in named or name not in wanted or changed[name].shape != named[name].shape:
            raise bundle.DamagedBundle(f"{folder / DELTA}: tensor {name} is missing, or does not fit the base")
    weights = bundle.read_tensors(folder / COMPRESSOR_FILE)
    attached = attach(base.model, variant_of(described))
    try:
        describe.from_plain(attached, weights)
    except ConfigError as error:
        attached.detach()
        raise bundle.DamagedBundle(f"{folder}: {error}") from None
    for name, tensor in changed.items():
        named[name].copy_(tensor)
    return attached
