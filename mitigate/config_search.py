"""Configs of a search: its rungs, what a trial takes from a cluster, and all of it together."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from pydantic.dataclasses import dataclass

from mitigate.config import STRICT, TrialConfig, require


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RungsConfig:
    """Cheaper looks at a trial before it gets its whole budget (successive halving). Anchors skip them.

    Args:
        updates: fine-tuning updates after which a trial pauses and is scored, rising, all below `trial.train.updates`; none for no rungs.
        prompts: logical prompts of the sweep at each rung; `trial.score.prompts` where left out.
        eta: of the trials of a bracket that reach a rung, the best 1/eta go on.
        bracket: trials that are compared with each other.
    """

    updates: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    eta: int = 3
    bracket: int = 9

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise((0, *self.updates)))
        require(rising, "RungsConfig.updates", "rising, from at least 1", list(self.updates))
        as_long = len(self.prompts) in (0, len(self.updates))
        require(as_long, "RungsConfig.prompts", f"one number for each of the {len(self.updates)} rungs, or left out", list(self.prompts))
        require(all(count >= 2 for count in self.prompts), "RungsConfig.prompts", "at least 2 each (cross-fitting halves them)", list(self.prompts))
        require(self.eta >= 2, "RungsConfig.eta", "at least 2", self.eta)
        require(self.bracket >= self.eta, "RungsConfig.bracket", f"at least eta ({self.eta})", self.bracket)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResourcesConfig:
    """What one running trial takes from a Ray cluster.

    Args:
        cpus: CPU cores, and torch threads.
        gpus: GPUs; a fraction shares one. 0 hides every GPU from the trial.
        memory_gib: GiB of memory that must be free to start; not a limit once it runs. None for no demand.
    """

    cpus: int = 1
    gpus: float = 0.0
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        require(self.cpus >= 1, "ResourcesConfig.cpus", "at least 1", self.cpus)
        require(self.gpus >= 0, "ResourcesConfig.gpus", "at least 0", self.gpus)
        require(self.gpus <= 1 or self.gpus == int(self.gpus), "ResourcesConfig.gpus", "a fraction of one GPU or a whole number", self.gpus)
        require(self.memory_gib is None or self.memory_gib > 0, "ResourcesConfig.memory_gib", "above 0", self.memory_gib)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SearchConfig:
    """A search: anchors first, then `trials` in all, proposed by the sampler over `space`.

    Args:
        name: folder under `results/`.
        trials: total number of trials; anchors, failures and trials stopped at a rung counted.
        workers: trials that run at once.
        seed: seeds the sampler; trial seeds are `trial.seed`.
        anchors: variant presets that run first, in this order.
        space: choices of each searched parameter (see `mitigate.search.space`).
        sampler: "tpe" or "random".
        require: what a trial must meet, such as "kv_kept <= 0.15" (see `mitigate.requirements`). A variant whose KV bytes break one is never proposed; a
            finished trial that breaks one is kept, and the sampler is told by how much.
        reproducible: the same proposals whatever the workers' timing. Each waits for a fixed set of earlier trials, and the sampler does not see throughput,
            which is never measured twice the same.
        lag: while `reproducible` and without rungs, trial n knows the trials up to n - lag. Those must have their costs measured, so
            workers wait for each other; a larger lag, or rungs, keeps them busy. With rungs, a trial knows the anchors and the brackets up to the last but
            one, and those of the first two brackets know nothing.
        max_hours: stop proposing after this many hours of one call, None for no limit.
        max_updates: stop proposing once the trials have done this many fine-tuning updates together, None for no limit.
        trial_timeout_s: a stage of a trial (training and scoring up to a rung, or measuring costs) that runs longer makes it infeasible.
        max_consecutive_failures: stop the search, with the first error, after so many in a row.
        rungs: cheaper looks at a trial before it gets its whole budget.
        resources: what one trial takes.
        trial: the template of every trial; its variant is replaced.
    """

    name: str
    trials: int
    workers: int = 2
    seed: int = 0
    anchors: tuple[str, ...] = ("full", "w8s8")
    space: dict[str, tuple[str | int | float, ...]] = dataclasses.field(default_factory=dict)
    sampler: Literal["tpe", "random"] = "tpe"
    require: tuple[str, ...] = ()
    reproducible: bool = False
    lag: int = 4
    max_hours: float | None = None
    max_updates: int | None = None
    trial_timeout_s: float = 1800.0
    max_consecutive_failures: int = 5
    rungs: RungsConfig = dataclasses.field(default_factory=RungsConfig)
    resources: ResourcesConfig = dataclasses.field(default_factory=ResourcesConfig)
    trial: TrialConfig = dataclasses.field(default_factory=TrialConfig)

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "").replace(".", "").isalnum() and not self.name.startswith(".")
        require(plain, "SearchConfig.name", "letters, digits, '-', '_' and '.', not starting with '.'", self.name)
        require(self.trials >= 1, "SearchConfig.trials", "at least 1", self.trials)
        require(self.workers >= 1, "SearchConfig.workers", "at least 1", self.workers)
        require(self.seed >= 0, "SearchConfig.seed", "at least 0", self.seed)
        require(self.lag >= 1, "SearchConfig.lag", "at least 1", self.lag)
        require(len(set(self.anchors)) == len(self.anchors), "SearchConfig.anchors", "distinct", list(self.anchors))
        require(len(set(self.require)) == len(self.require), "SearchConfig.require", "distinct", list(self.require))
        for key, choices in self.space.items():
            require(len(choices) >= 1, f"SearchConfig.space.{key}", "a list of at least one choice", list(choices))
            require(len(set(choices)) == len(choices), f"SearchConfig.space.{key}", "distinct choices", list(choices))
        require(self.max_hours is None or self.max_hours > 0, "SearchConfig.max_hours", "above 0", self.max_hours)
        require(self.max_updates is None or self.max_updates > 0, "SearchConfig.max_updates", "above 0", self.max_updates)
        require(self.trial_timeout_s > 0, "SearchConfig.trial_timeout_s", "above 0", self.trial_timeout_s)
        require(self.max_consecutive_failures >= 1, "SearchConfig.max_consecutive_failures", "at least 1", self.max_consecutive_failures)
        whole = self.trial.train.updates
        require(
            not self.rungs.updates or self.rungs.updates[-1] < whole, "RungsConfig.updates", f"below TrainConfig.updates ({whole})", list(self.rungs.updates)
        )
