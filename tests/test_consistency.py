"""The consistency gate: however the tokens of a sequence reach a compressed model, its logits are those of one uncached pass.

One uncached pass over the longest length gives, causally, the logits that every shorter length must show; `test_surgery` proves causality to the bit.
Lengths run from 1 to four periods and three tokens, P being the stride (every layer of a preset has the same); at a stride above 100 the lengths are
those around the ends of windows, and single tokens go in on one family. `test_cache` holds the same for settings that no preset has. The second half
are reports from other projects, each named by where it came from (design page on transformers, section 7).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from safetensors.torch import load
from safetensors.torch import save as pack
from tiny_models import VARIANTS, attached, tiny, tokens, whole
from transformers import DynamicCache, PreTrainedModel

from mitigate import cost, registry
from mitigate.cache import SummaryCacheLayer, empty, fork, held_bytes, restore, save
from mitigate.config import ConfigError, VariantConfig
from mitigate.geometry import Grid
from mitigate.surgery import Attachment

PRESETS = {preset.name: preset.variant for preset in registry.presets()}
GATED = ("llama", "qwen2", "qwen3")
UNROTATED = ("full", "w8s8", "w12s8", "deepseek-csa", "w8s8-tied", "w8s8-per-offset", "w8s8-bypass-both")  # also on SmolLM3, whose layers do not all rotate
EXACT = ("w8s4", "deepseek-csa", "w8s6", "everything", "per-offset-tied", "uniform-stagger", "two")  # also in fp64
PRIME = 11  # divides no period
SINGLE, DOUBLE = 5e-5, 1e-10  # absolute; from the design page, not to be widened


@lru_cache(maxsize=8)
def model_of(family: str, wide: bool = False) -> PreTrainedModel:
    return tiny(family, wide=wide)


def feed(model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: DynamicCache, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of ids [B, T] taken in through a cache in pieces of these sizes; the mask is of all columns, earlier ones included."""
    assert sum(sizes) == ids.shape[1]
    logits = []
    for piece in ids.split([size for size in sizes if size], dim=1):
        seen = cache.get_seq_length() + piece.shape[1]
        logits.append(model(input_ids=piece, cache=cache, use_cache=True, attention_mask=None if mask is None else mask[:, :seen]).logits)
    return torch.cat(logits, dim=1)


def pieces(length: int, size: int) -> list[int]:
    return [size] * (length // size) + [length % size] * bool(length % size)


def random_pieces(length: int, seed: int) -> list[int]:
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, length), size=min(6, length - 1), replace=False))
    return np.diff([0, *cuts, length]).tolist()


def period_of(variant: VariantConfig) -> int:
    return variant.stride * variant.coarse_factor if variant.compress else 8


