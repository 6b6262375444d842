"""The fast attention paths against the reference: outputs, every gradient, three precisions, block lengths, and rows that must not be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_good_as, gradients
from torch.nn import functional as F

from mitigate.kernels import blocked, reference, visibility

Grid = tuple[int, int, int]
Path = Callable[[Sequence[torch.Tensor]], torch.Tensor]
CASES: list[tuple[Grid, int, tuple[int, ...]]] = [
    ((8, 8, 0), 16, ()),
    ((8, 8, 0), 1, (0, 7)),
    ((8, 8, -5), 4, (7,)),
    ((8, 4, -4), 16, ()),
    ((12, 8, 0), 2, (0, 3)),
    ((1, 1, 0), 1, ()),
    ((5, 3, -4), 1, (1,)),
    ((24, 24, -23), 3, (0,)),
]
NAMES = ("out", "q", "ks", "vs", "k", "v")


def inputs(
    grid: Grid, length: int, heads: int, groups: int, scale: float = 1.0, dim: int = 6, batch: int = 2, value_dim: int | None = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    count = visibility.num_windows(length, *grid)
    width = [dim, dim, value_dim or dim, dim, value_dim or dim]
    shapes = [(batch, heads, length), *[(batch, groups, count)] * 2, *[(batch, groups, length)] * 2]
    made = [torch.randn(*shape, d, generator=generator, dtype=torch.float64) for shape, d in zip(shapes, width, strict=True)]
    return [made[0] * scale, *made[1:]]


def visible(length: int, grid: Grid, local: int, bypass: tuple[int, ...]) -> torch.Tensor:
    positions = torch.arange(length)
    count = visibility.num_windows(length, *grid)
    return reference.visible(positions, positions, count, window=grid[0], stride=grid[1], origin=grid[2], local=local, bypass=bypass)


def reference_path(grid: Grid, local: int, bypass: tuple[int, ...]) -> Path:
    def run(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        mask = visible(q.shape[2], grid, local, bypass)
        return reference.attend(q, torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2), mask, q.shape[-1] ** -0.5)

    return run


def dense_path(grid: Grid, local: int, bypass: tuple[int, ...]) -> Path:
    def run(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        mask = blocked.additive_mask(visible(q.shape[2], grid, local, bypass), q.shape[1] // k.shape[1], q.dtype)
        return blocked.attend(q, torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2), mask, q.shape[-1] ** -0.5)

    return run


def blocked_path(grid: Grid, local: int, bypass: tuple[int, ...], block: int) -> Path:
    def run(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        made = plan_for(parts, grid, local, bypass, block)
        return blocked.attend_blocked(q, ks, vs, k, v, made, q.shape[-1] ** -0.5)

    return run


def plan_for(parts: Sequence[torch.Tensor], grid: Grid, local: int, bypass: tuple[int, ...], block: int) -> blocked.Plan:
    q, k = parts[0], parts[3]
    repeat = q.shape[1] // k.shape[1]
    return blocked.plan(q.shape[2], window=grid[0], stride=grid[1], origin=grid[2], local=local, bypass=bypass, repeat=repeat, like=q, block=block)


def plain_ways(grid: Grid, local: int, bypass: tuple[int, ...]) -> list[Path]:
    """Plain torch in three ways: masked softmax per query head, the same with a group's heads as rows, and torch's own attention with a bool mask.

    The last is here because torch's fused CPU attention takes an exponential that is good to 20 bits only.
    """

    def rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        groups = k.shape[1]
        mask = visible(q.shape[2], grid, local, bypass).repeat(q.shape[1] // groups, 1)
        q_rows = q.reshape(q.shape[0], groups, -1, q.shape[3])
        return reference.attend(q_rows, torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2), mask, q.shape[-1] ** -0.5).reshape(*q.shape[:3], -1)

    def fused(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        keys, values = (torch.cat(pair, dim=2).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for pair in ((ks, k), (vs, v)))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(q.shape[2], grid, local, bypass), scale=q.shape[-1] ** -0.5)

    return [reference_path(grid, local, bypass), rows, fused]


def compare(paths: dict[str, Path], plains: Sequence[Path], parts: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Hold each path to the first of `plains` in fp64; below fp64, allow what the rule allows."""
    plain = plains[0]
    exact_leaves = [x.to(dtype).double().requires_grad_() for x in parts]
    out = plain(exact_leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [out.detach(), *gradients(out, weight, exact_leaves)]

    def run(path: Path) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact_leaves]
        out = path(leaves)
        assert out.dtype == dtype
        return [out.detach(), *gradients(out, weight, leaves)]

    theirs = list(zip(*[run(way) for way in plains], strict=True))
    for name, path in paths.items():
        for what, ours, other, right in zip(NAMES, run(path), theirs, exact, strict=True):
            if dtype == torch.float64:
                scale = max(1.0, float(right.abs().max()) if right.numel() else 1.0)
                torch.testing.assert_close(ours, right, atol=1e-12 * scale, rtol=0, msg=f"{name} {what}")
            else:
                assert_as_good_as(ours, other, right, f"{name} {what}")


