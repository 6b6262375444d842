"""Trial functions that need no model: analytic scores, and the ways a trial can die. Run as a script, one search of them without Ray or torch."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import types
from pathlib import Path

from mitigate.config import ConfigError, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.rows import Cost, Interval, Row


def fake_registry() -> types.ModuleType:
    """A stand-in for `mitigate.registry` that imports no torch."""
    module = types.ModuleType("mitigate.registry")
    module.describe = lambda variant: f"w{variant.window}s{variant.stride} {variant.gate}"
    module.kept_fraction = lambda variant: 1.0 / variant.stride if variant.compress else 1.0

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


def ok(config: TrialConfig, *, label: str, trial: int | None = None, anchor: bool = False, out: Path | None = None, cache: Path | None = None) -> Row:
    """At once; says so in `executions.log` of the study folder."""
    if out is not None:
        with (out.parent.parent / "executions.log").open("a") as log:
            log.write(f"{trial}\n")
    return make_row(config, label=label, trial=trial, anchor=anchor)


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


def main() -> None:
    """`fake_trials.py RESULTS PRESETS TRIAL-FUNCTION CONFIG-JSON`: run or resume one search inline."""
    import json

    import mitigate
    import mitigate.config as config_module

    mitigate.registry = sys.modules["mitigate.registry"] = fake_registry()
    config_module.PRESETS = Path(sys.argv[2])
    from mitigate.search.loop import run_search

    config = config_module.from_dict(config_module.SearchConfig, json.loads(sys.argv[4]))
    outcome = run_search(config, results=Path(sys.argv[1]), cache=Path(sys.argv[1]) / "cache", inline=True, run=f"fake_trials:{sys.argv[3]}")
    print("stopped:", outcome.stopped, "ray imported:", "ray" in sys.modules)


if __name__ == "__main__":
    main()
