"""A port of an exported compressor to NumPy, written from its SPEC.md and compressor.json alone (section numbers are SPEC.md's).

    python port.py BUNDLE OUTPUT [float64|float32]
    mitigate verify BUNDLE --against OUTPUT

Two ways through a layer, as a serving system has them: `prefill` computes a whole prompt at once with masks; `Stream` takes one token at a time and pools
each window as its tokens come, with a running softmax, so that it holds no hidden states of earlier tokens at all.
Shapes: T tokens, N summaries, W window, C hidden width, H query heads, G kv heads, D head dim, E gate channels (1 or D).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Array = np.ndarray
DTYPES = ("float64", "float32")


def norm(x: Array, weight: Array, eps: float) -> Array:
    """4.1"""
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rope(x_TGD: Array, position_T: Array, theta: float) -> Array:
    """4.3: dims d and d + D/2 turn together."""
    half = x_TGD.shape[-1] // 2
    angle = position_T[:, None] * theta ** (-np.arange(half, dtype=x_TGD.dtype) / half)
    turned = (x_TGD[..., :half] + 1j * x_TGD[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1).astype(x_TGD.dtype)


def softmax(x: Array, axis: int) -> Array:
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


class Layer:
    """One layer's numbers and weights."""

    def __init__(self, spec: dict[str, Any], weights: dict[str, Array], tensors: dict[str, Array], index: int) -> None:
        if spec["schema_version"] != 3:
            raise SystemExit(f"port.py: compressor.json must have schema_version 3, got {spec['schema_version']}")
        if spec["payload"]["per_offset"] or spec["norm"]["place"] != "pooled":
            raise SystemExit("port.py: a payload map per offset and a norm before pooling are not ported")
        grid, self.base = spec["layers"][index], spec["base"]
        self.W, self.S, self.o, self.bypass = grid["window"], grid["stride"], grid["origin"], grid["bypass_phases"]
        self.L, self.shift, self.theta = spec["exact"]["local_window"], grid["key_shift"], self.base["rope"]["theta"]
        self.G, self.D, self.eps, self.scale = self.base["kv_heads"], self.base["head_dim"], self.base["norm_eps"], spec["attention"]["scale"]
        self.tied = spec["payload"]["value"] == "key_summary"
        self.w = {name.removeprefix(f"model.layers.{index}."): x for name, x in weights.items()}
        self.gate = {}
        for branch in "kv":
            source = branch if f"layers.{index}.{branch}.gate.weight" in tensors else "k"  # 2.4
            self.gate[branch] = tensors.get(f"layers.{index}.{source}.gate.weight"), tensors.get(f"layers.{index}.{source}.gate.bias")

    def project(self, h_TC: Array, name: str) -> Array:
        return (h_TC @ self.w[f"self_attn.{name}_proj.weight"].T).reshape(len(h_TC), -1, self.D)

    def count(self, length: int) -> int:
        """1.2"""
        return max(0, (length - self.o - self.W) // self.S + 1)

    def exact_from(self, t: int) -> int:
        """5.2 and 5.3"""
        n = self.count(t + 1)
        return max(0, min(t - self.L + 1, self.o + (n - 1) * self.S + self.W if n else 0))

    def stays(self, i: int) -> bool:
        return (i - self.o) % self.S in self.bypass

    def logit(self, h_C: Array, offset: int, branch: str) -> Array:
        """2.1: [G, E] of one token at one offset."""
        weight, bias = self.gate[branch]
        if weight is None:
            return np.zeros((1, 1), h_C.dtype)
        s = h_C @ weight[min(offset, len(weight) - 1)]
        return (s if bias is None else s + bias[offset]).reshape(self.G, -1)

    def finish(self, pooled_TGD: Array, window_T: Array) -> Array:
        """4.1 and 4.2"""
        position = np.maximum(0, self.o + self.S * window_T + self.shift)
        return rope(norm(pooled_TGD, self.w["self_attn.k_norm.weight"], self.eps), position, self.theta)

    def summaries(self, h_TC: Array, k_TGD: Array, v_TGD: Array) -> dict[str, Array]:
        """All complete windows at once; every intermediate that L0 asks for."""
        window_N = np.arange(self.count(len(h_TC)))
        token_NW = self.o + self.S * window_N[:, None] + np.arange(self.W)[None, :]  # 1.1
        exists, row = token_NW >= 0, np.maximum(token_NW, 0)
        out: dict[str, Array] = {}
        for branch, name, u in (("k", "key", k_TGD), ("v", "value", v_TGD))[: 1 if self.tied else 2]:
            weight, bias = self.gate[branch]
            if weight is None:
                s = np.zeros((*row.shape, 1, 1), h_TC.dtype)
            else:
                s = np.einsum("nwc,wcx->nwx", h_TC[row], np.broadcast_to(weight, (self.W, *weight.shape[1:])))
                s = (s if bias is None else s + bias).reshape(*row.shape, self.G, -1)
            s = np.where(exists[..., None, None], s, -np.inf)  # 2.3
            out[f"{name}_gate_logits"], out[f"{name}_gates"] = s, softmax(s, 1)
            out[f"pooled_{name}"] = (out[f"{name}_gates"] * u[row]).sum(1)  # 3.2
        out["key"] = self.finish(out["pooled_key"], window_N)
        out["value"] = out["key"] if self.tied else out["pooled_value"]  # 4.4
        return out

    def visible(self, length: int) -> Array:
        """5.1 to 5.3: [T, N + T]."""
        seen = np.zeros((length, self.count(length) + length), bool)
        for t in range(length):
            seen[t, : self.count(t + 1)] = True
            for i in range(t + 1):
                seen[t, self.count(length) + i] = i >= self.exact_from(t) or self.stays(i)
        return seen

    def attend(self, q_THD: Array, k_MGD: Array, v_MGD: Array, seen_TM: Array) -> Array:
        """6.1, [T, H * D]"""
        repeat = q_THD.shape[1] // self.G
        s_HTM = np.einsum("thd,mhd->htm", q_THD, k_MGD.repeat(repeat, 1)) * self.scale
        weights = softmax(np.where(seen_TM, s_HTM, -np.inf), -1)
        return np.einsum("htm,mhd->thd", weights, v_MGD.repeat(repeat, 1)).reshape(len(q_THD), -1)

    def prefill(self, h_TC: Array, q: Array, k: Array, v: Array, turned_k: Array) -> Array:
        made = self.summaries(h_TC, k, v)
        keys, values = np.concatenate([made["key"], turned_k]), np.concatenate([made["value"], v])
        return self.attend(q, keys, values, self.visible(len(h_TC)))


class Stream:
    """Section 7 for one layer and sequence, token by token."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.length = layer, 0
        self.open: dict[int, dict[str, tuple[Array, Array, Array]]] = {}  # window -> branch -> largest logit, sum of weights, weighted sum
        self.summaries: list[tuple[Array, Array]] = []
        self.exact: dict[int, tuple[Array, Array]] = {}

    def feed(self, h_C: Array, k_GD: Array, v_GD: Array) -> None:
        """One token into every window that it stands in; the window that it ends becomes a summary."""
        c, t = self.layer, self.length
        first, last = max(0, -(-(t - c.o - c.W + 1) // c.S)), (t - c.o) // c.S
        for j in range(first, last + 1):
            parts = self.open.setdefault(j, {})
            for branch, u in (("k", k_GD), ("v", v_GD))[: 1 if c.tied else 2]:
                s = c.logit(h_C, t - c.o - j * c.S, branch)
                top, total, pooled = parts.get(branch, (np.full_like(s, -np.inf), np.zeros_like(s), np.zeros_like(u)))
                new = np.maximum(top, s)
                old, now = np.exp(top - new), np.exp(s - new)
                parts[branch] = new, total * old + now, pooled * old + now * u
            if t == c.o + j * c.S + c.W - 1:
                del self.open[j]
                key = c.finish((parts["k"][2] / parts["k"][1])[None], np.array([j]))[0]
                self.summaries.append((key, key if c.tied else parts["v"][2] / parts["v"][1]))

    def step(self, h_C: Array, q_HD: Array, k_GD: Array, v_GD: Array, turned_GD: Array) -> Array:
        """Take in one token and attend from it."""
        c, t = self.layer, self.length
        self.feed(h_C, k_GD, v_GD)
        self.exact[t] = turned_GD, v_GD
        self.exact = {i: entry for i, entry in self.exact.items() if i >= c.exact_from(t) or c.stays(i)}
        self.length += 1
        keys, values = (np.stack(part) for part in zip(*self.summaries, *self.exact.values(), strict=True))
        return c.attend(q_HD[None], keys, values, np.ones((1, len(keys)), bool))[0]


class Model:
    def __init__(self, spec: dict[str, Any], weights: dict[str, Array], tensors: dict[str, Array]) -> None:
        self.w, self.eps = weights, spec["base"]["norm_eps"]
        self.layers = [Layer(spec, weights, tensors, index) for index in range(spec["base"]["layers"])]

    def __call__(self, tokens: Array, streams: list[Stream] | None = None) -> Array:
        """Logits [T, vocabulary]; of a whole prompt, or of the next tokens of the `streams`, one a layer."""
        x = self.w["model.embed_tokens.weight"][tokens]
        position = np.arange(len(tokens)) + (streams[0].length if streams else 0)
        for index, layer in enumerate(self.layers):
            w = layer.w
            h = norm(x, w["input_layernorm.weight"], self.eps)
            q, k, v = (layer.project(h, name) for name in "qkv")
            turned_q = rope(norm(q, w["self_attn.q_norm.weight"], self.eps), position, layer.theta)
            turned_k = rope(norm(k, w["self_attn.k_norm.weight"], self.eps), position, layer.theta)
            if streams:
                seen = np.stack([streams[index].step(*token) for token in zip(h, turned_q, k, v, turned_k, strict=True)])
            else:
                seen = layer.prefill(h, turned_q, k, v, turned_k)
            x = x + seen @ w["self_attn.o_proj.weight"].T
            h = norm(x, w["post_attention_layernorm.weight"], self.eps)
            gate = h @ w["mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return norm(x, self.w["model.norm.weight"], self.eps) @ self.w["lm_head.weight"].T


def answer(case: dict[str, Any], model: Model, given: dict[str, Array]) -> dict[str, Array]:
    """One case of golden/cases.json."""
    if case["do"] == "visibility":
        return {"visible": model.layers[case["layer"]].visible(case["length"]).astype(np.uint8)}
    if case["do"] == "summaries":
        layer, h = model.layers[case["layer"]], given[case["input"]]
        return layer.summaries(h, layer.project(h, "k"), layer.project(h, "v"))
    tokens = given[case["input"]][case["skip"] :]
    if len(case["chunks"]) == 1:
        logits = model(tokens)
    else:
        streams = [Stream(layer) for layer in model.layers]
        logits = np.concatenate([model(chunk, streams) for chunk in np.split(tokens, np.cumsum(case["chunks"])[:-1])])
    return {"logits": logits[-case["last"] :]}


def main(bundle: Path, output: Path, dtype: str = "float64") -> None:
    spec, listed = (json.loads((bundle / name).read_text(encoding="utf-8")) for name in ("compressor.json", "golden/cases.json"))

    def read(name: str) -> dict[str, Array]:
        return {key: x.astype(dtype) if x.dtype.kind == "f" else x for key, x in load_file(bundle / name).items()}

    weights, given = read("model.safetensors"), read("golden/inputs.safetensors")
    models = {name: Model(spec, weights, read(name)) for name in {case["weights"] for case in listed["cases"]}}
    found: dict[str, Array] = {}
    for case in listed["cases"]:
        got = answer(case, models[case["weights"]], given)
        found |= {f"{case['level']}.{case['case']}.{name}": np.ascontiguousarray(got[name]) for name in case["outputs"]}
    output.mkdir(parents=True, exist_ok=True)
    for level in listed["levels"]:
        save_file({name: x for name, x in found.items() if name.startswith(f"{level}.")}, output / f"{level}.safetensors")
    print(f"{output}: {len(found)} tensors")


def command(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3) or arguments[2:] not in ([], *([dtype] for dtype in DTYPES)):
        print(f"usage: python port.py BUNDLE OUTPUT [{'|'.join(DTYPES)}]", file=sys.stderr)
        return 2
    bundle, output = Path(arguments[0]), Path(arguments[1])
    try:
        main(bundle, output, *arguments[2:])
    except OSError as error:
        print(f"port.py: {f'{error.filename}: {error.strerror}' if error.filename else error}", file=sys.stderr)
        return 2
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        print(f"port.py: {bundle} is damaged, or no bundle: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
