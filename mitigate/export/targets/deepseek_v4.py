"""Config fields of a DeepSeek-V4 shaped model for a compressor with its windows: of the official code, transformers, vLLM and Megatron.

What those configs can say is one integer a layer, the compression ratio, and its meaning is fixed: two overlapping windows at ratio 4, none at 128.
The mapping is of geometry. It is no checkpoint: the rest of DeepSeek-V4's attention differs from this model's, and `DIFFERENCES` says where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mitigate import registry
from mitigate.config import ConfigError, TrialConfig
from mitigate.config_files import from_dict
from mitigate.export import bundle, describe
from mitigate.geometry import Grid
from mitigate.rows import Row
from mitigate.surgery import Attachment

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {(8, 4, -4): 4, (128, 128, 0): 128}  # what `compress_ratios` can say
CONSUMERS = ("reference", "transformers", "vllm", "megatron")
DIFFERENCES = (
    "gate weights: DeepSeek-V4 has one map a series (previous and current block), this compressor one Z_i per offset; only the bias is per offset there",
    "keys and values: one latent serves as both there, exact tokens included, and the attention's output is rotated back at the query's position",
    "RoPE: interleaved, on the last qk_rope_head_dim dims; here half style on all dims",
    "one learned sink logit per head joins the softmax there; here none",
    "CSA layers pick index_topk summaries with an indexer, whose weights this trial does not have; index_topk below is as many as the context has",
    "hyper-connections, grouped output projection and experts are the model's own and say nothing about the compressor",
)
CONTEXT = 4096  # tokens that index_topk covers


def write(row: Row, attached: Attachment, to: Path) -> list[str]:
    """Write one JSON file a consumer and a README. Returns lines to print.

    Raises:
        ConfigError: no consumer's config can express the variant; names every layer and field. Nothing is written.
    """
    config = from_dict(TrialConfig, row.config)
    fields, refused = express(config, attached)
    bundle.into_folder(to, lambda folder: _fill(folder, row, fields, refused))
    lines = [f"deepseek-v4: {to}, {', '.join(f'{name}.json' for name in fields)}"]
    lines += [f"not written: {name}.json, {why}" for name, why in refused.items()]
    return [*lines, "config fields only, no weights: README.md there lists what differs from the model that was trained"]


def express(config: TrialConfig, attached: Attachment) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Config fields by consumer, and why a consumer is left out.

    Raises:
        ConfigError: no consumer can express it.
    """
    shape = attached.model.config
    grids = registry.grids(config.variant, layers=shape.num_hidden_layers)
    wrong = [f"layer {i}: {text}" for i, grid in enumerate(grids) if (text := _bad_grid(grid))]
    wrong += _bad_fields(config, grids, shape, positions=not wrong)
    if wrong:
        raise ConfigError(f"cannot be written as deepseek_v4: {'; '.join(wrong)}. Use the bundle's reference.py")
    # From here on all layers have one grid: what differs was refused.
    ratios = [RATIOS.get((grid.window, grid.stride, grid.origin)) for grid in grids]
    fields: dict[str, dict[str, Any]] = {"transformers": _transformers(config, grids, shape)}
    refused: dict[str, str] = {}
    if all(ratio is not None for ratio in ratios):
        ours = _reference(config, ratios, grids[0].stride, shape)
        fields |= {"reference": ours, "vllm": ours}
        fields["megatron"] = {"csa_compress_ratios": ratios, "csa_window_size": config.variant.local_window}
    else:
        grid = next(grid for grid, ratio in zip(grids, ratios, strict=True) if ratio is None)
        why = f"compress_ratios cannot say W={grid.window} S={grid.stride} o={grid.origin}: 4 means W=8 o=-4 and 128 means W=128 o=0"
        refused = dict.fromkeys(("reference", "vllm", "megatron"), why)
    return {name: fields[name] for name in CONSUMERS if name in fields}, refused


def _bad_grid(grid: Grid) -> str:
    shape = (grid.window, grid.origin)
    if grid.stride >= 2 and shape in ((grid.stride, 0), (2 * grid.stride, -grid.stride)) and grid.window > 2:
        return ""
    return f"W={grid.window} S={grid.stride} o={grid.origin} (must be W=S o=0 or W=2S o=-S)"


