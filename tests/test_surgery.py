"""A model with a variant attached: against the formulas by hand, causal to the bit, undone to the bit, and clear about what it cannot do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import COMPRESSED, FAMILIES, VARIANTS, attached, length_for, tiny, tokens, whole
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, StaticCache

from mitigate import registry, surgery
from mitigate.cache import empty
from mitigate.compressor import Compressor
from mitigate.config import ConfigError, VariantConfig
from mitigate.geometry import Grid
from mitigate.readout import logits_at
from mitigate.surgery import CONVERTED_FILE, UnsupportedModel, attach, convert, load_converted

W8S8 = VariantConfig()


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return tiny("qwen3")


# the formulas, by hand -------------------------------------------------------------------------------------------------------------------------


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """RoPE at one position; the two halves of the last dimension are the pairs."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() if norm is not None else x


def attention_by_hand(module: Any, compressor: Compressor, variant: VariantConfig, grid: Grid, theta: float, h: torch.Tensor) -> torch.Tensor:
    """Output [T, C] of one attention layer for the rows [T, C] it receives, token by token."""
    length, dim = len(h), module.head_dim
    k_norm, q_norm = getattr(module, "k_norm", None), getattr(module, "q_norm", None)
    raw_key, value = module.k_proj(h).unflatten(-1, (-1, dim)), module.v_proj(h).unflatten(-1, (-1, dim))
    groups = raw_key.shape[1]
    query = rms(module.q_proj(h).unflatten(-1, (-1, dim)), q_norm)
    query = torch.stack([rotate(query[t], t, theta) for t in range(length)])
    key = torch.stack([rotate(rms(raw_key[t], k_norm), t, theta) for t in range(length)])

    def gates(tokens: list[tuple[int, int]], branch: int) -> torch.Tensor:
        """alpha [offsets, G, channels] of the offsets (i, t) that exist."""
        if variant.gate == "uniform":
            return torch.full((len(tokens), 1, 1), 1 / len(tokens), dtype=torch.float64)
        rows = []
        for i, t in tokens:
            z = compressor.gate_weight[0 if variant.gate == "content" else i]
            b = compressor.gate_bias[i] if variant.gate in ("scalar", "vector") else 0.0
            rows.append((h[t] @ z + b).reshape(-1, groups, dim if variant.gate == "vector" else 1)[branch if variant.tie == "none" else 0])
        return torch.stack(rows).softmax(dim=0)

    summaries: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    j = 0
    while (end := grid.origin + j * grid.stride + grid.window - 1) < length:
        start = grid.origin + j * grid.stride
        present = [(i, start + i) for i in range(grid.window) if start + i >= 0]
        if variant.payload == "per_offset":
            u_key = torch.stack([(h[t] @ compressor.key_maps[i]).unflatten(-1, (groups, dim)) for i, t in present])
            u_value = None if variant.tie == "kv" else torch.stack([(h[t] @ compressor.value_maps[i]).unflatten(-1, (groups, dim)) for i, t in present])
        else:
            u_key, u_value = torch.stack([raw_key[t] for _, t in present]), torch.stack([value[t] for _, t in present])
        if variant.key_norm == "tokens":
            u_key = rms(u_key, k_norm)
        pooled = (gates(present, 0) * u_key).sum(0)
        if variant.key_norm == "pooled":
            pooled = rms(pooled, k_norm)
        place = {"last_stride": start + grid.window - grid.stride, "window_start": start, "window_end": end}[variant.rope_position]
        finished = rotate(pooled, max(place, 0), theta)
        summaries.append((end, finished, finished if variant.tie == "kv" else (gates(present, 1) * u_value).sum(0)))
        j += 1

    bypass = {"none": (), "first": (0,), "last": (grid.window - 1,), "both": (0, grid.window - 1)}[variant.bypass]
    heads = query.shape[1]
    share = torch.arange(heads) // (heads // groups)
    out = []
    for t in range(length):
        done = [(k, v) for end, k, v in summaries if end <= t]
        covered = {grid.origin + j * grid.stride + i for j in range(len(done)) for i in range(grid.window)}
        for i in range(t + 1):
            kept = any((i - grid.origin - offset) % grid.stride == 0 for offset in bypass)
            if i not in covered or i > t - variant.local_window or kept:
                done.append((key[i], value[i]))
        keys, values = torch.stack([k for k, _ in done])[:, share], torch.stack([v for _, v in done])[:, share]
        weights = ((query[t] * keys).sum(-1) / dim**0.5).softmax(dim=0)
        out.append((weights[..., None] * values).sum(0).flatten())
    return module.o_proj(torch.stack(out))


