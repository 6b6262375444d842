"""The fast pooling path against the reference: outputs, every gradient, three precisions, and rows that must not be read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_good_as, gradients

from mitigate.kernels import reference, views, visibility

GROUPS, DIM, WIDTH = 2, 3, 5
GRIDS = [(1, 1, 0), (2, 2, 0), (8, 8, 0), (8, 8, -5), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (16, 8, -9)]
KINDS = ("scalar", "vector", "no-bias", "content")


def parameters(window: int, length: int, kind: str, scale: float = 1.0) -> list[torch.Tensor]:
    """Hidden rows, payload, gate weight and bias in fp64."""
    generator = torch.Generator().manual_seed(7 * length + window)
    outputs = GROUPS * (DIM if kind == "vector" else 1)
    shapes = [(2, length, WIDTH), (2, length, GROUPS, DIM), (1 if kind == "content" else window, WIDTH, outputs), (window, outputs)]
    hidden, payload, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [hidden, payload, weight * scale, torch.zeros_like(bias) if kind in ("no-bias", "content") else bias]


def fast(parts: Sequence[torch.Tensor], grid: tuple[int, int, int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Summaries and gates as the compressor makes them."""
    hidden, payload, weight, bias = parts
    window, stride, origin = grid
    count = visibility.num_windows(hidden.shape[1], *grid)
    exists = views.exists(window=window, stride=stride, first=origin, count=count)
    cut = {"window": window, "stride": stride, "start": origin, "count": count}
    rows = views.windows(hidden, **cut)
    alpha = views.gate_weights(rows, weight.expand(window, -1, -1), None if kind in ("no-bias", "content") else bias, exists)
    alpha = alpha.unflatten(-1, (GROUPS, -1))
    return views.weighted_sum(alpha, views.windows(payload.flatten(2), **cut).unflatten(-1, (GROUPS, DIM))), alpha


def plain(parts: Sequence[torch.Tensor], grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the reference, logits made in the same precision as the fast path's."""
    hidden, payload, weight, bias = parts
    wide = torch.promote_types(hidden.dtype, torch.float32)
    window = bias.shape[0]
    logits = torch.stack([hidden.to(wide) @ weight[i % weight.shape[0]].to(wide) + bias[i].to(wide) for i in range(window)], dim=2)
    return reference.pool(logits.unflatten(-1, (GROUPS, -1)), payload[:, :, None], window=window, stride=grid[1], origin=grid[2])


def compare(grid: tuple[int, int, int], length: int, kind: str, dtype: torch.dtype, scale: float = 1.0) -> None:
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
def test_pool_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    for grid in GRIDS:
        for length in (1, 7, 29, 41):
            compare(grid, length, kind, dtype)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_pool_equals_the_reference_anywhere(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 13))
    grid = (window, data.draw(st.integers(1, window)), data.draw(st.integers(1 - window, 0)))
    compare(grid, data.draw(st.integers(1, 45)), data.draw(st.sampled_from(KINDS)), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_huge_gate_logits_stay_finite(dtype: torch.dtype) -> None:
    for grid in ((8, 8, -5), (8, 4, -4)):
        compare(grid, 29, "scalar", dtype, scale=1e5)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_windows_cut_from_any_row_read_their_tokens_and_no_other(data: st.DataObject) -> None:
    """Also from the middle, as a cache does: rows are poisoned, except those that belong to the windows asked for."""
    window = data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(1, window))
    start, count = data.draw(st.integers(1 - window, 20)), data.draw(st.integers(0, 4))
    last = start + (count - 1) * stride + window - 1
    length = max(last, 0) + 1 + data.draw(st.integers(0, 9)) if count else data.draw(st.integers(1, 9))
    rows = torch.full((1, length, 2), float("nan"))
    wanted = torch.zeros(1, count, window, 2)
    for j in range(count):
        for i in range(window):
            t = start + j * stride + i
            if 0 <= t < length:
                rows[0, t] = torch.tensor([float(t + 1), -float(t + 1)])
                wanted[0, j, i] = rows[0, t]
    if last < 0 and count:
        return
    found = views.windows(rows, window=window, stride=stride, start=start, count=count)
    assert torch.equal(found, wanted)


def test_a_window_beyond_the_rows_is_refused() -> None:
    rows = torch.zeros(1, 15, 2)
    assert views.windows(rows, window=8, stride=4, start=-4, count=3).shape == (1, 3, 8, 2)
    with pytest.raises(ValueError, match=r"windows\.count: window 3 must end inside the 15 rows, it ends at row 15"):
        views.windows(rows, window=8, stride=4, start=-4, count=4)


