"""Throughput from step times: a hiccup does not count, a step that pools does."""

from __future__ import annotations

import numpy as np
import pytest

from mitigate import cost


def test_a_hiccup_is_clipped_and_a_slow_step_is_not() -> None:
    seconds = np.ones((5, 8))
    seconds[:, 7] = 4.0  # completes a window in every repeat
    seconds[2, 3] = 100.0  # once
    clean = cost._without_hiccups(seconds)
    assert clean[:, 7] == pytest.approx(4.0)
    assert clean[2, 3] == pytest.approx(3.0)
    assert clean.sum(axis=1)[0] == pytest.approx(11.0)


def test_quartiles() -> None:
    found = cost._quartiles(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (found.low, found.value, found.high) == (2.0, 3.0, 4.0)