def check_by_hand(model: PreTrainedModel, variant: VariantConfig, length: int) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append((kwargs["hidden_states"][0], output[0][0]))

    layers = [layer.self_attn for layer in model.model.layers]
    with attached(model, variant) as on, torch.no_grad():
        handles = [module.register_forward_hook(keep, with_kwargs=True) for module in layers]
        whole(model, tokens(model, length, batch=1))
        for handle in handles:
            handle.remove()
        theta = model.config.rope_parameters["rope_theta"]
        for (hidden, out), module, compressor, grid in zip(seen, layers, on.compressors, registry.grids(variant, layers=2), strict=True):
            wanted = attention_by_hand(module, compressor, variant, grid, theta, hidden)  # type: ignore[arg-type]
            torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", COMPRESSED)
def test_attention_follows_the_formulas(qwen3: PreTrainedModel, name: str) -> None:
    variant = COMPRESSED[name]
    check_by_hand(qwen3, variant, length_for(variant) if variant.window < 100 else 135)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["w8s8", "everything", "per-offset-tied", "deepseek-csa"])
def test_attention_of_other_families_follows_the_formulas(family: str, name: str) -> None:
    check_by_hand(tiny(family), COMPRESSED[name], 29)


def test_settings_matter(qwen3: PreTrainedModel) -> None:
    """The checks above could not pass by looking at something that a setting does not reach."""
    ids = tokens(qwen3, 40)
    found = {}
    for name in ("w8s8", "w8s4", "w8s8-tail", "w8s8-stagger", "w8s8-bypass-last", "w8s8-uniform", "w8s8-tied", "w8s8-vector", "rope-start", "rope-end", "full"):
        with attached(qwen3, VARIANTS[name]), torch.no_grad():
            found[name] = whole(qwen3, ids)
    names = list(found)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert (found[one] - found[other]).abs().max() > 0.01, (one, other)
    for change in ({"key_norm": "tokens"}, {"rope_position": "window_end"}, {"local_window": 17}):
        with attached(qwen3, VariantConfig(**change)), torch.no_grad():
            assert (whole(qwen3, ids) - found["w8s8"]).abs().max() > 1e-3, change


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "content-overlap"])
def test_the_blocked_path_gives_what_the_dense_one_gives(qwen3: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(qwen3, 71)
    with attached(qwen3, VARIANTS[name]) as on:
        results = []
        for threshold in (1, 1000):
            monkeypatch.setattr(surgery, "BLOCKED_FROM", threshold)
            logits = whole(qwen3, ids)
            parameters = [*qwen3.parameters(), *on.compressors.parameters()]
            results.append([logits, *torch.autograd.grad(logits.square().mean(), parameters)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_a_window_of_one_token_pools_nothing(qwen3: PreTrainedModel) -> None:
    """W = S = 1: the first token's summary is the token itself, and seeing it twice changes nothing."""
    ids = tokens(qwen3, 1)
    with attached(qwen3, VARIANTS["one"]), torch.no_grad():
        compressed = whole(qwen3, ids)
    torch.testing.assert_close(compressed, whole(qwen3, ids), atol=1e-12, rtol=0)


# causality -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_future_changes_nothing_to_the_bit(qwen3: PreTrainedModel, name: str) -> None:
    variant = COMPRESSED[name]
    length = length_for(variant) if variant.window < 100 else 150
    ids = tokens(qwen3, length, batch=1)
    residues = range(variant.stride) if variant.stride < 100 else (0, 1, 63, 126, 127)
    with attached(qwen3, variant), torch.no_grad():
        before = whole(qwen3, ids)
        for residue in residues:
            for t in {residue, length - 2 - (length - 2 - residue) % variant.stride}:
                changed = ids.clone()
                changed[0, t + 1] = (changed[0, t + 1] + 1) % qwen3.config.vocab_size
                after = whole(qwen3, changed)
                assert torch.equal(after[:, : t + 1], before[:, : t + 1]), t
                assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_in_training_precision(family: str) -> None:
    model = tiny(family, wide=False)
    ids = tokens(model, 200, batch=1)  # the blocked path
    with attached(model, VARIANTS["everything"]), torch.no_grad():
        before = whole(model, ids)
        for t in range(180, 192):
            changed = ids.clone()
            changed[0, t + 1 :] = tokens(model, 200, batch=1, seed=t)[0, t + 1 :]
            assert torch.equal(whole(model, changed)[:, : t + 1], before[:, : t + 1]), t


# undone without a trace ------------------------------------------------------------------------------------------------------------------------


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
            with pytest.raises(ZeroDivisionError), on.removed():
                raise ZeroDivisionError
            assert torch.equal(whole(qwen3, ids), compressed)
        assert traces(qwen3) == before


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
    assert [a - b <= {surgery.NAME} for a, b in zip(after, before, strict=True)] == [True, True]


# for good --------------------------------------------------------------------------------------------------------------------------------------


def as_converted(model: PreTrainedModel, variant: VariantConfig) -> surgery.Attachment:
    made = attached(model, variant)
    made.make_permanent()
    return made


@pytest.mark.parametrize(("family", "name"), [("qwen3", "everything"), ("llama", "w8s8"), ("qwen2", "per-offset-tied")])
def test_a_converted_model_is_saved_and_loaded(family: str, name: str, tmp_path: Path) -> None:
    model = tiny(family, wide=False)
    ids = tokens(model, 40)
    with torch.no_grad():
        on = as_converted(model, VARIANTS[name])
        wanted = whole(model, ids)
        model.save_pretrained(tmp_path)
        assert {"config.json", CONVERTED_FILE} <= {path.name for path in tmp_path.iterdir()}
        again = load_converted(tmp_path)
        assert type(again.model) is type(model)
        assert again.variant == on.variant
        assert torch.equal(whole(again.model, ids), wanted)
        # Plain loaders must fail: they could only run full attention without a word.
        for loader in (AutoModelForCausalLM, type(model)):
            with pytest.raises(OSError, match="no file named"):
                loader.from_pretrained(tmp_path)


def test_a_converted_model_has_its_compressors(tmp_path: Path) -> None:
    model = tiny(wide=False)
    before, held, ids = traces(model), weights(model), tokens(model, 40)
    plain = whole(model, ids)
    on = convert(model, VARIANTS["everything"])
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for parameter in on.compressors.parameters())
    assert len(model.state_dict()) == len(held) + len(on.compressors.state_dict())
    with torch.no_grad():
        wanted = whole(model, ids)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        assert torch.equal(whole(twin, ids), wanted), "a copy is independent and still converted"
        twin.save_pretrained(tmp_path)
        assert torch.equal(whole(load_converted(tmp_path).model, ids), wanted)
        for parameter in model.parameters():
            parameter.mul_(2)
        with on.removed():
            assert torch.equal(whole(model, ids), plain)
        assert torch.equal(whole(model, ids), wanted)
    on.detach()
    assert traces(model) == before
    assert same_weights(model, held)


def test_tied_embeddings_and_bf16_survive(tmp_path: Path) -> None:
    shape = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).bfloat16().eval()
    on = convert(model, W8S8)
    with torch.no_grad():
        for parameter in on.compressors.parameters():
            parameter.normal_()
        model.save_pretrained(tmp_path)
        again = load_converted(tmp_path)
        assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
        assert again.model.dtype == torch.bfloat16
        assert {parameter.dtype for parameter in again.compressors.parameters()} == {torch.float32}
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], tensor), name


