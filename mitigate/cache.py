"""The KV cache of a compressed model: summaries, exact tokens, bypassed tokens, the rows of open windows, and nothing else.

Shapes: B batch, T new tokens, C hidden width, G kv heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mitigate.geometry import Grid


class Summariser(Protocol):
    """What a cache layer asks of the attached layer it belongs to."""

    grid: Grid
    local: int
    phases: tuple[int, ...]

    def summarise_rows(self, hidden_BTC: torch.Tensor, *, row0: int, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Finished summaries [B, G, count, D]; the value is None where the key serves as the value."""


class SummaryCacheLayer(CacheLayerMixin):
    """Cache of one layer. `update` needs the hidden rows of the same tokens, handed over by `expect` just before."""

    is_sliding = False

    def __init__(self, owner: Summariser) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.length = 0  # logical tokens seen
        self.summary_keys: torch.Tensor | None = None
        self.summary_values: torch.Tensor | None = None
        self.bypass_keys: torch.Tensor | None = None
        self.bypass_values: torch.Tensor | None = None
        self.open_rows: torch.Tensor | None = None
        self._hidden_BTC: torch.Tensor | None = None

    # self.keys and self.values hold the exact tokens from `exact_from` on.

    @property
    def exact_from(self) -> int:
        """Position of the first exact token held."""
        return self.owner.grid.stored_exact_lo(self.length, self.owner.local) if self.length else 0

    def expect(self, hidden_BTC: torch.Tensor) -> None:
        """Hand over the hidden states of the tokens whose keys and values the next `update` brings."""
        self._hidden_BTC = hidden_BTC

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, groups, _, dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(batch, groups, 0, dim)
        self.values = value_states.new_empty(batch, groups, 0, value_states.shape[-1])
        self.summary_keys, self.bypass_keys, self.bypass_values = self.keys, self.keys, self.values
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in T tokens; give back keys and values of [summaries | bypassed | exact] entries for this call's queries.

        Raises:
            RuntimeError: the attached layer did not hand over the hidden states first.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        hidden_BTC, self._hidden_BTC = self._hidden_BTC, None
        if hidden_BTC is None:
            raise RuntimeError("SummaryCacheLayer.update: the variant is not attached to the model that uses this cache")
        before, self.length = self.length, self.length + key_states.shape[2]
        self._take_rows(hidden_BTC, before)
        assert self.keys is not None and self.values is not None
        keys, values = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        entries = self._entries(keys, values)
        self._drop(keys, values, self.owner.grid.stored_exact_lo(before, self.owner.local) if before else 0)
        return entries

    def _entries(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.summary_keys is not None and self.bypass_keys is not None and self.bypass_values is not None
        summary_values = self.summary_keys if self.summary_values is None else self.summary_values
        return (
            torch.cat([self.summary_keys, self.bypass_keys, keys], dim=2),
            torch.cat([summary_values, self.bypass_values, values], dim=2),
        )

    def _take_rows(self, hidden_BTC: torch.Tensor, before: int) -> None:
        """Append hidden rows, summarise the windows that they complete, keep the rows that open windows still need."""
        grid = self.owner.grid
        row0 = grid.open_lo(before) if before else 0
        rows = hidden_BTC if self.open_rows is None else torch.cat([self.open_rows, hidden_BTC], dim=1)
        had, have = grid.num_windows(before), grid.num_windows(self.length)
        if have > had:
            key, value = self.owner.summarise_rows(rows, row0=row0, window0=had, count=have - had)
            assert self.summary_keys is not None
            self.summary_keys = torch.cat([self.summary_keys, key], dim=2)
            if value is not None:
                self.summary_values = value if self.summary_values is None else torch.cat([self.summary_values, value], dim=2)
        # A copy, so that what is dropped is freed.
        self.open_rows = rows[:, grid.open_lo(self.length) - row0 :].clone()

    def _drop(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Keep the exact tokens that a later query needs; move bypassed ones among the others to their bank."""
        cut = self.exact_from - first
        leaving = self.bypassed(first, first + cut)
        if leaving:
            assert self.bypass_keys is not None and self.bypass_values is not None
            index = torch.tensor(leaving, device=keys.device) - first
            self.bypass_keys = torch.cat([self.bypass_keys, keys.index_select(2, index)], dim=2)
            self.bypass_values = torch.cat([self.bypass_values, values.index_select(2, index)], dim=2)
        self.keys, self.values = keys[:, :, cut:].clone(), values[:, :, cut:].clone()

    def bypassed(self, start: int, stop: int) -> list[int]:
        """Positions in [start, stop) whose exact KV is kept for good."""
        if not self.owner.phases:
            return []
        return [t for t in range(start, stop) if self.owner.grid.phase(t) in self.owner.phases]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held between calls."""
        for tensor in (self.summary_keys, self.summary_values, self.bypass_keys, self.bypass_values, self.keys, self.values, self.open_rows):
            if tensor is not None:
                yield tensor

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.__init__(self.owner)  # type: ignore[misc]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in ("summary_keys", "summary_values", "bypass_keys", "bypass_values", "keys", "values", "open_rows"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x[indices])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError("SummaryCacheLayer.crop: summaries cannot be taken back; start from a copy of the cache")


def held_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds, every layer and buffer counted, for the whole batch."""
    total = 0
    for layer in cache.layers:
        held = layer.tensors() if isinstance(layer, SummaryCacheLayer) else (getattr(layer, "keys", None), getattr(layer, "values", None))
        total += sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)
    return total


def empty() -> DynamicCache:
    """A cache that nothing was written to yet; attached layers take their places in it on first use."""
    return DynamicCache()


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache that goes on from the same state without touching the original (tensors are shared until they are replaced)."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
