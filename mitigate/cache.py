"""The KV cache of a compressed model: summaries, exact tokens, bypassed tokens, the rows of open windows, and nothing else.

Nothing that a layer holds is changed in place, so a fork costs nothing and is how a cache is rolled back: keep `fork(cache)`, and go on from it.

Shapes: B batch, T new tokens, C hidden width, G kv heads, D head dim.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mitigate import registry
from mitigate.attachable import UnsupportedModel
from mitigate.config import ConfigError, VariantConfig, to_dict
from mitigate.geometry import Grid
from mitigate.kernels import ops


class Summariser(Protocol):
    """What a cache layer asks of the attached layer it belongs to."""

    grid: Grid
    local: int
    phases: tuple[int, ...]
    variant: VariantConfig

    @property
    def device(self) -> torch.device:
        """Where this layer's weights are, and its state belongs."""

    def summarise_rows(self, hidden_BTC: torch.Tensor, *, row0: int, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Finished summaries [B, G, count, D]; the value is None where the key serves as the value."""


@dataclass(frozen=True, kw_only=True)
class Banks:
    """What the queries of one call read, bank by bank as it is held: keys and values [B, G, ·, D].

    `first` is the position of the first exact token; bypassed tokens are those before it.
    """

    summary: tuple[torch.Tensor, torch.Tensor]
    bypass: tuple[torch.Tensor, torch.Tensor]
    exact: tuple[torch.Tensor, torch.Tensor]
    first: int

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of [summaries | bypassed | exact], copied side by side."""
        return tuple(torch.cat(banks, dim=2) for banks in zip(self.summary, self.bypass, self.exact, strict=True))  # type: ignore[return-value]


class VariantCacheLayer(CacheLayerMixin):
    """Cache of one layer under a variant. Abstract: rows of one length are a `SummaryCacheLayer`, left-padded ones a `PaddedCacheLayer`."""

    is_sliding = False
    device: torch.device

    def __init__(self, owner: Summariser) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.length = 0  # tokens seen, left pads included
        self._hidden_BTC: torch.Tensor | None = None

    def expect(self, hidden_BTC: torch.Tensor, pads: Sequence[int] | None = None) -> None:
        """Hand over the hidden states of the tokens whose keys and values the next `update` brings, and the left pads of each row where there are any.

        Raises:
            UnsupportedModel: they are of other rows than the cache.
        """
        if self.seen and len(self.seen) != len(hidden_BTC):
            raise UnsupportedModel(f"attach: the cache holds {len(self.seen)} rows, the call has {len(hidden_BTC)}; start other rows with an empty cache")
        self._hidden_BTC = hidden_BTC

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the T tokens of a call; give back keys and values for its queries, see `_grow`. Whatever is raised, the layer is as it was.

        Raises:
            RuntimeError: the attached layer did not hand over the hidden states of the same rows and tokens first.
        """
        hidden_BTC, self._hidden_BTC = self._hidden_BTC, None
        if hidden_BTC is None:
            raise RuntimeError(f"{type(self).__name__}.update: the variant is not attached to the model that uses this cache")
        came = [tuple(hidden_BTC.shape[:2]), *((x.shape[0], x.shape[2]) for x in (key_states, value_states))]
        if not came[0] == came[1] == came[2]:
            raise RuntimeError(f"{type(self).__name__}.update: hidden states, keys and values must be of the same rows and tokens, got {came}")
        grown = self.fork()
        if not grown.is_initialized:
            grown.lazy_initialization(key_states, value_states)
        entries = grown._grow(hidden_BTC, key_states, value_states)
        vars(self).update(vars(grown))
        return entries

    @abstractmethod
    def _grow(self, hidden_BTC: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` on a fork, whose state counts only if nothing is raised."""

    @property
    @abstractmethod
    def seen(self) -> list[int]:
        """Tokens that each row has seen, below 1 for a row that waits; empty before the first call."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held between calls."""

    @abstractmethod
    def fork(self) -> VariantCacheLayer:
        """A layer that goes on from the same state and leaves this one alone; tensors are shared until they are replaced."""

    def _twin(self) -> Self:
        """A shallow copy, made by every `update`; `copy.copy` takes several times as long."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    @abstractmethod
    def save(self) -> dict[str, torch.Tensor]:
        """Copies of all state, numbers included, by name: what `restore` takes. At any length, windows may be open."""

    @abstractmethod
    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor held."""

    @abstractmethod
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.__init__(self.owner)  # type: ignore[misc]

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                f"{type(self).__name__}.crop: summaries cannot be taken back; keep mitigate.cache.fork(cache) beforehand and go on from that"
            )


