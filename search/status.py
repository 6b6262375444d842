"""How a study stands, read from its folder without a lock and without writing: safe beside a running search, from any process that sees the folder."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from mitigate import pareto, requirements
from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig
from mitigate.results import read_config, read_rows
from mitigate.search.journal import recorded_trials

RECENT = 20  # finished trials that the rate is taken from


@dataclass(frozen=True, kw_only=True)
class Running:
    """A trial that is proposed and not told. `doing` is in words; `since_s` is None where it has not started."""

    number: int
    label: str
    doing: str
    attempt: int
    since_s: float | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A study at a moment. `left_s` is an estimate from the last trials, None without one or without a driver."""

    name: str
    driver: str
    alive: bool
    trials: int
    ok: int
    stopped: int
    infeasible: int
    running: tuple[Running, ...]
    updates: int
    front: tuple[int, ...]
    hypervolume: float
    a_min: float | None  # best of the front
    failures: dict[str, int]
    requirements: tuple[str, ...]
    left_s: float | None

    @property
    def done(self) -> int:
        return self.ok + self.stopped + self.infeasible


def read_status(folder: Path) -> Status:
    """The state of a study.

    Raises:
        ConfigError: `folder` holds no study of this version, or its journal is damaged before the last line.
    """
    config = from_dict(SearchConfig, read_config(folder))
    rows = read_rows(folder)
    told = {row.trial for row in rows}
    trials = recorded_trials(folder)
    wanted = [requirements.parse(text) for text in config.require]
    finished = [row for row in rows if row.status == "ok" and all(requirements.violation(row, one) <= 0 for one in wanted)]
    front = pareto.front(finished)
    driver, alive = _driver(folder)
    states = Counter(row.status for row in rows)
    return Status(
        name=config.name,
        driver=driver,
        alive=alive,
        trials=config.trials,
        ok=states["ok"],
        stopped=states["stopped"],
        infeasible=states["infeasible"],
        running=tuple(_running(folder, trial, len(config.rungs.updates)) for trial in trials if trial.state == TrialState.RUNNING and trial.number not in told),
        updates=sum(row.updates for row in rows),
        front=tuple(row.trial for row in front if row.trial is not None),
        hypervolume=pareto.hypervolume(finished),
        a_min=max((row.a_min for row in front if row.a_min is not None and not pareto.is_full(row)), default=None),
        failures=dict(Counter(row.error.kind for row in rows if row.error is not None)),
        requirements=config.require,
        left_s=_left(folder, trials, config.trials - len(rows)) if alive else None,
    )


def lines(status: Status) -> list[str]:
    """The status in words, the summary first."""
    counts = [f"{status.done}/{status.trials} done", f"{len(status.running)} running"]
    counts += [f"{status.stopped} stopped at a rung"] if status.stopped else []
    counts += [f"{status.infeasible} infeasible ({', '.join(f'{n} {kind}' for kind, n in status.failures.items())})" if status.failures else "0 infeasible"]
    best = "" if status.a_min is None else f", best A_min of a compressed trial {status.a_min:.3f}"
    left = "" if status.left_s is None else f", about {clock(status.left_s)} left"
    found = [f"{status.name}: {', '.join(counts)}{left}"]
    met = f" of those that meet {' and '.join(status.requirements)}" if status.requirements else ""
    found.append(f"front{met}: {len(status.front)} trials, hypervolume {status.hypervolume:.4f}{best}; {status.updates} updates")
    found.append(f"driver: {status.driver}")
    for trial in status.running:
        since = "" if trial.since_s is None else f", for {clock(trial.since_s)}"
        again = f", attempt {trial.attempt}" if trial.attempt > 1 else ""
        found.append(f"  trial {trial.number} {trial.label}: {trial.doing}{since}{again}")
    return found


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours from one hour on."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02d}"


def _running(folder: Path, trial: FrozenTrial, last: int) -> Running:
    """`last` is the number of the rung with the whole budget, after which costs are measured."""
    place = folder / "trials" / f"{trial.number:04d}"
    started = _started(place)
    reached = max((int(path.stem.removeprefix("rung-")) for path in place.glob("rung-*.json")), default=-1)
    since = None
    if started and (started["kind"] == "cost" or started["rung"] > reached):
        words = "measures costs" if started["kind"] == "cost" else "trains and scores" + (f" (rung {started['rung']})" if last else "")
        doing = f"{words} on {started['host']}, process {started['pid']}"
        since = max(0.0, time.time() - started["time"])
    elif reached == last:
        doing = "waits for its costs to be measured"
    elif reached >= 0:
        doing = f"goes on after rung {reached}" if f"rung:{reached}" in trial.user_attrs else f"waits after rung {reached}"
    else:
        doing = "waits to start"
    return Running(number=trial.number, label=str(trial.user_attrs["label"]), doing=doing, attempt=int(started.get("attempt", 1)), since_s=since)


def _started(place: Path) -> dict[str, Any]:
    try:
        found = json.loads((place / "started.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"time", "kind", "rung", "host", "pid"} <= found.keys() else {}


def _driver(folder: Path) -> tuple[str, bool]:
    """Who drives the study, and whether it is known to be alive. A lock file that was left over names a process that is gone."""
    try:
        text = (folder / "driver.lock").read_text(encoding="utf-8").strip()
    except OSError:
        return "none", False
    found = re.fullmatch(r"process (\d+) on (\S+)", text)
    if found is None:
        return "none", False
    pid, host = int(found[1]), found[2]
    if host != socket.gethostname():
        return f"{text}, which cannot be asked from here", False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"none (the last was {text})", False
    except PermissionError:
        pass
    return text, True


def _left(folder: Path, trials: list[FrozenTrial], left: int) -> float | None:
    """Seconds for `left` trials at the rate of the last that finished under this driver, which wrote its lock when it began."""
    try:
        begin = (folder / "driver.lock").stat().st_mtime
    except OSError:
        return None
    ends = sorted(trial.datetime_complete.timestamp() for trial in trials if trial.datetime_complete is not None)
    ends = [end for end in ends if end >= begin]
    if not ends or left < 1:
        return None
    since = ends[-RECENT - 1] if len(ends) > RECENT else begin
    return (time.time() - since) / len(ends[-RECENT:]) * left
