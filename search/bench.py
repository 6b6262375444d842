"""What the driver of a search costs, and what the sampler is worth, with simulated trials: `python -m mitigate.search.bench`.

Trials take no time here but a made-up one on a clock that the driver's real time is added to, so that the share of time in which workers wait is what it
would be with real workers. Scores are an analytic function of the variant with some noise: they rank mechanisms, and say nothing about compressors.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import io
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mitigate import pareto, registry
from mitigate.config import TrainConfig, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.config_files import PRESETS, from_dict, read_toml
from mitigate.config_search import RungsConfig, SearchConfig
from mitigate.rows import Cost, Interval, Row
from mitigate.search.loop import run_search
from mitigate.search.study import StudyOwner
from mitigate.search.workers import Done, Task, file_of, outcome_of, write_result

MACHINE = 8  # trials at once on one simulated machine
WHOLE_S = 60.0  # made-up seconds of a trial with its whole budget
COST_S = 5.0
SPREAD = 0.2  # of the logarithm of a stage's time
NOISE = 0.02  # standard deviation of an accuracy


class SimulatedExecutor:
    """Workers that only exist on a clock, `MACHINE` of them on a machine. A batch of costs waits until its machine is empty, and then has it to itself.

    Attributes:
        clock: made-up seconds that passed, the driver's real ones included.
        driver: real seconds that the driver took between two polls.
        busy, waited, alone: worker seconds: in trials; without work while the driver was at work; on machines that are emptied for a batch, or taken by one.
    """

    def __init__(self, workers: int, seed: int = 0) -> None:
        self.capacity = workers
        self.clock = self.driver = self.busy = self.waited = self.alone = 0.0
        self._rng = np.random.default_rng(seed)
        self._size = min(workers, MACHINE)
        self._ends: list[tuple[float, int, int, list[Task]]] = []  # when, order, machine, what ends then
        self._quiet: set[int] = set()
        self._count = 0
        self._left = time.perf_counter()

    @property
    def in_flight(self) -> int:
        return sum(len(tasks) for *_, tasks in self._ends)

    @property
    def room(self) -> int:
        return sum(self._size - self._load(machine) for machine in self._machines() if machine not in self._quiet)

    @property
    def room_alone(self) -> int:
        machines = len(self._machines())
        wanted = max(1, machines // 2) if len(self._ends) > len(self._quiet) else machines
        return wanted - len(self._quiet)

    def _machines(self) -> range:
        return range(self.capacity // self._size)

    def _load(self, machine: int) -> int:
        return sum(where == machine for _, _, where, _ in self._ends)

    def submit(self, task: Task) -> None:
        updates = task.config().train.updates
        before = outcome_of(dataclasses.replace(task, stage=dataclasses.replace(task.stage, rung=task.stage.rung - 1)))
        done = (updates if task.stage.updates is None else task.stage.updates) - (before.updates if before is not None else 0)
        self.waited += self._pass_time() * self.room
        seconds = self._lasts(WHOLE_S * done / updates)
        self.busy += seconds
        self._start(next(m for m in self._machines() if m not in self._quiet and self._load(m) < self._size), self.clock + seconds, [task])

    def submit_alone(self, tasks: list[Task]) -> None:
        self._pass_time()
        machine = min((m for m in self._machines() if m not in self._quiet), key=self._load)
        self._quiet.add(machine)
        free = max((end for end, _, where, _ in self._ends if where == machine), default=self.clock)
        end = free + self._lasts(COST_S * len(tasks))
        self.alone += self._size * (end - self.clock) - sum(until - self.clock for until, _, where, _ in self._ends if where == machine)
        self._start(machine, end, tasks)

    def _lasts(self, seconds: float) -> float:
        return seconds * float(np.exp(SPREAD * self._rng.standard_normal()))

    def _start(self, machine: int, end: float, tasks: list[Task]) -> None:
        self._count += 1
        heapq.heappush(self._ends, (end, self._count, machine, tasks))

    def poll(self, timeout_s: float) -> list[Done]:
        """The stage that ends next; the clock goes there."""
        self._pass_time()
        if not self._ends:
            return []
        end, _, machine, tasks = heapq.heappop(self._ends)
        self.clock = max(self.clock, end)
        if tasks[0].stage.kind == "cost":
            self._quiet.discard(machine)
        done = []
        for task in tasks:
            row = simulated_row(task)
            write_result(Path(task.folder), row, file_of(task, row))
            done.append(Done(task=task, row=row))
        self._left = time.perf_counter()
        return done

    def _pass_time(self) -> float:
        """Add what the driver took since the last call."""
        now = time.perf_counter()
        took, self._left = now - self._left, now
        self.driver += took
        self.clock += took
        return took

    def close(self) -> None:
        self._ends.clear()


def simulated_row(task: Task) -> Row:
    """An analytic score: bytes buy accuracy, a wide window flattens the curve, some choices are better than others, training saturates."""
    config = task.config()
    variant = config.variant
    kept = float(registry.kept_fraction(variant, layers=config.base.layers))
    updates = config.train.updates if task.stage.updates is None else task.stage.updates
    level = 1.0 if not variant.compress else 1 - np.exp(-4.5 * kept**0.6 - 0.8 * _merit(variant))
    learned = 1 - np.exp(-3.5 * updates / config.train.updates)
    rng = np.random.default_rng(int(content_hash(config)[:8], 16) + task.stage.rung)
    mean = float(np.clip(level * learned + NOISE * rng.standard_normal(), 0, 1))
    flat = 0.35 + 0.25 * min(variant.window / variant.stride - 1, 1) + 0.25 * (variant.stagger != "none") + 0.15 * (variant.gate == "content")
    a_min = float(np.clip(mean * (flat if variant.compress else 1.0) + NOISE * rng.standard_normal(), 0, 1))
    speed = (2.1 - 1.1 * kept) * (0.92 if variant.payload == "per_offset" else 1.0) * (0.97 if variant.window > variant.stride else 1.0)
    cost = _cost(kept, speed * float(np.exp(0.02 * rng.standard_normal()))) if task.stage.kind == "cost" else None
    return Row(
        status="ok",
        label=task.label,
        trial=task.number,
        anchor=task.anchor,
        config=to_dict(config),
        config_sha256=content_hash(config),
        seed=config.seed,
        versions={},
        device="simulated",
        backend="none",
        rung=None if task.stage.updates is None else task.stage.rung,
        updates=updates,
        wall_s=WHOLE_S * updates / config.train.updates,
        mean_accuracy=mean,
        a_min=min(a_min, mean),
        a_min_low=max(min(a_min, mean) - 2 * NOISE, 0.0),
        a_min_high=min(min(a_min, mean) + 2 * NOISE, 1.0),
        cost=cost,
    )


def _merit(variant: VariantConfig) -> float:
    """How good the choices are that cost no bytes, from 0 to 1; two of them only help together."""
    gate = {"vector": 0.35, "content": 0.2, "scalar": 0.1}.get(variant.gate, 0.0)
    pair = 0.3 if variant.payload == "per_offset" and variant.gate == "vector" else 0.0
    return gate + pair + 0.15 * (variant.coverage != "none") + 0.1 * (variant.local_window >= 16) + 0.1 * (variant.tie == "none")


def _cost(kept: float, ratio: float) -> Cost:
    flat = Interval(value=ratio, low=ratio, high=ratio)
    return Cost(
        kv_bytes_per_token=512 * kept,
        kv_kept=kept,
        kv_constant_bytes=0.0,
        context=4096,
        batch=1,
        kv_bytes_at_context=1,
        kv_bytes_counted=1,
        decode_tokens_per_s=flat,
        decode_tokens_per_s_full=Interval(value=1.0, low=1.0, high=1.0),
        throughput_ratio=flat,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One simulated search. Seconds of proposals and memory are real; shares are on the clock of the simulation."""

    sampler: str
    rungs: bool
    trials: int
    workers: int
    seed: int
    proposal_ms: list[float]
    driver_s: float
    waited: float  # share of the workers' time in which they are without work while the driver is at work
    alone: float  # share in which their machine is emptied for costs, or taken by them
    idle: float  # share in which there is no work for them, the end above all
    peak_mib: float
    updates: int
    hypervolume: float
    volume_at: dict[int, float]  # after so many trials, by number


