"""`front`, `show`, `compare` and `report` as users type them, on a study of stored rows; and a real trial that stores what `compare` pairs."""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_rows import fake_answers, fake_failure, fake_rows, store_answers, store_gates, store_row
from tiny_study import write_config

from mitigate import bases, cli, pareto, rescored, results
from mitigate.cli.program import _parser
from mitigate.config import VariantConfig, canonical_json
from mitigate.config_files import from_dict, load_search, replace
from mitigate.config_search import SearchConfig
from mitigate.outcomes import read
from mitigate.report import page
from mitigate.rows import Row
from mitigate.surgery import attach
from mitigate.trial import score_trained, store_weights, with_cost

SPACE = {"window": [8, 12, 16], "stagger": ["none", "half"]}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Rows of `results/quick`, a study of twelve trials and one failure, and the current folder around it."""
    monkeypatch.chdir(tmp_path)
    found = [*fake_rows(12, 1, infeasible=0.0), fake_failure(12, "broken", VariantConfig())]
    store_study("quick", found)
    return found


def store_study(name: str, rows: list[Row], sampler: str = "tpe", seed: int = 0) -> Path:
    study = Path("results") / name
    for row in rows:
        store_row(study, row)
    study.mkdir(parents=True, exist_ok=True)
    config = from_dict(SearchConfig, {"name": name, "trials": 20, "space": SPACE, "sampler": sampler, "seed": seed})
    (study / "config.json").write_text(canonical_json(config), encoding="utf-8")
    return study


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command printed; of a refused one the line on stderr."""
    assert cli.main(list(arguments)) == code
    out, err = capsys.readouterr()
    if code:
        assert out == "" and err.startswith("mitigate: ") and err.count("\n") == 1, err
    return err if code else out


# ---------------------------------------------------------------- front