def test_a_folder_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match=r"^load_converted: .*cannot be read"):
        load_converted(tmp_path)
    model = tiny(wide=False)
    convert(model, W8S8)
    model.save_pretrained(tmp_path)
    path = tmp_path / CONVERTED_FILE
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        about = opened.metadata()
    tensors = load_file(path)
    one = next(name for name in tensors if name.endswith("gate_weight"))
    for changed in (
        {name: tensor for name, tensor in tensors.items() if name != one},
        tensors | {"more": torch.zeros(2)},
        tensors | {one: torch.zeros(3, 3)},
    ):
        save_file(changed, path, metadata=about)
        with pytest.raises(ConfigError, match=r"^load_converted: \S+ must be of shape .*, the file has .*$"):
            load_converted(tmp_path)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="must be of format mitigate-converted-1"):
        load_converted(tmp_path)


def test_full_attention_converts_to_itself() -> None:
    model = tiny(wide=False)
    before = traces(model)
    convert(model, VariantConfig(compress=False))
    assert traces(model) == before


# devices -------------------------------------------------------------------------------------------------------------------------------------------


class Elsewhere(torch.overrides.TorchFunctionMode):
    """Notes the devices on which tensors are made without being asked for one."""

    def __init__(self) -> None:
        super().__init__()
        self.factories: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("arange", "zeros", "ones", "empty", "full", "tensor", "rand", "randn") and (kwargs or {}).get("device") is None:
            self.factories.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["w8s8", "everything", "per-offset-tied"])
