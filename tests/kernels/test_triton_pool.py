"""The pool kernels under the interpreter: output, log-sum-exp and every gradient against fp64, in three precisions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence

import interpreter
import plain_pool
import pytest
import torch
from tolerance import assert_as_good_as, gradients

from mitigate.kernels import reference, visibility

if interpreter.INSTALLED:
    from mitigate.kernels import pool, tiles

Grid = tuple[int, int, int]
GRIDS = [(1, 1, 0), (2, 2, 0), (2, 1, -1), (8, 8, -3), (8, 4, -4), (12, 8, 0), (5, 3, -4), (7, 2, -6), (6, 1, -2), (16, 16, -9)]
KINDS = ["scalar", "vector", "uniform", "scalar-shared", "vector-per-role", "scalar-per-role"]


@pytest.fixture(autouse=True)
def _shims() -> Iterator[None]:
    with interpreter.shims():
        yield


def inputs(grid: Grid, length: int, kind: str, dim: int = 5, groups: int = 2, batch: int = 2, scale: float = 2.0) -> list[torch.Tensor]:
    """Logits and payload by role, fp64."""
    generator = torch.Generator().manual_seed(1000 * length + grid[0])
    roles = -(-grid[0] // grid[1])
    roles_z = {"uniform": 0, "scalar-shared": 1}.get(kind, roles)
    z = torch.randn(batch, length, roles_z, groups, dim if kind.startswith("vector") else 1, generator=generator, dtype=torch.float64) * scale
    return [z, torch.randn(batch, length, roles if kind.endswith("per-role") else 1, groups, dim, generator=generator, dtype=torch.float64)]


def from_saved(z: torch.Tensor, u: torch.Tensor, dout: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """dz and du in plain torch from what a forward pass saves: log-sum-exp in fp32 and the output in the payload's precision."""
    window, stride = grid[:2]
    index = reference.window_index(z.shape[1], *grid)
    token, offset, real = index.clamp(min=0), torch.arange(window), (index >= 0)[:, :, None, None]
    role_z = offset // stride if z.shape[2] > 1 else torch.zeros_like(offset)
    role_u = offset // stride if u.shape[2] > 1 else torch.zeros_like(offset)
    s = z[:, token, role_z].float() if z.shape[2] else torch.zeros(*z.shape[:1], *token.shape, z.shape[3], 1)
    rows = u[:, token, role_u]
    lse = s.detach().masked_fill(~real, float("-inf")).logsumexp(dim=2, keepdim=True)
    alpha = (s.detach() - lse).exp() * real
    out = (alpha * rows.detach()).sum(dim=2, keepdim=True).to(u.dtype)
    g = alpha * dout[:, :, None]
    gate = g * (rows.detach().float() - out.float())
    surrogate = (gate * s).sum() + (g * rows).sum()  # its gradients in s and in the rows are those wanted
    return [torch.zeros_like(x) if d is None else d for x, d in zip((z, u), torch.autograd.grad(surrogate, (z, u), allow_unused=True), strict=True)]


def kernels(z: torch.Tensor, u: torch.Tensor, dout: torch.Tensor, grid: Grid, **rest: object) -> list[torch.Tensor]:
    """Output, dz and du of the kernels."""
    window, stride, origin = grid
    options = {"window": window, "stride": stride, "origin": origin, **rest}
    out, lse = pool.pool_fwd(z, u, **options)  # type: ignore[arg-type]
    assert torch.isfinite(lse).all()
    dz, du = pool.pool_bwd(dout, z, u, out, lse, **options)  # type: ignore[arg-type]
    assert dz is not None
    assert (dz.dtype, du.dtype, out.dtype) == (z.dtype, u.dtype, u.dtype)
    return [out, dz, du]


def compare(parts: Sequence[torch.Tensor], grid: Grid, dtype: torch.dtype, gate_dtype: torch.dtype | None = None, **rest: object) -> None:
    dtypes = (gate_dtype or dtype, dtype)
    leaves = [x.to(kind).double().requires_grad_() for x, kind in zip(parts, dtypes, strict=True)]
    exact = plain_pool.by_role(*leaves, grid)
    weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).double()
    wanted = [exact, *gradients(exact, weight, leaves)]
    low = [x.detach().to(kind).requires_grad_() for x, kind in zip(leaves, dtypes, strict=True)]
    theirs = plain_pool.by_role(*low, grid)
    saved = from_saved(*low, weight.to(dtype), grid)
    usual = [[theirs], *zip(gradients(theirs, weight, low), saved, strict=True)]
    ours = kernels(*(x.detach() for x in low), weight.to(dtype), grid, **rest)
    for name, fast, slow, right in zip(("out", "dz", "du"), ours, usual, wanted, strict=True):
        assert_as_good_as(fast, slow, right, f"{name} {grid} {dtype}")


