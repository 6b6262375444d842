"""Where trials run: in this process, or as Ray tasks. Both executors have one protocol and leave `result.json` in each trial's folder.

The first result that a trial's folder gets stays: it is written to a temporary file, synced and linked into place, and later ones are dropped. So a
finished trial cannot be lost or contradicted by a late worker. A trial uses one core and no GPU.

On a cluster every node must have mitigate installed, and must see the results folder and the cache folder under the paths that they have here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mitigate import pareto
from mitigate.config import TrialConfig, content_hash, from_dict, to_dict
from mitigate.rows import Error, Row, installed_versions

MAX_ATTEMPTS = 3  # executions of a trial whose worker dies
START_GRACE_S = 120.0  # a task that has not begun after its timeout, or after this if longer, counts as one that gets no CPU
OBJECT_STORE_BYTES = 80 * 2**20  # Ray refuses less than 75 MiB
TRACEBACK_CHARS = 8000
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
ONE_CORE = dict.fromkeys(_THREADS, "1") | {"CUDA_VISIBLE_DEVICES": ""}


class ExecutorError(RuntimeError):
    """Trials cannot be run here for a reason that is not theirs: no CPU, no cluster, a trial function that cannot be imported."""


class InvalidResultError(ValueError):
    """A trial function returned something that is not a complete, finite Row."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One trial to run. Plain data: it travels to a worker."""

    number: int
    config_json: str  # canonical TrialConfig
    label: str
    anchor: bool
    folder: str  # absolute; the trial's weights and result
    cache: str  # absolute
    run: str  # trial function, "module:function"
    timeout_s: float
    attempt: int = 1

    def config(self) -> TrialConfig:
        return from_dict(TrialConfig, json.loads(self.config_json))


class Executor(Protocol):
    """Runs at most `capacity` tasks at once and gives a Row for each."""

    capacity: int

    @property
    def in_flight(self) -> int: ...

    def submit(self, task: Task) -> None: ...

    def poll(self, timeout_s: float) -> list[Row]:
        """Rows of tasks that ended, after at most about `timeout_s` seconds. ExecutorError if tasks cannot run."""
        ...

    def close(self) -> None:
        """Stop what still runs and release everything."""
        ...


# ---------------------------------------------------------------- results on disk


def result_path(folder: Path) -> Path:
    return folder / "result.json"


def write_result(folder: Path, row: Row) -> None:
    """Put `result.json` in place unless there is one: all of it or none of it, synced."""
    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = result_path(folder), folder / f".result.{socket.gethostname()}.{os.getpid()}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(row.to_json() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, final)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not final.exists():
            os.replace(temporary, final)
    temporary.unlink(missing_ok=True)


def read_result(folder: Path) -> Row | None:
    """The Row of a trial folder, None without one. ConfigError names a file that is no Row of this schema."""
    from mitigate import results  # imports pyarrow, which a worker does not need

    path = result_path(folder)
    return results.read_row(path) if path.exists() else None


def objective_values(row: Row) -> list[float]:
    """The objectives in the order of `pareto.OBJECTIVES`. InvalidResultError if one is missing or not finite."""
    found = pareto.objectives(row)
    if found is None:
        raise InvalidResultError("trial function returned a Row without all of cost, mean_accuracy and a_min")
    values = [float(value) for value in found]
    for objective, value in zip(pareto.OBJECTIVES, values, strict=True):
        if not math.isfinite(value):
            raise InvalidResultError(f"trial function returned {objective.name} = {value}, expected a finite number")
    return values


def failure_row(task: Task, kind: str, message: str, trace: str = "", *, wall_s: float = 0.0) -> Row:
    """The infeasible Row of a trial that ended without metrics."""
    config = task.config()
    return Row(
        status="infeasible",
        label=task.label,
        trial=task.number,
        anchor=task.anchor,
        config=to_dict(config),
        config_sha256=content_hash(config),
        seed=config.seed,
        versions=installed_versions(),
        device="cpu",
        backend="none",
        wall_s=wall_s,
        error=Error(kind=kind, message=message, traceback=trace[-TRACEBACK_CHARS:]),
    )


# ---------------------------------------------------------------- in the worker


def execute(plain: dict[str, Any]) -> dict[str, Any]:
    """Run one task: catch everything, write `result.json`, return the Row as plain data.

    Raises:
        ExecutorError: the trial function cannot be imported.
    """
    task = Task(**plain)
    run, folder = _resolve(task.run), Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    started = {"attempt": task.attempt, "host": socket.gethostname(), "pid": os.getpid()}
    (folder / "started.json").write_text(json.dumps(started), encoding="utf-8")
    begin = time.monotonic()
    try:
        row = run(task.config(), label=task.label, trial=task.number, anchor=task.anchor, out=folder, cache=Path(task.cache))
        row = _checked(task, row)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        row = failure_row(task, type(error).__name__, str(error), trace, wall_s=time.monotonic() - begin)
    write_result(folder, row)
    return row.model_dump(mode="json")


