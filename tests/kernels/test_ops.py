"""The operators: what they give against the reference in fp64, `opcheck`, `torch.compile`, packed sequences, cached prefixes, and empty everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_pool
import pytest
import torch
from tiny_models import VARIANTS, attached, tiny, tokens, whole
from tolerance import assert_as_good_as, gradients
from transformers import DynamicCache

from mitigate.kernels import ops, reference, stream, visibility
from mitigate.readout import logits_at

Grid = tuple[int, int, int]
GRIDS: list[Grid] = [(8, 8, 0), (8, 4, -4), (12, 8, -5), (5, 3, -4), (1, 1, 0), (16, 8, 0)]
Parts = list[torch.Tensor]
Run = Callable[..., torch.Tensor]


def draw(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def named(grid: Grid) -> dict[str, int]:
    return dict(zip(("window", "stride", "origin"), grid, strict=True))


# pool ------------------------------------------------------------------------------------------------------------------------------------------


def pool_parts(grid: Grid, length: int, roles_z: int, roles_u: int, vector: bool, groups: int = 2, dim: int = 3) -> Parts:
    return draw((2, length, roles_z, groups, dim if vector else 1), (2, length, roles_u, groups, dim), seed=length)


def hold(ours: Run, plain: Run, parts: Parts, dtype: torch.dtype, name: str, others: tuple[Run, ...] = ()) -> None:
    """Output and every gradient to the reference in fp64, by the tolerance rule below fp64; `others` are more ways to write it in plain torch."""
    exact_leaves = [x.to(dtype).double().requires_grad_() for x in parts]
    out = plain(*exact_leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [out, *gradients(out, weight, exact_leaves)]
    results = []
    for run in (ours, plain, *others):
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact_leaves]
        found = run(*leaves)
        assert found.dtype == dtype
        results.append([found, *gradients(found, weight, leaves)])
    for index, (mine, *theirs, right) in enumerate(zip(*results, exact, strict=True)):
        if dtype == torch.float64:
            torch.testing.assert_close(mine, right, atol=1e-12 * max(1.0, float(right.detach().abs().max()) if right.numel() else 1.0), rtol=0, msg=name)
        else:
            assert_as_good_as(mine, theirs, right, f"{name} {index}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vector", [False, True])
def test_pool_equals_the_reference(vector: bool, dtype: torch.dtype) -> None:
    for grid in GRIDS:
        roles = -(-grid[0] // grid[1])
        for length in (1, 7, 29, 41):
            for roles_z, roles_u in {(1, 1), (roles, 1), (roles, roles), (1, roles)}:
                parts = pool_parts(grid, length, roles_z, roles_u, vector)
                hold(
                    lambda z, u, grid=grid: ops.pool(z, u, **named(grid))[0],
                    lambda z, u, grid=grid: plain_pool.by_role(z, u, grid),
                    parts,
                    dtype,
                    f"{grid} {length}",
                )


@pytest.mark.parametrize("groups", [1, 9])
def test_pool_with_few_and_many_heads(groups: int) -> None:
    """Few heads share a product, many are brought apart."""
    for grid in GRIDS:
        roles = -(-grid[0] // grid[1])
        parts = pool_parts(grid, 41, roles, 1, False, groups=groups, dim=8)
        hold(lambda z, u, grid=grid: ops.pool(z, u, **named(grid))[0], lambda z, u, grid=grid: plain_pool.by_role(z, u, grid), parts, torch.float64, f"{grid}")


def test_uniform_gates() -> None:
    for grid in GRIDS:
        (u,) = draw((2, 29, 1, 2, 3))
        hold(lambda u, grid=grid: ops.pool(None, u, **named(grid))[0], lambda u, grid=grid: plain_pool.by_role(None, u, grid), [u], torch.float64, f"{grid}")


@pytest.mark.parametrize("vector", [False, True])
def test_pool_lse_is_the_log_of_the_sum(vector: bool) -> None:
    for grid in GRIDS:
        z, u = pool_parts(grid, 29, 1, 1, vector)
        _, lse = ops.pool(z.requires_grad_(), u, **named(grid))
        index = reference.window_index(29, *grid)
        logits = z[:, index.clamp(min=0), 0].masked_fill((index < 0)[None, :, :, None, None], float("-inf"))
        torch.testing.assert_close(lse, logits.logsumexp(dim=2).detach(), atol=1e-12, rtol=0)
        assert not lse.requires_grad


def test_packed_sequences_pool_apart() -> None:
    grid, lengths = (8, 4, -4), [5, 0, 29, 1, 13]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    z, u = draw((1, 48, 2, 2, 1), (1, 48, 1, 2, 3))

    def apart(z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.cat([plain_pool.by_role(a, b, grid) for a, b in zip(z.split(lengths, 1), u.split(lengths, 1), strict=True)], dim=1)

    hold(lambda z, u: ops.pool(z, u, **named(grid), cu_seqlens=cu)[0], apart, [z, u], torch.float64, "packed")
    nothing = ops.pool(z[:, :0], u[:, :0], **named(grid), cu_seqlens=torch.tensor([0]))
    assert nothing[0].shape == (1, 0, 2, 3)


# attend ----------------------------------------------------------------------------------------------------------------------------------------


def attend_parts(grid: Grid, length: int, queries: int, heads: int = 4, groups: int = 2, dim: int = 6, dim_v: int = 4, batch: int = 2) -> Parts:
    count = visibility.num_windows(length, *grid)
    shapes = [(batch, queries, heads, dim), *[(batch, n, groups, d) for n in (count, length) for d in (dim, dim_v)]]
    return draw(*shapes, seed=length)


def positions(length: int, grid: Grid, phases: tuple[int, ...]) -> torch.Tensor:
    t = torch.arange(length)
    return t[reference.is_bypassed(t, stride=grid[1], origin=grid[2], phases=phases)]


def plain_attend(parts: Parts, grid: Grid, local: int, phases: tuple[int, ...] = (), scale: float = 0.4, fused: bool = False) -> torch.Tensor:
    """The reference, or torch's own attention with a bool mask: its exponential is good to 20 bits only."""
    q, ks, vs, k, v = (x.transpose(1, 2) for x in parts)
    t = torch.arange(k.shape[2])
    visible = reference.visible(t[len(t) - q.shape[2] :], t, ks.shape[2], **named(grid), local=local, bypass=phases)
    keys, values = torch.cat([ks, k], dim=2), torch.cat([vs, v], dim=2)
    if not fused:
        return reference.attend(q, keys, values, visible, scale).transpose(1, 2)
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale).transpose(1, 2)


