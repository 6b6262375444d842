"""Models that cannot carry a variant are refused by name, in one line, and left as they were."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny, traces
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from mitigate.attachable import UnsupportedModel
from mitigate.config import VariantConfig
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
