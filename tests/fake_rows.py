"""Synthetic Rows that look like real ones: phase curves that dip every stride, intervals of a believable width, the odd failure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mitigate.config import TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.config_files import from_dict
from mitigate.outcomes import OUTCOMES_FILE, Answers, pack
from mitigate.rows import PROTOCOLS, Cost, Error, Interval, Period, ProtocolScore, Row

PROMPTS, QUERIES, FULL_BYTES = 96, 16, 512.0
KNOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"compress": False}),
    ("w8s8", {}),
    ("w8s4", {"stride": 4}),
    ("w16s8", {"window": 16}),
    ("w12s8", {"window": 12}),
    ("w8s8-stagger", {"stagger": "half"}),
    ("w8s8-coverage", {"coverage": "entropy", "coverage_weight": 1.0}),
    ("w8s8-bypass-last", {"bypass": "last"}),
    ("w12s12", {"window": 12, "stride": 12}),
    ("w12s6 stagger half vector gate", {"window": 12, "stride": 6, "stagger": "half", "gate": "vector"}),
)


def fake_rows(n: int, seed: int = 0, protocols: Sequence[str] = PROTOCOLS, infeasible: float = 0.1) -> list[Row]:
    """`n` rows: the anchors, a few known variants, then random ones of which a fraction is `infeasible`."""
    rng = np.random.default_rng(seed)
    rows = []
    for trial in range(n):
        label, changes = KNOWN[trial] if trial < len(KNOWN) else random_variant(rng)
        variant = from_dict(VariantConfig, changes)
        failed = trial >= 2 and rng.random() < infeasible
        rows.append(fake_failure(trial, label, variant) if failed else fake_row(trial, label, variant, rng, protocols, anchor=trial < 2))
    return rows


def random_variant(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    """A label and the fields of a random point of a plausible search space."""
    stride = int(rng.choice([4, 6, 8, 12, 24]))
    window = stride * int(rng.choice([1, 2])) if rng.random() < 0.7 else stride + stride // 2
    stagger, bypass, gate = (str(rng.choice(options)) for options in (["none", "half"], ["none", "none", "last", "first"], ["scalar", "vector"]))
    words = [f"w{window}s{stride}", *(f"stagger {stagger}" for _ in range(stagger != "none")), *(f"bypass {bypass}" for _ in range(bypass != "none"))]
    return " ".join([*words, *(["vector gate"] if gate == "vector" else [])]), {
        "window": window,
        "stride": stride,
        "stagger": stagger,
        "bypass": bypass,
        "gate": gate,
    }


def trial_config(variant: VariantConfig, protocols: Sequence[str] = PROTOCOLS) -> TrialConfig:
    """The default trial around a variant."""
    return from_dict(TrialConfig, {"variant": to_dict(variant), "score": {"protocols": list(protocols)}})


def common(trial: int | None, label: str, config: TrialConfig) -> dict[str, Any]:
    """The fields that every row has."""
    return {
        "label": label,
        "trial": trial,
        "config": to_dict(config),
        "config_sha256": content_hash(config),
        "base_sha256": hashlib.sha256(b"base").hexdigest(),
        "seed": config.seed,
        "versions": {"mitigate": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"},
        "device": "cpu (2 cores)",
        "backend": "reference",
    }


def fake_failure(trial: int, label: str, variant: VariantConfig) -> Row:
    """An infeasible row whose message holds what HTML must escape."""
    error = Error(kind="FloatingPointError", message="loss is <nan> after 31 updates & never came back", traceback="Traceback: …\nFloatingPointError")
    return Row(status="infeasible", error=error, wall_s=4.2, **common(trial, label, trial_config(variant)))


def fake_row(
    trial: int | None,
    label: str,
    variant: VariantConfig,
    rng: np.random.Generator,
    protocols: Sequence[str] = PROTOCOLS,
    anchor: bool = False,
) -> Row:
    """A finished row of a variant."""
    scores = [fake_score(protocol, variant, rng) for protocol in protocols]
    worst = min(scores, key=lambda score: score.a_min.value)
    return Row(
        status="ok",
        anchor=anchor,
        updates=600,
        tokens=2_100_000,
        final_loss=float(rng.uniform(0.5, 2.0)),
        wall_s=66.0,
        train_s=41.0,
        score_s=21.0,
        cost_s=4.0,
        mean_accuracy=float(np.mean([score.mean.value for score in scores])),
        a_min=worst.a_min.value,
        a_min_low=min(s.a_min.low for s in scores),
        a_min_high=worst.a_min.high,
        gap=max(score.gap.value for score in scores),
        scores=scores,
        curve=fake_period(variant, scores),
        cost=fake_cost(variant, rng),
        **common(trial, label, trial_config(variant, protocols)),
    )


def profile(protocol: str, variant: VariantConfig, rng: np.random.Generator, period: int) -> np.ndarray:
    """[P] true accuracy by residue: a few good phases per stride, the others at a floor; stagger and wide windows flatten, bypass lifts."""
    if not variant.compress:
        return np.ones(period)
    floor = (0.29 if protocol == "outer" else 0.33) * (8 / variant.stride) ** 0.45
    height = 0.6 * (8 / variant.stride) ** 0.2
    phase = (np.arange(period) - variant.origin) % variant.stride
    good = np.exp(-0.5 * (((phase - rng.integers(variant.stride) + variant.stride / 2) % variant.stride - variant.stride / 2) / (variant.stride / 6)) ** 2)
    flat = 0.15 if variant.stagger != "none" else 0.75 ** ((variant.window - variant.stride) / 2)
    level = floor + height * (flat * good + (1 - flat) * 0.32) + (0.14 if variant.bypass != "none" else 0.0) + rng.normal(0, 0.02)
    return np.asarray(np.clip(level, 0.05, 0.995))


def fake_score(protocol: str, variant: VariantConfig, rng: np.random.Generator, period: int = 24) -> ProtocolScore:
    """One sweep with binomial noise and intervals of a design effect of 2."""
    n = rng.integers(1300, 1400, period)
    accuracy = rng.binomial(n, profile(protocol, variant, rng, period)) / n
    half = 1.96 * np.sqrt(2 * np.maximum(accuracy * (1 - accuracy), 1e-6) / n)
    worst, mean = int(accuracy.argmin()), float(accuracy.mean())
    gap = float(np.ptp(accuracy))
    return ProtocolScore.model_validate(
        {
            "protocol": protocol,
            "period": period,
            "clusters": PROMPTS,
            "n": n.tolist(),
            "accuracy": accuracy.tolist(),
            "accuracy_low": np.clip(accuracy - half, 0, 1).tolist(),
            "accuracy_high": np.clip(accuracy + half, 0, 1).tolist(),
            "gold_probability": (accuracy * 0.93).tolist(),
            "mean": around(mean, 0.013 * min(1.0, 4 * (1 - mean))),
            "a_min": around(float(accuracy[worst]), float(half[worst])),
            "a_min_cross_fitted": float(min(1.0, accuracy[worst] + 0.006)),
            "gap": around(gap, 0.02),
            "spread": around(float(accuracy.std()), 0.01),
            "worst_residue": worst,
            "relative_gap": gap / mean,
            "nll": (-np.log(np.clip(accuracy * 0.93, 1e-3, 1))).tolist(),
            "target_mean": [64.5] * period,
            "target_sd": [21.0] * period,
            "distractor_lockstep": 1.0 if protocol == "outer" else 0.29,
            "prompts_sha256": hashlib.sha256(protocol.encode()).hexdigest(),
        }
    )


def fake_period(variant: VariantConfig, scores: list[ProtocolScore]) -> Period:
    """The stride where the curve is not flat."""
    found = variant.stride if variant.compress and max(score.gap.value for score in scores) > 0.1 else None
    status = "detected" if found else "none"
    return Period(status=status, period=found, p_value=0.0002 if found else 0.6, searched=[2, 3, 4, 6, 8, 12], reason="as drawn")


def fake_cost(variant: VariantConfig, rng: np.random.Generator) -> Cost:
    """KV in closed form, throughput with noise."""
    kept = 1.0 if not variant.compress else 1 / variant.stride + (1 / variant.stride if variant.bypass != "none" else 0.0)
    ratio = (
        1.0 if not variant.compress else 1.9 - 0.9 * kept - 0.01 * (variant.window - variant.stride) - 0.06 * (variant.gate == "vector") + rng.normal(0, 0.03)
    )
    constant = 0.0 if not variant.compress else FULL_BYTES * (variant.local_window + variant.window)
    at_context = round(4096 * FULL_BYTES * kept + constant)
    return Cost(
        kv_bytes_per_token=FULL_BYTES * kept,
        kv_kept=kept,
        kv_constant_bytes=constant,
        context=4096,
        batch=4,
        kv_bytes_at_context=at_context,
        kv_bytes_counted=at_context,
        decode_tokens_per_s=around(800 * ratio, 30),
        decode_tokens_per_s_full=around(800.0, 25),
        throughput_ratio=around(float(ratio), 0.03),
    )


def store_row(study: Path, row: Row) -> Path:
    """The row as a result of a study folder; gives the trial's folder."""
    folder = study / "trials" / f"{row.trial:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(row.to_json(), encoding="utf-8")
    return folder


