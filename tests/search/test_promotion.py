"""Promotion at a rung: who goes on, whatever the order, and never without the best."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mitigate.rows import Interval
from mitigate.search.promotion import Candidate, promoted


def at(number: int, kept: float, mean: float, a_min: float, slack: float = 0.0) -> Candidate:
    def span(value: float) -> Interval:
        return Interval(value=value, low=max(0.0, value - slack), high=min(1.0, value + slack))

    return Candidate(number=number, kept=kept, mean=span(mean), a_min=span(a_min))


unit = st.floats(0, 1, allow_nan=False)
brackets = st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=12).map(lambda points: [at(n, *point) for n, point in enumerate(points)])


@given(brackets, st.integers(2, 4))
def test_a_third_goes_on_and_a_point_that_is_best_at_everything_always_does(candidates: list[Candidate], eta: int) -> None:
    going = promoted(candidates, eta=eta)
    assert len(going) == -(-len(candidates) // eta) and going == sorted(set(going))
    champion = at(99, -0.1, 1.0, 1.0)
    assert 99 in promoted([*candidates, champion], eta=eta)


@given(st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=4))
def test_the_order_of_the_list_does_not_matter(points: list[tuple[float, float, float]]) -> None:
    candidates = [at(n, *point) for n, point in enumerate(points)]
    assert len({tuple(promoted(order, eta=2)) for order in itertools.permutations(candidates)}) == 1


def test_a_dominated_trial_waits_for_those_that_dominate_it() -> None:
    line = [at(n, 0.25, 0.1 * n, 0.1 * n) for n in range(9)]
    assert promoted(line, eta=3) == [6, 7, 8]


def test_the_extremes_of_a_front_come_before_its_middle() -> None:
    front = [at(0, 0.1, 0.2, 0.2), at(1, 0.2, 0.3, 0.3), at(2, 0.21, 0.31, 0.31), at(3, 0.22, 0.32, 0.32), at(4, 0.9, 0.9, 0.9), at(5, 0.23, 0.33, 0.33)]
    assert set(promoted(front, eta=3)) == {0, 4}


def test_among_extremes_the_better_worst_phase_goes_first() -> None:
    front = [at(0, 0.1, 0.2, 0.2), at(1, 0.2, 0.9, 0.3), at(2, 0.3, 0.4, 0.8)]
    assert promoted(front, eta=3) == [2]


def test_an_objective_in_which_all_are_equal_has_no_extremes() -> None:
    same_kept = [at(0, 0.25, 0.9, 0.0), at(1, 0.25, 0.5, 0.0), at(2, 0.25, 0.1, 0.0)]
    assert promoted(same_kept, eta=3) == [0]


def test_a_trial_that_may_be_as_good_goes_on_too_but_at_most_half_as_many_again() -> None:
    sure = [at(n, 0.25, 0.5 - 0.01 * n, 0.3 - 0.01 * n) for n in range(6)]
    assert promoted(sure, eta=3) == [0, 1]
    doubtful = [*sure[:2], at(2, 0.25, 0.48, 0.28, slack=0.1), *sure[3:]]
    assert promoted(doubtful, eta=3) == [0, 1, 2]
    all_doubtful = [at(n, 0.25, 0.5 - 0.01 * n, 0.3 - 0.01 * n, slack=0.2) for n in range(6)]
    assert promoted(all_doubtful, eta=3) == [0, 1, 2]


def test_nobody_of_nobody() -> None:
    assert promoted([], eta=3) == []


@pytest.mark.parametrize("size", [4, 5, 7])
def test_priorities_are_per_trial_and_not_positions_of_a_sort(size: int) -> None:
    """On totally ordered data, in every order, the best trials go on: a list of sort positions taken for ranks would fail most of these."""
    rng = np.random.default_rng(size)
    for _ in range(50):
        order = rng.permutation(size)
        candidates = [at(int(n), 0.25, 0.1 + 0.1 * n, 0.05 + 0.1 * n) for n in order]
        assert promoted(candidates, eta=2) == list(range(size - -(-size // 2), size))