def simulate(*, sampler: str, trials: int, workers: int, seed: int = 0, rungs: bool = False, at: tuple[int, ...] = ()) -> Measured:
    """Run one search of simulated trials over the space `strides`."""
    space = read_toml(PRESETS / "spaces" / "strides.toml")
    train = TrainConfig(updates=900)
    plan = RungsConfig(updates=(100, 300)) if rungs else RungsConfig()
    template = TrialConfig(variant=VariantConfig(compress=False), train=train)
    template = dataclasses.replace(
        template,
        score=dataclasses.replace(template.score, period=32),
        task=dataclasses.replace(template.task, filler=93, filler_in_sequence=124),
    )
    settings: dict[str, Any] = dict(name="bench", trials=trials, workers=workers, seed=seed, space=space, sampler=sampler, rungs=dataclasses.asdict(plan))
    config = from_dict(SearchConfig, settings | {"trial": to_dict(template)})
    executor = SimulatedExecutor(workers, seed)
    with tempfile.TemporaryDirectory() as folder, _timed_proposals() as proposals:
        place = Path(folder)
        outcome = run_search(config, results=place, cache=place, executor=lambda: executor, console=Console(file=io.StringIO()), command="")
        if outcome.stopped not in ("budget", "exhausted"):
            raise KeyboardInterrupt(outcome.message)  # half a search would pass for a whole one
        rows = _rows(outcome.folder)
        updates = sum(row.updates for row in rows)
    busy, waited, alone = (seconds / (workers * executor.clock) for seconds in (executor.busy, executor.waited, executor.alone))
    volumes = {n: pareto.hypervolume([row for row in rows if (row.trial or 0) < n]) for n in at if n <= trials}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(
        sampler=sampler,
        rungs=rungs,
        trials=len(rows),
        workers=workers,
        seed=seed,
        proposal_ms=[1000 * s for s in proposals],
        driver_s=executor.driver,
        waited=waited,
        alone=alone,
        idle=1 - busy - waited - alone,
        peak_mib=peak,
        updates=updates,
        hypervolume=outcome.hypervolume,
        volume_at=volumes,
    )


