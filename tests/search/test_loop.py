"""The loop without Ray: budget, resume after a kill, failures, interruption, what is printed."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from optuna.trial import TrialState
from rich.console import Console

import mitigate.search.loop as loop
from mitigate import pareto
from mitigate.config import ConfigError, TrialConfig, to_dict
from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig
from mitigate.results import read_rows
from mitigate.search.loop import SearchOutcome, run_search
from mitigate.search.study import StudyOwner

Make = Callable[..., SearchConfig]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "local_window": list(range(1, 100))}  # few duplicates
ROOT = Path(__file__).parents[2]


def search(config: SearchConfig, folder: Path, run: str = "ok", **options: Any) -> tuple[SearchOutcome, str]:
    """One inline search and what it printed."""
    text = io.StringIO()
    console = options.pop("console", None) or Console(file=text, width=80)
    outcome = run_search(
        config, results=folder, cache=folder / "cache", inline=True, run=f"fake_trials:{run}", console=console, command="mitigate again", **options
    )
    return outcome, text.getvalue()


def executions(folder: Path) -> Counter[str]:
    return Counter((folder / "study" / "executions.log").read_text().split())


def states(config: SearchConfig, folder: Path) -> Counter[TrialState]:
    with StudyOwner.open(config, folder) as owner:
        return Counter(trial.state for trial in owner._trials())


def test_a_budget_is_a_total_and_is_met_once(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=50, space=WIDE)
    first, text = search(config, tmp_path)
    assert (first.stopped, first.ok, first.infeasible, first.running, first.finished) == ("budget", 50, 0, 0, True)
    assert text.count("\ntrial ") + text.startswith("trial ") == 50 and "A_min" in text
    journal = (first.folder / "study.journal").read_bytes()
    begin = time.monotonic()
    again, text = search(config, tmp_path, prepare=lambda: pytest.fail("nothing to prepare for"))
    assert time.monotonic() - begin < 1.0
    assert (again.stopped, again.ok) == ("budget", 50) and "the budget of 50 trials is met" in text
    assert (again.front, again.hypervolume) == (first.front, first.hypervolume)
    assert (first.folder / "study.journal").read_bytes() == journal
    assert set(executions(tmp_path).values()) == {1}
    more, _ = search(make_config(trials=53, space=WIDE), tmp_path)
    assert more.ok == 53 and len(read_rows(more.folder)) == 53


def test_a_met_budget_starts_no_ray_and_no_torch(make_config: Make, tmp_path: Path, presets: Path) -> None:
    config = make_config(trials=2)
    search(config, tmp_path)
    code = f"""
import sys, json, pathlib
from mitigate import config_files
config_files.PRESETS = pathlib.Path({str(presets)!r})
from mitigate.config_search import SearchConfig
from mitigate.search.loop import run_search
config = config_files.from_dict(SearchConfig, json.loads({json.dumps(json.dumps(to_dict(config)))}))
print(run_search(config, results=pathlib.Path({str(tmp_path)!r}), cache=pathlib.Path("x")).stopped, "ray" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=driver_env(), timeout=60)
    assert done.stdout.splitlines()[-1] == "budget False False", done.stderr


def test_prepare_runs_once_before_the_first_trial(make_config: Make, tmp_path: Path) -> None:
    calls: list[bool] = []
    search(make_config(trials=3), tmp_path, prepare=lambda: calls.append((tmp_path / "study" / "executions.log").exists()))
    assert calls == [False]


@pytest.mark.parametrize("done", [0, 2])
def test_a_prepare_that_fails_loses_nothing(make_config: Make, tmp_path: Path, done: int) -> None:
    """As when the base is not learned: the error passes, the folder is free again, and the waiting trial keeps its number, also the second time."""
    config = make_config(trials=5)
    if done:
        search(make_config(trials=done), tmp_path)

    def fail() -> None:
        raise RuntimeError("base is still at 4 of 32 records")

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^base is still at 4 of 32 records$"):
            search(config, tmp_path, prepare=fail)
        assert [row.trial for row in read_rows(tmp_path / "study")] == list(range(done))
        with StudyOwner.open(config, tmp_path) as owner:
            assert [proposal.number for proposal in owner.running()] == [done] and owner.total == done + 1
            waiting = owner.running()[0]
    outcome, _ = search(config, tmp_path)
    assert (outcome.stopped, outcome.ok, outcome.running) == ("budget", 5, 0)
    assert set(executions(tmp_path).values()) == {1}
    assert from_dict(TrialConfig, read_rows(outcome.folder)[done].config).variant == waiting.variant


