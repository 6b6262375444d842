"""What `compressor.json` and `compressor.safetensors` hold: every convention of a trained compressor as plain data, and its weights under plain keys."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import torch
from safetensors.torch import save

from mitigate import cost, registry
from mitigate.compressor import Compressor
from mitigate.config import ConfigError, TrialConfig, VariantConfig, to_dict
from mitigate.geometry import Grid, period
from mitigate.rows import Row
from mitigate.surgery import Attachment
from mitigate.tasks import retrieval

SCHEMA, SCHEMA_VERSION = "mitigate-compressor", 3
SCHEMA_FILE = "compressor.schema.json"
# Largest difference to the golden value, relative to the largest golden magnitude of the tensor or 1; L1 is exact. Measured with reference.py over all
# presets: at most 3e-15 in fp64, 2e-6 (L0) and 6e-6 (L2) in fp32; other orders of summation and other processors need room above that.
TOLERANCES = {"float64": {"L0": 1e-10, "L2": 1e-9, "anti": 1e-9}, "float32": {"L0": 2e-5, "L2": 1e-4, "anti": 1e-4}}
SHIFT_TEXT = {"last_stride": "window - stride", "window_start": "0", "window_end": "window - 1"}

Tensors = dict[str, torch.Tensor]


@cache
def schema() -> dict[str, Any]:
    """The published JSON Schema of `compressor.json`."""
    found: dict[str, Any] = json.loads(resources.files("mitigate.export").joinpath(SCHEMA_FILE).read_text(encoding="utf-8"))
    return found


def check_schema(data: Any, where: str = "compressor.json") -> None:
    """ConfigError with one line that names the field, the bound and the value, unless `data` follows the schema."""
    if isinstance(data, dict) and data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{where}: schema_version must be {SCHEMA_VERSION}, got {data.get('schema_version')!r}; export the trial again with this version")
    errors = list(jsonschema.Draft202012Validator(schema()).iter_errors(data))
    if errors:
        first = jsonschema.exceptions.best_match(errors)
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first.absolute_path).lstrip(".")
        raise ConfigError(f"{where}: {path or 'the file'}: {' '.join(first.message.split())[:200]}")


def dump(data: dict[str, Any]) -> str:
    """Readable JSON: sorted keys, lists of numbers on one line, no NaN."""
    text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False)
    return re.sub(r"\[\n[\s\d.,e+-]+\]", lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), text) + "\n"  # no string holds a newline


def save_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that others may read (the library's own writer leaves it to its owner alone)."""
    path.write_bytes(save({name: x.detach().contiguous() for name, x in tensors.items()}, metadata))


def key_shift(variant: VariantConfig, grid: Grid) -> int:
    """Tokens from the start of a layer's window to the position that its key is rotated to."""
    return {"last_stride": grid.window - grid.stride, "window_start": 0, "window_end": grid.window - 1}[variant.rope_position]


