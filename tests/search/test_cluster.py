"""A Ray cluster of two machines, both of them this one: where trials run, costs measured alone, machines and drivers that are lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from rich.console import Console

from mitigate.config import to_dict
from mitigate.config_search import ResourcesConfig, SearchConfig
from mitigate.results import read_rows
from mitigate.search.loop import SearchOutcome, run_search
from mitigate.search.study import StudyOwner
from mitigate.search.verify import verify_study
from mitigate.search.workers import ExecutorError, RayExecutor

Make = Callable[..., SearchConfig]
ROOT = Path(__file__).parents[2]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "gate": ["scalar", "vector"], "local_window": list(range(1, 30))}
RUNGS: dict[str, Any] = {"space": WIDE, "rungs": {"updates": [20, 60], "eta": 3, "bracket": 3}, "trial": {"train": {"updates": 180}}}
STORE = 80 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines of one core, with files of their own, whose workers find the fakes."""
    pytest.importorskip("ray.cluster_utils", reason="this Ray has no cluster_utils")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets lie in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False})
        try:
            made.add_node(num_cpus=1, object_store_memory=STORE)
            yield made
        finally:
            import ray

            ray.shutdown()
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def search(config: SearchConfig, folder: Path, run: str, **options: Any) -> tuple[SearchOutcome, str]:
    text = io.StringIO()
    settings: dict[str, Any] = dict(run=f"fake_trials:{run}", console=Console(file=text, width=80), command="mitigate again") | options
    return run_search(config, results=folder, cache=folder / "cache", **settings), text.getvalue()


def require_same(config: SearchConfig, folder: Path, whole: Path) -> None:
    """A study equals the uninterrupted one of one process."""
    assert search(config, whole, "staged", inline=True)[0].finished

    def table(place: Path) -> list[tuple[Any, ...]]:
        return [(r.trial, r.label, r.status, r.rung, r.updates, r.mean_accuracy, r.a_min) for r in read_rows(place / "study")]

    def records(place: Path) -> list[tuple[Any, ...]]:
        with StudyOwner.open(config, place) as owner:
            return [(t.state, t.params, t.values, t.constraints, t.user_attrs) for t in owner.trials()]

    assert table(folder) == table(whole)
    assert records(folder) == records(whole)
    assert all(record[0] in (TrialState.COMPLETE, TrialState.PRUNED) for record in records(folder))
    assert verify_study(folder / "study").differences == ()


def started(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("study/trials/*/started.json"))]


@pytest.mark.parametrize(
    "resources, said",
    [
        ({"cpus": 3}, r"a trial needs 3 CPUs; no machine of the Ray cluster has that \(2 CPUs, 0 GPUs, \S+ GiB in all\)"),
        ({"gpus": 1.0}, r"a trial needs 1 CPU and 1 GPU; no machine of the Ray cluster has that \(2 CPUs, 0 GPUs, \S+ GiB in all\)"),
        ({"memory_gib": 1e6}, r"a trial needs 1 CPU and 1e\+06 GiB; no machine of the Ray cluster has that \(2 CPUs, 0 GPUs, \S+ GiB in all\)"),
    ],
)
def test_what_no_machine_has_is_one_line_in_seconds(cluster: Any, resources: dict[str, Any], said: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ExecutorError, match=rf"^{said}$"):
        RayExecutor(2, cluster.address, resources=ResourcesConfig(**resources))
    assert time.monotonic() - begin < 20


def test_one_worker_asks_for_one_machine(cluster: Any) -> None:
    executor = RayExecutor(1, cluster.address)
    try:
        assert (executor.capacity, executor.room, executor.room_alone) == (1, 1, 1)
    finally:
        executor.close()


