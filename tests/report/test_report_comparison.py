"""Two trials compared: paired where the outcomes are there, said aloud where not, refused where the prompts differ."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mitigate import stats
from mitigate.config import ConfigError, VariantConfig
from mitigate.report import comparison
from mitigate.rows import Row
from tests.fake_rows import fake_answers, fake_failure, fake_row, fake_rows, store_answers, store_row


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Row, Row]:
    rows = fake_rows(4, 1)
    for row in rows:
        store_row(tmp_path, row)
    return tmp_path, rows[1], rows[3]


def test_paired_differences_are_those_of_stats(pair: tuple[Path, Row, Row]) -> None:
    study, a, b = pair
    answers = [fake_answers(row, seed) for seed, row in enumerate((a, b))]
    for row, found in zip((a, b), answers, strict=True):
        store_answers(study, row, found)
    found = comparison.compare(study, a, b)
    assert found.paired and [heading.split(":")[0].split(" (")[0] for heading, _ in found.sections] == [
        "Cost",
        "Both protocols",
        "Outer padding",
        "In-sequence padding",
        "Outer padding, by residue",
        "In-sequence padding, by residue",
    ]
    for section, name in ((2, "outer"), (3, "in_sequence")):
        expected = stats.paired_difference(*(one[name].correct_ER for one in answers), cluster_E=answers[0][name].cluster_E)
        mean, a_min, fitted, gap = found.sections[section][1]
        for one, wanted in ((mean, expected.mean), (a_min, expected.a_min), (fitted, expected.a_min_cross_fitted), (gap, expected.gap)):
            assert (one.value, one.low, one.high) == (wanted.value, wanted.low, wanted.high)
        assert mean.a - mean.b == pytest.approx(mean.value)
        residues = found.sections[section + 2][1]
        assert len(residues) == 24 and [one.value for one in residues] == pytest.approx(expected.accuracy_R.tolist())
    together = {one.name: one for one in found.sections[1][1]}
    assert together["mean accuracy"].value == pytest.approx(np.mean([found.sections[i][1][0].value for i in (2, 3)]))
    lows = [min(one[name].correct_ER.mean(axis=0).min() for name in one) for one in answers]
    assert together["A_min"].value == pytest.approx(lows[0] - lows[1])


def test_pairing_is_narrower_than_two_intervals(pair: tuple[Path, Row, Row]) -> None:
    study, a, b = pair
    answers = [fake_answers(row, seed) for seed, row in enumerate((a, b))]
    for row, found in zip((a, b), answers, strict=True):
        store_answers(study, row, found)
    mean = comparison.compare(study, a, b).sections[2][1][0]
    assert mean.low is not None and mean.high is not None
    alone = [stats.phase_scores(one["outer"].correct_ER, cluster_E=one["outer"].cluster_E).mean.width for one in answers]
    assert mean.high - mean.low < 0.7 * np.hypot(*alone)


def test_the_text_fits_stars_what_is_clear_and_is_antisymmetric(pair: tuple[Path, Row, Row]) -> None:
    study, a, b = pair
    for seed, row in enumerate((a, b)):
        store_answers(study, row, fake_answers(row, seed))
    found, back = comparison.compare(study, a, b), comparison.compare(study, b, a)
    text = comparison.text(found)
    assert max(map(len, text.splitlines())) <= 120 and "A  w8s8 #1: window 8, stride 8" in text
    assert text.count(" *\n") == sum(one.clear for _, part in found.sections for one in part) > 0
    assert found.sections[2][1][0].value == pytest.approx(-back.sections[2][1][0].value)
    json.dumps(comparison.plain(found), allow_nan=False)


@pytest.mark.parametrize("stored", [[], [0], [1]])
def test_without_outcomes_the_numbers_are_subtracted_and_that_is_said(pair: tuple[Path, Row, Row], stored: list[int]) -> None:
    study, *rows = pair
    for place in stored:
        store_answers(study, rows[place], fake_answers(rows[place], 0))
    found = comparison.compare(study, *rows)
    assert not found.paired and all(one.low is None for _, part in found.sections for one in part)
    missing = [f"trials/{row.trial:04d}/outcomes.safetensors" for place, row in enumerate(rows) if place not in stored]
    assert found.note.startswith(f"No {' and '.join(missing)}: ") and "without paired intervals" in " ".join(comparison.text(found).split())
    mean = found.sections[1][1][0]
    assert mean.value == pytest.approx(rows[0].score("outer").mean.value - rows[1].score("outer").mean.value)


def test_one_protocol_has_no_section_of_both(tmp_path: Path) -> None:
    rows = fake_rows(3, protocols=["in_sequence"])
    for seed, row in enumerate(rows):
        store_row(tmp_path, row)
        store_answers(tmp_path, row, fake_answers(row, seed))
    headings = [heading for heading, _ in comparison.compare(tmp_path, rows[1], rows[2]).sections]
    assert headings[1:] == ["In-sequence padding", "In-sequence padding, by residue"]


def test_other_prompts_are_refused_in_one_line(pair: tuple[Path, Row, Row]) -> None:
    study, a, b = pair
    other = b.model_copy(update={"scores": [score.model_copy(update={"prompts_sha256": "f" * 64}) for score in b.scores]})
    with pytest.raises(ConfigError, match=r"trials 1 and 3 were scored on different prompts under outer padding \(\w{8} and ffffffff\)$"):
        comparison.compare(study, a, other)
    for row, answers in ((a, fake_answers(a, 0)), (b, fake_answers(other, 1))):
        store_answers(study, row, answers)
    with pytest.raises(ConfigError, match="does not belong to the result beside it"):
        comparison.compare(study, a, b)


def test_what_has_no_sweep_is_refused(pair: tuple[Path, Row, Row]) -> None:
    study, a, _ = pair
    with pytest.raises(ConfigError, match=r"trial 9 is infeasible \(FloatingPointError"):
        comparison.compare(study, a, fake_failure(9, "x", VariantConfig()))
    one = fake_row(5, "x", VariantConfig(), np.random.default_rng(0), ["outer"])
    other = fake_row(6, "x", VariantConfig(), np.random.default_rng(0), ["in_sequence"])
    with pytest.raises(ConfigError, match="different protocols"):
        comparison.compare(study, one, other)
