"""The registry: strategies and presets are complete, names suggest, and what it derives from a variant is right by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mitigate import registry
from mitigate.config import ConfigError, VariantConfig
from mitigate.config_files import load_variant, preset_names, preset_path, read_toml, replace
from mitigate.geometry import Grid, kept_entries_per_token

REQUIRED: dict[str, dict[str, Any]] = {
    "full": {"compress": False},
    "w8s8": {"window": 8, "stride": 8},
    "w8s8-vector": {"gate": "vector"},
    "w8s8-uniform": {"gate": "uniform"},
    "w8s8-tied": {"tie": "kv"},
    "w8s8-tail": {"local_window": 1},
    "w8s8-local4": {"local_window": 4},
    "w8s4": {"stride": 4},
    "w8s4-tail": {"stride": 4, "local_window": 1},
    "w8s6": {"stride": 6},
    "w4s4": {"window": 4, "stride": 4},
    "w12s12": {"window": 12, "stride": 12},
    "w12s8": {"window": 12, "stride": 8},
    "w16s8": {"window": 16, "stride": 8},
    "w8s8-stagger": {"stagger": "half"},
    "w8s8-bypass-last": {"bypass": "last"},
    "deepseek-csa": {"window": 8, "stride": 4, "origin": -4, "gate": "vector", "tie": "kv"},
    "deepseek-hca": {"window": 128, "stride": 128, "gate": "vector", "tie": "kv"},
}


@pytest.fixture
def untouched() -> Iterator[None]:
    """The registry as it was."""
    before = dict(registry._strategies)
    yield
    registry._strategies.clear()
    registry._strategies.update(before)


def test_every_strategy_says_what_it_is_and_where_it_comes_from() -> None:
    for strategy in registry.strategies():
        assert strategy.summary.strip() and strategy.source.strip(), strategy
        assert "\n" not in strategy.summary
    assert {strategy.axis for strategy in registry.strategies()} == set(registry.AXES)
    for axis in registry.AXES:
        names = [strategy.name for strategy in registry.strategies(axis)]
        assert names and len(names) == len(set(names))


def test_defaults_of_a_variant_are_registered() -> None:
    plain = VariantConfig()
    for axis in ("gate", "tie", "payload", "stagger", "bypass", "coverage"):
        registry.get(axis, getattr(plain, axis))


def test_presets_hold_exactly_three_things() -> None:
    for name in preset_names("variants"):
        assert list(read_toml(preset_path("variants", name))) == ["summary", "source", "variant"], name
    for preset in registry.presets():
        assert preset.summary.strip() and preset.source.strip()
        registry.check(preset.variant, layers=2)
        assert registry.describe(preset.variant) == preset.name, "presets are distinct"


def test_a_preset_with_other_keys_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mitigate.config_files

    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / "odd.toml").write_text('summary = "x"\n[variant]\n')
    monkeypatch.setattr(mitigate.config_files, "PRESETS", tmp_path)
    with pytest.raises(ConfigError, match=r"preset odd must hold exactly summary, source and \[variant\], got summary, variant"):
        registry.presets()


@pytest.mark.parametrize("name", REQUIRED)
def test_required_presets(name: str) -> None:
    assert load_variant(name) == VariantConfig(**REQUIRED[name])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate": "vektor"}, "VariantConfig.gate 'vektor' is not known; did you mean 'vector'?"),
        ({"stagger": "halve"}, "VariantConfig.stagger 'halve' is not known; did you mean 'half'?"),
        ({"bypass": "lst"}, "VariantConfig.bypass 'lst' is not known; did you mean 'last'?"),
        ({"coverage": "entropi"}, "VariantConfig.coverage 'entropi' is not known; did you mean 'entropy'?"),
        ({"bypass": "zzz"}, "VariantConfig.bypass 'zzz' is not known; known: " + ", ".join(sorted(s.name for s in registry.strategies("bypass")))),
        ({"gate": "uniform", "coverage": "hinge"}, "VariantConfig.coverage must be \"none\" with a uniform gate (nothing to regularize), got 'hinge'"),
        ({"gate": "uniform", "tie": "gates"}, 'VariantConfig.tie must be "none" or "kv" with a uniform gate (no gate to share), got \'gates\''),
    ],
)
def test_check_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.check(VariantConfig(**changes), layers=2)
    assert str(caught.value) == said


def test_check_accepts_full_attention_and_every_single_strategy() -> None:
    registry.check(VariantConfig(compress=False), layers=2)
    for axis in ("gate", "tie", "payload", "stagger", "bypass", "coverage"):
        for strategy in registry.strategies(axis):
            registry.check(VariantConfig(**{axis: strategy.name}), layers=4)


def origins(layers: int = 4, **fields: Any) -> list[int]:
    return [grid.origin for grid in registry.grids(VariantConfig(**fields), layers=layers)]


def test_grids_by_hand() -> None:
    assert origins(stagger="none") == [0, 0, 0, 0]
    assert origins(stagger="half") == [0, -4, 0, -4]
    assert origins(stagger="spread") == [0, -2, -4, -6]
    assert origins(stagger="step") == [0, -1, -2, -3]
    assert origins(layers=10, window=3, stride=3, stagger="step") == [0, -1, -2, 0, -1, -2, 0, -1, -2, 0]
    assert origins(stride=4, origin=-4) == [-4] * 4
    assert origins(stride=4, origin=-4, stagger="half") == [-4, -6, -4, -6]
    assert origins(stride=4, origin=-6, stagger="half")[1] == -4, "one stride back is the same grid"


@given(
    width=st.integers(1, 16),
    data=st.data(),
    stagger=st.sampled_from(["none", "half", "spread", "step"]),
    coarse=st.sampled_from(["none", "even", "odd", "early"]),
    layers=st.integers(1, 6),
)
def test_a_staggered_grid_is_the_base_grid_shifted_back(width: int, data: st.DataObject, stagger: str, coarse: str, layers: int) -> None:
    pace, origin = data.draw(st.integers(1, width)), data.draw(st.integers(1 - width, 0))
    factor = 1 if coarse == "none" else data.draw(st.integers(2, 5))
    variant = VariantConfig(window=width, stride=pace, origin=origin, stagger=stagger, coarse=coarse, coarse_factor=factor)
    shift = registry.get("stagger", stagger).function
    grids = registry.grids(variant, layers=layers)
    assert len(grids) == layers
    for layer, grid in enumerate(grids):
        is_coarse = registry.get("coarse", coarse).function(layer=layer, layers=layers)
        window, stride = (factor * width, factor * pace) if is_coarse else (width, pace)
        back = shift(layer=layer, layers=layers, window=window, stride=stride)
        assert 0 <= back < stride
        assert (grid.window, grid.stride) == (window, stride)
        # A token's phase in the shifted grid is what it is in the base grid, `back` tokens later; wrapping must not change it.
        assert [grid.phase(t) for t in range(2 * stride)] == [(t + back - origin) % stride for t in range(2 * stride)]
        if origin - back > -window:
            assert grid == Grid(window=window, stride=stride, origin=origin - back)


def test_bypass_phases_by_hand() -> None:
    def phases(**fields: Any) -> tuple[int, ...]:
        variant = VariantConfig(**fields)
        return registry.bypass_phases(variant, registry.grids(variant, layers=1)[0])

    assert phases(bypass="none") == ()
    assert phases(bypass="first") == (0,)
    assert phases(bypass="last") == (7,)
    assert phases(bypass="both") == (0, 7)
    assert phases(bypass="last", window=12) == (3,)
    assert phases(bypass="both", stride=7) == (0,), "first and last of a window of 8 stand at one phase of 7"
    assert phases(bypass="both", window=1, stride=1) == (0,)
    assert phases(bypass="both", coarse="even", coarse_factor=4) == (0, 31)


def test_coarse_layers_by_hand() -> None:
    def strides(coarse: str, layers: int) -> list[int]:
        return [grid.stride for grid in registry.grids(VariantConfig(window=4, stride=2, coarse=coarse, coarse_factor=8), layers=layers)]

    assert strides("even", 5) == [16, 2, 16, 2, 16]
    assert strides("odd", 5) == [2, 16, 2, 16, 2]
    assert strides("early", 5) == [16, 16, 2, 2, 2]
    assert strides("early", 1) == [2]
    assert registry.describe(VariantConfig(window=4, stride=2, coarse="odd", coarse_factor=8)) == "w4s2 coarse-odd-x8"
    with pytest.raises(ConfigError, match=r'^VariantConfig.coverage_scope must be "layer" with coarse layers'):
        variant = VariantConfig(coarse="odd", coarse_factor=2, coverage="entropy", coverage_weight=1.0, coverage_scope="model")
        registry.check(variant, layers=2)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"compress": False}, 1.0),
        ({}, 1 / 8),
        ({"stride": 4}, 1 / 4),
        ({"window": 16, "stride": 8}, 1 / 8),
        ({"tie": "gates"}, 1 / 8),
        ({"tie": "kv"}, 1 / 16),
        ({"bypass": "last"}, 2 / 8),
        ({"bypass": "both"}, 3 / 8),
        ({"bypass": "both", "tie": "kv"}, 1 / 16 + 2 / 8),
        ({"bypass": "both", "stride": 7}, 2 / 7),
        ({"stagger": "half", "local_window": 100}, 1 / 8),
        ({"window": 1, "stride": 1}, 1.0),
        ({"coarse": "even", "coarse_factor": 4}, (2 / 32 + 1 / 8) / 3),
        ({"coarse": "odd", "coarse_factor": 4}, (1 / 32 + 2 / 8) / 3),
        ({"window": 2, "stride": 2, "tie": "kv", "coarse": "odd", "coarse_factor": 16}, (1 / 64 + 2 / 4) / 3),
        ({"bypass": "last", "coarse": "odd", "coarse_factor": 4}, (2 / 32 + 2 * 2 / 8) / 3),
    ],
)
def test_kept_fraction_by_hand(fields: dict[str, Any], kept: float) -> None:
    assert registry.kept_fraction(VariantConfig(**fields), layers=3) == pytest.approx(kept, rel=1e-15)


def test_kept_fraction_agrees_with_the_entries_of_geometry() -> None:
    for preset in registry.presets():
        variant = preset.variant
        if variant.compress and variant.tie != "kv":
            entries = [kept_entries_per_token(grid.stride, registry.bypass_phases(variant, grid)) for grid in registry.grids(variant, layers=2)]
            assert registry.kept_fraction(variant, layers=2) == pytest.approx(float(sum(entries)) / 2)


def test_describe_by_hand() -> None:
    assert registry.describe(VariantConfig(compress=False)) == "full"
    assert registry.describe(VariantConfig()) == "w8s8"
    assert registry.describe(VariantConfig(window=24, stride=12)) == "w24s12"
    odd = VariantConfig(window=16, stride=4, origin=-3, gate="vector", tie="kv", payload="per_offset", stagger="step", bypass="last", local_window=2)
    assert registry.describe(odd) == "w16s4 o-3 vector tied-kv per-offset stagger-step bypass-last l2"
    assert registry.describe(VariantConfig(stride=2, coverage="hinge", coverage_weight=0.5)) == "w8s2 hinge-0.5"


def test_descriptions_tell_variants_apart() -> None:
    base = VariantConfig(window=24, stride=12, coverage="hinge", coverage_weight=1.0)
    changes: list[dict[str, Any]] = [
        {},
        {"window": 20},
        {"stride": 6},
        {"origin": -2},
        {"coarse": "even", "coarse_factor": 2},
        {"coarse": "even", "coarse_factor": 4},
        {"coarse": "odd", "coarse_factor": 2},
        {"stagger": "half"},
        {"gate": "vector"},
        {"tie": "kv"},
        {"payload": "per_offset"},
        {"local_window": 8},
        {"bypass": "last"},
        {"coverage": "entropy"},
        {"coverage_weight": 0.5},
        {"coverage_threshold": 0.1},
        {"coverage_scope": "model"},
        {"key_norm": "tokens"},
        {"rope_position": "window_end"},
    ]
    fields = {field for change in changes for field in change} | {"compress"}
    assert fields == {field.name for field in dataclasses.fields(VariantConfig)}, "a new field needs its word in describe()"
    said = [registry.describe(replace(base, **change)) for change in changes]
    assert len(set(said)) == len(said), said


@pytest.mark.usefixtures("untouched")
def test_a_strategy_can_be_added_and_is_used() -> None:
    @registry.register("bypass", "third", summary="the third token stays", source="a test")
    def third(*, window: int, stride: int) -> tuple[int, ...]:
        return (2 % stride,)

    variant = VariantConfig(bypass="third")
    registry.check(variant, layers=2)
    assert registry.bypass_phases(variant, registry.grids(variant, layers=1)[0]) == (2,)
    assert registry.kept_fraction(variant, layers=2) == 2 / 8
    assert registry.describe(variant) == "w8s8 bypass-third"
    assert registry.strategies("bypass")[-1].name == "third"
    with pytest.raises(ValueError, match="register: bypass 'third' is taken"):
        registry.register("bypass", "third", summary="", source="")(third)
    with pytest.raises(ValueError, match=r"register: axis must be one of gate, .*, got 'gates'"):
        registry.register("gates", "x", summary="", source="")


def test_the_added_strategy_is_gone() -> None:
    with pytest.raises(ConfigError, match="'third' is not known"):
        registry.get("bypass", "third")
