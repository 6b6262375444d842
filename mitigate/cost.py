"""What a variant costs: KV bytes in closed form and counted from a real cache, and decode throughput beside full attention.

Throughput is measured through the model itself: a cache is filled by chunked prefill, then single tokens are decoded from copies of it. The
unmodified model does the same in the same process, in turn with the variant, so that the ratio is free of what else the machine does.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mitigate import registry
from mitigate.cache import empty, fork, held_bytes
from mitigate.config import CostConfig, VariantConfig
from mitigate.geometry import Grid
from mitigate.rows import Cost, Interval
from mitigate.surgery import Attachment

PREFILL_CHUNK = 512  # tokens


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the KV bytes of a model depend on: layers, KV heads, head dim, hidden width, bytes per element."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    element: int

    @property
    def entry(self) -> int:
        """Bytes of one layer's key, or value, of one token."""
        return self.kv_heads * self.head_dim * self.element


def shape_of(model: Any) -> Shape:
    """Read a model's shape from its config."""
    config = model.config
    return Shape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden=config.hidden_size,
        element=torch.empty((), dtype=model.dtype).element_size(),
    )


def bytes_per_token(variant: VariantConfig, shape: Shape) -> float:
    """KV bytes per token in the limit of a long context: ``sum_layers (H_kv d_k b_k + H_kv d_v b_v) (1/S + bypass fraction)``."""
    return 2 * shape.entry * shape.layers * registry.kept_fraction(variant)


def bytes_at(variant: VariantConfig, shape: Shape, length: int) -> int:
    """KV bytes of one sequence of `length` tokens, every buffer counted: summaries, exact and bypassed tokens, rows of open windows."""
    if not variant.compress:
        return 2 * shape.entry * shape.layers * length
    held = registry.held_branches(variant)
    phases = registry.bypass_phases(variant)
    total = 0
    for grid in registry.grids(variant, layers=shape.layers):
        first = grid.stored_exact_lo(length, variant.local_window)
        entries = held * grid.num_windows(length) + 2 * (length - first + _bypassed_before(grid, phases, first))
        total += entries * shape.entry + (length - grid.open_lo(length)) * shape.hidden * shape.element
    return total


def _bypassed_before(grid: Grid, phases: tuple[int, ...], stop: int) -> int:
    """Tokens in [0, stop) with one of the phases."""
    first = [(phase + grid.origin) % grid.stride for phase in phases]
    return sum(max(0, -(-(stop - t) // grid.stride)) for t in first)


@torch.inference_mode()
def measure(attached: Attachment, config: CostConfig, *, seed: int = 0) -> Cost:
    """KV bytes and decode throughput of an attached variant. The variant is detached while full attention runs and is attached again after.

    Raises:
        RuntimeError: the counted bytes differ from the closed form.
    """
    model, variant = attached.model, attached.variant
    shape = shape_of(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (config.batch, config.context + config.steps), generator=generator)
    mine = prefill(model, tokens[:, : config.context])
    counted, expected = held_bytes(mine), bytes_at(variant, shape, config.context) * config.batch
    if counted != expected:
        raise RuntimeError(f"measure: the cache holds {counted} bytes, the closed form says {expected}")
    with attached.removed():
        full = prefill(model, tokens[:, : config.context])
    seconds = np.stack([_step_seconds(attached, mine, full, tokens[:, config.context :]) for _ in range(config.repeats + 1)], axis=1)
    # The first round warmed up.
    rate, full_rate = (config.batch * config.steps / _without_hiccups(side[1:]).sum(axis=1) for side in seconds)
    per_token = bytes_per_token(variant, shape)
    return Cost(
        kv_bytes_per_token=per_token,
        kv_kept=per_token / bytes_per_token(VariantConfig(compress=False), shape),
        kv_constant_bytes=expected / config.batch - per_token * config.context,
        context=config.context,
        batch=config.batch,
        kv_bytes_at_context=expected // config.batch,
        kv_bytes_counted=counted // config.batch,
        decode_tokens_per_s=_quartiles(rate),
        decode_tokens_per_s_full=_quartiles(full_rate),
        throughput_ratio=_quartiles(rate / full_rate),
    )


def prefill(model: Any, tokens_BT: torch.Tensor) -> Any:
    """A cache filled with the tokens, in chunks."""
    cache = empty()
    for chunk in tokens_BT.split(PREFILL_CHUNK, dim=1):
        model.model(input_ids=chunk, cache=cache, use_cache=True)
    return cache


def _step_seconds(attached: Attachment, mine: Any, full: Any, tokens_BT: torch.Tensor) -> np.ndarray:
    """Seconds of each decode step, one token of every sequence a step, from copies of two filled caches: [variant and full attention, steps].

    The two take turns step by step, so that whatever else the machine does falls on both.
    """
    caches, seconds = (fork(mine), fork(full)), np.empty((2, tokens_BT.shape[1]))
    for step, token_B1 in enumerate(tokens_BT.split(1, dim=1)):
        for which in (0, 1) if step % 2 else (1, 0):
            with attached.removed() if which else nullcontext():
                start = time.perf_counter()
                attached.model(input_ids=token_B1, cache=caches[which], use_cache=True)
                seconds[which, step] = time.perf_counter() - start
    return seconds


def _without_hiccups(seconds_RT: np.ndarray) -> np.ndarray:
    """Step times [repeats, steps], each at most three times its step's median over repeats: a hiccup does not count, a step that pools does."""
    return np.minimum(seconds_RT, 3 * np.median(seconds_RT, axis=0))


def _quartiles(values: np.ndarray) -> Interval:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Interval(value=float(middle), low=float(low), high=float(high))
