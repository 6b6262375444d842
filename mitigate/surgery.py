"""Attach a variant to an unmodified transformers model, and undo it without a trace.

The layer's own projections, norms and rotary module are used as they stand; only what the attention reads is replaced:
``[summaries | exact tokens]`` in one joint softmax. Shapes: B batch, T tokens, N summaries, C hidden width, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from mitigate import registry
from mitigate.cache import SummaryCacheLayer
from mitigate.compressor import Compressor, Pooled, phase_profile
from mitigate.config import ConfigError, VariantConfig
from mitigate.geometry import Grid
from mitigate.kernels import blocked, ops, reference

NAME = "mitigate"  # key in transformers' attention and mask registries
BACKEND = ops.backend("cpu")  # recorded in the Row
OPERATORS = frozenset({"cuda"})  # kinds of device on which whole sequences go through `ops`
BLOCKED_FROM = 48  # tokens from which the blocked path beats one dense masked call (forward and backward, CPU: level at 40, 1.2x at 64, 1.7x at 128)
_MARK = "_mitigate_layer"


class UnsupportedModel(ConfigError):
    """The model, or the way it is called, cannot carry a variant; the message says why and what to do instead."""


def spread(x_BAF: torch.Tensor, positions_A: torch.Tensor, length: int) -> torch.Tensor:
    """Rows back at their positions among `length`, zeros elsewhere: [B, A, ...] -> [B, T, ...]."""
    full = x_BAF.new_zeros(x_BAF.shape[0], length, *x_BAF.shape[2:])
    return full.index_copy(1, positions_A, x_BAF)


class AttachedLayer:
    """What one attention module needs while a variant is attached."""

    def __init__(self, module: Any, rotary: nn.Module, compressor: Compressor, variant: VariantConfig, phases: tuple[int, ...]) -> None:
        self.module, self.rotary, self.compressor = module, rotary, compressor
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
        self._cache: SummaryCacheLayer | None = None
        self._kept: dict[Any, torch.Tensor] = {}

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

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the attention module: stash the hidden states, or hand them to this layer's cache."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self._cache = None
        self._hidden = hidden
        if cache is not None:
            self._cache = self._take_over(cache)
            self._cache.expect(hidden)
        past = self._cache.length if self._cache is not None else 0
        self._check_positions(kwargs.get("position_ids"), past, hidden.shape[1])
        self._check_mask(kwargs.get("attention_mask"))

    def after_key(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Hook of k_proj: its output is the key before norm and RoPE."""
        self._key = output

    def _take_over(self, cache: Any) -> SummaryCacheLayer:
        index = int(self.module.layer_idx)
        if not hasattr(cache, "layers"):
            raise UnsupportedModel(f"attach: {type(cache).__name__} has no layers (paged caches cannot carry summaries); use a DynamicCache")
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if isinstance(layer, SummaryCacheLayer):
            if layer.owner is not self:
                raise UnsupportedModel("attach: this cache was filled under another variant; start with an empty one")
            return layer
        if type(layer) is not DynamicLayer:
            raise UnsupportedModel(f"attach: cache layer {index} is a {type(layer).__name__}; a variant needs a DynamicCache")
        if layer.is_initialized:
            raise UnsupportedModel(f"attach: cache layer {index} already holds tokens of the unmodified model; start with an empty cache")
        cache.layers[index] = SummaryCacheLayer(self)
        return cache.layers[index]

    def _check_positions(self, position_ids: torch.Tensor | None, past: int, length: int) -> None:
        if position_ids is None:
            return
        expected = torch.arange(past, past + length, device=position_ids.device)
        if not bool((position_ids == expected).all()):
            raise UnsupportedModel("attach: position_ids must count tokens from 0 without gaps (left padding and packed sequences are not supported)")

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        if mask is None:
            return
        if mask.dim() != 2:
            raise UnsupportedModel(f"attach: attention_mask must be None or [batch, tokens], got {mask.dim()} dimensions")
        live = mask.bool()
        if bool((live[:, 1:] & ~live[:, :-1]).any()):
            raise UnsupportedModel("attach: left padding is not supported; pad on the right, or run rows of one length together")
        if self._cache is not None and not bool(live.all()):
            raise UnsupportedModel("attach: padding in a cached call is not supported; run rows of one length together")

    # -- attention ------------------------------------------------------------------------------------------------------------------------------

    def attention(self, q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend over [summaries | exact tokens]; returns [B, T, H, D]. Clears the stash whatever happens."""
        hidden, key, cache = self._hidden, self._key, self._cache
        self._hidden = self._key = self._cache = None
        if cache is None:
            return self._whole_sequence(hidden, key, q_BHTD, k_BGMD, v_BGMD, scale)
        length = q_BHTD.shape[2]
        # One query sees all that is held: summaries up to it, its exact interval, the bypassed tokens.
        mask = None if length == 1 else self._mask(cache.length - length, length, q_BHTD.shape[1] // k_BGMD.shape[1], q_BHTD)
        return blocked.attend(q_BHTD, k_BGMD, v_BGMD, mask, scale).transpose(1, 2)

    def _whole_sequence(self, hidden: Any, key: Any, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, scale: float) -> torch.Tensor:
        ks_BGND, vs_BGND = self._summaries(hidden, key, k_BGTD, v_BGTD)
        if q_BHTD.device.type in OPERATORS:
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
        if variant.compress:
            self._attach()

    def _attach(self) -> None:
        modules = _attention_modules(self.model)
        registry.check(self.variant, layers=len(modules))
        phases = registry.bypass_phases(self.variant)
        rotary = _rotary(self.model)
        for module, grid in zip(modules, registry.grids(self.variant, layers=len(modules)), strict=True):
            weight = module.k_proj.weight
            heads = weight.shape[0] // module.head_dim
            compressor = Compressor(self.variant, grid=grid, hidden=weight.shape[1], kv_heads=heads, head_dim=module.head_dim)
            compressor.start_from(weight, module.v_proj.weight)
            self.compressors.append(compressor.to(weight.device))
            self.layers.append(AttachedLayer(module, rotary, compressor, self.variant, phases))
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _padding_mask)
        self._hook()

    def _hook(self) -> None:
        if not self.layers:
            return
        self._implementation = self.model.config._attn_implementation
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

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The unmodified model for a while; the same compressors are on again afterwards."""
        self.detach()
        try:
            yield
        finally:
            self._hook()

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


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    decoder = getattr(model, model.base_model_prefix, model)
    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", [])]
    if not modules:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no decoder layers with self-attention")
    for index, module in enumerate(modules):
        if module is None or not hasattr(module, "k_proj") or not hasattr(module, "v_proj"):
            raise UnsupportedModel(f"attach: layer {index} of {type(model).__name__} has no k_proj and v_proj (latent attention is not supported)")
        if getattr(module, "sliding_window", None) is not None:
            raise UnsupportedModel(f"attach: layer {index} has a sliding window of {module.sliding_window} tokens; only full-attention layers are supported")
        if _MARK in module.__dict__:
            raise UnsupportedModel(f"attach: layer {index} already carries a variant; detach it first")
    return modules


def _rotary(model: PreTrainedModel) -> nn.Module:
    decoder = getattr(model, model.base_model_prefix, model)
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no rotary_emb module on its decoder")
    return rotary
