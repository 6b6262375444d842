"""The append kernel under the interpreter: any split of the tokens against fp64, rollback, the state against the plain stream's, nothing beside it touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import interpreter
import plain_pool
import pytest
import torch
from tolerance import assert_as_good_as

from mitigate.kernels import ops, stream, visibility

if interpreter.INSTALLED:
    from mitigate.kernels import append, tiles

Grid = tuple[int, int, int]
GRIDS = [(1, 1, 0), (2, 2, -1), (8, 8, -3), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (6, 1, -2)]
KINDS = ["scalar", "vector", "uniform", "scalar-shared", "vector-per-role"]


@pytest.fixture(autouse=True)
def _shims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ops, "TRITON", frozenset({"cpu"}))
    with interpreter.shims():
        yield


def inputs(grid: Grid, length: int, kind: str, dim: int = 5, groups: int = 2, batch: int = 1) -> list[torch.Tensor]:
    """Logits and payload by role, fp64."""
    generator = torch.Generator().manual_seed(100 * length + grid[0])
    roles = -(-grid[0] // grid[1])
    roles_z = {"uniform": 0, "scalar-shared": 1}.get(kind, roles)
    z = torch.randn(batch, length, roles_z, groups, dim if kind.startswith("vector") else 1, generator=generator, dtype=torch.float64) * 2
    return [z, torch.randn(batch, length, roles if kind.endswith("per-role") else 1, groups, dim, generator=generator, dtype=torch.float64)]


def start(z: torch.Tensor, u: torch.Tensor, grid: Grid) -> stream.State:
    shape = (u.shape[0], *u.shape[3:])
    return stream.start(*shape, window=grid[0], stride=grid[1], origin=grid[2], channels=z.shape[4] if z.shape[2] else 1)


def feed(state: stream.State, z: torch.Tensor, u: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    found, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= u.shape[1]:
            return torch.cat(found, dim=1)
        found.append(ops.append(state, z[:, at : at + size] if z.shape[2] else None, u[:, at : at + size]))
        at += size
    raise AssertionError


@pytest.mark.parametrize(("kind", "grid"), list(itertools.islice(zip(itertools.cycle(KINDS), itertools.cycle(GRIDS)), 10)))
def test_any_split_at_many_grids(kind: str, grid: Grid) -> None:
    z, u = (x.float() for x in inputs(grid, 15, kind))
    right, usual = plain_pool.by_role(z.double(), u.double(), grid), plain_pool.by_role(z, u, grid)
    for sizes in ([15], [1], [max(grid[1] - 1, 1), grid[0] + 3]):
        state = start(z, u, grid)
        found = feed(state, z, u, sizes)
        assert found.shape == right.shape
        assert_as_good_as(found, usual, right, f"{kind} {grid} {sizes}")
    again = start(z, u, grid)
    assert torch.equal(feed(again, z, u, sizes), found), "two runs agree to the bit"
    assert all(torch.equal(getattr(state, name), getattr(again, name)) for name in ("most", "total", "weighted"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_with_shipped_tiles(dtype: torch.dtype) -> None:
    for grid, dim, kind in (((32, 16, -5), 128, "scalar"), ((8, 4, -4), 136, "vector-per-role"), ((16, 16, 0), 24, "scalar-shared")):
        z, u = (x.to(dtype) for x in inputs(grid, 45, kind, dim, groups=1, batch=1))
        found = feed(start(z, u, grid), z, u, [7, 1])
        assert found.dtype == dtype
        assert_as_good_as(found, plain_pool.by_role(z, u, grid), plain_pool.by_role(z.double(), u.double(), grid), f"{kind} {grid} {dtype}")


def test_the_state_is_that_of_the_plain_stream() -> None:
    """Open windows between calls, empty slots included: what a snapshot holds does not depend on the device."""
    for grid, kind in (((8, 8, -3), "scalar"), ((5, 3, -4), "vector"), ((7, 2, -6), "scalar")):
        z, u = (x.float() for x in inputs(grid, 17, kind, batch=2))
        ours, theirs = start(z, u, grid), start(z, u, grid)
        for at, stop in itertools.pairwise((0, 1, 6, 7, 17)):
            ops.append(ours, z[:, at:stop], u[:, at:stop])
            stream.append(theirs, z[:, at:stop], u[:, at:stop])
            assert ours.seen == theirs.seen == stop
            for name in ("most", "total", "weighted"):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=2e-6, rtol=2e-6, msg=f"{grid} {kind} {stop} {name}")


def test_a_snapshot_rolls_back() -> None:
    grid = (7, 2, -6)
    z, u = (x.float() for x in inputs(grid, 20, "scalar"))
    state, straight = start(z, u, grid), start(z, u, grid)
    for one in (state, straight):
        ops.append(one, z[:, :9], u[:, :9])
    kept = state.snapshot()
    ops.append(state, -3 * z[:, :5], u[:, :5])
    assert torch.equal(ops.append(kept, z[:, 9:], u[:, 9:]), ops.append(straight, z[:, 9:], u[:, 9:]))


def test_logits_far_apart_and_far_from_zero() -> None:
    grid = (8, 4, -3)
    for scale in (1e5, -1e5):
        z, u = (x.float() for x in inputs(grid, 19, "vector"))
        z = z * abs(scale) + scale
        found = feed(start(z, u, grid), z, u, [3])
        assert_as_good_as(found, plain_pool.by_role(z, u, grid), plain_pool.by_role(z.double(), u.double(), grid), f"{scale}")


def test_tokens_masked_by_a_logit_of_minus_infinity() -> None:
    grid = (8, 4, -3)
    z, u = (x.float() for x in inputs(grid, 25, "scalar"))
    z[:, ::3] = z[:, 5:13] = float("-inf")
    right = plain_pool.by_role(z.double(), u.double(), grid)
    assert right.isnan().any()
    torch.testing.assert_close(feed(start(z, u, grid), z, u, [1, 4]).double(), right, atol=1e-6, rtol=0, equal_nan=True)


def test_inputs_with_any_strides() -> None:
    """Slices of packed tensors and expanded ones are read as they are; what lies beside them is NaN."""
    grid, dim = (8, 4, -3), 8
    z, u = (x.float() for x in inputs(grid, 15, "scalar", dim))
    wide = torch.full((1, 30, 1, 2, 2 * dim), float("nan"))
    wide[:, ::2, :, :, dim:] = u
    turned = z.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    assert torch.equal(feed(start(z, u, grid), turned, wide[:, ::2, :, :, dim:], [4]), feed(start(z, u, grid), z, u, [4]))
    one = u[:, :, :, :1].expand(-1, -1, -1, 2, -1)
    assert torch.equal(feed(start(z, one, grid), z, one, [4]), feed(start(z, one, grid), z, one.contiguous(), [4]))


def test_positions_far_from_zero() -> None:
    """After 2^30 tokens the same windows end, with the same summaries."""
    grid = (8, 4, -4)
    z, u = (x.float() for x in inputs(grid, 21, "scalar"))
    near, far = start(z, u, grid), start(z, u, grid)
    for state in (near, far):  # both in the middle of a run of windows: phase 0 of a group far from the start
        state.seen = 40
    far.seen += 2**30
    assert torch.equal(feed(far, z, u, [5]), feed(near, z, u, [5]))
    assert far.seen == 2**30 + 61


def test_nothing_at_all() -> None:
    grid = (8, 4, 0)
    for batch, length in ((0, 9), (2, 0)):
        z, u = (x.float() for x in inputs(grid, 9, "scalar", batch=batch))
        state = start(z, u, grid)
        count = visibility.num_windows(length, *grid)
        assert ops.append(state, z[:, :length], u[:, :length]).shape == (batch, count, 2, 5)
        assert state.seen == length


def test_a_wide_state_is_plain_pytorch() -> None:
    grid = (8, 4, -3)
    z, u = inputs(grid, 15, "scalar")
    state = stream.start(1, 2, 5, window=8, stride=4, origin=-3, wide=torch.float64)
    torch.testing.assert_close(feed(state, z, u, [4]), plain_pool.by_role(z, u, grid), atol=1e-12, rtol=0)


def test_a_small_tile_gives_the_same() -> None:
    grid = (12, 8, 0)
    z, u = (x.float() for x in inputs(grid, 30, "vector", dim=8))
    state, other = start(z, u, grid), start(z, u, grid)
    options: dict[str, Any] = {"window": 12, "stride": 8, "origin": 0, "seen": 0}
    found = append.append(z, u, state.most, state.total, state.weighted, **options, tile=tiles.PoolTile(1, 2, 4))
    torch.testing.assert_close(found, ops.append(other, z, u))


interpreter.own_process(globals(), __file__)
