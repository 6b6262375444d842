"""The outcomes file: every bit comes back, it is small, and a damaged one is named in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mitigate.config import ConfigError
from mitigate.outcomes import OUTCOMES_FILE, Answers, pack, read


def answers(examples: int, residues: int, seed: int = 0) -> Answers:
    rng = np.random.default_rng(seed)
    return Answers(correct_ER=rng.random((examples, residues)) < 0.4, cluster_E=(np.arange(examples) // 4).astype(np.int32), prompts_sha256=f"{seed:064x}")


@given(st.integers(1, 40), st.integers(1, 25))
def test_every_bit_comes_back(tmp_path_factory: pytest.TempPathFactory, examples: int, residues: int) -> None:
    path = tmp_path_factory.mktemp("x") / OUTCOMES_FILE
    stored = {"outer": answers(examples, residues), "in_sequence": answers(examples, residues, 1)}
    path.write_bytes(pack(stored))
    found = read(path)
    assert set(found) == set(stored)
    for name, one in stored.items():
        assert (found[name].correct_ER == one.correct_ER).all() and found[name].correct_ER.dtype == np.bool_
        assert (found[name].cluster_E == one.cluster_E).all() and found[name].prompts_sha256 == one.prompts_sha256


def test_the_quick_start_takes_thirty_kilobytes() -> None:
    assert len(pack({name: answers(192 * 16, 8) for name in ("outer", "in_sequence")})) < 32_000


def test_bits_are_in_the_documented_order(tmp_path: Path) -> None:
    correct = np.zeros((2, 5), bool)
    correct[0, 0] = correct[1, 3] = True
    one = Answers(correct_ER=correct, cluster_E=np.zeros(2, np.int32), prompts_sha256="0")
    content = pack({"outer": one})
    assert bytes([0b10000000, 0b10000000]) in content  # bit 0, then bit 5 + 3 = 8


@pytest.mark.parametrize("content", [b"", b"no safetensors", pack({"outer": answers(8, 3)})[:-1]])
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / OUTCOMES_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"outcomes\.safetensors .*(damaged|format)") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / OUTCOMES_FILE)