def our_attend(parts: Parts, grid: Grid, local: int, phases: tuple[int, ...] = (), scale: float = 0.4, **more: Any) -> torch.Tensor:
    k, v = parts[3:]
    pos = positions(k.shape[1], grid, phases)
    return ops.attend(*parts, **named(grid), local=local, scale=scale, kb_BPGD=k[:, pos], vb_BPGV=v[:, pos], pos_b=pos, **more)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attend_equals_the_reference(dtype: torch.dtype) -> None:
    for grid in GRIDS:
        for length, queries, phases in ((1, 1, ()), (29, 29, (0,)), (41, 17, ()), (41, 1, (0,))):
            parts = attend_parts(grid, length, queries, batch=2 if queries > 1 else 8)
            hold(
                lambda *xs, grid=grid, phases=phases: our_attend(list(xs), grid, 4, phases),
                lambda *xs, grid=grid, phases=phases: plain_attend(list(xs), grid, 4, phases),
                parts,
                dtype,
                f"{grid} {length} {queries}",
                (lambda *xs, grid=grid, phases=phases: plain_attend(list(xs), grid, 4, phases, fused=True),),
            )


def test_a_cached_prefix_without_its_old_tokens() -> None:
    """Only the exact tokens that the first query may see are left."""
    for grid in GRIDS:
        parts = attend_parts(grid, 41, 9)
        low = visibility.exact_lo(32, *grid, 3)
        q, ks, vs, k, v = parts
        left = [q, ks, vs, k[:, low:], v[:, low:]]
        out, _ = ops.attend(*left, **named(grid), local=3, scale=0.4, k_start=low)
        torch.testing.assert_close(out, plain_attend(parts, grid, 3), atol=1e-12, rtol=0)
        if low < 32:
            with pytest.raises(ValueError, match=r"attend: queries 32 \.\. 40 need exact tokens from"):
                ops.attend(q, ks, vs, k[:, low + 1 :], v[:, low + 1 :], **named(grid), local=3, scale=0.4, k_start=low + 1)


