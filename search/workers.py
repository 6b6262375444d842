"""Where trials run: in this process, or as Ray tasks. Both executors have one protocol and leave the Row of each stage in the trial's folder.

The first Row that a stage's file gets stays: it is written to a temporary file, synced and linked into place, and later ones are dropped. So a finished
stage cannot be lost or contradicted by a late worker.

On a cluster every machine must have mitigate installed. Where all see the results folder under the path that it has here, a trial goes on from its checkpoint
on any of them, and its weights are kept; else Rows still come back, a stage starts its trial from the beginning, and weights stay where they were trained.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mitigate import pareto
from mitigate.config import TrialConfig, WorkFailed, content_hash, to_dict
from mitigate.config_files import from_dict
from mitigate.config_search import ResourcesConfig
from mitigate.files import write_atomic
from mitigate.rows import Error, Row, installed_versions
from mitigate.stage import Stage

MAX_ATTEMPTS = 3  # executions of a stage whose worker dies
MAX_LOSSES = 10  # executions of a stage whose machine is lost, before the search stops
START_GRACE_S = 120.0  # a task that has not begun after its timeout, or after this if longer, counts as one that gets no CPU
OBJECT_STORE_BYTES = 80 * 2**20  # Ray refuses less than 75 MiB
TRACEBACK_CHARS = 8000
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class ExecutorError(WorkFailed):
    """Trials cannot be run here for a reason that is not theirs: no CPU, no cluster, a trial function that cannot be imported."""


class InvalidResultError(ValueError):
    """A trial function returned something that is not a complete, finite Row."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One stage of one trial. Plain data: it travels to a worker.

    `last`: the Row of this stage is the trial's result whatever it holds; else a Row without cost is a rung's, and the trial goes on.
    """

    number: int
    config_json: str  # canonical TrialConfig
    label: str
    anchor: bool
    folder: str  # absolute; the trial's weights and results
    cache: str  # absolute
    run: str  # trial function, "module:function"
    timeout_s: float
    stage: Stage = field(default_factory=Stage)
    last: bool = False
    before: dict[str, str] = field(default_factory=dict)  # Rows that the stage goes on from, by file, for a machine that does not see the folder
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    attempt: int = 1  # executions whose worker died count
    losses: int = 0  # executions whose machine was lost

    def config(self) -> TrialConfig:
        return from_dict(TrialConfig, json.loads(self.config_json))

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Task:
        return cls(**plain | {"stage": Stage(**plain["stage"]), "resources": ResourcesConfig(**plain["resources"])})


@dataclass(frozen=True, kw_only=True)
class Done:
    """A stage that ended, and the Row it left."""

    task: Task
    row: Row


class Executor(Protocol):
    """Runs stages of trials, at most `capacity` at once, and gives a Row for each. Costs are measured alone: no other trial shares the machine meanwhile."""

    capacity: int

    @property
    def in_flight(self) -> int:
        """Stages submitted and not ended."""
        ...

    @property
    def room(self) -> int:
        """Stages that may be submitted now."""
        ...

    @property
    def room_alone(self) -> int:
        """Batches that may be submitted now for a machine of their own."""
        ...

    def submit(self, task: Task) -> None: ...

    def submit_alone(self, tasks: list[Task]) -> None:
        """Run tasks one after the other on a machine where nothing else of this search runs."""
        ...

    def poll(self, timeout_s: float) -> list[Done]:
        """Stages that ended, after at most about `timeout_s` seconds. ExecutorError if they cannot run."""
        ...

    def close(self) -> None:
        """Stop what still runs and release everything."""
        ...


# ---------------------------------------------------------------- results on disk


def result_path(folder: Path) -> Path:
    return folder / "result.json"


def write_result(folder: Path, row: Row, name: str = "result.json") -> None:
    """Put a Row's file in place unless there is one: all of it or none of it, synced."""
    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = folder / name, folder / f".{name}.{socket.gethostname()}.{os.getpid()}.tmp"
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


