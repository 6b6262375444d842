"""Configs: strict in, exact round trip out, errors of one line that name the field, the bound and the value."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mitigate import registry
from mitigate.config import (
    BaseConfig,
    ConfigError,
    CostConfig,
    EvaluationConfig,
    ScoreConfig,
    TaskConfig,
    TrainConfig,
    TrialConfig,
    VariantConfig,
    WordsConfig,
    canonical_json,
    content_hash,
    to_dict,
)
from mitigate.config_files import (
    PRESETS,
    did_you_mean,
    from_dict,
    load_base,
    load_fine_tune,
    load_search,
    load_trial,
    load_variant,
    preset_names,
    preset_path,
    read_toml,
    replace,
)
from mitigate.config_finetune import FineTuneConfig
from mitigate.config_search import SearchConfig

CONFIGS = (VariantConfig, TaskConfig, BaseConfig, TrainConfig, ScoreConfig, CostConfig, TrialConfig)

FILLER = "3 * (period - 1) = 69 for ScoreConfig.period 24"


def names(axis: str) -> st.SearchStrategy[str]:
    return st.sampled_from([strategy.name for strategy in registry.strategies(axis)])


@st.composite
def variants(draw: st.DrawFn) -> VariantConfig:
    if draw(st.integers(0, 20)) == 0:
        return VariantConfig(compress=False)
    window, coverage = draw(st.integers(1, 64)), draw(names("coverage"))
    return VariantConfig(
        window=window,
        stride=draw(st.integers(1, window)),
        origin=draw(st.integers(1 - window, 0)),
        stagger=draw(names("stagger")),
        gate=draw(names("gate")),
        tie=draw(st.sampled_from(["none", "gates", "kv"])),
        payload=draw(st.sampled_from(["shared", "per_offset"])),
        local_window=draw(st.integers(1, 512)),
        bypass=draw(names("bypass")),
        coverage=coverage,
        coverage_weight=0.0 if coverage == "none" else draw(st.floats(0, 1e6)),
        coverage_threshold=draw(st.floats(0, 1)),
        coverage_scope=draw(st.sampled_from(["layer", "model"])),
        key_norm=draw(st.sampled_from(["pooled", "tokens"])),
        rope_position=draw(st.sampled_from(["last_stride", "window_start", "window_end"])),
    )


def message(kind: type[Any], data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(kind, data)
    text = str(caught.value)
    assert "\n" not in text
    return text


# round trip and hash ---------------------------------------------------------------------------------------------------------------------------


@given(variant=variants())
def test_variants_round_trip_exactly(variant: VariantConfig) -> None:
    text = canonical_json(variant)
    again = from_dict(VariantConfig, json.loads(text))
    assert again == variant
    assert canonical_json(again) == text
    assert content_hash(again) == content_hash(variant)
    assert from_dict(VariantConfig, to_dict(variant)) == variant
    assert replace(variant) == variant


@given(one=variants(), other=variants())
def test_hashes_are_equal_exactly_for_equal_variants(one: VariantConfig, other: VariantConfig) -> None:
    assert (content_hash(one) == content_hash(other)) == (one == other)


@given(variant=variants().filter(lambda v: v.compress), seed=st.integers(0, 9), rate=st.floats(1e-9, 10), protocol=st.sampled_from(["outer", "in_sequence"]))
def test_trials_round_trip_exactly(variant: VariantConfig, seed: int, rate: float, protocol: Any) -> None:
    trial = TrialConfig(
        variant=variant,
        task=TaskConfig(filler=600, filler_in_sequence=700),
        train=TrainConfig(learning_rate=rate),
        score=ScoreConfig(period=variant.stride * 3, protocols=(protocol,)),
        seed=seed,
    )
    again = from_dict(TrialConfig, json.loads(canonical_json(trial)))
    assert again == trial
    assert isinstance(again.score.protocols, tuple)


def test_search_config_round_trips_with_mixed_choices() -> None:
    search = SearchConfig(name="s", trials=5, space={"window": (4, 8), "coverage_weight": (0.0, 0.5), "gate": ("scalar", "vector")}, max_hours=0.5)
    again = from_dict(SearchConfig, json.loads(canonical_json(search)))
    assert again == search
    assert [type(choice) for choice in again.space["window"]] == [int, int]


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_field_reaches_the_hash(kind: type[Any]) -> None:
    base = kind()
    hashes = {content_hash(base)}
    changed = 0
    for field in dataclasses.fields(kind):
        value = getattr(base, field.name)
        if isinstance(value, bool) or dataclasses.is_dataclass(value):
            continue
        options = typing.get_args(typing.get_type_hints(kind)[field.name])
        if field.name == "protocols":
            new: Any = ("outer",)
        elif options:
            new = next((o for o in options if o != value), None)
        elif isinstance(value, str):
            new = value + "x"
        elif field.name == "origin":
            new = -1
        elif field.name in ("stride", "kv_heads"):
            new = 4
        elif field.name == "coverage_weight":
            new = 0.0
        else:
            new = value * 2 if value else 1
        if new is None or new == value:
            continue
        try:
            hashes.add(content_hash(replace(base, **{field.name: new})))
        except ConfigError as error:  # a bound on a pair of fields
            assert "VariantConfig.coverage_weight" not in str(error), error
            continue
        changed += 1
    assert len(hashes) == changed + 1
    assert changed >= len(dataclasses.fields(kind)) // 3 or kind is TrialConfig


def test_the_hash_is_of_the_canonical_json_with_every_default() -> None:
    import hashlib

    text = canonical_json(VariantConfig())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert set(json.loads(text)) == {field.name for field in dataclasses.fields(VariantConfig)}
    assert content_hash(VariantConfig()) == hashlib.sha256(text.encode()).hexdigest()
    assert content_hash(from_dict(VariantConfig, {"stride": 8, "window": 8})) == content_hash(from_dict(VariantConfig, {"window": 8}))


def test_configs_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VariantConfig().window = 4  # type: ignore[misc]
    with pytest.raises(Exception, match=r"positional|argument"):
        VariantConfig(True)  # type: ignore[misc]


def test_replace_validates_again() -> None:
    assert replace(TrialConfig(), variant=VariantConfig(stride=4)).variant.stride == 4
    with pytest.raises(ConfigError, match=r"VariantConfig\.stride must be between"):
        replace(VariantConfig(), stride=9)
    with pytest.raises(ConfigError, match=r"ScoreConfig\.period must be a multiple of the stride \(5\), got 24"):
        replace(TrialConfig(), variant=VariantConfig(stride=5))


# errors ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (VariantConfig, {"strde": 8}, "VariantConfig.strde is not a known key; did you mean 'stride'?"),
        (TrialConfig, {"variant": {"strde": 8}}, "VariantConfig.strde is not a known key; did you mean 'stride'?"),
        (TrialConfig, {"base": {"task": {"recrods": 8}}}, "TaskConfig.recrods is not a known key; did you mean 'records'?"),
        (TrialConfig, {"trian": {}}, "TrialConfig.trian is not a known key; did you mean 'train'?"),
        (SearchConfig, {"name": "x"}, "SearchConfig.trials is missing"),
    ],
)
def test_unknown_and_missing_keys(kind: type[Any], data: dict[str, Any], said: str) -> None:
    assert message(kind, data) == said


def test_an_unknown_key_far_from_all_lists_what_is_known() -> None:
    text = message(CostConfig, {"zzzzzz": 1})
    assert text == "CostConfig.zzzzzz is not a known key; known: batch, context, repeats, steps"
    assert did_you_mean("w8s", ["w8s8", "full"]) == "; did you mean 'w8s8'?"


@pytest.mark.parametrize("value", ["8", 1.5, 8.0, True, None, [8], {"x": 1}, float("nan"), float("inf")])
def test_wrong_types_for_an_integer(value: Any) -> None:
    for kind, data in ((VariantConfig, {"window": value}), (TrialConfig, {"variant": {"window": value}})):
        assert message(kind, data).startswith("VariantConfig.window")


@pytest.mark.parametrize("value", ["0.5", True, None, float("nan"), float("inf"), float("-inf")])
def test_wrong_types_for_a_float(value: Any) -> None:
    assert message(TrainConfig, {"learning_rate": value}).startswith("TrainConfig.learning_rate")


def test_wrong_types_elsewhere() -> None:
    assert message(VariantConfig, {"compress": 1}).startswith("VariantConfig.compress")
    assert message(VariantConfig, {"gate": 3}).startswith("VariantConfig.gate")
    assert message(VariantConfig, {"tie": "both"}).startswith("VariantConfig.tie")
    assert "'both'" in message(VariantConfig, {"tie": "both"})
    assert message(TrialConfig, {"variant": 8}).startswith("TrialConfig.variant")
    assert "ScoreConfig" in message(ScoreConfig, {"protocols": ["inner"]})
    assert from_dict(TrainConfig, {"learning_rate": 1}).learning_rate == 1.0, "an integer is a fine float"


def test_direct_construction_is_as_strict() -> None:
    for bad in ({"window": "8"}, {"window": True}, {"window": 8.0}, {"coverage_threshold": float("nan")}, {"unknown": 1}):
        with pytest.raises(ValueError):
            VariantConfig(**bad)  # type: ignore[arg-type]


def test_not_plain_data_is_one_line() -> None:
    assert message(VariantConfig, {"window": {1, 2}}).startswith("VariantConfig must hold plain TOML or JSON values")


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (VariantConfig, {"stride": 9, "window": 8}, "VariantConfig.stride must be between 1 and window (8), got 9"),
        (VariantConfig, {"stride": 0}, "VariantConfig.stride must be between 1 and window (8), got 0"),
        (VariantConfig, {"window": 0}, "VariantConfig.window must be at least 1, got 0"),
        (VariantConfig, {"origin": 1}, "VariantConfig.origin must be above -window (-8) and at most 0, got 1"),
        (VariantConfig, {"origin": -8}, "VariantConfig.origin must be above -window (-8) and at most 0, got -8"),
        (VariantConfig, {"local_window": 0}, "VariantConfig.local_window must be at least 1 (the current token), got 0"),
        (VariantConfig, {"coverage": "entropy", "coverage_weight": -1.0}, "VariantConfig.coverage_weight must be at least 0, got -1.0"),
        (VariantConfig, {"coverage_weight": 1.0}, 'VariantConfig.coverage_weight must be zero while coverage is "none", got 1.0'),
        (VariantConfig, {"coverage_threshold": 1.5}, "VariantConfig.coverage_threshold must be between 0 and 1, got 1.5"),
        (VariantConfig, {"compress": False, "window": 4, "stride": 4}, "VariantConfig.window must be left at 8 while compress is false, got 4"),
        (TaskConfig, {"records": 65}, "TaskConfig.records must be at most the number of different keys (64), got 65"),
        (TaskConfig, {"filler": -1}, "TaskConfig.filler must be at least 0, got -1"),
        (BaseConfig, {"heads": 4, "kv_heads": 3}, "BaseConfig.kv_heads must be a divisor of heads (4), got 3"),
        (BaseConfig, {"head_dim": 7}, "BaseConfig.head_dim must be even, got 7"),
        (TrainConfig, {"learning_rate": 0.0}, "TrainConfig.learning_rate must be above 0, got 0.0"),
        (ScoreConfig, {"prompts": 1}, "ScoreConfig.prompts must be at least 2 (cross-fitting halves them), got 1"),
        (ScoreConfig, {"protocols": ["outer", "outer"]}, "ScoreConfig.protocols must be one or both protocols, each once, got ['outer', 'outer']"),
        (ScoreConfig, {"protocols": []}, "ScoreConfig.protocols must be one or both protocols, each once, got []"),
        (CostConfig, {"context": 0}, "CostConfig.context must be at least 1, got 0"),
        (TrialConfig, {"seed": -1}, "TrialConfig.seed must be at least 0, got -1"),
        (TrialConfig, {"seed": 2**63}, f"TrialConfig.seed must be at most {2**63 - 1} (2**63 - 1), got {2**63}"),
        (BaseConfig, {"seed": 2**70}, f"BaseConfig.seed must be at most {2**63 - 1} (2**63 - 1), got {2**70}"),
        (EvaluationConfig, {"model": "x", "seed": 2**70}, f"EvaluationConfig.seed must be at most {2**63 - 1} (2**63 - 1), got {2**70}"),
        (FineTuneConfig, {"model": "x", "text": {"path": "x"}, "seed": 2**70}, f"FineTuneConfig.seed must be at most {2**63 - 1} (2**63 - 1), got {2**70}"),
        (TrialConfig, {"score": {"period": 20}}, "ScoreConfig.period must be a multiple of the stride (8), got 20"),
        (TrialConfig, {"task": {"filler": 22}}, f"TaskConfig.filler must be at least {FILLER}, got 22"),
        (TrialConfig, {"task": {"filler_in_sequence": 69}}, f"TaskConfig.filler_in_sequence must be above {FILLER}, got 69"),
        (TrialConfig, {"task": {"queries": 33}}, "TaskConfig.queries must be at most records (32), got 33"),
        (TaskConfig, {"key_tokens": 5}, "TaskConfig.key_tokens must be between 1 and 4, got 5"),
        (TaskConfig, {"name_tokens": 0}, "TaskConfig.name_tokens must be between 1 and 4, got 0"),
        (TaskConfig, {"keys": 3, "key_tokens": 2, "records": 10}, "TaskConfig.records must be at most the number of different keys (9), got 10"),
        (WordsConfig, {"records": 15}, "WordsConfig.records must be at least demonstrations + queries (16), got 15"),
        (WordsConfig, {"context": 0}, "WordsConfig.context must be at least 1, got 0"),
        (WordsConfig, {"padding": ""}, "WordsConfig.padding must be at least one character, got ''"),
        (EvaluationConfig, {"model": "x", "variant": {"window": 5, "stride": 5}}, "ScoreConfig.period must be a multiple of the stride (5), got 24"),
        (
            EvaluationConfig,
            {"model": "x", "words": {"filler": 60}},
            f"WordsConfig.filler must be at least {FILLER}, got 60",
        ),
        (EvaluationConfig, {}, "EvaluationConfig.model is missing"),
        (TrialConfig, {"task": {"keys": 70}}, "TaskConfig.keys must be the base's (64), got 70"),
        (SearchConfig, {"name": "../x", "trials": 1}, "SearchConfig.name must be letters, digits, '-', '_' and '.', not starting with '.', got '../x'"),
        (SearchConfig, {"name": "x", "trials": 0}, "SearchConfig.trials must be at least 1, got 0"),
        (SearchConfig, {"name": "x", "trials": 1, "anchors": ["full", "full"]}, "SearchConfig.anchors must be distinct, got ['full', 'full']"),
        (SearchConfig, {"name": "x", "trials": 1, "space": {"stride": []}}, "SearchConfig.space.stride must be a list of at least one choice, got []"),
    ],
)
def test_bounds_name_field_bound_and_value(kind: type[Any], data: dict[str, Any], said: str) -> None:
    assert message(kind, data) == said


def test_limits_themselves_are_allowed() -> None:
    for data in ({"stride": 1}, {"stride": 8}, {"origin": -7}, {"local_window": 1}, {"window": 1, "stride": 1}, {"coverage_threshold": 1.0}):
        from_dict(VariantConfig, data)
    from_dict(TrialConfig, {"task": {"filler": 69, "filler_in_sequence": 70}})
    from_dict(TrialConfig, {"variant": {"compress": False}, "score": {"period": 7}})
    from_dict(TrialConfig, {"task": {"filler": 0}, "score": {"protocols": ["in_sequence"]}})


# files -----------------------------------------------------------------------------------------------------------------------------------------


def test_broken_files_give_one_line(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            read_toml(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert said(tmp_path / "none.toml") == f"config file {tmp_path / 'none.toml'} is not there"
    assert said(tmp_path) == f"config file {tmp_path} is a folder"
    bad = tmp_path / "bad.toml"
    bad.write_text("window = = 8\n")
    assert "is not valid TOML" in said(bad)
    bad.write_text("window = 8\nwindow = 9\n")
    assert "is not valid TOML" in said(bad)
    bad.write_bytes(b'gate = "\xff\xfe"\n')
    assert "is not valid TOML" in said(bad)


def test_preset_names_suggest() -> None:
    with pytest.raises(ConfigError, match=r"^there is no variant preset 'w8s88'; did you mean 'w8s8'\?$"):
        load_variant("w8s88")
    with pytest.raises(ConfigError, match=r"^there is no base preset 'tiny-1k'; did you mean 'tiny-1kv'\?$"):
        load_base("tiny-1k")
    with pytest.raises(ConfigError, match=r"^there is no space preset"):
        preset_path("spaces", "../variants/w8s8")


def test_every_file_under_configs_loads() -> None:
    for name in preset_names("variants"):
        data = read_toml(preset_path("variants", name))
        assert from_dict(VariantConfig, data["variant"]) == load_variant(name)
    for name in preset_names("bases"):
        load_base(name)
    assert {"tiny-1kv", "tiny-4kv"} <= set(preset_names("bases"))
    for name in preset_names("spaces"):
        space = read_toml(preset_path("spaces", name))
        from_dict(SearchConfig, {"name": "x", "trials": 1, "space": space})
    for path in sorted(PRESETS.glob("*.toml")):
        data = read_toml(path)
        if "model" in data:
            load_fine_tune(path)
            continue
        if "trials" in data:
            load_search(path)
        load_trial(path)


def test_the_default_base_is_the_preset() -> None:
    assert load_base("tiny-1kv") == BaseConfig()


def test_load_trial_resolves_names(tmp_path: Path) -> None:
    path = tmp_path / "trial.toml"
    path.write_text('variant = "w8s4"\nbase = "tiny-4kv"\nseed = 3\n[score]\nprompts = 8\n')
    trial = load_trial(path)
    assert trial.variant == load_variant("w8s4")
    assert trial.base == load_base("tiny-4kv")
    assert (trial.seed, trial.score.prompts) == (3, 8)
    path.write_text("[variant]\nwindow = 16\n")
    assert load_trial(path).variant == VariantConfig(window=16)
    path.write_text('variant = "w8s5"\n')
    with pytest.raises(ConfigError, match="did you mean"):
        load_trial(path)
    path.write_text("")
    assert load_trial(path) == TrialConfig()


def test_load_search_resolves_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "search.toml"
    head = 'name = "demo"\ntrials = 4\n'
    path.write_text(head + 'anchors = ["full"]\n[space]\nstride = [4, 8]\n[trial]\nbase = "tiny-4kv"\n')
    search = load_search(path)
    assert search.trial.base == load_base("tiny-4kv")
    assert search.space == {"stride": (4, 8)}
    assert load_trial(path) == search.trial, "the trial of a search"
    path.write_text(head + '[trial]\nvariant = "w8s8"\n')
    with pytest.raises(ConfigError, match=r"SearchConfig\.trial\.variant must be left out"):
        load_search(path)
    path.write_text(head + 'anchors = ["w8s9"]\n')
    with pytest.raises(ConfigError, match="there is no variant preset 'w8s9'"):
        load_search(path)
    path.write_text(head + 'space = "nowhere"\n')
    with pytest.raises(ConfigError, match="there is no space preset 'nowhere'"):
        load_search(path)


def test_load_search_takes_a_named_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mitigate.config_files

    (tmp_path / "presets/spaces").mkdir(parents=True)
    (tmp_path / "presets/spaces/small.toml").write_text('stride = [4, 8]\ngate = ["scalar"]\n')
    monkeypatch.setattr(mitigate.config_files, "PRESETS", tmp_path / "presets")
    path = tmp_path / "search.toml"
    path.write_text('name = "demo"\ntrials = 4\nanchors = []\nspace = "small"\n')
    assert load_search(path).space == {"stride": (4, 8), "gate": ("scalar",)}
