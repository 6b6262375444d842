"""Golden vectors: inputs, and what a right port computes from them, level by level, in fp64.

- L0: summaries of every layer from random hidden states: gate logits and weights, pooled and finished keys and values.
- L1: visibility matrices for every grid, exact to the bit.
- L2: logits of the bundle's own model: in one call, in chunks, token by token, and at every phase shift.
- anti: logits under shuffled gates, which a port must match when given those weights; and logits that no port may give.

``cases.json`` lists what to compute, ``inputs.safetensors`` from what; ``<level>.safetensors`` holds the answers. A port writes its own
``<level>.safetensors`` with tensors named ``<level>.<case>.<output>``, in fp64 or fp32.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mitigate.cache import empty
from mitigate.export import reference
from mitigate.export.describe import Tensors, dump, from_plain, save_tensors, to_plain
from mitigate.geometry import Grid
from mitigate.kernels import reference as formulas
from mitigate.surgery import Attachment

LEVELS = ("L0", "L1", "L2", "anti")
FOLDER = "golden"
PLAIN, SHUFFLED = "compressor.safetensors", "golden/shuffled.safetensors"
SEED = 20261
ALL_PHASES_UP_TO = 48  # a longer period is sampled
ONESHOT = "L2.oneshot.logits"

Case = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------- what to compute


def cases(spec: dict[str, Any]) -> list[Case]:
    """The cases of a bundle, in the order in which a port should get them right.

    Each has `level`, `case`, `do` ("summaries", "visibility" or "logits"), the names of its `outputs`, and which file holds the compressor's
    `weights`. Logits: the tokens ``input[skip:]``, fed in `chunks` from an empty state; the logits of the `last` positions. An output's expected
    values are under `expected` where another case has the same.
    """
    return [*_summaries(spec), *_visibilities(spec), *_logits(spec), *_shuffled(spec)]


def _case(level: str, name: str, do: str, outputs: Sequence[str], **more: Any) -> Case:
    return {"level": level, "case": name, "do": do, "outputs": list(outputs), "weights": PLAIN, **more}


def _summaries(spec: dict[str, Any]) -> list[Case]:
    names = []
    for branch in ("key",) if spec["payload"]["value"] == "key_summary" else ("key", "value"):
        names += [f"{branch}_gate_logits"] if spec["gate"]["kind"] == "softmax" else []
        names += [f"{branch}_gates", f"pooled_{branch}"]
    return [_case("L0", f"layer{layer}", "summaries", [*names, "key", "value"], layer=layer, input="L0.hidden") for layer in range(spec["base"]["layers"])]


def _visibilities(spec: dict[str, Any]) -> list[Case]:
    seen: set[tuple[int, int, int]] = set()
    found: list[Case] = []
    local = spec["exact"]["local_window"]
    for layer, grid in enumerate(spec["layers"]):
        window, stride, origin = grid["window"], grid["stride"], grid["origin"]
        if (window, stride, origin) in seen:
            continue
        seen.add((window, stride, origin))
        # The last length is past the local window: shorter ones show nothing of what happens to exact tokens outside it.
        lengths = {stride - 1, stride, stride + 1, window - 1, window, window + 1, 2 * window, local + window + stride + 1}
        for length in sorted(length for length in lengths if length > 0):
            found.append(_case("L1", f"layer{layer}_T{length}", "visibility", ["visible"], layer=layer, length=length))
    return found


def _logits(spec: dict[str, Any]) -> list[Case]:
    length, most = logits_length(spec), spec["period"] - 1

    def logits(name: str, chunks: list[int], **more: Any) -> Case:
        return _case("L2", name, "logits", ["logits"], input="L2.tokens", skip=most, chunks=chunks, last=length) | more

    found = [logits("oneshot", [length])]
    for size in sorted({size for grid in spec["layers"] for size in _chunk_sizes(grid["window"], grid["stride"])}):
        sizes = [size] * (length // size) + [length % size] * (length % size > 0)
        found.append(logits(f"chunks{size}", sizes, expected={"logits": ONESHOT}))
    steps = min(2 * _widest(spec)[1] + 3, length - 1)
    found.append(logits("decode", [length - steps] + [1] * steps, expected={"logits": ONESHOT}))
    for shift in _phases(spec["period"], min(grid["stride"] for grid in spec["layers"])):
        found.append(logits(f"phase{shift}", [length + shift], skip=most - shift, last=1))
    return found


def _chunk_sizes(window: int, stride: int) -> set[int]:
    return {1, max(stride - 1, 1), stride, stride + 1, _prime_above(stride + 1), window}


def _shuffled(spec: dict[str, Any]) -> list[Case]:
    if not _weighs(spec):
        return []
    length, most = logits_length(spec), spec["period"] - 1
    return [_case("anti", "shuffled", "logits", ["logits"], input="L2.tokens", skip=most, chunks=[length], last=length) | {"weights": SHUFFLED}]


def _weighs(spec: dict[str, Any]) -> bool:
    """Whether the order of a window's tokens matters in some layer: gates are learned, and a window has more than one token."""
    return spec["gate"]["kind"] != "uniform" and _widest(spec)[0] > 1