def test_packed_sequences_attend_apart() -> None:
    grid, lengths, phases = (8, 4, -4), [5, 0, 29, 1, 13], (1,)
    counts = [visibility.num_windows(n, *grid) for n in lengths]
    sizes = (lengths, counts, counts, lengths, lengths)
    parts = draw(*[(1, sum(n), h, d) for n, (h, d) in zip(sizes, ((4, 6), (2, 6), (2, 4), (2, 6), (2, 4)), strict=True)])
    apart = [positions(n, grid, phases) for n in lengths]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.cat([pos + start for pos, start in zip(apart, starts.tolist(), strict=False)])
    cu_bypass = torch.tensor([0, *map(len, apart)]).cumsum(0)

    def ours(*xs: torch.Tensor) -> torch.Tensor:
        bank = {"kb_BPGD": xs[3][:, rows], "vb_BPGV": xs[4][:, rows], "pos_b": torch.cat(apart)}
        return ops.attend(*xs, **named(grid), local=4, scale=0.4, **bank, cu_seqlens=starts, cu_bypass=cu_bypass)[0]

    def plain(*xs: torch.Tensor) -> torch.Tensor:
        split = zip(*[x.split(n, dim=1) for x, n in zip(xs, sizes, strict=True)], strict=True)
        return torch.cat([plain_attend(list(one), grid, 4, phases) for one in split], dim=1)

    hold(ours, plain, parts, torch.float64, "packed")


# decode ----------------------------------------------------------------------------------------------------------------------------------------


def held_at(position: int, grid: Grid, local: int, phases: tuple[int, ...], seed: int = 0) -> tuple[Parts, Parts, torch.Tensor]:
    """q, banks that hold what the query at a position sees, all keys and values as one cache call gives them, and which of those it sees."""
    low, count = visibility.exact_lo(position, *grid, local), visibility.num_completed(position, *grid)
    bank = positions(low, grid, phases)
    q, ks, vs, k, v = draw((2, 4, 6), *[(2, n, 2, d) for n in (count, position + 1) for d in (6, 5)], seed=seed)
    t = torch.arange(position + 1)
    visible = reference.visible(t[-1:], t, count, **named(grid), local=local, bypass=phases)
    return [q, ks, vs, k[:, low:], v[:, low:], k[:, bank], v[:, bank]], [torch.cat([a, b], dim=1) for a, b in ((ks, k), (vs, v))], visible


def test_decode_equals_the_reference() -> None:
    """Output and gradients, at every position of the first windows and far beyond."""
    for grid in GRIDS:
        for local, phases in ((1, ()), (5, (0,))):
            for position in (*range(0, 2 * grid[0], 3), 61):
                parts, (keys, values), visible = held_at(position, grid, local, phases)
                q, ks, vs, k, v, kb, vb = leaves = [x.requires_grad_() for x in parts]
                options = {**named(grid), "local": local, "scale": 0.4, "position": position}
                out = ops.decode(q, ks, vs, k, v, **options, kb_BPGD=kb, vb_BPGV=vb)
                wanted = reference.attend(q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), visible, 0.4)[:, :, 0]
                torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
                banks = [torch.cat(x, dim=1).transpose(1, 2) for x in ((ks, kb, k), (vs, vb, v))]
                plain = reference.attend(q[:, :, None], *banks, torch.ones(1, banks[0].shape[2], dtype=torch.bool), 0.4)[:, :, 0]
                (pull,) = draw(tuple(out.shape), seed=1)
                for one, other in zip(gradients(out, pull, leaves), gradients(plain, pull, leaves), strict=True):
                    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_decode_refuses_banks_that_hold_something_else() -> None:
    (q, ks, vs, k, v, kb, vb), *_ = held_at(29, (8, 4, -4), 5, (0,))
    options = {**named((8, 4, -4)), "local": 5, "scale": 0.4}
    with pytest.raises(ValueError, match=r"decode: the query at 30 sees 7 summaries and 5 exact tokens, the banks hold 7 and 6"):
        ops.decode(q, ks, vs, torch.cat([k, k[:, :1]], dim=1), torch.cat([v, v[:, :1]], dim=1), **options, position=30)
    with pytest.raises(ValueError, match="sees every token exactly"):
        ops.decode(q, ks[:, :0], vs[:, :0], k[:, :2], v[:, :2], **options, position=1, kb_BPGD=kb, vb_BPGV=vb)


