"""Verification only reads: whatever state the journal is in, no byte of the folder changes, and results whose proposal is lost are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from mitigate import cli
from mitigate.config import ConfigError
from mitigate.config_search import SearchConfig
from mitigate.search.loop import run_search
from mitigate.search.status import read_status
from mitigate.search.study import StudyOwner, lock_folder
from mitigate.search.verify import verify_study

Make = Callable[..., SearchConfig]
Damage = Callable[[list[bytes]], list[bytes] | None]
TRIALS = 6


@pytest.fixture(scope="module")
def once() -> dict[str, Path]:
    return {}


@pytest.fixture
def study(make_config: Make, tmp_path: Path, once: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished study under another name, the study made once."""
    if "study" not in once:
        folder = tmp_path_factory.mktemp("once")
        config = make_config(trials=TRIALS)
        once["study"] = run_search(config, results=folder, cache=folder / "cache", inline=True, run="fake_trials:staged", console=Console(quiet=True)).folder
    return shutil.copytree(once["study"], tmp_path / "copy")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its content and time, and every folder."""
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in sorted(folder.rglob("*"))}


def damage(folder: Path, how: Damage) -> None:
    """Change the journal's lines; None removes it."""
    path = folder / "study.journal"
    left = how(path.read_bytes().splitlines(keepends=True))
    if left is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(left))


def proposals(lines: list[bytes]) -> list[int]:
    """Places of the proposals' records."""
    return [place for place, line in enumerate(lines) if b'"op_code":4' in line]


def test_a_whole_study_is_verified_without_a_trace(study: Path) -> None:
    before = contents(study)
    found = verify_study(study)
    assert (found.proposals, found.differences) == (TRIALS, ())
    assert contents(study) == before
    (study / "driver.lock").unlink()
    assert cli.main(["verify-study", str(study)]) == 0
    assert not (study / "driver.lock").exists()


def test_a_study_whose_driver_runs_is_verified_too(study: Path) -> None:
    lock = lock_folder(study)
    try:
        assert verify_study(study).differences == ()
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        (lambda lines: [b"xx\n"], range(TRIALS)),
        (lambda lines: [], range(TRIALS)),
        (lambda lines: None, range(TRIALS)),
        (lambda lines: lines[:1], range(TRIALS)),
        (lambda lines: lines[1:], range(TRIALS)),  # what names the study
        (lambda lines: lines[: proposals(lines)[2]], range(2, TRIALS)),
        (lambda lines: [*lines[: proposals(lines)[2]], lines[proposals(lines)[2]][:40]], range(2, TRIALS)),
        (lambda lines: [*lines[: proposals(lines)[4]], b"\x00\x00\n", *lines[proposals(lines)[4] + 1 :]], range(4, TRIALS)),
        (lambda lines: [line for place, line in enumerate(lines) if place != proposals(lines)[3]], range(TRIALS - 1, TRIALS)),
    ],
    ids=["destroyed", "empty", "absent", "one line", "without its head", "cut between lines", "cut in a line", "damaged inside", "a line less"],
)
def test_results_without_a_proposal_are_named_and_nothing_is_written(study: Path, capsys: pytest.CaptureFixture[str], how: Damage, lost: range) -> None:
    damage(study, how)
    before = contents(study)
    assert cli.main(["verify-study", str(study)]) == 1
    said, wrong = capsys.readouterr()
    assert wrong == ""
    named = [line for line in said.splitlines() if line.endswith(": has a result, but no proposal in study.journal")]
    assert named == [f"trial {number}: has a result, but no proposal in study.journal" for number in lost]
    assert said.splitlines()[-1].endswith(f"differences in {len(said.splitlines()) - 1} places")
    assert contents(study) == before


def test_what_else_the_damage_did_is_said(study: Path) -> None:
    damage(study, lambda lines: [*lines[:7], b"oops\n", *lines[8:]])
    (first, *_) = verify_study(study).differences
    assert first.startswith("study.journal: damaged in line 8 of ") and first.endswith("; nothing from there on was read")
    with pytest.raises(ConfigError, match=rf"^{study}/study\.journal is damaged in line 8 of \d+; restore it"):
        read_status(study)


def test_a_proposal_that_is_missing_before_others_is_not_taken_for_another_sampler(study: Path) -> None:
    damage(study, lambda lines: [line for place, line in enumerate(lines) if place != proposals(lines)[3]])
    found = verify_study(study).differences
    assert "trial 3: recorded as number 4: the journal lost a proposal before it" in found and not any("derived" in line for line in found)


@pytest.mark.parametrize("less", [1, None], ids=["a line less", "cut"])
def test_no_line_of_a_journal_with_rungs_is_taken_for_granted(make_config: Make, tmp_path: Path, less: int | None) -> None:
    """Each line in turn, or all from it on: every proposal that this loses shows by its result, and nothing is raised but one line."""
    config = make_config(trials=8, rungs={"updates": [20], "eta": 2, "bracket": 3}, trial={"train": {"updates": 60}})
    folder = run_search(config, results=tmp_path, cache=tmp_path / "cache", inline=True, run="fake_trials:staged", console=Console(quiet=True)).folder
    whole = (folder / "study.journal").read_bytes().splitlines(keepends=True)
    assert verify_study(folder).promotions > 0
    for place in range(len(whole)):
        left = whole[:place] + (whole[place + less :] if less else [])
        (folder / "study.journal").write_bytes(b"".join(left))
        before = contents(folder)
        try:
            lost = [line for line in verify_study(folder).differences if "no proposal" in line]
        except ConfigError as error:
            assert "belongs to another config" in str(error) and "\n" not in str(error), place
        else:
            assert len(lost) == (8 if place == 0 else 8 - len(proposals(left))), place
        assert contents(folder) == before


@pytest.mark.parametrize("record", [b"{}\n", b'{"op_code": 99}\n', b'{"op_code": 4, "worker_id": "x"}\n'])
def test_json_that_is_no_record_is_one_line_for_every_reader(study: Path, make_config: Make, record: bytes) -> None:
    damage(study, lambda lines: [*lines, record])
    before = contents(study)
    for read in (verify_study, read_status):
        with pytest.raises(ConfigError, match=rf"^{study}/study\.journal is damaged: a record of it is none of Optuna's \([^\n]+\)$"):
            read(study)
    assert contents(study) == before
    study.rename(study.parent / "study")
    with pytest.raises(ConfigError, match=r"study\.journal is damaged: a record"):
        StudyOwner.open(make_config(trials=TRIALS), study.parent)


def test_the_journal_of_another_study_is_refused(study: Path, make_config: Make, tmp_path: Path) -> None:
    StudyOwner.open(make_config(name="other"), tmp_path).close()
    shutil.copy(tmp_path / "other" / "study.journal", study / "study.journal")
    with pytest.raises(ConfigError, match=r"study\.journal holds the study other, expected study$"):
        verify_study(study)
