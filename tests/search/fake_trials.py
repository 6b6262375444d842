"""Trial functions that need no model: analytic scores, and the ways a trial can die. Run as a script, one search of them without Ray or torch."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

from mitigate.config import ConfigError, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.config_search import SearchConfig
from mitigate.files import write_atomic
from mitigate.rows import Cost, Interval, Row
from mitigate.stage import Stage


def fake_registry() -> types.ModuleType:
    """A stand-in for `mitigate.registry` that imports no torch."""
    module = types.ModuleType("mitigate.registry")
    module.describe = lambda variant: f"w{variant.window}s{variant.stride} {variant.gate}"
    module.kept_fraction = lambda variant, layers: 1.0 / variant.stride if variant.compress else 1.0

    def check(variant: VariantConfig, *, layers: int) -> None:
        if variant.gate not in ("scalar", "vector", "uniform"):
            raise ConfigError(f"VariantConfig.gate {variant.gate!r} is not known; did you mean 'vector'?")
        if variant.gate == "vector" and variant.tie == "kv":
            raise ConfigError("VariantConfig.tie cannot be 'kv' with vector gates")

    module.check = check
    return module


def make_row(config: TrialConfig, *, label: str, trial: int | None, anchor: bool, a_min: float | None = None) -> Row:
    """Scores that trade KV bytes against accuracy, from the variant alone."""
    v = config.variant
    kept = 1.0 / v.stride if v.compress else 1.0
    mean = 0.95 - 0.03 * v.stride * v.compress + 0.01 * (v.window - v.stride) + 0.02 * (v.gate == "vector")
    worst = mean - 0.05 * v.compress if a_min is None else a_min
    point = Interval(value=1.0, low=1.0, high=1.0)
    ratio = 2.0 - kept
    cost = Cost(
        kv_bytes_per_token=1024 * kept,
        kv_kept=kept,
        kv_constant_bytes=0.0,
        context=64,
        batch=1,
        kv_bytes_at_context=1,
        kv_bytes_counted=1,
        decode_tokens_per_s=point,
        decode_tokens_per_s_full=point,
        throughput_ratio=Interval(value=ratio, low=ratio, high=ratio),
    )
    return Row.model_construct(
        status="ok",
        label=label,
        trial=trial,
        anchor=anchor,
        config=to_dict(config),
        config_sha256=content_hash(config),
        seed=config.seed,
        versions={},
        device="cpu",
        backend="fake",
        mean_accuracy=mean,
        a_min=worst,
        cost=cost,
        scores=[],
        error=None,
    )


def ok(config: TrialConfig, *, label: str, trial: int | None = None, anchor: bool = False, out: Path | None = None, **rest: object) -> Row:
    """At once; says so in `executions.log` of the study folder."""
    if out is not None:
        with (out.parent.parent / "executions.log").open("a") as log:
            log.write(f"{trial}\n")
    return make_row(config, label=label, trial=trial, anchor=anchor)


def staged(config: TrialConfig, *, stage: Stage, out: Path, trial: int | None = None, **rest: Any) -> Row:
    """Stage by stage as a real trial: "trains" ten updates at a time from a checkpoint, scores better the longer it trained, and has its costs measured last.

    `executions.log` of the study folder gets a line per start, `updates.log` one per ten updates that were done.
    """
    study = out.parent.parent
    _append(study / "executions.log", f"{trial} {stage.kind} {stage.rung}")
    whole = make_row(config, trial=trial, label=rest["label"], anchor=rest["anchor"])
    if stage.kind == "cost":
        return Row.from_json((out / stage.scored_file).read_text()).model_copy(update={"cost": whole.cost})
    target = config.train.updates if stage.updates is None else stage.updates
    checkpoint = out / "checkpoint.pt"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while done < target:
        done = min(done + 10, target)
        _append(study / "updates.log", f"{trial} {done}")
        write_atomic(checkpoint, str(done).encode())
    learned = done / config.train.updates
    assert whole.mean_accuracy is not None and whole.a_min is not None
    scores = {"mean_accuracy": whole.mean_accuracy * learned, "a_min": whole.a_min * learned}
    return whole.model_copy(update=scores | {"cost": None, "updates": done, "rung": None if stage.updates is None else stage.rung})


def staged_vector_fails(config: TrialConfig, *, stage: Stage, **rest: Any) -> Row:
    """As `staged`, but vector gates fail at the first rung."""
    if config.variant.gate == "vector" and stage.rung == 0:
        raise ValueError("no such thing")
    return staged(config, stage=stage, **rest)


def staged_other_speed(config: TrialConfig, *, stage: Stage, trial: int | None = None, **rest: Any) -> Row:
    """As `staged`, on a machine where throughput comes out differently."""
    row = staged(config, stage=stage, trial=trial, **rest)
    if row.cost is None:
        return row
    other = 1.0 + 0.01 * ((trial or 0) * 37 % 11)
    return row.model_copy(update={"cost": row.cost.model_copy(update={"throughput_ratio": Interval(value=other, low=other, high=other)})})


def staged_slowly(config: TrialConfig, **rest: Any) -> Row:
    """As `staged`, in a tenth of a second and more."""
    time.sleep(0.1)
    return staged(config, **rest)


def staged_uneven(config: TrialConfig, *, trial: int | None = None, **rest: Any) -> Row:
    """As `staged`, in a time that another process, or another run, would not repeat."""
    time.sleep(random.SystemRandom().uniform(0, 0.3))
    return staged(config, trial=trial, **rest)


def staged_dying(config: TrialConfig, *, stage: Stage, out: Path, trial: int | None = None, **rest: Any) -> Row:
    """As `staged`, but the first execution of each stage of every third trial is killed after it wrote its checkpoint."""
    mark = out / f"died-{stage.kind}-{stage.rung}"
    row = staged(config, stage=stage, out=out, trial=trial, **rest)
    if trial is not None and trial % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return row


def _append(path: Path, line: str) -> None:
    with path.open("a") as log:
        log.write(line + "\n")


def slow(config: TrialConfig, *, out: Path | None = None, **rest: object) -> Row:
    """A twentieth of a second, so that a kill may fall into it."""
    time.sleep(0.05)
    return ok(config, out=out, **rest)


def raising(config: TrialConfig, **rest: object) -> Row:
    raise ValueError("no such thing")


class AwkwardError(Exception):
    """Does not survive pickling."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} of {second}")


