"""name -> strategy or preset. Strategies register themselves on import of `mitigate.variants`; presets are files under `configs/variants/`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

from mitigate.config import ConfigError, VariantConfig, content_hash
from mitigate.config_files import did_you_mean, load_variant, preset_names, preset_path, read_toml
from mitigate.geometry import Grid, kept_entries_per_token

F = TypeVar("F", bound=Callable[..., Any])
AXES = ("gate", "tie", "payload", "overlap", "local_window", "coarse", "stagger", "bypass", "coverage")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One choice on one axis of a variant: a function, one line of what it does, and where the idea comes from."""

    axis: str
    name: str
    summary: str
    source: str
    function: Callable[..., Any]


_strategies: dict[tuple[str, str], Strategy] = {}


def register(axis: str, name: str, *, summary: str, source: str) -> Callable[[F], F]:
    """Decorator: make a function the strategy `name` of `axis`. ValueError for an unknown axis or a name taken."""
    if axis not in AXES:
        raise ValueError(f"register: axis must be one of {', '.join(AXES)}, got {axis!r}")

    def add(function: F) -> F:
        if (axis, name) in _strategies:
            raise ValueError(f"register: {axis} {name!r} is taken")
        _strategies[axis, name] = Strategy(axis=axis, name=name, summary=summary, source=source, function=function)
        return function

    return add


def _load() -> None:
    package = importlib.import_module("mitigate.variants")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"mitigate.variants.{module.name}")


def strategies(axis: str | None = None) -> list[Strategy]:
    """All strategies, or those of one axis, in the order in which they were registered within an axis."""
    _load()
    return sorted((s for s in _strategies.values() if axis in (None, s.axis)), key=lambda s: AXES.index(s.axis))


def get(axis: str, name: str) -> Strategy:
    """The strategy, or a ConfigError that suggests a near name."""
    _load()
    if (axis, name) not in _strategies:
        raise ConfigError(f"VariantConfig.{axis} {name!r} is not known{did_you_mean(name, [s.name for s in strategies(axis)])}")
    return _strategies[axis, name]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named variant under `configs/variants/`."""

    name: str
    summary: str
    source: str
    variant: VariantConfig


def presets() -> list[Preset]:
    """Every preset; ConfigError if a file has other keys than `summary`, `source` and `variant`."""
    found = []
    for name in preset_names("variants"):
        data = read_toml(preset_path("variants", name))
        if set(data) != {"summary", "source", "variant"}:
            raise ConfigError(f"preset {name} must hold exactly summary, source and [variant], got {', '.join(data)}")
        found.append(Preset(name=name, summary=data["summary"], source=data["source"], variant=load_variant(name)))
    return found


def grids(variant: VariantConfig, *, layers: int) -> list[Grid]:
    """The window grid of each layer: the variant's origin shifted back by the layer's stagger, and forward again by whole strides where it leaves (-W, 0].

    Coarse layers have `coarse_factor` times the window and the stride.
    """
    shift, coarse = get("stagger", variant.stagger).function, get("coarse", variant.coarse).function
    found = []
    for layer in range(layers):
        factor = variant.coarse_factor if coarse(layer=layer, layers=layers) else 1
        window, stride = variant.window * factor, variant.stride * factor
        back = shift(layer=layer, layers=layers, window=window, stride=stride) - variant.origin
        strides = max(0, -(-(back - window + 1) // stride))  # whole strides only: a token keeps its phase
        back -= strides * stride
        found.append(Grid(window=window, stride=stride, origin=-back))
    return found


def bypass_phases(variant: VariantConfig, grid: Grid) -> tuple[int, ...]:
    """Phases (mod the grid's S, relative to that grid) whose tokens keep their exact KV in a layer."""
    return tuple(sorted(set(get("bypass", variant.bypass).function(window=grid.window, stride=grid.stride))))


def held_branches(variant: VariantConfig) -> int:
    """Tensors a summary is held in: 2 for key and value, 1 where one serves as both."""
    return int(get("tie", variant.tie).function().held)


def kept_fraction(variant: VariantConfig, *, layers: int) -> float:
    """KV bytes in the limit of a long context, as a fraction of full attention's (key and value dims equal): the mean over layers."""
    if not variant.compress:
        return 1.0
    total = Fraction(0)
    for grid in grids(variant, layers=layers):
        exact = kept_entries_per_token(grid.stride, bypass_phases(variant, grid))
        total += exact - Fraction(2 - held_branches(variant), 2 * grid.stride)  # a summary held once is half an entry
    return float(total / layers)


def check(variant: VariantConfig, *, layers: int) -> None:
    """ConfigError for an unknown strategy name or a combination that means nothing."""
    if not variant.compress:
        return
    for axis in ("gate", "tie", "payload", "coarse", "stagger", "bypass", "coverage"):
        get(axis, getattr(variant, axis))
    if variant.coarse_factor > 1 and variant.coverage != "none" and variant.coverage_scope != "layer":
        raise ConfigError(f'VariantConfig.coverage_scope must be "layer" with coarse layers, whose heads have other phases, got {variant.coverage_scope!r}')
    if variant.gate == "uniform" and variant.coverage != "none":
        raise ConfigError(f'VariantConfig.coverage must be "none" with a uniform gate (nothing to regularize), got {variant.coverage!r}')
    if variant.gate == "uniform" and variant.tie == "gates":
        raise ConfigError('VariantConfig.tie must be "none" or "kv" with a uniform gate (no gate to share), got \'gates\'')
    grids(variant, layers=layers)


@cache
def _presets_by_hash() -> dict[str, str]:
    """The first preset, by name, of each content hash."""
    return {content_hash(load_variant(name)): name for name in reversed(preset_names("variants"))}


def describe(variant: VariantConfig) -> str:
    """The preset's name if the variant is one, else a short description of what differs from plain W/S."""
    if not variant.compress:
        return "full"
    if (name := _presets_by_hash().get(content_hash(variant))) is not None:
        return name
    parts = [f"w{variant.window}s{variant.stride}"]
    if variant.origin:
        parts.append(f"o{variant.origin}")
    if variant.coarse_factor > 1:
        parts.append(f"coarse-{variant.coarse}-x{variant.coarse_factor}")
    if variant.gate != "scalar":
        parts.append(variant.gate)
    if variant.tie != "none":
        parts.append(f"tied-{variant.tie}")
    if variant.payload != "shared":
        parts.append("per-offset")
    if variant.stagger != "none":
        parts.append(f"stagger-{variant.stagger}")
    if variant.bypass != "none":
        parts.append(f"bypass-{variant.bypass}")
    if variant.coverage != "none":
        parts.append(f"{variant.coverage}-{variant.coverage_weight:g}")
        if variant.coverage == "hinge" and variant.coverage_threshold != 0.25:
            parts.append(f"tau-{variant.coverage_threshold:g}")
        if variant.coverage_scope != "layer":
            parts.append(f"over-{variant.coverage_scope}")
    if variant.local_window != 16:
        parts.append(f"l{variant.local_window}")
    if variant.key_norm != "pooled":
        parts.append(f"norm-{variant.key_norm}")
    if variant.rope_position != "last_stride":
        parts.append(variant.rope_position.replace("_", "-"))
    return " ".join(parts)
