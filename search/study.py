"""The owner of a study: one process holds `results/<name>/`, proposes trials, and tells their results.

A study folder holds

    config.json     the canonical SearchConfig
    study.journal   Optuna's journal; this module alone writes it
    driver.lock     held while a driver runs, with its process id and host
    trials/NNNN/    result.json (a Row) and whatever the trial writes
    orphans/        trial folders whose proposal a damaged journal lost

A proposal is sampled in an in-memory mirror and stored as one RUNNING record, so that a kill leaves a whole trial or none. Each has a fresh sampler
seeded from (seed, number), and records the finished trials that it knew. Failed trials are told PRUNED with the constraint "failed" = 1: TPE ignores
FAIL and would propose the same again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import filelock
import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from mitigate import pareto
from mitigate.config import ConfigError, SearchConfig, VariantConfig, canonical_json, content_hash, from_dict, load_variant, to_dict
from mitigate.files import write_atomic
from mitigate.rows import Row
from mitigate.search.space import Choice, SearchSpace, variant_key
from mitigate.search.workers import objective_values, read_result, result_path

FORMAT = 1
METRICS = tuple(objective.name.removeprefix("cost.") for objective in pareto.OBJECTIVES)  # as Optuna stores them
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = tuple("maximize" if objective.maximise else "minimize" for objective in pareto.OBJECTIVES)
HV_REFERENCE = dict(zip(("kv_kept", "throughput_ratio", "mean_accuracy", "a_min"), pareto.REFERENCE, strict=True))
CHANGEABLE = ("trials", "workers", "max_hours", "trial_timeout_s")  # how much and how fast, not what a trial is
RESAMPLES = 50  # proposals of the sampler before chance decides
ENUMERABLE = 5000  # a space with at most so many combinations is listed to find what is left
DRAWS = 2000  # random draws in a larger one


class StudyBusyError(ConfigError):
    """Another driver owns the study folder."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A trial to run: what is stored of it before it runs."""

    number: int
    variant: VariantConfig
    label: str
    anchor: bool


@dataclass(frozen=True, kw_only=True)
class _Draft:
    variant: VariantConfig
    params: dict[str, Choice] | None  # None: the space does not hold the variant
    anchor: str | None = None


