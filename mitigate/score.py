"""The phase sweep: every prompt at every placement, accuracy per residue, with intervals clustered by prompt."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch

from mitigate import stats
from mitigate.config import ScoreConfig, TaskConfig
from mitigate.readout import logits_at
from mitigate.rows import Interval, ProtocolScore
from mitigate.surgery import Attachment
from mitigate.tasks import retrieval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What a sweep found, by logical example (a query of a prompt) and residue of its target.

    Attributes:
        correct_ER: bool [E, P], full-vocabulary top-1.
        gold_ER: probability of the right name, [E, P].
        repeat_E: queries whose answer an earlier query of the prompt already showed. They measure the distance to that answer, not the phase of
            the record, and are left out of the scores.
        cluster_E: prompt of each example.
        sha256: digest of all prompts' tokens.
    """

    correct_ER: np.ndarray
    gold_ER: np.ndarray
    repeat_E: np.ndarray
    cluster_E: np.ndarray
    sha256: str


@torch.inference_mode()
def run_sweep(attached: Attachment, task: TaskConfig, protocol: retrieval.Protocol, config: ScoreConfig) -> Outcomes:
    """Score every placement of `config.prompts` prompts. Prompts stream through in batches; none is kept."""
    attached.model.eval()
    shape = (config.prompts, task.queries, config.period)
    correct, gold = np.empty(shape, dtype=bool), np.empty(shape, dtype=np.float64)
    repeat, digest, queue = np.empty(shape[:2], dtype=bool), hashlib.sha256(), []
    sweep = retrieval.sweep(task, protocol, period=config.period, prompts=config.prompts, seed=config.seed)
    for index, prompts in enumerate(sweep):
        digest.update(np.ascontiguousarray(prompts.tokens, dtype="<i8").tobytes())
        repeat[index] = prompts.repeat[0]
        queue.append((index, prompts))
        if len(queue) * config.period >= config.batch or index + 1 == config.prompts:
            _answer(attached, queue, config.period, correct, gold)
            queue.clear()
    examples = (config.prompts * task.queries, config.period)
    return Outcomes(
        correct_ER=correct.reshape(examples),
        gold_ER=gold.reshape(examples),
        repeat_E=repeat.ravel(),
        cluster_E=np.repeat(np.arange(config.prompts), task.queries),
        sha256=digest.hexdigest(),
    )


def _answer(attached: Attachment, queue: list[tuple[int, retrieval.Prompts]], period: int, correct: np.ndarray, gold: np.ndarray) -> None:
    tokens = torch.from_numpy(np.concatenate([prompts.tokens for _, prompts in queue]))
    logits = logits_at(attached, tokens, torch.from_numpy(queue[0][1].answer_from))
    answer = torch.from_numpy(np.concatenate([prompts.gold for _, prompts in queue]))
    right = (logits.argmax(-1) == answer).numpy().reshape(len(queue), period, -1)
    probability = logits.float().log_softmax(-1).gather(-1, answer[..., None])[..., 0].exp().numpy().reshape(len(queue), period, -1)
    for (index, prompts), hit, chance in zip(queue, right, probability, strict=True):
        query = np.arange(hit.shape[1])
        residue = prompts.target % period
        correct[index, query, residue] = hit
        gold[index, query, residue] = chance


def summarise(outcomes: Outcomes, protocol: retrieval.Protocol, config: ScoreConfig) -> ProtocolScore:
    """Scores and intervals of a sweep. The intervals of A_min and of the gap allow for the choice of the worst residue."""
    fresh = ~outcomes.repeat_E
    scores = stats.phase_scores(outcomes.correct_ER[fresh], cluster_E=outcomes.cluster_E[fresh], replicates=config.replicates, seed=config.seed)
    repeats = outcomes.correct_ER[~fresh]
    return ProtocolScore(
        protocol=protocol,
        period=config.period,
        clusters=scores.clusters,
        n=scores.n_R.tolist(),
        accuracy=scores.accuracy_R.tolist(),
        accuracy_low=scores.accuracy_low_R.tolist(),
        accuracy_high=scores.accuracy_high_R.tolist(),
        gold_probability=outcomes.gold_ER[fresh].mean(axis=0).tolist(),
        mean=_interval(scores.mean),
        a_min=_interval(scores.a_min_bounds),
        a_min_cross_fitted=float(scores.a_min_cross_fitted.value),
        gap=_interval(scores.gap_bounds),
        spread=_interval(scores.spread),
        worst_residue=int(scores.worst_residue),
        relative_gap=scores.relative_gap,
        repeat_accuracy=float(repeats.mean()) if repeats.size else None,
        prompts_sha256=outcomes.sha256,
    )


def _interval(estimate: stats.Estimate) -> Interval:
    return Interval(value=float(estimate.value), low=float(estimate.low), high=float(estimate.high))