def read_result(folder: Path, name: str = "result.json") -> Row | None:
    """The Row in a trial folder, None without one. ConfigError names a file that is no Row of this schema."""
    from mitigate import results  # imports pyarrow, which a worker does not need

    path = folder / name
    return results.read_row(path) if path.exists() else None


def file_of(task: Task, row: Row) -> str:
    """Where the Row of a stage belongs: the rung's file, or `result.json` if the trial ends with it."""
    goes_on = row.status == "ok" and row.cost is None and not task.last
    return task.stage.scored_file if goes_on else "result.json"


def outcome_of(task: Task) -> Row | None:
    """What a stage left on disk: the trial's result, else, of a score stage, the rung's."""
    folder = Path(task.folder)
    found = read_result(folder)
    return read_result(folder, task.stage.scored_file) if found is None and task.stage.kind == "score" else found


def objective_values(row: Row) -> list[float]:
    """The objectives in the order of `pareto.OBJECTIVES`. InvalidResultError if one is missing or not finite."""
    found = pareto.objectives(row)
    if found is None:
        raise InvalidResultError("trial function returned a Row without all of cost, mean_accuracy and a_min")
    named = [(objective.name, float(value)) for objective, value in zip(pareto.OBJECTIVES, found, strict=True)]
    _require_finite(named)
    return [value for _, value in named]


def _require_finite(named: list[tuple[str, float]]) -> None:
    for name, value in named:
        if not math.isfinite(value):
            raise InvalidResultError(f"trial function returned {name} = {value}, expected a finite number")


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


def execute(plain: dict[str, Any], passing: tuple[type[BaseException], ...] = (KeyboardInterrupt,)) -> dict[str, Any]:
    """Run one task: catch everything but `passing`, write its Row, return the Row as plain data.

    Raises:
        ExecutorError: the trial function cannot be imported.
    """
    task = Task.of(plain)
    run, folder = _resolve(task.run), Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "started.json", json.dumps(_started(task)).encode())
    for name, text in task.before.items():
        if not (folder / name).exists():
            write_result(folder, Row.from_json(text), name)
    begin = time.monotonic()
    try:
        row = run(task.config(), label=task.label, trial=task.number, anchor=task.anchor, out=folder, cache=Path(task.cache), stage=task.stage)
        row = _checked(task, row)
    except passing:
        raise
    except BaseException as error:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        row = failure_row(task, type(error).__name__, str(error), trace, wall_s=time.monotonic() - begin)
    write_result(folder, row, file_of(task, row))
    return row.model_dump(mode="json")


def execute_all(plains: list[dict[str, Any]], carried: dict[str, bytes]) -> list[dict[str, Any]]:
    """Run tasks one after the other. `carried` are files of the cache folder, which a machine that lacks them gets first.

    A worker that is told to end, as by SIGTERM when its machine shuts down, gets SystemExit: no result of the trial, which runs again elsewhere.
    """
    if plains and carried:
        for name, content in carried.items():
            path = Path(plains[0]["cache"]) / name
            if not path.exists():
                write_atomic(path, content)
    return [execute(plain, (KeyboardInterrupt, SystemExit)) for plain in plains]


def _started(task: Task) -> dict[str, Any]:
    ray = sys.modules.get("ray")
    node = ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else None
    about = {"attempt": task.attempt, "host": socket.gethostname(), "pid": os.getpid(), "node": node}
    return about | {"kind": task.stage.kind, "rung": task.stage.rung, "time": time.time()}


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
        if row.cost is not None:
            objective_values(row)
        elif task.stage.kind == "cost" or row.mean_accuracy is None or row.a_min is None:
            raise InvalidResultError("trial function returned a Row without all of cost, mean_accuracy and a_min")
        else:
            _require_finite([("mean_accuracy", row.mean_accuracy), ("a_min", row.a_min)])
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

    @property
    def room(self) -> int:
        return 0 if self._tasks else 1

    @property
    def room_alone(self) -> int:
        return self.room

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def submit_alone(self, tasks: list[Task]) -> None:
        self._tasks += tasks

    def poll(self, timeout_s: float) -> list[Done]:
        """Runs the oldest task to its end, whatever `timeout_s` says."""
        if not self._tasks:
            return []
        task = self._tasks[0]
        with _cores(task.resources):
            row = Row.model_validate(execute(task.plain()))
        self._tasks.pop(0)
        return [Done(task=task, row=outcome_of(task) or row)]

    def close(self) -> None:
        self._tasks.clear()


