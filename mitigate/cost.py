"""What a variant costs: KV bytes in closed form and counted from a real cache, memory while decoding, and throughput beside full attention.

Throughput is measured through the model itself: a cache is filled by chunked prefill, then single tokens are decoded from copies of it. The
unmodified model does the same in the same process, in turn with the variant, so that the ratio is free of what else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mitigate import registry
from mitigate.cache import empty, fork, held_bytes, tensors_of
from mitigate.config import CostConfig, VariantConfig
from mitigate.geometry import Grid
from mitigate.readout import in_eval_mode
from mitigate.rows import Cost, Interval
from mitigate.surgery import Attachment

PREFILL_CHUNK = 512  # tokens
PREFILL_ROUNDS = 3  # at most, after one that warms up and fills the caches that are decoded from


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
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,  # a model without the one has as many as query heads
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden=config.hidden_size,
        element=torch.empty((), dtype=model.dtype).element_size(),
    )


def bytes_per_token(variant: VariantConfig, shape: Shape) -> float:
    """KV bytes per token in the limit of a long context: ``sum_layers (H_kv d_k b_k + H_kv d_v b_v) (1/S + bypass fraction)``."""
    return 2 * shape.entry * shape.layers * registry.kept_fraction(variant, layers=shape.layers)


def bytes_at(variant: VariantConfig, shape: Shape, length: int) -> int:
    """KV bytes of one sequence of `length` tokens, every buffer counted: summaries, exact and bypassed tokens, rows of open windows."""
    if not variant.compress:
        return 2 * shape.entry * shape.layers * length
    held = registry.held_branches(variant)
    total = 0
    for grid in registry.grids(variant, layers=shape.layers):
        first = grid.stored_exact_lo(length, variant.local_window)
        bypassed = _bypassed_before(grid, registry.bypass_phases(variant, grid), first)
        entries = held * grid.num_windows(length) + 2 * (length - first + bypassed)
        total += entries * shape.entry + (length - grid.open_lo(length)) * shape.hidden * shape.element
    return total


def _bypassed_before(grid: Grid, phases: tuple[int, ...], stop: int) -> int:
    """Tokens in [0, stop) with one of the phases."""
    first = [(phase + grid.origin) % grid.stride for phase in phases]
    return sum(max(0, -(-(stop - t) // grid.stride)) for t in first)


@torch.inference_mode()
def measure(attached: Attachment, config: CostConfig, *, seed: int = 0) -> Cost:
    """KV bytes, memory and throughput of an attached variant. The variant is detached while full attention runs and is attached again after.

    Raises:
        RuntimeError: the counted bytes differ from the closed form.
    """
    model, variant = attached.model, attached.variant
    shape = shape_of(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (config.batch, config.context + config.steps), generator=generator).to(model.device)
    prompt_BT, rest_BT = tokens[:, : config.context], tokens[:, config.context :]
    with in_eval_mode(model):
        caches, _ = _prefill_both(attached, prompt_BT)
        counted, expected = held_bytes(caches[0]), bytes_at(variant, shape, config.context) * config.batch
        if counted != expected:
            raise RuntimeError(f"measure: the cache holds {counted} bytes, the closed form says {expected}")
        filling = np.stack([_prefill_both(attached, prompt_BT)[1].sum(axis=1) for _ in range(min(config.repeats, PREFILL_ROUNDS))], axis=1)
        prefilled, prefilled_full = config.batch * config.context / filling
        seconds = np.stack([_step_seconds(attached, caches, rest_BT) for _ in range(config.repeats + 1)], axis=1)
        # The first round warmed up.
        rate, full_rate = (config.batch * config.steps / _without_hiccups(side[1:]).sum(axis=1) for side in seconds)
        peak, full_peak = (_peak_bytes(attached, caches[which], rest_BT, which) for which in (0, 1))
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
        prefill_tokens_per_s=float(np.median(prefilled)),
        prefill_tokens_per_s_full=float(np.median(prefilled_full)),
        prefill_ratio=float(np.median(prefilled / prefilled_full)),
        decode_peak_bytes=peak,
        decode_peak_bytes_full=full_peak,
    )


def prefill(model: Any, tokens_BT: torch.Tensor) -> Any:
    """A cache filled with the tokens, in chunks."""
    cache = empty()
    for chunk in tokens_BT.split(PREFILL_CHUNK, dim=1):
        model.model(input_ids=chunk, cache=cache, use_cache=True)
    return cache


def _side(attached: Attachment, which: int) -> AbstractContextManager[None]:
    """0: the variant. 1: full attention."""
    return attached.removed() if which else nullcontext()


def _clock(device: torch.device) -> float:
    """Seconds, once all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prefill_both(attached: Attachment, tokens_BT: torch.Tensor) -> tuple[tuple[Any, Any], np.ndarray]:
    """Two caches filled with the tokens, taking turns chunk by chunk, and the seconds of each chunk: [variant and full attention, chunks].

    The output head, which a prompt needs at its last token alone, is left out.
    """
    model: Any = attached.model
    chunks = tokens_BT.split(PREFILL_CHUNK, dim=1)
    caches, seconds = (empty(), empty()), np.empty((2, len(chunks)))
    for place, chunk in enumerate(chunks):
        for which in (0, 1) if place % 2 else (1, 0):
            with _side(attached, which):
                start = _clock(model.device)
                model.model(input_ids=chunk, cache=caches[which], use_cache=True)
                seconds[which, place] = _clock(model.device) - start
    return caches, seconds