@pytest.mark.parametrize("kind", KINDS)
def test_pool_and_its_gradients(kind: str) -> None:
    for grid, length in itertools.product(GRIDS, (1, 23)):
        compare(inputs(grid, length, kind), grid, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["scalar", "vector-per-role"])
def test_low_precision(kind: str, dtype: torch.dtype) -> None:
    for grid in [(8, 4, -4), (12, 8, -1), (5, 3, -4)]:
        compare(inputs(grid, 37, kind, dim=24), grid, dtype)


def test_gates_in_fp32_beside_a_bf16_payload() -> None:
    compare(inputs((8, 4, -3), 37, "scalar"), (8, 4, -3), torch.bfloat16, gate_dtype=torch.float32)


@pytest.mark.parametrize("dim", [1, 8, 96, 130])
def test_head_dims_and_several_tiles(dim: int) -> None:
    for kind in ("scalar", "vector"):
        compare(inputs((8, 4, -3), 41, kind, dim=dim, groups=1), (8, 4, -3), torch.float32)


def test_channels_and_phases_split_over_programs() -> None:
    for kind in ("vector", "uniform"):
        tile = tiles.PoolTile(groups=2, phases=4, channels=8)
        compare(inputs((24, 12, -7), 60, kind, dim=20, groups=1), (24, 12, -7), torch.float32, tile=tile)
    tile = tiles.PoolTile(groups=1, phases=4, channels=32)
    compare(inputs((24, 12, -7), 60, "scalar", dim=20, groups=1), (24, 12, -7), torch.float32, tile=tile)


@pytest.mark.parametrize("window", [3, 6])
def test_every_stride_and_origin(window: int) -> None:
    for stride in range(1, window + 1):
        for origin in range(1 - window, 1):
            compare(inputs((window, stride, origin), 13, "scalar", dim=2, groups=1, batch=1), (window, stride, origin), torch.float32)


def test_a_sequence_that_completes_no_window_gets_zero_gradients() -> None:
    for length in (0, 1, 7):
        out, dz, du = kernels(torch.randn(2, length, 1, 1, 1), torch.randn(2, length, 1, 1, 4), torch.empty(2, 0, 1, 4), (8, 8, 0))
        assert out.shape == (2, 0, 1, 4)
        assert not dz.any()
        assert not du.any()


def test_empty_batch_and_no_heads() -> None:
    for batch, groups in ((0, 2), (2, 0)):
        out, dz, du = kernels(torch.randn(batch, 9, 1, groups, 1), torch.randn(batch, 9, 1, groups, 4), torch.empty(batch, 2, groups, 4), (4, 4, 0))
        assert [x.numel() for x in (out, dz, du)] == [0, 0, 0]


def test_tokens_that_no_window_reads_get_a_gradient_of_exactly_zero() -> None:
    z, u = (x.float() for x in inputs((8, 4, -3), 30, "scalar-per-role"))
    _, dz, du = kernels(z, u, torch.ones(2, visibility.num_windows(30, 8, 4, -3), 2, 5), (8, 4, -3))
    tail = visibility.covered(29, 8, 4, -3)
    assert tail < 30
    for gradient in (dz, du):
        assert not gradient[:, tail:].any()
        assert gradient[:, :tail].any()


def test_two_runs_agree_to_the_bit_and_a_doubled_gradient_doubles() -> None:
    z, u = (x.float() for x in inputs((8, 4, -3), 41, "vector"))
    dout = torch.randn(2, visibility.num_windows(41, 8, 4, -3), 2, 5)
    kept = dout.clone()
    once, again, twice = (kernels(z, u, gradient, (8, 4, -3)) for gradient in (dout, dout, 2 * dout))
    assert torch.equal(dout, kept)
    for first, second, double in zip(once[1:], again[1:], twice[1:], strict=True):
        assert torch.equal(first, second)
        assert torch.equal(2 * first, double)
    assert torch.equal(once[0], again[0])


def test_large_logits_of_either_sign() -> None:
    z, u = inputs((8, 4, -3), 29, "scalar")
    for shift in (-1e5, 1e5):
        compare([z + shift, u], (8, 4, -3), torch.float32)
    compare([z * 1e4, u], (8, 4, -3), torch.float32)