def all_paths(grid: Grid, local: int, bypass: tuple[int, ...], blocks: Sequence[int]) -> dict[str, Path]:
    return {"dense": dense_path(grid, local, bypass), **{f"block {b}": blocked_path(grid, local, bypass, b) for b in blocks}}


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("length", [3, 37, 64])
def test_fast_paths_equal_the_reference(length: int, heads: int, groups: int) -> None:
    for grid, local, bypass in CASES:
        compare(all_paths(grid, local, bypass, (5, 16, 32)), [reference_path(grid, local, bypass)], inputs(grid, length, heads, groups), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [37, 70, 100])
def test_fast_paths_are_as_precise_as_plain_torch(length: int, dtype: torch.dtype) -> None:
    for grid, local, bypass in CASES:
        compare(all_paths(grid, local, bypass, (16, 32)), plain_ways(grid, local, bypass), inputs(grid, length, 4, 2, batch=1, dim=32), dtype)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_fast_paths_equal_the_reference_anywhere(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(1, window))
    grid = (window, stride, data.draw(st.integers(1 - window, 0)))
    bypass = tuple(sorted(data.draw(st.sets(st.integers(0, stride - 1), max_size=3))))
    local, length, block = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50)), data.draw(st.integers(1, 33))
    compare(all_paths(grid, local, bypass, (block,)), [reference_path(grid, local, bypass)], inputs(grid, length, 2, 1, batch=1, dim=2), torch.float64)


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_near_1e5(sign: int) -> None:
    """No finite stand-in for -inf may beat real logits: all of a row's are near sign * 1e5."""
    grid, local, bypass = (8, 4, -4), 2, (0,)
    parts = inputs(grid, 37, 4, 2)
    q, ks, vs, k, v = (torch.cat([x[..., :-1], torch.ones_like(x[..., :1])], dim=-1) for x in parts)
    q[..., -1] = sign * 1e5 * q.shape[-1] ** 0.5
    parts = [q, ks, vs, k, v]
    single = [x.float() for x in parts]
    wide = [x.double() for x in single]
    for name, path in all_paths(grid, local, bypass, (16,)).items():
        plains = plain_ways(grid, local, bypass)
        torch.testing.assert_close(path(wide), plains[0](wide), atol=1e-9, rtol=0, msg=name)  # 1e5 in fp64 is good to 1e-11
        assert_as_good_as(path(single), [way(single) for way in plains], plains[0](wide), name)


def test_a_value_dim_of_its_own() -> None:
    grid = (8, 4, -4)
    compare(all_paths(grid, 4, (0,), (16,)), [reference_path(grid, 4, (0,))], inputs(grid, 37, 4, 2, dim=6, value_dim=3), torch.float64)


