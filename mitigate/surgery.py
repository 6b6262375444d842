"""Attach a variant to an unmodified transformers model, and undo it without a trace; or convert the model for good.

The layer's own projections, norms and rotary module are used as they stand; only what the attention reads is replaced:
``[summaries | exact tokens]`` in one joint softmax. Shapes: B batch, T tokens, N summaries, C hidden width, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mitigate import registry
from mitigate.cache import Banks, PaddedCacheLayer, SummaryCacheLayer, VariantCacheLayer
from mitigate.compressor import Compressor, Pooled, phase_profile
from mitigate.config import ConfigError, VariantConfig, canonical_json, from_dict
from mitigate.files import write_atomic
from mitigate.geometry import Grid
from mitigate.kernels import blocked, ops, reference

NAME = "mitigate"  # key in transformers' attention and mask registries
BLOCKED_FROM = 48  # tokens from which the blocked path beats one dense masked call (forward and backward, CPU: level at 40, 1.2x at 64, 1.7x at 128)
CONVERTED_FILE = "converted.safetensors"  # no name that transformers looks for, so that a plain reload fails and never runs full attention
_FORMAT = "mitigate-converted-1"
_COMPRESSORS = "mitigate_compressors"  # submodule of a converted model
_MARK = "_mitigate_layer"


class UnsupportedModel(ConfigError):
    """The model, or the way it is called, cannot carry a variant; the message says why and what to do instead."""


def spread(x_BAF: torch.Tensor, positions_A: torch.Tensor, length: int) -> torch.Tensor:
    """Rows back at their positions among `length`, zeros elsewhere: [B, A, ...] -> [B, T, ...]."""
    full = x_BAF.new_zeros(x_BAF.shape[0], length, *x_BAF.shape[2:])
    return full.index_copy(1, positions_A.to(full.device), x_BAF)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the live tokens of a call stand.

    Attributes:
        pads: left pads of each row in columns of the whole sequence; None where no row has any.
        right: whether a row of the mask ends in pads.
        positions_BT: logical positions of the call's columns where its position_ids count pads, so that RoPE must be made again; else None.
    """

    pads: tuple[int, ...] | None = None
    right: bool = False
    positions_BT: torch.Tensor | None = None