# all -------------------------------------------------------------------------------------------------------------------------------------------


def test_gradients_that_come_expanded_or_transposed() -> None:
    grid = (8, 4, -4)
    leaves = [x.requires_grad_() for x in attend_parts(grid, 29, 29)]
    out, plain = our_attend(leaves, grid, 4), plain_attend(leaves, grid, 4)
    for dout in (torch.ones(()).double().expand_as(out), draw(tuple(reversed(out.shape)))[0].permute(3, 2, 1, 0)):
        ours, theirs = (torch.autograd.grad(x, leaves, dout, retain_graph=True) for x in (out, plain))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_nothing_at_all() -> None:
    grid = (8, 8, 0)
    for batch, length in ((0, 9), (2, 0)):
        leaves = [x.requires_grad_() for x in attend_parts(grid, length, length, batch=batch)]
        out = our_attend(leaves, grid, 4)
        assert out.shape == (batch, length, 4, 4)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in leaves)
    for heads, groups in ((0, 0), (0, 2)):
        leaves = [x.requires_grad_() for x in attend_parts(grid, 9, 9, heads=heads, groups=groups)]
        out = our_attend(leaves, grid, 4)
        assert out.shape == (2, 9, 0, 4)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in leaves)
    z, u = (x.requires_grad_() for x in draw((0, 9, 1, 2, 1), (0, 9, 1, 2, 3)))
    assert ops.pool(z, u, **named(grid))[0].shape == (0, 1, 2, 3)


# torch.library, torch.compile ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 29])
def test_opcheck(length: int) -> None:
    grid = (8, 4, 0)
    count = visibility.num_windows(length, *grid)
    for vector in (False, True):
        z, u = (x.float().requires_grad_() for x in pool_parts(grid, length, 2, 1, vector))
        torch.library.opcheck(torch.ops.mitigate.pool.default, (z, u, *grid, count, None))
        out, lse = torch.ops.mitigate.pool(z, u, *grid, count, None)
        torch.library.opcheck(torch.ops.mitigate.pool_backward.default, (out.detach(), z.detach(), u.detach(), out.detach(), lse, *grid, None))
    parts = [x.float().requires_grad_() for x in attend_parts(grid, length, length)]
    pos = positions(length, grid, (1,))
    bank = [x[:, pos].detach().requires_grad_() for x in parts[3:]]
    torch.library.opcheck(torch.ops.mitigate.attend.default, (*parts, *bank, pos, *grid, 4, 0.4, 0, 0, None, None))
    out, lse = torch.ops.mitigate.attend(*parts, *bank, pos, *grid, 4, 0.4, 0, 0, None, None)
    given = [x.detach() for x in (out, out, lse, *parts, *bank)]
    torch.library.opcheck(torch.ops.mitigate.attend_backward.default, (*given, pos, *grid, 4, 0.4, 0, 0, None, None))
    held = [x.float().requires_grad_() for x in held_at(length, grid, 4, (1,))[0]]
    torch.library.opcheck(torch.ops.mitigate.decode.default, (*held, *grid, 4, 0.4, length))
    out = torch.ops.mitigate.decode(*held, *grid, 4, 0.4, length)
    torch.library.opcheck(torch.ops.mitigate.decode_backward.default, (*(x.detach() for x in (out, *held)), 0.4))


@pytest.mark.parametrize("seen", [0, 6, 23])
def test_opcheck_of_append(seen: int) -> None:
    """It declares the tensors that it changes, and emits as many summaries as its fake says."""
    grid, length = (8, 4, -3), 9
    for z_shape, channels in (((2, length, 2, 2, 1), 1), ((2, length, 2, 2, 3), 3), ((2, length, 0, 2, 1), 1)):
        z, u = draw(z_shape, (2, length, 1, 2, 3), dtype=torch.float32)
        state = stream.start(2, 2, 3, **named(grid), channels=channels)
        count = visibility.num_windows(seen + length, *grid) - visibility.num_windows(seen, *grid)
        torch.library.opcheck(torch.ops.mitigate.append.default, (z, u, state.most, state.total, state.weighted, *grid, seen, count))