class SummaryCacheLayer(VariantCacheLayer):
    """Rows that all began together. `update` needs the hidden rows of the same tokens, handed over by `expect` just before."""

    HELD = ("summary_keys", "summary_values", "bypass_keys", "bypass_values", "keys", "values", "open_rows")

    def __init__(self, owner: Summariser) -> None:
        super().__init__(owner)
        self.summary_keys: torch.Tensor | None = None
        self.summary_values: torch.Tensor | None = None
        self.bypass_keys: torch.Tensor | None = None
        self.bypass_values: torch.Tensor | None = None
        self.open_rows: torch.Tensor | None = None
        self._banks: Banks | None = None

    # self.keys and self.values hold the exact tokens from `exact_from` on.

    @property
    def exact_from(self) -> int:
        """Position of the first exact token held."""
        return self.owner.grid.stored_exact_lo(self.length, self.owner.local) if self.length else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, groups, _, dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(batch, groups, 0, dim)
        self.values = value_states.new_empty(batch, groups, 0, value_states.shape[-1])
        self.summary_keys, self.bypass_keys, self.bypass_values = self.keys, self.keys, self.values
        self.is_initialized = True

    @property
    def seen(self) -> list[int]:
        return [] if self.keys is None else [self.length] * len(self.keys)

    def _grow(self, hidden_BTC: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of [summaries | bypassed | exact] entries.

        On devices whose attention is an operator, nothing is joined: the entries are left for `take_banks`, and keys and values come back as they are.
        """
        before, self.length = self.length, self.length + key_states.shape[2]
        self._take_rows(hidden_BTC, before)
        assert self.keys is not None and self.values is not None
        keys, values = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        first = self.owner.grid.stored_exact_lo(before, self.owner.local) if before else 0
        banks = self._all_banks(keys, values, first)
        if ops.operated(keys.device):
            self._banks, entries = banks, (key_states, value_states)
        else:
            entries = banks.joined()
        del banks
        self._drop(keys, values, first)
        return entries

    def _all_banks(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> Banks:
        assert self.summary_keys is not None and self.bypass_keys is not None and self.bypass_values is not None
        summary_values = self.summary_keys if self.summary_values is None else self.summary_values
        return Banks(summary=(self.summary_keys, summary_values), bypass=(self.bypass_keys, self.bypass_values), exact=(keys, values), first=first)

    def take_banks(self) -> Banks | None:
        """What the queries of the last `update` read, once; None where `update` gave it back joined."""
        banks, self._banks = self._banks, None
        return banks

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
        for name in self.HELD:
            tensor = getattr(self, name)
            if tensor is not None:
                yield tensor

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in self.HELD:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def fork(self) -> SummaryCacheLayer:
        return self._twin()

    def save(self) -> dict[str, torch.Tensor]:
        held = {name: getattr(self, name).detach().clone(memory_format=torch.contiguous_format) for name in self.HELD if getattr(self, name) is not None}
        return {"form": _form(self.owner), "length": torch.tensor(self.length), **held}

    @classmethod
    def restored(cls, owner: Summariser, saved: Mapping[str, torch.Tensor], name: str) -> SummaryCacheLayer:
        """The layer that `save` was called on. ConfigError, in which it is called `name`, if it does not belong to this variant or is not whole."""
        unknown = set(saved) - {"form", "length", *cls.HELD}
        if unknown or not {"form", "length"} <= set(saved):
            raise ConfigError(f"restore: {name} must hold form, length and some of {', '.join(cls.HELD)}, got {', '.join(sorted(saved)) or 'nothing'}")
        _check_form(owner, saved["form"], name)
        layer = cls(owner)
        layer.length = _count(saved["length"], f"{name}.length")
        for held in cls.HELD:
            if held in saved:
                setattr(layer, held, saved[held].to(owner.device, copy=True))
        if layer.length:
            layer._check_whole(name)
        elif next(layer.tensors(), None) is not None:
            raise ConfigError(f"restore: {name} must hold nothing after 0 tokens, got {', '.join(sorted(set(saved) & set(cls.HELD)))}")
        return layer

    def _check_whole(self, name: str) -> None:
        for held in self.HELD:
            tensor, dims = getattr(self, held), 3 if held == "open_rows" else 4
            if tensor is not None and tensor.dim() != dims:
                raise ConfigError(f"restore: {name}.{held} must have {dims} dimensions, got {tensor.dim()}")
        grid, first = self.owner.grid, self.exact_from
        windows, bypassed = grid.num_windows(self.length), len(self.bypassed(0, first))
        wanted = {"summary_keys": windows, "bypass_keys": bypassed, "bypass_values": bypassed, "keys": self.length - first, "values": self.length - first}
        if registry.held_branches(self.owner.variant) == 1:
            if self.summary_values is not None:
                raise ConfigError(f"restore: {name} must hold no summary_values, since keys serve as values, got {self.summary_values.shape[2]} entries")
        elif windows or self.summary_values is not None:
            wanted["summary_values"] = windows
        for held, count in wanted.items():
            tensor = getattr(self, held)
            got = 0 if tensor is None else tensor.shape[2]
            if tensor is None or got != count:
                raise ConfigError(f"restore: {name}.{held} must hold {count} entries after {self.length} tokens, got {got}")
        rows = self.length - grid.open_lo(self.length)
        if self.open_rows is None or self.open_rows.shape[1] != rows:
            raise ConfigError(f"restore: {name}.open_rows must hold {rows} rows, got {0 if self.open_rows is None else self.open_rows.shape[1]}")
        assert self.keys is not None and self.values is not None
        self._check_agreement(self.keys, self.values, self.open_rows, name)
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def _check_agreement(self, keys: torch.Tensor, values: torch.Tensor, open_rows: torch.Tensor, name: str) -> None:
        if values.shape[:2] != keys.shape[:2]:
            raise ConfigError(f"restore: {name}.values must have {[*keys.shape[:2]]} rows and kv heads like keys, got {[*values.shape[:2]]}")
        if len(open_rows) != len(keys):
            raise ConfigError(f"restore: {name}.open_rows must be of {len(keys)} rows of the batch like keys, got {len(open_rows)}")
        for like in ("keys", "values"):
            for held in (f"summary_{like}", f"bypass_{like}"):
                tensor, wanted = getattr(self, held), _look(getattr(self, like))
                if tensor is not None and _look(tensor) != wanted:
                    raise ConfigError(f"restore: {name}.{held} must be {wanted} like {like}, got {_look(tensor)}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a batch that have the same number of left pads, and the state of their live tokens."""

    pad: int
    rows: tuple[int, ...]
    layer: SummaryCacheLayer


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What a part's queries of one call read: rows [R] of the batch, the call's columns from `skip` on, keys and values [R, G, M, D] or banks, tokens seen."""

    rows: torch.Tensor
    skip: int
    keys: torch.Tensor
    values: torch.Tensor
    banks: Banks | None
    length: int


class PaddedCacheLayer(VariantCacheLayer):
    """Rows with left pads: those that have equally many share one `SummaryCacheLayer` over their live tokens, so no pad is ever pooled or held.

    `length` counts columns, pads included, since transformers cuts its inputs by it. Rows whose columns were all pads so far wait. Work per call is one
    pass for each different number of pads.
    """

    def __init__(self, owner: Summariser) -> None:
        super().__init__(owner)
        self.pads: tuple[int, ...] = ()  # by row; at least `length` for a row that waits
        self.parts: tuple[Part, ...] = ()
        self._expected: tuple[int, ...] = ()  # the pads of the call under way
        self._entries: list[Entries] = []

    def expect(self, hidden_BTC: torch.Tensor, pads: Sequence[int] | None = None) -> None:
        super().expect(hidden_BTC)
        self._expected = self.pads or (0,) * len(hidden_BTC) if pads is None else tuple(pads)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def seen(self) -> list[int]:
        return [self.length - pad for pad in self.pads]

    def _grow(self, hidden_BTC: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the queries read is left for `take_entries`; keys and values come back as they are."""
        if len(self._expected) != len(hidden_BTC):
            raise RuntimeError(f"PaddedCacheLayer.update: pads must be of {len(hidden_BTC)} rows, got {len(self._expected)}")
        self.pads = self._expected
        before, self.length = self.length, self.length + key_states.shape[2]
        for pad in sorted({pad for pad in self.pads if before <= pad < self.length}):
            rows = tuple(row for row, own in enumerate(self.pads) if own == pad)
            self.parts += (Part(pad=pad, rows=rows, layer=SummaryCacheLayer(self.owner)),)
        self._entries = []
        for part in self.parts:
            rows_R, skip = torch.tensor(part.rows, device=key_states.device), max(part.pad - before, 0)
            part.layer.expect(hidden_BTC[rows_R][:, skip:])
            keys, values = part.layer.update(key_states[rows_R][:, :, skip:], value_states[rows_R][:, :, skip:])
            banks = part.layer.take_banks()
            self._entries.append(Entries(rows=rows_R, skip=skip, keys=keys, values=values, banks=banks, length=part.layer.length))
        return key_states, value_states

    def take_entries(self) -> list[Entries]:
        """What the queries of the last `update` read, once."""
        entries, self._entries = self._entries, []
        return entries

    def tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            yield from part.layer.tensors()

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self.parts:
            part.layer._map(change)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take(torch.arange(len(self.pads))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([row for row in range(len(self.pads)) for _ in range(repeats)])

    def _take(self, sources: Sequence[int]) -> None:
        """Row b becomes what row ``sources[b]`` was."""
        parts = []
        for part in self.parts:
            found = [(row, part.rows.index(source)) for row, source in enumerate(sources) if source in part.rows]
            if found:
                part.layer.batch_select_indices(torch.tensor([place for _, place in found]))
                parts.append(replace(part, rows=tuple(row for row, _ in found)))
        self.pads, self.parts = tuple(self.pads[source] for source in sources), tuple(parts)

    def fork(self) -> PaddedCacheLayer:
        twin = self._twin()
        twin.parts = tuple(replace(part, layer=part.layer.fork()) for part in self.parts)
        return twin

    def save(self) -> dict[str, torch.Tensor]:
        saved = {"pads": torch.tensor(self.pads), "columns": torch.tensor(self.length)}
        return saved | {f"pad{part.pad}.{name}": tensor for part in self.parts for name, tensor in part.layer.save().items()}

    @classmethod
    def restored(cls, owner: Summariser, saved: Mapping[str, torch.Tensor], name: str) -> PaddedCacheLayer:
        """The layer that `save` was called on. ConfigError as for a `SummaryCacheLayer`."""
        if not {"pads", "columns"} <= set(saved) or saved["pads"].dim() != 1:
            raise ConfigError(f"restore: {name} must hold pads by row and columns, got {', '.join(sorted(saved))}")
        layer = cls(owner)
        layer.pads = tuple(_count(pad, f"{name}.pads") for pad in saved["pads"])
        layer.length = _count(saved["columns"], f"{name}.columns")
        began = sorted({pad for pad in layer.pads if pad < layer.length})
        unknown = {key for key in set(saved) - {"pads", "columns"} if key.partition(".")[0] not in {f"pad{pad}" for pad in began}}
        if unknown:
            raise ConfigError(f"restore: {name} must hold pads, columns and rows that began after {began} pads, got {', '.join(sorted(unknown))}")
        for pad in began:
            rows = tuple(row for row, own in enumerate(layer.pads) if own == pad)
            inner = SummaryCacheLayer.restored(owner, _under(saved, f"pad{pad}."), f"{name}.pad{pad}")
            if inner.length != layer.length - pad:
                raise ConfigError(f"restore: {name}.pad{pad} must have seen {layer.length - pad} tokens, got {inner.length}")
            if len(inner.seen) != len(rows):
                raise ConfigError(f"restore: {name}.pad{pad} must be of {len(rows)} rows of the batch, as pads says, got {len(inner.seen)}")
            layer.parts += (Part(pad=pad, rows=rows, layer=inner),)
            layer.dtype, layer.device, layer.is_initialized = inner.dtype, inner.device, True
        layer._check_parts(name)
        return layer

    def _check_parts(self, name: str) -> None:
        looks = [[f"{held} {_look(tensor[:0])}" for held in ("keys", "values") if (tensor := getattr(part.layer, held)) is not None] for part in self.parts]
        for part, look in zip(self.parts, looks, strict=True):
            if look != looks[0]:
                raise ConfigError(f"restore: {name}.pad{part.pad} must have {', '.join(looks[0])} like pad{self.parts[0].pad}, got {', '.join(look)}")


def _windows(owner: Summariser) -> list[int]:
    grid = owner.grid
    return [grid.window, grid.stride, grid.origin, owner.local, *owner.phases]


def _form(owner: Summariser) -> torch.Tensor:
    """What a saved state must have in common with the layer it is restored to, as bytes of JSON: the layer's windows and every field of the variant."""
    text = json.dumps({"windows": _windows(owner), "variant": to_dict(owner.variant)}, sort_keys=True)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _check_form(owner: Summariser, form: torch.Tensor, name: str) -> None:
    try:
        found = json.loads(bytes(form.tolist())) if form.dtype == torch.uint8 and form.dim() == 1 else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("variant"), dict) or "windows" not in found:
        raise ConfigError(f"restore: {name}.form must tell the windows and the variant as save writes them, got {form.numel()} numbers of {form.dtype}")
    windows, variant = _windows(owner), to_dict(owner.variant)
    if found["windows"] != windows:
        raise ConfigError(f"restore: {name} must have [W, S, o, L, bypassed phases] {windows} like the attached variant, got {found['windows']}")
    other = [field for field in sorted({*variant, *found["variant"]}) if variant.get(field) != found["variant"].get(field)]
    if other:
        wanted, got = (", ".join(f"{field} {fields.get(field)}" for field in other) for fields in (variant, found["variant"]))
        raise ConfigError(f"restore: {name} must have {wanted} like the attached variant, got {got}")


def _count(tensor: torch.Tensor, name: str) -> int:
    """A number of things that was saved as a tensor."""
    if tensor.dim() or tensor.dtype != torch.int64 or int(tensor) < 0:
        raise ConfigError(f"restore: {name} must be one whole number, at least 0, got {tensor.tolist()}")
    return int(tensor)


def _look(entries: torch.Tensor) -> str:
    """What entries that are read together have in common."""
    rows, heads, _, dim = entries.shape
    return f"[{rows}, {heads}, ·, {dim}] of {entries.dtype}"


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensors_of(cache: Cache) -> Iterator[torch.Tensor]:
    """Every tensor that a cache holds, every layer and buffer of it."""
    for layer in cache.layers:
        held: Iterable[Any] = layer.tensors() if isinstance(layer, VariantCacheLayer) else (getattr(layer, "keys", None), getattr(layer, "values", None))
        yield from (tensor for tensor in held if tensor is not None)


def held_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds, for the whole batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(cache))


