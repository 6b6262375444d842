"""The driver dies at every step of a trial's life, and workers die at random: the study ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from optuna.trial import TrialState
from rich.console import Console

import mitigate.search.workers as workers
from mitigate.config import TrialConfig, canonical_json, to_dict
from mitigate.config_search import SearchConfig
from mitigate.results import read_rows
from mitigate.rows import Row
from mitigate.search.loop import SearchOutcome, run_search
from mitigate.search.study import StudyOwner
from mitigate.search.verify import verify_study
from mitigate.stage import Stage

Make = Callable[..., SearchConfig]
Drive = Callable[[SearchConfig, Path, str, str, int], int]
ROOT = Path(__file__).parents[2]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "gate": ["scalar", "vector"], "local_window": list(range(1, 30))}
RUNGS: dict[str, Any] = {"space": WIDE, "rungs": {"updates": [20, 60], "prompts": [2, 4], "eta": 3, "bracket": 3}, "trial": {"train": {"updates": 180}}}
CHAOS: dict[str, Any] = {"trials": 8, "reproducible": True, "require": ["a_min >= 0.6"], "max_consecutive_failures": 99} | RUNGS
KILLED = 9

# Where a driver dies, at which passages of it in turn, and whether the stage that was under way has to be repeated.
POINTS: dict[str, tuple[tuple[int, ...], bool]] = {
    "propose before": ((2, 3), False),
    "propose after": ((1, 2), False),
    "start before": ((2, 3), False),
    "train after": ((2, 7), True),
    "write before": ((2, 3), True),  # a stage that ended and left nothing, and a stop that was decided and not written
    "write after": ((1, 2), False),
    "link before": ((2, 3), True),  # the temporary file is whole
    "link after": ((1, 2), False),
    "decide before": ((2, 3), False),
    "decide after": ((1, 2), False),  # half of a bracket
    "constraint before": ((2, 3), False),
    "constraint after": ((1, 2), False),
    "tell before": ((2, 3), False),
    "tell after": ((1, 2), False),  # the checkpoint is still there
    "append after": ((3, 4, 5), False),
    "append half": ((3, 4, 5), False),  # a torn line, and the lock of the journal
    "config before": ((1,), False),
    "config after": ((1,), False),
}
ONCE = ("config before", "config after")  # passed by each driver


def driver_env() -> dict[str, str]:
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "import fake_trials; fake_trials.serve_drivers()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=driver_env())
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)


@pytest.fixture
def drive(server: subprocess.Popen[str], presets: Path) -> Drive:
    """Run a driver that dies at a point; its exit status."""

    def run(config: SearchConfig, folder: Path, function: str, point: str, count: int) -> int:
        order = {"config": to_dict(config), "folder": str(folder), "presets": str(presets), "run": function, "point": point, "count": count}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    return run


def search(config: SearchConfig, folder: Path, run: str = "staged", **options: Any) -> tuple[SearchOutcome, str]:
    text = io.StringIO()
    settings: dict[str, Any] = dict(inline=True, run=f"fake_trials:{run}", console=Console(file=text, width=80), command="mitigate again") | options
    return run_search(config, results=folder, cache=folder / "cache", **settings), text.getvalue()


def table(folder: Path) -> list[tuple[Any, ...]]:
    return [(r.trial, r.label, r.status, r.rung, r.updates, r.mean_accuracy, r.a_min) for r in read_rows(folder / "study")]


def records(config: SearchConfig, folder: Path) -> list[tuple[Any, ...]]:
    with StudyOwner.open(config, folder) as owner:
        return [(t.number, t.state, t.params, t.values, t.constraints, t.user_attrs) for t in owner.trials()]


def log(folder: Path, name: str) -> Counter[str]:
    return Counter((folder / "study" / f"{name}.log").read_text().splitlines())


def require_same(config: SearchConfig, folder: Path, whole: Path, where: str) -> None:
    """A study equals an uninterrupted one, and can be derived again."""
    assert table(folder) == table(whole), where
    found = records(config, folder)
    for ours, straight in zip(found, records(config, whole), strict=True):
        assert ours == straight, where
    assert all(record[1] in (TrialState.COMPLETE, TrialState.PRUNED) for record in found), where
    assert verify_study(folder / "study").differences == (), where
    left = [path.relative_to(folder) for path in (folder / "study" / "trials").glob("*/*") if path.name == "checkpoint.pt" or path.suffix == ".partial"]
    assert not left, where
    assert not (folder / "study" / "orphans").exists(), where


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def uninterrupted(whole: dict[str, Path], config: SearchConfig, run: str, factory: pytest.TempPathFactory) -> Path:
    if run not in whole:
        whole[run] = factory.mktemp("whole")
        assert search(config, whole[run], run)[0].finished
    return whole[run]


def kill_again_and_again(drive: Drive, config: SearchConfig, folder: Path, run: str, point: str) -> int:
    """Run drivers that die at a point until one ends; how many did."""
    counts, _ = POINTS[point]
    kills = 0
    while True:
        passage = 10**6 if kills and point in ONCE else counts[kills % len(counts)]
        status = drive(config, folder, run, point, passage)
        where = f"{point}, kill {kills + 1} at passage {passage}"
        if status == 0:
            assert kills >= 1, f"{where}: never passed"
            return kills
        assert status == KILLED, f"{where}: exit status {status}"
        kills += 1
        assert kills < 150, f"{where}: no progress"


WITH_FAILURES = [point for point in POINTS if point.split()[0] in ("constraint", "tell", "decide", "write")]


@pytest.mark.parametrize("point, run", [*((point, "staged") for point in POINTS), *((point, "staged_vector_fails") for point in WITH_FAILURES)])
def test_a_driver_that_dies_there_again_and_again_loses_nothing(
    make_config: Make, tmp_path: Path, drive: Drive, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, point: str, run: str
) -> None:
    config = make_config(**CHAOS)
    straight = uninterrupted(whole, config, run, tmp_path_factory)
    kills = kill_again_and_again(drive, config, tmp_path, run, point)
    where = f"{point}, {kills} kills"
    require_same(config, tmp_path, straight, where)
    extra = log(tmp_path, "executions") - log(straight, "executions")
    assert sum(extra.values()) <= (kills if POINTS[point][1] else 0), f"{where}: {extra} executed again"
    again = log(tmp_path, "updates") - log(straight, "updates")
    assert not again, f"{where}: {again} trained again"


@pytest.mark.parametrize("point", ["propose after", "train after", "write after"])
def test_a_budget_of_updates_is_met_alike_after_kills(make_config: Make, tmp_path: Path, drive: Drive, point: str) -> None:
    config = make_config(**CHAOS | {"trials": 50, "max_updates": 700})
    kills = kill_again_and_again(drive, config, tmp_path / "killed", "staged", point)
    assert search(config, tmp_path / "whole")[0].finished
    require_same(config, tmp_path / "killed", tmp_path / "whole", f"{point}, {kills} kills")


# what else a search may meet ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passage", [1, 2, 4])
def test_ctrl_c_while_costs_are_measured_loses_nothing(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passage: int) -> None:
    config = make_config(**CHAOS)
    whole = fake_trials.staged
    measured = 0

    def interrupted(trial_config: TrialConfig, *, stage: Stage, **rest: Any) -> Row:
        nonlocal measured
        measured += stage.kind == "cost"
        if stage.kind == "cost" and measured == passage:
            raise KeyboardInterrupt
        return whole(trial_config, stage=stage, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(fake_trials, "staged", interrupted)
        outcome, text = search(config, tmp_path / "cut")
    assert outcome.stopped == "interrupted" and outcome.running > 0 and "continue with: mitigate again" in text
    search(config, tmp_path / "cut")
    search(config, tmp_path / "whole")
    require_same(config, tmp_path / "cut", tmp_path / "whole", f"passage {passage}")
    assert log(tmp_path / "cut", "executions") == log(tmp_path / "whole", "executions")


@pytest.mark.parametrize(
    "changes, anchors, rest",
    [
        ({"trials": 1}, 1, 0),  # fewer than there are anchors
        ({"trials": 2}, 2, 0),
        ({"trials": 4, "anchors": []}, 0, 4),
        ({"trials": 6, "rungs": {"updates": [20, 60], "eta": 3, "bracket": 50}}, 2, 4),  # a bracket that is never full
        ({"trials": 6, "workers": 1}, 2, 4),
        ({"trials": 3, "rungs": {"updates": [20, 60], "eta": 2, "bracket": 2}}, 2, 1),  # a bracket of one
    ],
)
@pytest.mark.parametrize("reproducible", [False, True])
def test_odd_sizes_end(make_config: Make, tmp_path: Path, changes: dict[str, Any], anchors: int, rest: int, reproducible: bool) -> None:
    config = make_config(**CHAOS | changes | {"reproducible": reproducible})
    outcome, text = search(config, tmp_path)
    assert (outcome.stopped, outcome.running, outcome.ok + outcome.rungs) == ("budget", 0, anchors + rest), text
    assert sum(row.anchor for row in read_rows(outcome.folder)) == anchors
    assert verify_study(outcome.folder).differences == ()


def test_trials_that_get_past_a_rung_end_a_row_of_failures(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a bracket has its result before all have reached the rung: those that did must count as successes at once."""
    whole = fake_trials.staged

    def third_fails(config: TrialConfig, *, trial: int, **rest: Any) -> Row:
        if trial % 3 == 2:
            raise ValueError("no such thing")
        return whole(config, trial=trial, **rest)

    monkeypatch.setattr(fake_trials, "staged", third_fails)
    changes = {"trials": 14, "rungs": {"updates": [20, 60], "eta": 3, "bracket": 12}, "max_consecutive_failures": 3}
    outcome, text = search(make_config(**CHAOS | changes), tmp_path)
    assert (outcome.stopped, outcome.infeasible) == ("budget", 4), text


