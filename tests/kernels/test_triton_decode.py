"""The decode kernels under the interpreter: one query per sequence, every split, against fp64 and against the whole-sequence reference."""

from __future__ import annotations

from collections.abc import Iterator

import interpreter
import pytest
import torch
from tolerance import assert_as_good_as

from mitigate.kernels import reference, visibility

if interpreter.INSTALLED:
    from mitigate.kernels import decode, tiles

GRID = (8, 4, -3)


@pytest.fixture(autouse=True)
def _shims() -> Iterator[None]:
    with interpreter.shims():
        yield


def inputs(batch: int, heads: int, groups: int, dim: int, dim_v: int, rows: tuple[int, int, int], seed: int = 0) -> list[torch.Tensor]:
    """q, ks, vs, k, v, kb, vb in fp64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, dim), *((batch, n, groups, d) for n in rows for d in (dim, dim_v))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def plain(parts: list[torch.Tensor], seen: list[torch.Tensor], scale: float) -> torch.Tensor:
    """seen: for each sequence, which of [summaries | exact | bypass] its query sees."""
    q, ks, vs, k, v, kb, vb = parts
    outs = []
    for b, visible in enumerate(seen):
        keys, values = (torch.cat([x[b] for x in bank]).transpose(0, 1)[None] for bank in ((ks, k, kb), (vs, v, vb)))
        outs.append(reference.attend(q[b][None, :, None], keys, values, visible[None], scale)[0, :, 0])
    return torch.stack(outs)


def who(t: int, summaries: int, exact: torch.Tensor, bank: torch.Tensor, grid: tuple[int, int, int], local: int) -> torch.Tensor:
    lo = visibility.exact_lo(t, *grid, local)
    return torch.cat([torch.arange(summaries) < visibility.num_completed(t, *grid), (exact >= lo) & (exact <= t), bank < lo])


def check(
    positions: list[int], heads: int = 4, groups: int = 2, dim: int = 16, dim_v: int = 16, dtype: torch.dtype = torch.float32, n_split: int | None = None,
    grid: tuple[int, int, int] = GRID, local: int = 5, tile: bool = True,
) -> None:  # fmt: skip
    """Sequences of several lengths in one call, exact rows from 0 on, phase 1 bypassed; rows that nobody sees are NaN."""
    length = max(positions) + 1
    summaries = visibility.num_windows(length, *grid)
    everything = torch.arange(length)
    bank = everything[reference.is_bypassed(everything, stride=grid[1], origin=grid[2], phases=(1 % grid[1],))]
    parts = inputs(len(positions), heads, groups, dim, dim_v, (summaries, length, len(bank)))
    low = [x.to(dtype) for x in parts]
    seen = [who(t, summaries, everything, bank, grid, local) for t in positions]
    exact, usual = (plain([x.to(kind) for x in low], seen, dim**-0.5) for kind in (torch.float64, dtype))
    for b, t in enumerate(positions):
        low[1][b, visibility.num_completed(t, *grid) :] = low[2][b, visibility.num_completed(t, *grid) :] = float("nan")
        low[3][b, t + 1 :] = low[4][b, t + 1 :] = float("nan")
    q, ks, vs, k, v, kb, vb = low
    options = {"window": grid[0], "stride": grid[1], "origin": grid[2], "local": local, "scale": dim**-0.5, "n_split": n_split}
    if tile:
        options["tile"] = tiles.Tile(16, 16)
    position = torch.tensor(positions, dtype=torch.int32)
    runs = [decode.decode_fwd(q, ks, vs, k, v, position=position, kb_BPGD=kb, vb_BPGV=vb, pos_b=bank, **options) for _ in range(2)]  # type: ignore[arg-type]
    assert torch.equal(runs[0][0], runs[1][0])
    assert_as_good_as(runs[0][0], usual, exact, f"out {positions} {heads}/{groups} {dim} {dim_v} {n_split}")


@pytest.mark.parametrize("n_split", [None, 1, 2, 5])
def test_sequences_of_several_lengths(n_split: int | None) -> None:
    check([0, 3, 4, 77, 150], n_split=n_split)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (3, 1), (6, 2), (20, 1)])
def test_any_ratio_of_heads(heads: int, groups: int) -> None:
    check([40, 61], heads, groups, n_split=3)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (24, 40), (96, 24)])
def test_head_dims(dim: int, dim_v: int) -> None:
    check([40, 61], dim=dim, dim_v=dim_v, n_split=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_with_shipped_tiles(dtype: torch.dtype) -> None:
    check([40, 400], dim=64, dim_v=64, dtype=dtype, tile=False, n_split=2)


@pytest.mark.parametrize("grid", [(1, 1, 0), (3, 1, -2), (8, 8, 0), (12, 8, -5), (5, 3, -4)])
def test_any_grid(grid: tuple[int, int, int]) -> None:
    for local in (0, 1, 16):
        check([0, grid[0] - 1, grid[0], 45], grid=grid, local=local, n_split=2)


def test_every_position_equals_the_whole_sequence() -> None:
    """Decode at t with what a cache of t + 1 tokens holds, from before the first end on: no query loses an entry or gains one."""
    length, local = 30, 3
    for origin in (0, -3, -7):
        grid = (8, 4, origin)
        q, ks, vs, k, v = (x.float() for x in inputs(length, 2, 1, 16, 16, (visibility.num_windows(length, *grid), length, 0))[:5])
        one = [x[:1].expand(length, -1, -1, -1) for x in (ks, vs, k, v)]
        t = torch.arange(length)
        options = {"window": 8, "stride": 4, "origin": origin, "local": local, "scale": 0.25}
        out, _ = decode.decode_fwd(q, *one, position=t, **options, n_split=2, tile=tiles.Tile(16, 16))  # type: ignore[arg-type]
        visible = reference.visible(t, t, ks.shape[1], window=8, stride=4, origin=origin, local=local)
        keys, values = (torch.cat([a[:1], b[:1]], dim=1).transpose(1, 2) for a, b in ((ks, k), (vs, v)))
        wanted = reference.attend(q.transpose(0, 1)[None], keys, values, visible, 0.25)[0].transpose(0, 1)
        torch.testing.assert_close(out, wanted)


def test_a_ring_of_exact_tokens_equals_them_in_order() -> None:
    positions, local = [37, 60], 6
    q, ks, vs, k, v = (x.float() for x in inputs(2, 4, 2, 16, 16, (15, 16, 0))[:5])
    options = {"window": 8, "stride": 4, "origin": -3, "local": local, "scale": 0.25, "position": torch.tensor(positions, dtype=torch.int32)}
    first = torch.tensor([visibility.exact_lo(t, *GRID, local) for t in positions], dtype=torch.int32)
    in_order, _ = decode.decode_fwd(q, ks, vs, k, v, k_start=first, **options)  # type: ignore[arg-type]
    turn = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    places = (first[:, None] + torch.arange(16))[:, turn]
    places[places > torch.tensor(positions)[:, None]] = -1
    turned, _ = decode.decode_fwd(q, ks, vs, k[:, turn], v[:, turn], pos_x=places, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(turned, in_order)


def test_a_slot_without_a_sequence_gives_zero() -> None:
    q, ks, vs, k, v = (x.float() for x in inputs(2, 2, 1, 16, 16, (5, 30, 0))[:5])
    position = torch.tensor([-1, 20], dtype=torch.int32)
    out, lse = decode.decode_fwd(q, ks, vs, k, v, window=8, stride=4, local=4, scale=1.0, position=position)
    assert not out[0].any()
    assert (lse[0] == float("-inf")).all()
    assert torch.isfinite(lse[1]).all()


def test_no_summaries_and_nothing_at_all() -> None:
    q, ks, vs, k, v = (x.float() for x in inputs(2, 2, 1, 16, 16, (0, 3, 0))[:5])
    out, _ = decode.decode_fwd(q, ks, vs, k, v, window=8, stride=8, local=4, scale=1.0, position=2)
    torch.testing.assert_close(out, reference.attend(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), torch.ones(1, 3, dtype=torch.bool), 1.0)[:, :, 0])
    empty = [x[:0] for x in (q, ks, vs, k, v)]
    assert decode.decode_fwd(*empty, window=8, stride=8, local=4, scale=1.0, position=2)[0].shape == (0, 2, 16)  # type: ignore[misc]


def test_refusals() -> None:
    q, ks, vs, k, v = (x.float() for x in inputs(2, 2, 1, 16, 16, (5, 30, 0))[:5])
    options = {"window": 8, "stride": 4, "local": 4, "scale": 1.0, "position": 20}
    with pytest.raises(TypeError, match="the dtype of q"):
        decode.decode_fwd(q, ks, vs, k.half(), v, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must divide"):
        decode.decode_fwd(q, *(x.expand(-1, -1, 3, -1) for x in (ks, vs, k, v)), **options)  # type: ignore[arg-type, misc]
    with pytest.raises(ValueError, match="come together"):
        decode.decode_fwd(q, ks, vs, k, v, kb_BPGD=k, vb_BPGV=v, **options)  # type: ignore[arg-type]


interpreter.own_process(globals(), __file__)