def test_nothing_is_made_on_a_default_device(name: str) -> None:
    """With layers on several devices, whatever a layer makes must say where. Blocks are planned on the CPU and moved, hence the short sequence."""
    model = tiny(wide=False)
    ids, mask = tokens(model, 30), pads_before(30, [0, 9])
    made = []
    with attached(model, VARIANTS[name]) as on, torch.no_grad():
        hidden = model.model.embed_tokens(ids)
        layer = model.model.layers[0].self_attn
        embeddings = model.model.rotary_emb(hidden, torch.arange(30)[None])
        for with_mask in (None, mask):
            for cache in (None, empty()):
                with Elsewhere() as seen:
                    layer(
                        hidden_states=hidden,
                        position_embeddings=embeddings,
                        attention_mask=with_mask,
                        position_ids=torch.arange(30, device="cpu")[None],
                        cache=cache,
                    )
                made += seen.factories
        assert made == []
        assert all(compressor.device == one.device for one in on.layers for compressor in one.compressor.parameters())


def test_compressors_are_made_where_their_layer_is() -> None:
    """A second device that every machine has: layer 1 in another place than layer 0 would be on two GPUs."""
    model = tiny(wide=False)
    with attach(model, W8S8) as on:
        for layer in on.layers:
            assert layer.device == layer.module.k_proj.weight.device
            assert {p.device for p in layer.compressor.parameters()} == {layer.device}


# readout and training --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "w8s8", "deepseek-csa", "everything", "per-offset-tied", "uniform-stagger"])
@pytest.mark.parametrize("length", [43, 200])
def test_readout_equals_the_whole_model(qwen3: PreTrainedModel, name: str, length: int) -> None:
    ids, positions = tokens(qwen3, length), torch.tensor([0, 7, 8, 22, length - 1])
    with attached(qwen3, VARIANTS[name]) as on:
        parameters = {**dict(qwen3.named_parameters()), **{f"compressors.{n}": p for n, p in on.compressors.named_parameters()}}
        results = []
        for logits in (logits_at(on, ids, positions), whole(qwen3, ids)[:, positions]):
            weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
            results.append([logits, *torch.autograd.grad((logits * weight).sum(), parameters.values())])
        for what, one, other in zip(["logits", *parameters], *results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0, msg=what)
        assert all(layer.queries is None for layer in on.layers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in qwen3.modules())