@pytest.mark.parametrize("block", [4, 8])
def test_rows_beyond_what_may_be_read_are_not_read(block: int) -> None:
    """Summaries and exact tokens that no query from `first` on may see hold NaN; queries before `first` are not looked at."""
    for grid, local, bypass in CASES:
        length, first = 70, 60
        parts = inputs(grid, length, 4, 2, batch=1)
        lowest = visibility.exact_lo(first, *grid, local)
        hidden = [i for i in range(lowest) if (i - grid[2]) % grid[1] not in bypass]
        reached = next(one.low for one in plan_for(parts, grid, local, bypass, block).blocks if one.stop > first)
        poisoned = [x.clone() for x in parts]
        # A dense product multiplies masked values by an exact 0, so only what a block never gathers may hold NaN.
        beyond = [i for i in hidden if i < reached]
        assert beyond
        for bank in poisoned[3:]:
            bank[:, :, beyond] = float("nan")
        out = blocked_path(grid, local, bypass, block)(poisoned)
        rows = slice(first // block * block, None)
        assert torch.equal(out[:, :, rows], blocked_path(grid, local, bypass, block)(parts)[:, :, rows])


def test_invisible_entries_get_gradient_zero() -> None:
    for grid, local, bypass in CASES:
        length = 37
        mask = visible(length, grid, local, bypass)
        for name, path in all_paths(grid, local, bypass, (16,)).items():
            leaves = [x.requires_grad_() for x in inputs(grid, length, 2, 1, batch=1)]
            out = path(leaves)
            count = leaves[1].shape[2]
            for t in (0, 7, 8, 20, 36):
                weight = torch.zeros_like(out)
                weight[:, :, t] = 1
                _, ks, vs, k, v = torch.autograd.grad((out.square() * weight).sum(), leaves, retain_graph=True)
                keys, values = torch.cat([ks, k], dim=2)[0, 0].any(dim=-1), torch.cat([vs, v], dim=2)[0, 0].any(dim=-1)
                assert torch.equal(values, mask[t]), (name, grid, t)
                assert not (keys & ~mask[t]).any(), (name, grid, t)
                assert mask[t].sum() == 1 or torch.equal(keys, mask[t]), "a key that stands alone has weight 1 whatever it is"
            assert mask.shape[1] == count + length


def test_non_contiguous_inputs_and_gradients() -> None:
    grid, local, bypass = (8, 4, -4), 4, (0,)
    parts = inputs(grid, 37, 4, 2)
    packed = torch.cat([parts[3], parts[4]], dim=-1)
    views = [parts[0].transpose(1, 2).contiguous().transpose(1, 2), *parts[1:3], packed[..., :6], packed[..., 6:]]
    views[1] = views[1][:, :1].expand(-1, 2, -1, -1)
    plain = reference_path(grid, local, bypass)
    for name, path in all_paths(grid, local, bypass, (16,)).items():
        results = []
        for run in (path, plain):
            leaves = [view.detach().clone(memory_format=torch.preserve_format).requires_grad_() for view in views]
            out = run(leaves)
            weight = torch.randn(out.shape[::-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).permute(3, 2, 1, 0)
            results.append([out, *gradients(out, weight, leaves), *torch.autograd.grad(run(leaves), leaves, torch.ones(()).double().expand_as(out))])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0, msg=name)
        assert torch.equal(path(views), path([view.contiguous() for view in views])), name


def test_reruns_are_bit_equal() -> None:
    grid, local, bypass = (8, 8, -5), 4, (7,)
    parts = inputs(grid, 64, 4, 1)
    for path in all_paths(grid, local, bypass, (32,)).values():
        runs = []
        for _ in range(3):
            leaves = [x.float().requires_grad_() for x in parts]
            out = path(leaves)
            runs.append([out, *gradients(out, torch.ones_like(out).double(), leaves)])
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_work_and_memory_grow_with_what_is_visible() -> None:
    """A block reads what its queries see and little more, masks a band of constant width, and equal bands are held once."""
    for grid, local, bypass in CASES:
        for length in (100, 400, 1600):
            made = plan_for(inputs(grid, length, 1, 1, batch=1), grid, local, bypass, 32)
            seen = visible(length, grid, local, bypass).sum(dim=1)
            for block in made.blocks:
                assert block.entries <= int(seen[block.first]) + 3 * 32
                assert all(stop - first <= local + 4 * 32 + 2 * grid[0] for first, stop, _ in block.masks)
            different = {mask.data_ptr() for block in made.blocks for _, _, mask in block.masks}
            assert len(different) <= 2 * 3 + 2 * grid[1] // math.gcd(grid[1], 32), "bands repeat with the phase"


@pytest.mark.parametrize("block", [7, 32])
def test_weights_made_again_equal_weights_kept(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, local, bypass = (8, 4, -4), 4, (0,)
    made = []
    for entries in (0, 10**6):
        monkeypatch.setattr(blocked, "KEPT_ENTRIES", entries)
        blocked._plan.cache_clear()
        leaves = [x.requires_grad_() for x in inputs(grid, 61, 4, 2)]
        out = blocked_path(grid, local, bypass, block)(leaves)
        made.append([out, *gradients(out, torch.ones_like(out), leaves)])
    blocked._plan.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_memory_of_a_long_sequence_is_linear() -> None:
    """What autograd keeps, counted: beyond KEPT_ENTRIES per query, inputs and nothing else."""
    grid = (2, 2, 0)
    sizes = []
    for length in (1024, 2048):
        leaves = [x.float().requires_grad_() for x in inputs(grid, length, 1, 1, batch=1)]
        held: list[int] = []

        def count(x: torch.Tensor, held: list[int] = held) -> torch.Tensor:
            held.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            blocked_path(grid, 4, (), 64)(leaves)
        sizes.append(sum(held))
    assert sizes[0] == sum(x.numel() for x in inputs(grid, 1024, 1, 1, batch=1)) * 1
    assert sizes[1] == 2 * sizes[0]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_end_of_a_sequence_alone(data: st.DataObject) -> None:
    """Queries from any token on give the rows of the whole, gradients included."""
    window = data.draw(st.integers(1, 9))
    stride = data.draw(st.integers(1, window))
    grid = (window, stride, data.draw(st.integers(1 - window, 0)))
    bypass = tuple(sorted(data.draw(st.sets(st.integers(0, stride - 1), max_size=2))))
    local, length = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 40))
    start, block = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 20))

    def plain(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return reference_path(grid, local, bypass)(parts)[:, :, start:]

    def ours(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        made = blocked.plan(
            length, window=grid[0], stride=grid[1], origin=grid[2], local=local, bypass=bypass, repeat=2, like=q, block=block, queries=range(start, length)
        )
        return blocked.attend_blocked(q[:, :, start:], ks, vs, k, v, made, q.shape[-1] ** -0.5)

    compare({"end": ours}, [plain], inputs(grid, length, 4, 2, batch=1, dim=2), torch.float64)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_chosen_queries_alone(data: st.DataObject) -> None:
    """Queries at some positions give those rows of the whole, gradients included; a position may be asked for twice."""
    grid, local, bypass = data.draw(st.sampled_from(CASES))
    length = data.draw(st.integers(1, 60))
    positions = sorted(data.draw(st.lists(st.integers(0, length - 1), max_size=12)))

    def plain(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return reference_path(grid, local, bypass)(parts)[:, :, positions]

    def ours(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v = parts
        window, stride, origin = grid
        made = blocked.plan(length, window=window, stride=stride, origin=origin, local=local, bypass=bypass, repeat=2, like=q, block=5, queries=positions)
        return blocked.attend_blocked(q[:, :, positions], ks, vs, k, v, made, q.shape[-1] ** -0.5)

    compare({"chosen": ours}, [plain], inputs(grid, length, 4, 2, batch=1, dim=2), torch.float64)


@pytest.mark.parametrize("queries", [[3, 2], [-1, 4], [8, 9]])
def test_queries_that_cannot_be_planned_are_refused(queries: list[int]) -> None:
    with pytest.raises(ValueError, match=r"plan\.queries must not decrease and lie in \[0, 9\)"):
        blocked.plan(9, window=4, stride=4, origin=0, local=1, bypass=(), repeat=1, like=torch.zeros(()), queries=queries)


def test_lse_is_the_log_of_the_sum() -> None:
    grid, local, bypass = (8, 4, -4), 4, (0,)
    parts = inputs(grid, 37, 4, 2)
    q, ks, _, k, v = parts
    made = plan_for(parts, grid, local, bypass, 16)
    banks = [*parts, k[:, :, made.bypassed], v[:, :, made.bypassed]]
    _, lse, _ = blocked.forward(banks, made, 0.3, want_lse=True)
    keys = torch.cat([ks, k], dim=2).repeat_interleave(2, dim=1)
    logits = (q @ keys.mT * 0.3).masked_fill(~visible(37, grid, local, bypass), float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(dim=-1), atol=1e-12, rtol=0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    grid = (8, 4, -4)
    parts = inputs(grid, 37, 4, 2)
    made = plan_for(parts, grid, 4, (3,), 16)
    for index, message in (
        (0, r"attend\.q must hold 37 tokens, got 36"),
        (1, r"attend\.ks must hold at least 9 summaries, got 8"),
        (2, r"attend\.vs must hold at least 9 summaries, got 8"),
        (3, r"attend\.k must hold 37 tokens, got 36"),
        (4, r"attend\.v must hold 37 tokens, got 36"),
    ):
        short = [x[:, :, :-1] if i == index else x for i, x in enumerate(parts)]
        with pytest.raises(ValueError, match=message):
            blocked.attend_blocked(*short, made, 0.3)  # type: ignore[call-arg, misc]
    with pytest.raises(ValueError, match=r"attend\.kb must hold 9 bypassed tokens, got 8"):
        blocked.attend_banks([*parts, parts[3][:, :, :8], parts[4][:, :, :9]], made, 0.3)
    with pytest.raises(ValueError, match=r"attend\.q must hold 2 heads per kv head \(2\), got 3"):
        blocked.attend_blocked(parts[0][:, :3], *parts[1:], made, 0.3)  # type: ignore[call-arg, misc]


def test_autocast_changes_nothing() -> None:
    parts = [x.float().requires_grad_() for x in inputs((8, 4, -4), 37, 4, 2)]
    path = blocked_path((8, 4, -4), 4, (0,), 16)
    outside = path(parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = path(parts)
    assert torch.equal(inside, outside)


def test_an_all_visible_call_needs_no_mask() -> None:
    q, _, _, k, v = inputs((8, 8, 0), 9, 4, 2)
    wanted = reference.attend(q[:, :, -1:], k, v, torch.ones(1, 9, dtype=torch.bool), 0.3)
    torch.testing.assert_close(blocked.attend(q[:, :, -1:], k, v, None, 0.3), wanted, atol=1e-13, rtol=0)
