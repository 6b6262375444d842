"""`mitigate score` and `mitigate transition` as users type them, on a tiny study, a bundle of it, and a tiny pretrained model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evaluate import COST, save
from tiny_study import QUICK, write_config
from tokenizers_for_tests import known_words

from mitigate import cli, config, config_files, cost, registry, results
from mitigate.cli import scores
from mitigate.config import EvaluationConfig, TrialConfig
from mitigate.rows import Row, Transition
from mitigate.tasks import transition
from mitigate.tasks.words import ANIMALS, NAMES

STUDY = QUICK.replace("records = 1, queries = 2", "records = 1, queries = 1")  # so that the base's own task can be swept
MODEL = ["score", "--model", "tiny-llama"]
FEW = ["--prompts", "3", "--records", "18", "--queries", "2", "--protocol", "outer"]
ONE = [*MODEL, "--period", "8", *FEW]
OLD_NUMBERS = {"wall_s", "base_s", "train_s", "score_s", "cost_s", "cost", "trial", "anchor", "label", "base_sha256", "updates", "tokens", "final_loss"}


def files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a study of two trials, a bundle of the second, and a pretrained model; the current folder for the module."""
    folder, threads = tmp_path_factory.mktemp("scores"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_config(folder, STUDY)
        for number, more in enumerate(([], ["--variant", "w4s4"])):  # as a search leaves them, in less time
            trial = folder / "results" / "tiny" / "trials" / f"{number:04d}"
            assert cli.main(["trial", "search.toml", *more, "--out", str(trial)]) == 0
            row = row_in(trial).model_copy(update={"trial": number})
            (trial / "result.json").write_text(row.to_json())
            for path in (trial / "row.json", *trial.glob("phase_curve.*")):
                path.unlink()
        (folder / "results" / "tiny" / "config.json").write_text(config.canonical_json(config_files.load_search(folder / "search.toml")))
        assert cli.main(["export", "tiny", "--trial", "1", "--to", "bundle"]) == 0
        save(folder / "tiny-llama", known_words([*ANIMALS[:70], *NAMES[:16]]))
        assert cli.main([*ONE, "--out", "one"]) == 0
        yield folder
    torch.set_num_threads(threads)


def row_in(folder: Path) -> Row:
    return Row.from_json((folder / "row.json").read_text(encoding="utf-8"))


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one line on stderr of a command that changes nothing."""
    before = files(folder)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    said = [line for line in error.splitlines() if line.startswith("mitigate: ")]
    assert len(said) == 1, error
    assert "Traceback" not in error
    assert files(folder) == before
    return said[0].removeprefix("mitigate: ")


# score, a pretrained model -------------------------------------------------------------------------------------------------------------------


def test_a_model_is_scored_once(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in (workspace / "one").iterdir()} == {"row.json", "phase_curve.png", "phase_curve.svg"}
    row = row_in(workspace / "one")
    settings = config_files.from_dict(EvaluationConfig, row.config)
    assert (settings.model, settings.score.period, settings.score.prompts, settings.score.protocols) == ("tiny-llama", 8, 3, ("outer",))
    assert (settings.words.records, settings.words.queries, settings.words.context) == (18, 2, None)
    assert row.config_sha256 == config.content_hash(settings)
    assert row.score("outer").n == [6] * 8
    before = files(workspace / "one")
    capsys.readouterr()
    assert cli.main([*ONE, "--out", "one"]) == 0
    again = capsys.readouterr().out
    assert "one holds this result already" in again
    assert "A_min" in again
    assert "words:" not in again, "nothing is loaded"
    assert files(workspace / "one") == before
    said = refused([*ONE, "--out", "one", "--seed", "2"], capsys, workspace)
    assert said == f"one holds the result of another config (tiny-llama, own attention, {row.config_sha256[:8]}); choose another --out"


def test_a_variant_goes_to_a_folder_of_its_own(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ONE, "--variant", "w8s8-uniform", "--results", "elsewhere", "--threads", "1"]) == 0
    (folder,) = Path("elsewhere/scores").iterdir()
    row = row_in(folder)
    assert folder.name == f"tiny-llama_w8s8-uniform_untrained-{row.config_sha256[:8]}"
    assert row.label == "tiny-llama, w8s8-uniform untrained"
    assert config_files.from_dict(EvaluationConfig, row.config).variant == config_files.load_variant("w8s8-uniform")
    assert row.score("outer").prompts_sha256 == row_in(workspace / "one").score("outer").prompts_sha256, "asked the same as its own attention"
    assert ", 1 threads)" in row.device
    said = capsys.readouterr().out
    assert "words: 70 keys and 16 names, records of 4 tokens, prefix of 1" in said
    assert "A_min" in said
    assert f"result: {folder / 'row.json'}, figure: {folder / 'phase_curve.png'}" in said


def test_a_context_replaces_the_records(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*MODEL, "--context", "300", "--period", "4", "--prompts", "2", "--queries", "1", "--batch", "3", "--out", "long"]) == 0
    row = row_in(workspace / "long")
    assert config_files.from_dict(EvaluationConfig, row.config).words.context == 300
    assert [found.protocol for found in row.scores] == ["outer", "in_sequence"]
    for found in row.scores:
        assert 100 < min(found.target_mean) <= max(found.target_mean) < 200
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score"], "score: give either --model or --bundle (a bundle holds its model)"),
        ([*MODEL, "--bundle", "bundle"], "score: give either --model or --bundle (a bundle holds its model)"),
        (["score", "--bundle", "bundle", "--variant", "w4s4"], "score: --variant and --bundle exclude each other (a bundle holds its variant)"),
        ([*MODEL, "--threads", "0"], "--threads must be at least 1, got 0"),
        ([*MODEL, "--variant", "w8s8-uniforn"], "did you mean 'w8s8-uniform'?"),
        ([*MODEL, "--variant", "w8s8", "--period", "12"], "ScoreConfig.period must be a multiple of the stride (8), got 12"),
        ([*MODEL, "--period", "0"], "ScoreConfig.period must be at least 1, got 0"),
        ([*MODEL, "--prompts", "1"], "ScoreConfig.prompts must be at least 2 (cross-fitting halves them), got 1"),
        ([*MODEL, "--batch", "0"], "ScoreConfig.batch must be at least 1, got 0"),
        ([*MODEL, "--seed", "-1"], "ScoreConfig.seed must be at least 0, got -1"),
        ([*MODEL, "--records", "15"], "WordsConfig.records must be at least demonstrations + queries (16), got 15"),
        ([*MODEL, "--records", "71"], "WordsConfig.records must be at most "),
        ([*MODEL, "--queries", "0"], "WordsConfig.queries must be at least 1, got 0"),
        ([*MODEL, "--context", "150", "--protocol", "outer"], "WordsConfig.context must be at least 202 (16 records of 4 tokens and 138 others), got 150"),
        ([*MODEL, "--context", "9000"], "WordsConfig.context must be short enough for records up to "),
        ([*MODEL, "--chat"], "--chat: "),
        (["score", "--model", "./absent"], "--model ./absent: there is no such folder or GGUF file"),
        (["score", "--model", "bundle"], "--model bundle: "),
        (["score", "--model", "search.toml/x/y"], "--model search.toml/x/y: there is no such folder or GGUF file"),
        (["score", "--bundle", "absent"], "absent is no bundle: it has no MANIFEST.json"),
        (["score", "--bundle", "tiny-llama"], "tiny-llama is no bundle: it has no MANIFEST.json"),
        (["score", "--bundle", "bundle", "--period", "6"], "ScoreConfig.period must be a multiple of the stride (4), got 6"),
        (["score", "--bundle", "bundle", "--records", "9"], "score: --records is for models with a tokenizer; the tiny bases have a task of their own"),
        (["score", "--model", "tiny-1kv", "--chat"], "score: --chat is for models with a tokenizer; the tiny bases have a task of their own"),
        (["score", "--model", "tiny-1kv", "--context", "4096"], "score: --context is for models with a tokenizer; the tiny bases have a task of their own"),
        ([*MODEL, "--out", "tiny-llama"], "tiny-llama is not empty and holds no result; choose another --out"),
        ([*MODEL, "--out", "search.toml"], "search.toml"),
        ([*MODEL, "--out", "search.toml/x/y"], "search.toml is no folder, and search.toml/x/y would lie in it; choose another --out"),
        (["score", "--bundle", "bundle", "--out", "bundle", "--seed", "9"], "bundle holds the result of another config"),
    ],
)
def test_bad_score_arguments_are_one_line_and_change_nothing(workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(arguments, capsys, workspace)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "w8s8", "--period", "12"], "ScoreConfig.period must be a multiple of the stride (8), got 12"),
        (["--variant", "w2s2-tied-coarse", "--period", "24"], "ScoreConfig.period must be a multiple of the stride of coarse layers (32), got 24"),
        (["--prompts", "1"], "ScoreConfig.prompts must be at least 2 (cross-fitting halves them), got 1"),
    ],
)
def test_bad_sweeps_of_a_tiny_base_are_one_line(workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(["score", "--model", "tiny-1kv", *arguments], capsys, workspace)


def test_weights_of_other_shapes_are_one_line(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Without the loader's own table."""
    save(tmp_path / "model", known_words([*ANIMALS[:70], *NAMES[:16]]))
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
    loader = logging.getLogger("transformers.modeling_utils")
    loader.addHandler(caplog.handler)
    try:
        said = refused(["score", "--model", str(tmp_path / "model")], capsys, workspace)
    finally:
        loader.removeHandler(caplog.handler)
    assert "6 weights have other shapes than its config's, model.layers.0.mlp.down_proj.weight of shape [32, 40]" in said
    assert "LOAD REPORT" not in caplog.text


def test_another_model_of_the_same_name_is_another_result(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(workspace / "other" / "tiny-llama", known_words([*ANIMALS[:70], *NAMES[:16]]), seed=2)
    cli.main([*ONE, "--model", "other/tiny-llama", "--out", "one"])
    assert "holds this result already" not in capsys.readouterr().out


def test_a_result_of_an_older_schema_is_one_line(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = workspace / "old"
    folder.mkdir()
    plain = json.loads((workspace / "one" / "row.json").read_text()) | {"schema_version": 1, "repeat_accuracy": None}
    (folder / "row.json").write_text(json.dumps(plain))
    assert "old" in refused([*ONE, "--out", "old"], capsys, workspace)


@pytest.mark.parametrize("option", [["--dtype", "float64"], ["--protocol", "both"], ["--period", "x"]])
def test_unknown_choices_are_argparse_errors(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*MODEL, *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err


# score, tiny bases and bundles ---------------------------------------------------------------------------------------------------------------


def test_a_bundle_scores_as_its_trial_did(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", "--bundle", "bundle", "--out", "from-bundle", "--threads", "1"]) == 0
    found, trial = row_in(workspace / "from-bundle"), results.read_row(workspace / "results" / "tiny" / "trials" / "0001" / "result.json")
    assert found.scores == trial.scores, "every number of both sweeps"
    assert (found.config_sha256, found.seed, found.curve) == (trial.config_sha256, trial.seed, trial.curve)
    assert found.model_dump(exclude=OLD_NUMBERS) == trial.model_dump(exclude=OLD_NUMBERS)
    assert found.label == "bundle bundle"
    assert "from-bundle" in capsys.readouterr().out


def test_a_bundle_under_another_sweep(workspace: Path) -> None:
    assert cli.main(["score", "--bundle", "bundle", "--prompts", "8", "--protocol", "in_sequence", "--seed", "5"]) == 0
    (folder,) = (workspace / "results" / "scores").glob("bundle_bundle-*")
    row = row_in(folder)
    settings = config_files.from_dict(TrialConfig, row.config)
    trained = config_files.from_dict(TrialConfig, json.loads((workspace / "bundle" / "row.json").read_text())["config"])
    assert settings == config_files.replace(trained, score=config_files.replace(trained.score, prompts=8, protocols=("in_sequence",), seed=5))
    assert [(found.protocol, found.clusters) for found in row.scores] == [("in_sequence", 8)]
    assert row.config_sha256 in (config.content_hash(settings), folder.name) and folder.name.endswith(row.config_sha256[:8])


def test_a_damaged_bundle_is_not_scored(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = workspace / "bundle" / "compressor.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert "is not what the manifest says" in refused(["score", "--bundle", "bundle", "--out", "damaged"], capsys, workspace)
    finally:
        weights.write_bytes(whole)


def test_a_tiny_base_is_scored_as_it_stands(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The study's base under the name of a preset: 0 updates, its own task, full attention retrieves."""
    trained = config_files.load_search(Path("search.toml")).trial.base
    monkeypatch.setattr(config_files, "load_base", lambda name: trained)
    real = cost.measure
    monkeypatch.setattr(cost, "measure", lambda attached, settings, *, seed: real(attached, COST, seed=seed))  # the default takes seconds
    command = ["score", "--model", "tiny-1kv", "--period", "2", "--prompts", "4", "--threads", "1"]
    assert cli.main([*command, "--out", "tiny-own"]) == 0
    capsys.readouterr()
    row = row_in(workspace / "tiny-own")
    settings = config_files.from_dict(TrialConfig, row.config)
    assert settings.train.updates == row.updates == 0
    assert settings.task == trained.task
    assert row.label == "tiny-1kv own attention untrained"
    assert row.mean_accuracy == 1


@pytest.mark.parametrize("name", config_files.preset_names("variants"))
def test_the_default_sweep_fits_every_preset(name: str) -> None:
    """The fewest residues from ScoreConfig's number on that all layers' phases divide."""
    variant = config_files.load_variant(name)
    strides = {grid.stride for grid in registry.grids(variant, layers=4)} if variant.compress else {1}
    assert scores.default_period(variant) == next(p for p in range(config.ScoreConfig().period, 10_000) if all(p % stride == 0 for stride in strides))


def test_filler_fits_any_sweep() -> None:
    for period in (1, 8, 24, 25, 26, 32, 33, 34, 200):
        words = scores.fitting_filler(config.WordsConfig(), period)
        EvaluationConfig(model="x", words=config_files.replace(config.WordsConfig(), **words), score=config.ScoreConfig(period=period))
    assert scores.fitting_filler(config.WordsConfig(), 24) == {"filler": 72, "filler_in_sequence": 96}, "what the defaults hold stays"


def test_a_tiny_base_takes_a_variant_with_a_stride_beyond_the_default_period(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = config_files.load_search(Path("search.toml")).trial.base
    monkeypatch.setattr(config_files, "load_base", lambda name: trained)
    real = cost.measure
    monkeypatch.setattr(cost, "measure", lambda attached, settings, *, seed: real(attached, COST, seed=seed))
    command = ["score", "--model", "tiny-1kv", "--variant", "w2s2-tied-coarse", "--prompts", "2", "--threads", "1"]
    assert cli.main([*command, "--out", "tiny-coarse"]) == 0
    capsys.readouterr()
    settings = config_files.from_dict(TrialConfig, row_in(workspace / "tiny-coarse").config)
    assert (settings.score.period, settings.task.filler, settings.task.filler_in_sequence) == (32, 93, 96)


# transition ----------------------------------------------------------------------------------------------------------------------------------

TRIAL = Path("results/tiny/trials/0001")


def test_transition_of_a_trial(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(workspace)
    assert cli.main(["transition", str(TRIAL), "--prompts", "3"]) == 0
    said = capsys.readouterr().out
    added = files(workspace).keys() - before.keys()
    assert added == {str(TRIAL / name) for name in ("transition.json", "transition.png", "transition.svg")}
    assert {name: content for name, content in files(workspace).items() if name in before} == before
    found = Transition.model_validate_json((TRIAL / "transition.json").read_text())
    variant = config_files.load_variant("w4s4")
    assert found.distances == list(range(2, variant.local_window + 4 + 4 + 16 + 1))
    assert (found.period, found.prompts) == (4, 3)
    assert f"leaves the local window of {variant.local_window}" in said
    assert str(TRIAL / "transition.json") in said
    assert cli.main(["transition", str(TRIAL), "--prompts", "3"]) == 0
    assert Transition.model_validate_json((TRIAL / "transition.json").read_text()) == found, "the same again"


def test_transition_of_full_attention_has_no_window(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["transition", "results/tiny/trials/0000", "--prompts", "2", "--distance", "6", "--seed", "0"]) == 0
    found = Transition.model_validate_json(Path("results/tiny/trials/0000/transition.json").read_text())
    assert (found.distances, found.period) == ([2, 3, 4, 5, 6], 8)
    assert "window" not in capsys.readouterr().out


def test_transition_of_a_trial_that_was_run_alone(workspace: Path) -> None:
    assert cli.main(["trial", "search.toml", "--variant", "w4s4", "--out", "alone"]) == 0
    assert cli.main(["transition", "alone", "--prompts", "2", "--distance", "4"]) == 0
    assert Transition.model_validate_json(Path("alone/transition.json").read_text()).distances == [2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(TRIAL), "--distance", "1"], r"--distance must be at least \d, got 1"),
        ([str(TRIAL), "--distance", "-3"], r"--distance must be at least \d, got -3"),
        ([str(TRIAL), "--prompts", "0"], "--prompts must be at least 1, got 0"),
        ([str(TRIAL), "--seed", "-1"], "--seed must be at least 0, got -1"),
        ([str(TRIAL), "--threads", "0"], "--threads must be at least 1, got 0"),
        (["absent"], "absent holds no trained trial"),
        (["search.toml"], "search.toml holds no trained trial"),
        (["one"], "one holds no trained trial"),
        (["results/tiny"], "results/tiny holds no trained trial"),
    ],
)
def test_bad_transition_arguments_are_one_line_and_change_nothing(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert re.search(message, refused(["transition", *arguments], capsys, workspace))


def test_a_distance_of_zero_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--distance must be at least" in refused(["transition", str(TRIAL), "--prompts", "1", "--distance", "0"], capsys, workspace)


def test_the_least_distance_is_that_of_the_task(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transition, "least_distance", lambda task: 5)  # keys of four tokens
    assert "--distance must be at least 5, got 4" in refused(["transition", str(TRIAL), "--prompts", "1", "--distance", "4"], capsys, workspace)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_help_names_the_defaults_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of("score", capsys)
    settings: Any = EvaluationConfig(model="x")
    for text in (
        f"records per prompt (default {settings.words.records})",
        f"(default {settings.words.queries}; 1 is the paper's form)",
        f"residues P (default {settings.score.period}, or the next multiple of the variant's stride)",
        f"(default {settings.score.prompts})",
        f"of the prompts (default {settings.score.seed})",
        f"placements per forward pass (default {settings.score.batch})",
        f"(default {settings.dtype})",
    ):
        assert text in said, text
    assert "--distance" in help_of("transition", capsys)
