"""The study folder: atomic proposals, results told once, resume, and everything that must be refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from optuna.trial import TrialState

from mitigate.config import ConfigError, VariantConfig, canonical_json
from mitigate.config_search import SearchConfig
from mitigate.results import read_rows, write_tables
from mitigate.search.journal import repair_journal
from mitigate.search.space import SearchSpace, variant_key
from mitigate.search.study import DIRECTIONS, HV_REFERENCE, METRICS, Proposal, StudyBusyError, StudyOwner, anchor_variants, check_anchors
from mitigate.search.workers import Task, failure_row, read_result, write_result

Make = Callable[..., SearchConfig]


def task_of(owner: StudyOwner, proposal: Proposal) -> Task:
    return Task(
        number=proposal.number,
        config_json=canonical_json(owner.space.trial_config(proposal.variant)),
        label=proposal.label,
        anchor=proposal.anchor,
        folder=str(owner.trial_folder(proposal.number)),
        cache="",
        run="",
        timeout_s=1.0,
    )


def row_of(owner: StudyOwner, proposal: Proposal) -> Any:
    return fake_trials.make_row(owner.space.trial_config(proposal.variant), label=proposal.label, trial=proposal.number, anchor=proposal.anchor)


def advance(owner: StudyOwner, trials: int) -> None:
    """Propose and tell."""
    for _ in range(trials):
        proposal = owner.propose()
        assert proposal is not None
        row = row_of(owner, proposal)
        write_result(owner.trial_folder(proposal.number), row)
        owner.tell(row)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "driver.lock"}


def table(owner: StudyOwner) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.params, t.values, t.user_attrs, t.constraints) for t in owner._trials()]


def test_anchors_come_first_and_the_record_says_everything(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(anchors=["full", "w8s8", "same"]), tmp_path) as owner:
        advance(owner, 4)
        full, w8s8, first, _ = owner._trials()
    assert [name for name, _ in anchor_variants(owner.config)] == ["full", "w8s8"]  # "same" is w8s8 under another name
    assert full.params == {} and full.user_attrs["anchor"] == "full" and full.user_attrs["kv_kept"] == 1.0
    assert w8s8.params == {"stride": 8, "overlap": "1", "gate": "scalar", "tie": "none"}
    assert first.user_attrs["anchor"] is None and first.user_attrs["known"] == [0, 1] and first.user_attrs["number"] == 2
    assert first.user_attrs["seed"] == 0 and isinstance(first.user_attrs["sampler_seed"], int)
    variant = owner.space.to_variant(first.params)
    assert json.loads(first.user_attrs["variant"])["stride"] == variant.stride and first.user_attrs["variant_key"] == variant_key(variant)
    assert first.state == TrialState.COMPLETE and len(first.values) == 4
    assert METRICS == ("kv_bytes_per_token", "throughput_ratio", "mean_accuracy", "a_min")  # stored: a change makes every study another's
    assert DIRECTIONS == ("minimize", "maximize", "maximize", "maximize")
    assert owner._study.metric_names == list(METRICS)
    assert owner._study.user_attrs["guard"]["hv_reference"] == HV_REFERENCE


def test_an_anchor_that_the_trial_refuses_is_named(make_config: Make) -> None:
    config = make_config(anchors=["w128"])
    with pytest.raises(ConfigError, match=r"SearchConfig\.anchors 'w128': ScoreConfig\.period must be a multiple of the stride \(128\), got 24"):
        check_anchors(config, SearchSpace.from_config(config))


def test_a_proposal_is_one_journal_line(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 3)
        before = (owner.folder / "study.journal").read_bytes()
        owner.propose()
        added = (owner.folder / "study.journal").read_bytes()[len(before) :]
    assert added.count(b"\n") == 1 and json.loads(added)["state"] == TrialState.RUNNING.value


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_resumed_study_proposes_what_an_uninterrupted_one_does(make_config: Make, tmp_path: Path, sampler: str) -> None:
    config = make_config(sampler=sampler)
    with StudyOwner.open(config, tmp_path / "straight") as owner:
        advance(owner, 24)
        straight = table(owner)
    for done in (1, 7, 8, 8):
        with StudyOwner.open(config, tmp_path / "resumed") as owner:
            advance(owner, done)
    with StudyOwner.open(config, tmp_path / "resumed") as owner:
        assert table(owner) == straight
        assert sorted(owner.rows) == list(range(24))
    assert len({attributes["variant_key"] for *_, attributes, _ in straight}) == 24  # no duplicates


def test_a_written_result_is_told_on_open_and_a_running_trial_keeps_number_and_variant(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 2)
        written, failed, running = owner.propose(), owner.propose(), owner.propose()
        assert written and failed and running
        write_result(owner.trial_folder(written.number), row_of(owner, written))
        write_result(owner.trial_folder(failed.number), failure_row(task_of(owner, failed), "ValueError", "no"))
    with StudyOwner.open(make_config(), tmp_path) as owner:
        assert owner.running() == [running]
        assert owner._trials()[written.number].state == TrialState.COMPLETE
        trial = owner._trials()[failed.number]
        assert (trial.state, trial.constraints) == (TrialState.PRUNED, {"failed": 1.0})
    assert [row.trial for row in read_rows(tmp_path / "study")] == [0, 1, 2, 3]


def test_a_trial_whose_constraint_was_stored_before_a_kill_can_be_told(make_config: Make, tmp_path: Path) -> None:
    import optuna

    with StudyOwner.open(make_config(), tmp_path) as owner:
        proposal = owner.propose()
        assert proposal
        write_result(owner.trial_folder(0), failure_row(task_of(owner, proposal), "ValueError", "no"))
        optuna.Trial(owner._study, owner._trials()[0]._trial_id).set_constraint("failed", 1.0)
    with StudyOwner.open(make_config(), tmp_path) as owner:
        assert owner._trials()[0].state == TrialState.PRUNED


def test_the_first_result_stays(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        proposal = owner.propose()
        assert proposal
        folder = owner.trial_folder(0)
        write_result(folder, row_of(owner, proposal))
        write_result(folder, failure_row(task_of(owner, proposal), "Timeout", "late"))
        row = read_result(folder)
    assert row is not None and row.status == "ok"
    assert [p.name for p in folder.iterdir()] == ["result.json"]


def test_results_of_a_trial_that_the_journal_lost_are_set_aside(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 2)
        lost = Proposal(number=2, variant=VariantConfig(gate="vector"), label="lost", anchor=False)
        write_result(owner.trial_folder(2), row_of(owner, lost))
        owner.propose()
        assert (owner.folder / "orphans" / "0002.1" / "result.json").exists()
        assert not (owner.trial_folder(2) / "result.json").exists()
    assert len(read_rows(owner.folder)) == 2


def test_an_exhausted_space_proposes_nothing(make_config: Make, tmp_path: Path) -> None:
    config = make_config(space={"stride": [4, 8], "gate": ["scalar", "uniform"], "tie": ["none", "gates"]}, trials=99)
    with StudyOwner.open(config, tmp_path) as owner:
        advance(owner, 7)  # full, and 2 strides x (scalar untied, scalar tied, uniform)
        assert owner.propose() is None
        assert owner.total == 7


def test_one_category_that_always_fails_is_left(make_config: Make, tmp_path: Path) -> None:
    space = {"local_window": list(range(1, 60)), "gate": ["scalar", "vector", "uniform"]}
    with StudyOwner.open(make_config(space=space, anchors=["w8s8"]), tmp_path) as owner:
        for _ in range(60):
            proposal = owner.propose()
            assert proposal is not None
            row = row_of(owner, proposal)
            owner.tell(failure_row(task_of(owner, proposal), "MemoryError", "no") if proposal.variant.gate == "uniform" else row)
        late = [t.params["gate"] for t in owner._trials()[20:]]
    assert late.count("uniform") / len(late) < 0.3


def test_a_second_driver_is_refused_by_process(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        for _ in range(2):
            with pytest.raises(StudyBusyError, match=rf"^{owner.folder} is in use: process {os.getpid()} on \S+ runs a search in it; wait for it or stop it$"):
                StudyOwner.open(make_config(), tmp_path)
    StudyOwner.open(make_config(), tmp_path).close()


@pytest.mark.parametrize(
    "changes, said, from_journal",
    [
        (dict(space={"gate": ["scalar"]}), 'space.gate ["scalar", "vector", "uniform"] -> ["scalar"] and 3 more', "config.space.gate"),
        (dict(seed=1, sampler="random"), 'sampler "tpe" -> "random" and 1 more', 'config.sampler "tpe" -> "random" and 1 more'),
        (dict(trial={"train": {"updates": 5}}), "trial.train.updates 600 -> 5", "config.trial.train.updates 600 -> 5"),
        (dict(anchors=["full"]), 'anchors ["full", "w8s8"] -> ["full"]', "anchors.w8s8 "),
        (dict(space={"local_window": list(range(1, 60))}), 'space.gate ["scalar", "vector", "uniform"] -> nothing and 4 more', "config.space.gate "),
        (dict(max_consecutive_failures=9), "max_consecutive_failures 5 -> 9", "config.max_consecutive_failures 5 -> 9"),
    ],
)
@pytest.mark.parametrize("without_config_json", [False, True])
def test_another_config_is_refused_with_its_first_difference_and_nothing_changes(
    make_config: Make, tmp_path: Path, changes: dict[str, Any], said: str, from_journal: str, without_config_json: bool
) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 3)
    if without_config_json:  # the journal knows too
        (owner.folder / "config.json").unlink()
    before = contents(owner.folder)
    with pytest.raises(ConfigError, match=r"belongs to another config: ") as caught:
        StudyOwner.open(make_config(**changes), tmp_path)
    expected = from_journal if without_config_json else f"{said}; "
    assert str(caught.value).startswith(f"results folder {owner.folder} belongs to another config: {expected}") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("; give another --results folder or the search another name")
    assert len(str(caught.value)) < 250 + len(str(owner.folder))
    assert contents(owner.folder) == before


def test_a_published_extract_is_not_gone_on_with(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 3)
    folder = owner.folder
    write_tables(folder, read_rows(folder))
    shutil.rmtree(folder / "trials")
    for name in ("study.journal", "driver.lock"):
        (folder / name).unlink(missing_ok=True)
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"study holds published tables of 3 trials but not the trials themselves, so nothing can be derived from it$"):
        StudyOwner.open(make_config(), tmp_path)
    assert contents(folder) == before


def test_an_anchor_preset_that_changed_is_refused(make_config: Make, tmp_path: Path, presets: Path) -> None:
    StudyOwner.open(make_config(), tmp_path).close()
    (presets / "variants" / "w8s8.toml").write_text("[variant]\nwindow = 12\n")
    with pytest.raises(ConfigError, match=r"another config: anchors\.w8s8"):
        StudyOwner.open(make_config(), tmp_path)


def test_budget_and_pace_may_change(make_config: Make, tmp_path: Path) -> None:
    StudyOwner.open(make_config(), tmp_path).close()
    with StudyOwner.open(make_config(trials=20, workers=7, max_hours=1.0, trial_timeout_s=5.0), tmp_path) as owner:
        assert owner.left() == 20
    assert json.loads((owner.folder / "config.json").read_text())["trials"] == 20


@pytest.mark.parametrize("tail", [b'{"op_code":4,"wor', b"\x00\x00\x00", b"nonsense\n", b"[1]\n"])
def test_a_torn_last_line_is_cut_off_after_a_copy(make_config: Make, tmp_path: Path, tail: bytes) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 3)
        before = table(owner)
    path = owner.folder / "study.journal"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with StudyOwner.open(make_config(), tmp_path) as owner:
        assert table(owner) == before
        advance(owner, 1)
    assert (owner.folder / "study.journal.torn.1").read_bytes() == whole + tail
    assert path.read_bytes().startswith(whole)


def test_a_journal_cut_at_any_byte_loses_no_finished_trial(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 3)
        before = table(owner)
    path = owner.folder / "study.journal"
    whole = path.read_bytes()
    last = len(whole) - len(whole.splitlines(keepends=True)[-1])  # the record that tells trial 2
    for cut in (last, last + 1, (last + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with StudyOwner.open(make_config(), tmp_path) as owner:
            assert table(owner) == before


def test_damage_inside_the_journal_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(b"{}\noops\n{}\n")
    with pytest.raises(ConfigError, match=r"study\.journal is damaged in line 2 of 3"):
        repair_journal(path)
    assert path.read_bytes() == b"{}\noops\n{}\n"


def test_a_lock_that_a_killed_process_left_does_not_block(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 1)
    journal = owner.folder / "study.journal"
    (owner.folder / "study.journal.lock").symlink_to(journal)
    (owner.folder / "study.journal.lock1.rename").symlink_to(journal)
    begin = time.monotonic()
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 1)
    assert time.monotonic() - begin < 5
    assert not list(owner.folder.glob("*.rename"))


def test_a_kill_while_the_study_is_created_can_be_resumed(make_config: Make, tmp_path: Path) -> None:
    StudyOwner.open(make_config(), tmp_path).close()
    path = tmp_path / "study" / "study.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        (tmp_path / "study" / "config.json").unlink()
        StudyOwner.open(make_config(), tmp_path).close()
        assert path.read_bytes().count(b'"guard"') == 1


def test_a_damaged_result_is_refused_by_its_file(make_config: Make, tmp_path: Path) -> None:
    with StudyOwner.open(make_config(), tmp_path) as owner:
        advance(owner, 1)
    result = owner.trial_folder(0) / "result.json"
    result.write_text("{")
    with pytest.raises(ConfigError, match=rf"{result} is not a Row"):
        StudyOwner.open(make_config(), tmp_path)