def test_ctrl_c_while_preparing_is_an_interruption(make_config: Make, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    outcome, text = search(make_config(trials=3), tmp_path, prepare=interrupt)
    assert (outcome.stopped, outcome.ok, outcome.running) == ("interrupted", 0, 1) and "continue with: mitigate again" in text
    assert search(make_config(trials=3), tmp_path)[0].ok == 3


def test_a_study_without_a_finished_trial_can_be_read(make_config: Make, tmp_path: Path) -> None:
    outcome, _ = search(make_config(trials=3, max_hours=1e-9), tmp_path)
    assert (outcome.stopped, outcome.ok) == ("time", 0) and read_rows(outcome.folder) == []


def driver_env() -> dict[str, str]:
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def start_driver(config: SearchConfig, folder: Path, presets: Path, run: str = "slow") -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(fake_trials.__file__)), str(folder), str(presets), run, json.dumps(to_dict(config))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=driver_env())


def test_kills_at_any_moment_lose_and_repeat_nothing(make_config: Make, tmp_path: Path, presets: Path) -> None:
    config = make_config(trials=40, space=WIDE)
    rng = random.Random(os.getpid())
    results = tmp_path / "study" / "trials"
    kept: dict[Path, bytes] = {}
    for _ in range(4):
        before = len(kept)
        driver = start_driver(config, tmp_path, presets)
        deadline = time.monotonic() + 30
        while len(list(results.glob("*/result.json"))) <= before and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.25))
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        assert all(path.read_bytes() == data for path, data in kept.items())
        kept = {path: path.read_bytes() for path in results.glob("*/result.json")}
        assert len(kept) > before
    driver = start_driver(config, tmp_path, presets)
    text, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0 and "stopped: budget ray imported: False" in text, text
    assert all(path.read_bytes() == data for path, data in kept.items())
    rows = read_rows(tmp_path / "study")
    assert [row.trial for row in rows] == list(range(40)) and all(row.status == "ok" for row in rows)
    assert states(config, tmp_path) == {TrialState.COMPLETE: 40}
    assert max(executions(tmp_path).values()) <= 5 and sum(executions(tmp_path).values()) <= 40 + 4  # at most the one in flight at each kill
    whole = tmp_path / "whole"
    search(config, whole)
    with StudyOwner.open(config, whole) as straight, StudyOwner.open(config, tmp_path) as killed:  # as if it had never been interrupted
        assert [(t.params, t.values) for t in killed._trials()] == [(t.params, t.values) for t in straight._trials()]


def test_a_second_driver_is_refused(make_config: Make, tmp_path: Path, presets: Path) -> None:
    config = make_config(trials=200, space=WIDE)
    driver = start_driver(config, tmp_path, presets)
    try:
        while not list((tmp_path / "study").glob("trials/*/result.json")) and driver.poll() is None:
            time.sleep(0.02)
        with pytest.raises(ConfigError, match=rf"is in use: process {driver.pid} on "):
            search(config, tmp_path)
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.parametrize(
    "run, kind",
    [
        ("raising", "ValueError"),
        ("awkward", "AwkwardError"),
        ("nan", "InvalidResultError"),
        ("infinite", "InvalidResultError"),
        ("nothing", "InvalidResultError"),
    ],
)
def test_failures_are_rows_and_pruned_and_too_many_in_a_row_stop(make_config: Make, tmp_path: Path, run: str, kind: str) -> None:
    config = make_config(max_consecutive_failures=3)
    outcome, text = search(config, tmp_path, run)
    assert (outcome.stopped, outcome.ok, outcome.infeasible, outcome.finished) == ("failures", 0, 3, False)
    assert outcome.error is not None and outcome.error.kind == kind
    assert "Traceback (most recent call last)" in text and "continue with: mitigate again" in text
    rows = read_rows(outcome.folder)
    assert [(row.status, row.error and row.error.kind) for row in rows] == [("infeasible", kind)] * 3
    assert rows[0].label == "full" and rows[0].anchor and rows[0].versions["python"]
    assert from_dict(TrialConfig, rows[1].config).variant.stride == 8
    assert states(config, tmp_path) == {TrialState.PRUNED: 3}
    assert (outcome.front, outcome.hypervolume) == ((), 0.0)


