"""Convert a model for good: the compressors become part of it, and it is saved in one file that full attention cannot load by mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import AutoConfig, PreTrainedModel

from mitigate.config import ConfigError, VariantConfig, canonical_json
from mitigate.config_files import from_dict
from mitigate.files import write_atomic
from mitigate.surgery import COMPRESSORS, Attachment, attach

CONVERTED_FILE = "converted.safetensors"  # no name that transformers looks for, so that a plain reload fails and never runs full attention
_FORMAT = "mitigate-converted-1"
_PLAIN_WEIGHTS = ("model*.safetensors", "model*.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model*.bin.index*.json")  # what transformers looks for


def convert(model: PreTrainedModel, variant: VariantConfig) -> Attachment:
    """Put a variant on a model for good: nothing to leave, and the compressors are among `model.parameters()`, `.to()` and `.state_dict()`.

    ``model.save_pretrained(folder)`` then writes config.json and `CONVERTED_FILE`, weights and compressors in one file, which `load_converted` reads. A plain
    ``from_pretrained(folder)`` finds no weights and fails: it could only run full attention. A folder that holds such weights already is therefore refused.
    Full attention itself leaves the model as it is.

    Raises:
        ConfigError, UnsupportedModel: as for `attach`.
    """
    attached = attach(model, variant)
    attached.make_permanent(save_converted)
    return attached


def save_converted(
    attached: Attachment, save_directory: str | Path, *, is_main_process: bool = True, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """`save_pretrained` of a converted model. `state_dict` stands for the model's own, as trainers pass it.

    Raises:
        ConfigError: `save_directory` is no folder, or holds weights that a plain `from_pretrained` would load. Nothing is written then.
    """
    if not is_main_process:
        return
    model, folder = attached.model, Path(save_directory)
    _check_folder(folder)
    own = model.state_dict()
    tied = _repeated(own)
    held = {name: tensor for name, tensor in (own if state_dict is None else state_dict).items() if name not in tied}
    about = {"format": _FORMAT, "class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch."), "variant": canonical_json(attached.variant)}
    write_atomic(folder / CONVERTED_FILE, save({name: tensor.detach().cpu().contiguous() for name, tensor in held.items()}, metadata=about))
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def load_converted(folder: str | Path) -> Attachment:
    """The model that a converted one's `save_pretrained` wrote, converted again and in eval mode.

    Raises:
        ConfigError: the folder holds no converted model, its config.json is missing or damaged, or its tensors are not those of its config and variant.
    """
    path = Path(folder) / CONVERTED_FILE
    try:
        with safe_open(path, framework="pt") as opened:
            about, tensors = opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"load_converted: {path} cannot be read: {' '.join(str(error).split())}") from None
    kind = getattr(transformers, about.get("class", ""), None)
    if about.get("format") != _FORMAT or kind is None:
        raise ConfigError(f"load_converted: {path} must be of format {_FORMAT} and a class of transformers, got {about.get('format')} and {about.get('class')}")
    try:
        dtype, variant = getattr(torch, about["dtype"]), from_dict(VariantConfig, json.loads(about["variant"]))
    except (AttributeError, KeyError, ValueError) as error:
        raise ConfigError(f"load_converted: the metadata of {path} is damaged: {error}") from None
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten at once
        model = _built(kind, Path(folder), dtype)
        attached = convert(model, variant)
    for name, parameter in attached.compressors.named_parameters():
        parameter.data = parameter.data.to(tensors.get(f"{COMPRESSORS}.{name}", parameter).dtype)
    own = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items() if name not in _repeated(own)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(f"load_converted: {name} must be of shape {wanted.get(name)}, the file has {found.get(name)}")
    model.load_state_dict(tensors, strict=False)
    model.eval()
    return attached


def _check_folder(folder: Path) -> None:
    """ConfigError unless `CONVERTED_FILE` can be written to `folder` and will be the only weights there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"save_pretrained: save_directory must be a folder, got {folder}" + ("" if there == folder else f" ({there} is none)"))
    plain = sorted({path.name for pattern in _PLAIN_WEIGHTS for path in folder.glob(pattern)})
    if plain:
        raise ConfigError(f"save_pretrained: {folder} must hold no weights that from_pretrained would load as full attention, got {plain[0]}")


def _built(kind: Any, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the class and of the folder's config.json, its weights at random."""
    try:
        config = AutoConfig.from_pretrained(folder)
        if not isinstance(config, kind.config_class):
            raise ConfigError(f"it is of {type(config).__name__}, and {CONVERTED_FILE} of {kind.__name__}")
        model: PreTrainedModel = kind._from_config(config, dtype=dtype)
    except Exception as error:  # the library raises whatever it meets in a config
        raise ConfigError(f"load_converted: {folder / 'config.json'} cannot be used: {' '.join(str(error).split())[:240]}") from None
    return model


def _repeated(state: dict[str, torch.Tensor]) -> set[str]:
    """Names after the first that stand for the same tensor: tied embeddings."""
    seen: dict[Any, str] = {}
    for name, tensor in state.items():
        seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) if tensor.numel() else name, name)
    return set(state) - set(seen.values())