def store_gates(study: Path, trial: int, window: int, layers: int = 2, outputs: int = 2, seed: int = 0) -> None:
    """Compressor weights of a trial of one KV head, gates of K and V apart."""
    folder, rng = study / "trials" / f"{trial:04d}", np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{layer}.gate_bias": rng.normal(size=(window, outputs)).astype(np.float32) for layer in range(layers)}
    save_file(tensors | {f"{layer}.gate_weight": np.zeros((window, 4, outputs), np.float32) for layer in range(layers)}, folder / "compressor.safetensors")


def fake_answers(row: Row, seed: int, prompts: int = 24, queries: int = 4) -> dict[str, Answers]:
    """Outcomes on shared prompts: each example has a difficulty of its own, the same for every row."""
    found = {}
    for place, score in enumerate(row.scores):
        hard = np.random.default_rng([7, place]).normal(size=(prompts * queries, 1))
        noise = np.random.default_rng([seed, place]).normal(0, 0.3, size=(prompts * queries, score.period))
        correct = hard + noise < np.quantile(hard, score.accuracy)
        found[score.protocol] = Answers(
            correct_ER=correct, cluster_E=np.repeat(np.arange(prompts, dtype=np.int32), queries), prompts_sha256=score.prompts_sha256
        )
    return found


def store_answers(study: Path, row: Row, answers: dict[str, Answers]) -> Path:
    """The outcomes file of a trial."""
    path = study / "trials" / f"{row.trial:04d}" / OUTCOMES_FILE
    path.write_bytes(pack(answers))
    return path


def around(value: float, half: float) -> Interval:
    """An interval of the given half width."""
    return Interval(value=value, low=max(0.0, value - half), high=value + half)