def describe(config: TrialConfig, row: Row, attached: Attachment, *, weights_sha256: str) -> dict[str, Any]:
    """What `compressor.json` holds.

    Args:
        attached: the trained model with its compressor; its shape and tensors are described.
        weights_sha256: of `model.safetensors`.
    """
    variant, shape = config.variant, attached.model.config
    gate = registry.get("gate", variant.gate).function(head_dim=shape.head_dim)
    tie = registry.get("tie", variant.tie).function()
    grids = registry.grids(variant, layers=shape.num_hidden_layers)
    heads = shape.num_attention_heads // shape.num_key_value_heads
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "label": row.label,
        "base": {
            "architecture": type(attached.model).__name__,
            "layers": shape.num_hidden_layers,
            "hidden": shape.hidden_size,
            "intermediate": shape.intermediate_size,
            "vocabulary": shape.vocab_size,
            "heads": shape.num_attention_heads,
            "kv_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "kv_head_of_query_head": [head // heads for head in range(shape.num_attention_heads)],
            "norm_eps": shape.rms_norm_eps,
            "rope": {"theta": float(shape.rope_parameters["rope_theta"]), "style": "half", "dims": shape.head_dim, "scaling": "none"},
            "weights": {"kind": "full", "file": "model.safetensors", "sha256": weights_sha256},
            "trained_from_sha256": row.base_sha256,
        },
        "layers": [_layer(variant, grid) for grid in grids],
        "period": period(grid.stride for grid in grids),
        "first_window": "softmax over the offsets that exist (token >= 0)",
        "exact": {"open_tail": True, "local_window": variant.local_window, "exact_and_in_a_summary_at_once": True},
        "gate": {
            "input": "the hidden states that the layer's attention receives: after the input norm, before any projection, no RoPE",
            "kind": "softmax" if gate.channels else "uniform",
            "granularity": "channel" if gate.channels > 1 else "kv_head",
            "per_offset": bool(gate.channels and gate.per_offset),
            "bias": bool(gate.channels and gate.biased),
            "shared_by_key_and_value": tie.gates == 1 or not gate.channels,
            "softmax": {"axis": "offset", "dtype": "float32 or wider", "temperature": 1.0},
            "depends_on": "content and offset" if gate.per_offset else "content" if gate.channels else "nothing",
        },
        "payload": {
            "source": "a map per offset of the gate's input" if variant.payload == "per_offset" else "the layer's own key and value projection",
            "per_offset": variant.payload == "per_offset",
            "rope": "pooled before RoPE",
            "value": "key_summary" if tie.held == 1 else "own",
        },
        "norm": {"kind": "rms", "eps": shape.rms_norm_eps, "place": variant.key_norm, "tensor": "model.layers.{i}.self_attn.k_norm.weight", "on": "key only"},
        "rope": {
            "when": "after pooling and norm",
            "position": f"max(0, origin + j * stride + {SHIFT_TEXT[variant.rope_position]})",
            "inverse_rotation_of_output": False,
        },
        "visibility": {
            "summary": "origin + j * stride + window - 1 <= t",
            "exact": "i <= t and (i >= min(t - local_window + 1, covered(t)) or (i - origin) mod stride in bypass_phases)",
            "covered": "origin + (n - 1) * stride + window if n > 0 else 0, with n the number of summaries visible at t",
            "strict": False,
        },
        "attention": {"softmax": "one, over summaries and exact tokens together", "scale": shape.head_dim**-0.5, "sink": False},
        "state": _state(variant, attached, grids, held=tie.held),
        "cost": {
            "kv_bytes_per_token": cost.bytes_per_token(variant, cost.shape_of(attached.model)),
            "kv_kept": registry.kept_fraction(variant, layers=len(grids)),
            "element_bytes": cost.shape_of(attached.model).element,
        },
        "phase": {"definition": "(t - origin) mod stride", "tokens_before_the_user": _tokens_before(config)},
        "support": {
            "batching": "supported: rows of one length",
            "right_padding": "supported without a cache",
            "left_padding": "refused",
            "packing": "refused",
            "rollback": "refused",
            "prefix_reuse": "supported: copy the whole state; a state cut at another length is refused",
        },
        "tensors": {name: {"shape": list(x.shape), "layout": _layout(name)} for name, x in sorted(to_plain(attached).items())},
        "tolerances": TOLERANCES,
        "variant": to_dict(variant),
        "trial": to_dict(config),
    }


def _layer(variant: VariantConfig, grid: Grid) -> dict[str, Any]:
    """A layer's own numbers: layers of one model may have different windows."""
    return {
        "window": grid.window,
        "stride": grid.stride,
        "origin": grid.origin,
        "bypass_phases": list(registry.bypass_phases(variant, grid)),
        "key_shift": key_shift(variant, grid),
    }


def _tokens_before(config: TrialConfig) -> list[int]:
    """Token ids that every prompt of the trial's task begins with."""
    return [retrieval.BOS]


def _layout(name: str) -> str:
    kind = name.split(".", 3)[3]
    return {
        "gate.weight": "[offset (or 1 for all), hidden, kv head * gate channel]; logit = hidden @ weight[offset]",
        "gate.bias": "[offset, kv head * gate channel]",
        "payload.weight": "[offset, hidden, kv head * head dim]; payload = hidden @ weight[offset]",
    }[kind]


