"""The jit forms of the visibility arithmetic against the Python ones, and what only kernels use against enumeration."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch

from mitigate.kernels import visibility

if interpreter.INSTALLED:
    import triton
    from triton import language as tl

    from mitigate.kernels.visibility import covered_jit, end_jit, exact_lo_jit, num_completed_jit, reader_end_jit

    @triton.jit
    def all_forms(t: Any, out: Any, rows: Any, window: Any, stride: Any, origin: Any, local: Any, BLOCK: tl.constexpr) -> Any:
        o = tl.arange(0, BLOCK)
        x = tl.load(t + o, mask=o < rows, other=0)
        tl.store(out + o, end_jit(x, window, stride, origin), mask=o < rows)
        tl.store(out + rows + o, num_completed_jit(x, window, stride, origin), mask=o < rows)
        tl.store(out + 2 * rows + o, covered_jit(x, window, stride, origin), mask=o < rows)
        tl.store(out + 3 * rows + o, exact_lo_jit(x, window, stride, origin, local), mask=o < rows)
        tl.store(out + 4 * rows + o, reader_end_jit(x, window, stride, origin, local), mask=o < rows)


def grids(windows: int) -> Iterator[tuple[int, int, int]]:
    for window in range(1, windows + 1):
        for stride in range(1, window + 1):
            yield from ((window, stride, origin) for origin in range(1 - window, 1))


def test_jit_forms_equal_the_python_ones() -> None:
    t = torch.arange(23, dtype=torch.int32)
    with interpreter.shims():
        for grid in grids(5):
            for local in (0, 2):
                out = torch.empty(5, 23, dtype=torch.int32)
                all_forms[(1,)](t, out, 23, *grid, local, BLOCK=32)
                functions = (visibility.end, visibility.num_completed, visibility.covered)
                wanted = [[f(i, *grid) for i in range(23)] for f in functions]
                wanted += [[f(i, *grid, local) for i in range(23)] for f in (visibility.exact_lo, visibility.reader_end)]
                assert out.tolist() == wanted, (grid, local)


interpreter.own_process(globals(), __file__)


def test_the_last_reader_of_a_token() -> None:
    """By enumeration: who sees token i exactly is one range that starts at i, and after it exact_lo has passed i for good."""
    for grid, local in itertools.product(grids(7), (0, 1, 3, 9)):
        for i in range(20):
            stop = visibility.reader_end(i, *grid, local)
            seen = [t for t in range(i, 60) if visibility.exact_lo(t, *grid, local) <= i]
            assert seen == list(range(i, stop)), (grid, local, i)
        i = torch.arange(20)
        assert visibility.reader_end(i, *grid, local).tolist() == [visibility.reader_end(int(x), *grid, local) for x in i]


def test_where_the_summaries_of_packed_sequences_start() -> None:
    starts = visibility.cu_windows(torch.tensor([0, 13, 13, 14, 51]), 8, 4, -3)
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, *itertools.accumulate(visibility.num_windows(n, 8, 4, -3) for n in (13, 0, 1, 37))]


def test_the_module_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from mitigate.kernels import visibility, tiles; assert visibility.end(0, 8, 4, -3) == 4"
    subprocess.run([sys.executable, "-c", code], cwd=interpreter.ROOT, check=True, timeout=120)


if not interpreter.INSTALLED:
    test_jit_forms_equal_the_python_ones = pytest.mark.skip(reason="triton is not installed")(test_jit_forms_equal_the_python_ones)
