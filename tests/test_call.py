"""Padding is exact, and a call that a variant cannot take is refused in one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VARIANTS, attached, pads_before, tiny, tokens, whole
from transformers import DynamicCache, PreTrainedModel, StaticCache

from mitigate.attachable import MARK, UnsupportedModel
from mitigate.attached_layer import NAME
from mitigate.cache import empty
from mitigate.config import VariantConfig
from mitigate.surgery import attach

W8S8 = VariantConfig()


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return tiny("qwen3")


# padding ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "last-stride"])
def test_right_padding_is_exact(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    ids = tokens(qwen3, 40)
    with attached(qwen3, variant), torch.no_grad():
        for live in range(40 - variant.stride, 40):
            mask = torch.ones(2, 40, dtype=torch.int64)
            mask[1, live:] = 0
            padded = whole(qwen3, ids, attention_mask=mask)
            torch.testing.assert_close(padded[:1], whole(qwen3, ids[:1]), atol=1e-12, rtol=0)
            torch.testing.assert_close(padded[1:, :live], whole(qwen3, ids[1:, :live]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["full", "w8s8", "deepseek-csa", "everything", "last-stride", "per-offset-tied", "uniform-stagger"])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_exact(family: str, name: str) -> None:
    """Every row as if alone, whatever its phase against the columns, with position_ids that count tokens or columns; and with right pads besides."""
    model = tiny(family)
    length, pads = 57, [0, 1, 8, 5, 41, 1, 56]
    ids, mask = tokens(model, length, batch=7), pads_before(length, pads)
    mask[3, 50:] = 0
    with attached(model, VARIANTS[name]), torch.no_grad():
        alone = [whole(model, row[None, pad:])[0] for row, pad in zip(ids, pads, strict=True)]
        for position_ids in (None, (mask.cumsum(1) - 1).clamp(min=0), (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
            found = whole(model, ids, attention_mask=mask, position_ids=position_ids)
            assert torch.isfinite(found).all()
            for b, (wanted, pad) in enumerate(zip(alone, pads, strict=True)):
                live = 50 if b == 3 else length
                torch.testing.assert_close(found[b, pad:live], wanted[: live - pad], atol=1e-10, rtol=0)


def test_gradients_flow_through_left_padding(qwen3: PreTrainedModel) -> None:
    length, pads = 60, [3, 0, 17, 3]
    ids, mask = tokens(qwen3, length, batch=4), pads_before(length, pads)
    with attached(qwen3, VARIANTS["everything"]) as on:
        parameters = [*qwen3.parameters(), *on.compressors.parameters()]
        together = (whole(qwen3, ids, attention_mask=mask) * mask[..., None]).square().sum()
        apart = sum(whole(qwen3, row[None, pad:]).square().sum() for row, pad in zip(ids, pads, strict=True))
        for one, other in zip(torch.autograd.grad(together, parameters), torch.autograd.grad(apart, parameters), strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-10)


def test_a_row_of_pads_alone_disturbs_nobody(qwen3: PreTrainedModel) -> None:
    ids, mask = tokens(qwen3, 30, batch=2), pads_before(30, [30, 4])
    with attached(qwen3, W8S8), torch.no_grad():
        found = whole(qwen3, ids, attention_mask=mask)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[1, 4:], whole(qwen3, ids[1:, 4:])[0], atol=1e-10, rtol=0)


def test_rows_of_a_batch_do_not_mix(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 30, batch=3)
    with attached(qwen3, VARIANTS["everything"]), torch.no_grad():
        together = whole(qwen3, ids)
        for b in range(3):
            torch.testing.assert_close(together[b : b + 1], whole(qwen3, ids[b : b + 1]), atol=1e-12, rtol=0)


# refusals --------------------------------------------------------------------------------------------------------------------------------------


def hole(model: PreTrainedModel) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, 4] = 0
    whole(model, tokens(model, 10), attention_mask=mask)


def right_padded_with_cache(model: PreTrainedModel) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, 8:] = 0
    model(input_ids=tokens(model, 10), attention_mask=mask, use_cache=True)


def other_pads_than_the_cache(model: PreTrainedModel) -> None:
    cache = empty()
    model(input_ids=tokens(model, 6), attention_mask=pads_before(6, [2, 0]), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 1), attention_mask=pads_before(7, [3, 0]), cache=cache, use_cache=True)


def mask_of_new_tokens_alone(model: PreTrainedModel) -> None:
    cache = empty()
    model(input_ids=tokens(model, 6), attention_mask=pads_before(6, [2, 0]), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 2), attention_mask=pads_before(2, [0, 0]), cache=cache, use_cache=True)


def readout_of_padded_rows(model: PreTrainedModel) -> None:
    last = model.model.layers[-1].self_attn.__dict__[MARK]
    last.queries = torch.tensor([3])
    try:
        whole(model, tokens(model, 10), attention_mask=pads_before(10, [2, 0]))
    finally:
        last.queries = None


def four_dimensional_mask(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool).tril())


def packed(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]))


def packed_by_lengths(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), cu_seq_lens_q=torch.tensor([0, 6, 10], dtype=torch.int32))


def other_attention_meanwhile(model: PreTrainedModel) -> None:
    model.set_attn_implementation("sdpa")
    try:
        whole(model, tokens(model, 10))
    finally:
        model.set_attn_implementation(NAME)


def flash_attention_meanwhile(model: PreTrainedModel) -> None:
    model.config._attn_implementation_internal = "flash_attention_2"
    try:
        model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32))
    finally:
        model.config._attn_implementation_internal = NAME


def continuous_batching(model: PreTrainedModel) -> None:
    model.config._attn_implementation_internal = "paged|sdpa"
    try:
        model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32))
    finally:
        model.config._attn_implementation_internal = NAME


def paged(model: PreTrainedModel) -> None:
    class PagedCache:
        def get_seq_length(self, *args: Any) -> int:
            return 0

        def get_query_offset(self, *args: Any) -> int:
            return 0

        def get_mask_sizes(self, length: int, index: int) -> tuple[int, int]:
            return length, 0

        is_sliding = (False,)

    model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32), cache=PagedCache())


def beyond_the_positions(model: PreTrainedModel) -> None:
    before, model.config.max_position_embeddings = model.config.max_position_embeddings, 12
    try:
        whole(model, tokens(model, 12))
        whole(model, tokens(model, 15), attention_mask=pads_before(15, [3, 4]))  # pads have no position
        cache = empty()
        model(input_ids=tokens(model, 12), cache=cache, use_cache=True)
        model(input_ids=tokens(model, 1), cache=cache, use_cache=True)
    finally:
        model.config.max_position_embeddings = before


def shifted(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), position_ids=torch.arange(1, 11)[None])


def static(model: PreTrainedModel) -> None:
    model(input_ids=tokens(model, 10), cache=StaticCache(config=model.config, max_cache_len=20), use_cache=True)


def filled(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    twin = tiny(wide=False)
    twin(input_ids=tokens(twin, 4), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 10), cache=cache, use_cache=True)


def attach_twice(model: PreTrainedModel) -> None:
    attach(model, VariantConfig(stride=4))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (hole, "attention_mask has a gap between the tokens of row 0; pads may stand before or after a row's tokens"),
        (right_padded_with_cache, "right padding in a cached call is not supported; pad on the left"),
        (other_pads_than_the_cache, "attention_mask has 3 left pads in row 0, the cache was filled with 2"),
        (mask_of_new_tokens_alone, "attention_mask with padding must be (2, 8), columns of earlier calls included, got (2, 2)"),
        (readout_of_padded_rows, "chosen query positions and collected gates need rows of one length"),
        (four_dimensional_mask, "attention_mask must be None or [batch, tokens], got 4 dimensions"),
        (packed, "packed sequences are not supported (position_ids of row 0 fall at column 6); give each its own row"),
        (packed_by_lengths, "packed sequences are not supported (cu_seq_lens_q is set)"),
        (other_attention_meanwhile, "attn_implementation was set to 'sdpa' while a variant is attached"),
        (flash_attention_meanwhile, "attn_implementation was set to 'flash_attention_2' while a variant is attached"),
        (continuous_batching, "continuous batching (paged|sdpa) keeps paged caches"),
        (paged, "PagedCache has no layers (paged caches cannot carry summaries); use a DynamicCache"),
        (beyond_the_positions, "13 tokens are beyond the model's max_position_embeddings of 12; shorten the context"),
        (shifted, "position_ids must count tokens from 0 without gaps"),
        (static, "cache layer 0 is a StaticLayer; a variant needs a DynamicCache"),
        (filled, "cache layer 0 already holds tokens of the unmodified model"),
        (attach_twice, "layer 0 already carries a variant; detach it first"),
    ],
)
def test_refusals_are_one_clear_line(call: Callable[[PreTrainedModel], None], said: str) -> None:
    model = tiny(wide=False)
    ids = tokens(model, 20)
    with attached(model, W8S8):
        wanted = whole(model, ids)
        with pytest.raises(UnsupportedModel) as caught:
            call(model)
        text = str(caught.value)
        assert said in text
        assert text.startswith("attach: ")
        assert "\n" not in text
        assert torch.equal(whole(model, ids), wanted), "and the variant is still on"


def test_drafts_are_refused_by_generate_itself(qwen3: PreTrainedModel) -> None:
    """Verification takes tokens back, which summaries cannot do: `is_croppable` is False and transformers asks it."""
    ids = tokens(qwen3, 12, batch=1)
    with attached(qwen3, W8S8), pytest.raises(ValueError, match=r"(?i)assisted|crop|cache"):
        qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2, pad_token_id=0)


def test_other_rows_over_a_padded_cache_are_refused() -> None:
    """With a mask of their own, with one of the cache's rows, and without one; the cache goes on as if nothing had come."""
    model = tiny("qwen3")
    ids, mask = tokens(model, 20, batch=3), pads_before(20, [0, 5, 2])
    with attached(model, VARIANTS["w8s8"]), torch.no_grad():
        wanted = whole(model, ids, attention_mask=mask)
        cache = empty()
        model(input_ids=ids[:, :12], attention_mask=mask[:, :12], cache=cache, use_cache=True)
        for other in (torch.ones(2, 20, dtype=torch.int64), mask[:2], mask, None):
            with pytest.raises(UnsupportedModel, match="the cache holds 3 rows, the call has 2; start other rows with an empty cache"):
                model(input_ids=ids[:2, 12:], attention_mask=other, cache=cache, use_cache=True)
        found = model(input_ids=ids[:, 12:], attention_mask=mask, cache=cache, use_cache=True).logits
    torch.testing.assert_close(found, wanted[:, 12:], atol=1e-10, rtol=0)
