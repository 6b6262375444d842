"""The owner of a study: one process holds `results/<name>/`, proposes trials, and tells their results.

A study folder holds

    config.json     the canonical SearchConfig
    study.journal   Optuna's journal, see `journal`; this module alone writes it
    driver.lock     held while a driver runs, with its process id and host
    trials/NNNN/    result.json (a Row), rung-R.json on the way there, and whatever the trial writes
    orphans/        trial folders whose proposal a damaged journal lost

A proposal is sampled in an in-memory mirror and stored as one RUNNING record, so that a kill leaves a whole trial or none. Each has a fresh sampler
seeded from (seed, number), and records the finished trials that it knew, so that it can be derived again (`mitigate.search.verify`). Failed trials are told
PRUNED with the constraint "failed" = 1: TPE ignores FAIL and would propose the same again. Trials stopped at a rung are PRUNED without it. A trial that breaks
a requirement is COMPLETE, with the amount as a constraint.
"""

from __future__ import annotations

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
from optuna.trial import FrozenTrial, TrialState

from mitigate import pareto, requirements
from mitigate.config import ConfigError, VariantConfig, canonical_json, content_hash, to_dict
from mitigate.config_files import from_dict, load_variant
from mitigate.config_search import SearchConfig
from mitigate.files import write_atomic
from mitigate.requirements import Requirement
from mitigate.results import require_trials
from mitigate.rows import Row
from mitigate.search import journal as journal_file
from mitigate.search.journal import Journal
from mitigate.search.space import Check, Choice, SearchSpace, variant_key
from mitigate.search.workers import objective_values, read_result

FORMAT = 3
METRICS = tuple(objective.name.removeprefix("cost.") for objective in pareto.OBJECTIVES)  # as Optuna stores them
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = tuple("maximize" if objective.maximise else "minimize" for objective in pareto.OBJECTIVES)
HV_REFERENCE = dict(zip(("kv_kept", "throughput_ratio", "mean_accuracy", "a_min"), pareto.REFERENCE, strict=True))
CHANGEABLE = ("trials", "workers", "max_hours", "max_updates", "trial_timeout_s", "resources")  # how much and how fast, not what a trial is
RESAMPLES = 4  # proposals of the sampler before neighbours of its last one are tried: each costs a whole model, and late in a search most are repeats
NEIGHBOURS = 64  # of them; one more parameter is changed after each NEIGHBOURS_EACH
NEIGHBOURS_EACH = 16
ENUMERABLE = 5000  # a space with at most so many combinations is listed to find what is left
DRAWS = 2000  # random draws in a larger one
HISTORY = 300  # finished trials that the sampler sees besides the front: the latest. TPE's time for a proposal grows with them
REQUIRE = "SearchConfig.require"
THROUGHPUT = METRICS.index("throughput_ratio")