def test_trials_run_everywhere_and_costs_alone(cluster: Any, make_config: Make, tmp_path: Path) -> None:
    """Also: the files of the base travel to where they are missing."""
    config = make_config(trials=11, space=WIDE, trial={"train": {"updates": 180}})
    outcome, text = search(config, tmp_path, "staged_noting", address=cluster.address, prepare=lambda: {"bases/base.bin": b"a base"})
    assert (outcome.stopped, outcome.ok, outcome.running) == ("budget", 11, 0), text
    runs = [line.split() for line in (tmp_path / "study" / "times.log").read_text().splitlines()]
    scores = [(node, float(begin), float(end)) for _, kind, node, begin, end in runs if kind == "score"]
    costs = [(node, float(begin), float(end)) for _, kind, node, begin, end in runs if kind == "cost"]
    assert len({node for node, _, _ in scores}) == 2 and len(scores) == len(costs) == 11

    def overlap(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
        return one[1] < other[2] and other[1] < one[2]

    assert not [(cost, score) for cost in costs for score in scores if cost[0] == score[0] and overlap(cost, score)]
    assert not [(one, other) for one in costs for other in costs if one is not other and one[0] == other[0] and overlap(one, other)], "one after the other"
    assert [cost for cost in costs for score in scores if cost[0] != score[0] and overlap(cost, score)], "the other machine goes on"
    assert len({node for node, _, _ in costs}) == 2, "once nothing else is left, every machine measures"
    assert verify_study(outcome.folder).differences == ()


def test_a_driver_that_is_killed_is_followed_by_another(cluster: Any, make_config: Make, tmp_path: Path, presets: Path) -> None:
    """The tasks of the first end with it, or end as they would have: what they leave fits what the second one does."""
    config = make_config(trials=6, reproducible=True, **RUNGS)
    code = "import fake_trials; fake_trials.drive_cluster()"
    command = [sys.executable, "-c", code, str(tmp_path), str(presets), "staged_in_seconds", json.dumps(to_dict(config)), cluster.address]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("study/trials/*/rung-*.json"))) < 2 and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert driver.poll() is None
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    outcome, text = search(config, tmp_path, "staged_in_seconds", address=cluster.address)
    assert (outcome.stopped, outcome.infeasible, outcome.running) == ("budget", 0, 0), text
    require_same(config, tmp_path, tmp_path / "whole")


def test_a_machine_that_is_lost_while_it_measures_hands_its_batch_on(cluster: Any, make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=6, space=WIDE, trial={"train": {"updates": 180}})
    victim = next(iter(cluster.worker_nodes))
    killed: list[str] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError):  # one that is about to be written anew
                if any((entry["kind"], entry["node"]) == ("cost", victim.node_id) for entry in started(tmp_path)):
                    cluster.remove_node(victim, allow_graceful=False)
                    killed.append(victim.node_id)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        outcome, text = search(config, tmp_path, "staged_noting", address=cluster.address, prepare=lambda: {"bases/base.bin": b"a base"})
    finally:
        killer.join()
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    assert len(killed) == 1, "no machine was caught measuring"
    assert (outcome.stopped, outcome.ok, outcome.infeasible, outcome.running) == ("budget", 6, 0, 0), text
    assert {entry["attempt"] for entry in started(tmp_path)} == {1}, "a lost machine is no attempt"


def test_a_machine_that_is_lost_costs_its_trial_nothing_but_time(cluster: Any, make_config: Make, tmp_path: Path) -> None:
    """The last test: one machine is left."""
    config = make_config(trials=6, reproducible=True, **RUNGS)
    victim = next(iter(cluster.worker_nodes))
    killed: list[Path] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            time.sleep(0.02)
            for path in tmp_path.glob("study/trials/*/checkpoint.pt"):
                about = path.parent / "started.json"
                try:
                    trains = json.loads(about.read_text())["node"] == victim.node_id and 20 <= int(path.read_text()) < 160
                except (OSError, ValueError):
                    continue
                if trains and not list(path.parent.glob("rung-*.json")):
                    cluster.remove_node(victim, allow_graceful=False)
                    killed.append(path.parent)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    outcome, text = search(config, tmp_path, "staged_in_seconds", address=cluster.address)
    killer.join()
    assert len(killed) == 1, "no trial was caught in training"
    assert (outcome.stopped, outcome.infeasible, outcome.running) == ("budget", 0, 0), text
    about = started(tmp_path)
    assert {entry["attempt"] for entry in about} == {1}, "a lost machine is no attempt"
    starts = Counter((tmp_path / "study" / "executions.log").read_text().splitlines())
    number = int(killed[0].name)
    assert max(count for line, count in starts.items() if line.startswith(f"{number} score")) == 2
    updates = Counter((tmp_path / "study" / "updates.log").read_text().splitlines())
    twice = [line for line, count in updates.items() if count > 1]
    assert len(twice) <= 1 and all(line.startswith(f"{number} ") for line in twice), "it goes on from its checkpoint"
    require_same(config, tmp_path, tmp_path / "whole")