def test_front_as_json_and_csv_holds_the_front(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    best = {row.trial for row in pareto.front(rows)}
    content = json.loads(run(capsys, "front", "quick", "--json"))
    assert {row["trial"] for row in content["rows"]} == best and content["hypervolume"] == pytest.approx(pareto.hypervolume(rows))
    assert "requirements" not in content and [one["trial"] for one in content["candidates"]] == [knee.row.trial for knee in pareto.knees(rows)]
    lines = list(csv.DictReader(io.StringIO(run(capsys, "front", "quick", "--csv"))))
    assert {int(line["trial"]) for line in lines} == best and float(lines[0]["a_min"]) > 0


def test_front_of_what_meets_the_requirements(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    meets = [row for row in rows if row.cost and row.a_min and row.cost.kv_kept <= 0.2 and row.a_min > 0.3]
    wanted = ["--require", "kv_kept <= 0.2", "--require", "a_min > 0.3"]
    content = json.loads(run(capsys, "front", "quick", *wanted, "--json"))
    assert {row["trial"] for row in content["rows"]} == {row.trial for row in pareto.front(meets)}
    assert content["requirements"] == ["kv_kept <= 0.2", "a_min > 0.3"]
    assert 0 < len(meets) < 12
    assert f"Front of the {len(meets)} of 12 finished trials with kv_kept <= 0.2 and a_min > 0.3." in run(capsys, "front", "quick", *wanted)
    assert run(capsys, "front", "quick", "--require", "a_min > 2") == "No finished trial meets a_min > 2.\n"
    assert json.loads(run(capsys, "front", "quick", "--require", "a_min > 2", "--json"))["rows"] == []


@pytest.mark.parametrize(("column", "field", "down"), [("a_min", "a_min", True), ("gap", "gap", False), ("trial", "trial", False), ("wall_s", "wall_s", False)])
def test_front_sorts_best_first(rows: list[Row], capsys: pytest.CaptureFixture[str], column: str, field: str, down: bool) -> None:
    values = [row[field] for row in json.loads(run(capsys, "front", "quick", "--sort", column, "--json"))["rows"]]
    assert values == sorted(values, reverse=down) and len(values) > 3
    table = run(capsys, "front", "quick", "--sort", column).splitlines()
    order = [int(line[1:].split()[0]) for line in table if line.startswith("*") and line[1:].split()[0].isdigit()]
    assert order == [row["trial"] for row in json.loads(run(capsys, "front", "quick", "--sort", column, "--json"))["rows"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--require", "kv_kept"], "COLUMN OPERATOR NUMBER"),
        (["--require", "nothing < 1"], "nothing"),
        (["--sort", "a_mim"], "did you mean 'a_min'?"),
    ],
)
def test_a_bad_front_option_is_one_line(rows: list[Row], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in run(capsys, "front", "quick", *arguments, code=2)


def test_front_of_nothing_says_so_whatever_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store_study("empty", [])
    assert "No trial has finished" in run(capsys, "front", "empty", "--sort", "a_min", "--require", "a_min > 0.1")
    assert json.loads(run(capsys, "front", "empty", "--json"))["rows"] == []


# ---------------------------------------------------------------- show


def test_show_tells_everything_about_a_trial(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    store_gates(Path("results/quick"), 3, window=16)
    text = run(capsys, "show", "quick", "3")
    assert max(map(len, text.splitlines())) <= 120
    assert "w16s8 #3" in text and "window 16, stride 8" in text and "12.5 % of full attention's bytes" in text and rows[3].config_sha256 in text
    assert f"A_min {rows[3].a_min:.3f}" in text and text.count("▕") == 48 and "L1 V h0" in text and "(1/W = 0.06)" in text
    assert "export: mitigate export results/quick --trial 3 --to quick-trial-3" in text
    on_front = any(row is rows[3] for row in pareto.front(rows))
    assert ("on the four-objective front" in text) == on_front
    assert Row.from_json(run(capsys, "show", "quick", "3", "--json")) == rows[3]


def test_show_names_what_dominates_a_trial(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    dominated = next(row for row in rows if row.status == "ok" and not any(row is other for other in pareto.front(rows)))
    above = [other for other in rows if pareto.dominates(other, dominated)]
    assert above and f"dominated by {above[0].label} #{above[0].trial}" in run(capsys, "show", "quick", str(dominated.trial))


def test_show_a_failure_and_full_attention(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "quick", "12")
    assert "infeasible: no metrics (FloatingPointError" in text and "export:" not in text
    text = run(capsys, "show", "quick", "0")
    assert "full attention, nothing compressed" in text and "has no gates" in text and "export:" not in text


@pytest.mark.parametrize("command", [["show", "quick", "77"], ["compare", "quick", "1", "77"], ["show", "quick", "-1"]])
def test_a_trial_that_is_not_there_is_one_line(rows: list[Row], capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert "with a result; it has 0 to 12" in run(capsys, *command, code=2)


def test_an_unknown_study_is_one_line(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'quick'?" in run(capsys, "show", "quik", "1", code=2)


# ---------------------------------------------------------------- compare


def test_compare_pairs_refuses_or_says_what_is_missing(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    study = Path("results/quick")
    assert "without paired intervals" in " ".join(run(capsys, "compare", "quick", "1", "3").split())
    for seed, trial in enumerate((1, 3)):
        store_answers(study, rows[trial], fake_answers(rows[trial], seed))
    text = run(capsys, "compare", "quick", "1", "3")
    assert "A minus B on the same 24 prompts" in text and "A - B   95 %" in text
    content = json.loads(run(capsys, "compare", "quick", "1", "3", "--json"))
    assert content["paired"] and (content["a"], content["b"]) == (1, 3)
    (study / "trials" / "0003" / "outcomes.safetensors").write_bytes(b"rubbish")
    assert "outcomes.safetensors is damaged" in run(capsys, "compare", "quick", "1", "3", code=2)
    assert "trial 12 is infeasible" in run(capsys, "compare", "quick", "1", "12", code=2)


# ---------------------------------------------------------------- report


def test_report_finds_its_random_baseline_or_takes_the_one_given(rows: list[Row], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DRAWINGS", tuple(drawing for drawing in page.DRAWINGS if drawing.name == "hypervolume"))

    def said(*options: str) -> str:
        assert "results/quick/report.html" in run(capsys, "report", "quick", *options)
        return Path("results/quick/report.html").read_text(encoding="utf-8")  # text that is drawn as paths stands beside them as a comment

    assert "No random baseline: run the same config" in said()
    store_study("chance", fake_rows(5, 2), sampler="random", seed=3)
    store_study("other-sampler", fake_rows(5, 2))
    assert "Random baseline: chance (5 trials)." in said()
    assert "Random baseline: other-sampler (5 trials)." in said("--baseline", "other-sampler")
    assert "Random baseline: chance (5 trials), other-sampler (5 trials)." in said("--baseline", "results/chance", "--baseline", "other-sampler")
    assert "did you mean 'chance'?" in run(capsys, "report", "quick", "--baseline", "chanse", code=2)


# ---------------------------------------------------------------- a published extract


ON_A_STUDY: dict[str, list[str]] = {
    "status": [],
    "verify-study": [],
    "rescore": ["--inline"],
    "front": [],
    "show": ["1"],
    "compare": ["1", "2"],
    "report": [],
    "export": ["--trial", "1", "--to", "bundle"],
}


def test_every_command_that_takes_a_study_is_listed() -> None:
    (commands,) = (action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert {name for name, parser in commands.items() if any(action.dest == "study" for action in parser._actions)} == set(ON_A_STUDY)


@pytest.mark.parametrize("command", ON_A_STUDY)
def test_a_published_extract_is_refused_by_every_command_and_kept(rows: list[Row], capsys: pytest.CaptureFixture[str], command: str) -> None:
    study = Path("results/quick")
    results.write_tables(study, rows)
    (study / rescored.FILE).write_text("trial\n1\n")
    shutil.rmtree(study / "trials")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for name in ("quick", "results/quick"):
        said = run(capsys, command, name, *ON_A_STUDY[command], code=2)
        assert said == "mitigate: results/quick holds published tables of 13 trials but not the trials themselves, so nothing can be derived from it\n"
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_report_never_empties_tables(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    study = Path("results/quick")
    results.write_tables(study, rows)
    for path in study.glob("trials/*/result.json"):
        path.unlink()
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    assert "trials.parquet holds 13 rows and would be written again with none" in run(capsys, "report", "quick", code=2)
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == before


def test_a_published_extract_beside_a_study_is_no_baseline(rows: list[Row], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DRAWINGS", ())
    chance = store_study("chance", fake_rows(5, 2), sampler="random", seed=3)
    results.write_tables(chance, results.read_rows(chance))
    shutil.rmtree(chance / "trials")
    run(capsys, "report", "quick")
    assert "chance holds published tables of 5 trials" in run(capsys, "report", "quick", "--baseline", "chance", code=2)


# ---------------------------------------------------------------- a real trial


def test_a_trial_stores_outcomes_that_agree_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    template = load_search(write_config(tmp_path)).trial
    study, rows = store_study("tiny", []), []
    for trial, variant in enumerate((VariantConfig(window=4, stride=4), VariantConfig(window=4, stride=2))):
        config, folder = replace(template, variant=variant), study / "trials" / f"{trial:04d}"
        attached = attach(bases.build(config.base), config.variant)  # untrained: what is stored is what matters
        row = score_trained(attached, config, label=f"trial {trial}", out=folder)
        rows.append(with_cost(row, attached, config, cache=tmp_path).model_copy(update={"trial": trial}))
        store_weights(attached, folder)
        store_row(study, rows[-1])
        found = read(folder / "outcomes.safetensors")
        assert set(found) == {score.protocol for score in rows[-1].scores} and len(found) == 2
        for score in rows[-1].scores:
            one = found[score.protocol]
            assert one.correct_ER.mean(axis=0).tolist() == pytest.approx(score.accuracy)
            assert one.prompts_sha256 == score.prompts_sha256 and len(np.unique(one.cluster_E)) == score.clusters
    assert "A minus B on the same 6 prompts" in run(capsys, "compare", "tiny", "0", "1")
    text = run(capsys, "show", "tiny", "1")
    assert "Static gates, softmax(b)" in text and "L0 K h1" in text and "L1 V h1" in text