@contextlib.contextmanager
def _cores(resources: ResourcesConfig) -> Iterator[None]:
    """The threads and GPUs of a trial, for code of this process; undone afterwards. If torch is first imported inside, it keeps the number of threads."""
    wanted = _environment(resources)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(resources.cpus)
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


def _environment(resources: ResourcesConfig) -> dict[str, str]:
    """Environment of a trial: as many threads as cores, and no GPU in sight unless it asked for one."""
    threads = dict.fromkeys(_THREADS, str(resources.cpus))
    return threads if resources.gpus else threads | {"CUDA_VISIBLE_DEVICES": ""}


@dataclass
class _Running:
    tasks: list[Task]
    quiet: str | None  # id of the machine that they have to themselves
    submitted: float  # time.monotonic()
    started: float | None = None
    late: bool = False


class RayExecutor:
    """One Ray task per stage, one worker process each.

    Args:
        workers: trials at once.
        address: of a running cluster; None starts Ray on this machine alone, whatever RAY_ADDRESS says.
        resources: of one trial.
        carried: content of files of the cache folder by their path in it; they go to each machine of a cluster once.

    Raises:
        ExecutorError: Ray does not start or join, or no machine of the cluster has room for one trial.
    """

    def __init__(
        self, workers: int, address: str | None = None, *, resources: ResourcesConfig | None = None, carried: Mapping[str, bytes] | None = None
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise ExecutorError(f"ray is not installed ({error}): install ray, or run with --inline") from error
        self._ray: Any = ray
        self._resources = resources = resources or ResourcesConfig()
        self._owns = not ray.is_initialized()
        if self._owns:
            _start_ray(ray, workers * resources.cpus, address)
        fits = sum(self._trials_on(node) for node in self._nodes())
        if fits < 1:
            have = self._ray.cluster_resources()
            self.close()
            raise ExecutorError(f"a trial needs {_demand(resources)}; no machine of the Ray cluster has that ({_supply(have)} in all)")
        self.capacity = min(workers, fits)
        self._running: dict[Any, _Running] = {}
        options: dict[str, Any] = dict(num_cpus=resources.cpus, num_gpus=resources.gpus, runtime_env={"env_vars": _worker_env(resources, address)})
        if resources.memory_gib is not None:
            options["memory"] = int(resources.memory_gib * 2**30)
        self._execute = ray.remote(max_calls=1, max_retries=0, **options)(execute_all)
        self._carried = ray.put(dict(carried or {}))  # a machine fetches it once, whatever the number of its trials
        self._held: list[Task] = []  # to be executed again once a batch has left them a machine

    @property
    def in_flight(self) -> int:
        return len(self._held) + sum(len(running.tasks) for running in self._running.values())

    @property
    def room(self) -> int:
        """On one machine none while a batch waits for it or has it to itself; the others of a cluster go on."""
        busy = len(self._held) + sum(running.quiet is None for running in self._running.values())
        return max(0, min(self.capacity - len(self._quiet()), self._places()) - busy)

    @property
    def room_alone(self) -> int:
        """A batch for every second of the smallest machines, for each of them once nothing else runs: all costs are measured on one kind of machine."""
        quiet, machines = self._quiet(), self._smallest()
        others = len(self._held) + len(self._running) - len(quiet)
        wanted = max(len(machines) // 2, 1) if others else len(machines)
        free = sum(node["NodeID"] not in quiet for node in machines)
        return max(0, min(free, wanted - len(quiet), self.capacity - len(quiet)))

    def _quiet(self) -> list[str]:
        """Ids of the machines that batches have to themselves, or wait for."""
        return [running.quiet for running in self._running.values() if running.quiet is not None]

    def _places(self) -> int:
        """Trials that fit at once on the machines that no batch has to itself."""
        quiet = self._quiet()
        return sum(self._trials_on(node) for node in self._nodes() if node["NodeID"] not in quiet)

    def _smallest(self) -> list[dict[str, Any]]:
        """The machines that fit a trial and have the fewest CPUs, in a fixed order."""
        fit = [node for node in self._nodes() if self._trials_on(node)]
        least = min((_cpus(node) for node in fit), default=0.0)
        return sorted((node for node in fit if _cpus(node) == least), key=lambda node: str(node["NodeID"]))

    def submit(self, task: Task) -> None:
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        elsewhere: dict[str, Any] = {}
        if quiet := self._quiet():
            elsewhere["scheduling_strategy"] = NodeLabelSchedulingStrategy(hard={"ray.io/node-id": NotIn(*quiet)})
        self._send([task], **elsewhere)

    def submit_alone(self, tasks: list[Task]) -> None:
        """On one of the smallest machines that fit a trial, all of its CPUs asked for. Where batches have all of these, after one of them."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        fit, quiet = self._smallest(), self._quiet()
        if not fit:
            raise ExecutorError(f"no machine of the Ray cluster has room for a trial any more ({_demand(self._resources)} needed)")
        node = min(fit, key=lambda node: quiet.count(node["NodeID"]))
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        gpus = max(1.0, self._resources.gpus) if self._resources.gpus else 0
        self._send(tasks, quiet=node["NodeID"], num_cpus=_cpus(node), num_gpus=gpus, scheduling_strategy=there)

    def _send(self, tasks: list[Task], *, quiet: str | None = None, **options: Any) -> None:
        for task in tasks:
            (Path(task.folder) / "started.json").unlink(missing_ok=True)
        ref = self._execute.options(**options).remote([task.plain() for task in tasks], self._carried)
        self._running[ref] = _Running(tasks, quiet, time.monotonic())

    def poll(self, timeout_s: float) -> list[Done]:
        while self._held and self._places():
            self.submit(self._held.pop(0))
        if not self._running:
            return []
        for ref, running in self._running.items():
            self._enforce_deadline(ref, running)
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [done for ref in ready for done in self._settle(ref, self._running.pop(ref))]

    def close(self) -> None:
        if self._owns:
            self._ray.shutdown()  # disconnects from a cluster; its tasks end with their owner
            return
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        self._running.clear()
        self._held.clear()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _trials_on(self, node: dict[str, Any]) -> int:
        """Trials that fit on a machine at once."""
        have, need = node["Resources"], self._resources
        fits = [have.get("CPU", 0) / need.cpus]
        if need.gpus:
            fits.append(have.get("GPU", 0) / need.gpus)
        if need.memory_gib is not None:
            fits.append(have.get("memory", 0) / (need.memory_gib * 2**30))
        return int(min(fits))

    def _enforce_deadline(self, ref: Any, running: _Running) -> None:
        now, limit, first = time.monotonic(), running.tasks[0].timeout_s * len(running.tasks), running.tasks[0]
        if running.started is None and (Path(first.folder) / "started.json").exists():
            running.started = now
        if running.started is not None and now - running.started > limit and not running.late:
            running.late = True
            self._ray.cancel(ref, force=True)
        if running.started is None and not self._someone_started() and now - running.submitted > max(limit, START_GRACE_S):
            waited, free = now - running.submitted, self._ray.available_resources()
            raise ExecutorError(f"trial {first.number} got no worker within {waited:.0f} s ({_supply(free)} free, {_demand(self._resources)} needed)")

    def _someone_started(self) -> bool:
        """Whether a stage runs that a waiting one may be waiting for."""
        return any(running.started is not None for running in self._running.values())

    def _settle(self, ref: Any, running: _Running) -> list[Done]:
        """The tasks of a call that ended with their Rows. Those without are submitted again, or fail."""
        failure, rows = self._failure(ref, running)
        for task, plain in zip(running.tasks, rows, strict=False):  # where the folder is not shared, this is how a Row gets here
            row = Row.model_validate(plain)
            write_result(Path(task.folder), row, file_of(task, row))
        done, left = [], []
        for task in running.tasks:
            found = outcome_of(task)
            if found is None:
                left.append(task)
            else:
                done.append(Done(task=task, row=found))
        if left:
            assert failure is not None
            done += self._again(left, running, *failure)
        return done

    def _again(self, left: list[Task], running: _Running, kind: str, message: str) -> list[Done]:
        """The first task ran when the call died: it gets another attempt, or fails. The others go on as they are."""
        first, rest = left[0], left[1:]
        if kind == "NodeLost":
            first = dataclasses.replace(first, losses=first.losses + 1)
            if first.losses > MAX_LOSSES:
                raise ExecutorError(f"trial {first.number} lost its machine {first.losses} times: {message}")
        elif kind == "WorkerCrashed" and first.attempt < MAX_ATTEMPTS:
            first = dataclasses.replace(first, attempt=first.attempt + 1)
        else:
            wall_s = time.monotonic() - (running.started or running.submitted)
            write_result(Path(first.folder), failure_row(first, kind, message, wall_s=wall_s))
            if rest:
                self.submit_alone(rest)
            return [Done(task=first, row=_row_of(first))]
        if running.quiet is not None:
            self.submit_alone([first, *rest])
        else:
            self._held.append(first)
        return []

    def _failure(self, ref: Any, running: _Running) -> tuple[tuple[str, str] | None, list[dict[str, Any]]]:
        """Kind and message of a call's death, None if it returned; and the Rows that it returned."""
        task, errors = running.tasks[0], self._ray.exceptions
        try:
            return None, self._ray.get(ref)
        except Exception as error:
            if running.late:
                return ("Timeout", f"trial ran longer than trial_timeout_s ({task.timeout_s:g} s)"), []
            if isinstance(error, errors.OutOfMemoryError):
                return ("OutOfMemory", f"the worker was killed because its machine ran out of memory: {_first_line(error)}"), []
            if isinstance(error, errors.NodeDiedError | errors.TaskUnschedulableError) or self._lost_its_machine(running):
                return ("NodeLost", f"its machine is gone: {_first_line(error)}"), []
            if isinstance(error, errors.WorkerCrashedError):
                return ("WorkerCrashed", f"the worker died in attempt {task.attempt} of {MAX_ATTEMPTS}: {_first_line(error)}"), []
            cause = getattr(error, "cause", None) or error
            raise ExecutorError(f"trial {task.number} could not be run: {type(cause).__name__}: {_first_line(cause)}") from error

    def _lost_its_machine(self, running: _Running) -> bool:
        """Whether the last of the tasks that started did so on a machine that the cluster no longer has."""
        started = [Path(task.folder) / "started.json" for task in running.tasks]
        nodes = [json.loads(path.read_text(encoding="utf-8")).get("node") for path in started if path.exists()]
        return bool(nodes) and nodes[-1] is not None and nodes[-1] not in {node["NodeID"] for node in self._nodes()}


def _cpus(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0))


def _row_of(task: Task) -> Row:
    row = outcome_of(task)
    assert row is not None
    return row


def _demand(resources: ResourcesConfig) -> str:
    parts = [f"{resources.cpus} CPU{'s' if resources.cpus > 1 else ''}"]
    parts += [f"{resources.gpus:g} GPU"] if resources.gpus else []
    parts += [f"{resources.memory_gib:g} GiB"] if resources.memory_gib is not None else []
    return " and ".join(parts)


def _supply(have: Mapping[str, float]) -> str:
    return f"{have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs, {have.get('memory', 0) / 2**30:.3g} GiB"


def _start_ray(ray: Any, cpus: int, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    local: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
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


def _worker_env(resources: ResourcesConfig, address: str | None) -> dict[str, str]:
    """Environment of a worker. On this machine it imports what the driver can import; a cluster uses its own installed package."""
    here = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} if address is None else {}
    return _environment(resources) | here


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