def test_a_category_that_always_fails_does_not_stop_the_search(make_config: Make, tmp_path: Path) -> None:
    outcome, text = search(make_config(trials=30), tmp_path, "uniform_fails")
    assert outcome.stopped == "budget" and outcome.infeasible > 0 and outcome.ok + outcome.infeasible == 30
    assert "infeasible: MemoryError: cannot allocate" in text
    assert all(row.status == "ok" for row in read_rows(outcome.folder) if row.trial in outcome.front)


def test_a_trial_function_that_cannot_be_imported_costs_no_trial(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=3)
    outcome, text = search(config, tmp_path, "no_such_function")
    assert outcome.stopped == "workers" and "'fake_trials:no_such_function' cannot be imported" in text
    assert states(config, tmp_path) == {TrialState.RUNNING: 1}
    assert search(config, tmp_path)[0].ok == 3


def test_ctrl_c_leaves_the_trial_running_and_says_how_to_continue(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=6)
    outcome, text = search(config, tmp_path, "interrupting")
    assert (outcome.stopped, outcome.ok, outcome.running) == ("interrupted", 3, 1)
    assert "interrupted; continue with: mitigate again" in text
    again, _ = search(config, tmp_path)
    assert (again.stopped, again.ok, again.running) == ("budget", 6, 0)
    assert set(executions(tmp_path).values()) == {1}


def test_an_exhausted_space_stops_with_a_line(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=30, space={"stride": [4, 6, 8], "gate": ["scalar", "uniform"]})
    outcome, text = search(config, tmp_path)
    assert outcome.stopped == "exhausted" and outcome.ok == 7
    assert "every variant of the space has been proposed: 7 trials, 30 asked for" in text
    again, _ = search(config, tmp_path, prepare=lambda: pytest.fail("nothing to prepare for"))
    assert again.stopped == "exhausted" and again.ok == 7


def test_max_hours_counts_from_this_call(make_config: Make, tmp_path: Path) -> None:
    outcome, text = search(make_config(trials=400, max_hours=0.3 / 3600, space=WIDE), tmp_path, "slow")
    assert outcome.stopped == "time" and 0 < outcome.ok < 20 and outcome.running == 0
    assert "stopped after max_hours" in text
    again, _ = search(make_config(trials=400, max_hours=0.3 / 3600, space=WIDE), tmp_path, "slow")
    assert again.ok > outcome.ok


def test_everything_is_checked_before_a_folder_is_made(make_config: Make, tmp_path: Path) -> None:
    for changes in (dict(space={"gate": ["vectr"]}), dict(space={"strde": [4]}), dict(anchors=["ful"]), dict(anchors=["w128"])):
        with pytest.raises(ConfigError):
            search(make_config(**changes), tmp_path)
    assert not (tmp_path / "study").exists()


def test_a_terminal_gets_a_status_line(make_config: Make, tmp_path: Path) -> None:
    text = io.StringIO()
    search(make_config(trials=4), tmp_path, console=Console(file=text, force_terminal=True, width=160))
    shown = text.getvalue()
    assert "4/4 done, 0 infeasible, front" in shown and "elapsed 0:0" in shown and "left" in shown and "trial 3" in shown


def test_front_and_hypervolume_count_every_feasible_trial_of_the_study(make_config: Make, tmp_path: Path) -> None:
    outcome, _ = search(make_config(trials=20), tmp_path, "uniform_fails")
    rows = read_rows(outcome.folder)
    assert outcome.hypervolume == pytest.approx(pareto.hypervolume(rows)) and outcome.hypervolume > 0
    assert 0 in outcome.front  # nothing is as accurate as full attention
    assert outcome.front == tuple(row.trial for row in pareto.front(rows))


def test_the_command_to_continue_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mitigate", "search", "my config.toml"])
    assert loop._this_command() == "mitigate search 'my config.toml'"
