"""The schema of a result. A Row is a trial's only output; `results/README.md` gives every column's meaning and unit."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 2
PROTOCOLS = ("outer", "in_sequence")


_DISTRIBUTIONS = ("mitigate", "torch", "transformers", "numpy", "optuna", "ray", "triton")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of what is installed that a result may depend on; imports none of it."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Interval(_Record):
    """A point estimate with an interval: 95 %, clustered by prompt, for accuracies; quartiles over repeats for throughput."""

    value: float
    low: float
    high: float


class ProtocolScore(_Record):
    """One phase sweep under one padding protocol. Accuracies are fractions in [0, 1]; lists are indexed by residue."""

    protocol: Literal["outer", "in_sequence"]
    period: int
    clusters: int  # independent prompts
    n: list[int]  # scored queries per residue
    accuracy: list[float]
    accuracy_low: list[float]
    accuracy_high: list[float]
    gold_probability: list[float]
    nll: list[float]  # of the right name, nats
    mean: Interval
    a_min: Interval
    a_min_cross_fitted: float
    gap: Interval
    spread: Interval
    worst_residue: int
    relative_gap: float | None  # gap / mean; None when the mean is 0
    target_mean: list[float]  # of the queried record's position over examples, tokens; equal at all residues as far as integers allow
    target_sd: list[float]  # likewise
    distractor_lockstep: float  # 1: distractor phases move with the target's; 0: independent on average
    prompts_sha256: str


class Period(_Record):
    """Outcome of the search for a period in the accuracy curves of all protocols together (`mitigate.spectrum`)."""

    status: Literal["detected", "undecided", "none"]
    period: int | None  # set if detected
    p_value: float  # of the best candidate, corrected for the search
    searched: list[int]
    reason: str


class Transition(_Record):
    """Accuracy against the distance from a record to its query, at each residue of the record (`mitigate.tasks.transition`)."""

    distances: list[int]  # tokens from the record's last token to the position from which its name is predicted
    period: int
    prompts: int  # logical prompts behind each number
    seed: int  # of the prompts
    accuracy: list[list[float]]  # by distance, then residue
    gold_probability: list[list[float]]


class Cost(_Record):
    """KV bytes (closed form and counted), memory while decoding, and throughput (measured, interleaved with full attention)."""

    kv_bytes_per_token: float  # limit of a long context, all layers
    kv_kept: float  # the same as a fraction of full attention
    kv_constant_bytes: float  # per sequence: open tail, local window, open-window state at `context` tokens
    context: int  # tokens
    batch: int  # sequences
    kv_bytes_at_context: int  # closed form, per sequence
    kv_bytes_counted: int  # from the tensors a real cache holds, per sequence
    decode_tokens_per_s: Interval  # median and quartiles over repeats
    decode_tokens_per_s_full: Interval
    throughput_ratio: Interval  # variant over full attention, same process, interleaved
    # None in rows from before these were measured.
    prefill_tokens_per_s: float | None = None  # median over a few rounds
    prefill_tokens_per_s_full: float | None = None
    prefill_ratio: float | None = None  # variant over full attention, same process, interleaved
    decode_peak_bytes: int | None = None  # most bytes of tensors alive at once in a decode step, whole batch, without the weights
    decode_peak_bytes_full: int | None = None


class Error(_Record):
    """Why a trial has no metrics."""

    kind: str
    message: str
    traceback: str


class Row(_Record):
    """Everything a trial has to say.

    `status` is "ok" (metrics set, and cost but for a model that is only re-scored), "stopped" (at a rung of a search: metrics of a shorter fine-tune and a
    smaller sweep, no cost) or "infeasible" (error set).
    """

    schema_version: int = SCHEMA_VERSION
    status: Literal["ok", "stopped", "infeasible"]
    label: str  # preset name, or a short description of the variant
    trial: int | None = None  # number in the study; None outside a search
    anchor: bool = False
    config: dict[str, Any]  # canonical TrialConfig, or EvaluationConfig of a model scored as it stands
    config_sha256: str
    base_sha256: str | None = None
    seed: int
    versions: dict[str, str]
    device: str
    backend: str  # kernels that really ran
    rung: int | None = None  # of a search with rungs: the last one scored, from 0; None where there are none
    updates: int = 0
    tokens: int = 0  # fine-tuning tokens
    final_loss: float | None = None
    wall_s: float = 0.0
    base_s: float = 0.0  # loading the base, or training it
    train_s: float = 0.0
    score_s: float = 0.0
    cost_s: float = 0.0
    mean_accuracy: float | None = None  # average over protocols
    a_min: float | None = None  # lower of the protocols; a_min_low is the lower of their lower ends
    a_min_low: float | None = None
    a_min_high: float | None = None
    gap: float | None = None  # larger of the protocols, with its interval
    gap_low: float | None = None
    gap_high: float | None = None
    scores: list[ProtocolScore] = []
    curve: Period | None = None  # None below four residues
    cost: Cost | None = None
    error: Error | None = None

    def score(self, protocol: str) -> ProtocolScore:
        """The sweep under `protocol`; KeyError names what there is."""
        for score in self.scores:
            if score.protocol == protocol:
                return score
        raise KeyError(f"Row has no sweep under {protocol!r}; it has {[s.protocol for s in self.scores]}")

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Row:
        return cls.model_validate_json(text)

    def to_record(self) -> dict[str, Any]:
        """One flat table record: nested fields become dotted columns, lists stay lists."""
        record: dict[str, Any] = {}
        dumped = self.model_dump(mode="json")
        scores = {s["protocol"]: s for s in dumped.pop("scores")}
        _flatten("", dumped, record)
        for protocol, score in scores.items():
            _flatten(f"{protocol}.", score, record)
        return record


def worst_of(scores: list[ProtocolScore]) -> dict[str, Any]:
    """The Row's scores over protocols: the average mean, the lower A_min, the larger gap, each with its interval."""
    worst, widest = min(scores, key=lambda score: score.a_min.value), max(scores, key=lambda score: score.gap.value)
    return {
        "mean_accuracy": sum(score.mean.value for score in scores) / len(scores),
        "a_min": worst.a_min.value,
        "a_min_low": min(score.a_min.low for score in scores),  # whichever protocol is the lower one
        "a_min_high": worst.a_min.high,
        "gap": widest.gap.value,
        "gap_low": widest.gap.low,
        "gap_high": widest.gap.high,
    }


def _flatten(prefix: str, value: dict[str, Any], into: dict[str, Any]) -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            _flatten(f"{prefix}{key}.", item, into)
        else:
            into[f"{prefix}{key}"] = item
