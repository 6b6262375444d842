"""What became of each scored query of a trial, one bit each: what a paired comparison of two trials needs.

A trial of 192 prompts with 16 queries at 8 residues takes 30 kB. Shapes: E logical examples (a query of a prompt), P residues, R likewise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mitigate.config import ConfigError

OUTCOMES_FILE = "outcomes.safetensors"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """The sweep of one trial under one padding protocol.

    Attributes:
        correct_ER: bool [E, P], whether the query was answered, by logical example and residue of its target.
        cluster_E: int32 [E], prompt of each example.
        prompts_sha256: digest of the prompts' tokens; equal for trials scored on the same examples.
    """

    correct_ER: npt.NDArray[np.bool_]
    cluster_E: npt.NDArray[np.int32]
    prompts_sha256: str


def pack(by_protocol: Mapping[str, Answers]) -> bytes:
    """The content of an outcomes file: bits packed along residues then examples, most significant first."""
    tensors, about = dict[str, npt.NDArray[np.uint8 | np.int32]](), {}
    for protocol, answers in by_protocol.items():
        tensors[f"{protocol}.correct_bits"] = np.packbits(np.ascontiguousarray(answers.correct_ER, dtype=bool))
        tensors[f"{protocol}.cluster"] = np.ascontiguousarray(answers.cluster_E, dtype=np.int32)
        about[protocol] = {"shape": list(answers.correct_ER.shape), "prompts_sha256": answers.prompts_sha256}
    return save(tensors, metadata={"format": str(FORMAT), "sweeps": json.dumps(about, sort_keys=True)})


def read(path: Path) -> dict[str, Answers]:
    """The sweeps of an outcomes file, by protocol.

    Raises:
        ConfigError: the file is no outcomes file of this format, or damaged. FileNotFoundError: there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != str(FORMAT):
                raise ConfigError(f"{path} has outcomes format {metadata.get('format')!r}; this version of mitigate reads {FORMAT!r}")
            about = json.loads(metadata["sweeps"])
            return {name: _answers(file.get_tensor(f"{name}.correct_bits"), file.get_tensor(f"{name}.cluster"), sweep) for name, sweep in about.items()}
    except ConfigError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def _answers(bits: npt.NDArray[np.uint8], cluster_E: npt.NDArray[np.int32], about: dict[str, object]) -> Answers:
    examples, residues = (int(size) for size in about["shape"])  # type: ignore[attr-defined]
    if len(bits) != -(-examples * residues // 8) or cluster_E.shape != (examples,):
        raise ValueError(f"{examples} examples at {residues} residues do not fit {len(bits)} bytes and {len(cluster_E)} clusters")
    correct = np.unpackbits(bits, count=examples * residues).astype(bool).reshape(examples, residues)
    return Answers(correct_ER=correct, cluster_E=cluster_E, prompts_sha256=str(about["prompts_sha256"]))