class StudyOwner:
    """The one process that writes a study. A context manager; `open` builds it."""

    def __init__(self, config: SearchConfig, folder: Path, space: SearchSpace, study: optuna.Study, lock: filelock.BaseFileLock) -> None:
        self.config, self.folder, self.space = config, folder, space
        self.rows: dict[int, Row] = {}  # of told trials
        self._study, self._lock = study, lock
        self._anchors = anchor_variants(config)
        self._listed: list[tuple[dict[str, Choice], VariantConfig, str]] | None = None

    @classmethod
    def open(cls, config: SearchConfig, results: Path, *, space: SearchSpace | None = None) -> StudyOwner:
        """Create or resume `results/<name>`, and tell results that were written but not told.

        Raises:
            StudyBusyError: another driver runs; names its process.
            ConfigError: the folder belongs to another config (lists the differences) or is damaged. Nothing is changed then.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = space or SearchSpace.from_config(config)
        folder = results / config.name
        _require_same_config(folder, config)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            _require_same_config(folder, config)
            study = _load(folder, config, space)
            _write_config(folder, config)
            owner = cls(config, folder, space, study, lock)
            owner._tell_what_is_written()
        except BaseException:
            lock.release()
            raise
        return owner

    def __enter__(self) -> StudyOwner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another driver in."""
        self._lock.release()

    @property
    def total(self) -> int:
        """Trials of the study, running, failed and anchors counted."""
        return len(self._trials())

    def left(self) -> int:
        """Trials that may still be proposed."""
        return max(0, self.config.trials - self.total)

    def running(self) -> list[Proposal]:
        """Trials proposed but not told, by number."""
        return [_proposal(t) for t in self._trials() if t.state == TrialState.RUNNING]

    def trial_folder(self, number: int) -> Path:
        """`trials/NNNN`, not created."""
        return self.folder / "trials" / f"{number:04d}"

    def propose(self) -> Proposal | None:
        """Store the next trial: an anchor, then the sampler's choice among variants not proposed before. None when there is none left."""
        trials = self._trials()
        number = len(trials)
        seed = int(np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0])
        draft = self._draft(trials, seed)
        if draft is None:
            return None
        params = draft.params or {}
        record = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=self._distributions(params),
            user_attrs=self._attributes(draft, number, seed, known=[t.number for t in trials if t.state.is_finished()]),
        )
        self._set_aside(number)
        self._study.add_trial(record)
        return _proposal(self._trials()[number])

    def tell(self, row: Row) -> None:
        """Store a result: COMPLETE with the objectives, or PRUNED with the constraint "failed". A trial already told stays as it is."""
        if row.trial is None:
            raise ValueError("StudyOwner.tell: Row.trial must be a trial number, got None")
        self.rows[row.trial] = row
        trial = self._trials()[row.trial]
        if trial.state.is_finished():
            return
        if row.status == "ok":
            self._study.tell(trial.number, objective_values(row), state=TrialState.COMPLETE)
            return
        if "failed" not in trial.constraints:
            optuna.Trial(self._study, trial._trial_id).set_constraint("failed", 1.0)
        self._study.tell(trial.number, state=TrialState.PRUNED)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _tell_what_is_written(self) -> None:
        for trial in self._trials():
            row = read_result(self.trial_folder(trial.number))
            if row is not None:
                self.tell(row)

    def _draft(self, trials: list[FrozenTrial], seed: int) -> _Draft | None:
        if len(trials) < len(self._anchors):
            name, variant = self._anchors[len(trials)]
            return _Draft(variant=variant, params=self.space.to_params(variant), anchor=name)
        seen = {str(t.user_attrs["variant_key"]) for t in trials}
        return self._sampled(trials, seed, seen) or self._left_over(seed, seen)

    def _sampled(self, trials: list[FrozenTrial], seed: int, seen: set[str]) -> _Draft | None:
        mirror = optuna.create_study(directions=DIRECTIONS, sampler=self._sampler(seed))
        mirror.add_trials(trials)
        for _ in range(RESAMPLES):
            params = self.space.suggest(mirror.ask())  # a refused one stays RUNNING there, which turns the sampler away from it
            variant = self.space.usable(params)
            if variant is not None and variant_key(variant) not in seen:
                return _Draft(variant=variant, params=params)
        return None

    def _left_over(self, seed: int, seen: set[str]) -> _Draft | None:
        """A random variant that was not proposed; None when the space is exhausted."""
        rng = random.Random(seed)
        if self.space.bound() > ENUMERABLE:
            for _ in range(DRAWS):
                params = self.space.random(rng)
                variant = self.space.usable(params)
                if variant is not None and variant_key(variant) not in seen:
                    return _Draft(variant=variant, params=params)
            return None
        if self._listed is None:
            self._listed = [(params, variant, variant_key(variant)) for params, variant in self.space.variants()]
        unseen = [(params, variant) for params, variant, key in self._listed if key not in seen]
        if not unseen:
            return None
        params, variant = rng.choice(unseen)
        return _Draft(variant=variant, params=params)

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        if self.config.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(10, 2 * len(self.space.choices)))

    def _distributions(self, params: dict[str, Choice]) -> dict[str, BaseDistribution]:
        return {key: CategoricalDistribution(self.space.choices[key]) for key in params}

    def _attributes(self, draft: _Draft, number: int, seed: int, known: list[int]) -> dict[str, Any]:
        from mitigate import registry

        return {
            "number": number,
            "label": draft.anchor or registry.describe(draft.variant),
            "anchor": draft.anchor,
            "variant": canonical_json(draft.variant),
            "variant_key": variant_key(draft.variant),
            "kv_kept": float(registry.kept_fraction(draft.variant)),
            "seed": self.config.trial.seed,
            "sampler_seed": seed,
            "known": known,
        }

    def _set_aside(self, number: int) -> None:
        """Move a folder that a lost journal record left behind out of `trials/`, where its result would count beside that of the new trial."""
        folder, orphans = self.trial_folder(number), self.folder / "orphans"
        if result_path(folder).exists():
            orphans.mkdir(exist_ok=True)
            folder.rename(_unused(orphans, folder.name))


def anchor_variants(config: SearchConfig) -> list[tuple[str, VariantConfig]]:
    """Name and variant of each anchor; a later one that means the same model as an earlier one is dropped."""
    found: dict[str, tuple[str, VariantConfig]] = {}
    for name in config.anchors:
        variant = load_variant(name)
        found.setdefault(variant_key(variant), (name, variant))
    return list(found.values())


def check_anchors(config: SearchConfig, space: SearchSpace) -> None:
    """ConfigError that names an anchor which the trial or `space.check` refuses."""
    for name, variant in anchor_variants(config):
        try:
            space.trial_config(variant)
            if space.check is not None:
                space.check(variant)
        except ConfigError as error:
            raise ConfigError(f"SearchConfig.anchors {name!r}: {error}") from None


def _proposal(trial: FrozenTrial) -> Proposal:
    attributes = trial.user_attrs
    return Proposal(
        number=trial.number,
        variant=from_dict(VariantConfig, json.loads(attributes["variant"])),
        label=attributes["label"],
        anchor=attributes["anchor"] is not None,
    )


