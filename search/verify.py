"""Derive every proposal and every promotion of a study again from its record.

A proposal is a function of the config, of the trials before it and of the results that it knew; both are recorded with it. So a record that was edited,
a sampler of another version, or a proposal that depended on anything else shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mitigate.config import ConfigError
from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig
from mitigate.results import read_config
from mitigate.search.rungs import derived_promotions
from mitigate.search.space import SearchSpace, variant_key
from mitigate.search.study import StudyOwner, registry_check


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was derived again, and in a line each what differs."""

    proposals: int
    promotions: int
    differences: tuple[str, ...]


def verify_study(folder: Path, *, check: bool = True) -> Verified:
    """Check the study in a folder. It is opened as a driver opens it: results that were written and not told are told first.

    Args:
        check: ask the registry whether variants are usable, as the search did.

    Raises:
        ConfigError: the folder holds no study, is damaged, or is in use.
    """
    config = from_dict(SearchConfig, read_config(folder))
    space = SearchSpace.from_config(config, check=registry_check(config) if check else None)
    if folder.name != config.name:
        raise ConfigError(f"{folder} holds the study {config.name}; give the folder that name to check it")
    with StudyOwner.open(config, folder.parent, space=space) as owner:
        found = _proposals(owner)
        promotions, wrong = derived_promotions(owner)
        return Verified(proposals=owner.total, promotions=promotions, differences=(*found, *wrong))


def _proposals(owner: StudyOwner) -> list[str]:
    found = []
    trials = owner.trials()
    for number, trial in enumerate(trials):
        known = [int(n) for n in trial.user_attrs["known"]]
        draft = owner.draft(trials[:number], known)
        if draft is None:
            found.append(f"trial {number}: recorded {trial.user_attrs['label']}, derived nothing: the space was exhausted")
        elif variant_key(draft.variant) != trial.user_attrs["variant_key"] or (draft.params or {}) != trial.params:
            found.append(f"trial {number}: recorded {trial.user_attrs['label']} {trial.params}, derived {draft.params}")
    return found
