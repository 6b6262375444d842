"""Every formula of the window arithmetic against an enumeration of windows, token by token."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mitigate.geometry import Grid, kept_entries_per_token, period
from mitigate.kernels import visibility

LONGEST = 41


@st.composite
def grids(draw: st.DrawFn, largest: int = 12) -> Grid:
    window = draw(st.integers(1, largest))
    return Grid(window=window, stride=draw(st.integers(1, window)), origin=draw(st.integers(1 - window, 0)))


def every_grid(largest: int = 12) -> list[Grid]:
    return [Grid(window=w, stride=s, origin=o) for w in range(1, largest + 1) for s in range(1, w + 1) for o in range(1 - w, 1)]


def windows_of(grid: Grid, stop: int = 2 * LONGEST) -> list[list[int]]:
    """Tokens of each window that starts before `stop`, positions below 0 included."""
    found, start = [], grid.origin
    while start < stop:
        found.append([start + i for i in range(grid.window)])
        start += grid.stride
    return found


def enumerated(grid: Grid, t: int) -> dict[str, Any]:
    """What the query at t sees, by looking at every window and every token."""
    windows = windows_of(grid)
    complete = [window for window in windows if all(token <= t for token in window)]
    summarised = {token for window in complete for token in window}
    tail = [token for token in range(t + 1) if token not in summarised]
    return {"complete": len(complete), "tail": tail, "covered": tail[0] if tail else t + 1, "open": windows[len(complete) :]}


@pytest.mark.parametrize("window", range(1, 13))
def test_visibility_against_enumeration(window: int) -> None:
    for grid in (grid for grid in every_grid() if grid.window == window):
        ends = [tokens[-1] for tokens in windows_of(grid)]
        assert [grid.end(j) for j in range(len(ends))] == ends
        for t in range(LONGEST):
            seen = enumerated(grid, t)
            assert grid.num_completed(t) == seen["complete"] == sum(end <= t for end in ends), (grid, t)
            assert grid.num_windows(t + 1) == seen["complete"]
            assert grid.covered(t) == seen["covered"], (grid, t)
            assert seen["tail"] == list(range(grid.covered(t), t + 1)), "the open tail is one interval"
            assert grid.phase(t) == next(i for i in range(grid.stride) if (t - i - grid.origin) % grid.stride == 0)


@pytest.mark.parametrize("window", range(1, 13))
def test_exact_tokens_and_what_must_be_held_against_enumeration(window: int) -> None:
    for grid in (grid for grid in every_grid() if grid.window == window):
        for local in (1, 2, 5, 16):
            exact = [sorted({*enumerated(grid, t)["tail"], *range(max(0, t - local + 1), t + 1)}) for t in range(LONGEST)]
            for t in range(LONGEST):
                assert exact[t] == list(range(grid.exact_lo(t, local), t + 1)), (grid, local, t)
        for length in range(LONGEST - 1):
            open_windows = enumerated(grid, length - 1)["open"] if length else windows_of(grid)
            needed = [token for tokens in open_windows for token in tokens if 0 <= token < length]
            assert grid.open_lo(length) == min(needed, default=length), (grid, length)


@given(grid=grids(), local=st.integers(1, 20))
def test_a_dropped_exact_token_is_never_seen_again(grid: Grid, local: int) -> None:
    for length in range(LONGEST):
        held = grid.stored_exact_lo(length, local)
        later = [token for t in range(length, LONGEST + grid.window) for token in range(grid.exact_lo(t, local), t + 1) if token < length]
        assert held == min(later, default=length)


@given(grid=grids())
def test_every_query_sees_all_of_its_past_at_least_once(grid: Grid) -> None:
    for t in range(LONGEST):
        summarised = {token for j in range(grid.num_completed(t)) for token in range(grid.end(j) - grid.window + 1, grid.end(j) + 1)}
        assert set(range(t + 1)) <= summarised | set(range(grid.exact_lo(t, 1), t + 1))
        assert all(token <= t for token in summarised)


@given(grid=grids())
def test_the_last_token_of_a_window_is_the_first_to_see_it(grid: Grid) -> None:
    for j in range(5):
        end = grid.end(j)
        assert grid.num_completed(end) >= j + 1 > grid.num_completed(end - 1)


@given(grid=grids(), local=st.integers(1, 20))
def test_tensors_give_what_integers_give(grid: Grid, local: int) -> None:
    numbers = (grid.window, grid.stride, grid.origin)
    functions: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (visibility.end, numbers),
        (visibility.num_completed, numbers),
        (visibility.covered, numbers),
        (visibility.open_lo, numbers),
        (visibility.exact_lo, (*numbers, local)),
    ]
    for function, arguments in functions:
        plain = [function(t, *arguments) for t in range(LONGEST)]
        for shape in ((LONGEST,), (LONGEST, 1)):
            tensor = function(torch.arange(LONGEST).reshape(shape), *arguments)
            assert tensor.dtype == torch.int64
            assert tensor.shape == torch.Size(shape)
            assert tensor.flatten().tolist() == plain, function.__name__
        assert all(type(value) is int for value in plain)


def test_division_floors_before_the_first_window_is_complete() -> None:
    # Division towards zero would call a window of 8 complete from t = 4 on (-3/4 -> 0, +1), one of 12 from t = 1 on.
    for window, stride in ((8, 4), (12, 11), (12, 12), (7, 3)):
        for origin in (0, -1, 1 - window):
            first_end = origin + window - 1
            before = list(range(-stride, first_end))
            assert [visibility.num_completed(t, window, stride, origin) for t in before] == [0] * len(before)
            assert visibility.num_completed(torch.tensor(before), window, stride, origin).tolist() == [0] * len(before)
            assert visibility.num_completed(first_end, window, stride, origin) == 1
    assert visibility.num_windows(0, 8, 8, 0) == 0
    assert visibility.num_windows(0, 4, 1, -3) == 0


def test_the_published_shapes() -> None:
    csa = Grid(window=8, stride=4, origin=-4)
    assert [csa.num_completed(t) for t in range(40)] == [(t + 1) // 4 for t in range(40)]
    hca = Grid(window=128, stride=128)
    assert [hca.num_completed(t) for t in (126, 127, 254, 255)] == [0, 1, 1, 2]
    assert csa.exact_lo(100, 16) == 85
    assert csa.exact_lo(99, 1) == 99


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0, "stride": 1}, "Grid.window must be at least 1, got 0"),
        ({"window": 8, "stride": 9}, "Grid.stride must be between 1 and window (8), got 9"),
        ({"window": 8, "stride": 0}, "Grid.stride must be between 1 and window (8), got 0"),
        ({"window": 8, "stride": 8, "origin": 1}, "Grid.origin must be above -window (-8) and at most 0, got 1"),
        ({"window": 8, "stride": 4, "origin": -8}, "Grid.origin must be above -window (-8) and at most 0, got -8"),
    ],
)
def test_a_bad_grid_names_field_bound_and_value(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Grid(**fields)
    assert str(caught.value) == message


def test_period_is_the_least_common_multiple() -> None:
    assert period([8, 6]) == 24
    assert period([8, 8]) == 8
    assert period([5], at_least=24) == 120
    assert period([]) == 1
    for strides in ([4, 6, 8, 12], [3, 5, 7], [1]):
        p = period(strides)
        assert all(p % stride == 0 for stride in strides)
        assert not any(all(smaller % stride == 0 for stride in strides) for smaller in range(1, p))


@given(stride=st.integers(1, 12), offsets=st.lists(st.integers(-30, 30), max_size=6))
def test_kept_entries_count_summaries_and_bypassed_tokens(stride: int, offsets: list[int]) -> None:
    tokens = range(stride * 50)
    summaries = sum((t + 1) % stride == 0 for t in tokens)
    exact = sum(any((t - offset) % stride == 0 for offset in offsets) for t in tokens)
    assert kept_entries_per_token(stride, offsets) == Fraction(summaries + exact, len(tokens))


def test_kept_entries_of_full_attention() -> None:
    assert kept_entries_per_token(1, []) == 1