def _step_seconds(attached: Attachment, filled: tuple[Any, Any], tokens_BT: torch.Tensor) -> np.ndarray:
    """Seconds of each decode step, one token of every sequence a step, from copies of two filled caches: [variant and full attention, steps].

    The two take turns step by step, so that whatever else the machine does falls on both.
    """
    model: Any = attached.model
    caches, seconds = [fork(cache) for cache in filled], np.empty((2, tokens_BT.shape[1]))
    for step, token_B1 in enumerate(tokens_BT.split(1, dim=1)):
        for which in (0, 1) if step % 2 else (1, 0):
            with _side(attached, which):
                start = _clock(model.device)
                model(input_ids=token_B1, cache=caches[which], use_cache=True)
                seconds[which, step] = _clock(model.device) - start
    return seconds


def _peak_bytes(attached: Attachment, cache: Any, tokens_BT: torch.Tensor, which: int) -> int:
    """Most bytes of tensors alive at once while the tokens are decoded from this very cache, the weights left out."""
    model: Any = attached.model
    weights = chain(model.parameters(), model.buffers(), attached.compressors.parameters())
    with _side(attached, which), AliveBytes(tensors_of(cache), weights) as alive:
        for token_B1 in tokens_BT.split(1, dim=1):
            model(input_ids=token_B1, cache=cache, use_cache=True)
    return alive.peak


class AliveBytes(TorchDispatchMode):
    """Counts the storages of tensors that operators return, until they are freed: what is alive between two operators, not scratch within one.

    Args:
        held: tensors that are alive already and count.
        apart: tensors that do not count, weights for instance.

    Attributes:
        peak: most bytes alive at once.
    """

    def __init__(self, held: Iterable[torch.Tensor], apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._apart = {tensor.untyped_storage()._cdata for tensor in apart}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._count(held)

    def _count(self, tensors: Iterable[Any]) -> None:
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            del self._alive[key]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._apart:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(tree_leaves(out))
        return out


def _without_hiccups(seconds_RT: np.ndarray) -> np.ndarray:
    """Step times [repeats, steps], each at most three times its step's median over repeats: a hiccup does not count, a step that pools does."""
    return np.minimum(seconds_RT, 3 * np.median(seconds_RT, axis=0))


def _quartiles(values: np.ndarray) -> Interval:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Interval(value=float(middle), low=float(low), high=float(high))
