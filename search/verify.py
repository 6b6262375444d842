"""Derive every proposal and every promotion of a study again from its record.

A proposal is a function of the config, of the trials before it and of the results that it knew; both are recorded with it. So a record that was edited,
a sampler of another version, or a proposal that depended on anything else shows as a difference; and so does a result whose proposal the record lost.
Nothing is written, and no lock is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig
from mitigate.results import read_config
from mitigate.search.journal import Journal, read_journal
from mitigate.search.rungs import derived_promotions
from mitigate.search.space import SearchSpace, variant_key
from mitigate.search.study import StudyOwner, registry_check


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was derived again, and in a line each what differs or is missing."""

    proposals: int
    promotions: int
    differences: tuple[str, ...]


def verify_study(folder: Path, *, check: bool = True) -> Verified:
    """Check the study in a folder, whatever that folder is named. Of a study that is being searched, what its journal holds now.

    Args:
        check: ask the registry whether variants are usable, as the search did.

    Raises:
        ConfigError: the folder holds no study, or its journal is that of another one.
    """
    config = from_dict(SearchConfig, read_config(folder))
    space = SearchSpace.from_config(config, check=registry_check(config) if check else None)
    written = {path.parent.name for path in folder.glob("trials/*/result.json")}  # before the journal, which has each proposal before its result
    journal = read_journal(folder)
    owner = StudyOwner.read_only(config, folder, journal, space=space)
    found = _proposals(owner)
    promotions, wrong = derived_promotions(owner)
    return Verified(proposals=owner.total, promotions=promotions, differences=(*_lost(owner, written, journal), *found, *wrong))


def _lost(owner: StudyOwner, written: set[str], journal: Journal) -> list[str]:
    name = journal.path.name
    damage = [] if journal.damaged is None else [f"{name}: damaged in line {journal.damaged[0]} of {journal.damaged[1]}; nothing from there on was read"]
    proposed = {owner.trial_folder(number).name for number in range(owner.total)}
    return damage + [f"trial {folder.lstrip('0') or '0'}: has a result, but no proposal in {name}" for folder in sorted(written - proposed)]


def _proposals(owner: StudyOwner) -> list[str]:
    found = []
    trials = owner.trials()
    for number, trial in enumerate(trials):
        known = [int(n) for n in trial.user_attrs["known"]]
        if trial.user_attrs["number"] != number:
            found.append(f"trial {number}: recorded as number {trial.user_attrs['number']}: the journal lost a proposal before it")
            continue
        draft = owner.draft(trials[:number], known)
        if draft is None:
            found.append(f"trial {number}: recorded {trial.user_attrs['label']}, derived nothing: the space was exhausted")
        elif variant_key(draft.variant) != trial.user_attrs["variant_key"] or (draft.params or {}) != trial.params:
            found.append(f"trial {number}: recorded {trial.user_attrs['label']} {trial.params}, derived {draft.params}")
    return found