def test_append_is_the_stream_and_compiles_whole() -> None:
    grid = (8, 4, -4)
    z, u = draw((2, 30, 2, 2, 1), (2, 30, 1, 2, 3), dtype=torch.float32)

    def layer(state: stream.State, z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return ops.append(state, z, u) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plain, eager, traced = (stream.start(2, 2, 3, **named(grid)) for _ in range(3))
    for at, size in ((0, 11), (11, 1), (12, 18)):
        part = z[:, at : at + size], u[:, at : at + size]
        wanted = stream.append(plain, *part)
        assert torch.equal(ops.append(eager, *part), wanted)
        assert torch.equal(compiled(traced, *part), 2 * wanted)
    for name in ("seen", "most", "total", "weighted"):
        one, *others = (getattr(state, name) for state in (plain, eager, traced))
        assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for other in others), name


def test_append_has_no_gradient() -> None:
    z, u = (x.requires_grad_() for x in draw((1, 9, 1, 1, 1), (1, 9, 1, 1, 3), dtype=torch.float32))
    found = ops.append(stream.start(1, 1, 3, window=4, stride=4), z, u)
    with pytest.raises(RuntimeError, match=r"mitigate\.append.*no autograd formula"):
        found.sum().backward()


def test_one_compiled_graph_serves_many_lengths() -> None:
    """Pool and attend in one function, no graph break, one dynamic graph; a sequence without a complete window works too."""
    grid = (8, 4, 0)
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    def layer(q: torch.Tensor, z: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ks, vs = (ops.pool(z, x[:, :, None], **named(grid))[0] for x in (k, v))
        return ops.attend(q, ks, vs, k, v, **named(grid), local=4, scale=0.4)[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for length in (17, 25, 33, 41, 5):
        parts = draw((2, length, 4, 6), (2, length, 2, 2, 1), (2, length, 2, 6), (2, length, 2, 6), seed=length)
        results = []
        for run in (compiled, layer):
            leaves = [x.clone().requires_grad_() for x in parts]
            out = run(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), length
        assert length == 5 or len(graphs) == 1, "one graph for every length with a complete window"


# backends --------------------------------------------------------------------------------------------------------------------------------------


def test_which_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.backend("cpu") == "torch-cpu-blocked"
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    assert ops.backend("cuda") == "torch-cuda-blocked"
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(ops.metadata, "version", lambda name: "3.7.1")
    assert ops.backend("cuda") == "triton-3.7.1"
    model = tiny()
    for name, found in (("w8s8", "torch-cpu-blocked"), ("full", "transformers-sdpa")):
        with attached(model, VARIANTS[name]) as on:
            assert on.backend == found


def test_without_triton_a_gpu_runs_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "TRITON", frozenset({"cpu"}))
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    assert ops.backend("cpu") == "torch-cpu-blocked"
    z, u = draw((2, 29, 2, 2, 1), (2, 29, 1, 2, 3))
    torch.testing.assert_close(ops.pool(z, u, **named((8, 4, -4)))[0], plain_pool.by_role(z, u, (8, 4, -4)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["w8s8", "everything", "deepseek-csa", "per-offset-tied", "uniform-stagger", "content-overlap"])
def test_a_model_through_the_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with the operators' CPU side in its place: whole sequences, chosen queries, gates, chunks and single tokens over a cache."""
    model = tiny("qwen3")
    ids, asked = tokens(model, 71), torch.tensor([22, 5, 70])
    results = []
    with attached(model, VARIANTS[name]) as on:
        parameters = [*model.parameters(), *on.compressors.parameters()]
        for kinds in (frozenset[str](), frozenset({"cpu"})):
            monkeypatch.setattr(ops, "OPERATED", kinds)
            on.collect_gates(True)
            logits = [whole(model, ids), logits_at(on, ids, asked)]
            profiles = [profile for layer in on.phase_profiles() for profile in layer]
            cache = DynamicCache()
            logits += [model(input_ids=part, cache=cache, use_cache=True).logits for part in ids.split([20, 30, 1, 1, 9, *[1] * 10], dim=1)]
            loss = sum(x.square().mean() for x in (*logits, *profiles))
            results.append([*logits, *profiles, *torch.autograd.grad(loss, parameters)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