def _state(variant: VariantConfig, attached: Attachment, grids: list[Grid], *, held: int) -> list[dict[str, Any]]:
    """Each tensor that a layer holds between calls, for one sequence of t tokens."""
    shape = cost.shape_of(attached.model)
    heads, hidden = f"{shape.kv_heads} kv heads x {shape.head_dim}", shape.hidden
    branches = "key; it serves as the value" if held == 1 else "key and value"
    least, most = min(grid.window for grid in grids) - 1, max(grid.window for grid in grids) - 1
    rows = str(most) if least == most else f"the layer's window - 1 ({least} to {most})"
    entries: list[dict[str, Any]] = [
        {"name": "summaries", "shape": f"n(t) x {heads}, {branches}", "bytes": f"{held} * {shape.entry} * n(t)"},
        {"name": "exact tokens", "shape": f"(t - first exact) x {heads}, key and value", "bytes": f"2 * {shape.entry} * (t - first exact)"},
        {
            "name": "rows of open windows",
            "shape": f"at most {rows} x {hidden} hidden states",
            "bytes": f"{hidden * shape.element} * rows",
        },
    ]
    if any(registry.bypass_phases(variant, grid) for grid in grids):
        shape_text = f"bypassed tokens before first exact x {heads}, key and value"
        entries.append({"name": "bypassed tokens", "shape": shape_text, "bytes": f"2 * {shape.entry} * tokens"})
    return [{**entry, "dtype": "the model's", "initial": "empty"} for entry in entries]


def to_plain(attached: Attachment) -> Tensors:
    """The compressors' parameters under the bundle's keys: ``layers.{i}.{k|v}.{gate.weight, gate.bias, payload.weight}``, fp32, contiguous.

    Branches that share a gate have it once, under ``k``; a uniform gate has none; payload maps are there only where each offset has its own.
    """
    found: Tensors = {}
    for layer, compressor in enumerate(attached.compressors):
        assert isinstance(compressor, Compressor)
        parameters = dict(compressor.named_parameters())
        for name, plain in (("gate_weight", "gate.weight"), ("gate_bias", "gate.bias")):
            if name in parameters:
                branches = parameters[name].unflatten(-1, (compressor.tie.gates, -1)).unbind(-2)
                found |= {f"layers.{layer}.{branch}.{plain}": x for branch, x in zip("kv", branches, strict=False)}
        for name, branch in (("key_maps", "k"), ("value_maps", "v")):
            if name in parameters:
                found[f"layers.{layer}.{branch}.payload.weight"] = parameters[name]
    return {name: x.detach().to(torch.float32).contiguous().clone() for name, x in found.items()}


@torch.no_grad()
def from_plain(attached: Attachment, tensors: Tensors) -> None:
    """Load tensors that `to_plain` gave into an attached model's compressors.

    Raises:
        ConfigError: a tensor is missing, unexpected, or of another shape; the message names it.
    """
    expected = to_plain(attached)
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise ConfigError(f"compressor.safetensors: tensor {name} is missing")
        if name not in expected:
            raise ConfigError(f"compressor.safetensors: tensor {name} has no place in this variant")
        if tensors[name].shape != expected[name].shape:
            raise ConfigError(f"compressor.safetensors: tensor {name} must be {list(expected[name].shape)}, got {list(tensors[name].shape)}")
    for layer, compressor in enumerate(attached.compressors):
        for name, parameter in compressor.named_parameters():
            kind = {"gate_weight": "gate.weight", "gate_bias": "gate.bias", "key_maps": "payload.weight", "value_maps": "payload.weight"}[name]
            branches = {"key_maps": "k", "value_maps": "v"}.get(name, "kv")
            parts = [tensors[f"layers.{layer}.{b}.{kind}"] for b in branches if f"layers.{layer}.{b}.{kind}" in tensors]
            parameter.copy_(torch.cat(parts, dim=-1))
