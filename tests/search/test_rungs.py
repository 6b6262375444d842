"""Rungs, brackets, costs measured last, budgets and requirements, with trials that "train" from a checkpoint and no Ray."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from rich.console import Console

from mitigate import pareto
from mitigate.config import ConfigError
from mitigate.config_search import SearchConfig
from mitigate.results import read_rows
from mitigate.rows import Row
from mitigate.search.loop import SearchOutcome, run_search
from mitigate.search.study import StudyOwner
from mitigate.search.verify import verify_study

Make = Callable[..., SearchConfig]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "gate": ["scalar", "vector"], "local_window": list(range(1, 30))}
RUNGS: dict[str, Any] = {"space": WIDE, "rungs": {"updates": [20, 60], "prompts": [2, 4], "eta": 3, "bracket": 6}, "trial": {"train": {"updates": 180}}}


def search(config: SearchConfig, folder: Path, run: str = "staged", **options: Any) -> tuple[SearchOutcome, str]:
    text = io.StringIO()
    settings: dict[str, Any] = dict(inline=True, run=f"fake_trials:{run}", console=Console(file=text, width=80), command="mitigate again") | options
    return run_search(config, results=folder, cache=folder / "cache", **settings), text.getvalue()


def executions(folder: Path) -> list[str]:
    return (folder / "study" / "executions.log").read_text().splitlines()


def records(config: SearchConfig, folder: Path) -> list[tuple[Any, ...]]:
    """Everything that must be the same however a study came about; `known` is not while proposals do not wait."""
    with StudyOwner.open(config, folder) as owner:
        return [(t.state, t.params, t.values, t.constraints, {k: v for k, v in t.user_attrs.items() if k != "known"}) for t in owner.trials()]


def table(folder: Path) -> list[tuple[Any, ...]]:
    """What the rows say, times aside."""
    return [(r.trial, r.label, r.status, r.rung, r.updates, r.mean_accuracy, r.a_min) for r in read_rows(folder / "study")]


def test_a_bracket_is_halved_twice_and_anchors_are_not(make_config: Make, tmp_path: Path) -> None:
    outcome, text = search(make_config(trials=14, **RUNGS), tmp_path)
    assert (outcome.stopped, outcome.ok + outcome.rungs, outcome.infeasible, outcome.running) == ("budget", 14, 0, 0)
    rows = read_rows(outcome.folder)
    assert [(row.status, row.updates) for row in rows[:2]] == [("ok", 180), ("ok", 180)]
    reached = Counter((row.status, row.updates) for row in rows[2:])
    assert reached["stopped", 20] >= 6 and reached["stopped", 60] >= 2 and reached["ok", 180] >= 2 and sum(reached.values()) == 12
    assert all(row.cost is None and row.mean_accuracy is not None for row in rows if row.status == "stopped")
    assert all(row.cost is not None for row in rows if row.status == "ok")
    assert "stopped at rung 0 after 20 updates" in text and "stopped at a rung" in text
    stages = Counter(line.split(" ", 1)[1] for line in executions(tmp_path))
    assert stages["score 0"] == 12 and stages["cost 2"] == outcome.ok
    updates = [line.split() for line in (tmp_path / "study" / "updates.log").read_text().splitlines()]
    assert len(updates) == len({tuple(line) for line in updates}), "a trial that goes on does not train anything twice"
    assert not list(tmp_path.glob("study/trials/*/checkpoint.pt"))


def test_those_that_stop_are_pruned_and_break_no_constraint(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=8, **RUNGS)
    search(config, tmp_path)
    with StudyOwner.open(config, tmp_path) as owner:
        for trial in owner.trials():
            row = owner.rows[trial.number]
            assert trial.state == (TrialState.COMPLETE if row.status == "ok" else TrialState.PRUNED) and not trial.constraints
            if row.status == "stopped":
                assert trial.user_attrs[f"rung:{row.rung}"]["promoted"] is False


def test_a_study_with_rungs_can_be_derived_again_and_a_forged_one_is_found(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=14, **RUNGS)
    search(config, tmp_path)
    found = verify_study(tmp_path / "study")
    assert (found.proposals, found.differences) == (14, ()) and found.promotions >= 12
    path = next(tmp_path.glob("study/trials/*/rung-1.json"))
    row = Row.from_json(path.read_text())
    path.write_text(row.model_copy(update={"mean_accuracy": 0.0, "a_min": 0.0}).to_json())
    others = [p for p in tmp_path.glob("study/trials/*/rung-1.json") if p != path]
    for other in others:
        row = Row.from_json(other.read_text())
        other.write_text(row.model_copy(update={"mean_accuracy": 1.0, "a_min": 1.0}).to_json())
    assert any("rung 1: recorded" in line for line in verify_study(tmp_path / "study").differences)


def test_a_forged_proposal_is_found(make_config: Make, tmp_path: Path) -> None:
    search(make_config(trials=30), tmp_path, "ok")
    assert verify_study(tmp_path / "study").differences == ()
    journal = tmp_path / "study" / "study.journal"
    lines = journal.read_text().splitlines()
    for place, line in enumerate(lines):
        record = json.loads(line)
        if record.get("user_attrs", {}).get("number") == 27:
            record["user_attrs"]["known"] = record["user_attrs"]["known"][:-12]
            lines[place] = json.dumps(record)
    journal.write_text("\n".join(lines) + "\n")
    assert [line.split(":")[0] for line in verify_study(tmp_path / "study").differences] == ["trial 27"]


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_driver_that_ends_after_any_number_of_stages_goes_on_as_if_it_had_not(make_config: Make, tmp_path: Path, stop_at: int) -> None:
    config = make_config(trials=8, **RUNGS)
    search(config, tmp_path / "whole")

    class Enough(Exception):
        pass

    count = 0

    def counting(folder: Path, row: Row, name: str = "result.json") -> None:
        nonlocal count
        original(folder, row, name)
        count += 1
        if count == stop_at:
            raise Enough

    import mitigate.search.workers as workers

    original = workers.write_result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "write_result", counting)
        with pytest.raises(Enough):
            search(config, tmp_path / "cut")
    search(config, tmp_path / "cut")
    assert table(tmp_path / "cut") == table(tmp_path / "whole")
    assert records(config, tmp_path / "cut") == records(config, tmp_path / "whole")
    assert sorted(executions(tmp_path / "cut")) == sorted(executions(tmp_path / "whole"))


def test_a_bracket_that_will_not_fill_is_decided_and_the_next_one_is_new(make_config: Make, tmp_path: Path) -> None:
    few, more = make_config(trials=6, **RUNGS), make_config(trials=12, **RUNGS)
    first, _ = search(few, tmp_path)
    assert (first.ok + first.rungs, first.running) == (6, 0)
    second, _ = search(more, tmp_path)
    assert second.ok + second.rungs == 12
    with StudyOwner.open(more, tmp_path) as owner:
        assert {bracket: len(numbers) for bracket, numbers in owner.brackets().items()} == {0: 4, 1: 6}
    assert verify_study(tmp_path / "study").differences == ()


def test_a_trial_that_fails_at_a_rung_holds_up_nobody(make_config: Make, tmp_path: Path) -> None:
    outcome, _ = search(make_config(trials=14, max_consecutive_failures=99, **RUNGS), tmp_path, "staged_vector_fails")
    assert outcome.infeasible > 0 and outcome.running == 0 and outcome.ok + outcome.rungs + outcome.infeasible == 14
    assert all(row.error is not None and "vector" in row.label for row in read_rows(outcome.folder) if row.status == "infeasible")


def test_a_budget_of_updates_is_met_and_not_passed_by_more_than_a_trial(make_config: Make, tmp_path: Path) -> None:
    outcome, text = search(make_config(trials=500, max_updates=1000, **RUNGS), tmp_path)
    assert outcome.stopped == "budget" and "the budget of 1000 updates is met" in text
    done = sum(row.updates for row in read_rows(outcome.folder))
    assert 1000 <= done <= 1000 + 6 * 180
    plain, _ = search(make_config(name="plain", trials=500, max_updates=1000, space=WIDE, trial={"train": {"updates": 180}}), tmp_path)
    assert sum(row.updates for row in read_rows(plain.folder)) == 6 * 180


# requirements -------------------------------------------------------------------------------------------------------------------------------------


def test_what_breaks_an_exact_requirement_is_never_run(make_config: Make, tmp_path: Path) -> None:
    outcome, _ = search(make_config(trials=24, space=WIDE, require=["kv_kept <= 0.2"]), tmp_path)
    rows = read_rows(outcome.folder)
    assert [row.label for row in rows if row.cost is not None and row.cost.kv_kept > 0.2] == ["full"]  # an anchor runs whatever it keeps
    assert 0 not in outcome.front and outcome.hypervolume == pytest.approx(pareto.hypervolume(rows[1:]))


def test_a_measured_requirement_is_a_constraint_of_a_finished_trial(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=20, space=WIDE, require=["a_min >= 0.75", "kept < 0.6"])
    outcome, _ = search(config, tmp_path)
    with StudyOwner.open(config, tmp_path) as owner:
        for trial in owner.trials():
            row = owner.rows[trial.number]
            assert trial.state == TrialState.COMPLETE and row.a_min is not None
            assert trial.constraints["a_min >= 0.75"] == (pytest.approx(0.75 - row.a_min) if row.a_min < 0.75 else min(0.75 - row.a_min, 0.0))
            assert (trial.constraints["kept < 0.6"] > 0) == (row.label == "full")
        assert outcome.front and all(owner.rows[n].a_min >= 0.75 for n in outcome.front)  # type: ignore[operator]


@pytest.mark.parametrize(
    "require, said",
    [
        (["kv_kept <= 0.01"], "no variant of the space meets kv_kept <= 0.01; kv_kept runs from 0.08333 to 1"),
        (["a_mim >= 0.5"], "did you mean 'a_min'?"),
        (["a_min > = 0.5"], 'must be "COLUMN OPERATOR NUMBER"'),
    ],
)
def test_a_requirement_that_cannot_be_met_or_read_is_refused_before_a_folder_is_made(make_config: Make, tmp_path: Path, require: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(make_config(space=WIDE, require=require), tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "study").exists()


# reproducible -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rungs", [False, True])
def test_reproducible_proposals_know_a_fixed_set_and_no_throughput(make_config: Make, tmp_path: Path, rungs: bool) -> None:
    settings = RUNGS if rungs else {"space": WIDE, "lag": 3}
    config = make_config(trials=26, reproducible=True, **settings)
    search(config, tmp_path / "a")
    search(config, tmp_path / "b", "staged_other_speed")
    first, second = records(config, tmp_path / "a"), records(config, tmp_path / "b")
    assert [(r[1], r[4]) for r in first] == [(r[1], r[4]) for r in second]
    assert [r[2] for r in first] != [r[2] for r in second], "throughput was measured differently"
    with StudyOwner.open(config, tmp_path / "a") as owner:
        known = [len(t.user_attrs["known"]) for t in owner.trials()]
    assert known == ([0] * 14 + [8] * 6 + [14] * 6 if rungs else [max(0, n - 2) if n >= 2 else 0 for n in range(26)])
    assert verify_study(tmp_path / "a" / "study").differences == ()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rungs": {"updates": [60, 20]}}, "RungsConfig.updates must be rising, from at least 1, got [60, 20]"),
        ({"rungs": {"updates": [600]}}, "RungsConfig.updates must be below TrainConfig.updates (600), got [600]"),
        ({"rungs": {"updates": [20], "prompts": [4, 4]}}, "RungsConfig.prompts must be one number for each of the 1 rungs, or left out, got [4, 4]"),
        ({"rungs": {"eta": 1}}, "RungsConfig.eta must be at least 2, got 1"),
        ({"rungs": {"eta": 4, "bracket": 3}}, "RungsConfig.bracket must be at least eta (4), got 3"),
        ({"resources": {"gpus": 1.5}}, "ResourcesConfig.gpus must be a fraction of one GPU or a whole number, got 1.5"),
        ({"resources": {"cpus": 0}}, "ResourcesConfig.cpus must be at least 1, got 0"),
        ({"lag": 0}, "SearchConfig.lag must be at least 1, got 0"),
        ({"max_updates": 0}, "SearchConfig.max_updates must be above 0, got 0"),
        ({"require": ["a_min > 0", "a_min > 0"]}, "SearchConfig.require must be distinct"),
    ],
)
def test_errors_name_the_field_the_bound_and_the_value(make_config: Make, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**changes)
    assert str(caught.value).startswith(said)
