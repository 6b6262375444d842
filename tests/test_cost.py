"""Throughput from step times: a hiccup does not count, a step that pools does. Memory from what operators return: freed tensors do not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VARIANTS, attached, tiny
from transformers import GPT2Config, GPT2LMHeadModel

from mitigate import cost
from mitigate.config import CostConfig, VariantConfig
from mitigate.rows import Cost


def test_a_hiccup_is_clipped_and_a_slow_step_is_not() -> None:
    seconds = np.ones((5, 8))
    seconds[:, 7] = 4.0  # completes a window in every repeat
    seconds[2, 3] = 100.0  # once
    clean = cost._without_hiccups(seconds)
    assert clean[:, 7] == pytest.approx(4.0)
    assert clean[2, 3] == pytest.approx(3.0)
    assert clean.sum(axis=1)[0] == pytest.approx(11.0)


def test_quartiles() -> None:
    found = cost._quartiles(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (found.low, found.value, found.high) == (2.0, 3.0, 4.0)


def test_alive_bytes_by_hand() -> None:
    weight, held = torch.zeros(1000), torch.zeros(100)
    with cost.AliveBytes([held, held[:10]], [weight]) as alive:
        assert alive.peak == 400, "views share a storage"
        a = held + 1
        assert alive.peak == 800
        b = a.view(10, 10).t()
        assert alive.peak == 800
        del a
        c = b.double()
        assert alive.peak == 400 + 400 + 800
        del b, c
        d = weight[:5] * 2
        assert alive.peak == 1600
        e = torch.zeros(1000)
        assert alive.peak == 400 + 20 + 4000
        del d, e
    torch.zeros(10**6)
    assert alive.peak == 4420


@pytest.mark.parametrize("name", ["w8s8", "full"])
def test_memory_and_prefill_are_measured(name: str) -> None:
    model = tiny(wide=False)
    with attached(model, VARIANTS[name]) as on:
        short, long = (cost.measure(on, CostConfig(context=context, batch=2, steps=8, repeats=2)) for context in (600, 1200))
        again = cost.measure(on, CostConfig(context=600, batch=2, steps=8, repeats=1))
    for found in (short, long):
        assert found.decode_peak_bytes is not None
        assert found.decode_peak_bytes_full is not None
        assert found.prefill_tokens_per_s is not None
        assert found.prefill_tokens_per_s > 0
        assert found.decode_peak_bytes > 2 * found.kv_bytes_counted, "of two sequences"
        entry = 2 * 2 * 2 * 8 * 4  # one token of two layers, key and value, two heads of 8 in fp32
        assert found.decode_peak_bytes_full > 2 * found.context * entry
        if name == "full":
            assert found.decode_peak_bytes == found.decode_peak_bytes_full
        else:
            assert found.decode_peak_bytes < 0.6 * found.decode_peak_bytes_full
    assert short.decode_peak_bytes == again.decode_peak_bytes, "it is counted, not sampled"


def test_rows_from_before_still_load() -> None:
    point = {"value": 1.0, "low": 1.0, "high": 1.0}
    old = dict(kv_bytes_per_token=1.0, kv_kept=1.0, kv_constant_bytes=0.0, context=1, batch=1, kv_bytes_at_context=1, kv_bytes_counted=1)
    old |= {"decode_tokens_per_s": point, "decode_tokens_per_s_full": point, "throughput_ratio": point}
    loaded = Cost.model_validate(old)
    assert loaded.prefill_ratio is None
    assert loaded.decode_peak_bytes is None


def test_a_model_that_names_no_kv_heads_has_as_many_as_query_heads() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0))
    shape = cost.shape_of(model)
    assert (shape.kv_heads, shape.head_dim) == (4, 4)
    assert cost.bytes_at(VariantConfig(compress=False), shape, 10) == 2 * 3 * 16 * 4 * 10, "K and V, layers, width, bytes, tokens"