class StudyBusyError(ConfigError):
    """Another driver owns the study folder."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A trial to run: what is stored of it before it runs."""

    number: int
    variant: VariantConfig
    label: str
    anchor: bool
    bracket: int | None = None  # of trials that are compared at rungs


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A proposal before it is stored. `params` is None for a variant that the space does not hold."""

    variant: VariantConfig
    params: dict[str, Choice] | None
    anchor: str | None = None


class StudyOwner:
    """The one process that writes a study. A context manager; `open` builds it. That of `read_only` writes nothing: it derives, and proposes nothing."""

    def __init__(self, config: SearchConfig, folder: Path, space: SearchSpace, study: optuna.Study, lock: filelock.BaseFileLock | None) -> None:
        self.config, self.folder, self.space = config, folder, space
        self.rows: dict[int, Row] = {}  # of told trials
        self._study, self._lock = study, lock
        self.requirements = [requirements.parse(text) for text in config.require]
        self._anchors = anchor_variants(config)
        self._seen: dict[tuple[int, bool], FrozenTrial] = {}
        self._listed: list[tuple[dict[str, Choice], VariantConfig, str]] | None = None

    @classmethod
    def open(cls, config: SearchConfig, results: Path, *, space: SearchSpace | None = None) -> StudyOwner:
        """Create or resume `results/<name>`, and tell results that were written but not told.

        Raises:
            StudyBusyError: another driver runs; names its process.
            ConfigError: the folder belongs to another config (names the first difference), is damaged, or is a published extract. Nothing is changed then.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = space or SearchSpace.from_config(config)
        folder = results / config.name
        _require_same_config(folder, config)
        require_trials(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
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

    @classmethod
    def read_only(cls, config: SearchConfig, folder: Path, journal: Journal, *, space: SearchSpace) -> StudyOwner:
        """A study as its journal has it, whoever drives it meanwhile. Results are not told.

        Raises:
            ConfigError: the journal is of another study or config.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return cls(config, folder, space, _study_in(journal.storage(), journal.path, config, space), lock=None)

    def __enter__(self) -> StudyOwner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another driver in."""
        if self._lock is not None:
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

    def known(self) -> list[int] | None:
        """Numbers of the trials that the next proposal may know: the finished ones, or while `reproducible` a fixed set. None while one of it still runs."""
        trials = self._trials()
        finished = [t.number for t in trials if t.state.is_finished()]
        if not self.config.reproducible:
            return finished
        horizon = self._horizon(len(trials))
        return list(range(horizon)) if set(range(horizon)) <= set(finished) else None

    def _horizon(self, number: int) -> int:
        """How many trials a reproducible proposal waits for. All that come after are as if they were running."""
        beyond = number - len(self._anchors)
        if beyond < 0:
            return 0
        if not self.config.rungs.updates:
            return max(0, number - self.config.lag + 1)
        size = self.config.rungs.bracket
        before = beyond // size - 1  # brackets that it knows
        return len(self._anchors) + before * size if before > 0 else 0

    def propose(self, bracket: int | None = None) -> Proposal | None:
        """Store the next trial: an anchor, then the sampler's choice among variants not proposed before. None when there is none left.

        Args:
            bracket: recorded; None for an anchor whatever is given.

        Raises:
            RuntimeError: `known` is None: trials that the proposal must know still run.
        """
        assert self._lock is not None, "a study that is only read proposes nothing"
        trials, known = self._trials(), self.known()
        if known is None:
            raise RuntimeError("StudyOwner.propose: trials that this proposal must know still run")
        number = len(trials)
        draft = self.draft(trials, known)
        if draft is None:
            return None
        params = draft.params or {}
        attributes = self._attributes(draft, number, known)
        if draft.anchor is None and bracket is not None:
            attributes["bracket"] = bracket
        record = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=self._distributions(params),
            user_attrs=attributes,
        )
        self._set_aside(number)
        self._study.add_trial(record)
        return _proposal(self._trials()[number])

    def next_is_anchor(self) -> bool:
        """Whether the next proposal is one of the config's anchors."""
        return self.total < len(self._anchors)

    def brackets(self) -> dict[int, list[int]]:
        """Numbers of the trials of each bracket."""
        found: dict[int, list[int]] = {}
        for trial in self._trials():
            if (bracket := trial.user_attrs.get("bracket")) is not None:
                found.setdefault(bracket, []).append(trial.number)
        return found

    def decision(self, number: int, rung: int) -> bool | None:
        """Whether a trial went on from a rung; None before that is decided."""
        found = self._trials()[number].user_attrs.get(f"rung:{rung}")
        return None if found is None else bool(found["promoted"])

    def kept(self, number: int) -> float:
        """KV bytes of a trial as a fraction of full attention's, known since it was proposed."""
        return float(self._trials()[number].user_attrs["kv_kept"])

    def is_finished(self, number: int) -> bool:
        """Whether a trial was told."""
        return self._trials()[number].state.is_finished()

    def decide(self, number: int, rung: int, *, promoted: bool, members: list[int]) -> None:
        """Record whether a running trial goes on from a rung, and beside whom it was judged. The first decision stays."""
        trial = self._trials()[number]
        if not trial.state.is_finished() and f"rung:{rung}" not in trial.user_attrs:
            optuna.Trial(self._study, trial._trial_id).set_user_attr(f"rung:{rung}", {"promoted": promoted, "members": members})

    def tell(self, row: Row) -> None:
        """Store a result: COMPLETE with the objectives, or PRUNED, with the constraint "failed" unless it was stopped at a rung. A trial already told stays."""
        if row.trial is None:
            raise ValueError("StudyOwner.tell: Row.trial must be a trial number, got None")
        self.rows[row.trial] = row
        trial = self._trials()[row.trial]
        if trial.state.is_finished():
            return
        constraints = {"failed": 1.0} if row.status == "infeasible" else {}
        if row.status == "ok":
            constraints = {str(wanted): requirements.violation(row, wanted) for wanted in self.requirements}
        for key, value in constraints.items():
            if key not in trial.constraints:
                optuna.Trial(self._study, trial._trial_id).set_constraint(key, value)
        if row.status == "ok":
            self._study.tell(trial.number, objective_values(row), state=TrialState.COMPLETE)
        else:
            self._study.tell(trial.number, state=TrialState.PRUNED)

    def trials(self) -> list[FrozenTrial]:
        """Optuna's records of all trials, by number; not to be changed."""
        return self._trials()

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _tell_what_is_written(self) -> None:
        for trial in self._trials():
            row = read_result(self.trial_folder(trial.number))
            if row is not None:
                self.tell(row)

    def draft(self, trials: list[FrozenTrial], known: list[int]) -> Draft | None:
        """What follows `trials` for a proposer that knows the results of `known` alone. Depends on nothing else, so that a record can be checked."""
        if len(trials) < len(self._anchors):
            name, variant = self._anchors[len(trials)]
            return Draft(variant=variant, params=self.space.to_params(variant), anchor=name)
        seed, seen = self._seed(len(trials)), {str(t.user_attrs["variant_key"]) for t in trials}
        return self._sampled(trials, set(known), seed, seen) or self._left_over(seed, seen)

    def _seed(self, number: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0])

    def _sampled(self, trials: list[FrozenTrial], known: set[int], seed: int, seen: set[str]) -> Draft | None:
        metrics = [i for i in range(len(METRICS)) if i != THROUGHPUT or not self.config.reproducible]
        mirror = optuna.create_study(directions=[DIRECTIONS[i] for i in metrics], sampler=self._sampler(seed))
        if self.config.sampler != "random":
            mirror.add_trials([self._as_known(trial, trial.number in known, metrics) for trial in _recent(trials, known, metrics)])
        rng = random.Random(seed)
        params: dict[str, Choice] = {}
        for attempt in range(RESAMPLES + NEIGHBOURS):
            if attempt < RESAMPLES:
                params = drawn = self.space.suggest(mirror.ask())  # a refused one stays RUNNING there, which turns the sampler away from it
            else:
                drawn = self.space.neighbour(params, rng, changes=1 + (attempt - RESAMPLES) // NEIGHBOURS_EACH)
            variant = self._usable(drawn)
            if variant is not None and variant_key(variant) not in seen:
                return Draft(variant=variant, params=drawn)
        return None

    def _as_known(self, trial: FrozenTrial, told: bool, metrics: list[int]) -> FrozenTrial:
        """What samplers read of a trial, in these metrics; one that is not told still runs. Kept: a finished trial does not change."""
        seen = self._seen.get((trial.number, told))
        if seen is None:
            seen = self._seen[trial.number, told] = optuna.trial.create_trial(
                state=trial.state if told else TrialState.RUNNING,
                values=[trial.values[i] for i in metrics] if told and trial.state == TrialState.COMPLETE else None,
                params=trial.params,
                distributions=trial.distributions,
                system_attrs=trial.system_attrs if told else None,
            )
        return seen

    def _usable(self, params: dict[str, Choice]) -> VariantConfig | None:
        """The variant of a set of choices; None where they do not go together, or where its KV bytes, which are exact before it runs, break a requirement."""
        variant = self.space.usable(params)
        return variant if variant is not None and self._affordable(variant) else None

    def _affordable(self, variant: VariantConfig) -> bool:
        return all(wanted.holds(exact) for wanted in self.requirements if (exact := exact_value(wanted, variant, self.config)) is not None)

    def _left_over(self, seed: int, seen: set[str]) -> Draft | None:
        """A random variant that was not proposed; None when the space is exhausted."""
        rng = random.Random(seed)
        if self.space.bound() > ENUMERABLE:
            for _ in range(DRAWS):
                params = self.space.random(rng)
                variant = self._usable(params)
                if variant is not None and variant_key(variant) not in seen:
                    return Draft(variant=variant, params=params)
            return None
        if self._listed is None:
            self._listed = [(params, variant, variant_key(variant)) for params, variant in self.space.variants() if self._affordable(variant)]
        unseen = [(params, variant) for params, variant, key in self._listed if key not in seen]
        if not unseen:
            return None
        params, variant = rng.choice(unseen)
        return Draft(variant=variant, params=params)

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        if self.config.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(10, 2 * len(self.space.choices)))

    def _distributions(self, params: dict[str, Choice]) -> dict[str, BaseDistribution]:
        return {key: CategoricalDistribution(self.space.choices[key]) for key in params}

    def _attributes(self, draft: Draft, number: int, known: list[int]) -> dict[str, Any]:
        from mitigate import registry

        return {
            "number": number,
            "label": draft.anchor or registry.describe(draft.variant),
            "anchor": draft.anchor,
            "variant": canonical_json(draft.variant),
            "variant_key": variant_key(draft.variant),
            "kv_kept": float(registry.kept_fraction(draft.variant, layers=self.config.trial.base.layers)),
            "seed": self.config.trial.seed,
            "sampler_seed": self._seed(number),
            "known": known,
        }

    def _set_aside(self, number: int) -> None:
        """Move a folder that a lost journal record left behind out of `trials/`, where its result would count beside that of the new trial."""
        folder, orphans = self.trial_folder(number), self.folder / "orphans"
        if folder.exists() and any(folder.iterdir()):  # a checkpoint alone would be gone on from
            orphans.mkdir(exist_ok=True)
            folder.rename(journal_file.unused(orphans, folder.name))


