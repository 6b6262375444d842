"""The compressor's two ways to pool hidden rows, views of windows side by side and rows by role, against the reference: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_good_as, gradients

from mitigate.kernels import by_role, reference, views, visibility

GROUPS, DIM, WIDTH = 2, 3, 5
GRIDS = [(1, 1, 0), (2, 2, 0), (8, 8, 0), (8, 8, -5), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (16, 8, -9)]
KINDS = ("scalar", "vector", "no-bias", "content")

Grid = tuple[int, int, int]
Path = Callable[[Sequence[torch.Tensor], Grid, str], tuple[torch.Tensor, torch.Tensor]]  # summaries and gates of parts, grid and kind


def parameters(window: int, length: int, kind: str, scale: float = 1.0) -> list[torch.Tensor]:
    """Hidden rows, payload, gate weight and bias in fp64."""
    generator = torch.Generator().manual_seed(7 * length + window)
    outputs = GROUPS * (DIM if kind == "vector" else 1)
    shapes = [(2, length, WIDTH), (2, length, GROUPS, DIM), (1 if kind == "content" else window, WIDTH, outputs), (window, outputs)]
    hidden, payload, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [hidden, payload, weight * scale, torch.zeros_like(bias) if kind in ("no-bias", "content") else bias]


def by_views(parts: Sequence[torch.Tensor], grid: Grid, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, payload, weight, bias = parts
    window, _, origin = grid
    count = visibility.num_windows(hidden.shape[1], *grid)
    exists = views.exists(window=window, first=origin, count=count)
    cut = {"window": window, "start": origin, "count": count}
    alpha = views.gate_weights(views.windows(hidden, **cut), weight, None if kind in ("no-bias", "content") else bias, exists)
    alpha = alpha.unflatten(-1, (GROUPS, -1))
    return views.weighted_sum(alpha, views.windows(payload.flatten(2), **cut).unflatten(-1, (GROUPS, DIM))), alpha


def by_roles(parts: Sequence[torch.Tensor], grid: Grid, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, payload, weight, bias = parts
    window, stride, origin = grid
    count = visibility.num_windows(hidden.shape[1], *grid)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not count:
        hidden, payload = hidden[:, :0], payload[:, :0]
        z = hidden.to(wide).new_zeros(hidden.shape[0], 0, 1, weight.shape[2])
    else:
        bias = None if kind in ("no-bias", "content") else bias.to(wide)
        z = by_role.rows_by_role(hidden.to(wide), weight.to(wide), bias, window=window, stride=stride, start=origin, count=count)
    logits, cut = z.unflatten(-1, (GROUPS, -1)), {"window": window, "stride": stride, "origin": origin}
    summaries = by_role.pool(logits, payload[:, : z.shape[1], None], **cut)
    return summaries, by_role.gates(z, **cut).unflatten(-1, (GROUPS, -1))


def paths(grid: Grid, count: int = 2) -> list[Path]:
    """Those that the compressor takes for `count` windows of a grid, on one device or another."""
    return [by_views, by_roles] if grid[0] == grid[1] or count == 1 else [by_roles]


def plain(parts: Sequence[torch.Tensor], grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the reference, logits made in the same precision as the fast path's."""
    hidden, payload, weight, bias = parts
    wide = torch.promote_types(hidden.dtype, torch.float32)
    window = bias.shape[0]
    logits = torch.stack([hidden.to(wide) @ weight[i % weight.shape[0]].to(wide) + bias[i].to(wide) for i in range(window)], dim=2)
    return reference.pool(logits.unflatten(-1, (GROUPS, -1)), payload[:, :, None], window=window, stride=grid[1], origin=grid[2])


def compare(fast: Path, grid: Grid, length: int, kind: str, dtype: torch.dtype, scale: float = 1.0) -> None:
    exact_parts = [x.to(dtype).double().requires_grad_() for x in parameters(grid[0], length, kind, scale)]
    exact = plain(exact_parts, grid)
    weight = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact_gradients = gradients(exact[0], weight, exact_parts)
    results = []
    for run in (lambda xs: fast(xs, grid, kind), lambda xs: plain(xs, grid)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact_parts]
        summary, alpha = run(leaves)
        assert summary.dtype == dtype
        results.append([summary, alpha, *gradients(summary, weight, leaves)])
    names = ["summary", "gates", "hidden", "payload", "weight", "bias"]
    if kind in ("no-bias", "content"):
        names = names[:-1]
    for name, ours, theirs, right in zip(names, *results, [*exact, *exact_gradients], strict=False):
        if dtype == torch.float64:
            torch.testing.assert_close(ours, right, atol=1e-12 * max(1.0, float(right.detach().abs().max()) if right.numel() else 1.0), rtol=0, msg=name)
        else:
            assert_as_good_as(ours, theirs, right, f"{name} {grid} {kind}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_pooling_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    for grid in GRIDS:
        for path in paths(grid):
            for length in (1, 7, 29, 41):
                compare(path, grid, length, kind, dtype)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_pooling_equals_the_reference_anywhere(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 13))
    grid = (window, data.draw(st.integers(1, window) | st.just(window)), data.draw(st.integers(1 - window, 0)))
    length, kind = data.draw(st.integers(1, 45)), data.draw(st.sampled_from(KINDS))
    for path in paths(grid):
        compare(path, grid, length, kind, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_window_alone_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    """As decoding pools it, whatever the stride."""
    for grid in GRIDS:
        length = grid[2] + grid[0]
        assert visibility.num_windows(length, *grid) == 1
        for path in paths(grid, 1):
            compare(path, grid, length, kind, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_huge_gate_logits_stay_finite(dtype: torch.dtype) -> None:
    for grid in ((8, 8, -5), (8, 4, -4)):
        for path in paths(grid):
            compare(path, grid, 29, "scalar", dtype, scale=1e5)


@pytest.mark.parametrize("grid", [(8, 8, -3), (8, 4, -4)])
def test_non_contiguous_rows(grid: Grid) -> None:
    hidden, payload, weight, bias = parameters(grid[0], 29, "scalar")
    packed = torch.cat([hidden, payload.flatten(2)], dim=2)
    strided = [packed[..., :WIDTH], packed[..., WIDTH:].unflatten(-1, (GROUPS, DIM)), weight.mT.contiguous().mT, bias[:1].expand(grid[0], -1)]
    straight = [x.clone(memory_format=torch.contiguous_format) for x in strided]
    turned = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    for path in paths(grid):
        assert torch.equal(path(strided, grid, "scalar")[0], path(straight, grid, "scalar")[0])
        assert torch.equal(path([turned, payload, weight, bias], grid, "scalar")[0], path([hidden, payload, weight, bias], grid, "scalar")[0])


def test_open_tail_gets_gradient_zero() -> None:
    for grid in GRIDS:
        for path in paths(grid):
            parts = [x.requires_grad_() for x in parameters(grid[0], 29, "scalar")]
            summary, _ = path(parts, grid, "scalar")
            covered = visibility.covered(28, *grid)
            for gradient in gradients(summary, torch.ones_like(summary), parts[:2]):
                assert not gradient[:, covered:].any()
                assert gradient[:, :covered].any() or grid[0] == 1, "a window of one token has no gate to learn"