def test_costs_that_always_fail_stop_the_search(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores between them do not hide it."""
    whole = fake_trials.staged

    def costs_fail(config: TrialConfig, *, stage: Stage, **rest: Any) -> Row:
        if stage.kind == "cost":
            raise ValueError("no such thing")
        return whole(config, stage=stage, **rest)

    monkeypatch.setattr(fake_trials, "staged", costs_fail)
    outcome, text = search(make_config(trials=60, max_consecutive_failures=5, space=WIDE), tmp_path)
    assert (outcome.stopped, outcome.ok) == ("failures", 0) and outcome.infeasible in (5, 6), text


def test_a_machine_that_does_not_see_the_folder_gets_the_row_that_a_stage_goes_on_from(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage runs as on another machine with an empty folder; its Row alone comes back."""
    config = make_config(**CHAOS)
    count = 0

    def elsewhere(plain: dict[str, Any], *rest: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        there = tmp_path / f"machine{count}" / "study" / "trials" / Path(plain["folder"]).name
        found = original(plain | {"folder": str(there)}, *rest)
        row, task = Row.model_validate(found), workers.Task.of(plain)
        workers.write_result(Path(task.folder), row, workers.file_of(task, row))
        return found

    original = workers.execute
    monkeypatch.setattr(workers, "execute", elsewhere)
    outcome, text = search(config, tmp_path / "apart")
    assert (outcome.stopped, outcome.infeasible, outcome.running) == ("budget", 0, 0), text
    monkeypatch.setattr(workers, "execute", original)
    search(config, tmp_path / "whole")
    require_same(config, tmp_path / "apart", tmp_path / "whole", "apart")


def test_a_checkpoint_of_a_trial_that_the_journal_lost_is_not_gone_on_from(make_config: Make, tmp_path: Path) -> None:
    folder = tmp_path / "study" / "trials" / "0000"
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").write_text("170")
    search(make_config(trials=1, **RUNGS), tmp_path)
    assert (tmp_path / "study" / "orphans" / "0000.1" / "checkpoint.pt").exists()
    assert sum(log(tmp_path, "updates").values()) == 18


# workers of their own -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    starter = workers.RayExecutor(2)
    yield ray
    starter.close()


def test_a_trial_whose_worker_dies_while_costs_wait_runs_again_after_them(ray_session: Any, make_config: Make, tmp_path: Path) -> None:
    """On one machine, which the costs have to themselves: it must wait for them, not for ever."""

    def task(number: int, run: str, stage: Stage) -> workers.Task:
        folder = tmp_path / "study" / "trials" / f"{number:04d}"
        config, options = canonical_json(TrialConfig()), {"label": "some", "anchor": False, "cache": str(tmp_path / "cache"), "timeout_s": 60.0}
        return workers.Task(number=number, config_json=config, folder=str(folder), run=f"fake_trials:{run}", stage=stage, **options)

    executor = workers.RayExecutor(2)
    executor.submit(task(1, "staged_dying_in_many_ways", Stage()))
    first = Row.from_json(fake_trials.make_row(TrialConfig(), label="some", trial=0, anchor=False).model_copy(update={"cost": None}).to_json())
    costs = task(0, "staged", Stage(kind="cost"))
    executor.submit_alone([dataclasses.replace(costs, before={"rung-0.json": first.to_json()})])
    assert executor.room == 0
    done, end = [], time.monotonic() + 90
    while executor.in_flight:
        assert time.monotonic() < end, "it is never executed again"
        done += executor.poll(0.5)
    assert [(one.task.number, one.row.status, one.task.attempt) for one in done] == [(0, "ok", 1), (1, "ok", 2)]
    assert executor.room == 2


def test_workers_that_die_at_random_change_nothing_but_the_time(ray_session: Any, make_config: Make, tmp_path: Path) -> None:
    """Two workers whose processes are killed or told to end, while others run, wait for them, or have their costs measured."""
    config = make_config(**CHAOS | {"workers": 2})
    outcome, text = search(config, tmp_path / "chaos", "staged_dying_in_many_ways", inline=False)
    assert (outcome.stopped, outcome.infeasible, outcome.running) == ("budget", 0, 0), text
    assert search(config, tmp_path / "whole")[0].finished
    require_same(config, tmp_path / "chaos", tmp_path / "whole", "workers")
    died = len(list((tmp_path / "chaos").glob("study/trials/*/died-*")))
    starts, straight = log(tmp_path / "chaos", "executions"), log(tmp_path / "whole", "executions")
    assert died >= 8 and sum(starts.values()) == sum(straight.values()) + died
    assert log(tmp_path / "chaos", "updates") == log(tmp_path / "whole", "updates"), "each goes on from its checkpoint"