def anchor_variants(config: SearchConfig) -> list[tuple[str, VariantConfig]]:
    """Name and variant of each anchor; a later one that means the same model as an earlier one is dropped."""
    found: dict[str, tuple[str, VariantConfig]] = {}
    for name in config.anchors:
        variant = load_variant(name)
        found.setdefault(variant_key(variant), (name, variant))
    return list(found.values())


def registry_check(config: SearchConfig) -> Check:
    """Refuses what the registry refuses for the config's base. The registry, and with it torch, is imported on first use."""

    def check(variant: VariantConfig) -> None:
        from mitigate import registry

        registry.check(variant, layers=config.trial.base.layers)

    return check


def exact_value(wanted: Requirement, variant: VariantConfig, config: SearchConfig) -> float | None:
    """What a requirement is about, where that is known of a variant before it runs: its KV bytes. None otherwise."""
    from mitigate import registry

    base = config.trial.base
    full = 2 * base.kv_heads * base.head_dim * 4 * base.layers  # float32
    factor = {"cost.kv_kept": 1.0, "cost.kv_bytes_per_token": float(full)}.get(requirements.planned_column(wanted.column))
    return None if factor is None else factor * float(registry.kept_fraction(variant, layers=base.layers))


def check_requirements(config: SearchConfig, space: SearchSpace) -> None:
    """ConfigError where a requirement is malformed, names no column, or cannot be met by any variant of the space."""
    wanted = [requirements.parse(text, option=REQUIRE) for text in config.require]
    for one in wanted:
        requirements.check_possible(one, option=REQUIRE)
    exact = [one for one in wanted if requirements.planned_column(one.column) in ("cost.kv_kept", "cost.kv_bytes_per_token")]
    if not exact or not space.choices:
        return
    least = [float("inf")] * len(exact)
    most = [float("-inf")] * len(exact)
    rng = random.Random(0)
    every = space.bound() <= ENUMERABLE
    drawn = (variant for _, variant in space.variants()) if every else (space.usable(space.random(rng)) for _ in range(DRAWS))
    for variant in drawn:
        if variant is None:
            continue
        values = [exact_value(one, variant, config) or 0.0 for one in exact]
        if all(one.holds(value) for one, value in zip(exact, values, strict=True)):
            return
        least, most = [min(a, b) for a, b in zip(least, values, strict=True)], [max(a, b) for a, b in zip(most, values, strict=True)]
    spans = ", ".join(f"{one.column} runs from {low:.4g} to {high:.4g}" for one, low, high in zip(exact, least, most, strict=True))
    raise ConfigError(f"{REQUIRE}: no variant of the space meets {' and '.join(map(str, exact))}; {spans}")


