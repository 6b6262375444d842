"""The reference against loops over tokens, written from the formulas with Python numbers only."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.kernels import reference

GRIDS = [(1, 1, 0), (2, 2, 0), (2, 1, -1), (8, 8, 0), (8, 8, -3), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (8, 6, -1)]


def slow_pool(logits: torch.Tensor, payload: torch.Tensor, window: int, stride: int, origin: int) -> tuple[list[object], list[object]]:
    """Summaries [B][N][G][D] and gates [B][N][W][G][E] as nested lists; a window is whole when its last token exists."""
    batch, length, _, groups, channels = logits.shape
    maps, dim = payload.shape[2], payload.shape[4]
    summaries: list[object] = []
    gates: list[object] = []
    for b in range(batch):
        summary_rows, gate_rows = [], []
        j = 0
        while origin + j * stride + window - 1 < length:
            alpha = [[[0.0] * channels for _ in range(groups)] for _ in range(window)]
            pooled = [[0.0] * dim for _ in range(groups)]
            for g in range(groups):
                for e in range(channels):
                    terms = {}
                    for i in range(window):
                        t = origin + j * stride + i
                        if t >= 0:
                            terms[i] = float(logits[b, t, i, g, e])
                    top = max(terms.values())
                    total = sum(math.exp(s - top) for s in terms.values())
                    for i, s in terms.items():
                        alpha[i][g][e] = math.exp(s - top) / total
                for d in range(dim):
                    for i in range(window):
                        t = origin + j * stride + i
                        if t >= 0:
                            pooled[g][d] += alpha[i][g][d if channels > 1 else 0] * float(payload[b, t, i if maps > 1 else 0, g, d])
            summary_rows.append(pooled)
            gate_rows.append(alpha)
            j += 1
        summaries.append(summary_rows)
        gates.append(gate_rows)
    return summaries, gates


def slow_attend(
    q: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid: tuple[int, int, int], local: int, bypass: tuple[int, ...]
) -> list[object]:
    """Attention of a whole sequence as nested lists [B][H][T][D]: one softmax over summaries that ended, and over exact tokens by their reasons."""
    window, stride, origin = grid
    batch, heads, length, _ = q.shape
    groups = k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1])
    out: list[object] = []
    for b in range(batch):
        per_head = []
        for h in range(heads):
            g = h * groups // heads
            rows = []
            for t in range(length):
                complete = [j for j in range(ks.shape[2]) if origin + j * stride + window - 1 <= t]
                summarised = {origin + j * stride + i for j in complete for i in range(window)}
                entries = [(ks[b, g, j], vs[b, g, j]) for j in complete]
                for i in range(t + 1):
                    if i not in summarised or i > t - local or (i - origin) % stride in bypass:
                        entries.append((k[b, g, i], v[b, g, i]))
                logits = [scale * float(q[b, h, t] @ key) for key, _ in entries]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                rows.append([sum(w * float(value[d]) for w, (_, value) in zip(weights, entries, strict=True)) / sum(weights) for d in range(v.shape[-1])])
            per_head.append(rows)
        out.append(per_head)
    return out


def pool_inputs(length: int, window: int, channels: int, maps: int, groups: int = 2, dim: int = 3, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length * 100 + window)
    logits = torch.randn(batch, length, window, groups, channels, generator=generator, dtype=torch.float64) * 2
    return logits, torch.randn(batch, length, maps, groups, dim, generator=generator, dtype=torch.float64)


def check_pool(grid: tuple[int, int, int], length: int, kind: str, per_offset: bool) -> None:
    window, stride, origin = grid
    logits, payload = pool_inputs(length, window, 3 if kind == "vector" else 1, window if per_offset else 1)
    if kind == "uniform":
        logits = torch.zeros_like(logits)
    summary, alpha = reference.pool(logits, payload, window=window, stride=stride, origin=origin)
    wanted, gates = slow_pool(logits, payload, window, stride, origin)
    count = len(wanted[0])  # type: ignore[arg-type]
    assert summary.shape == (2, count, 2, 3)
    assert alpha.shape == (2, count, window, 2, logits.shape[-1])
    if count:
        torch.testing.assert_close(summary, torch.tensor(wanted, dtype=torch.float64), atol=1e-13, rtol=0)
        torch.testing.assert_close(alpha, torch.tensor(gates, dtype=torch.float64), atol=1e-13, rtol=0)


@pytest.mark.parametrize(("kind", "per_offset"), list(product(("scalar", "vector", "uniform"), (False, True))))
def test_pool_against_the_loop(kind: str, per_offset: bool) -> None:
    for grid in GRIDS:
        check_pool(grid, 21, kind, per_offset)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_pool_against_the_loop_anywhere(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 9))
    grid = (window, data.draw(st.integers(1, window)), data.draw(st.integers(1 - window, 0)))
    check_pool(grid, data.draw(st.integers(1, 24)), data.draw(st.sampled_from(["scalar", "vector", "uniform"])), data.draw(st.booleans()))


def test_a_short_first_window_averages_what_exists() -> None:
    payload = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(1, 8, 1, 1, 1)
    summary, alpha = reference.pool(torch.zeros(1, 8, 4, 1, 1, dtype=torch.float64), payload, window=4, stride=4, origin=-2)
    assert summary.flatten().tolist() == [1.5, 4.5]  # tokens 0, 1; then 2 .. 5
    assert alpha[0, 0, :, 0, 0].tolist() == [0, 0, 0.5, 0.5]


def test_gates_are_wide_and_summaries_keep_the_payload_dtype() -> None:
    logits, payload = (x.bfloat16() for x in pool_inputs(16, 8, 1, 1))
    summary, alpha = reference.pool(logits, payload, window=8, stride=8)
    assert summary.dtype == torch.bfloat16
    assert alpha.dtype == torch.float32


def attend_inputs(grid: tuple[int, int, int], length: int, groups: int, heads: int, dim: int = 4, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    count = len(reference.window_index(length, *grid))
    shapes = [(batch, heads, length, dim), *[(batch, groups, count, dim)] * 2, *[(batch, groups, length, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run_attend(parts: list[torch.Tensor], grid: tuple[int, int, int], local: int, bypass: tuple[int, ...]) -> torch.Tensor:
    q, ks, vs, k, v = parts
    positions = torch.arange(q.shape[2])
    window, stride, origin = grid
    visible = reference.visible(positions, positions, ks.shape[2], window=window, stride=stride, origin=origin, local=local, bypass=bypass)
    return reference.attend(q, torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2), visible, q.shape[-1] ** -0.5)


def check_attend(grid: tuple[int, int, int], length: int, heads: int, groups: int, local: int, bypass: tuple[int, ...]) -> None:
    parts = attend_inputs(grid, length, groups, heads, batch=1)
    wanted = torch.tensor(slow_attend(*parts, grid, local, bypass), dtype=torch.float64)  # type: ignore[arg-type]
    torch.testing.assert_close(run_attend(parts, grid, local, bypass), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (3, 1)])
def test_attend_against_the_loop(heads: int, groups: int) -> None:
    for index, grid in enumerate(GRIDS):
        check_attend(grid, 19, heads, groups, local=(1, 2, 5, 16)[index % 4], bypass=((), (0,), (0, grid[1] - 1))[index % 3])


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_attend_against_the_loop_anywhere(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 9))
    stride = data.draw(st.integers(1, window))
    grid = (window, stride, data.draw(st.integers(1 - window, 0)))
    bypass = tuple(sorted(data.draw(st.sets(st.integers(0, stride - 1), max_size=2))))
    check_attend(grid, data.draw(st.integers(1, 17)), 2, data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 20)), bypass)


@pytest.mark.parametrize("grid", GRIDS)
def test_nothing_comes_from_the_future(grid: tuple[int, int, int]) -> None:
    """Through pool and attend together: output at t has a gradient of exactly 0 in every later token, and in every offset of every later window."""
    window, stride, origin = grid
    length = 18
    logits, payload = pool_inputs(length, window, 1, 1, groups=1, dim=4, batch=1)
    q, _, _, k, v = attend_inputs(grid, length, 1, 2, batch=1)
    for leaf in (logits, payload, k, v):
        leaf.requires_grad_()
    summary, _ = reference.pool(logits, payload, window=window, stride=stride, origin=origin)
    out = run_attend([q, *[summary.transpose(1, 2)] * 2, k, v], grid, 2, (0,))
    for t in range(length):
        gradients = torch.autograd.grad(out[:, :, t].square().sum(), (logits, payload, k, v), retain_graph=True, allow_unused=True)
        for name, gradient, time in zip(("logits", "payload", "k", "v"), gradients, (1, 1, 2, 2), strict=True):
            if gradient is not None:
                assert not gradient.movedim(time, 0)[t + 1 :].any(), (name, t)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_query_at_the_end_of_a_window_is_the_first_to_see_it(grid: tuple[int, int, int]) -> None:
    window, stride, origin = grid
    parts = attend_inputs(grid, 20, 1, 2, batch=1)
    parts[1].requires_grad_()
    parts[2].requires_grad_()
    out = run_attend(parts, grid, 1, ())
    for j in range(parts[1].shape[2]):
        end = origin + j * stride + window - 1
        for t, sees in ((end - 1, False), (end, True), (19, True)):
            if t < 0:
                continue
            for gradient in torch.autograd.grad(out[:, :, t].square().sum(), parts[1:3], retain_graph=True):
                assert bool(gradient[:, :, j].any()) == sees, (j, t)


def test_every_query_sees_something() -> None:
    for grid in GRIDS:
        positions = torch.arange(40)
        count = len(reference.window_index(40, *grid))
        seen = reference.visible(positions, positions, count, window=grid[0], stride=grid[1], origin=grid[2], local=1)
        assert seen.any(dim=1).all()
        assert seen[positions, count + positions].all(), "a query sees itself"


def test_gradients_are_right() -> None:
    for grid, channels, per_offset in (((4, 2, -1), 1, False), ((3, 3, 0), 2, True)):
        logits, payload = (x[:, :7, :, :1].requires_grad_() for x in pool_inputs(7, grid[0], channels, grid[0] if per_offset else 1, dim=2, batch=1))
        assert torch.autograd.gradcheck(lambda s, u, grid=grid: reference.pool(s, u, window=grid[0], stride=grid[1], origin=grid[2]), (logits, payload))
        parts = [x.requires_grad_() for x in attend_inputs(grid, 7, 1, 2, dim=2, batch=1)]
        assert torch.autograd.gradcheck(lambda *xs, grid=grid: run_attend(list(xs), grid, 2, (0,)), parts)


def test_bypass_phases_are_relative_to_the_grid() -> None:
    t = torch.arange(12)
    assert t[reference.is_bypassed(t, stride=4, origin=-3, phases=(0,))].tolist() == [1, 5, 9]
    assert t[reference.is_bypassed(t, stride=4, origin=0, phases=(0, 3))].tolist() == [0, 3, 4, 7, 8, 11]
    assert not reference.is_bypassed(t, stride=4, origin=0, phases=()).any()
