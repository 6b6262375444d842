"""The phase sweep: every prompt at every placement, accuracy per residue, with intervals clustered by prompt."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import torch

from mitigate import spectrum, stats
from mitigate.config import ScoreConfig, TaskConfig
from mitigate.readout import in_eval_mode, logits_at, not_finite
from mitigate.rows import Interval, Period, ProtocolScore, Transition
from mitigate.surgery import Attachment
from mitigate.tasks import transition
from mitigate.tasks.placement import Positions, lockstep
from mitigate.tasks.prompts import Prompts, Sweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What a sweep found, by logical example (a query of a prompt) and residue of its target.

    Attributes:
        correct_ER: bool [E, P], full-vocabulary top-1 of every token of the answer.
        nll_ER: -ln of the probability of the right name, nats, float32 [E, P].
        cluster_E: prompt of each example.
        positions: moments of the target position at each residue.
        lockstep: how far distractor phases moved with the target's residue, averaged over prompts (see `placement.lockstep`).
        sha256: digest of all prompts' tokens.
    """

    correct_ER: np.ndarray
    nll_ER: np.ndarray
    cluster_E: np.ndarray
    positions: Positions
    lockstep: float
    sha256: str


@torch.inference_mode()
def run_sweep(attached: Attachment, sweep: Sweep, *, batch: int, log: Callable[[str], None] = lambda line: None) -> Outcomes:
    """Score every placement of every prompt. Prompts stream through, `batch` placements at a time; none is kept.

    Args:
        batch: placements per forward pass.
        log: called with a progress line a few times.

    Raises:
        WorkFailed: the model's logits are not finite.
    """
    design = sweep.design
    shape = (design.prompts, design.queries, design.period)
    correct, nll = np.empty(shape, dtype=bool), np.empty(shape, dtype=np.float32)
    positions, coherence, hasher = Positions(period=design.period), 0.0, hashlib.sha256()
    queue, logged = list[tuple[int, Prompts]](), 0
    for number, (prompts, placement) in enumerate(sweep.placed()):
        hasher.update(np.ascontiguousarray(prompts.tokens, dtype="<i8").tobytes())
        positions.add(prompts.target)
        coherence += lockstep(placement.before, placement.asked, design.period)
        queue.append((number, prompts))
        if len(queue) * design.period >= batch or number + 1 == design.prompts:
            with in_eval_mode(attached.model):
                _answer(attached, queue, batch, correct, nll)
            queue.clear()
            if 6 * (number + 1) // design.prompts > 6 * logged // design.prompts:
                logged = number + 1
                log(f"score: {design.protocol}, {logged} of {design.prompts} prompts, accuracy {correct[:logged].mean():.3f}")
    examples = (design.prompts * design.queries, design.period)
    return Outcomes(
        correct_ER=correct.reshape(examples),
        nll_ER=nll.reshape(examples),
        cluster_E=np.repeat(np.arange(design.prompts), design.queries),
        positions=positions,
        lockstep=coherence / design.prompts,
        sha256=hasher.hexdigest(),
    )


def _answer(attached: Attachment, queue: list[tuple[int, Prompts]], batch: int, correct: np.ndarray, nll: np.ndarray) -> None:
    """Fill in the results of some prompts, [E, Q, P] by prompt, query and residue."""
    tokens = torch.from_numpy(np.concatenate([prompts.tokens for _, prompts in queue]))
    answer = torch.from_numpy(np.concatenate([prompts.gold for _, prompts in queue]))
    answer_from = torch.from_numpy(queue[0][1].answer_from)
    parts = [_right_and_nll(attached, *part, answer_from) for part in zip(tokens.split(batch), answer.split(batch), strict=True)]
    right, surprise = (torch.cat(part).unflatten(0, (len(queue), -1)).cpu().numpy() for part in zip(*parts, strict=True))
    period = nll.shape[-1]
    for (number, prompts), hit, cost in zip(queue, right, surprise, strict=True):
        query, residue = np.arange(hit.shape[1]), prompts.target % period
        correct[number, query, residue] = hit
        nll[number, query, residue] = cost


