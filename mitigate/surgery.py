"""Attach a variant to an unmodified transformers model, and undo it without a trace.

Shapes: G kv heads, S stride.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mitigate import registry
from mitigate.attachable import MARK, UnsupportedModel, attention_implementation, attention_modules, check_readout, check_weight, rotary_module
from mitigate.attached_layer import NAME, AttachedLayer
from mitigate.call import Call
from mitigate.compressor import Compressor, phase_profile
from mitigate.config import ConfigError, VariantConfig
from mitigate.kernels import ops

COMPRESSORS = "mitigate_compressors"  # submodule of a model whose variant was made permanent


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    layer: AttachedLayer | None = module.__dict__.get(MARK)
    if layer is None:
        raise UnsupportedModel(f"attach: {type(module).__name__} uses attention {NAME!r} without a variant attached")
    for name, what in (("softcap", "caps its logits"), ("s_aux", "has attention sinks")):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"attach: {type(module).__name__} {what} ({name}), which a variant's attention does not")
    if kwargs.get("dropout"):
        raise UnsupportedModel(f"attach: attention dropout is {kwargs['dropout']}, which a variant's attention has not; set attention_dropout to 0")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() != 2:
        raise UnsupportedModel(f"attach: {type(module).__name__} makes a mask of its own, which a variant's attention does not take")
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
        self._save: Callable[..., None] | None = None
        self._returns = False  # at the end of `removed`
        if variant.compress:
            self._attach()
        else:
            check_readout(model)

    def _attach(self) -> None:
        modules = attention_modules(self.model)
        registry.check(self.variant, layers=len(modules))
        rotary = rotary_module(self.model)
        for module, grid in zip(modules, registry.grids(self.variant, layers=len(modules)), strict=True):
            weight = module.k_proj.weight
            check_weight(weight, module)
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
        self._implementation = attention_implementation(self.model)
        self.model.set_attn_implementation(NAME)
        for layer in self.layers:
            layer.hooked = layer.module.k_proj
            layer.module.__dict__[MARK] = layer
            self._handles.append(layer.module.register_forward_pre_hook(layer.before, with_kwargs=True))
            self._handles.append(layer.module.k_proj.register_forward_hook(layer.after_key))

    def detach(self) -> None:
        """Take everything off again; the model is what it was, trained weights aside. Calling it twice is harmless, whoever is attached by then."""
        self._returns = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self.layers:
            if layer.module.__dict__.get(MARK) is layer:
                del layer.module.__dict__[MARK]
        if self._implementation is not None:
            self.model.set_attn_implementation(self._implementation)
            self._implementation = None
        self._call.clear()
        if self._save is not None:
            self._save = None
            del self.model._modules[COMPRESSORS], self.model.__dict__["save_pretrained"]

    @property
    def backend(self) -> str:
        """What runs the attention on the model's device; recorded in the Row."""
        return ops.backend(self.model.device) if self.variant.compress else "transformers-sdpa"

    def make_permanent(self, save: Callable[..., None]) -> None:
        """The compressors become part of the model, and its `save_pretrained` is `save`, with this attachment first. `detach` takes this back too."""
        if self.layers and self._save is None:
            self._save = save
            self.model.add_module(COMPRESSORS, self.compressors)
            self.model.__dict__["save_pretrained"] = functools.partial(save, self)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The unmodified model for a while; the same compressors are on again afterwards, if they were on and were not detached meanwhile.

        Raises:
            UnsupportedModel: another variant was attached meanwhile, and still is.
        """
        if not self._handles:  # full attention, or already off: whoever took it off says when it is on again
            yield
            return
        save = self._save
        self.detach()
        self._returns = True
        try:
            yield
        finally:
            if self._returns:
                if any(MARK in layer.module.__dict__ for layer in self.layers):
                    raise UnsupportedModel("attach: another variant was attached while this one was removed; detach it first")
                self._hook()
                if save is not None:
                    self.make_permanent(save)

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
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"attach: model must be a transformers PreTrainedModel, got {type(model).__name__}; attach to the model inside a wrapper")
    if not isinstance(variant, VariantConfig):
        raise ConfigError(f"attach: variant must be a VariantConfig, got {type(variant).__name__}; config_files.load_variant reads a preset by name")
    return Attachment(model, variant)