def _rows(folder: Path) -> list[Row]:
    from mitigate.results import read_rows

    return read_rows(folder)


@contextmanager
def _timed_proposals() -> Iterator[list[float]]:
    """Seconds of each `StudyOwner.propose` inside the block."""
    seconds: list[float] = []
    plain = StudyOwner.propose

    def timed(self: StudyOwner, bracket: int | None = None) -> Any:
        begin = time.perf_counter()
        try:
            return plain(self, bracket)
        finally:
            seconds.append(time.perf_counter() - begin)

    StudyOwner.propose = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        StudyOwner.propose = plain  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> int:
    """Print one line per simulated search; `--json` gives all numbers."""
    parser = argparse.ArgumentParser(prog="python -m mitigate.search.bench", description="The driver's cost and the sampler's worth, with simulated trials.")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sampler", choices=("tpe", "random"), action="append", help="again for another (default: both)")
    parser.add_argument("--seeds", type=int, default=1, help="searches of each kind")
    parser.add_argument("--rungs", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    if given.workers < 1 or (given.workers > MACHINE and given.workers % MACHINE):
        parser.error(f"--workers must be from 1 to {MACHINE} or a multiple of it (workers of a simulated machine), got {given.workers}")
    at = tuple(n for n in (30, 60, 150, 300, 600, 1000, 2000) if n <= given.trials)
    for sampler in given.sampler or ("tpe", "random"):
        for seed in range(given.seeds):
            try:
                found = simulate(sampler=sampler, trials=given.trials, workers=given.workers, seed=seed, rungs=given.rungs, at=at)
            except KeyboardInterrupt:
                print(f"{sampler}, seed {seed}: interrupted", file=sys.stderr)
                return 130
            print(json.dumps(dataclasses.asdict(found)) if given.json else _line(found), flush=True)
    return 0


def _line(found: Measured) -> str:
    first, last = np.array(found.proposal_ms[:200]), np.array(found.proposal_ms[-200:])
    parts = [f"{found.sampler}{' with rungs' if found.rungs else ''}, seed {found.seed}: {found.trials} trials, {found.workers} workers"]
    parts.append(f"proposal {np.median(first):.0f} ms (first 200), {np.median(last):.0f} ms (last 200, 95 %: {np.percentile(last, 95):.0f})")
    parts.append(f"driver {1000 * found.driver_s / found.trials:.0f} ms a trial, peak {found.peak_mib:.0f} MiB")
    parts.append(f"workers wait for the driver {100 * found.waited:.1f} %, for costs {100 * found.alone:.1f} %, have no work {100 * found.idle:.1f} %")
    parts.append(f"{found.updates} updates, hypervolume {found.hypervolume:.4f} (" + ", ".join(f"{n}: {v:.3f}" for n, v in found.volume_at.items()) + ")")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