def _right_and_nll(attached: Attachment, tokens_BT: torch.Tensor, answer_BQA: torch.Tensor, from_QA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each answer is top-1 in all of its tokens, and its negative log-likelihood in nats: [B, Q] each."""
    device = attached.model.device
    answer_BQA = answer_BQA.to(device)
    logits_BQAV = logits_at(attached, tokens_BT.to(device), from_QA.ravel().to(device)).unflatten(1, from_QA.shape)
    right_BQ = (logits_BQAV.argmax(-1) == answer_BQA).all(-1)
    nll_BQ = -logits_BQAV.float().log_softmax(-1).gather(-1, answer_BQA[..., None])[..., 0].sum(-1)
    if not bool(nll_BQ.isfinite().all()):
        raise not_finite("score", attached.model)
    return right_BQ, nll_BQ


def summarise(outcomes: Outcomes, sweep: Sweep, config: ScoreConfig) -> ProtocolScore:
    """Scores and intervals of a sweep. The intervals of A_min and of the gap allow for the choice of the worst residue."""
    scores = stats.phase_scores(outcomes.correct_ER, cluster_E=outcomes.cluster_E, replicates=config.replicates, seed=config.seed)
    return ProtocolScore(
        protocol=sweep.design.protocol,
        period=sweep.design.period,
        clusters=scores.clusters,
        n=scores.n_R.tolist(),
        accuracy=scores.accuracy_R.tolist(),
        accuracy_low=scores.accuracy_low_R.tolist(),
        accuracy_high=scores.accuracy_high_R.tolist(),
        gold_probability=np.exp(-outcomes.nll_ER.astype(np.float64)).mean(axis=0).tolist(),
        nll=outcomes.nll_ER.mean(axis=0, dtype=np.float64).tolist(),
        mean=_interval(scores.mean),
        a_min=_interval(scores.a_min_bounds),
        a_min_cross_fitted=float(scores.a_min_cross_fitted.value),
        gap=_interval(scores.gap_bounds),
        spread=_interval(scores.spread),
        worst_residue=int(scores.worst_residue),
        relative_gap=scores.relative_gap,
        target_mean=outcomes.positions.mean_P.tolist(),
        target_sd=outcomes.positions.sd_P.tolist(),
        distractor_lockstep=outcomes.lockstep,
        prompts_sha256=outcomes.sha256,
    )


@torch.inference_mode()
def run_transition(attached: Attachment, task: TaskConfig, *, period: int, distances: range, prompts: int, seed: int) -> Transition:
    """Move the queried record away from the query; see `mitigate.tasks.transition`."""
    accuracy_DR, gold_DR = np.empty((2, len(distances), period))
    for cell in transition.cells(task, period=period, distances=distances, prompts=prompts, seed=seed):
        asked = (torch.from_numpy(part) for part in (cell.prompts.tokens, cell.prompts.gold, cell.prompts.answer_from))
        with in_eval_mode(attached.model):
            right, nll = _right_and_nll(attached, *asked)
        row = cell.distance - distances.start
        accuracy_DR[row, cell.residue], gold_DR[row, cell.residue] = right.float().mean(), (-nll).exp().mean()
    return Transition(distances=list(distances), period=period, prompts=prompts, seed=seed, accuracy=accuracy_DR.tolist(), gold_probability=gold_DR.tolist())


def find_period(scores: list[ProtocolScore]) -> Period | None:
    """Period of the accuracy curves of one model, all protocols together; None below four residues, where there is nothing to search."""
    residues = min(score.period for score in scores)
    if residues < 4:
        return None
    found = spectrum.find_period(np.arange(residues), np.array([score.accuracy for score in scores]), cycle=residues)
    return Period(status=found.status, period=found.period, p_value=found.p_value, searched=list(found.candidates), reason=found.reason)


def _interval(estimate: stats.Estimate) -> Interval:
    return Interval(value=float(estimate.value), low=float(estimate.low), high=float(estimate.high))
