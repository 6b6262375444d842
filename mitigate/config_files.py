"""Configs read strictly, from plain data and from TOML files: unknown keys, wrong types and values out of bounds give one `ConfigError` line.

A TOML file may name a preset where a table is expected (``variant = "w8s8"``, ``base = "tiny-1kv"``); `load_*` resolves the name to a file of `PRESETS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import TypeAdapter

from mitigate.config import BaseConfig, Config, ConfigError, TrialConfig, VariantConfig, to_dict
from mitigate.config_finetune import FineTuneConfig
from mitigate.config_search import SearchConfig

PRESETS = Path(__file__).parent / "configs"
C = TypeVar("C", bound=Config)


def replace(config: C, **changes: Any) -> C:
    """A copy with some fields changed, validated again."""
    return from_dict(type(config), to_dict(config) | {k: to_dict(v) if dataclasses.is_dataclass(v) else v for k, v in changes.items()})  # type: ignore[arg-type]


def from_dict(kind: type[C], data: dict[str, Any]) -> C:
    """Strictly validate plain data.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, or a value out of bounds.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(kind, error)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind.__name__} must hold plain TOML or JSON values: {error}") from None


def _one_line(kind: type, error: pydantic.ValidationError) -> str:
    found = error.errors(include_url=False)
    first = next((e for e in found if e["type"] == "unexpected_keyword_argument"), found[0])  # a misspelt key explains a missing one
    owner, path = kind, [str(part) for part in first["loc"]]
    for part in path[:-1]:
        field = next((f for f in dataclasses.fields(owner) if f.name == part), None)
        inner = _config_class(owner, field.type) if field else None
        if inner is None:
            break
        owner = inner
    where = f"{owner.__name__}.{path[-1]}" if path else owner.__name__
    if first["type"] == "unexpected_keyword_argument":
        known = [f.name for f in dataclasses.fields(owner)]
        return f"{where} is not a known key{did_you_mean(path[-1], known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{where} is missing"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _config_class(owner: type, annotation: Any) -> type | None:
    """The config that a field of `owner` holds, by the name that the owner's module knows it by."""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    found = getattr(sys.modules[owner.__module__], name, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def did_you_mean(word: str, known: list[str]) -> str:
    """'; did you mean X?' for a near miss, else the list of what is known."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; ConfigError names the file when it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} is not there") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path} is a folder") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def preset_names(kind: Literal["variants", "bases", "spaces"]) -> list[str]:
    """Names of the presets under `configs/<kind>/`."""
    return sorted(path.stem for path in (PRESETS / kind).glob("*.toml"))


def preset_path(kind: Literal["variants", "bases", "spaces"], name: str) -> Path:
    """File of a preset; ConfigError suggests a near name."""
    names = preset_names(kind)
    if name not in names:
        raise ConfigError(f"there is no {kind[:-1]} preset {name!r}{did_you_mean(name, names)}")
    return PRESETS / kind / f"{name}.toml"


def load_variant(name: str) -> VariantConfig:
    """The variant of a preset. A preset file holds `summary`, `source` and the table `variant`."""
    return from_dict(VariantConfig, read_toml(preset_path("variants", name)).get("variant", {}))


def load_base(name: str) -> BaseConfig:
    """The base of a preset under `configs/bases/`."""
    return from_dict(BaseConfig, read_toml(preset_path("bases", name)))


def _resolve_names(trial: dict[str, Any]) -> dict[str, Any]:
    resolved = dict(trial)
    if isinstance(resolved.get("variant"), str):
        resolved["variant"] = to_dict(load_variant(resolved["variant"]))
    if isinstance(resolved.get("base"), str):
        resolved["base"] = to_dict(load_base(resolved["base"]))
    return resolved


def load_trial(path: Path) -> TrialConfig:
    """A TrialConfig from TOML, or the `trial` table of a search config (whose variant is then full attention)."""
    data = read_toml(path)
    if "trials" in data or "space" in data:
        return load_search(path).trial
    return from_dict(TrialConfig, _resolve_names(data))


def load_fine_tune(path: Path, *, model: str | None = None) -> FineTuneConfig:
    """A FineTuneConfig from TOML, with `model` instead of its own if given. Relative paths in it are looked for from the current folder."""
    data = read_toml(path)
    return from_dict(FineTuneConfig, _resolve_names(data) | ({} if model is None else {"model": model}))


def load_search(path: Path) -> SearchConfig:
    """A SearchConfig from TOML; `space = "name"` takes `configs/spaces/name.toml`."""
    data = read_toml(path)
    if isinstance(data.get("space"), str):
        data["space"] = read_toml(preset_path("spaces", data["space"]))
    if isinstance(data.get("trial"), dict):
        if "variant" in data["trial"]:
            raise ConfigError("SearchConfig.trial.variant must be left out: the anchors and the space supply it")
        # A placeholder that asks nothing of the period; every trial's variant is checked against it on its own.
        data["trial"] = _resolve_names(data["trial"]) | {"variant": {"compress": False}}
    config = from_dict(SearchConfig, data)
    for name in config.anchors:
        load_variant(name)
    return config
