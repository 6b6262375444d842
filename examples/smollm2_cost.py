"""What W8/S8 costs on a model of SmolLM2-135M's shape: KV bytes counted in real caches, and decode throughput beside full attention's.

    python examples/smollm2_cost.py results.json

The weights are random: neither bytes nor time depend on them. The caches are filled with random states of 4,096 and of 16,384 tokens, layer by layer, which
spares an hour of prefill; single tokens are then decoded through the whole model from forks of both, in turn step by step, so that whatever else the machine
does falls on both. Rates are medians over rounds, with quartiles.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from mitigate import cost
from mitigate.cache import SummaryCacheLayer, empty, fork, held_bytes
from mitigate.config import VariantConfig, to_dict
from mitigate.rows import installed_versions
from mitigate.surgery import Attachment, attach

VARIANT = VariantConfig(window=8, stride=8)
CONTEXTS = (4096, 16384)  # tokens
STEPS, ROUNDS = 16, 8  # decoded tokens of a round (two windows are pooled in it); rounds, after one that warms up
LARGEST_SHARE = 0.15  # of full attention's bytes, at the shorter context


def model() -> Any:
    """SmolLM2-135M's shape, fp32, random weights."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape).eval()


def filled(attached: Attachment, length: int) -> tuple[DynamicCache, DynamicCache]:
    """Caches of the variant and of full attention after `length` tokens of random states."""
    shape = cost.shape_of(attached.model)
    caches = empty(), empty()
    for index, layer in enumerate(attached.layers):
        hidden_1TC = torch.randn(1, length, shape.hidden)
        key, value = torch.randn(2, 1, shape.kv_heads, length, shape.head_dim).unbind(0)
        caches[1].update(key, value, index)
        caches[0].layers.append(SummaryCacheLayer(layer))
        caches[0].layers[index].expect(hidden_1TC)
        caches[0].layers[index].update(key, value)
    return caches


def seconds(attached: Attachment, caches: tuple[DynamicCache, DynamicCache]) -> np.ndarray:
    """Of each decode step from forks of the caches: [variant and full attention, steps]."""
    forks, spent = [fork(cache) for cache in caches], np.empty((2, STEPS))
    for step in range(STEPS):
        token = torch.tensor([[step + 7]])
        for which in (0, 1) if step % 2 else (1, 0):
            with attached.removed() if which else nullcontext():
                start = time.perf_counter()
                attached.model(input_ids=token, cache=forks[which], use_cache=True)
                spent[which, step] = time.perf_counter() - start
    return spent


def quartiles(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


@torch.inference_mode()
def measure(attached: Attachment, length: int) -> dict[str, Any]:
    """Bytes and rates at one context length."""
    caches = filled(attached, length)
    counted, full = (held_bytes(cache) for cache in caches)
    assert counted == cost.bytes_at(attached.variant, cost.shape_of(attached.model), length), "counted and closed form"
    spent = np.stack([seconds(attached, caches) for _ in range(ROUNDS + 1)])[1:]  # [rounds, which, steps]
    capped = np.minimum(spent, 3 * np.median(spent, axis=0))  # a hiccup does not count, a step that pools does
    rates = STEPS / capped.sum(axis=2)
    return {
        "context": length,
        "kv_bytes_counted": counted,
        "kv_bytes_counted_full": full,
        "kv_share": counted / full,
        "decode_tokens_per_s": quartiles(rates[:, 0]),
        "decode_tokens_per_s_full": quartiles(rates[:, 1]),
        "ratio": quartiles(rates[:, 0] / rates[:, 1]),
    }


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python smollm2_cost.py RESULT.json", file=sys.stderr)
        return 2
    with attach(model(), VARIANT) as attached:
        found = [measure(attached, length) for length in CONTEXTS]
    print(f"{'context':>8} {'KV bytes':>12} {'full':>12} {'share':>7} {'tokens/s':>20} {'full':>20} {'ratio':>20}")
    for one in found:
        numbers = [f"{v['median']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for v in (one["decode_tokens_per_s"], one["decode_tokens_per_s_full"], one["ratio"])]
        bytes_ = f"{one['kv_bytes_counted']:>12,} {one['kv_bytes_counted_full']:>12,} {one['kv_share']:>7.3f}"
        print(f"{one['context']:>8,} {bytes_} {numbers[0]:>20} {numbers[1]:>20} {numbers[2]:>20}")
    setting = {"variant": to_dict(VARIANT), "steps": STEPS, "rounds": ROUNDS, "threads": torch.get_num_threads(), "versions": installed_versions()}
    Path(sys.argv[1]).write_text(json.dumps({"setting": setting, "contexts": found}, indent=1, sort_keys=True) + "\n")
    if found[0]["kv_share"] > LARGEST_SHARE:
        print(f"the cache holds {found[0]['kv_share']:.3f} of full attention's bytes, more than {LARGEST_SHARE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
