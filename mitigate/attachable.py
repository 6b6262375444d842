"""Which models can carry a variant. Summaries are made with a layer's own parts, so a model that lacks one of them is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mitigate.config import ConfigError

MARK = "_mitigate_layer"  # attribute of an attention module that carries a variant


class UnsupportedModel(ConfigError):
    """The model, or the way it is called, cannot carry a variant; the message says why and what to do instead."""


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention module of each decoder layer; UnsupportedModel says which of them cannot carry a variant, and why."""
    decoder = getattr(model, model.base_model_prefix, model)
    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", [])]
    check_readout(model)
    for index, module in enumerate(modules):
        if module is None or not hasattr(module, "k_proj") or not hasattr(module, "v_proj"):
            raise UnsupportedModel(f"attach: layer {index} of {type(model).__name__} has no k_proj and v_proj (latent attention is not supported)")
        # Mistral reads the width from its config at each call; others hold each layer's own.
        width = module.sliding_window if hasattr(module, "sliding_window") else getattr(module.config, "sliding_window", None)
        if width is not None:
            raise UnsupportedModel(f"attach: layer {index} has a sliding window of {width} tokens; only full-attention layers are supported")
        if MARK in module.__dict__:
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


def check_readout(model: PreTrainedModel) -> None:
    """Refuse a model whose last layer has not the parts by which `readout` cuts it down."""
    decoder = getattr(model, model.base_model_prefix, model)
    layers = list(getattr(decoder, "layers", []))
    if not layers or getattr(layers[-1], "self_attn", None) is None:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no decoder layers with self-attention")
    for part, found in (("self_attn.o_proj", hasattr(layers[-1].self_attn, "o_proj")), ("mlp", hasattr(layers[-1], "mlp"))):
        if not found:
            raise UnsupportedModel(f"attach: the layers of {type(model).__name__} have no {part}, at which logits of chosen positions are cut")


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The module that gives cos and sin at a position, one for all layers."""
    decoder = getattr(model, model.base_model_prefix, model)
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModel(f"attach: {type(model).__name__} has no rotary_emb module on its decoder")
    return rotary


def check_weight(weight: torch.Tensor, module: Any) -> None:
    """Refuse key projections whose numbers cannot be read, from which a compressor starts."""
    where = f"attach: k_proj of layer {module.layer_idx}"
    if weight.device.type == "meta":
        raise UnsupportedModel(f"{where} is on the meta device (offloaded, or not loaded); bring the layer to a device first")
    if not weight.is_floating_point() or weight.dim() != 2 or weight.shape[0] % module.head_dim:
        raise UnsupportedModel(f"{where} holds packed weights ({weight.dtype}, {tuple(weight.shape)}); load the model in float32 or bfloat16")


def attention_implementation(model: PreTrainedModel) -> str:
    """The model's attention implementation, if it is one that a variant may stand in for."""
    chosen = str(model.config._attn_implementation)
    if "flash" in chosen:
        raise UnsupportedModel(f"attach: attn_implementation={chosen!r} takes no mask over summaries; load the model with 'sdpa'")
    if chosen.startswith("paged"):
        raise UnsupportedModel(f"attach: attn_implementation={chosen!r} keeps paged caches, which cannot carry summaries; load the model with 'sdpa'")
    return chosen