@pytest.mark.parametrize("name", ["full", "w8s8"])
def test_readout_skips_what_nobody_asked_for(qwen3: PreTrainedModel, name: str) -> None:
    rows: list[int] = []
    last = qwen3.model.layers[-1]
    ids, positions = tokens(qwen3, 30), torch.tensor([4, 20, 29])
    with attached(qwen3, VARIANTS[name]) as on, torch.no_grad():
        handles = [m.register_forward_hook(lambda m, args, out: rows.append(out.shape[1])) for m in (last.mlp.gate_proj, last.mlp.down_proj, qwen3.lm_head)]
        logits_at(on, ids, positions)
        for handle in handles:
            handle.remove()
        assert rows == [3, 3, 3]
        shapes: list[int] = []
        linear = torch.nn.functional.linear

        def count(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if weight is last.self_attn.o_proj.weight:
                shapes.append(x.shape[1])
            return linear(x, weight, bias)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", count)
            logits_at(on, ids, positions)
        assert shapes == [3]


def test_readout_cleans_up_after_a_failure(qwen3: PreTrainedModel) -> None:
    with attached(qwen3, W8S8) as on:
        before = traces(qwen3)
        with pytest.raises(IndexError):
            logits_at(on, tokens(qwen3, 10), torch.tensor([99]))
        assert traces(qwen3) == before
        assert all(layer.queries is None for layer in on.layers)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = tiny()
    ids = tokens(model, 40)
    model.train()
    results = []
    for checkpointing in (False, True):
        with attached(model, VARIANTS["everything"]) as on:
            if checkpointing:
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            parameters = [*model.parameters(), *on.compressors.parameters()]
            logits = model(input_ids=ids, use_cache=False).logits
            results.append([logits, *torch.autograd.grad(logits.square().mean(), parameters)])
            assert all(layer._hidden is None and layer._key is None for layer in on.layers), "the stash would keep whole graphs alive"
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["full", "everything"])
def test_readout_under_gradient_checkpointing(name: str) -> None:
    model = tiny()
    ids, positions = tokens(model, 60), torch.tensor([0, 7, 30, 59])
    model.train()
    results = []
    for checkpointing in (False, True):
        with attached(model, VARIANTS[name]) as on:
            if checkpointing:
                model.activation_checkpointing_enable()
            parameters = [*model.parameters(), *on.compressors.parameters()]
            logits = logits_at(on, ids, positions)
            assert all(layer.gradient_checkpointing == checkpointing for layer in model.model.layers), "as it was"
            results.append([logits, *torch.autograd.grad(logits.square().mean(), parameters)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [40, 200])
def test_training_after_scoring(length: int) -> None:
    """Masks that were first made under inference mode must serve a backward pass too."""
    model = tiny(wide=False)
    ids = tokens(model, length)
    with attached(model, W8S8) as on:
        with torch.inference_mode():
            whole(model, ids)
            logits_at(on, ids, torch.tensor([3, 30]))
        whole(model, ids).square().mean().backward()
        logits_at(on, ids, torch.tensor([3, 30])).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gates_of_the_last_forward_become_profiles(qwen3: PreTrainedModel) -> None:
    variant = VARIANTS["w8s6"]
    with attached(qwen3, variant) as on:
        with pytest.raises(RuntimeError, match="no window was complete"):
            on.phase_profiles()
        on.collect_gates(True)
        whole(qwen3, tokens(qwen3, 5))
        with pytest.raises(RuntimeError, match="no window was complete"):
            on.phase_profiles()
        whole(qwen3, tokens(qwen3, 30))
        profiles = on.phase_profiles()
        assert [[tuple(p.shape) for p in pair] for pair in profiles] == [[(2, 6), (2, 6)]] * 2
        for pair in profiles:
            for profile in pair:
                torch.testing.assert_close(profile.sum(dim=1), torch.ones(2, dtype=torch.float64))
                assert profile.requires_grad
        on.collect_gates(False)
        whole(qwen3, tokens(qwen3, 30))
        assert all(layer.collect is None for layer in on.layers)


def test_a_bf16_model_keeps_its_gates_in_fp32() -> None:
    model = tiny(wide=False).bfloat16()
    ids = tokens(model, 30)
    with attach(model, W8S8) as on:
        assert {p.dtype for p in on.compressors.parameters()} == {torch.float32}
        on.collect_gates(True)
        logits = whole(model, ids)
        assert logits.dtype == torch.bfloat16
        assert torch.isfinite(logits).all()
        assert on.layers[0].collect is not None
        assert on.layers[0].collect[0][0].dtype == torch.float32
        logits.float().square().mean().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in on.compressors.parameters())