def _recent(trials: list[FrozenTrial], known: set[int], metrics: list[int]) -> list[FrozenTrial]:
    """The trials less the oldest known ones: the last `HISTORY` of them stay, and those on the front in these metrics."""
    old = sorted(known)[:-HISTORY] if len(known) > HISTORY else []
    if not old:
        return trials
    complete = [t for t in trials if t.number in known and t.state == TrialState.COMPLETE and not any(v > 0 for v in t.constraints.values())]
    best = pareto.non_dominated(np.array([[t.values[i] for i in metrics] for t in complete]), [pareto.MAXIMISE[i] for i in metrics])
    dropped = set(old) - {t.number for t, keep in zip(complete, best, strict=True) if keep}
    return [t for t in trials if t.number not in dropped]


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
        bracket=attributes.get("bracket"),
    )


# ---------------------------------------------------------------- the folder


def lock_folder(folder: Path) -> filelock.BaseFileLock:
    """The lock of a study's driver, held; StudyBusyError names the process that holds it already."""
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
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ConfigError(f"results folder {folder} belongs to another config: {found[0]}{more}; give another --results folder or the search another name")


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


def _show(value: Any, width: int = 48) -> str:
    text = "nothing" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"


# ---------------------------------------------------------------- the journal


def _load(folder: Path, config: SearchConfig, space: SearchSpace) -> optuna.Study:
    return _study_in(journal_file.open_journal(folder), folder / journal_file.FILE, config, space)


def _study_in(storage: JournalStorage, path: Path, config: SearchConfig, space: SearchSpace) -> optuna.Study:
    """The study of a journal, or a new one where it holds none."""
    names = optuna.get_all_study_names(storage)
    if names not in ([], [config.name]):
        raise ConfigError(f"{path} holds the study {', '.join(names)}, expected {config.name}")
    sampler = optuna.samplers.RandomSampler()  # never asked: proposals come from a mirror
    if names:
        study = optuna.load_study(study_name=config.name, storage=storage, sampler=sampler)
    else:
        study = optuna.create_study(study_name=config.name, storage=storage, sampler=sampler, directions=DIRECTIONS)
    _require_same_study(study, path.parent, _guard(config, space))
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
