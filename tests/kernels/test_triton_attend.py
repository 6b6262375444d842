"""The attend kernels under the interpreter: output, log-sum-exp and every gradient of all three banks against fp64."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import interpreter
import pytest
import torch
from tolerance import assert_as_good_as

from mitigate.kernels import reference, visibility

if interpreter.INSTALLED:
    from mitigate.kernels import attend, tiles

Grid = tuple[int, int, int]
NAMES = ("out", "dq", "dks", "dvs", "dk", "dv", "dkb", "dvb")


@pytest.fixture(autouse=True)
def _shims() -> Iterator[None]:
    with interpreter.shims():
        yield


@dataclass(frozen=True)
class Case:
    """One call: `queries` last tokens of `length`, exact tokens from k_start on, and which phases are bypassed."""

    grid: Grid
    length: int
    local: int = 3
    heads: int = 2
    groups: int = 1
    dim: int = 8
    dim_v: int | None = None
    batch: int = 1
    queries: int | None = None
    k_start: int = 0
    bypass: tuple[int, ...] = ()
    size: float = 1.0

    @property
    def q_start(self) -> int:
        return self.length - (self.length if self.queries is None else self.queries)

    @property
    def windows(self) -> int:
        return visibility.num_windows(self.length, *self.grid)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def bank(self) -> torch.Tensor:
        """Positions of all bypassed tokens."""
        t = torch.arange(self.length)
        return t[reference.is_bypassed(t, stride=self.grid[1], origin=self.grid[2], phases=self.bypass)]

    def inputs(self) -> list[torch.Tensor]:
        """q, ks, vs, k, v, kb, vb in fp64, [B, rows, heads, dim]."""
        generator = torch.Generator().manual_seed(100 * self.length + self.grid[0])
        rows = (self.length - self.q_start, *[self.windows] * 2, *[self.length - self.k_start] * 2, *[len(self.bank)] * 2)
        dims = (self.dim, *[self.dim, self.dim_v or self.dim] * 3)
        shapes = [(self.batch, n, self.groups if i else self.heads, d) for i, (n, d) in enumerate(zip(rows, dims, strict=True))]
        parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [parts[0] * self.size, *parts[1:]]

    def visible(self) -> torch.Tensor:
        """Who sees what of [summaries | exact | bypass]: the tokens' rule of the reference, each token at one place."""
        t, i = torch.arange(self.q_start, self.length), torch.arange(self.k_start, self.length)
        rule = {"window": self.grid[0], "stride": self.grid[1], "origin": self.grid[2], "local": self.local}
        near = reference.visible(t, i, self.windows, **rule)
        either = reference.visible(t, self.bank, 0, **rule, bypass=self.bypass)
        return torch.cat([near, either & ~reference.visible(t, self.bank, 0, **rule)], dim=1)

    def plain(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        q, ks, vs, k, v, kb, vb = (x.transpose(1, 2) for x in parts)
        keys, values = torch.cat([ks, k, kb], dim=2), torch.cat([vs, v, vb], dim=2)
        return reference.attend(q, keys, values, self.visible(), self.scale).transpose(1, 2)

    def options(self) -> dict[str, object]:
        numbers = dict(zip(("window", "stride", "origin"), self.grid, strict=True))
        return {**numbers, "local": self.local, "scale": self.scale, "q_start": self.q_start, "k_start": self.k_start}

    def kernels(self, parts: Sequence[torch.Tensor], dout: torch.Tensor, tile: tuple[int, int] | None = (16, 16), **rest: object) -> list[torch.Tensor]:
        """Output and gradients of the kernels; tiles of 16 rows by default, so that short sequences have many blocks."""
        q, ks, vs, k, v, kb, vb = parts
        options = self.options() | ({"tile": tiles.Tile(*tile)} if tile else {}) | rest
        if self.bypass:
            options |= {"kb_BPGD": kb, "vb_BPGV": vb, "pos_b": options.get("pos_b", self.bank)}
        out, lse = attend.attend_fwd(q, ks, vs, k, v, **options)  # type: ignore[arg-type]
        assert torch.isfinite(lse).all()
        found = attend.attend_bwd(dout, q, ks, vs, k, v, out, lse, **options)  # type: ignore[arg-type]
        return [out, *(torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(parts, found, strict=True))]

    def dout(self) -> torch.Tensor:
        shape = (self.batch, self.length - self.q_start, self.heads, self.dim_v or self.dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def from_saved(case: Case, parts: Sequence[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """Gradients in plain torch from what a forward pass saves (output and log-sum-exp), products in the inputs' precision."""
    q, ks, vs, k, v, kb, vb = (x.transpose(1, 2) for x in parts)
    repeat = case.heads // case.groups
    keys, values = (torch.cat(bank, dim=2).repeat_interleave(repeat, dim=1) for bank in ((ks, k, kb), (vs, v, vb)))
    s = (q.float() @ keys.float().transpose(-1, -2) * case.scale).masked_fill(~case.visible(), float("-inf"))
    p = (s - s.logsumexp(dim=-1, keepdim=True)).exp()
    do = dout.transpose(1, 2)
    out = (p.to(q.dtype).float() @ values.float()).to(q.dtype)
    ds = p * (do.float() @ values.float().transpose(-1, -2) - (out.float() * do.float()).sum(-1, keepdim=True))
    ds, p = ds.to(q.dtype).float(), p.to(q.dtype).float()
    dq = (ds @ keys.float() * case.scale).to(q.dtype)
    split = [ks.shape[2], k.shape[2], kb.shape[2]]
    dkeys, dvalues = (
        x.unflatten(1, (case.groups, repeat)).sum(2).to(q.dtype).split(split, dim=2) for x in (ds.mT @ q.float() * case.scale, p.mT @ do.float())
    )  # fmt: skip
    return [x.transpose(1, 2) for x in (dq, *itertools.chain(*zip(dkeys, dvalues, strict=True)))]


def compare(case: Case, dtype: torch.dtype = torch.float32, tile: tuple[int, int] | None = (16, 16)) -> None:
    leaves = [x.to(dtype).double().requires_grad_() for x in case.inputs()]
    dout = case.dout().to(dtype)
    exact = case.plain(leaves)
    wanted = [exact, *torch.autograd.grad(exact, leaves, dout.double())]
    low = [x.detach().to(dtype).requires_grad_() for x in leaves]
    theirs = case.plain(low)
    usual = [[theirs], *zip(torch.autograd.grad(theirs, low, dout), from_saved(case, [x.detach() for x in low], dout), strict=True)]
    ours = case.kernels([x.detach() for x in low], dout, tile)
    for name, fast, slow, right in zip(NAMES, ours, usual, wanted, strict=True):
        assert fast.dtype == dtype
        if case.length == 1 and name in ("dq", "dk"):  # one entry has no say in its weight: the terms cancel, and their rounding remains
            assert not right.any()
            assert float(fast.abs().max()) <= 16 * torch.finfo(dtype).eps
            continue
        assert_as_good_as(fast, slow, right, f"{name} {case} {dtype}")


GRIDS = [(1, 1, 0), (2, 1, -1), (8, 8, 0), (8, 8, -3), (8, 4, -4), (12, 8, -1), (5, 3, -4), (16, 16, -9)]


@pytest.mark.parametrize("local", [0, 1, 5])
def test_attend_and_its_gradients(local: int) -> None:
    for index, grid in enumerate(GRIDS):
        compare(Case(grid, 37, local, bypass=((), (0,), (0, grid[1] - 1))[(index + local) % 3]))


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 50])
def test_any_length(length: int) -> None:
    compare(Case((8, 4, -3), length, 3, heads=4, groups=2, batch=2, bypass=(1,)))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (3, 1), (6, 2)])
