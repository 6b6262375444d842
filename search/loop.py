"""The search: resume, propose up to capacity, tell what ends, say how it goes.

`run_search` may be killed at any moment and called again: finished trials are told once, trials that were running go on under their number and seed, from
their last checkpoint, and the total stays `trials`. Costs are measured in batches, while nothing else runs on the machine.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mitigate import pareto, requirements
from mitigate.config import canonical_json
from mitigate.config_search import SearchConfig
from mitigate.rows import Error, Row
from mitigate.search.rungs import Schedule
from mitigate.search.space import SearchSpace
from mitigate.search.status import clock
from mitigate.search.study import Proposal, StudyOwner, check_anchors, check_requirements, registry_check
from mitigate.search.workers import Done, Executor, ExecutorError, InlineExecutor, RayExecutor, Task
from mitigate.stage import Stage

RUN_TRIAL = "mitigate.trial:run_stage"
CHECKPOINT_FILE = "checkpoint.pt"  # of `mitigate.trial`, whose import would bring torch
POLL_S = 1.0
COST_BATCH = 16  # costs are measured once four times as many trials as workers wait for it, or so many: each batch drains a machine
Prepare = Callable[[], Mapping[str, bytes] | None]
Stop = Literal["budget", "exhausted", "time", "interrupted", "failures", "workers"]


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """How a search ended.

    Args:
        folder: the study folder.
        stopped: "budget" (all trials or updates done), "exhausted" (no variant left), "time" (max_hours), "interrupted" (Ctrl-C), "failures" (too many in a
            row), "workers" (trials could not be run).
        message: one line for the user.
        ok, rungs, infeasible, running: trials of the study by state: finished, stopped at a rung, failed; running ones go on on the next call.
        front: numbers of the non-dominated trials among the finished ones that meet the requirements.
        hypervolume: of the front, from `pareto.REFERENCE`, which the study stores.
        elapsed_s: of this call.
        error: the first failure of a row of failures.
    """

    folder: Path
    stopped: Stop
    message: str
    ok: int
    rungs: int
    infeasible: int
    running: int
    front: tuple[int, ...]
    hypervolume: float
    elapsed_s: float
    error: Error | None = None

    @property
    def finished(self) -> bool:
        """Whether the search ended as asked, with nothing left to run."""
        return self.stopped in ("budget", "exhausted", "time") and self.running == 0


def run_search(
    config: SearchConfig,
    *,
    results: Path,
    cache: Path,
    address: str | None = None,
    inline: bool = False,
    run: str = RUN_TRIAL,
    prepare: Prepare | None = None,
    executor: Callable[[], Executor] | None = None,
    console: Console | None = None,
    command: str | None = None,
) -> SearchOutcome:
    """Run or resume the search in `results/<config.name>` until its budget is met.

    Args:
        results, cache: folders, created as needed.
        address: of a Ray cluster; None starts Ray on this machine.
        inline: run trials one by one in this process, without Ray (no deadlines, and a crash of a trial ends the search).
        run: the trial function, "module:function", imported by the workers: `mitigate.trial.run_stage`, or what takes its arguments. If the Row of a score
            stage has a cost, the trial ends with it.
        prepare: called once before the first trial of this call, not at all when there is none. May return files that the trials need, by their path in the
            cache folder; each machine of a cluster gets them once. What it raises passes; the trial that waits for it stays running in the study, and runs
            on the next call.
        executor: makes what runs the trials, instead of Ray or `inline`.
        console: where to print; a terminal gets a live status line.
        command: what continues the search, for messages; the running command line if None.

    Raises:
        ConfigError: the config, an anchor or a choice of the space is unusable; the folder belongs to another config or driver. Nothing has run.
    """
    space = SearchSpace.from_config(config)
    new = not (results / config.name / "config.json").exists()
    space.check = registry_check(config)
    if new:  # the registry imports torch: a study that exists was checked when it was created
        space.validate()
        check_anchors(config, space)
        check_requirements(config, space)
    with StudyOwner.open(config, results, space=space) as owner:
        search = _Search(owner, cache=cache, run=run, console=console or Console(), command=command or _this_command())

        def start(carried: Mapping[str, bytes]) -> Executor:
            if executor is not None:
                return executor()
            return InlineExecutor() if inline else RayExecutor(config.workers, address, resources=config.resources, carried=carried if address else None)

        return search.run(start, prepare or (lambda: None))


def _this_command() -> str:
    name = Path(sys.argv[0]).name
    return shlex.join([*(["python", "-m", "mitigate"] if name == "__main__.py" else [name]), *sys.argv[1:]])


class _Search:
    """One call of `run_search`, the study open."""

    def __init__(self, owner: StudyOwner, *, cache: Path, run: str, console: Console, command: str) -> None:
        self.owner, self.config, self.console = owner, owner.config, console
        self.schedule = Schedule(owner)
        self.cache, self.trial_function, self.command = cache.resolve(), run, command
        self.begin = time.monotonic()
        self.finished_here = 0
        self.in_a_row: list[tuple[str, Error]] = []  # failures since a stage of their kind went well
        self.stop: tuple[Stop, str] | None = None
        self.front: tuple[int, ...] = ()
        self.hypervolume = 0.0
        self.in_flight = 0
        self._measure()

    def run(self, start: Callable[[Mapping[str, bytes]], Executor], prepare: Prepare) -> SearchOutcome:
        try:
            for number in self.owner.rows:  # told, but a kill came before this
                self._drop_checkpoint(number)
            self._settle()
            if self._next_score() is not None or self.schedule.without_cost():
                with contextlib.closing(start(prepare() or {})) as executor, self._live(), _termination_interrupts():
                    self._run_on(executor)
        except KeyboardInterrupt:
            self.stop = "interrupted", f"interrupted; continue with: {self.command}"
        except ExecutorError as error:
            self.stop = "workers", f"{error}; continue with: {self.command}"
        return self._outcome()

    def _run_on(self, executor: Executor) -> None:
        while True:
            self._fill(executor)
            self.in_flight = executor.in_flight
            if executor.in_flight == 0:
                return
            for done in executor.poll(POLL_S):
                self._finish(done)
            self._settle()
            if len(self.in_a_row) >= self.config.max_consecutive_failures:
                self._abort()
                return

    def _fill(self, executor: Executor) -> None:
        """Submit what there is room for. Costs go first once enough trials wait for them, and last if nothing else is left to do."""
        self._submit_costs(executor, least=min(4 * executor.capacity, COST_BATCH))
        while executor.room > 0 and (ready := self._next_score()) is not None:
            executor.submit(self._task(*ready))
        if executor.in_flight == 0:
            self._submit_costs(executor, least=1)

    def _submit_costs(self, executor: Executor, least: int) -> None:
        """Divide the trials that wait for their costs among as many quiet machines as there are, at least `least` for each."""
        waiting = self.schedule.without_cost()
        batches = min(executor.room_alone, len(waiting) // least)
        for i in range(batches):
            executor.submit_alone([self._task(proposal, stage) for proposal, stage in waiting[i::batches]])

    def _task(self, proposal: Proposal, stage: Stage) -> Task:
        self.schedule.submitted(proposal.number, stage)
        return Task(
            number=proposal.number,
            config_json=canonical_json(self.owner.space.trial_config(proposal.variant)),
            label=proposal.label,
            anchor=proposal.anchor,
            folder=str(self.owner.trial_folder(proposal.number).resolve()),
            cache=str(self.cache),
            run=self.trial_function,
            timeout_s=self.config.trial_timeout_s,
            stage=stage,
            before=self.schedule.before(proposal.number, stage),
            resources=self.config.resources,
        )

    def _next_score(self) -> tuple[Proposal, Stage] | None:
        """A trial to go on with, else a new one; None when none can be had now. Where no more may be proposed at all, `stop` says why."""
        if (ready := self.schedule.ready()) is not None:
            return ready
        if self.stop is not None:
            return None
        if self.owner.left() == 0:
            self._stop_proposing("budget", f"the budget of {self.config.trials} trials is met")
        elif self.config.max_updates is not None and self.schedule.updates() >= self.config.max_updates:
            self._stop_proposing("budget", f"the budget of {self.config.max_updates} updates is met")
        elif self._time_left() <= 0:
            self._stop_proposing("time", f"stopped after max_hours = {self.config.max_hours:g}; continue with: {self.command}")
        elif self.owner.known() is None:
            return None  # trials that the next proposal must know still run
        elif (proposal := self.owner.propose(self.schedule.next_bracket())) is not None:
            self.schedule.add(proposal)
        else:
            self._stop_proposing("exhausted", f"every variant of the space has been proposed: {self.owner.total} trials, {self.config.trials} asked for")
        return self.schedule.ready()

    def _stop_proposing(self, why: Stop, message: str) -> None:
        self.stop = why, message
        self._settle()  # a bracket that is not full will not get fuller

    def _settle(self) -> None:
        for row in self.schedule.settle(closed=self.stop is not None):
            self._tell(row)

    def _finish(self, done: Done) -> None:
        self.schedule.ended(done.task.number)
        row = done.row
        if row.error is not None:
            self.in_a_row.append((done.task.stage.kind, row.error))
        elif row.cost is None:
            self.in_a_row = [(kind, error) for kind, error in self.in_a_row if kind != "score"]
        else:
            self.in_a_row.clear()
        if row.status == "ok" and row.cost is None:
            rung = f" rung {done.task.stage.rung}" if self.config.rungs.updates else ""
            self._print(f"trial {row.trial} {row.label}:{rung} after {row.updates} updates, mean {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}")
            return
        self._tell(row)

    def _tell(self, row: Row) -> None:
        assert row.trial is not None
        self.owner.tell(row)
        self.schedule.told(row.trial)
        self._drop_checkpoint(row.trial)
        self.finished_here += 1
        self._measure()
        self._print(f"{_describe(row)} | {self._progress()}")

    def _drop_checkpoint(self, number: int) -> None:
        (self.owner.trial_folder(number) / CHECKPOINT_FILE).unlink(missing_ok=True)

    def _abort(self) -> None:
        _, error = self.in_a_row[0]
        self._print(error.traceback or f"{error.kind}: {error.message}")
        self.stop = "failures", f"{len(self.in_a_row)} trials in a row failed, the first with {error.kind}: {error.message}; continue with: {self.command}"

    def _measure(self) -> None:
        finished = [row for _, row in sorted(self.owner.rows.items()) if row.status == "ok"]
        rows = [row for row in finished if all(requirements.violation(row, wanted) <= 0 for wanted in self.owner.requirements)]
        self.front = tuple(row.trial for row in pareto.front(rows) if row.trial is not None)
        self.hypervolume = pareto.hypervolume(rows)

    def _outcome(self) -> SearchOutcome:
        rows = self.owner.rows.values()
        stopped, message = self.stop or ("budget", "")
        outcome = SearchOutcome(
            folder=self.owner.folder,
            stopped=stopped,
            message=message,
            ok=sum(row.status == "ok" for row in rows),
            rungs=sum(row.status == "stopped" for row in rows),
            infeasible=sum(row.status == "infeasible" for row in rows),
            running=len(self.owner.running()),
            front=self.front,
            hypervolume=self.hypervolume,
            elapsed_s=time.monotonic() - self.begin,
            error=self.in_a_row[0][1] if stopped == "failures" else None,
        )
        self._print(f"{self.owner.folder}: {message} ({self._progress()})")
        return outcome

    # -------------------------------------------------------------- what the user sees

    @contextlib.contextmanager
    def _live(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._status, console=self.console, refresh_per_second=2, transient=True):
            yield

    def _status(self) -> Text:
        elapsed = time.monotonic() - self.begin
        return Text(f"{self._progress()}, {self.in_flight} running, elapsed {clock(elapsed)}, left {self._estimate(elapsed)}")

    def _progress(self) -> str:
        states = Counter(row.status for row in self.owner.rows.values())
        done = f"{len(self.owner.rows)}/{self.config.trials} done"
        rungs = f", {states['stopped']} stopped at a rung" if self.config.rungs.updates else ""
        return f"{done}{rungs}, {states['infeasible']} infeasible, front {len(self.front)}, hypervolume {self.hypervolume:.4f}"

    def _estimate(self, elapsed: float) -> str:
        if not self.finished_here:
            return "?"
        trials = max(0, self.config.trials - len(self.owner.rows))
        return f"about {clock(min(elapsed / self.finished_here * trials, max(0.0, self._time_left())))}"

    def _time_left(self) -> float:
        """Seconds until max_hours of this call."""
        hours = self.config.max_hours
        return float("inf") if hours is None else hours * 3600 - (time.monotonic() - self.begin)

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, which batch systems send before they kill, ends the search as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(row: Row) -> str:
    head = f"trial {row.trial} {row.label}"
    if row.error is not None:
        return f"{head} infeasible: {row.error.kind}: {(row.error.message.splitlines() or [''])[0]}"
    if row.status == "stopped":
        return f"{head}: stopped at rung {row.rung} after {row.updates} updates, mean {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}"
    assert row.cost is not None
    kept, ratio = row.cost.kv_kept, row.cost.throughput_ratio.value
    return f"{head}: KV kept {kept:.4f}, throughput x{ratio:.2f}, mean {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}"
