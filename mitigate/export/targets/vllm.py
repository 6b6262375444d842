"""A vLLM plugin SKELETON with the per-layer KV spec filled in. It installs and registers; attention is left to be written, and says so.

vLLM's own compressor fixes the ratio to 4 or 128, the head dim, one KV head and where windows lie; anything else needs a plugin of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mitigate.config import TrialConfig
from mitigate.config_files import from_dict
from mitigate.export import bundle, describe
from mitigate.rows import Row
from mitigate.surgery import Attachment

PACKAGE = "mitigate_summaries"
PARTS = {
    "pyproject.toml": "pyproject",
    f"{PACKAGE}/__init__.py": "init",
    f"{PACKAGE}/kv_spec.py": "kv_spec",
    f"{PACKAGE}/model.py": "model",
    "README.md": "readme",
}


def write(row: Row, attached: Attachment, to: Path) -> list[str]:
    """Write the plugin's folder and the bundle inside it. Returns lines to print."""
    layers = kv_layers(from_dict(TrialConfig, row.config), row, attached)
    bundle.into_folder(to, lambda folder: _fill(folder, row, attached, layers))
    return [
        f"vllm: {to}",
        "a SKELETON: the plugin registers and knows each layer's KV bytes; its attention raises NotImplementedError until you write it",
        f"the bundle to hold it against is in {to / 'bundle'}",
    ]


def kv_layers(config: TrialConfig, row: Row, attached: Attachment) -> list[dict[str, Any]]:
    """Numbers of each layer's cache: the grid and bytes of one summary, one exact token, one open row, in the element size of the exported weights."""
    described = describe.describe(config, row, attached, weights_sha256="0" * 64)
    base, element = described["base"], described["cost"]["element_bytes"]
    entry = base["kv_heads"] * base["head_dim"] * element
    held = 1 if described["payload"]["value"] == "key_summary" else 2
    return [
        {
            **grid,
            "local_window": described["exact"]["local_window"],
            "kv_heads": base["kv_heads"],
            "head_dim": base["head_dim"],
            "element_bytes": element,
            "summary_bytes": held * entry,
            "exact_token_bytes": 2 * entry,
            "open_row_bytes": base["hidden"] * element,
            "bytes_per_token": held * entry / grid["stride"] + 2 * entry * len(grid["bypass_phases"]) / grid["stride"],
        }
        for grid in described["layers"]
    ]


def _fill(folder: Path, row: Row, attached: Attachment, layers: list[dict[str, Any]]) -> None:
    (folder / PACKAGE).mkdir()
    rows = "\n".join(f"    LayerSpec({', '.join(f'{name}={_literal(value)}' for name, value in layer.items())})," for layer in layers)
    for path, part in PARTS.items():
        text = bundle.resource(f"targets/vllm_{part}.txt").replace("@LABEL@", row.label).replace("@LAYERS@", rows)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "bundle").mkdir()
    bundle.write_parts(folder / "bundle", row, attached)


def _literal(value: Any) -> str:
    return f"({''.join(f'{item}, ' for item in value).strip()})" if isinstance(value, list) else repr(value)
