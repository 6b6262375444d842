"""Tiny random models of the supported families, in real fp64 throughout, and the variants that tests run on them."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from mitigate import bases, registry
from mitigate.config import BaseConfig, TaskConfig, VariantConfig
from mitigate.surgery import Attachment, attach

TASK = TaskConfig(keys=12, names=12, filler_tokens=4, records=6, queries=4)
BASE = BaseConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, rope_theta=100.0, task=TASK)
FAMILIES = ("qwen3", "qwen2", "llama", "smollm3")

# Beside the presets: settings that no preset has, and combinations of settings that each work alone.
EXTRAS: dict[str, VariantConfig] = {
    "norm-tokens": VariantConfig(window=6, stride=4, key_norm="tokens"),
    "rope-start": VariantConfig(window=6, stride=4, origin=-1, rope_position="window_start", local_window=1),
    "rope-end": VariantConfig(window=6, stride=4, origin=-5, rope_position="window_end", local_window=3),
    "last-stride": VariantConfig(window=7, stride=3, origin=-6, local_window=2),
    "everything": VariantConfig(window=12, stride=8, origin=-3, stagger="half", gate="vector", tie="gates", bypass="both", local_window=5, key_norm="tokens"),
    "per-offset": VariantConfig(window=6, stride=3, payload="per_offset", stagger="half"),
    "per-offset-tied": VariantConfig(window=6, stride=3, stagger="step", payload="per_offset", tie="kv", bypass="first", local_window=1),
    "uniform-stagger": VariantConfig(window=5, stride=5, origin=-4, gate="uniform", stagger="spread", bypass="last", local_window=1, tie="kv"),
    "content-overlap": VariantConfig(window=9, stride=2, origin=-8, gate="content", tie="gates", local_window=1),
    "one": VariantConfig(window=1, stride=1, local_window=1),
    "two": VariantConfig(window=2, stride=2, origin=-1, gate="scalar-no-bias", bypass="both", local_window=1),
}
VARIANTS: dict[str, VariantConfig] = {**{preset.name: preset.variant for preset in registry.presets()}, **EXTRAS}
COMPRESSED = {name: variant for name, variant in VARIANTS.items() if variant.compress}


def _wide_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def _wide_rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
    angle = torch.cat([position_ids[..., None].double() * inverse] * 2, dim=-1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def widen(model: PreTrainedModel) -> PreTrainedModel:
    """fp64 weights, and no fp32 inside norms and rotary embedding, so that 1e-10 tells rounding from logic."""
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_wide_norm, module)
    rotary: Any = model.model.rotary_emb
    rotary.theta = model.config.rope_parameters["rope_theta"]
    rotary.dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    rotary.forward = types.MethodType(_wide_rotary, rotary)
    return model


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights large enough for attention to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * draw)
            elif "embed" in name:
                parameter.copy_(draw)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * draw)
            else:
                parameter.copy_(1.5 * draw / parameter.shape[1] ** 0.5)


def tiny(family: str = "qwen3", seed: int = 0, wide: bool = True) -> PreTrainedModel:
    """A random model in eval mode."""
    if family == "qwen3":
        model = bases.build(BASE)
    else:
        size = dict(
            vocab_size=30,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=None,
        )
        if family == "smollm3":
            model = SmolLM3ForCausalLM(SmolLM3Config(**size, no_rope_layers=[1, 0]))  # the second layer does not rotate
        else:
            model = LlamaForCausalLM(LlamaConfig(**size)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**size))
    randomise(model, seed)
    return (widen(model) if wide else model).eval()


def attached(model: PreTrainedModel, variant: VariantConfig, seed: int = 0) -> Attachment:
    """A variant with gates and maps that are far from their start, in the model's precision."""
    made = attach(model, variant)
    made.compressors.to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.compressors.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw if name.endswith("bias") else 0.4 * draw)
    return made


def tokens(model: PreTrainedModel, length: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Logits without a cache."""
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def length_for(variant: VariantConfig) -> int:
    """Beyond the local window and two periods, and no multiple of the stride."""
    return variant.local_window + 2 * variant.stride + variant.window // 2 + (3 if (variant.local_window + variant.window // 2 + 3) % variant.stride else 4)


def pads_before(length: int, pads: list[int]) -> torch.Tensor:
    """An attention mask [rows, length] with so many left pads in each row."""
    return (torch.arange(length)[None] >= torch.tensor(pads)[:, None]).long()


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """Everything an attachment might leave behind."""
    found: dict[str, Any] = {"attention": model.config._attn_implementation, "training": model.training}
    for name, module in model.named_modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_backward_hooks"):
            found[f"{name}.{hooks}"] = len(getattr(module, hooks))
        found[f"{name}.dict"] = sorted(module.__dict__)
        found[f"{name}.type"] = type(module)
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_weights(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], before[name]) for name in before)