def awkward(config: TrialConfig, **rest: object) -> Row:
    raise AwkwardError(1, 2)


def uniform_fails(config: TrialConfig, **rest: object) -> Row:
    """One category of the space never works."""
    if config.variant.gate == "uniform":
        raise MemoryError("cannot allocate")
    return ok(config, **rest)


def nan(config: TrialConfig, *, label: str, trial: int | None = None, anchor: bool = False, **rest: object) -> Row:
    return make_row(config, label=label, trial=trial, anchor=anchor, a_min=float("nan"))


def infinite(config: TrialConfig, *, label: str, trial: int | None = None, anchor: bool = False, **rest: object) -> Row:
    return make_row(config, label=label, trial=trial, anchor=anchor, a_min=float("inf"))


def nothing(config: TrialConfig, **rest: object) -> None:
    return None


def interrupting(config: TrialConfig, *, trial: int | None = None, **rest: object) -> Row:
    """Ctrl-C in trial 3."""
    if trial == 3:
        raise KeyboardInterrupt
    return ok(config, trial=trial, **rest)


def hanging(config: TrialConfig, *, label: str, trial: int | None = None, **rest: object) -> Row:
    """Blocks in C code: nothing but a forced kill ends it."""
    ok(config, label=label, trial=trial, **rest)
    ctypes.CDLL(None).sleep(600)
    raise AssertionError


def exiting(config: TrialConfig, *, label: str, trial: int | None = None, **rest: object) -> Row:
    """The process is gone without a word, every time."""
    ok(config, label=label, trial=trial, **rest)
    os._exit(7)


def segfaulting_once(config: TrialConfig, *, label: str, trial: int | None = None, out: Path | None = None, **rest: object) -> Row:
    """Dies by a signal in its first attempt."""
    assert out is not None
    row = ok(config, label=label, trial=trial, out=out, **rest)
    if (out.parent.parent / "executions.log").read_text().splitlines().count(str(trial)) == 1:
        os.kill(os.getpid(), 11)
    return row


def environment(config: TrialConfig, *, out: Path | None = None, **rest: object) -> Row:
    """Leaves what it sees of the machine beside its result."""
    assert out is not None
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    (out / "environment.txt").write_text(" ".join(f"{name}={os.environ.get(name)}" for name in names))
    return ok(config, out=out, **rest)


def any_of_them(config: TrialConfig, *, trial: int | None = None, **rest: object) -> Row:
    """By trial number: the ways to die, in one study."""
    kinds = {2: raising, 3: awkward, 4: nan, 5: exiting, 6: segfaulting_once, 7: hanging, 8: environment}
    return kinds.get(trial if trial is not None else -1, ok)(config, trial=trial, **rest)


# ---------------------------------------------------------------- drivers that die at a chosen moment