def test_any_ratio_of_heads(heads: int, groups: int) -> None:
    compare(Case((8, 4, -3), 37, heads=heads, groups=groups, batch=3, bypass=(0,)))


@pytest.mark.parametrize(("dim", "dim_v"), [(24, 24), (96, 8), (16, 40), (40, 130)])
def test_head_dims(dim: int, dim_v: int) -> None:
    compare(Case((8, 4, -3), 35, dim=dim, dim_v=dim_v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    compare(Case((8, 4, -3), 45, heads=4, groups=2, dim=24, bypass=(1,)), dtype)
    compare(Case((8, 8, 0), 70, 16, dim=64), dtype, tile=None)


def test_shipped_tiles_over_several_blocks() -> None:
    compare(Case((8, 2, -3), 150, 20, heads=2, groups=1, bypass=(1,)), tile=None)


@pytest.mark.parametrize("tile", [(16, 32), (32, 16)])
def test_tiles_that_are_not_square(tile: tuple[int, int]) -> None:
    compare(Case((6, 2, -3), 61, 5, bypass=(1,)), tile=tile)


@pytest.mark.parametrize("queries", [1, 5, 20])
def test_fewer_queries_than_tokens(queries: int) -> None:
    case = Case((8, 4, -3), 41, local=6, heads=4, groups=2, queries=queries, bypass=(0,))
    compare(case)
    compare(replace(case, k_start=visibility.exact_lo(case.q_start, *case.grid, case.local)))


@pytest.mark.parametrize("origin", [0, -1, -4, -5])
def test_a_summary_is_seen_from_the_query_at_its_end_on(origin: int) -> None:
    """One query at a time: at end(j) summary j has a gradient, at end(j) - 1 exactly none; the same for a token's last exact reader."""
    grid, local, length = (6, 3, origin), 4, 26
    case = Case(grid, length, local)
    parts = [x.float() for x in case.inputs()]
    for j, step in itertools.product(range(case.windows), (0, -1)):
        t = visibility.end(j, *grid) + step
        if t < 0:
            continue
        dout = torch.zeros(1, length, 2, 8)
        dout[:, t] = 1
        grads = dict(zip(NAMES, case.kernels(parts, dout), strict=True))
        for name in ("dks", "dvs"):
            assert [bool(grads[name][:, i].any()) for i in range(case.windows)] == [i < j + 1 + step for i in range(case.windows)], (name, j, step)
        lo = visibility.exact_lo(t, *grid, local)
        assert [bool(grads["dv"][:, i].any()) for i in range(length)] == [lo <= i <= t for i in range(length)]


def test_a_bypassed_token_never_counts_twice() -> None:
    """With every token bypassed and no summary of weight, each query averages all tokens up to its own, once each."""
    case = Case((4, 4, 0), 23, local=5, bypass=(0, 1, 2, 3))
    q, ks, vs, k, _, kb, _ = (torch.zeros_like(x).float() for x in case.inputs())
    v = torch.ones_like(k)
    _, lse = attend.attend_fwd(q, ks, vs, k, v, **case.options(), kb_BPGD=kb, vb_BPGV=torch.ones_like(kb), pos_b=case.bank)  # type: ignore[arg-type]
    t = torch.arange(23)
    count = t + 1 + visibility.num_completed(t, *case.grid)
    torch.testing.assert_close(lse, count.float().log()[None, :, None].expand_as(lse))


def test_padding_in_the_bypass_bank_is_not_seen() -> None:
    case = Case((8, 4, -3), 41, heads=4, groups=2, batch=2, bypass=(1,))
    parts, dout = [x.float() for x in case.inputs()], case.dout().float()
    wanted = case.kernels(parts, dout)
    padded = [*parts[:5], *(torch.cat([x, x.new_full((2, 20, *x.shape[2:]), 3.0)], dim=1) for x in parts[5:])]
    positions = torch.cat([case.bank, torch.full((20,), 2**30)]).to(torch.int32).expand(2, -1)
    ours = case.kernels(padded, dout, pos_b=positions)
    for name, fast, right in zip(NAMES, ours, wanted, strict=True):
        assert torch.equal(fast[:, : right.shape[1]], right), name
        assert not fast[:, right.shape[1] :].any(), name


def test_logits_of_any_size() -> None:
    """No finite sentinel: rows whose logits all lie near -1e5, rows that see a single bank, rows before the first end."""
    compare(Case((8, 4, -3), 37, size=300.0))
    case = Case((8, 8, 0), 20, local=0, heads=1, dim=16)
    q, ks, vs, k, v = (x.float() for x in case.inputs()[:5])
    q, k, ks = torch.full_like(q, -500.0), torch.full_like(k, 50.0), torch.full_like(ks, 50.0)
    out, lse = attend.attend_fwd(q, ks, vs, k, v, **case.options())  # type: ignore[arg-type]
    assert (lse < -9e4).all()
    torch.testing.assert_close(out[:, 7], vs[:, 0])  # token 7 completes window 0: it sees that summary alone
    torch.testing.assert_close(out[:, 8], (vs[:, 0] + v[:, 8]) / 2)


def test_two_runs_agree_to_the_bit_and_a_doubled_gradient_doubles() -> None:
    case = Case((8, 4, -3), 41, heads=4, groups=2, bypass=(0,))
    parts, dout = [x.float() for x in case.inputs()], case.dout().float()
    kept = dout.clone()
    once, again, twice = (case.kernels(parts, gradient) for gradient in (dout, dout, 2 * dout))
    assert torch.equal(dout, kept)
    assert torch.equal(once[0], again[0])
    for first, second, double in zip(once[1:], again[1:], twice[1:], strict=True):
        assert torch.equal(first, second)
        assert torch.equal(2 * first, double)


def test_any_strides() -> None:
    """[B, H, T, D] storage, slices of packed projections, expanded kv heads and any incoming gradient give the same as contiguous tensors."""
    case = Case((8, 4, -3), 21, heads=4, groups=2, batch=2)
    parts, dout = [x.float() for x in case.inputs()], case.dout().float()
    wanted = case.kernels(parts, dout)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    q, k, v = torch.cat([parts[0], parts[3], parts[4]], dim=2).split([4, 2, 2], dim=2)
    packed = [q, *parts[1:3], k, v, *parts[5:]]
    for ours in (
        case.kernels(heads_first, dout.transpose(1, 3).contiguous().transpose(1, 3)),
        case.kernels(packed, dout.transpose(0, 2).contiguous().transpose(0, 2)),
    ):
        for name, fast, right in zip(NAMES, ours, wanted, strict=True):
            assert torch.equal(fast, right), name
    one = case.kernels(parts, torch.ones(1).expand_as(dout))
    for fast, right in zip(one, case.kernels(parts, torch.ones_like(dout)), strict=True):
        assert torch.equal(fast, right)
    shared = [parts[0], *(x[:, :, :1].expand(-1, -1, 2, -1) for x in parts[1:])]
    for fast, right in zip(case.kernels(shared, dout), case.kernels([x.contiguous() for x in shared], dout), strict=True):
        assert torch.equal(fast, right)


def test_nothing_at_all() -> None:
    for batch, length, heads in ((0, 9, 2), (1, 0, 2), (2, 9, 0)):
        case = Case((4, 4, 0), length, heads=heads, groups=min(heads, 1), batch=batch)
        parts = [x.float() for x in case.inputs()]
        for fast, like in zip(case.kernels(parts, case.dout().float()), [parts[0], *parts], strict=True):
            assert fast.shape == like.shape
            assert not fast.any()


def test_refusals() -> None:
    case = Case((8, 4, -3), 30)
    q, ks, vs, k, v = (x.float() for x in case.inputs()[:5])
    options = case.options()
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        attend.attend_fwd(q, ks, vs, k.half(), v, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need exact tokens from 10"):
        attend.attend_fwd(q[:, :10], ks, vs, k[:, :10], v[:, :10], **options | {"q_start": 12, "k_start": 12})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sees 7 summaries, held are 5"):
        attend.attend_fwd(q, ks[:, :5], vs[:, :5], k, v, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must divide"):
        attend.attend_fwd(q, *(x.expand(-1, -1, 3, -1) for x in (ks, vs, k, v)), **options)  # type: ignore[arg-type, misc]
    with pytest.raises(ValueError, match="the last dimension of q"):
        attend.attend_fwd(q.repeat(1, 1, 1, 2)[..., ::2], ks, vs, k, v, **options)  # type: ignore[arg-type]


def test_packed_sequences_equal_each_alone() -> None:
    lengths = [13, 0, 1, 37, 7]
    cases = [Case((8, 4, -3), n, heads=4, groups=2, bypass=(1,)) for n in lengths]
    parts = [[x.float() for x in case.inputs()] for case in cases]
    douts = [case.dout().float() for case in cases]
    alone = [case.kernels(part, dout) for case, part, dout in zip(cases, parts, douts, strict=True)]
    cu, cu_bypass = (torch.tensor([0, *itertools.accumulate(n)]) for n in (lengths, [len(case.bank) for case in cases]))
    packed = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
    places = torch.cat([case.bank for case in cases])
    ours = cases[3].kernels(packed, torch.cat(douts, dim=1), pos_b=places, cu_seqlens=cu, cu_bypass=cu_bypass)
    for name, fast, each in zip(NAMES, ours, zip(*alone, strict=True), strict=True):
        assert torch.equal(fast, torch.cat(each, dim=1)), name


def test_offsets_beyond_int32() -> None:
    """Three tokens 2^30 elements apart, in a process of its own: most of the memory is never touched."""
    code = """
import torch, interpreter
from mitigate.kernels import attend
near = [torch.randn(1, n, 1, 8).half() for n in (3, 2, 2, 3, 3)]
far = []
for x in near:
    room = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((1, 3, 1, 8), (0, 2**30, 8, 1))[:, : x.shape[1]]
    room.copy_(x)
    far.append(room)
options = dict(window=2, stride=1, local=1, scale=1.0)
with interpreter.shims():
    out, lse = attend.attend_fwd(*near, **options)
    assert torch.equal(attend.attend_fwd(*far, **options)[0], out)
    dout = torch.ones(1, 1, 1, 8).half().expand(1, 3, 1, 8)
    for a, b in zip(attend.attend_bwd(dout, *near, out, lse, **options), attend.attend_bwd(dout, *far, out, lse, **options)):
        assert a is None or torch.equal(a, b)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=interpreter.ROOT / "tests/kernels", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


interpreter.own_process(globals(), __file__)
