"""A variant is attached and undone to the bit, whatever happens in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VARIANTS, attached, same_weights, tiny, tokens, traces, weights, whole
from transformers import DynamicCache, PreTrainedModel

from mitigate.attachable import UnsupportedModel
from mitigate.attached_layer import NAME
from mitigate.call import SMALL_MASK
from mitigate.config import ConfigError, VariantConfig
from mitigate.surgery import attach

W8S8 = VariantConfig()


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return tiny("qwen3")


@pytest.mark.parametrize("name", ["w8s8", "everything", "per-offset-tied", "full"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attach_and_detach_leave_no_trace(name: str, implementation: str) -> None:
    model = tiny(wide=False)
    model.set_attn_implementation(implementation)
    ids = tokens(model, 30)
    before, held, logits = traces(model), weights(model), whole(model, ids)
    with attached(model, VARIANTS[name]) as on:
        assert same_weights(model, held), "compressors are no part of the model"
        changed = not torch.equal(whole(model, ids), logits)
        assert changed == (name != "full")
        model(input_ids=ids, use_cache=True)
    assert traces(model) == before
    assert same_weights(model, held)
    assert torch.equal(whole(model, ids), logits)
    on.detach()
    assert traces(model) == before, "twice is harmless"


def test_an_exception_inside_leaves_no_trace() -> None:
    model = tiny(wide=False)
    ids = tokens(model, 30)
    before, held, logits = traces(model), weights(model), whole(model, ids)
    with pytest.raises(ZeroDivisionError), attach(model, W8S8):
        raise ZeroDivisionError

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), attach(model, W8S8):
        whole(model, ids)
    handle.remove()
    with pytest.raises(UnsupportedModel), attach(model, W8S8):
        whole(model, ids, attention_mask=torch.ones(2, 1, 30, 30, dtype=torch.bool))
    assert traces(model) == before
    assert same_weights(model, held)
    assert torch.equal(whole(model, ids), logits)


def test_a_failed_forward_does_not_disturb_the_next_one(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 30)
    with attached(qwen3, W8S8) as on, torch.no_grad():
        wanted = whole(qwen3, ids)
        with pytest.raises(UnsupportedModel):
            whole(qwen3, ids, attention_mask=torch.ones(2, 1, 30, 30, dtype=torch.bool))
        assert torch.equal(whole(qwen3, ids), wanted)
        assert all(layer._hidden is None and layer._key is None for layer in on.layers), "nothing is retained"


def test_after_a_training_step_the_model_is_the_trained_one() -> None:
    model = tiny(wide=False)
    ids = tokens(model, 30)
    before, held = traces(model), weights(model)
    with attach(model, W8S8) as on:
        optimizer = torch.optim.AdamW([*model.parameters(), *on.compressors.parameters()], lr=1e-3)
        start = weights(on.compressors)
        whole(model, ids).square().mean().backward()
        optimizer.step()
        assert not same_weights(on.compressors, start)
    model.zero_grad(set_to_none=True)
    assert traces(model) == before
    assert not same_weights(model, held)
    twin = tiny(wide=False)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(whole(model, ids), whole(twin, ids))


def test_removed_for_a_while(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 30)
    with torch.no_grad():
        plain = whole(qwen3, ids)
        before = traces(qwen3)
        with attached(qwen3, W8S8) as on:
            compressed = whole(qwen3, ids)
            with on.removed():
                assert torch.equal(whole(qwen3, ids), plain)
                assert traces(qwen3) == before
            assert torch.equal(whole(qwen3, ids), compressed)
            with on.removed():
                with on.removed():
                    assert torch.equal(whole(qwen3, ids), plain)
                assert torch.equal(whole(qwen3, ids), plain), "still within the outer one"
            assert torch.equal(whole(qwen3, ids), compressed)
            with pytest.raises(ZeroDivisionError), on.removed():
                raise ZeroDivisionError
            assert torch.equal(whole(qwen3, ids), compressed)
        assert traces(qwen3) == before


def test_removed_brings_back_only_what_was_on(qwen3: PreTrainedModel) -> None:
    """Detached before or meanwhile, it stays off; another variant that came instead is not touched."""
    ids = tokens(qwen3, 30)
    with torch.no_grad():
        plain, before = whole(qwen3, ids), traces(qwen3)
        on = attach(qwen3, W8S8)
        on.detach()
        with on.removed():
            pass
        assert traces(qwen3) == before
        on = attach(qwen3, W8S8)
        with on.removed():
            on.detach()
        assert traces(qwen3) == before
        with attached(qwen3, VARIANTS["w8s4"]) as other:
            wanted = whole(qwen3, ids)
            on.detach()
            with on.removed():
                pass
            assert torch.equal(whole(qwen3, ids), wanted), "a stale one takes nothing off"
            del other
        on = attach(qwen3, W8S8)
        with pytest.raises(UnsupportedModel, match="another variant was attached while this one was removed"), on.removed():
            other = attached(qwen3, VARIANTS["w8s4"])
        assert torch.equal(whole(qwen3, ids), wanted)
        other.detach()
        assert traces(qwen3) == before
        assert torch.equal(whole(qwen3, ids), plain)


def test_masks_of_long_chunks_are_shared_and_let_go(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 600)
    with attached(qwen3, W8S8) as on, torch.no_grad():
        call = on.layers[0].call
        cache = DynamicCache()
        qwen3(input_ids=ids[:, :10], cache=cache, use_cache=True)
        qwen3(input_ids=ids[:, 10:], cache=cache, use_cache=True)
        held = [mask.numel() for mask in call._masks.values()]
        assert len(held) == 2, "one for all layers of a call"
        assert max(held) > SMALL_MASK
        qwen3(input_ids=ids[:, :1], cache=cache, use_cache=True)
        assert [mask.numel() for mask in call._masks.values()] == held[:1], "a large one is let go by the next call"
    assert not call._masks


def test_two_models_at_once_do_not_disturb_each_other() -> None:
    one, other = tiny(seed=1), tiny("llama", seed=2)
    ids = tokens(other, 40)
    with torch.no_grad():
        with attached(one, VARIANTS["w8s4"]):
            alone = whole(one, ids)
        with attached(other, VARIANTS["everything"]):
            other_alone = whole(other, ids)
        plain = whole(one, ids)
        with attached(one, VARIANTS["w8s4"]) as first, attached(other, VARIANTS["everything"]):
            assert torch.equal(whole(one, ids), alone)
            assert torch.equal(whole(other, ids), other_alone)
            first.detach()
            assert torch.equal(whole(one, ids), plain)
            assert torch.equal(whole(other, ids), other_alone)


def test_importing_and_attaching_change_the_registries_under_one_name_only() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    before = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    with attach(tiny(wide=False), W8S8):
        pass
    after = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    assert [a - b <= {NAME} for a, b in zip(after, before, strict=True)] == [True, True]


def test_compressors_are_made_where_their_layer_is() -> None:
    """A second device that every machine has: layer 1 in another place than layer 0 would be on two GPUs."""
    model = tiny(wide=False)
    with attach(model, W8S8) as on:
        for layer in on.layers:
            assert layer.device == layer.module.k_proj.weight.device
            assert {p.device for p in layer.compressor.parameters()} == {layer.device}


def test_an_unknown_strategy_is_refused_before_anything_is_touched() -> None:
    model = tiny(wide=False)
    before = traces(model)
    with pytest.raises(ConfigError, match="did you mean 'vector'"):
        attach(model, VariantConfig(gate="vectr"))
    with pytest.raises(ConfigError, match="nothing to regularize"):
        attach(model, VariantConfig(gate="uniform", coverage="entropy"))
    assert traces(model) == before


def test_the_attention_function_without_a_variant_says_so() -> None:
    model = tiny(wide=False)
    with attach(model, W8S8):
        pass
    model.set_attn_implementation(NAME)
    with pytest.raises(UnsupportedModel, match="without a variant attached"):
        whole(model, tokens(model, 4))
