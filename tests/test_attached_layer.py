"""One layer with a variant attached: against the formulas by hand, causal to the bit, and the same for a backward pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_models import COMPRESSED, FAMILIES, VARIANTS, attached, length_for, pads_before, tiny, tokens, whole
from torch import nn
from transformers import PreTrainedModel

from mitigate import attached_layer, registry
from mitigate.cache import empty
from mitigate.compressor import Compressor
from mitigate.config import VariantConfig
from mitigate.geometry import Grid
from mitigate.readout import logits_at
from mitigate.surgery import attach

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
            b_key, b_value = (0.0 if x.bias is None else x.bias for x in (module.k_proj, module.v_proj))
            u_key = torch.stack([(h[t] @ compressor.key_maps[i] + b_key).unflatten(-1, (groups, dim)) for i, t in present])
            if variant.tie != "kv":
                u_value = torch.stack([(h[t] @ compressor.value_maps[i] + b_value).unflatten(-1, (groups, dim)) for i, t in present])
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


@pytest.mark.parametrize(
    ("family", "name"),
    list(itertools.product(("llama", "qwen2"), ("w8s8", "everything", "per-offset-tied", "per-offset", "deepseek-csa"))),
)
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
            monkeypatch.setattr(attached_layer, "BLOCKED_FROM", threshold)
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


def test_stock_precision(qwen3: PreTrainedModel) -> None:
    """The fp64 model of these tests and the stock fp32 one agree."""
    plain = tiny(wide=False)
    for name in ("w8s8", "everything"):
        with attached(plain, VARIANTS[name]), torch.no_grad():
            single = whole(plain, tokens(plain, 50))
        with attached(qwen3, VARIANTS[name]), torch.no_grad():
            torch.testing.assert_close(single.double(), whole(qwen3, tokens(qwen3, 50)), atol=5e-5, rtol=0)


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


# training --------------------------------------------------------------------------------------------------------------------------------------


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