def lengths_of(variant: VariantConfig) -> list[int]:
    """1 to 4 P + 3; around window ends and in mid-window where P is above 100."""
    period = period_of(variant)
    last = 4 * period + 3
    if period < 100:
        return list(range(1, last + 1))
    near = {end + shift for end in range(0, last, period) for shift in (-2, -1, 0, 1, 2, period // 2)}
    return sorted(length for length in near | {last} if 1 <= length <= last)


def hold(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, how: object) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0, msg=lambda text: f"{how}: {text}")


def gate(model: PreTrainedModel, variant: VariantConfig, tolerance: float, *, rolled_back: int = 4) -> None:
    """Everything below on one model; rolled back at the lengths of so many periods."""
    period, lengths = period_of(variant), lengths_of(variant)
    last = lengths[-1]
    ids, drafts = tokens(model, last), tokens(model, period % 13 + 2, seed=7)
    with attached(model, variant) as on, torch.no_grad():
        wanted = whole(model, ids)
        by_token = {1} if period < 100 or rolled_back == 4 else set()  # 515 steps on one family
        for size in sorted({period - 1, period, period + 1, PRIME, *by_token} - {0}):
            hold(feed(model, ids, pieces(last, size), empty()), wanted, tolerance, f"pieces of {size}")
        for seed in range(2):
            hold(feed(model, ids, random_pieces(last, seed), empty()), wanted, tolerance, f"random pieces {seed}")
        for length in lengths:
            cache = empty()
            hold(feed(model, ids[:, :length], [length], cache), wanted[:, :length], tolerance, f"prefill of {length}")
            assert cache.get_seq_length() == length
            if length <= rolled_back * period:
                go_on_from(model, on, cache, ids, wanted, drafts, tolerance)
        left_padded(model, ids, wanted, (0, 1, period // 2 + 1), tolerance)


def go_on_from(
    model: PreTrainedModel, on: Attachment, cache: DynamicCache, ids: torch.Tensor, wanted: torch.Tensor, drafts: torch.Tensor, tolerance: float
) -> None:
    """Drafts go into the cache, it is rolled back to before them and goes on; rolled back by a fork and by a saved state in turn, at every phase."""
    length = cache.get_seq_length()
    by_state = bool(on.layers) and length // on.variant.stride % 2 == 1
    kept, state = (None, save(cache)) if by_state else (fork(cache), None)
    feed(model, drafts, [drafts.shape[1]], cache)
    back = kept if state is None else restore(on.layers, state)
    assert back.get_seq_length() == length
    rest = ids[:, length:]
    if rest.shape[1]:
        hold(feed(model, rest, [rest.shape[1]], back), wanted[:, length:], tolerance, f"{'restored' if by_state else 'rolled back'} at {length}")


def left_padded(model: PreTrainedModel, ids: torch.Tensor, wanted: torch.Tensor, pads: tuple[int, ...], tolerance: float) -> None:
    """Rows of unequal length, pads on the left: without a cache, and in pieces of which one ends within the pads."""
    batch, last = torch.cat([ids, ids[:1]])[: len(pads)], ids.shape[1]
    mask = (torch.arange(last) >= torch.tensor(pads)[:, None]).long()
    shifted = torch.stack([row.roll(pad) for row, pad in zip(batch, pads, strict=True)])
    few = pads[-1] - 1
    ways = {
        "uncached": whole(model, shifted, attention_mask=mask),
        "cached": feed(model, shifted, [few, last - few - 4, 1, 1, 2], empty(), mask),
    }
    for how, found in ways.items():
        for row, pad in enumerate(pads):
            hold(found[row, pad:], wanted[row % len(ids), : last - pad], tolerance, f"{how}, {pad} left pads")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("family", GATED)
def test_every_preset_passes(family: str, name: str) -> None:
    gate(model_of(family), PRESETS[name], SINGLE, rolled_back=4 if family == "qwen3" else 2)


@pytest.mark.parametrize("name", UNROTATED)
def test_layers_that_do_not_rotate_pass(name: str) -> None:
    gate(model_of("smollm3"), PRESETS[name], SINGLE, rolled_back=2)


@pytest.mark.parametrize("name", EXACT)
def test_in_double_precision_it_is_logic_and_not_rounding(name: str) -> None:
    gate(model_of("qwen3", wide=True), VARIANTS[name], DOUBLE)


@pytest.mark.parametrize("name", PRESETS)
def test_generate_does_not_depend_on_the_prefill(name: str) -> None:
    """Rows of unequal length, greedily: each row as if generated alone, for several `prefill_chunk_size`; and a sample drawn from the same seed."""
    model, variant = model_of("qwen3", wide=True), PRESETS[name]
    period, new = min(period_of(variant), 24), 12
    length, pads = 2 * period + 3, (0, period // 2 + 1)
    ids = tokens(model, length)
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    options = {"attention_mask": mask, "max_new_tokens": new, "pad_token_id": 0}
    with attached(model, variant), torch.no_grad():
        alone = []
        for row, pad in zip(ids, pads, strict=True):
            one = row[None, pad:]
            for _ in range(new):
                one = torch.cat([one, whole(model, one)[:, -1:].argmax(-1)], dim=1)
            alone.append(one[0, -new:])
        sampled = []
        for size in (None, period, period + 1):
            found = model.generate(ids, **options, do_sample=False, prefill_chunk_size=size)
            assert torch.equal(found[:, length:], torch.stack(alone)), size
            torch.manual_seed(3)
            sampled.append(model.generate(ids, **options, do_sample=True, top_k=0, prefill_chunk_size=size))
        assert all(torch.equal(one, sampled[0]) for one in sampled)


def test_beams_over_rows_of_unequal_length() -> None:
    model = model_of("qwen3", wide=True)
    pads = (0, 3, 9)
    ids = tokens(model, 21, batch=3)
    mask = (torch.arange(21) >= torch.tensor(pads)[:, None]).long()
    options = {"max_new_tokens": 14, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    with attached(model, VARIANTS["everything"]), torch.no_grad():
        found = model.generate(ids, attention_mask=mask, prefill_chunk_size=4, **options)
        for row, pad in enumerate(pads):
            one = model.generate(ids[row : row + 1, pad:], attention_mask=mask[row : row + 1, pad:], **options)
            assert torch.equal(found[row, 21:], one[0, 21 - pad :])


# moving left-padded rows around --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [4, 17])
def test_reorder_repeat_select_save_and_fork_of_left_padded_rows(seen: int) -> None:
    """Row 2 still waits for its first token at 4 columns."""
    model, pads = model_of("qwen3", wide=True), [0, 3, 6, 3]
    ids, more = tokens(model, seen, batch=4), tokens(model, 15, batch=8, seed=1)
    mask = (torch.arange(seen + 15) >= torch.tensor(pads)[:, None]).long()
    order = torch.tensor([2, 1, 1, 3])
    with attached(model, VARIANTS["everything"]) as on, torch.no_grad():
        cases = (
            (lambda cache: cache.reorder_cache(order), order),
            (lambda cache: cache.batch_repeat_interleave(2), torch.arange(4).repeat_interleave(2)),
            (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), torch.tensor([2, 0])),
            (lambda cache: cache.batch_select_indices(torch.tensor([False, True, False, False])), torch.tensor([1])),
            (lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers], torch.arange(4)),
        )
        for change, rows in cases:
            cache = empty()
            feed(model, ids, [seen], cache, mask)
            change(cache)
            rest, kept = more[: len(rows)], fork(cache)
            state = save(cache)
            every = torch.cat([ids[rows], rest], dim=1)
            for held in (cache, kept, restore(on.layers, state)):
                assert held.get_seq_length() == seen
                found = feed(model, rest, [5, 1, 9], held, mask[rows])
                for b, row in enumerate(rows.tolist()):
                    first = max(pads[row] - seen, 0)
                    hold(found[b, first:], whole(model, every[b : b + 1, pads[row] :])[0, -(15 - first) :], DOUBLE, (b, row))


@pytest.mark.parametrize("name", ["w8s8", "everything"])
def test_left_pads_are_not_held(name: str) -> None:
    """Bytes are those of the live tokens of each row in closed form; and after a reset the next batch may be padded otherwise."""
    model, pads = model_of("qwen3", wide=True), [0, 3, 26, 3, 11]
    ids, mask = tokens(model, 30, batch=5), (torch.arange(30) >= torch.tensor(pads)[:, None]).long()
    shape = cost.shape_of(model)
    with attached(model, VARIANTS[name]), torch.no_grad():
        cache = empty()
        for seen in (20, 25, 30):
            feed(model, ids[:, cache.get_seq_length() : seen], [seen - cache.get_seq_length()], cache, mask)
            assert held_bytes(cache) == sum(cost.bytes_at(VARIANTS[name], shape, seen - pad) for pad in pads if seen > pad)
            assert cache.get_seq_length() == seen
        cache.reset()
        assert held_bytes(cache) == cache.get_seq_length() == 0
        hold(feed(model, ids, [13, 17], cache), whole(model, ids), DOUBLE, "without pads after a reset")
        cache.reset()
        found = feed(model, ids, [13, 17], cache, mask.flip(0))
        hold(found[0, 11:], whole(model, ids[:1, 11:])[0], DOUBLE, "with other pads after a reset")


def test_a_saved_state_is_whole_and_of_this_variant() -> None:
    model = model_of("qwen3", wide=True)
    ids = tokens(model, 30)
    with attached(model, PRESETS["w8s4"]) as on, torch.no_grad():
        wanted, cache = whole(model, ids), empty()
        feed(model, ids[:, :21], [21], cache)
        state = save(cache)
        assert sum(tensor.numel() * tensor.element_size() for name, tensor in state.items() if not name.endswith(("form", "length"))) == held_bytes(cache)
        hold(feed(model, ids[:, 21:], [9], restore(on.layers, load(pack(state)))), wanted[:, 21:], DOUBLE, "through a file")
        with pytest.raises(ConfigError, match=r"^restore: the state must be of 2 layers, got 1$"):
            restore(on.layers, {name: tensor for name, tensor in state.items() if name.startswith("0.")})
        with pytest.raises(ConfigError, match=r"^restore: layer 1\.keys must hold \d+ entries after 21 tokens, got 2$"):
            restore(on.layers, state | {"1.keys": state["1.keys"][:, :, :2]})
        with pytest.raises(ConfigError, match=r"^restore: layer 0\.open_rows must hold \d+ rows, got 0$"):
            restore(on.layers, {name: tensor for name, tensor in state.items() if name != "0.open_rows"})
        with pytest.raises(ConfigError, match=r"^restore: layer 0 must hold form, length"):
            restore(on.layers, state | {"0.more": torch.zeros(1)})
    with attached(model, PRESETS["w8s8"]) as on, pytest.raises(ConfigError, match=r"^restore: layer 0 must have .*\[8, 8, 0, 16\].*got \[8, 4, 0, 16\]$"):
        restore(on.layers, state)
    plain = empty()
    with torch.no_grad():
        feed(model, ids, [30], plain)
    with pytest.raises(ConfigError, match=r"^save: cache layer 0 is a DynamicLayer of an unmodified model"):
        save(plain)


# reports from other projects -----------------------------------------------------------------------------------------------------------------------


def test_a_query_in_an_open_window_does_not_see_its_summary() -> None:
    """vllm-project/tpu-inference#3536: visibility `j <= t // S`; it is `j < (t + 1) // S` for W = S."""
    grid = Grid(window=8, stride=8)
    assert [grid.num_completed(t) for t in range(40)] == [(t + 1) // 8 for t in range(40)]


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "w12s8", "w8s8-bypass-both"])
def test_a_piece_sees_no_future_summary(name: str) -> None:
    """huggingface/transformers#45820, #45758, #45892: forwards of several tokens that see a summary of later ones, or an unfinished one. To the bit."""
    model = model_of("qwen3")
    ids = tokens(model, 45, batch=1)
    with attached(model, PRESETS[name]), torch.no_grad():
        for first in (0, 5, 8):
            cache = empty()
            if first:
                feed(model, ids[:, :first], [first], cache)
            before = feed(model, ids[:, first:], [45 - first], fork(cache))
            for t in range(first, 44):
                changed = ids.clone()
                changed[0, t + 1] = (changed[0, t + 1] + 1) % model.config.vocab_size
                after = feed(model, changed[:, first:], [45 - first], fork(cache))
                assert torch.equal(after[:, : t + 1 - first], before[:, : t + 1 - first]), (first, t)


@pytest.mark.parametrize("name", PRESETS)
def test_pads_are_never_pooled(name: str) -> None:
    """huggingface/transformers#45938: S = 4, mask 1,1,1,0. Pads on either side hold nothing but NaN on the left, where no arithmetic may touch them."""
    model = model_of("qwen3", wide=True)
    period = min(period_of(PRESETS[name]), 16)
    with attached(model, PRESETS[name]), torch.no_grad():
        for live in range(2 * period, 3 * period):
            ids = tokens(model, live + 3, batch=1)
            wanted = whole(model, ids[:, :live])
            right = whole(model, ids, attention_mask=(torch.arange(live + 3) < live).long()[None])
            hold(right[:, :live], wanted, DOUBLE, live)
            embedded = model.get_input_embeddings()(ids[:, :live])
            if not PRESETS[name].compress:
                continue
            padded, mask = torch.cat([torch.full_like(embedded[:, :3], torch.nan), embedded], dim=1), (torch.arange(live + 3) >= 3).long()[None]
            left = model(inputs_embeds=padded, attention_mask=mask, use_cache=False).logits
            hold(left[:, 3:], wanted, DOUBLE, live)
            left = model(inputs_embeds=padded, attention_mask=mask, use_cache=True).logits
            hold(left[:, 3:], wanted, DOUBLE, live)


@pytest.mark.parametrize("name", ["w8s8", "w8s4", "deepseek-csa"])
def test_a_prompt_longer_than_the_micro_batch(name: str) -> None:
    """ggml-org/llama.cpp#26471: 1,811 tokens in pieces of 512. brontoguana/krasis#29: a token of the first piece is still felt at the end."""
    model = model_of("llama")
    ids = tokens(model, 1811, batch=1)
    with attached(model, PRESETS[name]), torch.no_grad():
        wanted = whole(model, ids)
        hold(feed(model, ids, pieces(1811, 512), empty()), wanted, SINGLE, 512)
        ids[0, 5] = (ids[0, 5] + 1) % model.config.vocab_size
        changed = feed(model, ids, pieces(1811, 512), empty())
        hold(changed, whole(model, ids), SINGLE, "another token 5")
        assert not torch.equal(changed[:, -1], wanted[:, -1])


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "w12s8", "w8s8-stagger"])
@pytest.mark.parametrize("shared", [3, 8, 13])
def test_two_prompts_with_a_common_beginning(name: str, shared: int) -> None:
    """ROCm/ATOM#1417, Avarok-Cybersecurity/atlas#401, vllm-project/vllm-ascend#10296: a prefix hit restores all state and nothing crosses, off the grid too."""
    model = model_of("qwen3", wide=True)
    one, other = tokens(model, 40, batch=1), tokens(model, 40, batch=1, seed=1)
    other[:, :shared] = one[:, :shared]
    with attached(model, PRESETS[name]), torch.no_grad():
        prefix = empty()
        feed(model, one[:, :shared], [shared], prefix)
        caches = fork(prefix), fork(prefix), fork(prefix)
        found = [torch.empty(1, 0, model.config.vocab_size, dtype=torch.float64) for _ in caches]
        for piece in [(shared, shared + 1), (shared + 1, shared + 9), (shared + 9, 40)]:  # in turn
            for index, ids in enumerate((one, other, one)):
                step = ids[:, piece[0] : piece[1]]
                found[index] = torch.cat([found[index], feed(model, step, [step.shape[1]], caches[index])], dim=1)
        for logits, ids in zip(found, (one, other, one), strict=True):
            hold(logits, whole(model, ids)[:, shared:], DOUBLE, shared)
        assert prefix.get_seq_length() == shared


