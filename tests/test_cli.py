"""Commands as users type them: the whole path on a tiny study, and every kind of bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from tiny_study import QUICK, write_config

from mitigate import cli, config_files, registry
from mitigate.rows import Row


def files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the tiny search has been run; the current folder for the module."""
    folder = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_config(folder)
        assert cli.main(["search", "search.toml", "--inline"]) == 0
        yield folder


def test_search_leaves_a_whole_study(workspace: Path) -> None:
    study = workspace / "results" / "tiny"
    found = {path.name for path in study.iterdir()}
    assert {"config.json", "study.journal", "trials", "trials.parquet", "trials.csv", "front.csv", "front.json", "report.html", "figures"} <= found
    table = pd.read_parquet(study / "trials.parquet")
    assert list(table["trial"]) == [0, 1, 2]
    assert set(table["status"]) == {"ok"}
    assert list(table["label"][:2]) == ["full", "w4s4"]
    assert (table["cost.kv_bytes_counted"] == table["cost.kv_bytes_at_context"]).all()
    for number in range(3):
        assert {"result.json", "model.safetensors", "compressor.safetensors"} <= {p.name for p in (study / "trials" / f"{number:04d}").iterdir()}
    assert {path.suffix for path in (study / "figures").iterdir()} == {".png", ".svg"}


def test_the_same_search_again_adds_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = workspace / "results" / "tiny"
    before = {name: content for name, content in files(study).items() if name.startswith("trials/") or name == "study.journal"}
    assert cli.main(["search", "search.toml", "--inline"]) == 0
    after = {name: content for name, content in files(study).items() if name.startswith("trials/") or name == "study.journal"}
    assert before == after
    assert "report.html" in capsys.readouterr().out


def test_front_and_report_by_name(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["front", "tiny"]) == 0
    table = capsys.readouterr().out
    assert "full" in table
    assert "A_min" in table
    assert cli.main(["report", "results/tiny"]) == 0
    assert "report.html" in capsys.readouterr().out


def test_export_and_verify(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "tiny", "--trial", "1", "--to", "bundle"]) == 0
    assert cli.main(["verify", "bundle"]) == 0
    assert "reference.py without this project, fp64: " in capsys.readouterr().out
    before = files(workspace / "bundle")
    assert cli.main(["export", "tiny", "--trial", "1", "--to", "bundle"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert files(workspace / "bundle") == before


def test_trial_draws_and_is_not_run_twice(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["trial", "search.toml", "--variant", "w4s4", "--out", "one"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    assert "A_min" in first
    row = Row.from_json((workspace / "one" / "row.json").read_text())
    assert row.label == "w4s4"
    assert (workspace / "one" / "phase_curve.png").stat().st_size > 1000
    before = files(workspace / "one")
    assert cli.main(command) == 0
    assert "already" in capsys.readouterr().out
    assert files(workspace / "one") == before
    assert cli.main([*command, "--seed", "2"]) == 2
    assert "another config" in capsys.readouterr().err
    assert files(workspace / "one") == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[variant]\nwindow = 8\nstride = 9", "VariantConfig.stride must be between 1 and window (8), got 9"),
        ("[train]\nupdtes = 3", "TrainConfig.updtes is not a known key; did you mean 'updates'?"),
        ('variant = "w8s9"', "there is no variant preset 'w8s9'; did you mean"),
        ('base = "tiny-2kv"', "there is no base preset 'tiny-2kv'; did you mean"),
        ('[variant]\ngate = "scaler"', "VariantConfig.gate 'scaler' is not known; did you mean 'scalar'?"),
        ("[variant]\nstride = 5\nwindow = 5", "ScoreConfig.period must be a multiple of the stride (5), got 24"),
        ("x = [", "is not valid TOML"),
    ],
)
def test_a_bad_trial_config_is_one_line_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trial.toml").write_text(text, encoding="utf-8")
    assert cli.main(["trial", "trial.toml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trial.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "search.toml", "--trials", "0"], "SearchConfig.trials must be at least 1, got 0"),
        (["search", "search.toml", "--workers", "0"], "SearchConfig.workers must be at least 1, got 0"),
        (["search", "search.toml", "--require", "foo <= 1"], "results folder results/tiny belongs to another config: require [] -> "),
        (["search", "search.toml", "--results", "new", "--require", "foo <= 1"], "SearchConfig.require: there is no column 'foo'"),
        (["search", "search.toml", "--results", "new", "--require", "foo"], 'SearchConfig.require must be "COLUMN OPERATOR NUMBER"'),
        (["search", "search.toml", "--results", "new", "--require", "kv_kept >= 2"], "SearchConfig.require: no variant of the space meets kv_kept >= 2"),
        (
            ["search", "search.toml", "--results", "new", "--require", "a_min >= 2"],
            "SearchConfig.require: a_min lies between 0 and 1, so no trial can meet a_min >= 2",
        ),
        (["rescore", "tiny", "--workers", "0"], "SearchConfig.workers must be at least 1, got 0"),
        (["rescore", "tiny", "--workers", "-2", "--inline"], "SearchConfig.workers must be at least 1, got -2"),
        (["score", "--model", "absent", "--context", "-1"], "WordsConfig.context must be at least 1, got -1"),
        (["search", "absent.toml"], "config file absent.toml is not there"),
        (["trial", "search.toml", "--variant", "w4s"], "did you mean 'w4s4'?"),
        (["trial", "search.toml", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["front", "tony"], "tony is no study"),
        (["export", "tiny", "--trial", "77", "--to", "x"], "has no finished trial 77; finished: 0, 1, 2"),
        (["verify", "results"], "is no bundle"),
        (["verify", "search.toml"], "is no bundle"),
        (["front", "tinny"], "did you mean 'tiny'?"),
        (["export", "tiny", "--trial", "1", "--to", "search.toml/sub"], "not a directory"),
        (["trial", "search.toml", "--out", "search.toml"], "search.toml is no folder; choose another --out"),
    ],
)
def test_bad_arguments_are_one_line_and_change_nothing(workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    before = files(workspace)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert files(workspace) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "{path} is damaged: "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "{path} is damaged: "),
        (lambda path: path.write_bytes(b""), "{path} is damaged: "),
        (lambda path: path.write_bytes(b"rubbish and more of it"), "{path} is damaged: "),
        (lambda path: shutil.copy(path.with_name("outcomes.safetensors"), path), "{path} is damaged: it holds other tensors than the trial's config asks for"),
        (lambda path: path.unlink(), "{name}"),
    ],
    ids=["cut", "a byte less", "empty", "rubbish", "another file", "absent"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "compressor.safetensors"])
def test_damaged_weights_are_one_line(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], object], message: str
) -> None:
    study = shutil.copytree(workspace / "results" / "tiny", tmp_path / "tiny")
    trial = study / "trials" / "0001"
    damage(trial / name)
    before = files(tmp_path)
    export = ["export", str(study), "--trial", "1", "--to", str(tmp_path / "out")]
    for command in (export, [*export, "--target", "transformers"], ["transition", str(trial)]):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert message.format(path=trial / name, name=name) in error
        assert error.count("\n") == 1
    assert files(tmp_path) == before


