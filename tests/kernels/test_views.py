"""Windows side by side, and their gates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.kernels import views


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_windows_cut_from_any_row_read_their_tokens_and_no_other(data: st.DataObject) -> None:
    """Also from the middle, as a cache does: rows are poisoned, except those that belong to the windows asked for."""
    window = data.draw(st.integers(1, 12))
    start, count = data.draw(st.integers(1 - window, 20)), data.draw(st.integers(0, 4))
    last = start + count * window - 1
    length = max(last, 0) + 1 + data.draw(st.integers(0, 9)) if count else data.draw(st.integers(1, 9))
    rows = torch.full((1, length, 2), float("nan"))
    wanted = torch.zeros(1, count, window, 2)
    for j in range(count):
        for i in range(window):
            t = start + j * window + i
            if 0 <= t < length:
                rows[0, t] = torch.tensor([float(t + 1), -float(t + 1)])
                wanted[0, j, i] = rows[0, t]
    found = views.windows(rows, window=window, start=start, count=count)
    assert torch.equal(found, wanted)


def test_a_window_beyond_the_rows_is_refused() -> None:
    rows = torch.zeros(1, 15, 2)
    assert views.windows(rows, window=8, start=-4, count=2).shape == (1, 2, 8, 2)
    with pytest.raises(ValueError, match=r"windows\.count: window 2 must end inside the 15 rows, it ends at row 19"):
        views.windows(rows, window=8, start=-4, count=3)


def test_no_copy() -> None:
    rows = torch.randn(2, 24, 3)
    assert views.windows(rows, window=8, start=0, count=3).data_ptr() == rows.data_ptr()
    assert views.windows(rows, window=8, start=3, count=2).data_ptr() == rows[:, 3:].data_ptr()


def test_which_offsets_exist() -> None:
    assert views.exists(window=4, first=0, count=2) is None
    assert views.exists(window=4, first=-2, count=0) is None
    mask = views.exists(window=4, first=-3, count=2)
    assert mask is not None
    assert mask.tolist() == [[False, False, False, True], [True] * 4]


def test_uniform_weights_are_even_over_what_exists() -> None:
    mask = views.exists(window=4, first=-2, count=2)
    alpha = views.uniform_weights(2, 2, 4, mask, torch.zeros((), dtype=torch.float64))
    assert alpha.dtype == torch.float64
    assert alpha[0, :, :, 0].tolist() == [[0, 0, 0.5, 0.5], [0.25] * 4]


def test_gates_are_fp32_under_autocast() -> None:
    rows, weight = torch.randn(1, 2, 4, 5), torch.randn(4, 5, 2)
    outside = views.gate_weights(rows, weight, None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(views.gate_weights(rows, weight, None, None), outside)