class Call:
    """The layout of the forward under way. Every layer of it gets the same mask and position_ids, so it is read off them once."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._layout = Layout()

    def layout(self, mask: torch.Tensor | None, position_ids: torch.Tensor | None, past: int, shape: tuple[int, int], known: tuple[int, ...] | None) -> Layout:
        """Layout of a call of `shape` (rows, columns) after `past` columns; `known` are the pads of a cache that holds some.

        Raises:
            UnsupportedModel: the tokens of a row do not follow each other, or not what the cache holds.
        """
        key = (mask, position_ids, past, shape, known)
        if len(self._key) != len(key) or any(a is not b for a, b in zip(key[:2], self._key[:2], strict=True)) or key[2:] != self._key[2:]:
            pads = _left_pads(mask, past, shape, known)
            positions_BT = _logical_positions(position_ids, mask, past, shape[1], pads)
            self._key, self._layout = key, Layout(pads=pads, right=_right_padded(mask), positions_BT=positions_BT)
        return self._layout

    def forget(self) -> None:
        """The next layer is the first of a forward, or of its recomputation."""
        self._key = ()


def _left_pads(mask: torch.Tensor | None, past: int, shape: tuple[int, int], known: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if mask is None:
        return known
    if mask.dim() != 2:
        raise UnsupportedModel(f"attach: attention_mask must be None or [batch, tokens], got {mask.dim()} dimensions")
    live = mask.bool()
    if bool(live.all()) and known is None:
        return None
    if live.shape != (shape[0], past + shape[1]):
        wanted = (shape[0], past + shape[1])
        raise UnsupportedModel(f"attach: attention_mask with padding must be {wanted}, columns of earlier calls included, got {tuple(live.shape)}")
    starts = (live[:, 1:] & ~live[:, :-1]).sum(dim=1) + live[:, 0]
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise UnsupportedModel(f"attach: attention_mask has a gap between the tokens of row {row}; pads may stand before or after a row's tokens")
    pads = tuple((live.cumsum(dim=1) == 0).sum(dim=1).tolist())
    held = known or (0,) * len(pads)
    for row, (pad, before) in enumerate(zip(pads, held, strict=True) if past else ()):
        if pad != before and min(pad, before) < past:
            raise UnsupportedModel(f"attach: attention_mask has {pad} left pads in row {row}, the cache was filled with {before}")
    return pads if any(pads) or known is not None else None


def _right_padded(mask: torch.Tensor | None) -> bool:
    """Whether a row ends in pads after tokens."""
    return mask is not None and bool((~mask[:, -1].bool() & mask.bool().any(dim=1)).any())


def _logical_positions(
    position_ids: torch.Tensor | None, mask: torch.Tensor | None, past: int, length: int, pads: tuple[int, ...] | None
) -> torch.Tensor | None:
    """What RoPE should have had, or None where position_ids give it already: they count a row's tokens, or (without pads the same) its columns.

    What stands at pads is nobody's position.
    """
    column_T = torch.arange(past, past + length, device=None if position_ids is None else position_ids.device)
    logical_BT = column_T[None] if pads is None else column_T - torch.tensor(pads, device=column_T.device)[:, None]
    dead_BT = logical_BT < 0
    if mask is not None and mask.shape[1] == past + length:
        dead_BT = dead_BT | ~mask[:, past:].bool().to(dead_BT.device)
    if position_ids is not None and bool(((position_ids == logical_BT) | dead_BT).all()):
        return None
    if position_ids is None or bool(((position_ids == column_T) | dead_BT).all()):
        return None if pads is None else logical_BT.clamp(min=0)
    falls = (position_ids[:, 1:] < position_ids[:, :-1]).nonzero()
    if len(falls) and pads is None:
        row, column = falls[0].tolist()
        raise UnsupportedModel(f"attach: packed sequences are not supported (position_ids of row {row} fall at column {column + 1}); give each its own row")
    raise UnsupportedModel(f"attach: position_ids must count tokens from {past} without gaps, pads left out")


class AttachedLayer:
    """What one attention module needs while a variant is attached."""

    def __init__(self, module: Any, rotary: nn.Module, compressor: Compressor, variant: VariantConfig, phases: tuple[int, ...], call: Call) -> None:
        self.module, self.rotary, self.compressor, self.call = module, rotary, compressor, call
        self.grid: Grid = compressor.grid
        self.local = variant.local_window
        self.phases = phases
        self.rope_position = variant.rope_position
        norm = getattr(module, "k_norm", None)
        self._normalise_tokens = norm if variant.key_norm == "tokens" else None
        self._normalise_pooled = norm if variant.key_norm == "pooled" else None
        self.collect: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.queries: torch.Tensor | None = None  # positions whose output is wanted in an uncached forward; None for all
        self._hidden: torch.Tensor | None = None
        self._key: torch.Tensor | None = None
        self._cache: VariantCacheLayer | None = None
        self._pads: tuple[int, ...] | None = None
        self._kept: dict[Any, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are; its compressor and its state stay with them."""
        return self.module.k_proj.weight.device

    # -- summaries ------------------------------------------------------------------------------------------------------------------------------

    def _finish(self, pooled: Pooled, window0: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Key norm, then RoPE at the summary's position: [B, G, N, D]."""
        key_BNGD = pooled.key
        if self._normalise_pooled is not None:
            key_BNGD = self._normalise_pooled(key_BNGD)
        if getattr(self.module, "use_rope", True):
            cos, sin = self._rotation(key_BNGD, window0, key_BNGD.shape[1])
            rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
            key_BNGD = rotate(key_BNGD[:0], key_BNGD, cos, sin, unsqueeze_dim=2)[1]
        return key_BNGD.transpose(1, 2), None if pooled.value is None else pooled.value.transpose(1, 2)

    def _rotation(self, like: torch.Tensor, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = {"last_stride": self.grid.window - self.grid.stride, "window_start": 0, "window_end": self.grid.window - 1}[self.rope_position]
        first = self.grid.origin + window0 * self.grid.stride + shift
        # A position before token 0 does not exist; the first token stands for it.
        position_1N = (first + self.grid.stride * torch.arange(count, device=like.device)).clamp(min=0)[None]
        cos, sin = self.rotary(like, position_1N)
        return cos, sin

    def summarise_rows(self, hidden_BTC: torch.Tensor, *, row0: int, window0: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summaries of windows from hidden rows alone, projecting them here: the cached path."""
        projected = self.module.k_proj(hidden_BTC), self.module.v_proj(hidden_BTC)
        pooled = self.compressor(hidden_BTC, *projected, row0=row0, window0=window0, count=count, normalise=self._normalise_tokens)
        self._key = None  # k_proj's hook fired for the rows
        return self._finish(pooled, window0)

    # -- hooks ----------------------------------------------------------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of the attention module: stash the hidden states, or hand them to this layer's cache. RoPE is made again where pads were counted."""
        self._hidden = self._key = self._cache = self._pads = None
        hidden_BTC = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._check_call(kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        layer = self._take_over(cache) if cache is not None else None
        past = layer.length if layer is not None else 0
        known = layer.pads if isinstance(layer, PaddedCacheLayer) and past else None
        if self.module.layer_idx == 0:
            self.call.forget()
        layout = self.call.layout(kwargs.get("attention_mask"), kwargs.get("position_ids"), past, (hidden_BTC.shape[0], hidden_BTC.shape[1]), known)
        self._check_length(past + hidden_BTC.shape[1] - min(layout.pads or (0,)))
        if layout.pads is not None and (self.queries is not None or self.collect is not None):
            raise UnsupportedModel("attach: chosen query positions and collected gates need rows of one length; run them without left padding")
        if layer is not None:
            if layout.right:
                raise UnsupportedModel("attach: right padding in a cached call is not supported; pad on the left, or run rows of one length together")
            if cache is not None and layout.pads is not None and not isinstance(layer, PaddedCacheLayer):
                layer = cache.layers[int(self.module.layer_idx)] = PaddedCacheLayer(self)
            layer.expect(hidden_BTC, layout.pads)
        self._hidden, self._cache, self._pads = hidden_BTC, layer, layout.pads
        if layout.positions_BT is None:
            return None
        return args, kwargs | {"position_embeddings": self.rotary(hidden_BTC, layout.positions_BT.to(hidden_BTC.device))}

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        chosen = self.module.config._attn_implementation
        if chosen.startswith("paged"):
            raise UnsupportedModel(f"attach: continuous batching ({chosen}) keeps paged caches, which cannot carry summaries; use generate on a batch")
        if chosen != NAME:
            raise UnsupportedModel(f"attach: attn_implementation was set to {chosen!r} while a variant is attached, which would run without it; detach first")
        if kwargs.get("cu_seq_lens_q") is not None:
            raise UnsupportedModel("attach: packed sequences are not supported (cu_seq_lens_q is set); give each its own row")

    def _check_length(self, tokens: int) -> None:
        limit = getattr(self.module.config, "max_position_embeddings", None)
        if limit is not None and tokens > limit:
            raise UnsupportedModel(
                f"attach: {tokens} tokens are beyond the model's max_position_embeddings of {limit}; shorten the context, or raise that field of its config"
            )

    def after_key(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Hook of k_proj: its output is the key before norm and RoPE."""
        self._key = output

    def _take_over(self, cache: Any) -> VariantCacheLayer:
        index = int(self.module.layer_idx)
        if not hasattr(cache, "layers"):
            raise UnsupportedModel(f"attach: {type(cache).__name__} has no layers (paged caches cannot carry summaries); use a DynamicCache")
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if isinstance(layer, VariantCacheLayer):
            if layer.owner is not self:
                raise UnsupportedModel("attach: this cache was filled under another variant; start with an empty one")
            return layer
        if type(layer) is not DynamicLayer:
            raise UnsupportedModel(f"attach: cache layer {index} is a {type(layer).__name__}; a variant needs a DynamicCache")
        if layer.is_initialized:
            raise UnsupportedModel(f"attach: cache layer {index} already holds tokens of the unmodified model; start with an empty cache")
        cache.layers[index] = SummaryCacheLayer(self)
        return cache.layers[index]

    # -- attention ------------------------------------------------------------------------------------------------------------------------------

    def attention(self, q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend over [summaries | exact tokens]; returns [B, T, H, D], zeros at left pads. Clears the stash whatever happens."""
        hidden, key, cache, pads = self._hidden, self._key, self._cache, self._pads
        self._hidden = self._key = self._cache = self._pads = None
        if cache is None:
            if pads is None:
                return self._whole_sequence(hidden, key, q_BHTD, k_BGMD, v_BGMD, scale)
            return self._padded_sequence(hidden, key, (q_BHTD, k_BGMD, v_BGMD), pads, scale)
        if isinstance(cache, SummaryCacheLayer):
            return self._continued(q_BHTD, k_BGMD, v_BGMD, cache.take_banks(), cache.length, scale)
        assert isinstance(cache, PaddedCacheLayer)
        parts = [
            (e.rows, e.skip, self._continued(q_BHTD[e.rows][:, :, e.skip :], e.keys, e.values, e.banks, e.length, scale))  # of rows that began
            for e in cache.take_entries()
        ]
        return _joined(parts, q_BHTD)

    def _continued(self, q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, banks: Banks | None, seen: int, scale: float) -> torch.Tensor:
        """The last T of `seen` tokens over what a cache layer gave: [B, T, H, D]."""
        length = q_BHTD.shape[2]
        if banks is not None:
            return self._over_banks(q_BHTD, banks, seen, scale)
        # One query sees all that is held: summaries up to it, its exact interval, the bypassed tokens.
        mask = None if length == 1 else self._mask(seen - length, length, q_BHTD.shape[1] // k_BGMD.shape[1], q_BHTD)
        return blocked.attend(q_BHTD, k_BGMD, v_BGMD, mask, scale).transpose(1, 2)

    def _over_banks(self, q_BHTD: torch.Tensor, banks: Banks, seen: int, scale: float) -> torch.Tensor:
        """`_continued` by operators: one token by `decode`, several by `attend`."""
        grid = self.grid
        options: dict[str, Any] = {"window": grid.window, "stride": grid.stride, "origin": grid.origin, "local": self.local, "scale": scale}
        q_BTHD = q_BHTD.transpose(1, 2)
        (ks, vs), (kb, vb), (k, v) = (tuple(x.transpose(1, 2) for x in pair) for pair in (banks.summary, banks.bypass, banks.exact))
        if q_BTHD.shape[1] == 1:
            return ops.decode(q_BTHD[:, 0], ks, vs, k, v, **options, position=seen - 1, kb_BPGD=kb, vb_BPGV=vb)[:, None]
        # The bank also takes the bypassed tokens that are still exact: a later query of this call may be past their interval.
        positions = torch.arange(seen, device=k.device)
        positions = positions[reference.is_bypassed(positions, stride=grid.stride, origin=grid.origin, phases=self.phases)]
        late = positions[kb.shape[1] :] - banks.first
        bank: dict[str, Any] = {"kb_BPGD": torch.cat([kb, k[:, late]], dim=1), "vb_BPGV": torch.cat([vb, v[:, late]], dim=1), "pos_b": positions}
        return ops.attend(q_BTHD, ks, vs, k, v, **options, **bank, k_start=banks.first)[0]

    def _padded_sequence(self, hidden: Any, key: Any, qkv: tuple[torch.Tensor, ...], pads: tuple[int, ...], scale: float) -> torch.Tensor:
        """Rows with equally many left pads together, over their live columns alone."""
        if hidden is None or key is None:
            raise UnsupportedModel("attach: the attention ran without its hidden states; call the model, not the attention function")
        parts = []
        for pad in sorted({pad for pad in pads if pad < hidden.shape[1]}):
            rows = torch.tensor([row for row, own in enumerate(pads) if own == pad], device=hidden.device)
            q_RHTD, k_RGTD, v_RGTD = (x[rows][:, :, pad:] for x in qkv)
            parts.append((rows, pad, self._whole_sequence(hidden[rows][:, pad:], key[rows][:, pad:], q_RHTD, k_RGTD, v_RGTD, scale)))
        return _joined(parts, qkv[0])

    def _whole_sequence(self, hidden: Any, key: Any, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, scale: float) -> torch.Tensor:
        ks_BGND, vs_BGND = self._summaries(hidden, key, k_BGTD, v_BGTD)
        if ops.operated(q_BHTD.device):
            return self._by_operator([x.transpose(1, 2) for x in (q_BHTD, ks_BGND, vs_BGND, k_BGTD, v_BGTD)], scale)
        length, repeat = q_BHTD.shape[2], q_BHTD.shape[1] // k_BGTD.shape[1]
        in_order = self.queries is None or bool((self.queries[1:] >= self.queries[:-1]).all())
        if length >= BLOCKED_FROM and in_order:
            plan = self._plan(length, repeat, q_BHTD)
            q_BHAD = q_BHTD if self.queries is None else q_BHTD[:, :, self.queries]
            out_BHAD = blocked.attend_blocked(q_BHAD, ks_BGND, vs_BGND, k_BGTD, v_BGTD, plan, scale)
        else:
            k_BGMD, v_BGMD = torch.cat([ks_BGND, k_BGTD], dim=2), torch.cat([vs_BGND, v_BGTD], dim=2)
            mask = self._mask(0, length, repeat, q_BHTD)
            if self.queries is None:
                q_BHAD = q_BHTD
            else:
                q_BHAD = q_BHTD[:, :, self.queries]
                mask = mask.unflatten(0, (repeat, length))[:, self.queries].flatten(0, 1)
            out_BHAD = blocked.attend(q_BHAD, k_BGMD, v_BGMD, mask, scale)
        out_BAHD = out_BHAD.transpose(1, 2)
        return out_BAHD if self.queries is None else spread(out_BAHD, self.queries, length)

    def _by_operator(self, parts: list[torch.Tensor], scale: float) -> torch.Tensor:
        """Queries from the first one asked for on; [B, T, H, D] with zeros where nobody asked."""
        q_BTHD, ks_BNGD, vs_BNGD, k_BTGD, v_BTGD = parts
        grid, length = self.grid, k_BTGD.shape[1]
        first = 0 if self.queries is None else int(self.queries.min())
        position = torch.arange(length, device=k_BTGD.device)
        position = position[reference.is_bypassed(position, stride=grid.stride, origin=grid.origin, phases=self.phases)]
        out_BAHD, _ = ops.attend(
            q_BTHD[:, first:],
            ks_BNGD,
            vs_BNGD,
            k_BTGD,
            v_BTGD,
            window=grid.window,
            stride=grid.stride,
            origin=grid.origin,
            local=self.local,
            scale=scale,
            kb_BPGD=k_BTGD[:, position],
            vb_BPGV=v_BTGD[:, position],
            pos_b=position,
        )
        return out_BAHD if self.queries is None else spread(out_BAHD[:, self.queries - first], self.queries, length)

    def _summaries(self, hidden: Any, key: Any, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden is None or key is None:
            raise UnsupportedModel("attach: the attention ran without its hidden states; call the model, not the attention function")
        count = self.grid.num_windows(k_BGTD.shape[2])
        if count == 0:
            return k_BGTD[:, :, :0], v_BGTD[:, :, :0]
        value = v_BGTD.transpose(1, 2).flatten(2)
        pooled = self.compressor(hidden, key, value, row0=0, window0=0, count=count, normalise=self._normalise_tokens)
        if self.collect is not None:
            self.collect[:] = [(pooled.key_gates, pooled.value_gates)]
        summary_key, summary_value = self._finish(pooled, 0)
        return summary_key, summary_key if summary_value is None else summary_value

    def _plan(self, length: int, repeat: int, like: torch.Tensor) -> blocked.Plan:
        grid = self.grid
        return blocked.plan(
            length,
            window=grid.window,
            stride=grid.stride,
            origin=grid.origin,
            local=self.local,
            bypass=self.phases,
            repeat=repeat,
            like=like,
            queries=None if self.queries is None else self.queries.tolist(),
        )

    def _mask(self, past: int, length: int, repeat: int, like: torch.Tensor) -> torch.Tensor:
        signature = (past, length, repeat, like.dtype, like.device)
        if signature not in self._kept:
            with torch.inference_mode(False):  # a kept mask must also serve a later backward pass
                grid, device = self.grid, like.device
                first = grid.stored_exact_lo(past, self.local) if past else 0
                older = torch.arange(first, device=device)
                older = older[reference.is_bypassed(older, stride=grid.stride, origin=grid.origin, phases=self.phases)]
                keys = torch.cat([older, torch.arange(first, past + length, device=device)])
                visible_TM = reference.visible(
                    torch.arange(past, past + length, device=device),
                    keys,
                    grid.num_windows(past + length),
                    window=grid.window,
                    stride=grid.stride,
                    origin=grid.origin,
                    local=self.local,
                    bypass=self.phases,
                )
                mask = blocked.additive_mask(visible_TM, repeat, like.dtype)
            if len(self._kept) >= 4:
                self._kept.clear()
            self._kept[signature] = mask
        return self._kept[signature]


def _joined(parts: list[tuple[torch.Tensor, int, torch.Tensor]], q_BHTD: torch.Tensor) -> torch.Tensor:
    """Outputs [R, T - skip, H, D] of some rows each, from their column `skip` on, in one [B, T, H, D]; zeros elsewhere."""
    batch, heads, length, dim = q_BHTD.shape
    like = parts[0][2] if parts else q_BHTD
    out_BTHD = like.new_zeros(batch, length, heads, like.shape[-1] if parts else dim)
    for rows, skip, part in parts:
        out_BTHD[rows, skip:] = part
    return out_BTHD


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    layer: AttachedLayer | None = module.__dict__.get(_MARK)
    if layer is None:
        raise UnsupportedModel(f"attach: {type(module).__name__} uses attention {NAME!r} without a variant attached")
    return layer.attention(query, key, value, scaling), None


def _padding_mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The 2-D padding mask as it came: each layer builds its own visibility from positions."""
    return attention_mask


class Attachment:
    """A variant on a model. Use as ``with attach(model, variant) as attached:``, or call `detach` yourself.

    Attributes:
        compressors: the learned parameters, one `Compressor` per layer; empty for full attention. They are not part of the model.
    """

    def __init__(self, model: PreTrainedModel, variant: VariantConfig) -> None:
        self.model, self.variant = model, variant
        self.layers: list[AttachedLayer] = []
        self.compressors = nn.ModuleList()
        self._handles: list[Any] = []
        self._implementation: str | None = None
        self._call = Call()
        self._permanent = False
        if variant.compress:
            self._attach()
        else:
            _check_readout(model)

    def _attach(self) -> None:
        modules = _attention_modules(self.model)
        registry.check(self.variant, layers=len(modules))
        rotary = _rotary(self.model)
        for module, grid in zip(modules, registry.grids(self.variant, layers=len(modules)), strict=True):
            weight = module.k_proj.weight
            _check_weight(weight, module)
            heads = weight.shape[0] // module.head_dim
            compressor = Compressor(self.variant, grid=grid, hidden=weight.shape[1], kv_heads=heads, head_dim=module.head_dim)
            compressor.start_from(weight, module.v_proj.weight)
            self.compressors.append(compressor.to(weight.device))
            phases = registry.bypass_phases(self.variant, grid)
            self.layers.append(AttachedLayer(module, rotary, compressor, self.variant, phases, self._call))
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _padding_mask)
        self._hook()

    def _hook(self) -> None:
        if not self.layers:
            return
        self._implementation = _implementation(self.model)
        self.model.set_attn_implementation(NAME)
        for layer in self.layers:
            layer.module.__dict__[_MARK] = layer
            self._handles.append(layer.module.register_forward_pre_hook(layer.before, with_kwargs=True))
            self._handles.append(layer.module.k_proj.register_forward_hook(layer.after_key))

    def detach(self) -> None:
        """Take everything off again; the model is what it was, trained weights aside. Calling it twice is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self.layers:
            layer.module.__dict__.pop(_MARK, None)
        if self._implementation is not None:
            self.model.set_attn_implementation(self._implementation)
            self._implementation = None
        self._call.forget()
        if self._permanent:
            self._permanent = False
            del self.model._modules[_COMPRESSORS], self.model.__dict__["save_pretrained"]

    @property
    def backend(self) -> str:
        """What runs the attention on the model's device; recorded in the Row."""
        return ops.backend(self.model.device) if self.variant.compress else "transformers-sdpa"

    def make_permanent(self) -> None:
        """The compressors become part of the model, and its `save_pretrained` writes what `load_converted` reads. `detach` takes this back too."""
        if self.layers and not self._permanent:
            self._permanent = True
            self.model.add_module(_COMPRESSORS, self.compressors)
            self.model.__dict__["save_pretrained"] = functools.partial(_save_converted, self)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The unmodified model for a while; the same compressors are on again afterwards."""
        permanent = self._permanent
        self.detach()
        try:
            yield
        finally:
            self._hook()
            if permanent:
                self.make_permanent()

    @contextmanager
    def queries_at(self, positions: torch.Tensor) -> Iterator[None]:
        """In uncached forwards, let the last layer attend from these positions alone; zeros stand at the others."""
        last = self.layers[-1:]
        for layer in last:
            layer.queries = positions
        try:
            yield
        finally:
            for layer in last:
                layer.queries = None

    def collect_gates(self, on: bool) -> None:
        """Start or stop keeping the gates of the last uncached forward, for `phase_profiles`."""
        for layer in self.layers:
            layer.collect = [] if on else None

    def phase_profiles(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mean gates of the last forward as profiles over phases: of each layer its K heads and its V heads, [G, S] each."""
        profiles = []
        for layer in self.layers:
            if not layer.collect:
                raise RuntimeError("Attachment.phase_profiles: no window was complete since collect_gates(True)")
            key_gates, value_gates = layer.collect[-1]
            profiles.append((phase_profile(key_gates, layer.grid), phase_profile(value_gates, layer.grid)))
            layer.collect = []
        return profiles

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()


def attach(model: PreTrainedModel, variant: VariantConfig) -> Attachment:
    """Put a variant on a model. New gate biases are drawn from torch's global generator.

    Raises:
        ConfigError: the variant names an unknown strategy.
        UnsupportedModel: the model's attention cannot carry it.
    """
    return Attachment(model, variant)


def convert(model: PreTrainedModel, variant: VariantConfig) -> Attachment:
    """Put a variant on a model for good: nothing to leave, and the compressors are among `model.parameters()`, `.to()` and `.state_dict()`.

    ``model.save_pretrained(folder)`` then writes config.json and `CONVERTED_FILE`, weights and compressors in one file, which `load_converted` reads. A plain
    ``from_pretrained(folder)`` finds no weights and fails: it could only run full attention. Full attention itself leaves the model as it is.

    Raises:
        ConfigError, UnsupportedModel: as for `attach`.
    """
    attached = attach(model, variant)
    attached.make_permanent()
    return attached


def _save_converted(
    attached: Attachment, save_directory: str | Path, *, is_main_process: bool = True, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """`save_pretrained` of a converted model. `state_dict` stands for the model's own, as trainers pass it."""
    if not is_main_process:
        return
    model, folder = attached.model, Path(save_directory)
    own = model.state_dict()
    tied = _repeated(own)
    held = {name: tensor for name, tensor in (own if state_dict is None else state_dict).items() if name not in tied}
    about = {"format": _FORMAT, "class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch."), "variant": canonical_json(attached.variant)}
    write_atomic(folder / CONVERTED_FILE, save({name: tensor.detach().cpu().contiguous() for name, tensor in held.items()}, metadata=about))
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def load_converted(folder: str | Path) -> Attachment:
    """The model that a converted one's `save_pretrained` wrote, converted again and in eval mode.

    Raises:
        ConfigError: the folder holds no converted model, or its tensors are not those of its config and variant.
    """
    path = Path(folder) / CONVERTED_FILE
    try:
        with safe_open(path, framework="pt") as opened:
            about, tensors = opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"load_converted: {path} cannot be read: {' '.join(str(error).split())}") from None
    kind = getattr(transformers, about.get("class", ""), None)
    if about.get("format") != _FORMAT or kind is None:
        raise ConfigError(f"load_converted: {path} must be of format {_FORMAT} and a class of transformers, got {about.get('format')} and {about.get('class')}")
    dtype = getattr(torch, about["dtype"])
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten at once
        model = kind._from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        attached = convert(model, from_dict(VariantConfig, json.loads(about["variant"])))
    for name, parameter in attached.compressors.named_parameters():
        parameter.data = parameter.data.to(tensors.get(f"{_COMPRESSORS}.{name}", parameter).dtype)
    own = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items() if name not in _repeated(own)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(f"load_converted: {name} must be of shape {wanted.get(name)}, the file has {found.get(name)}")
    model.load_state_dict(tensors, strict=False)
    model.eval()
    return attached


def _repeated(state: dict[str, torch.Tensor]) -> set[str]:
    """Names after the first that stand for the same tensor: tied embeddings."""
    seen: dict[Any, str] = {}
    for name, tensor in state.items():
        seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device) if tensor.numel() else name, name)
    return set(state) - set(seen.values())


def _implementation(model: PreTrainedModel) -> str:
    """The model's attention implementation, if it is one that a variant may stand in for."""
    chosen = str(model.config._attn_implementation)
    if "flash" in chosen:
        raise UnsupportedModel(f"attach: attn_implementation={chosen!r} takes no mask over summaries; load the model with 'sdpa'")
    if chosen.startswith("paged"):
        raise UnsupportedModel(f"attach: attn_implementation={chosen!r} keeps paged caches, which cannot carry summaries; load the model with 'sdpa'")
    return chosen


def _check_weight(weight: torch.Tensor, module: Any) -> None:
    where = f"attach: k_proj of layer {module.layer_idx}"
    if weight.device.type == "meta":
        raise UnsupportedModel(f"{where} is on the meta device (offloaded, or not loaded); bring the layer to a device first")
    if not weight.is_floating_point() or weight.dim() != 2 or weight.shape[0] % module.head_dim:
        raise UnsupportedModel(f"{where} holds packed weights ({weight.dtype}, {tuple(weight.shape)}); load the model in float32 or bfloat16")


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    decoder = getattr(model, model.base_model_prefix, model)
    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", [])]
    _check_readout(model)
    for index, module in enumerate(modules):
        if module is None or not hasattr(module, "k_proj") or not hasattr(module, "v_proj"):
            raise UnsupportedModel(f"attach: layer {index} of {type(model).__name__} has no k_proj and v_proj (latent attention is not supported)")
        # Mistral reads the width from its config at each call; others hold each layer's own.
        width = module.sliding_window if hasattr(module, "sliding_window") else getattr(module.config, "sliding_window", None)
        if width is not None:
            raise UnsupportedModel(f"attach: layer {index} has a sliding window of {width} tokens; only full-attention layers are supported")
        if _MARK in module.__dict__:
            raise UnsupportedModel(f"attach: layer {index} already carries a variant; detach it first")
        lacking = _lacking(module)
        if lacking:
            raise UnsupportedModel(f"attach: layer {index} of {type(model).__name__} {lacking}")
    return modules


def _lacking(module: Any) -> str:
    """Why summaries cannot be made with the module's own parts as its tokens' keys are, in words; empty if they can."""
    dim = getattr(module, "head_dim", None)
    if dim is None:
        return "has no head_dim"
    norm = getattr(getattr(module, "k_norm", None), "weight", None)
    if norm is not None and norm.shape[-1] != dim:
        return f"has no k_norm for each head: one norm over all {norm.shape[-1]} channels, and summaries are normalised by head (head_dim {dim})"
    if getattr(module, "k_layernorm", None) is not None:
        return "has no k_norm: it normalises keys by k_layernorm, which summaries would miss"
    rotated = getattr(module, "rotary_ndims", dim)
    if rotated != dim:
        return f"has no rotation of whole heads: its attention rotates {rotated} of {dim} channels itself, which summaries would miss"
    if getattr(module, "use_rope", True) and not hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb"):
        return "has no apply_rotary_pos_emb beside its attention"
    return ""


def _check_readout(model: PreTrainedModel) -> None:
    """Refuse a model whose last layer has not the parts by which `readout` cuts it down."""
    decoder = getattr(model, model.base_model_prefix, model)
    layers = list(getattr(decoder, "layers", []))
    if not layers or getattr(layers[-1], "self_attn", None) is None:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no decoder layers with self-attention")
    for part, found in (("self_attn.o_proj", hasattr(layers[-1].self_attn, "o_proj")), ("mlp", hasattr(layers[-1], "mlp"))):
        if not found:
            raise UnsupportedModel(f"attach: the layers of {type(model).__name__} have no {part}, at which logits of chosen positions are cut")


def _rotary(model: PreTrainedModel) -> nn.Module:
    decoder = getattr(model, model.base_model_prefix, model)
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no rotary_emb module on its decoder")
    return rotary
