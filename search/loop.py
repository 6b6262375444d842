"""The search: resume, propose up to capacity, tell what ends, say how it goes.

`run_search` may be killed at any moment and called again: finished trials are told once, trials that were running run again under their number and
seed, and the total stays `trials`.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mitigate import pareto
from mitigate.config import SearchConfig, VariantConfig, canonical_json
from mitigate.rows import Error, Row
from mitigate.search.space import SearchSpace
from mitigate.search.study import Proposal, StudyOwner, check_anchors
from mitigate.search.workers import Executor, ExecutorError, InlineExecutor, RayExecutor, Task

RUN_TRIAL = "mitigate.trial:run_trial"
POLL_S = 1.0
Stop = Literal["budget", "exhausted", "time", "interrupted", "failures", "workers"]


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """How a search ended.

    Args:
        folder: the study folder.
        stopped: "budget" (all trials done), "exhausted" (no variant left), "time" (max_hours), "interrupted" (Ctrl-C), "failures" (too many in a
            row), "workers" (trials could not be run).
        message: one line for the user.
        ok, infeasible, running: trials of the study by state; running ones are run again on the next call.
        front: numbers of the non-dominated trials.
        hypervolume: of the front, from `pareto.REFERENCE`, which the study stores.
        elapsed_s: of this call.
        error: the first failure of a row of failures.
    """

    folder: Path
    stopped: Stop
    message: str
    ok: int
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
    prepare: Callable[[], None] | None = None,
    console: Console | None = None,
    command: str | None = None,
) -> SearchOutcome:
    """Run or resume the search in `results/<config.name>` until its budget is met.

    Args:
        results, cache: folders, created as needed.
        address: of a Ray cluster; None starts Ray on this machine.
        inline: run trials one by one in this process, without Ray (no deadlines, and a crash of a trial ends the search).
        run: the trial function, "module:function", imported by the workers.
        prepare: called once before the first trial of this call, not at all when there is none. What it raises passes; the trial that waits for it
            stays running in the study, and runs on the next call.
        console: where to print; a terminal gets a live status line.
        command: what continues the search, for messages; the running command line if None.

    Raises:
        ConfigError: the config, an anchor or a choice of the space is unusable; the folder belongs to another config or driver. Nothing has run.
    """
    space = SearchSpace.from_config(config)
    new = not (results / config.name / "config.json").exists()
    space.check = _registry_check(config)
    if new:  # the registry imports torch: a study that exists was checked when it was created
        space.validate()
        check_anchors(config, space)
    with StudyOwner.open(config, results, space=space) as owner:
        search = _Search(owner, cache=cache, run=run, console=console or Console(), command=command or _this_command())
        return search.run(lambda: InlineExecutor() if inline else RayExecutor(config.workers, address), prepare or (lambda: None))


def _registry_check(config: SearchConfig) -> Callable[[VariantConfig], None]:
    def check(variant: VariantConfig) -> None:
        from mitigate import registry

        registry.check(variant, layers=config.trial.base.layers)

    return check


def _this_command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


class _Search:
    """One call of `run_search`, the study open."""

    def __init__(self, owner: StudyOwner, *, cache: Path, run: str, console: Console, command: str) -> None:
        self.owner, self.config, self.console = owner, owner.config, console
        self.cache, self.trial_function, self.command = cache.resolve(), run, command
        self.begin = time.monotonic()
        self.pending = deque(owner.running())
        self.finished_here = 0
        self.in_a_row: list[Error] = []
        self.stop: tuple[Stop, str] | None = None
        self.front: tuple[int, ...] = ()
        self.hypervolume = 0.0
        self.in_flight = 0
        self._measure()

    def run(self, start: Callable[[], Executor], prepare: Callable[[], None]) -> SearchOutcome:
        try:
            first = self._next()
            if first is not None:
                prepare()
                self._run_from(first, start)
        except KeyboardInterrupt:
            self.stop = "interrupted", f"interrupted; continue with: {self.command}"
        except ExecutorError as error:
            self.stop = "workers", f"{error}; continue with: {self.command}"
        return self._outcome()

    def _run_from(self, first: Proposal, start: Callable[[], Executor]) -> None:
        with contextlib.closing(start()) as executor, self._live():
            self._submit(executor, first)
            while True:
                self._fill(executor)
                if executor.in_flight == 0:
                    return
                for row in executor.poll(POLL_S):
                    self._finish(row)
                self.in_flight = executor.in_flight
                if len(self.in_a_row) >= self.config.max_consecutive_failures:
                    self._abort()
                    return

    def _fill(self, executor: Executor) -> None:
        while executor.in_flight < executor.capacity and (proposal := self._next()) is not None:
            self._submit(executor, proposal)

    def _submit(self, executor: Executor, proposal: Proposal) -> None:
        task = Task(
            number=proposal.number,
            config_json=canonical_json(self.owner.space.trial_config(proposal.variant)),
            label=proposal.label,
            anchor=proposal.anchor,
            folder=str(self.owner.trial_folder(proposal.number).resolve()),
            cache=str(self.cache),
            run=self.trial_function,
            timeout_s=self.config.trial_timeout_s,
        )
        executor.submit(task)
        self.in_flight = executor.in_flight

    def _next(self) -> Proposal | None:
        """A trial to run again, else a new one; None, with the reason in `stop`, when no more may be proposed."""
        if self.pending:
            return self.pending.popleft()
        if self.stop is not None:
            return None
        if self.owner.left() == 0:
            self.stop = "budget", f"the budget of {self.config.trials} trials is met"
        elif self._time_left() <= 0:
            self.stop = "time", f"stopped after max_hours = {self.config.max_hours:g}; continue with: {self.command}"
        elif (proposal := self.owner.propose()) is not None:
            return proposal
        else:
            self.stop = "exhausted", f"every variant of the space has been proposed: {self.owner.total} trials, {self.config.trials} asked for"
        return None

    def _finish(self, row: Row) -> None:
        self.owner.tell(row)
        self.finished_here += 1
        self._measure()
        if row.error is None:
            self.in_a_row.clear()
        else:
            self.in_a_row.append(row.error)
        self._print(f"{_describe(row)} | {self._progress()}")

    def _abort(self) -> None:
        error = self.in_a_row[0]
        self._print(error.traceback or f"{error.kind}: {error.message}")
        self.stop = "failures", f"{len(self.in_a_row)} trials in a row failed, the first with {error.kind}: {error.message}; continue with: {self.command}"

    def _measure(self) -> None:
        rows = [row for _, row in sorted(self.owner.rows.items())]
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
            infeasible=sum(row.status == "infeasible" for row in rows),
            running=len(self.owner.running()),
            front=self.front,
            hypervolume=self.hypervolume,
            elapsed_s=time.monotonic() - self.begin,
            error=self.in_a_row[0] if stopped == "failures" else None,
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
        return Text(f"{self._progress()}, {self.in_flight} running, elapsed {_clock(elapsed)}, left {self._estimate(elapsed)}")

    def _progress(self) -> str:
        infeasible = sum(row.status == "infeasible" for row in self.owner.rows.values())
        done = f"{len(self.owner.rows)}/{self.config.trials} done"
        return f"{done}, {infeasible} infeasible, front {len(self.front)}, hypervolume {self.hypervolume:.4f}"

    def _estimate(self, elapsed: float) -> str:
        if not self.finished_here:
            return "?"
        trials = max(0, self.config.trials - len(self.owner.rows))
        return f"about {_clock(min(elapsed / self.finished_here * trials, max(0.0, self._time_left())))}"

    def _time_left(self) -> float:
        """Seconds until max_hours of this call."""
        hours = self.config.max_hours
        return float("inf") if hours is None else hours * 3600 - (time.monotonic() - self.begin)

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _describe(row: Row) -> str:
    head = f"trial {row.trial} {row.label}"
    if row.error is not None:
        return f"{head} infeasible: {row.error.kind}: {(row.error.message.splitlines() or [''])[0]}"
    assert row.cost is not None
    kept, ratio = row.cost.kv_kept, row.cost.throughput_ratio.value
    return f"{head}: KV kept {kept:.4f}, throughput x{ratio:.2f}, mean {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02d}"