# ---------------------------------------------------------------- the folder


def _lock(folder: Path) -> filelock.BaseFileLock:
    path = folder / "driver.lock"
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        owner = path.read_text(encoding="utf-8").strip() or "another process"
        raise StudyBusyError(f"{folder} is in use: {owner} runs a search in it; wait for it or stop it") from None
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return lock


def _write_config(folder: Path, config: SearchConfig) -> None:
    path, content = folder / "config.json", f"{canonical_json(config)}\n".encode()
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content)


def _require_same_config(folder: Path, config: SearchConfig) -> None:
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    _require_none(folder, differences(_fixed(stored), _fixed(to_dict(config))))


def _require_none(folder: Path, found: list[str]) -> None:
    if found:
        raise ConfigError(f"results folder {folder} belongs to another config: {'; '.join(found)}; give the search another name or move the folder away")


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in CHANGEABLE}


def differences(stored: Any, given: Any, prefix: str = "") -> list[str]:
    """`key stored -> given` for each leaf of nested dicts that differs."""
    if not (isinstance(stored, dict) and isinstance(given, dict)):
        return [] if stored == given else [f"{prefix} {_show(stored)} -> {_show(given)}"]
    found = []
    for key in sorted(stored.keys() | given.keys()):
        found += differences(stored.get(key, _ABSENT), given.get(key, _ABSENT), f"{prefix}.{key}" if prefix else str(key))
    return found


_ABSENT = object()


def _show(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)


# ---------------------------------------------------------------- the journal


def _load(folder: Path, config: SearchConfig, space: SearchSpace) -> optuna.Study:
    path = folder / "study.journal"
    _drop_stale_locks(path)  # the driver lock is ours, so no driver holds them
    repair_journal(path)
    storage = JournalStorage(JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    if names not in ([], [config.name]):
        raise ConfigError(f"{path} holds the study {', '.join(names)}, expected {config.name}")
    sampler = optuna.samplers.RandomSampler()  # never asked: proposals come from a mirror
    if names:
        study = optuna.load_study(study_name=config.name, storage=storage, sampler=sampler)
    else:
        study = optuna.create_study(study_name=config.name, storage=storage, sampler=sampler, directions=DIRECTIONS)
    _require_same_study(study, folder, _guard(config, space))
    return study


def _guard(config: SearchConfig, space: SearchSpace) -> dict[str, Any]:
    """What must not change between drivers of one study."""
    fixed = json.dumps(_fixed(to_dict(config)), sort_keys=True, separators=(",", ":"))
    return {
        "format": FORMAT,
        "directions": list(DIRECTIONS),
        "metric_names": list(METRICS),
        "space": space.fingerprint(),
        "config": fixed,
        "anchors": {name: content_hash(variant) for name, variant in anchor_variants(config)},
        "hv_reference": HV_REFERENCE,
    }


def _require_same_study(study: optuna.Study, folder: Path, guard: dict[str, Any]) -> None:
    stored = study.user_attrs.get("guard")
    if stored is None and not study.get_trials(deepcopy=False):  # new, or killed while it was created
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(guard["metric_names"])
        study.set_user_attr("guard", guard)
        return
    found = differences(_readable(stored or {}), _readable(guard))
    directions = [direction.name.lower() for direction in study.directions]
    found += differences(directions, guard["directions"], "directions")
    _require_none(folder, found)


def _readable(guard: dict[str, Any]) -> dict[str, Any]:
    return guard | {"config": json.loads(guard.get("config", "{}"))}


def _drop_stale_locks(path: Path) -> None:
    for left in (path.parent / f"{path.name}.lock", *path.parent.glob(f"{path.name}.lock*.rename")):
        with contextlib.suppress(FileNotFoundError):
            left.unlink()


def repair_journal(path: Path) -> Path | None:
    """Cut off a last line that a kill left incomplete, after a copy; a whole record that lacks its newline gets it.

    Returns:
        The copy, None where nothing was cut.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    data = path.read_bytes() if path.exists() else b""
    lines = data.splitlines(keepends=True)
    bad = [i for i, line in enumerate(lines) if not _is_record(line)]
    if not bad:
        if data and not data.endswith(b"\n"):
            _append_newline(path)
        return None
    if bad != [len(lines) - 1]:
        raise ConfigError(f"{path} is damaged in line {bad[0] + 1} of {len(lines)}; restore it from a copy or start under another name")
    copy = _unused(path.parent, f"{path.name}.torn")
    copy.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(len(data) - len(lines[-1]))
        file.flush()
        os.fsync(file.fileno())
    return copy


def _append_newline(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _unused(parent: Path, name: str) -> Path:
    return next(path for i in range(1, 10_000) if not (path := parent / f"{name}.{i}").exists())
