"""Which models can carry a variant. Summaries are made with a layer's own parts, so a model that lacks one of them is refused by name."""

from __future__ import annotations

import inspect
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
            why = "projections in one matrix, and latent attention, are not supported"
            raise UnsupportedModel(f"attach: layer {index} of {type(model).__name__} has no k_proj and v_proj ({why})")
        # Mistral reads the width from its config at each call; others hold each layer's own.
        width = module.sliding_window if hasattr(module, "sliding_window") else getattr(module.config, "sliding_window", None)
        if width:
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
    for name in ("k_layernorm", "key_layernorm"):
        if getattr(module, name, None) is not None:
            return f"has no k_norm: it normalises keys by {name}, which summaries would miss"
    if getattr(module.config, "clip_qkv", None) is not None:
        return f"clamps its projections to {module.config.clip_qkv} (clip_qkv), which summaries would miss"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return f"caps its logits at {module.attn_logit_softcapping} (attn_logit_softcapping), which a variant's attention does not"
    if getattr(module, "sinks", None) is not None:
        return "has attention sinks, which a variant's attention has not"
    if not getattr(module, "is_causal", True) or not getattr(module.config, "is_causal", True):
        return "is not causal, and a summary is seen only by what follows it"
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
    needed = [parameter.name for parameter in inspect.signature(rotary.forward).parameters.values() if parameter.default is inspect.Parameter.empty]
    if len(needed) > 2:
        raise UnsupportedModel(f"attach: the rotary_emb of {type(model).__name__} needs {', '.join(needed[2:])} too; one rotation for all layers is supported")
    if getattr(rotary, "rope_type", None) == "longrope":
        raise UnsupportedModel(f"attach: the rotation of {type(model).__name__} depends on the length of a call (longrope), so that no summary could be kept")
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