# padding ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w8s8", "deepseek-csa", "everything", "last-stride"])
def test_right_padding_is_exact(qwen3: PreTrainedModel, name: str) -> None:
    variant = VARIANTS[name]
    ids = tokens(qwen3, 40)
    with attached(qwen3, variant), torch.no_grad():
        for live in range(40 - variant.stride, 40):
            mask = torch.ones(2, 40, dtype=torch.int64)
            mask[1, live:] = 0
            padded = whole(qwen3, ids, attention_mask=mask)
            torch.testing.assert_close(padded[:1], whole(qwen3, ids[:1]), atol=1e-12, rtol=0)
            torch.testing.assert_close(padded[1:, :live], whole(qwen3, ids[1:, :live]), atol=1e-12, rtol=0)


def pads_before(length: int, pads: list[int]) -> torch.Tensor:
    """An attention mask [rows, length] with so many left pads in each row."""
    return (torch.arange(length)[None] >= torch.tensor(pads)[:, None]).long()


@pytest.mark.parametrize("name", ["full", "w8s8", "deepseek-csa", "everything", "last-stride", "per-offset-tied", "uniform-stagger"])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_exact(family: str, name: str) -> None:
    """Every row as if alone, whatever its phase against the columns, with position_ids that count tokens or columns; and with right pads besides."""
    model = tiny(family)
    length, pads = 57, [0, 1, 8, 5, 41, 1, 56]
    ids, mask = tokens(model, length, batch=7), pads_before(length, pads)
    mask[3, 50:] = 0
    with attached(model, VARIANTS[name]), torch.no_grad():
        alone = [whole(model, row[None, pad:])[0] for row, pad in zip(ids, pads, strict=True)]
        for position_ids in (None, (mask.cumsum(1) - 1).clamp(min=0), (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
            found = whole(model, ids, attention_mask=mask, position_ids=position_ids)
            assert torch.isfinite(found).all()
            for b, (wanted, pad) in enumerate(zip(alone, pads, strict=True)):
                live = 50 if b == 3 else length
                torch.testing.assert_close(found[b, pad:live], wanted[: live - pad], atol=1e-10, rtol=0)


def test_gradients_flow_through_left_padding(qwen3: PreTrainedModel) -> None:
    length, pads = 60, [3, 0, 17, 3]
    ids, mask = tokens(qwen3, length, batch=4), pads_before(length, pads)
    with attached(qwen3, VARIANTS["everything"]) as on:
        parameters = [*qwen3.parameters(), *on.compressors.parameters()]
        together = (whole(qwen3, ids, attention_mask=mask) * mask[..., None]).square().sum()
        apart = sum(whole(qwen3, row[None, pad:]).square().sum() for row, pad in zip(ids, pads, strict=True))
        for one, other in zip(torch.autograd.grad(together, parameters), torch.autograd.grad(apart, parameters), strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-10)


def test_a_row_of_pads_alone_disturbs_nobody(qwen3: PreTrainedModel) -> None:
    ids, mask = tokens(qwen3, 30, batch=2), pads_before(30, [30, 4])
    with attached(qwen3, W8S8), torch.no_grad():
        found = whole(qwen3, ids, attention_mask=mask)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[1, 4:], whole(qwen3, ids[1:, 4:])[0], atol=1e-10, rtol=0)


def test_rows_of_a_batch_do_not_mix(qwen3: PreTrainedModel) -> None:
    ids = tokens(qwen3, 30, batch=3)
    with attached(qwen3, VARIANTS["everything"]), torch.no_grad():
        together = whole(qwen3, ids)
        for b in range(3):
            torch.testing.assert_close(together[b : b + 1], whole(qwen3, ids[b : b + 1]), atol=1e-12, rtol=0)


# refusals --------------------------------------------------------------------------------------------------------------------------------------


def hole(model: PreTrainedModel) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, 4] = 0
    whole(model, tokens(model, 10), attention_mask=mask)