def test_no_copy_without_overlap() -> None:
    rows = torch.randn(2, 24, 3)
    assert views.windows(rows, window=8, stride=8, start=0, count=3).data_ptr() == rows.data_ptr()


def test_which_offsets_exist() -> None:
    assert views.exists(window=4, stride=4, first=0, count=2) is None
    assert views.exists(window=4, stride=4, first=-2, count=0) is None
    mask = views.exists(window=4, stride=2, first=-3, count=3)
    assert mask is not None
    assert mask.tolist() == [[False, False, False, True], [False, True, True, True], [True, True, True, True]]


def test_uniform_weights_are_even_over_what_exists() -> None:
    mask = views.exists(window=4, stride=4, first=-2, count=2)
    alpha = views.uniform_weights(2, 2, 4, mask, torch.zeros((), dtype=torch.float64))
    assert alpha.dtype == torch.float64
    assert alpha[0, :, :, 0].tolist() == [[0, 0, 0.5, 0.5], [0.25] * 4]


def test_gates_are_fp32_under_autocast() -> None:
    rows, weight = torch.randn(1, 2, 4, WIDTH), torch.randn(4, WIDTH, 2)
    outside = views.gate_weights(rows, weight, None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(views.gate_weights(rows, weight, None, None), outside)


@pytest.mark.parametrize("grid", [(8, 8, -3), (8, 4, -4)])
def test_non_contiguous_rows(grid: tuple[int, int, int]) -> None:
    hidden, payload, weight, bias = parameters(grid[0], 29, "scalar")
    packed = torch.cat([hidden, payload.flatten(2)], dim=2)
    views = [packed[..., :WIDTH], packed[..., WIDTH:].unflatten(-1, (GROUPS, DIM)), weight.mT.contiguous().mT, bias[:1].expand(grid[0], -1)]
    straight = [view.clone(memory_format=torch.contiguous_format) for view in views]
    assert torch.equal(fast(views, grid, "scalar")[0], fast(straight, grid, "scalar")[0])
    turned = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(fast([turned, payload, weight, bias], grid, "scalar")[0], fast([hidden, payload, weight, bias], grid, "scalar")[0])


def test_open_tail_gets_gradient_zero() -> None:
    for grid in GRIDS:
        parts = [x.requires_grad_() for x in parameters(grid[0], 29, "scalar")]
        summary, _ = fast(parts, grid, "scalar")
        covered = visibility.covered(28, *grid)
        for gradient in gradients(summary, torch.ones_like(summary), parts[:2]):
            assert not gradient[:, covered:].any()
            assert gradient[:, :covered].any() or grid[0] == 1, "a window of one token has no gate to learn"


# logits by role, and products in place of windows -------------------------------------------------------------------------------------------------


def by_role(grid: tuple[int, int, int], length: int, roles_z: int, roles_u: int, channels: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, roles_z, GROUPS, channels), (2, length, roles_u, GROUPS, DIM))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("channels", [1, DIM])
@pytest.mark.parametrize("grid", GRIDS)
def test_pool_by_role_equals_the_reference(grid: tuple[int, int, int], channels: int) -> None:
    """With the weights kept for the backward pass; the operators' tests make them again."""
    window, stride, origin = grid
    roles = -(-window // stride)
    role = torch.arange(window) // stride
    for length in (1, 29, 41):
        for roles_z, roles_u in {(1, 1), (roles, 1), (roles, roles)}:
            z, u = leaves = by_role(grid, length, roles_z, roles_u, channels)
            offsets = [x.expand(-1, -1, window, -1, -1) if x.shape[2] == 1 else x[:, :, role] for x in leaves]
            wanted, _ = reference.pool(*offsets, window=window, stride=stride, origin=origin)
            found = views.pool(z, u, window=window, stride=stride, origin=origin)
            weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            for one, other in zip([found, *gradients(found, weight, leaves)], [wanted, *gradients(wanted, weight, leaves)], strict=True):
                torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("groups", [4, 5])
@pytest.mark.parametrize("grid", [(8, 8, -3), (16, 8, -9), (12, 8, -2), (7, 2, 0)])
def test_scalar_gates_read_no_other_row(grid: tuple[int, int, int], groups: int) -> None:
    """Rows that no window reads, by role, are poisoned: nothing shows, their gradient is exactly 0, a second run is equal, and autocast changes nothing.

    Four heads share a product, five have one each.
    """
    window, stride, origin = grid
    roles, length = -(-window // stride), 45
    count = visibility.num_windows(length, *grid)
    token = origin + stride * torch.arange(count)[:, None] + torch.arange(window)
    role = (torch.arange(window) // stride).expand_as(token)
    read_TR = torch.zeros(length, roles, dtype=torch.bool)
    read_TR[token[token >= 0], role[token >= 0]] = True
    generator = torch.Generator().manual_seed(window)
    for shared in (False, True):
        read = read_TR.any(1, keepdim=True) if shared else read_TR
        clean = [torch.randn(2, length, read.shape[1], groups, d, generator=generator) * read[..., None, None] for d in (1, DIM)]
        poisoned = [x.masked_fill(~read[..., None, None], float("nan")) for x in clean]
        results = []
        for leaves in (clean, poisoned, poisoned):
            leaves = [x.clone().requires_grad_() for x in leaves]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(results) == 2):
                out = views.pool(*leaves, window=window, stride=stride, origin=origin)
            results.append([out, *gradients(out, torch.ones_like(out), leaves)])
        for one, *others in zip(*results, strict=True):
            assert all(torch.equal(one, other) for other in others)
        for gradient in results[0][1:]:
            assert not gradient[:, ~read].any()
        offsets = [x.expand(-1, -1, window, -1, -1) if shared else x[:, :, role[0]] for x in clean]
        wanted, _ = reference.pool(*[x.double() for x in offsets], window=window, stride=stride, origin=origin)
        torch.testing.assert_close(results[0][0].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scalar_gates_sum_narrow_payloads_in_fp32(dtype: torch.dtype) -> None:
    z, u = (x.detach().float() for x in by_role((16, 8, -9), 41, 2, 1, 1))
    narrow, wide = ([x.requires_grad_() for x in (z.clone(), u.to(dtype).to(kind))] for kind in (dtype, torch.float32))
    found, wanted = (views.pool(*leaves, window=16, stride=8, origin=-9) for leaves in (narrow, wide))
    assert torch.equal(found, wanted.to(dtype))
    for one, other in zip(gradients(found, torch.ones_like(found), narrow), gradients(wanted, torch.ones_like(wanted), wide), strict=True):
        assert torch.equal(one, other.to(one.dtype))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_product_in_place_of_windows_cut_from_any_row(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 12))
    stride, groups = data.draw(st.integers(1, window)), data.draw(st.sampled_from([1, 2, 17]))
    start, count = data.draw(st.integers(1 - window, 9)), data.draw(st.integers(1, 5))
    length = max(start + (count - 1) * stride + window, 1) + data.draw(st.integers(0, 9))
    if start + (count - 1) * stride + window <= 0:
        return
    generator = torch.Generator().manual_seed(length)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, count, window, groups), (2, length, groups, DIM))]
    exists = views.exists(window=window, stride=stride, first=start, count=count)
    leaves[0] = (leaves[0] if exists is None else leaves[0] * exists[None, :, :, None]).requires_grad_()
    alpha, u = leaves[0], leaves[1].requires_grad_()
    cut = {"window": window, "stride": stride, "start": start}
    found = views.band_sum(alpha, u.unsqueeze(2), **cut)
    wanted = views.weighted_sum(alpha[..., None], views.windows(u.flatten(2), count=count, **cut).unflatten(-1, (groups, DIM)))
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    for one, other in zip([found, *gradients(found, weight, leaves)], [wanted, *gradients(wanted, weight, leaves)], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("outputs", [2, WIDTH])
@pytest.mark.parametrize("maps", ["per offset", "shared"])
def test_gates_of_rows_equal_gates_of_windows(maps: str, outputs: int) -> None:
    for window, stride, origin in GRIDS:
        count = visibility.num_windows(29, window, stride, origin)
        generator = torch.Generator().manual_seed(window)
        shapes = ((2, 29, WIDTH), (window if maps == "per offset" else 1, WIDTH, outputs), (window, outputs))
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        hidden, weight, bias = leaves
        exists = views.exists(window=window, stride=stride, first=origin, count=count)
        cut = {"window": window, "stride": stride, "start": origin, "count": count}
        found = views.gate_weights_of_rows(hidden, weight, bias, exists, **cut)
        wanted = views.gate_weights(views.windows(hidden, **cut), weight.expand(window, -1, -1), bias, exists)
        pull = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
        for one, other in zip([found, *gradients(found, pull, leaves)], [wanted, *gradients(wanted, pull, leaves)], strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