@pytest.mark.parametrize("name", ["w8s8", "w8s4", "w8s8-bypass-last"])
def test_every_accepted_prefix_of_drafts_equals_serial_decoding(name: str) -> None:
    """vllm-project/vllm-ascend#9111, GDzhu01/vllm-ascend-deepseekv4#131, #132: verify n drafts, keep some. Taking back is refused; a fork replays."""
    model = model_of("qwen3", wide=True)
    ids = tokens(model, 40, batch=1)
    with attached(model, PRESETS[name]), torch.no_grad():
        wanted = whole(model, ids)
        for start in range(9, 18):
            cache = empty()
            feed(model, ids[:, :start], [start], cache)
            before = fork(cache)
            feed(model, ids[:, start : start + 6], [6], cache)
            with pytest.raises(NotImplementedError, match=r"fork\(cache\) beforehand"):
                cache.crop(-3)
            for accepted in range(7):
                again = fork(before)
                rest = ids[:, start:]
                hold(feed(model, rest, [accepted, rest.shape[1] - accepted], again), wanted[:, start:], DOUBLE, (start, accepted))


def test_a_window_reads_exactly_its_tokens() -> None:
    """lightseekorg/tokenspeed#1612: at W8 S4 the window that ends at p reads p-7 .. p, and the cache holds on to no more rows than that."""
    model = model_of("qwen3", wide=True)
    grid = Grid(window=8, stride=4, origin=-4)
    with attached(model, PRESETS["deepseek-csa"]) as on:
        layer = on.layers[0]
        assert layer.grid == grid
        hidden = torch.randn(1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        keys, _ = layer.summarise_rows(hidden, row0=0, window0=0, count=grid.num_windows(32))
        for j in range(keys.shape[2]):
            (reach,) = torch.autograd.grad(keys[:, :, j].square().sum(), hidden, retain_graph=True)
            end = grid.end(j)
            assert reach[0].abs().sum(1).nonzero().flatten().tolist() == [t for t in range(end - 7, end + 1) if t >= 0]
        cache = empty()
        with torch.no_grad():
            for length, token in enumerate(tokens(model, 40, batch=1).split(1, dim=1), start=1):
                feed(model, token, [1], cache)
                held = cache.layers[0]
                assert isinstance(held, SummaryCacheLayer)
                assert held.open_rows is not None
                assert held.open_rows.shape[1] == length - grid.open_lo(length) <= 7


def test_runs_are_equal_to_the_bit() -> None:
    """A comment in vLLM's compressor: launches that overlap race on its state."""
    model = model_of("qwen3")
    ids = tokens(model, 70)
    with attached(model, PRESETS["w8s8-stagger"]), torch.no_grad():
        first = feed(model, ids, [33, 1, 36], empty())
        for _ in range(20):
            assert torch.equal(feed(model, ids, [33, 1, 36], empty()), first)


def test_gates_stay_in_single_precision_under_autocast() -> None:
    """sgl-project/sglang#27277, #29609: state of the compressor in half precision only where it was asked for."""
    model = model_of("qwen3")
    ids = tokens(model, 40)
    with attached(model, PRESETS["w8s8-vector"]) as on, torch.no_grad():
        on.collect_gates(True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole(model, ids)
            assert on.layers[0].collect is not None
            assert {gates.dtype for gates in on.layers[0].collect[0]} == {torch.float32}
        on.collect_gates(False)