def empty() -> DynamicCache:
    """A cache that nothing was written to yet; attached layers take their places in it on first use."""
    return DynamicCache()


def fork(cache: DynamicCache) -> DynamicCache:
    """A cache that goes on from the same state without touching the original (tensors are shared until they are replaced).

    Kept from before some tokens, it is the cache rolled back to there.
    """
    twin = copy.copy(cache)
    twin.layers = [layer.fork() if isinstance(layer, VariantCacheLayer) else copy.copy(layer) for layer in cache.layers]
    return twin


def save(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """All state of a cache filled under a variant as copies of its tensors, ready for safetensors. Nothing of the model or the tokens is in it.

    Raises:
        ConfigError: a layer was filled by an unmodified model.
    """
    saved: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, VariantCacheLayer):
            raise ConfigError(f"save: cache layer {index} is a {type(layer).__name__} of an unmodified model; only caches of an attached variant can be saved")
        saved |= {f"{index}.{name}": tensor for name, tensor in layer.save().items()}
    return saved


def restore(owners: Sequence[Summariser], saved: Mapping[str, torch.Tensor]) -> DynamicCache:
    """The cache that `save` was called on, each layer's state on that layer's device.

    Args:
        owners: `Attachment.layers` of the same model under the same variant; the variants are compared, the weights cannot be.

    Raises:
        ConfigError: the state is of another variant, of another number of layers, or not whole.
    """
    indices = {name.split(".", 1)[0] for name in saved}
    if indices != {str(index) for index in range(len(owners))}:
        raise ConfigError(f"restore: the state must be of {len(owners)} layers, got {len(indices)}")
    layers: list[VariantCacheLayer] = []
    for index, owner in enumerate(owners):
        state = _under(saved, f"{index}.")
        kind = PaddedCacheLayer if "pads" in state else SummaryCacheLayer
        layers.append(kind.restored(owner, state, f"layer {index}"))
        if layers[index].seen != layers[0].seen:
            raise ConfigError(f"restore: layer {index} must have seen {layers[0].seen} tokens in its rows like layer 0, got {layers[index].seen}")
    cache = empty()
    cache.layers.extend(layers)
    return cache