def _widest(spec: dict[str, Any]) -> tuple[int, int]:
    """The largest window and the largest stride of any layer: what lasts long enough for them does for every layer."""
    return max(grid["window"] for grid in spec["layers"]), max(grid["stride"] for grid in spec["layers"])


def logits_length(spec: dict[str, Any]) -> int:
    """Tokens of an L2 case: well past the local window, several windows of every layer."""
    window, stride = _widest(spec)
    return int(spec["exact"]["local_window"] + 2 * window + 2 * stride + 3)


def _phases(period: int, stride: int) -> list[int]:
    """Shifts to run: all where they are few, else a sample with every phase of the smallest stride, as far as those are few."""
    if period <= ALL_PHASES_UP_TO:
        return list(range(period))
    fine = range(stride) if stride <= ALL_PHASES_UP_TO else ()
    return sorted({*fine, 1, period - 1, *range(0, period, -(-period // ALL_PHASES_UP_TO))})


def _prime_above(number: int) -> int:
    candidate = max(number + 1, 2)
    while any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


def inputs(spec: dict[str, Any]) -> Tensors:
    """Random hidden states [T, C] in fp64 for L0 and token ids for L2; the first token of L2 is the one that prompts begin with."""
    generator = torch.Generator().manual_seed(SEED)
    window, stride = _widest(spec)
    hidden = torch.randn(3 * window + 2 * stride + 1, spec["base"]["hidden"], generator=generator, dtype=torch.float64)
    tokens = torch.randint(spec["base"]["vocabulary"], (spec["period"] - 1 + logits_length(spec),), generator=generator)
    return {"L0.hidden": hidden, "L2.tokens": tokens}


def shuffled(tensors: Tensors, spec: dict[str, Any]) -> Tensors:
    """The compressor's tensors with every gate shuffled: rows moved on by one offset, or negated where all offsets share one row."""

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        if ".gate." not in name:
            return x
        return x.roll(1, 0).contiguous() if spec["gate"]["per_offset"] else -x

    return {name: change(name, x) for name, x in tensors.items()}


# ---------------------------------------------------------------------------------------------------------------------- our answers


def widen(attached: Attachment) -> Attachment:
    """The attached model in fp64 throughout: transformers' norms and rotary embedding would go through fp32. Changes the model for good."""
    model: Any = attached.model
    model.double()
    attached.compressors.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_wide_norm, module)
    rotary = model.model.rotary_emb
    rotary.mitigate_shape = float(model.config.rope_parameters["rope_theta"]), int(model.config.head_dim)
    rotary.forward = types.MethodType(_wide_rotary, rotary)
    return attached


def _wide_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    normal: torch.Tensor = self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())
    return normal


def _wide_rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    theta, dims = self.mitigate_shape
    inverse = theta ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.cat([position_ids[..., None].double() * inverse] * 2, dim=-1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


@torch.inference_mode()
def answers(attached: Attachment, wanted: Sequence[Case], given: Tensors, weights: dict[str, Tensors]) -> Tensors:
    """What our own code computes for the cases, under ``<level>.<case>.<output>``; in the attached model's precision.

    Args:
        weights: the compressor's tensors by the file that a case names.
    """
    found: Tensors = {}
    loaded = None
    for case in wanted:
        if case["weights"] != loaded:
            loaded = case["weights"]
            from_plain(attached, weights[loaded])
        made = {"summaries": _summarise, "visibility": _visible, "logits": _run}[case["do"]](attached, case, given)
        found |= {f"{case['level']}.{case['case']}.{name}": made[name].clone(memory_format=torch.contiguous_format) for name in case["outputs"]}
    return found


def _summarise(attached: Attachment, case: Case, given: Tensors) -> Tensors:
    layer = attached.layers[case["layer"]]
    compressor, grid = layer.compressor, layer.grid
    h_BTC = given[case["input"]].to(attached.model.dtype)[None]
    count = grid.num_windows(h_BTC.shape[1])
    projected = layer.module.k_proj(h_BTC), layer.module.v_proj(h_BTC)
    pooled = compressor(h_BTC, *projected, row0=0, window0=0, count=count, normalise=layer._normalise_tokens)
    key, value = layer.summarise_rows(h_BTC, row0=0, window0=0, count=count)
    key_logits, value_logits = _gate_logits(compressor, grid, h_BTC, count)
    found = {"key_gates": pooled.key_gates, "value_gates": pooled.value_gates, "pooled_key": pooled.key, "key": key.transpose(1, 2)}
    found |= {"value": found["key"]} if value is None else {"pooled_value": pooled.value, "value": value.transpose(1, 2)}
    found |= {"key_gate_logits": key_logits, "value_gate_logits": value_logits} if key_logits is not None else {}
    return {name: x[0] for name, x in found.items()}


def _gate_logits(compressor: Any, grid: Grid, h_BTC: torch.Tensor, count: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``s[j, i] = Z_i h + b_i`` of the K and the V branch, [B, N, W, G, E]; minus infinity where the token does not exist. None for a uniform gate."""
    if not compressor.channels:
        return None, None
    token_NW = formulas.window_index(h_BTC.shape[1], grid.window, grid.stride, grid.origin)[:count]
    s_BNWX = torch.einsum("bnwc,wcx->bnwx", h_BTC[:, token_NW.clamp(min=0)], compressor.gate_weight.expand(grid.window, -1, -1))
    s_BNWX = s_BNWX + compressor.gate_bias if hasattr(compressor, "gate_bias") else s_BNWX
    s_BNWX = s_BNWX.masked_fill(token_NW[None, :, :, None] < 0, float("-inf"))
    branches = s_BNWX.unflatten(-1, (compressor.tie.gates, compressor.kv_heads, compressor.channels)).unbind(dim=3)
    return branches[0], branches[-1]


def _visible(attached: Attachment, case: Case, given: Tensors) -> Tensors:
    layer, position = attached.layers[case["layer"]], torch.arange(case["length"])
    grid = layer.grid
    seen = formulas.visible(
        position,
        position,
        grid.num_windows(case["length"]),
        window=grid.window,
        stride=grid.stride,
        origin=grid.origin,
        local=layer.local,
        bypass=layer.phases,
    )
    return {"visible": seen.to(torch.uint8)}


def _run(attached: Attachment, case: Case, given: Tensors) -> Tensors:
    tokens, model = given[case["input"]][None, case["skip"] :], attached.model
    if len(case["chunks"]) == 1:
        logits = model(input_ids=tokens, use_cache=False).logits
    else:
        cache = empty()
        logits = torch.cat([model(input_ids=chunk, cache=cache, use_cache=True).logits for chunk in tokens.split(case["chunks"], dim=1)], dim=1)
    return {"logits": logits[0, -case["last"] :]}


# ---------------------------------------------------------------------------------------------------------------------- what no port may give


class _NoSummaries(reference.Compressor):
    """Sees exact tokens alone."""

    def visible(self, query_T: torch.Tensor, token_M: torch.Tensor, summaries: int) -> torch.Tensor:
        seen = super().visible(query_T, token_M, summaries)
        seen[:, :summaries] = False
        return seen


class _FullAttention(_NoSummaries):
    """Sees every token exactly."""

    def visible(self, query_T: torch.Tensor, token_M: torch.Tensor, summaries: int) -> torch.Tensor:
        return torch.cat([query_T.new_zeros(len(query_T), summaries, dtype=torch.bool), token_M[None, :] <= query_T[:, None]], dim=1)


class _ReversedPayload(reference.Compressor):
    """Weighs each window's tokens in reversed order."""

    def gates(self, h_BNWC: torch.Tensor, exists_NW: torch.Tensor, branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        logits, weights = super().gates(h_BNWC, exists_NW, branch)
        return logits, weights.flip(2)


WRONG: dict[str, tuple[type[reference.Compressor], str]] = {
    "full_attention": (_FullAttention, "full attention: the compressor does nothing"),
    "exact_only": (_NoSummaries, "local attention: no summary is seen"),
    "payload_reversed": (_ReversedPayload, "windows pooled in reversed order"),
}


@torch.inference_mode()
def wrong_answers(spec: dict[str, Any], model: Tensors, tensors: Tensors, given: Tensors) -> Tensors:
    """One-shot logits [T, vocabulary] of models that go wrong in a known way, in fp64, under ``anti.<what>.logits``."""
    wide = {name: x.double() for name, x in model.items()}
    (case,) = (case for case in cases(spec) if case["case"] == "oneshot")
    found = {}
    for name, (kind, _) in WRONG.items():
        if name == "payload_reversed" and not _weighs(spec):
            continue
        built = reference.Model(spec, wide, {key: x.double() for key, x in tensors.items()})
        norm = spec["norm"]["tensor"]
        built.compressors = [kind(spec, i, {k: x.double() for k, x in tensors.items()}, wide[norm.replace("{i}", str(i))]) for i in range(len(spec["layers"]))]
        found[f"anti.{name}.logits"] = reference.answer(case, built, given)["logits"].contiguous()
    return found


# ---------------------------------------------------------------------------------------------------------------------- write


def write(folder: Path, spec: dict[str, Any], attached: Attachment) -> None:
    """Compute the golden vectors of a bundle with our own code and write them to ``folder/golden``. Changes the attached model (to fp64) for good."""
    tensors, model = to_plain(attached), {name: x.detach().clone() for name, x in attached.model.state_dict().items()}
    wanted, given = cases(spec), inputs(spec)
    weights = {PLAIN: tensors, SHUFFLED: shuffled(tensors, spec)}
    unique = [case for case in wanted if "expected" not in case]
    found = answers(widen(attached), unique, given, weights)
    found |= wrong_answers(spec, model, tensors, given)
    golden = folder / FOLDER
    golden.mkdir()
    save_tensors(given, golden / "inputs.safetensors")
    levels = [level for level in LEVELS if any(case["level"] == level for case in wanted)]
    for level in LEVELS:
        save_tensors({name: x for name, x in found.items() if name.startswith(f"{level}.")}, golden / f"{level}.safetensors")
    if any(case["weights"] == SHUFFLED for case in wanted):
        save_tensors(weights[SHUFFLED], folder / SHUFFLED)
    apart = {name: float((x - found[ONESHOT]).abs().max()) for name, x in sorted(found.items()) if name.startswith("anti.")}
    # What does not differ at all proves nothing: a gate that was never trained is the same after a shuffle.
    away = [{"tensor": name, "what": _what(name), "from": ONESHOT, "minimum": far / 2} for name, far in apart.items() if far > 1e-9]
    (golden / "cases.json").write_text(dump({"levels": levels, "cases": wanted, "must_differ": away}), encoding="utf-8")


def _what(name: str) -> str:
    kind = name.split(".")[1]
    return WRONG[kind][1] if kind in WRONG else "gates moved on by one offset (or negated where all offsets share one)"
