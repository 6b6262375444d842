"""Pooling from logits and payload by role against the reference: outputs, every gradient, precisions, and rows that must not be read."""

from __future__ import annotations

import pytest
import torch
from tolerance import gradients

from mitigate.kernels import by_role, reference, visibility

GROUPS, DIM = 2, 3
GRIDS = [(1, 1, 0), (2, 2, 0), (8, 8, 0), (8, 8, -5), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (16, 8, -9)]


def leaves_of(grid: tuple[int, int, int], length: int, roles_z: int, roles_u: int, channels: int) -> list[torch.Tensor]:
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
            z, u = leaves = leaves_of(grid, length, roles_z, roles_u, channels)
            offsets = [x.expand(-1, -1, window, -1, -1) if x.shape[2] == 1 else x[:, :, role] for x in leaves]
            wanted, _ = reference.pool(*offsets, window=window, stride=stride, origin=origin)
            found = by_role.pool(z, u, window=window, stride=stride, origin=origin)
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
                out = by_role.pool(*leaves, window=window, stride=stride, origin=origin)
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
    z, u = (x.detach().float() for x in leaves_of((16, 8, -9), 41, 2, 1, 1))
    narrow, wide = ([x.requires_grad_() for x in (z.clone(), u.to(dtype).to(kind))] for kind in (dtype, torch.float32))
    found, wanted = (by_role.pool(*leaves, window=16, stride=8, origin=-9) for leaves in (narrow, wide))
    assert torch.equal(found, wanted.to(dtype))
    for one, other in zip(gradients(found, torch.ones_like(found), narrow), gradients(wanted, torch.ones_like(wanted), wide), strict=True):
        assert torch.equal(one, other.to(one.dtype))


def test_tables_of_many_lengths_are_made_once() -> None:
    """Lengths vary from one batch of a training to the next; tables that were dropped and made again would cost more than pooling."""
    made = by_role._small_tables.cache_info().misses
    for _ in range(2):
        for length in range(122, 135):
            for origin in (0, -4):
                by_role.pool(torch.zeros(2, length, 2, 1, 1), torch.zeros(2, length, 1, 1, DIM), window=16, stride=8, origin=origin)
    assert by_role._small_tables.cache_info().misses - made == 26


def test_index_types() -> None:
    assert by_role._index_type({"empty": torch.empty(0), "small": torch.tensor([2**31 - 1])}) == torch.int32
    assert by_role._index_type({"large": torch.tensor([2**31])}) == torch.int64