def test_a_study_of_another_config_is_refused_with_its_differences(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(workspace / "results", QUICK.replace("updates = 6", "updates = 7"))
    before = files(workspace)
    assert cli.main(["search", "results/search.toml", "--inline"]) == 2
    error = capsys.readouterr().err
    assert "trial.train.updates 6 -> 7" in error
    assert error.count("\n") == 1
    assert files(workspace) == before


def test_a_folder_of_the_current_directory_does_not_hide_a_study(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "elsewhere" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(workspace / "elsewhere")
    assert cli.main(["front", "tiny", "--results", str(workspace / "results")]) == 0


def test_a_search_without_a_single_result_fails_and_says_why(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = QUICK.replace('"tiny"', '"diverges"').replace("trials = 3", "trials = 1").replace("updates = 6", "updates = 6\nlearning_rate = 1e9")
    path = write_config(workspace / "results", text)
    assert cli.main(["search", str(path), "--inline"]) == 1
    assert cli.main(["front", "diverges"]) == 0
    assert "1 infeasible (Diverged: 1)" in capsys.readouterr().out
    path.unlink()


def documented(command: str) -> list[tuple[str, Path, str]]:
    """Where a command with a config of `configs/` is written down, that config, and the options after it."""
    root = Path(__file__).parents[1]
    texts = [root / "README.md", *root.glob("docs/*.md"), *root.glob("results/reference/**/*.md"), *root.glob("configs/*.toml"), root / "Makefile"]
    pattern = re.compile(rf"mitigate {command} (configs/[\w-]+\.toml)([^\n`#]*)")
    return [(path.name, root / name, options) for path in texts for name, options in pattern.findall(path.read_text(encoding="utf-8"))]


def test_a_documented_search_does_not_meet_a_committed_folder() -> None:
    ignored = (Path(__file__).parents[1] / ".gitignore").read_text(encoding="utf-8").splitlines()
    committed = {line.removeprefix("!/results/").rstrip("/") for line in ignored if line.startswith("!/results/") and line.endswith("/")}
    found = documented("search")
    assert {path.stem for _, path, _ in found} >= {"quickstart", "reference"} and committed == {"reference"}
    for where, path, options in found:
        assert config_files.load_search(path).name not in committed or "--results results/" in options, where


def test_a_documented_fine_tune_says_where_its_model_is() -> None:
    found = documented("finetune")
    assert len(found) >= 2
    for where, path, options in found:
        model = config_files.load_fine_tune(path).model
        assert "--model " in options or (Path(__file__).parents[1] / model).exists(), where


def test_variants_lists_everything_with_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["variants"]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = [line for line in lines if line.startswith("    ")]
    assert len(entries) == len(registry.strategies()) + len(config_files.preset_names("variants"))
    assert all(re.search(r"\S {2,}\S.*\[.+\]$", line) for line in entries)


def test_paper_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper"]) == 0
    assert "W8/S8" in capsys.readouterr().out


def test_quickstart_config_covers_each_family() -> None:
    """The main job's anchors hold at least one variant of each mitigation family, on the reference benchmark."""
    search = config_files.load_search(config_files.PRESETS / "quickstart.toml")
    variants = [config_files.load_variant(name) for name in search.anchors]
    assert search.trials >= 16
    assert search.trial.base == config_files.load_base("tiny-1kv")
    assert (search.trial.train.updates, search.trial.train.batch, search.trial.task.records, search.trial.base.kv_heads) == (600, 32, 32, 1)
    families = {
        "coverage": any(v.coverage != "none" for v in variants),
        "stagger": any(v.stagger != "none" for v in variants),
        "bypass": any(v.bypass != "none" for v in variants),
        "overlap": any(v.window > v.stride for v in variants),
        "gate": any(v.compress and v.gate != "scalar" for v in variants),
        "tying": any(v.tie != "none" for v in variants),
        "tail-only": any(v.local_window == 1 for v in variants),
        "local window": any(1 < v.local_window < 16 for v in variants),
        "full": any(not v.compress for v in variants),
    }
    assert all(families.values()), json.dumps(families)
