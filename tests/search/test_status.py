"""How a study stands, read beside the driver that writes it: never an exception, never a write."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_trials
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from mitigate import cli
from mitigate.config import ConfigError, to_dict
from mitigate.config_search import SearchConfig
from mitigate.search import status
from mitigate.search.loop import run_search
from mitigate.search.study import StudyOwner

Make = Callable[..., SearchConfig]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "gate": ["scalar", "vector"], "local_window": list(range(1, 30))}
RUNGS: dict[str, Any] = {"space": WIDE, "rungs": {"updates": [20, 60], "eta": 3, "bracket": 4}, "trial": {"train": {"updates": 180}}}
ROOT = Path(__file__).parents[2]


def finished(config: SearchConfig, folder: Path, run: str = "staged") -> Path:
    return run_search(config, results=folder, cache=folder / "cache", inline=True, run=f"fake_trials:{run}", command="again").folder


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def begun(folder: Path, number: int, **about: Any) -> None:
    """As if a worker had started on a stage."""
    place = folder / "trials" / f"{number:04d}"
    place.mkdir(parents=True, exist_ok=True)
    said = {"attempt": 1, "host": "node7", "pid": 42, "node": None, "kind": "score", "rung": 0, "time": time.time() - 75}
    (place / "started.json").write_text(json.dumps(said | about))


def scored(folder: Path, number: int, rung: int) -> None:
    (folder / "trials" / f"{number:04d}" / f"rung-{rung}.json").write_text("{}")


@pytest.fixture
def driver(make_config: Make, tmp_path: Path, presets: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = make_config(trials=400, max_consecutive_failures=99, **RUNGS)
    command = [sys.executable, str(Path(fake_trials.__file__)), str(tmp_path), str(presets), "staged_vector_fails", json.dumps(to_dict(config))]
    paths = os.pathsep.join(filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": paths})
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("study/trials/*/result.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def test_a_study_is_read_again_and_again_while_it_is_written(driver: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder, seen = tmp_path / "study", []
    while len(seen) < 40:
        found = status.read_status(folder)
        seen.append((found.done, found.updates))
        assert found.alive and found.driver == f"process {driver.pid} on {socket.gethostname()}"
        assert 0 <= found.done <= 400 and len(status.lines(found)) == 3 + len(found.running)
        storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))  # as a dashboard does
        assert optuna.load_study(study_name="study", storage=storage).get_trials()
    assert driver.poll() is None, "the driver must not end meanwhile"
    assert seen == sorted(seen) and seen[-1] > seen[0]
    os.kill(driver.pid, signal.SIGSTOP)
    before = files(folder)
    found = status.read_status(folder)
    assert found.alive and found.left_s is not None and 0 < found.left_s < 3600
    assert files(folder) == before, "reading writes nothing"
    os.kill(driver.pid, signal.SIGCONT)
    driver.kill()
    driver.wait()
    dead = status.read_status(folder)
    assert (dead.alive, dead.left_s) == (False, None) and dead.driver == f"none (the last was process {driver.pid} on {socket.gethostname()})"


def test_a_finished_study(make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(make_config(trials=10, require=["a_min >= 0.6"], **RUNGS), tmp_path)
    capsys.readouterr()
    before = files(folder)
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"study: 10/10 done, 0 running, \d stopped at a rung, 0 infeasible", lines[0])
    assert re.fullmatch(
        r"front of those that meet a_min >= 0\.6: \d trials, hypervolume \d\.\d{4}, best A_min of a compressed trial 0\.\d{3}; \d+ updates", lines[1]
    )
    assert lines[2].startswith("driver: ") and len(lines) == 3
    assert cli.main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "study" and found["ok"] + found["stopped"] == found["trials"] == 10 and found["running"] == [] and found["front"]
    assert files(folder) == before


def test_failures_are_counted_by_kind(make_config: Make, tmp_path: Path) -> None:
    folder = finished(make_config(trials=10, max_consecutive_failures=99, **RUNGS), tmp_path, "staged_vector_fails")
    found = status.read_status(folder)
    assert found.infeasible >= 1 and found.failures == {"ValueError": found.infeasible}
    assert f"{found.infeasible} infeasible ({found.infeasible} ValueError)" in status.lines(found)[0]


def test_what_each_running_trial_does(make_config: Make, tmp_path: Path) -> None:
    config = make_config(trials=12, **RUNGS)
    with StudyOwner.open(config, tmp_path) as owner:
        for number in range(9):
            owner.propose(None if number < 2 else 0)
        folder = owner.folder
        begun(folder, 0, kind="score", rung=2)
        scored(folder, 0, 2)
        begun(folder, 1, kind="cost", rung=2)
        scored(folder, 1, 2)
        begun(folder, 2)
        begun(folder, 3, attempt=2, time=time.time() - 4000)
        begun(folder, 4)
        scored(folder, 4, 0)
        begun(folder, 5)
        scored(folder, 5, 0)
        owner.decide(5, 0, promoted=True, members=[4, 5])
        (folder / "trials" / "0006").mkdir(parents=True)
        scored(folder, 6, 2)  # its batch is submitted and not begun
        begun(folder, 7, rung=1)
        scored(folder, 7, 0)
        (folder / "trials" / "0008").mkdir(parents=True)
        (folder / "trials" / "0008" / "started.json").write_text("{")
        found = status.read_status(folder)
        lines = status.lines(found)
    assert [(trial.number, trial.doing) for trial in found.running] == [
        (0, "waits for its costs to be measured"),
        (1, "measures costs on node7, process 42"),
        (2, "trains and scores (rung 0) on node7, process 42"),
        (3, "trains and scores (rung 0) on node7, process 42"),
        (4, "waits after rung 0"),
        (5, "goes on after rung 0"),
        (6, "waits for its costs to be measured"),
        (7, "trains and scores (rung 1) on node7, process 42"),
        (8, "waits to start"),
    ]
    assert lines[3] == "  trial 0 full: waits for its costs to be measured"
    assert re.fullmatch(r"  trial 1 w8s8: measures costs on node7, process 42, for 1:1\d", lines[4])
    assert re.fullmatch(r"  trial 3 .*: trains and scores \(rung 0\) on node7, process 42, for 1:06:\d\d, attempt 2", lines[6])


def test_a_search_without_rungs_names_none(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        owner.propose()
        begun(owner.folder, 0)
        assert status.read_status(owner.folder).running[0].doing == "trains and scores on node7, process 42"
        scored(owner.folder, 0, 0)
        assert status.read_status(owner.folder).running[0].doing == "waits for its costs to be measured"


def test_an_estimate_counts_from_the_start_of_this_driver(make_config: Make, tmp_path: Path) -> None:
    """A pause between two calls is no time that trials took."""
    config = make_config(trials=60, space=WIDE)
    finished(make_config(trials=4, space=WIDE), tmp_path)
    journal = tmp_path / "study" / "study.journal"
    journal.write_text(re.sub(r'"datetime_complete":"\d{4}', '"datetime_complete":"2001', journal.read_text()))
    with StudyOwner.open(config, tmp_path) as owner:
        assert status.read_status(owner.folder).left_s is None
    assert '"datetime_complete":"2001' in journal.read_text()


@pytest.mark.parametrize("tail", [b"\n", b'{"op_code":5,"worker', b'{"op_code": "\xff'])
def test_a_torn_journal_is_read_and_left_as_it_is(make_config: Make, tmp_path: Path, tail: bytes) -> None:
    folder = finished(make_config(trials=4), tmp_path)
    with (folder / "study.journal").open("ab") as journal:
        journal.write(tail)
    before = files(folder)
    assert status.read_status(folder).done == 4
    assert files(folder) == before


def test_no_driver_and_no_journal(make_config: Make, tmp_path: Path) -> None:
    folder = finished(make_config(trials=4), tmp_path)
    (folder / "driver.lock").unlink(missing_ok=True)
    (folder / "study.journal").unlink()
    found = status.read_status(folder)
    assert (found.driver, found.alive, found.done, found.running) == ("none", False, 4, ())
    (folder / "driver.lock").write_text("process 12 on another-host\n")
    found = status.read_status(folder)
    assert (found.alive, found.driver) == (False, "process 12 on another-host, which cannot be asked from here")


def test_an_unknown_study_is_one_line(make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(make_config(trials=2), tmp_path)
    capsys.readouterr()
    with pytest.raises(ConfigError) as caught:
        status.read_status(tmp_path / "studdy")
    assert "\n" not in str(caught.value) and "did you mean 'study'?" in str(caught.value)
    assert cli.main(["status", str(tmp_path / "studdy")]) != 0
    out = capsys.readouterr()
    assert out.out == "" and len(out.err.splitlines()) == 1 and "is no study" in out.err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "-1", "1e300"])
def test_a_pause_that_cannot_be_waited_for_is_one_line(make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    folder = finished(make_config(trials=2), tmp_path)
    capsys.readouterr()
    assert cli.main(["status", str(folder), f"--watch={seconds}"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err == f"mitigate: --watch must be above 0 and at most 86400 seconds, got {float(seconds):g}\n"