def test_any_strides() -> None:
    """Transposed and sliced inputs, and gradients that are transposed, expanded, or have no unit stride at all, give the same as contiguous ones."""
    grid, count = (8, 4, -3), visibility.num_windows(29, 8, 4, -3)
    z, u = (x.float() for x in inputs(grid, 29, "vector"))
    dout = torch.randn(2, count, 2, 5)
    wanted = kernels(z, u, dout, grid)
    packed = torch.cat([u, u + 1], dim=-1)[..., :5]
    views = [
        (z.transpose(1, 3).contiguous().transpose(1, 3), u.transpose(0, 1).contiguous().transpose(0, 1), dout),
        (z, packed, dout.transpose(1, 2).contiguous().transpose(1, 2)),
        (z, u, dout.transpose(1, 3).contiguous().transpose(1, 3)),
    ]
    for parts in views:
        for ours, right in zip(kernels(*parts, grid), wanted, strict=True):
            assert torch.equal(ours, right)
    one = kernels(z, u, torch.ones(1).expand(2, count, 2, 5), grid)
    for ours, right in zip(one, kernels(z, u, torch.ones(2, count, 2, 5), grid), strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_tokens_masked_by_a_logit_of_minus_infinity(kind: str) -> None:
    """No weight and no gradient; a window of nothing else is NaN, as softmax has it."""
    grid = (8, 4, -3)
    z, u = (x.float() for x in inputs(grid, 25, kind))
    z[:, 1::3] = float("-inf")
    dout = torch.ones(2, visibility.num_windows(25, *grid), 2, 5)
    out, dz, du = kernels(z, u, dout, grid)
    right = plain_pool.by_role(z.double(), u.double(), grid)
    torch.testing.assert_close(out.double(), right, atol=1e-6, rtol=0)
    assert not dz[:, 1::3].any()
    assert not du[:, 1::3].any()
    z[:, 5:13] = float("-inf")
    found, _ = pool.pool_fwd(z, u, window=8, stride=4, origin=-3)
    torch.testing.assert_close(found.double(), plain_pool.by_role(z.double(), u.double(), grid), atol=1e-6, rtol=0, equal_nan=True)


def test_a_last_dimension_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="the last dimension of u must have stride 1"):
        pool.pool_fwd(None, torch.randn(1, 8, 1, 1, 8)[..., ::2], window=4, stride=4)


def test_roles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="u must have 1 role or 2"):
        pool.pool_fwd(None, torch.randn(1, 8, 3, 1, 8), window=8, stride=4)
    with pytest.raises(ValueError, match="1 <= stride <= window"):
        pool.pool_fwd(None, torch.randn(1, 8, 1, 1, 8), window=4, stride=5)


def test_tensors_on_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one device, got cpu, meta"):
        pool.pool_fwd(torch.randn(1, 8, 1, 1, 1, device="meta"), torch.randn(1, 8, 1, 1, 8), window=4, stride=4)


def test_packed_sequences_equal_each_alone() -> None:
    lengths = [13, 0, 1, 30, 7]
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    for grid, kind in (((8, 4, -3), "scalar"), ((5, 3, 0), "vector-per-role")):
        z, u = (x.float() for x in inputs(grid, sum(lengths), kind, batch=1))
        counts = [visibility.num_windows(n, *grid) for n in lengths]
        dout = torch.randn(1, sum(counts), 2, 5)
        ours = kernels(z, u, dout, grid, cu_seqlens=cu)
        alone = [
            kernels(*part, grid)
            for part in zip(z.split(lengths, dim=1), u.split(lengths, dim=1), dout.split(counts, dim=1), strict=True)
        ]  # fmt: skip
        for packed, each in zip(ours, zip(*alone, strict=True), strict=True):
            assert torch.equal(packed, torch.cat(each, dim=1))


def test_offsets_beyond_int32() -> None:
    """Three tokens 2^30 elements apart, in a process of its own: most of the memory is never touched."""
    code = """
import torch, interpreter
from mitigate.kernels import pool
far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((1, 3, 1, 1, 4), (0, 2**30, 4, 4, 1))
u = torch.randn(1, 3, 1, 1, 4).half()
far.copy_(u)
with interpreter.shims():
    out, lse = pool.pool_fwd(None, far, window=2, stride=1)
    near, _ = pool.pool_fwd(None, u, window=2, stride=1)
    assert torch.equal(out, near)
    # The backward pass makes gradients of its own and reads far rows of the logits.
    z = far[..., :1]
    out, lse = pool.pool_fwd(z, u, window=2, stride=2)
    dout = torch.ones_like(out)
    for a, b in zip(pool.pool_bwd(dout, z, u, out, lse, window=2, stride=2), pool.pool_bwd(dout, u[..., :1], u, out, lse, window=2, stride=2)):
        assert torch.equal(a, b)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=interpreter.ROOT / "tests/kernels", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


interpreter.own_process(globals(), __file__)