def die_at(point: str, count: int) -> None:
    """Make this process end at once, as if killed, at the `count`-th passage of a point of a trial's life."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    import mitigate.search.rungs as rungs
    import mitigate.search.study as study
    import mitigate.search.workers as workers

    passed = 0

    def passes() -> bool:
        nonlocal passed
        passed += 1
        return passed == count

    def around(owner: Any, name: str, when: str) -> None:
        original = getattr(owner, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            if when == "before" and passes():
                os._exit(9)
            found = original(*arguments, **options)
            if when == "after" and passes():
                os._exit(9)
            return found

        setattr(owner, name, patched)

    def half_a_line(self: Any, logs: list[dict[str, Any]]) -> None:
        if passes():
            with open(self._file_path + ".lock", "w"), open(self._file_path, "ab") as journal:
                whole = "\n".join(json.dumps(log) for log in logs)
                journal.write(whole[: len(whole) // 2].encode())
            os._exit(9)
        append(self, logs)

    what, _, when = point.partition(" ")
    if what == "write":  # workers and rungs hold the function by its name
        around(workers, "write_result", when)
        rungs.write_result = workers.write_result  # type: ignore[attr-defined]
    elif what == "link":
        around(os, "link", when)
    elif what == "append" and when == "half":
        import json

        append = JournalFileBackend.append_logs
        JournalFileBackend.append_logs = half_a_line  # type: ignore[method-assign]
    else:
        owners: dict[str, tuple[Any, str]] = {
            "propose": (study.StudyOwner, "_set_aside" if when == "before" else "propose"),
            "append": (JournalFileBackend, "append_logs"),
            "config": (study, "_write_config"),
            "decide": (optuna.Trial, "set_user_attr"),
            "tell": (optuna.Study, "tell"),
            "constraint": (optuna.Trial, "set_constraint"),
            "start": (workers, "_resolve"),
            "train": (sys.modules[staged.__module__], "write_atomic"),
        }
        around(*owners[what], when)


def serve_drivers() -> None:
    """Run a driver in a fork for each line of stdin, a JSON object, and answer with its exit status. Importing takes longer than a small search."""
    import json

    import mitigate
    from mitigate import config_files

    mitigate.registry = sys.modules["mitigate.registry"] = fake_registry()
    from rich.console import Console

    from mitigate import results
    from mitigate.search.loop import run_search

    assert results
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            config_files.PRESETS = Path(order["presets"])
            die_at(order["point"], order["count"])
            config = config_files.from_dict(SearchConfig, order["config"])
            folder = Path(order["folder"])
            run = f"fake_trials:{order['run']}"
            outcome = run_search(config, results=folder, cache=folder / "cache", inline=True, run=run, console=Console(quiet=True), command="again")
            os._exit(0 if outcome.finished else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# ---------------------------------------------------------------- trials of a cluster


def staged_dying_in_many_ways(config: TrialConfig, *, stage: Stage, out: Path, trial: int | None = None, **rest: Any) -> Row:
    """As `staged_uneven`, but the first execution of each stage of two trials in three is killed, or told to end, after it wrote its checkpoint."""
    mark = out / f"died-{stage.kind}-{stage.rung}"
    row = staged_uneven(config, stage=stage, out=out, trial=trial, **rest)
    if trial is not None and trial % 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9 if trial % 3 == 1 else 15)
        time.sleep(5)
    return row


def staged_noting(config: TrialConfig, *, stage: Stage, out: Path, cache: Path, trial: int | None = None, **rest: Any) -> Row:
    """As `staged`, with a file of the cache folder; says in `times.log` where and when it ran."""
    import json

    begin = time.time()
    assert (cache / "bases" / "base.bin").read_bytes() == b"a base"
    row = staged(config, stage=stage, out=out, trial=trial, **rest)
    time.sleep(0.4)
    node = json.loads((out / "started.json").read_text())["node"]
    _append(out.parent.parent / "times.log", f"{trial} {stage.kind} {node} {begin} {time.time()}")
    return row


def staged_in_seconds(config: TrialConfig, **rest: Any) -> Row:
    """As `staged`, a tenth of a second for ten updates at the least: two seconds and more in all. For a worker of its own."""

    at_once = write_atomic

    def slowly(path: Path, content: bytes) -> Path:
        time.sleep(0.1)
        return at_once(path, content)

    staged.__globals__["write_atomic"] = slowly
    try:
        return staged(config, **rest)
    finally:
        staged.__globals__["write_atomic"] = at_once


def drive_cluster() -> None:
    """RESULTS PRESETS TRIAL-FUNCTION CONFIG-JSON ADDRESS in `sys.argv`: run or resume one search on a cluster."""
    import json

    import mitigate
    from mitigate import config_files

    mitigate.registry = sys.modules["mitigate.registry"] = fake_registry()
    config_files.PRESETS = Path(sys.argv[2])
    from mitigate.search.loop import run_search

    config = config_files.from_dict(SearchConfig, json.loads(sys.argv[4]))
    run_search(config, results=Path(sys.argv[1]), cache=Path(sys.argv[1]) / "cache", address=sys.argv[5], run=f"fake_trials:{sys.argv[3]}")


def main() -> None:
    """`fake_trials.py RESULTS PRESETS TRIAL-FUNCTION CONFIG-JSON`: run or resume one search inline."""
    import json

    import mitigate
    from mitigate import config_files

    mitigate.registry = sys.modules["mitigate.registry"] = fake_registry()
    config_files.PRESETS = Path(sys.argv[2])
    from mitigate.search.loop import run_search

    config = config_files.from_dict(SearchConfig, json.loads(sys.argv[4]))
    outcome = run_search(config, results=Path(sys.argv[1]), cache=Path(sys.argv[1]) / "cache", inline=True, run=f"fake_trials:{sys.argv[3]}")
    print("stopped:", outcome.stopped, "ray imported:", "ray" in sys.modules)


if __name__ == "__main__":
    main()
