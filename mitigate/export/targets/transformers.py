"""A folder that ``AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`` loads without this project.

The code in it is `modeling_summaries.py`: the compressor as in the bundle's `reference.py`, word for word, and the classes that hang it into
transformers' Qwen3. Decoding goes through a cache that holds what the compressed model remembers and no more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mitigate.config import TrialConfig
from mitigate.config_files import from_dict
from mitigate.export import bundle, describe
from mitigate.rows import Row
from mitigate.surgery import Attachment

MODULE, TEMPLATE = "modeling_summaries", "targets/modeling_summaries.txt"
PREFIX = "compressor."  # of the compressor's tensors in model.safetensors, after which dots become underscores
_START, _END, _HERE = "# ---- compressor ----\n", "# ---- model ----\n", "# ---- the compressor, as in reference.py ----\n"


def write(row: Row, attached: Attachment, to: Path) -> list[str]:
    """Write the folder; `bundle.into_folder` for what `to` may be. Returns lines to print."""
    bundle.into_folder(to, lambda folder: _fill(folder, row, attached))
    return [
        f"transformers: {to}",
        f'load it with AutoModelForCausalLM.from_pretrained("{to}", trust_remote_code=True): it runs {MODULE}.py from that folder, and needs no mitigate',
        "generation decodes through its own cache of summaries and exact tokens; rows of one length, no left padding, no rollback (assisted decoding)",
    ]


def code() -> str:
    """Text of `modeling_summaries.py`."""
    reference = bundle.resource(bundle.REFERENCE)
    shared = reference[reference.index(_START) + len(_START) : reference.index(_END)]
    return bundle.resource(TEMPLATE).replace(_HERE, shared)


def _fill(folder: Path, row: Row, attached: Attachment) -> None:
    model = attached.model
    weights: describe.Tensors = dict(model.state_dict())
    weights |= {PREFIX + name.replace(".", "_"): x for name, x in describe.to_plain(attached).items()}
    describe.save_tensors(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = describe.describe(from_dict(TrialConfig, row.config), row, attached, weights_sha256=bundle.sha256(folder / "model.safetensors"))
    attached.detach()
    shape = model.config.to_diff_dict()
    (folder / "config.json").write_text(describe.dump(_config(shape, described, str(model.dtype).removeprefix("torch."))), encoding="utf-8")
    generation: dict[str, Any] = json.loads(model.generation_config.to_json_string())
    (folder / "generation_config.json").write_text(describe.dump(generation), encoding="utf-8")
    (folder / f"{MODULE}.py").write_text(code(), encoding="utf-8")
    (folder / "compressor.json").write_text(describe.dump(described), encoding="utf-8")


def _config(shape: dict[str, Any], described: dict[str, Any], dtype: str) -> dict[str, Any]:
    kept = {name: described[name] for name in ("label", "base", "layers", "exact", "gate", "payload", "norm", "rope", "tensors")}
    return {
        **shape,
        "architectures": ["SummaryQwen3ForCausalLM"],
        "model_type": "qwen3_summaries",
        "dtype": dtype,
        "auto_map": {"AutoConfig": f"{MODULE}.SummaryQwen3Config", "AutoModelForCausalLM": f"{MODULE}.SummaryQwen3ForCausalLM"},
        "kv_compression": kept,
    }
