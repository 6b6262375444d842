"""The space: validity of everything it can suggest, canonical variants, duplicates, errors before anything runs."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction
from math import ceil
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.config import ConfigError, VariantConfig
from mitigate.search.space import DEFAULTS, KEYS, SearchSpace, canonical, variant_key

CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "stride": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    "overlap": st.sampled_from(["1", "5/4", "4/3", "3/2", "2", "3"]),
    "gate": st.sampled_from(["scalar", "vector", "uniform"]),
    "tie": st.sampled_from(["none", "gates", "kv"]),
    "payload": st.sampled_from(["shared", "per_offset"]),
    "local_window": st.sampled_from([1, 4, 16]),
    "coarse": st.sampled_from(["none", "even"]),
    "coarse_factor": st.sampled_from([2, 4]),
    "coverage": st.sampled_from(["none", "entropy", "hinge"]),
    "coverage_weight": st.sampled_from([0.0, 0.1, 1.0]),
    "coverage_threshold": st.sampled_from([0.1, 0.25, 0.5]),
    "rope_position": st.sampled_from(["last_stride", "window_start", "window_end"]),
}
spaces = st.sets(st.sampled_from(sorted(CHOICES))).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.lists(CHOICES[key], min_size=1, max_size=3, unique=True).map(tuple) for key in sorted(keys)})
)


@settings(max_examples=200, deadline=None)
@given(choices=spaces, seed=st.integers(0, 999))
def test_whatever_a_space_suggests_is_a_valid_canonical_variant(choices: dict[str, Any], seed: int) -> None:
    space = SearchSpace(choices)
    params = space.random(random.Random(seed))
    variant = space.to_variant(params)
    assert 1 <= variant.stride <= variant.window
    assert canonical(variant) == variant
    assert space.to_variant(params) == variant
    found = space.to_params(variant)
    inert = any(getattr(variant, key) != value for key, value in params.items() if key != "overlap")
    assert inert if found is None else space.to_variant(found) == variant
    if "overlap" in params:
        assert variant.window == ceil(variant.stride * Fraction(params["overlap"]))
    assert ("coverage_weight" in params) <= (params.get("coverage", "none") != "none")
    assert ("coverage_threshold" in params) <= (params.get("coverage", "none") == "hinge")
    assert ("coverage" in params) <= (params.get("gate") != "uniform")


@settings(max_examples=200, deadline=None)
@given(choices=spaces, seed=st.integers(0, 999), changes=st.integers(0, 12))
def test_a_neighbour_differs_in_so_many_parameters_at_most(choices: dict[str, Any], seed: int, changes: int) -> None:
    space, rng = SearchSpace(choices), random.Random(seed)
    params = space.random(rng)
    near = space.neighbour(params, rng, changes=changes)
    assert sum(near[key] != value for key, value in params.items() if key in near) <= changes
    assert all(value in choices[key] for key, value in near.items())
    assert list(near) == list(space.suggest(optuna.trial.FixedTrial({**{key: values[0] for key, values in choices.items()}, **near})))
    assert changes > 0 or near == params


@settings(max_examples=100, deadline=None)
@given(choices=spaces)
def test_variants_lists_each_once_and_all_that_can_be_suggested(choices: dict[str, Any]) -> None:
    space = SearchSpace(choices)
    listed = [variant_key(variant) for _, variant in space.variants()]
    assert len(listed) == len(set(listed)) <= space.bound()
    rng = random.Random(0)
    assert {variant_key(v) for _ in range(30) if (v := space.usable(space.random(rng)))} <= set(listed)


@settings(max_examples=100, deadline=None)
@given(choices=spaces)
def test_optuna_suggestions_follow_the_same_order_and_conditions(choices: dict[str, Any]) -> None:
    space = SearchSpace(choices)
    trial = optuna.trial.FixedTrial({key: values[0] for key, values in choices.items()})
    params = space.suggest(trial)
    assert list(params) == [key for key in KEYS if key in params]
    assert params == trial.params
    space.to_variant(params)


@settings(max_examples=100, deadline=None)
@given(choices=spaces, data=st.data())
def test_fingerprint_depends_on_choices_and_their_order_not_on_the_order_of_parameters(choices: dict[str, Any], data: st.DataObject) -> None:
    keys = data.draw(st.permutations(sorted(choices)))
    assert SearchSpace({key: choices[key] for key in keys}).fingerprint() == SearchSpace(choices).fingerprint()
    for key, values in choices.items():
        if len(values) > 1:
            assert SearchSpace(choices | {key: values[::-1]}).fingerprint() != SearchSpace(choices).fingerprint()
            assert SearchSpace(choices | {key: values[1:]}).fingerprint() != SearchSpace(choices).fingerprint()


@pytest.mark.parametrize(
    "one, other",
    [
        (dict(coverage="entropy", coverage_weight=0.0), {}),
        (dict(coverage="entropy", coverage_weight=0.1, coverage_threshold=0.5), dict(coverage="entropy", coverage_weight=0.1)),
        (dict(coverage_threshold=0.5), {}),
        (dict(coarse="odd"), {}),
        (dict(coverage_scope="model"), {}),
        (dict(gate="uniform", coverage="hinge", coverage_weight=1.0, coverage_scope="model"), dict(gate="uniform")),
        (dict(gate="uniform", tie="gates"), dict(gate="uniform")),
        (dict(gate="uniform", coverage="hinge", coverage_weight=1.0), dict(gate="uniform")),
        (dict(rope_position="window_start"), {}),
        (dict(stride=1, rope_position="window_end"), dict(stride=1)),
    ],
)
def test_settings_of_one_model_have_one_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert variant_key(VariantConfig(**one)) == variant_key(VariantConfig(**other))


@pytest.mark.parametrize(
    "changes",
    [
        dict(stride=4),
        dict(tie="gates"),
        dict(tie="kv"),
        dict(gate="uniform", tie="kv"),
        dict(coverage="hinge", coverage_weight=0.1, coverage_threshold=0.5),
        dict(rope_position="window_end"),
        dict(stride=4, rope_position="window_start"),
        dict(local_window=1),
        dict(coarse="odd", coarse_factor=2),
        dict(coarse="odd", coarse_factor=2, stride=1, rope_position="window_end"),
    ],
)
def test_different_models_have_different_keys(changes: dict[str, Any]) -> None:
    default = VariantConfig()
    variant = dataclasses.replace(default, **changes)
    assert canonical(variant) == variant
    plain = {f.name: getattr(variant, f.name) for f in dataclasses.fields(variant)} | {next(reversed(changes)): DEFAULTS[next(reversed(changes))]}
    assert variant_key(variant) != variant_key(VariantConfig(**plain))


def test_overlap_rounds_windows_up_and_a_lone_stride_means_no_overlap() -> None:
    assert SearchSpace({}).to_variant({"stride": 6, "overlap": "5/4"}).window == 8
    assert SearchSpace({}).to_variant({"stride": 12}).window == 12
    assert SearchSpace({}).to_variant({"overlap": "3/2"}) == VariantConfig(window=12, stride=8)
    assert SearchSpace({}).to_variant({"window": 12}) == VariantConfig(window=12, stride=8)


def test_full_attention_and_foreign_variants_have_no_params() -> None:
    space = SearchSpace({"stride": (4, 8)})
    assert space.to_params(VariantConfig(compress=False)) is None
    assert space.to_params(VariantConfig(gate="vector")) is None
    assert space.to_params(VariantConfig(window=6, stride=6)) is None
    assert space.to_params(VariantConfig(window=4, stride=4)) == {"stride": 4}


@pytest.mark.parametrize(
    "space, message",
    [
        ({"strid": [4]}, r"SearchConfig\.space\.strid is not a known parameter; did you mean 'stride'\?"),
        ({"compress": ["yes"]}, r"SearchConfig\.space\.compress is not a known parameter"),
        ({"stride": [4, 4.5]}, r"SearchConfig\.space\.stride: VariantConfig\.stride: input should be a valid integer, got 4\.5"),
        ({"stride": ["four"]}, r"SearchConfig\.space\.stride: VariantConfig\.stride: input should be a valid integer, .*got 'four'"),
        ({"stride": [0, 4]}, r"SearchConfig\.space\.stride: VariantConfig\.stride must be between 1 and window \(1\), got 0"),
        ({"stride": [4, 5]}, r"SearchConfig\.space\.stride: ScoreConfig\.period must be a multiple of the stride \(5\), got 24"),
        ({"window": [4]}, r"SearchConfig\.space\.window: VariantConfig\.stride must be between 1 and window \(4\), got 8"),
        ({"window": [8], "overlap": ["1"]}, r"SearchConfig\.space\.window must be left out while overlap is searched"),
        ({"window": [8, 16], "stride": [4, 12]}, r"SearchConfig\.space\.stride must be at most every window \(8\), got 12; search overlap"),
        ({"overlap": ["1/2"]}, r"SearchConfig\.space\.overlap must be a string fraction of at least 1, .*got '1/2'"),
        ({"overlap": ["1/0"]}, r"SearchConfig\.space\.overlap must be .*got '1/0'"),
        ({"overlap": [1.5]}, r"SearchConfig\.space\.overlap must be .*got 1\.5"),
        ({"payload": ["shard"]}, r"SearchConfig\.space\.payload: VariantConfig\.payload: .*got 'shard'"),
        ({"local_window": [0]}, r"SearchConfig\.space\.local_window: VariantConfig\.local_window must be at least 1 .*got 0"),
        ({"coverage": ["entropy"]}, r"SearchConfig\.space\.coverage: 'entropy' changes nothing in any combination"),
        ({"coarse": ["none", "even"]}, r"SearchConfig\.space\.coarse needs a coarse_factor above 1 among the choices, got none"),
        ({"coarse": ["even"], "coarse_factor": [1]}, r"SearchConfig\.space\.coarse needs a coarse_factor above 1 among the choices, got \[1\]"),
        ({"coarse_factor": [2]}, r'SearchConfig\.space\.coarse_factor needs a coarse other than "none" among the choices, got none'),
        ({"coverage_weight": [0.1]}, r"SearchConfig\.space\.coverage_weight: 0\.1 changes nothing in any combination"),
        ({"gate": ["uniform"], "tie": ["none", "gates"]}, r"SearchConfig\.space\.tie: 'gates' changes nothing in any combination"),
        ({"gate": ["scalar", "vectr"]}, r"SearchConfig\.space\.gate: VariantConfig\.gate 'vectr' is not known; did you mean 'vector'\?"),
    ],
)
def test_a_choice_that_cannot_be_used_is_refused_by_name_bound_and_value(make_config: Any, space: dict[str, Any], message: str) -> None:
    from mitigate import registry

    with pytest.raises(ConfigError, match=message):
        SearchSpace.from_config(make_config(space=space), check=lambda variant: registry.check(variant, layers=2))


def test_a_combination_that_the_registry_refuses_is_left_out_not_the_choices(make_config: Any) -> None:
    from mitigate import registry

    config = make_config(space={"gate": ["scalar", "vector"], "tie": ["none", "kv"]})
    space = SearchSpace.from_config(config, check=lambda variant: registry.check(variant, layers=2))
    assert space.usable({"gate": "vector", "tie": "kv"}) is None
    assert len(list(space.variants())) == 3


def test_a_large_space_is_validated_without_listing_it(make_config: Any) -> None:
    config = make_config(space={"local_window": list(range(1, 400)), "stride": [1, 2, 3, 4, 6, 8, 12, 24], "overlap": [f"{n}/7" for n in range(7, 60)]})
    space = SearchSpace.from_config(config)
    assert space.bound() > 100_000