def _resolve(dotted: str) -> Callable[..., Row]:
    module, _, name = dotted.partition(":")
    try:
        found: Callable[..., Row] = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ExecutorError(f"trial function {dotted!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _checked(task: Task, row: object) -> Row:
    if not isinstance(row, Row):
        raise InvalidResultError(f"trial function must return a Row, got {type(row).__name__}")
    if row.status == "ok":
        objective_values(row)
    row = row.model_copy(update={"trial": task.number, "anchor": task.anchor})
    return Row.from_json(row.to_json())  # refuses NaN and infinity anywhere


# ---------------------------------------------------------------- executors


class InlineExecutor:
    """Runs tasks one after the other in this process. A trial that kills the process kills the search, and a deadline cannot be enforced."""

    def __init__(self) -> None:
        self.capacity = 1
        self._tasks: list[Task] = []

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def poll(self, timeout_s: float) -> list[Row]:
        """Runs the oldest task to its end, whatever `timeout_s` says."""
        if not self._tasks:
            return []
        task = self._tasks[0]
        with _one_core():
            execute(dataclasses.asdict(task))
        self._tasks.pop(0)
        return [_row_of(task)]

    def close(self) -> None:
        self._tasks.clear()


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """One thread and no GPU, for code of this process; undone afterwards. If torch is first imported inside, it keeps one thread."""
    before = {name: os.environ.get(name) for name in ONE_CORE}
    os.environ.update(ONE_CORE)
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _row_of(task: Task) -> Row:
    row = read_result(Path(task.folder))
    if row is None:
        raise ExecutorError(f"trial {task.number} ended but {result_path(Path(task.folder))} is not visible here: workers must share the results folder")
    return row


@dataclass
class _Running:
    task: Task
    submitted: float  # time.monotonic()
    started: float | None = None
    late: bool = False


class RayExecutor:
    """One Ray task per trial, one worker process each.

    Args:
        workers: trials at once.
        address: of a running cluster; None starts Ray on this machine alone, whatever RAY_ADDRESS says.

    Raises:
        ExecutorError: Ray does not start or join, or the cluster has no CPU.
    """

    def __init__(self, workers: int, address: str | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise ExecutorError(f"ray is not installed ({error}): install ray, or run with --inline") from error
        self._ray: Any = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            _start_ray(ray, workers, address)
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < 1:
            self.close()
            raise ExecutorError("a trial needs 1 CPU; the Ray cluster has none")
        self.capacity = min(workers, cpus)
        self._running: dict[Any, _Running] = {}
        self._execute = ray.remote(max_calls=1, max_retries=0, num_cpus=1, num_gpus=0, runtime_env={"env_vars": _worker_env(address)})(execute)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def submit(self, task: Task) -> None:
        (Path(task.folder) / "started.json").unlink(missing_ok=True)
        self._running[self._execute.remote(dataclasses.asdict(task))] = _Running(task, time.monotonic())

    def poll(self, timeout_s: float) -> list[Row]:
        if not self._running:
            return []
        for ref, running in self._running.items():
            self._enforce_deadline(ref, running)
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        rows = [self._settle(ref, self._running.pop(ref)) for ref in ready]
        return [row for row in rows if row is not None]

    def close(self) -> None:
        if self._owns:
            self._ray.shutdown()  # disconnects from a cluster; its tasks end with their owner
            return
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        self._running.clear()

    def _enforce_deadline(self, ref: Any, running: _Running) -> None:
        now, task = time.monotonic(), running.task
        if running.started is None and (Path(task.folder) / "started.json").exists():
            running.started = now
        if running.started is not None and now - running.started > task.timeout_s and not running.late:
            running.late = True
            self._ray.cancel(ref, force=True)
        if running.started is None and now - running.submitted > max(task.timeout_s, START_GRACE_S):
            waited, free = now - running.submitted, self._ray.available_resources().get("CPU", 0)
            raise ExecutorError(f"trial {task.number} got no worker within {waited:.0f} s ({free:g} CPUs free, 1 needed)")

    def _settle(self, ref: Any, running: _Running) -> Row | None:
        """The Row of an ended task; None if it was submitted again."""
        task, failure = running.task, self._failure(ref, running)
        folder = Path(task.folder)
        if failure and not result_path(folder).exists():
            kind, message = failure
            if kind == "WorkerCrashed" and task.attempt < MAX_ATTEMPTS:
                self.submit(dataclasses.replace(task, attempt=task.attempt + 1))
                return None
            wall_s = time.monotonic() - (running.started or running.submitted)
            write_result(folder, failure_row(task, kind, message, wall_s=wall_s))
        return _row_of(task)

    def _failure(self, ref: Any, running: _Running) -> tuple[str, str] | None:
        """Kind and message of a task's death, None if it returned."""
        task, errors = running.task, self._ray.exceptions
        try:
            self._ray.get(ref)
        except Exception as error:
            if running.late:
                return "Timeout", f"trial ran longer than trial_timeout_s ({task.timeout_s:g} s)"
            if isinstance(error, errors.OutOfMemoryError):
                return "OutOfMemory", f"the worker was killed because its machine ran out of memory: {_first_line(error)}"
            if isinstance(error, errors.WorkerCrashedError | errors.NodeDiedError):
                return "WorkerCrashed", f"the worker died in attempt {task.attempt} of {MAX_ATTEMPTS}: {_first_line(error)}"
            cause = getattr(error, "cause", None) or error
            raise ExecutorError(f"trial {task.number} could not be run: {type(cause).__name__}: {_first_line(cause)}") from error
        return None


def _start_ray(ray: Any, workers: int, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    local: dict[str, Any] = {"num_cpus": workers, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        if address is None:
            ray.init(address="local", **local, **quiet)
        else:
            _require_listener(address)
            ray.init(address=address, **quiet)
    except Exception as error:
        where = "start on this machine" if address is None else f"join the cluster at {address}"
        raise ExecutorError(f"Ray could not {where}: {type(error).__name__}: {_first_line(error)}") from error


def _require_listener(address: str) -> None:
    """ConnectionError or OSError in seconds where Ray would try for minutes. Addresses other than host:port are left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _worker_env(address: str | None) -> dict[str, str]:
    """Environment of a worker. On this machine it imports what the driver can import; a cluster uses its own installed package."""
    here = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} if address is None else {}
    return ONE_CORE | here


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