def right_padded_with_cache(model: PreTrainedModel) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, 8:] = 0
    model(input_ids=tokens(model, 10), attention_mask=mask, use_cache=True)


def other_pads_than_the_cache(model: PreTrainedModel) -> None:
    cache = empty()
    model(input_ids=tokens(model, 6), attention_mask=pads_before(6, [2, 0]), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 1), attention_mask=pads_before(7, [3, 0]), cache=cache, use_cache=True)


def mask_of_new_tokens_alone(model: PreTrainedModel) -> None:
    cache = empty()
    model(input_ids=tokens(model, 6), attention_mask=pads_before(6, [2, 0]), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 2), attention_mask=pads_before(2, [0, 0]), cache=cache, use_cache=True)


def readout_of_padded_rows(model: PreTrainedModel) -> None:
    last = model.model.layers[-1].self_attn.__dict__["_mitigate_layer"]
    last.queries = torch.tensor([3])
    try:
        whole(model, tokens(model, 10), attention_mask=pads_before(10, [2, 0]))
    finally:
        last.queries = None


def four_dimensional_mask(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool).tril())


def packed(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]))


def packed_by_lengths(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), cu_seq_lens_q=torch.tensor([0, 6, 10], dtype=torch.int32))


def other_attention_meanwhile(model: PreTrainedModel) -> None:
    model.set_attn_implementation("sdpa")
    try:
        whole(model, tokens(model, 10))
    finally:
        model.set_attn_implementation(surgery.NAME)


def flash_attention_meanwhile(model: PreTrainedModel) -> None:
    model.config._attn_implementation_internal = "flash_attention_2"
    try:
        model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32))
    finally:
        model.config._attn_implementation_internal = surgery.NAME


def continuous_batching(model: PreTrainedModel) -> None:
    model.config._attn_implementation_internal = "paged|sdpa"
    try:
        model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32))
    finally:
        model.config._attn_implementation_internal = surgery.NAME


def paged(model: PreTrainedModel) -> None:
    class PagedCache:
        def get_seq_length(self, *args: Any) -> int:
            return 0

        def get_query_offset(self, *args: Any) -> int:
            return 0

        def get_mask_sizes(self, length: int, index: int) -> tuple[int, int]:
            return length, 0

        is_sliding = (False,)

    model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 3, 32), cache=PagedCache())


def beyond_the_positions(model: PreTrainedModel) -> None:
    before, model.config.max_position_embeddings = model.config.max_position_embeddings, 12
    try:
        whole(model, tokens(model, 12))
        whole(model, tokens(model, 15), attention_mask=pads_before(15, [3, 4]))  # pads have no position
        cache = empty()
        model(input_ids=tokens(model, 12), cache=cache, use_cache=True)
        model(input_ids=tokens(model, 1), cache=cache, use_cache=True)
    finally:
        model.config.max_position_embeddings = before


