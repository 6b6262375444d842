"""Executors: one protocol, every way a trial can die, and a Ray that stays on this machine. One Ray session for the whole file."""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from rich.console import Console

from mitigate.config import TrialConfig, canonical_json
from mitigate.config_search import SearchConfig
from mitigate.results import read_rows
from mitigate.search.loop import run_search
from mitigate.search.study import StudyOwner
from mitigate.search.workers import Executor, ExecutorError, InlineExecutor, RayExecutor, Task

Make = Callable[..., SearchConfig]


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """Ray on this machine although RAY_ADDRESS points elsewhere."""
    ray = pytest.importorskip("ray")
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    try:
        starter = RayExecutor(2)
        yield ray
        starter.close()
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


@pytest.fixture(params=["inline", "ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    made: Executor = InlineExecutor() if request.param == "inline" else RayExecutor(2)
    yield made
    made.close()


def make_task(folder: Path, number: int = 0, run: str = "ok", **changes: Any) -> Task:
    options: dict[str, Any] = dict(timeout_s=60.0, anchor=False, label="some variant", cache=str(folder / "cache")) | changes
    config = canonical_json(TrialConfig())
    return Task(number=number, config_json=config, folder=str(folder / "trials" / f"{number:04d}"), run=f"fake_trials:{run}", **options)


def drain(executor: Executor, limit_s: float = 60.0) -> list[Any]:
    rows, end = [], time.monotonic() + limit_s
    while executor.in_flight:
        assert time.monotonic() < end, "executor hangs"
        rows += executor.poll(0.5)
    return rows


@pytest.mark.parametrize(
    "run, kind", [("ok", None), ("raising", "ValueError"), ("awkward", "AwkwardError"), ("nan", "InvalidResultError"), ("nothing", "InvalidResultError")]
)
def test_every_executor_gives_a_row_and_leaves_it_on_disk(executor: Executor, tmp_path: Path, run: str, kind: str | None) -> None:
    executor.submit(make_task(tmp_path, 3, run, anchor=True))
    assert executor.in_flight == 1
    (done,) = drain(executor)
    row = done.row
    assert done.task.number == 3
    assert (row.trial, row.anchor, row.label, row.status) == (3, True, "some variant", "infeasible" if kind else "ok")
    assert (row.error and row.error.kind) == kind
    assert (tmp_path / "trials" / "0003" / "result.json").read_text() == row.to_json() + "\n"
    assert executor.poll(0.1) == []


def test_every_executor_gives_a_trial_one_core_and_no_gpu(executor: Executor, tmp_path: Path) -> None:
    before = dict(os.environ)
    executor.submit(make_task(tmp_path, run="environment"))
    drain(executor)
    assert (tmp_path / "trials" / "0000" / "environment.txt").read_text() == "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="
    assert dict(os.environ) == before


def test_every_executor_says_when_a_trial_function_cannot_be_imported(executor: Executor, tmp_path: Path) -> None:
    executor.submit(make_task(tmp_path, run="no_such_function"))
    with pytest.raises(ExecutorError, match="'fake_trials:no_such_function' cannot be imported: AttributeError"):
        drain(executor)
    assert not (tmp_path / "trials" / "0000" / "result.json").exists()


def test_ray_stays_local_whatever_the_environment_says(ray_session: Any) -> None:
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"
    assert ray_session.cluster_resources()["CPU"] == 2
    assert len(ray_session.nodes()) == 1


def test_all_ways_to_die_in_one_search(ray_session: Any, make_config: Make, tmp_path: Path) -> None:
    """Told, not hung: exceptions, NaN, a process that exits, a signal, a block in C code; each executed as often as it should be."""
    config = make_config(trials=10, trial_timeout_s=3.0)
    text = io.StringIO()
    options: dict[str, Any] = dict(results=tmp_path, cache=tmp_path / "cache", run="fake_trials:any_of_them")
    outcome = run_search(config, console=Console(file=text, width=80), **options)
    assert (outcome.stopped, outcome.ok, outcome.infeasible, outcome.running) == ("budget", 5, 5, 0), text.getvalue()
    kinds = {row.trial: row.error.kind for row in read_rows(outcome.folder) if row.error}
    assert kinds == {2: "ValueError", 3: "AwkwardError", 4: "InvalidResultError", 5: "WorkerCrashed", 7: "Timeout"}
    assert "trial 7" in text.getvalue() and "longer than trial_timeout_s (3 s)" in text.getvalue()
    counts = Counter((outcome.folder / "executions.log").read_text().split())
    assert counts == {"0": 1, "1": 1, "5": 3, "6": 2, "7": 1, "8": 1, "9": 1}
    with StudyOwner.open(config, tmp_path) as owner:
        assert Counter(t.state for t in owner._trials()) == {TrialState.COMPLETE: 5, TrialState.PRUNED: 5}
        assert {t.number for t in owner._trials() if t.constraints} == set(kinds)


def test_capacity_is_workers_but_no_more_than_the_cpus_there_are(ray_session: Any) -> None:
    assert RayExecutor(1).capacity == 1 and RayExecutor(16).capacity == 2  # the session has two CPUs


def test_a_task_that_gets_no_worker_ends_the_search_in_time(ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mitigate.search.workers.START_GRACE_S", 1.0)
    hold = ray_session.remote(num_cpus=2)(lambda: time.sleep(60)).remote()
    time.sleep(0.5)
    executor = RayExecutor(2)
    executor.submit(make_task(tmp_path, timeout_s=0.5))
    with pytest.raises(ExecutorError, match=r"trial 0 got no worker within \d+ s \(0 CPUs, 0 GPUs, \S+ GiB free, 1 CPU needed\)"):
        drain(executor, 20)
    executor.close()
    ray_session.cancel(hold, force=True)


def test_a_cluster_that_is_not_there_is_one_line_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    begin = time.monotonic()
    with pytest.raises(ExecutorError, match=r"^Ray could not join the cluster at 127\.0\.0\.1:1: ConnectionRefusedError: "):
        RayExecutor(2, "127.0.0.1:1")
    assert time.monotonic() - begin < 6


def test_a_cluster_is_not_told_how_many_cpus_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError(f"no {sorted(options)}\nmore")

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ExecutorError, match=r"^Ray could not join the cluster at auto: RuntimeError: no \['address', 'log_to_driver', 'logging_level'\]$"):
        RayExecutor(2, "auto")
