"""A trained window compressor and its model in plain PyTorch: read it to port the compressor, run it to check a machine.

    python reference.py BUNDLE OUTPUT [float64|float32]

runs every case of BUNDLE/golden/cases.json and writes what it computes to OUTPUT. It needs torch and safetensors, nothing else; SPEC.md has the formulas.
Shapes: B batch, T tokens, N summaries, W window, C hidden width, H query heads, G kv heads, D head dim, E gate channels (1 or D), M entries attended to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

Tensors = dict[str, torch.Tensor]


# ---- compressor ----
def widest(x: torch.Tensor) -> torch.Tensor:
    """fp32, or fp64 if x is: gates, norms and angles are computed in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = widest(x)
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rotate(x_BTGD: torch.Tensor, position_T: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE in the half style: dimension d turns together with d + D/2."""
    half = x_BTGD.shape[-1] // 2
    step = torch.arange(half, device=x_BTGD.device).to(widest(x_BTGD).dtype)
    angle = (position_T.to(step.dtype)[:, None] * theta ** (-step / half))[:, None]  # [T, 1, D/2]
    cos, sin, a, b = angle.cos().to(x_BTGD.dtype), angle.sin().to(x_BTGD.dtype), x_BTGD[..., :half], x_BTGD[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Compressor:
    """One layer's windows, visibility and summaries. `spec` is compressor.json, `tensors` is compressor.safetensors."""

    def __init__(self, spec: dict[str, Any], layer: int, tensors: Tensors, norm: torch.Tensor) -> None:
        grid, base = spec["layers"][layer], spec["base"]
        self.window, self.stride, self.origin, self.bypass = grid["window"], grid["stride"], grid["origin"], grid["bypass_phases"]
        self.local, self.shift = spec["exact"]["local_window"], grid["key_shift"]
        self.theta, self.eps, self.groups, self.dim = base["rope"]["theta"], base["norm_eps"], base["kv_heads"], base["head_dim"]
        self.norm, self.norm_tokens, self.tied = norm, spec["norm"]["place"] == "tokens", spec["payload"]["value"] == "key_summary"
        self.tensors = {name.removeprefix(f"layers.{layer}."): x for name, x in tensors.items() if name.startswith(f"layers.{layer}.")}

    def completed(self, length: Any) -> Any:
        """Windows that lie wholly within the first `length` tokens (an integer or a tensor of them)."""
        return torch.as_tensor((length - self.origin - self.window) // self.stride + 1).clamp(min=0)

    def exact_from(self, t: torch.Tensor) -> torch.Tensor:
        """First token of the exact interval of the query at t: the open tail and the last `local` tokens."""
        n = self.completed(t + 1)
        covered = torch.where(n > 0, self.origin + (n - 1) * self.stride + self.window, 0)
        return torch.minimum(t - self.local + 1, covered).clamp(min=0)

    def kept(self, token: torch.Tensor) -> torch.Tensor:
        """Tokens whose exact key and value stay for good, by phase."""
        return torch.isin((token - self.origin) % self.stride, torch.tensor(self.bypass, dtype=token.dtype, device=token.device))

    def visible(self, query_T: torch.Tensor, token_M: torch.Tensor, summaries: int) -> torch.Tensor:
        """What the query at each position sees of [summaries | exact tokens]: bool [T, summaries + M]."""
        t, i, j = query_T[:, None], token_M[None, :], torch.arange(summaries, device=query_T.device)[None, :]
        return torch.cat([j < self.completed(t + 1), (i <= t) & ((i >= self.exact_from(t)) | self.kept(i))], dim=1)

    def gates(self, h_BNWC: torch.Tensor, exists_NW: torch.Tensor, branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits s = Z_i h + b_i, minus infinity where the token does not exist, and weights softmax_i(s): [B, N, W, G, E]."""
        h, weight = widest(h_BNWC), self.tensors.get(f"{branch}.gate.weight", self.tensors.get("k.gate.weight"))
        if weight is None:  # uniform
            s = h.new_zeros(*h.shape[:3], 1, 1)
        else:
            s = torch.einsum("bnwc,wcx->bnwx", h, widest(weight).expand(self.window, -1, -1))
            bias = self.tensors.get(f"{branch}.gate.bias", self.tensors.get("k.gate.bias"))
            s = (s if bias is None else s + widest(bias)).unflatten(-1, (self.groups, -1))
        s = s.masked_fill(~exists_NW[None, :, :, None, None], float("-inf"))
        return s, s.softmax(dim=2)

    def summarise(self, rows: tuple[torch.Tensor, ...], row0: int, first: int, count: int) -> Tensors:
        """Windows first .. first+count-1 from hidden states, keys and values (as projected, before norm and RoPE) of the tokens from row0 on."""
        window_N, offset_W = (torch.arange(*ends, device=rows[0].device) for ends in ((first, first + count), (0, self.window)))
        token_NW = self.origin + self.stride * window_N[:, None] + offset_W[None, :]
        row_NW, exists_NW = (token_NW - row0).clamp(min=0), token_NW >= 0
        h_BNWC, out = rows[0][:, row_NW], {}
        for branch, projected, name in (("k", rows[1], "key"), ("v", rows[2], "value")):
            if branch == "v" and self.tied:
                break
            out[f"{name}_gate_logits"], out[f"{name}_gates"] = self.gates(h_BNWC, exists_NW, branch)
            maps = self.tensors.get(f"{branch}.payload.weight")
            u = projected[:, row_NW] if maps is None else torch.einsum("bnwc,wcf->bnwf", h_BNWC, maps).unflatten(-1, (self.groups, self.dim))
            u = rms_norm(u, self.norm, self.eps) if branch == "k" and self.norm_tokens else u
            out[f"pooled_{name}"] = (out[f"{name}_gates"] * widest(u)).sum(dim=2).to(u.dtype)
        key = out["pooled_key"] if self.norm_tokens else rms_norm(out["pooled_key"], self.norm, self.eps)
        out["key"] = rotate(key, (self.origin + self.stride * window_N + self.shift).clamp(min=0), self.theta)
        out["value"] = out["key"] if self.tied else out["pooled_value"]
        return out


def join(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)) if old else new


class State:
    """What one layer remembers between calls: summaries, exact tokens with their positions, hidden rows of open windows, and no more."""

    def __init__(self) -> None:
        self.length, self.row0, self.position = 0, 0, torch.zeros(0, dtype=torch.int64)
        self.rows: tuple[torch.Tensor, ...] = ()  # hidden states, raw keys and values of the tokens from row0 on
        self.summaries: tuple[torch.Tensor, ...] = ()  # keys and values [B, N, G, D]
        self.exact: tuple[torch.Tensor, ...] = ()  # rotated keys and values [B, M, G, D]

    def extend(self, c: Compressor, rows: tuple[torch.Tensor, ...], key_BTGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take in T tokens, their hidden states, raw keys and values, and rotated keys: keys and values [B, M, G, D] for them, and the mask [T, M]."""
        before, self.length = self.length, self.length + key_BTGD.shape[1]
        new = torch.arange(before, self.length, device=key_BTGD.device)
        self.rows, had, have = join(self.rows, rows), int(c.completed(before)), int(c.completed(self.length))
        made = c.summarise(self.rows, self.row0, had, have - had)
        self.summaries, self.exact = join(self.summaries, (made["key"], made["value"])), join(self.exact, (key_BTGD, rows[2]))
        self.position = torch.cat([self.position.to(new.device), new])
        keys, values = join(self.summaries, self.exact)
        mask = c.visible(new, self.position, have)
        stay = (self.position >= c.exact_from(new[-1] + 1)) | c.kept(self.position)  # what the next query may still see
        self.exact, self.position = tuple(x[:, stay] for x in self.exact), self.position[stay]
        open_from = min(max(c.origin + c.stride * have, 0), self.length)
        self.rows, self.row0 = tuple(x[:, open_from - self.row0 :] for x in self.rows), open_from
        return keys, values, mask


def attend(q_BTHD: torch.Tensor, k_BMGD: torch.Tensor, v_BMGD: torch.Tensor, mask_TM: torch.Tensor) -> torch.Tensor:
    """One softmax over all that is visible; H / G neighbouring query heads share a kv head. [B, T, H, D]."""
    repeat = q_BTHD.shape[2] // k_BMGD.shape[2]
    k, v = k_BMGD.repeat_interleave(repeat, dim=2), v_BMGD.repeat_interleave(repeat, dim=2)
    s_BHTM = torch.einsum("bthd,bmhd->bhtm", q_BTHD, k) * q_BTHD.shape[-1] ** -0.5
    return torch.einsum("bhtm,bmhd->bthd", s_BHTM.masked_fill(~mask_TM, float("-inf")).softmax(dim=-1), v)


# ---- model ----
class Model:
    """A Qwen3 decoder whose every layer attends through its compressor."""

    def __init__(self, spec: dict[str, Any], weights: Tensors, tensors: Tensors) -> None:
        self.base, self.w, self.eps = spec["base"], weights, spec["base"]["norm_eps"]
        name = spec["norm"]["tensor"]
        self.compressors = [Compressor(spec, i, tensors, weights[name.replace("{i}", str(i))]) for i in range(self.base["layers"])]

    def project(self, layer: int, x_BTC: torch.Tensor, name: str) -> torch.Tensor:
        return (x_BTC @ self.w[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, self.base["head_dim"]))

    def __call__(self, token_BT: torch.Tensor, states: list[State]) -> torch.Tensor:
        """Logits [B, T, vocabulary] of the next tokens of a sequence; `states`, one a layer, carry it from call to call."""
        x, position = self.w["model.embed_tokens.weight"][token_BT], states[0].length + torch.arange(token_BT.shape[1])
        for i, (c, state) in enumerate(zip(self.compressors, states, strict=True)):
            at = f"model.layers.{i}"
            h = rms_norm(x, self.w[f"{at}.input_layernorm.weight"], self.eps)
            q, k, v = (self.project(i, h, name) for name in "qkv")
            q, key = (rms_norm(y, self.w[f"{at}.self_attn.{n}_norm.weight"], self.eps) for y, n in ((q, "q"), (k, "k")))
            q, key = (rotate(y, position, self.base["rope"]["theta"]) for y in (q, key))
            x = x + attend(q, *state.extend(c, (h, k, v), key)).flatten(2) @ self.w[f"{at}.self_attn.o_proj.weight"].T
            h = rms_norm(x, self.w[f"{at}.post_attention_layernorm.weight"], self.eps)
            up = silu(h @ self.w[f"{at}.mlp.gate_proj.weight"].T) * (h @ self.w[f"{at}.mlp.up_proj.weight"].T)
            x = x + up @ self.w[f"{at}.mlp.down_proj.weight"].T
        return rms_norm(x, self.w["model.norm.weight"], self.eps) @ self.w["lm_head.weight"].T


def answer(case: dict[str, Any], model: Model, inputs: Tensors) -> Tensors:
    """What one case of cases.json asks for, by the tensors' short names."""
    if case["do"] == "visibility":
        c, t = model.compressors[case["layer"]], torch.arange(case["length"])
        return {"visible": c.visible(t, t, int(c.completed(case["length"]))).to(torch.uint8)}
    if case["do"] == "summaries":
        c, h = model.compressors[case["layer"]], inputs[case["input"]][None]
        k, v = model.project(case["layer"], h, "k"), model.project(case["layer"], h, "v")
        return {name: x[0] for name, x in c.summarise((h, k, v), 0, 0, int(c.completed(h.shape[1]))).items()}
    tokens, states = inputs[case["input"]][None, case["skip"] :], [State() for _ in model.compressors]
    logits = torch.cat([model(chunk, states) for chunk in tokens.split(case["chunks"], dim=1)], dim=1)
    return {"logits": logits[0, -case["last"] :]}


def main(bundle: Path, output: Path, dtype: torch.dtype) -> None:
    spec, cases = (json.loads((bundle / name).read_text(encoding="utf-8")) for name in ("compressor.json", "golden/cases.json"))
    trained, base, given = {case["weights"] for case in cases["cases"]}, "model.safetensors", "golden/inputs.safetensors"
    files = {n: {k: x.to(dtype) if x.is_floating_point() else x for k, x in load_file(bundle / n).items()} for n in {base, given, *trained}}
    models, found = {n: Model(spec, files[base], files[n]) for n in trained}, Tensors()
    for case in cases["cases"]:
        got = answer(case, models[case["weights"]], files[given])
        found |= {f"{case['level']}.{case['case']}.{name}": got[name].clone(memory_format=torch.contiguous_format) for name in case["outputs"]}
    for level in cases["levels"]:
        save_file({name: x for name, x in found.items() if name.startswith(f"{level}.")}, output / f"{level}.safetensors")


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, (sys.argv[3:] or ["float64"])[0]))