def shifted(model: PreTrainedModel) -> None:
    whole(model, tokens(model, 10), position_ids=torch.arange(1, 11)[None])


def static(model: PreTrainedModel) -> None:
    model(input_ids=tokens(model, 10), cache=StaticCache(config=model.config, max_cache_len=20), use_cache=True)


def filled(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    twin = tiny(wide=False)
    twin(input_ids=tokens(twin, 4), cache=cache, use_cache=True)
    model(input_ids=tokens(model, 10), cache=cache, use_cache=True)


def attach_twice(model: PreTrainedModel) -> None:
    attach(model, VariantConfig(stride=4))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (hole, "attention_mask has a gap between the tokens of row 0; pads may stand before or after a row's tokens"),
        (right_padded_with_cache, "right padding in a cached call is not supported; pad on the left"),
        (other_pads_than_the_cache, "attention_mask has 3 left pads in row 0, the cache was filled with 2"),
        (mask_of_new_tokens_alone, "attention_mask with padding must be (2, 8), columns of earlier calls included, got (2, 2)"),
        (readout_of_padded_rows, "chosen query positions and collected gates need rows of one length"),
        (four_dimensional_mask, "attention_mask must be None or [batch, tokens], got 4 dimensions"),
        (packed, "packed sequences are not supported (position_ids of row 0 fall at column 6); give each its own row"),
        (packed_by_lengths, "packed sequences are not supported (cu_seq_lens_q is set)"),
        (other_attention_meanwhile, "attn_implementation was set to 'sdpa' while a variant is attached"),
        (flash_attention_meanwhile, "attn_implementation was set to 'flash_attention_2' while a variant is attached"),
        (continuous_batching, "continuous batching (paged|sdpa) keeps paged caches"),
        (paged, "PagedCache has no layers (paged caches cannot carry summaries); use a DynamicCache"),
        (beyond_the_positions, "13 tokens are beyond the model's max_position_embeddings of 12; shorten the context"),
        (shifted, "position_ids must count tokens from 0 without gaps"),
        (static, "cache layer 0 is a StaticLayer; a variant needs a DynamicCache"),
        (filled, "cache layer 0 already holds tokens of the unmodified model"),
        (attach_twice, "layer 0 already carries a variant; detach it first"),
    ],
)
def test_refusals_are_one_clear_line(call: Callable[[PreTrainedModel], None], said: str) -> None:
    model = tiny(wide=False)
    ids = tokens(model, 20)
    with attached(model, W8S8):
        wanted = whole(model, ids)
        with pytest.raises(UnsupportedModel) as caught:
            call(model)
        text = str(caught.value)
        assert said in text
        assert text.startswith("attach: ")
        assert "\n" not in text
        assert torch.equal(whole(model, ids), wanted), "and the variant is still on"


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


def test_drafts_are_refused_by_generate_itself(qwen3: PreTrainedModel) -> None:
    """Verification takes tokens back, which summaries cannot do: `is_croppable` is False and transformers asks it."""
    ids = tokens(qwen3, 12, batch=1)
    with attached(qwen3, W8S8), pytest.raises(ValueError, match=r"(?i)assisted|crop|cache"):
        qwen3.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2, pad_token_id=0)


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
    model.set_attn_implementation(surgery.NAME)
    with pytest.raises(UnsupportedModel, match="without a variant attached"):
        whole(model, tokens(model, 4))


def test_stock_precision(qwen3: PreTrainedModel) -> None:
    """The fp64 model of these tests and the stock fp32 one agree."""
    plain = tiny(wide=False)
    for name in ("w8s8", "everything"):
        with attached(plain, VARIANTS[name]), torch.no_grad():
            single = whole(plain, tokens(plain, 50))
        with attached(qwen3, VARIANTS[name]), torch.no_grad():
            torch.testing.assert_close(single.double(), whole(qwen3, tokens(qwen3, 50)), atol=5e-5, rtol=0)
