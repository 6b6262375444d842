"""Streaming append: any split of the tokens gives what one pass gives, at every origin; snapshots roll back; the state is small."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_good_as

from mitigate.kernels import reference, stream, visibility

Grid = tuple[int, int, int]


def tokens(grid: Grid, length: int, channels: int = 1, roles_z: int | None = None, roles_u: int = 1, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and payload by role, fp64, G = 2, D = 3."""
    generator = torch.Generator().manual_seed(length + 100 * grid[0])
    roles = -(-grid[0] // grid[1])
    z = torch.randn(2, length, roles if roles_z is None else roles_z, 2, channels, generator=generator, dtype=torch.float64) * scale
    return z, torch.randn(2, length, roles_u, 2, 3, generator=generator, dtype=torch.float64)


def one_pass(z: torch.Tensor, u: torch.Tensor, grid: Grid) -> torch.Tensor:
    window, stride, origin = grid
    role = torch.arange(window) // stride
    by_offset = [x.expand(-1, -1, window, -1, -1) if x.shape[2] == 1 else x[:, :, role] for x in (z, u)]
    return reference.pool(by_offset[0], by_offset[1], window=window, stride=stride, origin=origin)[0]


def fresh(z: torch.Tensor, grid: Grid, wide: torch.dtype = torch.float64) -> stream.State:
    return stream.start(z.shape[0], 2, 3, window=grid[0], stride=grid[1], origin=grid[2], channels=z.shape[-1], wide=wide)


def feed(state: stream.State, z: torch.Tensor, u: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Append in pieces of the given sizes, over and over, and check that each piece emits the windows that it completes."""
    found, at, grid = [], 0, (state.window, state.stride, state.origin)
    for size in itertools.cycle(sizes):
        if at >= z.shape[1]:
            break
        before = visibility.num_windows(state.seen, *grid)
        found.append(stream.append(state, z[:, at : at + size], u[:, at : at + size]))
        at += size
        assert state.seen == min(at, z.shape[1])
        assert before + found[-1].shape[1] == visibility.num_windows(state.seen, *grid)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("channels", [1, 3])
def test_any_split_at_every_origin(channels: int) -> None:
    for window, stride in ((8, 8), (8, 4), (5, 3), (7, 2), (1, 1), (6, 1), (12, 8)):
        for origin in range(1 - window, 1):
            grid = (window, stride, origin)
            z, u = tokens(grid, 41, channels)
            wanted = one_pass(z, u, grid)
            for sizes in ([41], [1], [max(stride - 1, 1)], [stride], [window + 3]):
                torch.testing.assert_close(feed(fresh(z, grid), z, u, sizes), wanted, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_splits(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(1, window))
    grid = (window, stride, data.draw(st.integers(1 - window, 0)))
    roles = -(-window // stride)
    z, u = tokens(
        grid, data.draw(st.integers(1, 50)), data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, roles])), data.draw(st.sampled_from([1, roles]))
    )
    sizes = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=9))
    torch.testing.assert_close(feed(fresh(z, grid), z, u, sizes), one_pass(z, u, grid), atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_snapshot_rolls_back(data: st.DataObject) -> None:
    """Speculative tokens that are taken back leave no trace, to the bit."""
    window = data.draw(st.integers(1, 9))
    stride = data.draw(st.integers(1, window))
    grid = (window, stride, data.draw(st.integers(1 - window, 0)))
    z, u = tokens(grid, 40)
    cut, wrong = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 10))
    plain, state = fresh(z, grid), fresh(z, grid)
    for one in (plain, state):
        stream.append(one, z[:, :cut], u[:, :cut])
    kept = state.snapshot()
    stream.append(state, -3 * z[:, :wrong], u[:, :wrong])
    assert torch.equal(stream.append(kept, z[:, cut:], u[:, cut:]), stream.append(plain, z[:, cut:], u[:, cut:]))
    assert kept.seen == plain.seen == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_as_precise_as_one_pass(dtype: torch.dtype, scale: float) -> None:
    for grid in ((8, 4, -4), (8, 8, -3), (16, 8, 0)):
        z, u = (x.to(dtype) for x in tokens(grid, 61, 3, scale=scale))
        found = feed(fresh(z, grid, torch.float32), z, u, [1, 5])
        assert found.dtype == dtype
        assert_as_good_as(found, one_pass(z, u, grid), one_pass(z.double(), u.double(), grid), f"{grid}")


@pytest.mark.parametrize("channels", [1, 3])
def test_tokens_masked_by_a_logit_of_minus_infinity(channels: int) -> None:
    """They have no weight wherever they stand; a window of nothing else has no summary, in a stream as in one pass."""
    grid = (8, 4, -3)
    z, u = tokens(grid, 41, channels)
    z[:, ::3] = z[:, 16:19] = float("-inf")
    wanted = one_pass(z, u, grid)
    assert torch.isfinite(wanted).all()
    for sizes in ([41], [1], [3, 2]):
        torch.testing.assert_close(feed(fresh(z, grid), z, u, sizes), wanted, atol=1e-12, rtol=0)
    z[:, 9:17] = float("-inf")
    wanted = one_pass(z, u, grid)
    assert wanted.isnan().any()
    torch.testing.assert_close(feed(fresh(z, grid), z, u, [1]), wanted, atol=1e-12, rtol=0, equal_nan=True)


def test_no_gradient_keeps_the_tokens() -> None:
    z, u = tokens((8, 4, 0), 20)
    state = fresh(z, (8, 4, 0))
    found = stream.append(state, z.requires_grad_(), u.requires_grad_())
    assert not any(x.requires_grad for x in (found, state.most, state.total, state.weighted))


def test_the_state_is_small_and_constant() -> None:
    state = stream.start(1, 1, 128, window=32, stride=16)
    assert state.bytes == 4 * 2 * (2 * 1 + 128) == 1040, "1.0 KB per head and branch"
    assert stream.start(3, 2, 128, window=8, stride=4, channels=128).bytes == 3 * 2 * 4 * 2 * (3 * 128)
    z, u = tokens((8, 4, -4), 100)
    state = fresh(z, (8, 4, -4), torch.float32)
    before = state.bytes
    stream.append(state, z, u)
    assert state.bytes == before


def test_nothing_appended() -> None:
    z, u = tokens((8, 4, -4), 9)
    state = fresh(z, (8, 4, -4))
    assert stream.append(state, z[:, :0], u[:, :0]).shape == (2, 0, 2, 3)
    assert state.seen == 0


@pytest.mark.parametrize("grid", [(4, 5, 0), (4, 0, 0), (4, 2, 1), (4, 2, -4)])
def test_a_grid_out_of_bounds_is_refused(grid: Grid) -> None:
    with pytest.raises(ValueError, match=r"stream: needs 1 <= stride <= window and -window < origin <= 0, got window 4"):
        stream.start(1, 1, 2, window=grid[0], stride=grid[1], origin=grid[2])
