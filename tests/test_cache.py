"""The cache of a compressed model: any way of feeding the tokens gives the logits of one uncached pass, and it holds the bytes it says."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import COMPRESSED, FAMILIES, VARIANTS, attached, length_for, pads_before, tiny, tokens, whole
from transformers import DynamicCache, PreTrainedModel

from mitigate import cost, registry
from mitigate.attachable import UnsupportedModel
from mitigate.cache import PaddedCacheLayer, SummaryCacheLayer, VariantCacheLayer, empty, fork, held_bytes, restore, save
from mitigate.config import ConfigError, CostConfig, VariantConfig
from mitigate.geometry import Grid

PRIME = 11  # divides no period here


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return tiny("qwen3")


def feed(model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: DynamicCache | None = None) -> tuple[torch.Tensor, DynamicCache]:
    """Logits of ids [B, T] taken in through a cache in pieces of these sizes."""
    cache = empty() if cache is None else cache
    assert sum(sizes) == ids.shape[1]
    logits = [model(input_ids=piece, cache=cache, use_cache=True).logits for piece in ids.split(sizes, dim=1)]
    return torch.cat(logits, dim=1), cache


def pieces(length: int, size: int) -> list[int]:
    return [size] * (length // size) + [length % size] * bool(length % size)


def random_pieces(length: int, seed: int) -> list[int]:
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, length), size=min(6, length - 1), replace=False))
    return np.diff([0, *cuts, length]).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_any_way_of_feeding_gives_the_same_logits(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    length = length_for(variant)
    stride = variant.stride if variant.compress else 8
    assert length % stride or stride == 1
    assert length > variant.local_window + 2 * variant.stride
    ids = tokens(qwen3, length)
    splits = [
        [length],
        *(pieces(length, size) for size in {1, stride - 1, stride, stride + 1, PRIME} - {0}),
        *(random_pieces(length, seed) for seed in range(3)),
    ]
    with attached(qwen3, variant), torch.no_grad():
        wanted = whole(qwen3, ids)
        for sizes in splits:
            found, cache = feed(qwen3, ids, sizes)
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0, msg=lambda text, sizes=sizes: f"{sizes}: {text}")
            assert cache.get_seq_length() == length


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "per-offset-tied"])
def test_every_family_in_stock_precision(family: str, name: str) -> None:
    model, variant = tiny(family, wide=False), VARIANTS[name]
    ids = tokens(model, 43)
    with attached(model, variant), torch.no_grad():
        wanted = whole(model, ids)
        for sizes in ([43], pieces(43, 1), pieces(43, variant.stride + 1), random_pieces(43, 0)):
            torch.testing.assert_close(feed(model, ids, sizes)[0], wanted, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["w8s8", "w8s4", "deepseek-csa", "w12s8", "everything", "last-stride", "two"])
def test_prefill_then_decode_at_every_residue(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    length = length_for(variant)
    ids = tokens(qwen3, length, batch=1)
    with attached(qwen3, variant), torch.no_grad():
        wanted = whole(qwen3, ids)
        for first in range(1, variant.window + variant.stride + 1):
            found, _ = feed(qwen3, ids, [first, *[1] * (length - first)])
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_blocked_whole_sequence_equals_chunked_prefill(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 301, batch=1)
    for name in ("w8s8", "everything", "deepseek-hca"):
        with attached(qwen3, VARIANTS[name]), torch.no_grad():
            torch.testing.assert_close(feed(qwen3, ids, pieces(301, 97))[0], whole(qwen3, ids), atol=1e-10, rtol=0)


# bytes -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_held_are_the_closed_form_at_every_length(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    shape = cost.shape_of(qwen3)
    lcm = variant.stride if variant.compress else 8
    ids = tokens(qwen3, 4 * lcm + 3, batch=3)
    if lcm > 100:
        ids = ids[:1]
    cache = empty()
    with attached(qwen3, variant), torch.no_grad():
        for length in range(1, ids.shape[1] + 1):
            qwen3.model(input_ids=ids[:, length - 1 : length], cache=cache, use_cache=True)
            assert held_bytes(cache) == len(ids) * cost.bytes_at(variant, shape, length), length
            assert cache.get_seq_length() == length


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "w8s8-bypass-both", "uniform-stagger"])
def test_bytes_do_not_depend_on_the_pieces(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    shape = cost.shape_of(qwen3)
    ids = tokens(qwen3, 61)
    with attached(qwen3, variant), torch.no_grad():
        for sizes in ([61], pieces(61, 7), pieces(61, variant.stride), random_pieces(61, 1)):
            cache = empty()
            seen = 0
            for piece in ids.split(sizes, dim=1):
                qwen3.model(input_ids=piece, cache=cache, use_cache=True)
                seen += piece.shape[1]
                assert held_bytes(cache) == 2 * cost.bytes_at(variant, shape, seen), (sizes, seen)


def test_bytes_by_hand() -> None:
    """Two layers, two KV heads of 8 dims, width 32, 8-byte numbers: an entry (key or value) is 128 bytes, a hidden row 256."""
    shape = cost.Shape(layers=2, kv_heads=2, head_dim=8, hidden=32, element=8)
    assert shape.entry == 128

    def at(length: int, **fields: Any) -> int:
        return cost.bytes_at(VariantConfig(**fields), shape, length)

    assert at(20, compress=False) == 2 * 20 * 2 * 128
    # W8 S8 L16 after 20 tokens: 2 summaries; the query at 20 may see tokens 5 .. 19; rows 16 .. 19 wait for window 2.
    assert at(20) == 2 * ((2 + 15) * 2 * 128 + 4 * 256)
    assert at(20, tie="kv") == 2 * (2 * 128 + 15 * 2 * 128 + 4 * 256)
    # L = 1: the query at 20 still needs the tail 16 .. 19. With bypass "last", tokens 7 and 15 are held too.
    assert at(20, local_window=1) == 2 * ((2 + 4) * 2 * 128 + 4 * 256)
    assert at(20, local_window=1, bypass="last") == 2 * ((2 + 4 + 2) * 2 * 128 + 4 * 256)
    # After 23 tokens the next one completes window 2 and with L = 1 sees none of the tail.
    assert at(23, local_window=1) == 2 * (2 * 2 * 128 + 7 * 256)
    # W8 S4 o-4: windows end at 3, 7, .. 19, so there is no tail; rows 16 .. 19 wait for the one that ends at 23.
    assert at(20, stride=4, origin=-4, local_window=1) == 2 * (5 * 2 * 128 + 4 * 256)
    assert at(20, stride=4, origin=-4, local_window=6) == 2 * ((5 + 5) * 2 * 128 + 4 * 256)


def test_bytes_per_token_is_the_slope_of_the_closed_form() -> None:
    shape = cost.Shape(layers=2, kv_heads=2, head_dim=8, hidden=32, element=4)
    for name, variant in VARIANTS.items():
        period = variant.stride * variant.coarse_factor if variant.compress else 1
        slope = (cost.bytes_at(variant, shape, 2000 + 7 * period) - cost.bytes_at(variant, shape, 2000)) / (7 * period)
        assert cost.bytes_per_token(variant, shape) == pytest.approx(slope, rel=1e-12), name


@pytest.mark.parametrize("name", ["w8s8", "everything", "full"])
def test_measured_cost(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    config = CostConfig(context=50, batch=2, steps=2, repeats=2)
    with attached(qwen3, variant) as on:
        with torch.no_grad():
            wanted = whole(qwen3, tokens(qwen3, 20))
        measured = cost.measure(on, config)
        with torch.no_grad():
            assert torch.equal(whole(qwen3, tokens(qwen3, 20)), wanted), "the variant is back on"
    shape = cost.shape_of(qwen3)
    assert measured.kv_bytes_counted == measured.kv_bytes_at_context == cost.bytes_at(variant, shape, 50)
    assert measured.kv_kept == pytest.approx(registry.kept_fraction(variant, layers=shape.layers))
    assert measured.kv_constant_bytes == pytest.approx(measured.kv_bytes_counted - 50 * measured.kv_bytes_per_token)
    assert 0 < measured.throughput_ratio.low <= measured.throughput_ratio.value <= measured.throughput_ratio.high


def test_counting_notices_a_difference(qwen3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "held_bytes", lambda cache: held_bytes(cache) + 1)
    with attached(qwen3, VARIANTS["w8s8"]) as on, pytest.raises(RuntimeError, match=r"measure: the cache holds \d+ bytes, the closed form says \d+"):
        cost.measure(on, CostConfig(context=20, batch=1, steps=1, repeats=1))


# moving rows around ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "w8s8-bypass-both", "per-offset-tied"])
@pytest.mark.parametrize("seen", [3, 17, 24])
def test_reorder_repeat_and_select(qwen3: PreTrainedModel, name: str, seen: int) -> None:
    ids, more = tokens(qwen3, seen, batch=3), tokens(qwen3, 14, batch=6, seed=1)
    order = torch.tensor([2, 0, 0])
    with attached(qwen3, VARIANTS[name]), torch.no_grad():
        for change, rows in (
            (lambda cache: cache.reorder_cache(order), order),
            (lambda cache: cache.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
            (lambda cache: cache.batch_select_indices(torch.tensor([1])), torch.tensor([1])),
        ):
            _, cache = feed(qwen3, ids, [seen])
            change(cache)
            rest = more[: len(rows)]
            found, _ = feed(qwen3, rest, [5, 1, 8], cache)
            wanted = whole(qwen3, torch.cat([ids[rows], rest], dim=1))[:, seen:]
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["w8s8", "everything", "per-offset-tied"])
def test_a_fork_leaves_the_original_alone(qwen3: PreTrainedModel, name: str) -> None:
    ids = tokens(qwen3, 40)
    with attached(qwen3, VARIANTS[name]), torch.no_grad():
        wanted = whole(qwen3, ids)
        _, cache = feed(qwen3, ids[:, :21], [21])
        for _ in range(2):
            twin = fork(cache)
            feed(qwen3, tokens(qwen3, 13, seed=5), [6, 7], twin)
            assert cache.get_seq_length() == 21
        found, _ = feed(qwen3, ids[:, 21:], [2, 17], cache)
        torch.testing.assert_close(found, wanted[:, 21:], atol=1e-10, rtol=0)


def test_crop_and_reset(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 21)
    with attached(qwen3, VARIANTS["everything"]), torch.no_grad():
        wanted, cache = feed(qwen3, ids, [21])
        layer = cache.layers[0]
        assert isinstance(layer, SummaryCacheLayer)
        assert not layer.is_croppable
        assert not layer.is_compileable
        assert not layer.is_sliding
        layer.crop(0)
        with pytest.raises(NotImplementedError, match="summaries cannot be taken back"):
            layer.crop(-1)
        assert layer.get_max_length() == -1
        assert layer.get_mask_sizes(4) == (25, 0)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert held_bytes(cache) == 0
        again, _ = feed(qwen3, ids, [4, 17], cache)
        torch.testing.assert_close(again, wanted, atol=1e-10, rtol=0)


def test_offload_moves_every_tensor(qwen3: PreTrainedModel) -> None:
    with attached(qwen3, VARIANTS["w8s8-bypass-both"]), torch.no_grad():
        _, cache = feed(qwen3, tokens(qwen3, 40), [40])
        layer = cache.layers[1]
        before = [tensor.clone() for tensor in layer.tensors()]
        assert len(before) == 7, "summaries, bypassed and exact tokens as keys and values, rows of the open windows"
        layer.offload()
        layer.prefetch()
        assert all(torch.equal(a, b) for a, b in zip(before, layer.tensors(), strict=True))


def test_what_is_held_is_not_a_view_of_more(qwen3: PreTrainedModel) -> None:
    """Bytes would be counted right and freed wrong."""
    with attached(qwen3, VARIANTS["everything"]), torch.no_grad():
        _, cache = feed(qwen3, tokens(qwen3, 61), [61])
        for layer in cache.layers:
            for tensor in layer.tensors():
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_cache_belongs_to_its_variant(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 10)
    with attached(qwen3, VARIANTS["w8s8"]), torch.no_grad():
        _, cache = feed(qwen3, ids, [10])
    with pytest.raises(RuntimeError, match="the variant is not attached to the model that uses this cache"):
        feed(qwen3, ids, [10], cache)
    with attached(qwen3, VARIANTS["w8s4"]), pytest.raises(UnsupportedModel, match="this cache was filled under another variant"):
        feed(qwen3, ids, [10], cache)


class Numbering:
    """A stand-in for the attached layer that numbers its windows, and fails where it is told to: at the call of `summarise_rows` with this number."""

    def __init__(self, grid: Grid, local: int, phases: tuple[int, ...]) -> None:
        self.grid, self.local, self.phases = grid, local, phases
        self.calls, self.fails_at = 0, -1

    def summarise_rows(self, hidden: torch.Tensor, *, row0: int, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise MemoryError("no room for summaries")
        assert hidden[0, :, 0].tolist() == list(range(row0, row0 + hidden.shape[1])), "rows come without gaps"
        for j in range(window0, window0 + count):
            assert row0 <= max(self.grid.end(j) - self.grid.window + 1, 0)
            assert self.grid.end(j) < row0 + hidden.shape[1]
        made = torch.arange(window0, window0 + count, dtype=torch.float64).reshape(1, 1, count, 1).expand(len(hidden), 1, count, 1)
        return made, -made


def test_a_layer_alone_at_long_lengths() -> None:
    """What a cache layer holds, by position."""
    for window, stride, origin, local, phases in (
        (8, 4, -4, 3, (0,)),
        (12, 8, -11, 1, (3, 7)),
        (128, 128, 0, 16, ()),
        (7, 3, -2, 40, (1,)),
        (3, 1, 0, 1, (0,)),
    ):
        grid = Grid(window=window, stride=stride, origin=origin)
        layer = SummaryCacheLayer(Numbering(grid, local, phases))
        rng, length = np.random.default_rng(window), 0
        while length < 5 * window + 60:
            size = int(rng.integers(1, 2 * stride + 3))
            now = torch.arange(length, length + size, dtype=torch.float64)
            layer.expect(now.reshape(1, -1, 1))
            keys, values = layer.update(now.reshape(1, 1, -1, 1), -now.reshape(1, 1, -1, 1))
            assert torch.equal(keys, -values)
            length += size
            given = keys.flatten().tolist()
            count = grid.num_windows(length)
            assert given[:count] == list(range(count))
            lowest = grid.exact_lo(length - size, local)
            assert given[count:] == [t for t in range(length) if t >= lowest or grid.phase(t) in phases]
            assert layer.keys.flatten().tolist() == list(range(grid.stored_exact_lo(length, local), length))
            assert layer.open_rows is not None
            assert layer.open_rows.flatten().tolist() == list(range(grid.open_lo(length), length))
        with pytest.raises(RuntimeError, match="variant is not attached"):
            layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


# calls that fail -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "w8s8-bypass-both", "per-offset-tied"])
@pytest.mark.parametrize("seen", [1, 7, 17, 24])
@pytest.mark.parametrize("pads", [None, [0, 5, 2]])
def test_a_call_with_other_rows_is_refused_and_leaves_the_cache_as_it_was(qwen3: PreTrainedModel, name: str, seen: int, pads: list[int] | None) -> None:
    ids = tokens(qwen3, 40, batch=3)
    mask = None if pads is None else pads_before(40, pads)
    with attached(qwen3, VARIANTS[name]), torch.no_grad():
        wanted, cache = [whole(qwen3, ids[row : row + 1, pad:])[0] for row, pad in enumerate(pads or [0] * 3)], empty()
        qwen3(input_ids=ids[:, :seen], cache=cache, use_cache=True, attention_mask=None if mask is None else mask[:, :seen])
        for rows in (1, 2, 4):
            kept = [tensor.clone() for layer in cache.layers for tensor in layer.tensors()]
            with pytest.raises(UnsupportedModel, match=rf"^attach: the cache holds 3 rows, the call has {rows}; start other rows with an empty cache$"):
                qwen3(input_ids=tokens(qwen3, 13, batch=rows), cache=cache, use_cache=True)
            assert cache.get_seq_length() == seen
            assert all(torch.equal(a, b) for a, b in zip(kept, (t for layer in cache.layers for t in layer.tensors()), strict=True))
        found = qwen3(input_ids=ids[:, seen:], cache=cache, use_cache=True, attention_mask=mask).logits
        for row, pad in enumerate(pads or [0] * 3):
            first = max(pad - seen, 0)
            torch.testing.assert_close(found[row, first:], wanted[row][seen + first - pad :], atol=1e-10, rtol=0)


def taken_in(layer: VariantCacheLayer, start: int, stop: int, pads: list[int], spoil: Callable[..., tuple[torch.Tensor, ...]] = lambda *x: x) -> list[Any]:
    """What the queries of columns start .. stop - 1 read."""
    place_BT = torch.arange(start, stop, dtype=torch.float64) - torch.tensor(pads)[:, None]
    hidden, keys, values = spoil(place_BT[..., None], place_BT[:, None, :, None], -place_BT[:, None, :, None])
    padded = isinstance(layer, PaddedCacheLayer)
    layer.expect(hidden, pads if padded else None)
    given = layer.update(keys, values)
    return [(e.rows.tolist(), e.skip, e.keys.tolist(), e.values.tolist(), e.length) for e in layer.take_entries()] if padded else [x.tolist() for x in given]


SPOILT: dict[str, tuple[type[Exception], Callable[..., tuple[torch.Tensor, ...]]]] = {
    "rows of all": (UnsupportedModel, lambda h, k, v: (h[1:], k[1:], v[1:])),
    "rows of keys": (RuntimeError, lambda h, k, v: (h, k[1:], v)),
    "rows of hidden states": (UnsupportedModel, lambda h, k, v: (h[1:], k, v)),
    "rows of values": (RuntimeError, lambda h, k, v: (h, k, v[1:])),
    "tokens of hidden states": (RuntimeError, lambda h, k, v: (h[:, 1:], k, v)),
    "tokens of keys": (RuntimeError, lambda h, k, v: (h, k[:, :, 1:], v)),
    "kv heads": (RuntimeError, lambda h, k, v: (h, k, v.repeat(1, 2, 1, 1))),
    "width of rows": (RuntimeError, lambda h, k, v: (h.repeat(1, 1, 2), k, v)),
    "head dim": (RuntimeError, lambda h, k, v: (h, k.repeat(1, 1, 1, 2), v)),
}


@pytest.mark.parametrize("pads", [[0, 0, 0], [0, 1, 6], [9, 2, 10, 9]])
@pytest.mark.parametrize(("window", "stride", "origin", "local", "phases"), [(8, 4, -4, 3, (0,)), (12, 8, -11, 1, (3, 7)), (5, 5, 0, 9, ())])
def test_an_exception_leaves_the_layer_as_it_was(window: int, stride: int, origin: int, local: int, phases: tuple[int, ...], pads: list[int]) -> None:
    """Calls spoilt in every way, and summaries that fail in each part in turn, at every length; the right call gives what it gives undisturbed."""
    grid, kind = Grid(window=window, stride=stride, origin=origin), PaddedCacheLayer if any(pads) else SummaryCacheLayer
    owner, calm = Numbering(grid, local, phases), Numbering(grid, local, phases)
    layer, undisturbed = kind(owner), kind(calm)
    most = 0
    for start in range(0, 3 * window + stride, 3):
        held = {name: value for name, value in vars(layer).items() if name != "_expected"}
        for error, spoil in SPOILT.values() if start else ():
            with pytest.raises(error):
                taken_in(layer, start, start + 3, pads, spoil)
        calm.calls = 0
        wanted = taken_in(undisturbed, start, start + 3, pads)
        most = max(most, calm.calls)
        for failing in range(1, calm.calls + 1):
            owner.calls, owner.fails_at = 0, failing
            with pytest.raises(MemoryError):
                taken_in(layer, start, start + 3, pads)
        owner.fails_at = -1
        assert all(getattr(layer, name) is value for name, value in held.items())
        assert taken_in(layer, start, start + 3, pads) == wanted
        assert layer.get_seq_length() == start + 3
        assert all(torch.equal(a, b) for a, b in zip(layer.tensors(), undisturbed.tensors(), strict=True))
    assert most >= (2 if any(pads) else 1), "a later part fails after an earlier one had its summaries"


# saved states ----------------------------------------------------------------------------------------------------------------------------------

HERE = VariantConfig(window=6, stride=4, origin=-1, local_window=3, bypass="last")
ELSEWHERE: list[dict[str, Any]] = [  # changes of every field of a variant
    {"window": 7},
    {"stride": 3},
    {"origin": 0},
    {"local_window": 4},
    {"bypass": "none"},
    {"coarse": "even", "coarse_factor": 2},
    {"stagger": "half"},
    *({"gate": strategy.name} for strategy in registry.strategies("gate") if strategy.name != HERE.gate),
    {"tie": "gates"},
    {"tie": "kv"},
    {"payload": "per_offset"},
    {"coverage": "entropy", "coverage_weight": 0.5},
    {"coverage_threshold": 0.5},
    {"coverage_scope": "model"},
    {"key_norm": "tokens"},
    {"rope_position": "window_start"},
    {"rope_position": "window_end"},
    {"gate": "uniform", "tie": "kv"},
]
SHAPING = {"window", "stride", "origin", "local_window", "bypass", "coarse", "coarse_factor", "stagger"}  # of windows


def saved_state(model: PreTrainedModel, pads: list[int] | None) -> dict[str, torch.Tensor]:
    """Of two rows after 21 tokens, under the variant that is attached."""
    cache = empty()
    with torch.no_grad():
        model(input_ids=tokens(model, 21), cache=cache, use_cache=True, attention_mask=None if pads is None else pads_before(21, pads))
    return save(cache)


@pytest.mark.parametrize("pads", [None, [0, 3]])
def test_a_state_of_another_variant_is_refused_by_name(qwen3: PreTrainedModel, pads: list[int] | None) -> None:
    assert set().union(*ELSEWHERE) == {field.name for field in dataclasses.fields(VariantConfig)} - {"compress"}
    with attached(qwen3, HERE) as on:
        state = saved_state(qwen3, pads)
        assert restore(on.layers, state).get_seq_length() == 21
    for changes in ELSEWHERE:
        with attached(qwen3, dataclasses.replace(HERE, **changes)) as other, pytest.raises(ConfigError) as refused:
            restore(other.layers, state)
        assert re.fullmatch(r"restore: layer [01](\.pad0)? must have .+ like the attached variant, got .+", str(refused.value)), changes
        if not changes.keys() & SHAPING:
            wanted, got = (", ".join(f"{name} {fields[name]}" for name in sorted(changes)) for fields in (changes, vars(HERE)))
            assert str(refused.value).endswith(f" must have {wanted} like the attached variant, got {got}")


def test_a_state_that_does_not_tell_its_variant_is_refused(qwen3: PreTrainedModel) -> None:
    forms = [torch.tensor([6, 4, -1, 3, 3]), torch.rand(4), torch.tensor(7, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)]
    texts = [b"x", b"[]", b"{}", b'{"variant": {}}', b'{"variant": 1, "windows": [6, 4, -1, 3, 3]}', b"\xff\xfe"]
    with attached(qwen3, HERE) as on:
        state = saved_state(qwen3, None)
        for form in [*forms, *(torch.tensor(list(text), dtype=torch.uint8) for text in texts)]:
            with pytest.raises(ConfigError, match=r"^restore: layer 1\.form must tell the windows and the variant as save writes them, got \d+ numbers of "):
                restore(on.layers, state | {"1.form": form})


SKEWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fewer rows": lambda x: x[:-1],
    "more rows": lambda x: torch.cat([x, x]),
    "fewer kv heads": lambda x: x[:, :1],
    "another head dim": lambda x: x[..., 1:],
    "another dtype": lambda x: x.float(),
    "fewer entries": lambda x: x[:, :, 1:] if x.dim() == 4 else x[:, 1:],
    "more entries": lambda x: torch.cat([x, x], dim=x.dim() - 2),
    "a dimension fewer": lambda x: x[0],
    "two dimensions fewer": lambda x: x[0, 0],
    "a dimension more": lambda x: x[None],
}


@pytest.mark.parametrize(("pads", "under"), [(None, "0."), (None, "1."), ([0, 3], "0.pad0."), ([0, 3], "1.pad3.")])
@pytest.mark.parametrize("tie", ["none", "kv"])
def test_a_state_whose_tensors_disagree_is_refused(qwen3: PreTrainedModel, pads: list[int] | None, under: str, tie: Any) -> None:
    """Each tensor of a layer skewed in every way, left out, or of another length; and all of a layer, or of equally padded rows, skewed together."""
    with attached(qwen3, dataclasses.replace(HERE, tie=tie)) as on:
        state = saved_state(qwen3, pads)
        tensors = [name for name in state if name.startswith(under) and state[name].dim() >= 3]
        assert len(tensors) == (7 if tie == "none" else 6)
        spoilt = {(name, how): {name: skew(state[name])} for name in tensors for how, skew in SKEWED.items()}
        free = {(f"{under}open_rows", how) for how in ("fewer kv heads", "another head dim", "another dtype")}  # rows have no heads, and a width of their own
        for how in free - {(f"{under}open_rows", "fewer kv heads")}:
            restore(on.layers, state | spoilt.pop(how))
        spoilt |= {(name, "left out"): {name: None} for name in [*tensors, f"{under}form", f"{under}length"]}
        spoilt["all", "more rows"] = {name: SKEWED["more rows"](state[name]) for name in tensors}
        spoilt |= {("values", how): {name: SKEWED[how](state[name]) for name in tensors if "values" in name} for how in ("fewer rows", "fewer kv heads")}
        spoilt |= {("length", str(length)): {f"{under}length": torch.tensor(length)} for length in (0, -1, 20, 22, [21], 21.0)}
        if tie == "kv":
            spoilt["values", "twice"] = {f"{under}summary_values": state[f"{under}summary_keys"]}
        if pads is None:
            spoilt["length", "of every layer"] = {f"{layer}.length": torch.tensor(0) for layer in (0, 1)}
        else:
            layer = under.split(".")[0]
            spoilt |= {("all", how): {name: SKEWED[how](state[name]) for name in tensors} for how in ("more rows", "another head dim", "another dtype")}
            spoilt |= {("pads", str(new)): {f"{layer}.pads": torch.tensor(new)} for new in ([0, 0], [3, 3], [0, 4], [0], [0, 3, 3], 0, [0, -3], [0.0, 3.0])}
            spoilt |= {("columns", str(new)): {f"{layer}.columns": torch.tensor(new)} for new in (0, 20, 22, [21])}
            spoilt["pads", "left out"], spoilt["columns", "left out"] = {f"{layer}.pads": None}, {f"{layer}.columns": None}
            spoilt["more", "of other pads"] = {f"{layer}.pad7.keys": state[tensors[0]]}
        for how, changes in spoilt.items():
            with pytest.raises(ConfigError) as refused:
                restore(on.layers, {name: tensor for name, tensor in (state | changes).items() if tensor is not None})
            assert re.fullmatch(r"restore: layer [01].* must .*, got .*", str(refused.value)), how


# generate --------------------------------------------------------------------------------------------------------------------------------------


def greedy_by_hand(model: PreTrainedModel, ids: torch.Tensor, new: int) -> torch.Tensor:
    for _ in range(new):
        ids = torch.cat([ids, whole(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("name", ["full", "w8s8", "deepseek-csa", "everything", "w8s8-bypass-last", "uniform-stagger"])
def test_generate_equals_greedy_decoding_by_hand(qwen3: PreTrainedModel, name: str) -> None:
    ids = tokens(qwen3, 13)
    mask = torch.ones_like(ids)
    with attached(qwen3, VARIANTS[name]), torch.no_grad():
        wanted = greedy_by_hand(qwen3, ids, 30)
        for options in ({}, {"prefill_chunk_size": 5}, {"prefill_chunk_size": 8}, {"use_cache": False}):
            found = qwen3.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0, **options)
            assert torch.equal(found, wanted), options


@pytest.mark.parametrize("name", ["w8s8", "everything"])
def test_beams_equal_beams_without_a_cache(qwen3: PreTrainedModel, name: str) -> None:
    ids = tokens(qwen3, 13)
    with attached(qwen3, VARIANTS[name]), torch.no_grad():
        found, wanted = (
            qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, num_beams=3, pad_token_id=0, use_cache=use_cache)
            for use_cache in (True, False)
        )
        assert torch.equal(found, wanted)


def test_a_conversation_goes_on_from_its_cache(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 13, batch=1)
    with attached(qwen3, VARIANTS["w8s4"]), torch.no_grad():
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        first = qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, **options)
        longer = torch.cat([first.sequences, tokens(qwen3, 6, batch=1, seed=2)], dim=1)
        cache = first.cache if hasattr(first, "cache") else first.past_key_values
        again = qwen3.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=9, cache=cache, **options)
        assert torch.equal(again.sequences, greedy_by_hand(qwen3, longer, 9))


def test_variants_here_are_all_that_there_are() -> None:
    assert {preset.name for preset in registry.presets()} <= set(VARIANTS)
    used = {axis: {getattr(variant, axis) for variant in COMPRESSED.values()} for axis in ("gate", "tie", "payload", "stagger", "bypass", "coverage")}
    for axis, names in used.items():
        assert names == {strategy.name for strategy in registry.strategies(axis)}, f"every {axis} must pass the consistency gate"
    assert {v.key_norm for v in COMPRESSED.values()} == {"pooled", "tokens"}
    assert {v.rope_position for v in COMPRESSED.values()} == {"last_stride", "window_start", "window_end"}
    assert len(list(itertools.chain.from_iterable(used.values()))) > 15