def _bad_fields(config: TrialConfig, grids: list[Grid], shape: Any, *, positions: bool) -> list[str]:
    """Fields of the variant or the base that no consumer has a word for; `positions`: whether summaries' positions are worth a line."""
    variant = config.variant
    found = []
    if len({(grid.window, grid.stride) for grid in grids}) > 1:
        found.append(f"VariantConfig.coarse={variant.coarse} (must be none)")
    if len({grid.origin for grid in grids}) > 1:
        found.append(f"VariantConfig.stagger={variant.stagger} (must be none)")
    if registry.get("gate", variant.gate).function(head_dim=shape.head_dim).channels != shape.head_dim or shape.head_dim == 1:
        found.append(f"VariantConfig.gate={variant.gate} (must be one gate per channel: vector)")
    if variant.tie != "kv":
        found.append(f"VariantConfig.tie={variant.tie} (must be kv: one summary is key and value)")
    if variant.payload != "shared":
        found.append(f"VariantConfig.payload={variant.payload} (must be shared)")
    if any(registry.bypass_phases(variant, grid) for grid in grids):
        found.append(f"VariantConfig.bypass={variant.bypass} (must be none)")
    if variant.key_norm != "pooled":
        found.append(f"VariantConfig.key_norm={variant.key_norm} (must be pooled)")
    if positions and any(describe.key_shift(variant, grid) != -grid.origin for grid in grids):
        found.append(f"VariantConfig.rope_position={variant.rope_position} (must put summary j at token j S)")
    tail = max(grid.stride for grid in grids) - 1
    if variant.local_window < tail:
        found.append(
            f"VariantConfig.local_window={variant.local_window} (must be at least {tail}, the longest open tail: nothing is exact beside the sliding window)"
        )
    if shape.num_key_value_heads != 1:
        found.append(f"BaseConfig.kv_heads={shape.num_key_value_heads} (must be 1)")
    return found


def _shared(config: TrialConfig, grids_csa: bool, stride: int, shape: Any) -> dict[str, Any]:
    indexer = {"index_n_heads": 1, "index_head_dim": shape.head_dim, "index_topk": -(-CONTEXT // stride)} if grids_csa else {}
    return {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "sliding_window": config.variant.local_window,
        "rope_theta": float(shape.rope_parameters["rope_theta"]),
        "compress_rope_theta": float(shape.rope_parameters["rope_theta"]),
        "rms_norm_eps": shape.rms_norm_eps,
        **indexer,
    }


def _reference(config: TrialConfig, ratios: list[int | None], stride: int, shape: Any) -> dict[str, Any]:
    """The official code's and vLLM's fields: one ratio a layer."""
    return _shared(config, 4 in ratios, stride, shape) | {"compress_ratios": ratios, "qk_rope_head_dim": shape.head_dim, "rope_scaling": None}


def _transformers(config: TrialConfig, grids: list[Grid], shape: Any) -> dict[str, Any]:
    """transformers' fields: a type a layer and one rate a type."""
    kinds = [CSA if grid.window == 2 * grid.stride else HCA for grid in grids]
    rates = {CSA: 4, HCA: 128} | {kind: grid.stride for kind, grid in zip(kinds, grids, strict=True)}
    more = {"layer_types": kinds, "compress_rates": rates, "partial_rotary_factor": 1.0, "mlp_layer_types": ["moe"] * len(grids)}
    return _shared(config, CSA in kinds, grids[0].stride, shape) | more


def _fill(folder: Path, row: Row, fields: dict[str, dict[str, Any]], refused: dict[str, str]) -> None:
    for name, values in fields.items():
        (folder / f"{name}.json").write_text(describe.dump(values), encoding="utf-8")
    written = "\n".join(f"- `{name}.json`" for name in fields)
    left = "\n".join(f"- {name}: {why}" for name, why in refused.items()) or "- none"
    differences = "\n".join(f"- {text}" for text in DIFFERENCES)
    text = f"""# {row.label} as DeepSeek-V4 config fields

The fields that give a DeepSeek-V4 shaped model this compressor's windows. They are to be merged into a whole config, and are no checkpoint: only a model
built on that backbone can be trained into these windows.

## Written

{written}

## Not expressible

{left}

## What differs from the model that was trained

{differences}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
