"""Models that cannot carry a variant are refused by name, in one line, and left as they were."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny, traces
from torch import nn
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mitigate.attachable import UnsupportedModel
from mitigate.config import ConfigError, VariantConfig
from mitigate.converted import convert
from mitigate.surgery import attach

W8S8 = VariantConfig()


@pytest.mark.parametrize(("implementation", "said"), [("flash_attention_2", "takes no mask over summaries"), ("paged|sdpa", "keeps paged caches")])
def test_attention_that_cannot_carry_a_variant_is_refused(implementation: str, said: str) -> None:
    model = tiny(wide=False)
    model.config._attn_implementation_internal = implementation  # as from_pretrained sets it where the package is installed
    before = traces(model)
    with pytest.raises(UnsupportedModel) as caught:
        attach(model, W8S8)
    assert str(caught.value).startswith(f"attach: attn_implementation={implementation!r} {said}")
    assert "load the model with 'sdpa'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert traces(model) == before


def test_weights_that_are_not_there_or_packed_are_refused() -> None:
    model = tiny(wide=False)
    before = traces(model)
    with torch.device("meta"):
        elsewhere = torch.nn.Linear(32, 16, bias=False)
    packed_weight = torch.nn.Linear(32, 16, bias=False)
    packed_weight.weight = nn.Parameter(torch.zeros(256, 1, dtype=torch.uint8), requires_grad=False)
    for module, said in ((elsewhere, "is on the meta device"), (packed_weight, r"holds packed weights \(torch.uint8, \(256, 1\)\)")):
        own, model.model.layers[1].self_attn.k_proj = model.model.layers[1].self_attn.k_proj, module
        with pytest.raises(UnsupportedModel, match=f"^attach: k_proj of layer 1 {said}"):
            attach(model, W8S8)
        model.model.layers[1].self_attn.k_proj = own
    assert traces(model) == before


def test_sliding_window_layers_are_refused() -> None:
    shape = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"]))
    before = traces(model)
    with pytest.raises(UnsupportedModel, match=r"^attach: layer 1 has a sliding window of 4 tokens; only full-attention layers are supported$"):
        attach(model, W8S8)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("family", "compress", "said"),
    [
        ("Olmo2", True, "layer 0 of Olmo2ForCausalLM has no k_norm for each head: one norm over all 16 channels, and summaries are normalised by head"),
        ("StableLm", True, "layer 0 of StableLmForCausalLM has no rotation of whole heads: its attention rotates 2 of 8 channels itself"),
        ("Phi", True, "the layers of PhiForCausalLM have no self_attn.o_proj"),
        ("Phi", False, "the layers of PhiForCausalLM have no self_attn.o_proj"),
        ("GPTNeoX", False, "GPTNeoXForCausalLM has no decoder layers with self-attention"),
    ],
)
def test_models_that_lack_a_part_are_refused_by_name(family: str, compress: bool, said: str) -> None:
    import transformers

    size = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**size, bos_token_id=0, eos_token_id=None, pad_token_id=None)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    before = traces(model)
    for put in (attach, convert):
        with pytest.raises(UnsupportedModel) as caught:
            put(model, VariantConfig(compress=compress))
        assert str(caught.value).startswith(f"attach: {said}")
        assert "\n" not in str(caught.value)
    assert traces(model) == before


def test_models_without_keys_and_values_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10))
    with pytest.raises(UnsupportedModel, match="has no decoder layers with self-attention"):
        attach(model, W8S8)


SMALL = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FULL = {"layer_types": ["full_attention"] * 2}


def of_family(family: str, **settings: Any) -> PreTrainedModel:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, pad_token_id=None, bos_token_id=0, eos_token_id=None, **settings)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("Gemma2", {"head_dim": 8, **FULL}, "caps its logits at 50.0 (attn_logit_softcapping)"),
        ("HunYuanDenseV1", {"head_dim": 8}, "has no k_norm: it normalises keys by key_layernorm"),
        ("Olmo", {"clip_qkv": 0.5}, "clamps its projections to 0.5 (clip_qkv)"),
        ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **FULL}, "has attention sinks"),
        ("Llama", {"is_causal": False}, "is not causal"),
        ("Phi3", {}, "has no k_proj and v_proj (projections in one matrix, and latent attention, are not supported)"),
    ],
)
def test_attention_that_does_more_than_a_variants_is_refused(family: str, settings: dict[str, Any], said: str) -> None:
    model = of_family(family, **settings)
    before = traces(model)
    with pytest.raises(UnsupportedModel) as caught:
        attach(model, W8S8)
    assert str(caught.value).startswith(f"attach: layer 0 of {family}ForCausalLM {said}")
    assert "\n" not in str(caught.value)
    assert traces(model) == before


def test_rotations_that_are_not_one_for_all_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="the rotary_emb of Gemma3ForCausalLM needs layer_type too"):
        attach(Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=8, **FULL)), W8S8)
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match=r"depends on the length of a call \(longrope\)"):
        attach(of_family("Llama", rope_parameters=factors), W8S8)


@pytest.mark.parametrize("payload", ["shared", "per_offset"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 1)])
def test_projections_with_a_bias(payload: str, cached: bool, window: int, stride: int) -> None:
    """Fresh maps of each offset's own start as the projection, its bias included. A window of one token holds each key twice, which changes nothing."""
    model, ids = of_family("Qwen2"), torch.arange(24)[None] % 30
    shared = VariantConfig(window=window, stride=stride, local_window=64, gate="uniform")
    with torch.no_grad():
        if window == 1:
            wanted = model(input_ids=ids).logits
        else:
            with attach(model, shared):
                wanted = model(input_ids=ids).logits
        with attach(model, replace(shared, payload=payload)):
            cache = DynamicCache() if cached else None
            parts = ids.split([7, 1, 16] if cached else [24], dim=1)
            found = torch.cat([model(input_ids=part, cache=cache, use_cache=cached).logits for part in parts], dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
def test_a_layer_whose_keys_are_made_otherwise_is_refused_at_its_first_call(cached: bool) -> None:
    """Cohere2 leaves RoPE out in layers without a sliding window, which no part of the module tells."""
    model, ids = of_family("Cohere2", **FULL), torch.arange(20)[None]
    with (
        attach(model, W8S8),
        torch.no_grad(),
        pytest.raises(UnsupportedModel, match="layer 0 of Cohere2Attention gives its attention other keys than its projections, key norm and RoPE make"),
    ):
        model(input_ids=ids, use_cache=cached)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("cached", [False, True])
def test_rounding_is_not_taken_for_other_keys(family: str, cached: bool) -> None:
    """Whatever the precision of weights and of the call."""
    ids = torch.arange(20)[None]
    with torch.no_grad():
        for weights, called in itertools.product((torch.float32, torch.bfloat16, torch.float16), (None, torch.bfloat16)):
            with attach(tiny(family, wide=False).to(weights), W8S8) as on, torch.autocast("cpu", called, enabled=called is not None):
                assert torch.isfinite(on.model(input_ids=ids, use_cache=cached).logits).all()


def test_a_sliding_window_of_nothing_is_none() -> None:
    model = of_family("Qwen2Moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    with attach(model, W8S8), torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.arange(20)[None]).logits).all()


@pytest.mark.parametrize("cached", [False, True])
def test_changes_of_the_key_projection_after_attach_are_refused(cached: bool) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.base(x) + x.mean(dim=-1, keepdim=True)
            return found

    model, ids = tiny(wide=False), torch.arange(20)[None]
    attention = model.model.layers[1].self_attn
    own = attention.k_proj
    with attach(model, W8S8), torch.no_grad():
        attention.k_proj = Adapter(own)
        with pytest.raises(UnsupportedModel, match="k_proj of layer 1 was replaced while a variant is attached; attach after such changes"):
            model(input_ids=ids, use_cache=cached)
    with attach(model, W8S8), torch.no_grad():
        one = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache()
        parts = [model(input_ids=part, cache=cache, use_cache=True).logits for part in ids.split([7, 1, 12], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), one, atol=1e-4, rtol=1e-4)
    attention.k_proj = own


def test_attention_dropout_and_masks_of_its_own_are_refused() -> None:
    model, ids = of_family("Llama", attention_dropout=0.5), torch.arange(20)[None]
    with attach(model, W8S8), torch.no_grad():
        model(input_ids=ids)
        model.train()
        with pytest.raises(UnsupportedModel, match=r"attention dropout is 0\.5, which a variant's attention has not; set attention_dropout to 0"):
            model(input_ids=ids)
    with attach(of_family("Doge"), W8S8) as on, torch.no_grad(), pytest.raises(UnsupportedModel, match="DogeAttention makes a mask of its own"):
        on.model(input_ids=ids)


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1), "tiny-1kv"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^attach: model must be a transformers PreTrainedModel, got {type(model).__name__}"):
        attach(model, W8S8)


@pytest.mark.parametrize("variant", [None, {}, "w8s8"])
def test_what_is_no_variant_is_refused(variant: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^attach: variant must be a VariantConfig, got {type(variant).__name__}"):
        attach(tiny(wide=False), variant)
