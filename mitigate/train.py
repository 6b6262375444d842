"""Fine-tune a model, with or without a variant attached, on the retrieval task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mitigate import registry
from mitigate.checkpoint import read_checkpoint, write_checkpoint
from mitigate.config import TaskConfig, TrainConfig, VariantConfig, WorkFailed, content_hash
from mitigate.readout import logits_at
from mitigate.surgery import Attachment
from mitigate.tasks import retrieval

CHECKPOINT_EVERY = 100  # updates: some seconds on one core; a checkpoint of a tiny base is about 1 MB


class Diverged(WorkFailed):
    """The loss stopped being a finite number."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What fine-tuning did, pauses included: `updates` steps over `tokens` tokens; `loss` is the mean cross-entropy (nats) of the last tenth."""

    updates: int
    tokens: int
    loss: float | None


def linear_schedule(step: int, *, updates: int, warmup: int) -> float:
    """Factor on the learning rate: up over `warmup` updates, then linearly down, to 0 after the last one."""
    if step < warmup:
        return (step + 1) / warmup
    return 1 - (step - warmup) / max(updates - warmup, 1)


def fine_tune(
    attached: Attachment,
    task: TaskConfig,
    config: TrainConfig,
    *,
    seed: int,
    until: int | None = None,
    checkpoint: Path | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train every weight of the model and of its compressors on the names of the queries, half of the batches under each padding protocol.

    Args:
        attached: the model with its variant; the variant's coverage loss is added with its weight, for K heads and V heads apart.
        until: pause after so many updates of the schedule; None for all of them.
        checkpoint: file to go on from, if it is there, and to leave the state in: at the end and every `CHECKPOINT_EVERY` updates. On one machine and
            one number of threads, going on gives bit for bit what training in one go gives. A file of another run is not looked at.
        on_update: called with the number of updates done and the loss (nats).

    Raises:
        Diverged: the loss is not finite.
    """
    model, variant = attached.model, attached.variant
    parameters = [*model.parameters(), *attached.compressors.parameters()]
    optimizer = torch.optim.AdamW(_groups(attached, config), betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: linear_schedule(step, updates=config.updates, warmup=config.warmup))
    identity = " ".join([*(content_hash(part) for part in (variant, task, config)), str(seed)])
    run = _Run(attached, optimizer, schedule, np.random.default_rng(seed), identity=identity)
    if checkpoint is not None:
        run.read(checkpoint)
    device = model.device
    model.train()
    attached.collect_gates(variant.coverage_weight > 0)
    for step in range(run.done, config.updates if until is None else min(until, config.updates)):
        prompts = retrieval.training_batch(task, run.rng, config.batch, "outer" if step % 2 == 0 else "in_sequence")
        logits = logits_at(attached, torch.from_numpy(prompts.tokens).to(device), torch.from_numpy(prompts.answer_from.ravel()).to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(prompts.gold).flatten().to(device))
        total = loss + coverage_loss(attached, variant) if variant.coverage_weight > 0 else loss
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        schedule.step()
        run.losses.append(float(loss.detach()))
        run.tokens += prompts.tokens.size
        if not np.isfinite(run.losses[-1]):
            raise Diverged(f"fine_tune: the loss is {run.losses[-1]} after {step + 1} updates")
        if checkpoint is not None and run.done % CHECKPOINT_EVERY == 0:
            run.write(checkpoint)
        if on_update is not None:
            on_update(step + 1, run.losses[-1])
    if checkpoint is not None:
        run.write(checkpoint)
    attached.collect_gates(False)
    model.eval()
    last = run.losses[-max(len(run.losses) // 10, 1) :]
    return Trained(updates=run.done, tokens=run.tokens, loss=float(np.mean(last)) if last else None)


class _Run:
    """Everything that a fine-tune continues from."""

    def __init__(self, attached: Attachment, optimizer: torch.optim.Optimizer, schedule: Any, rng: np.random.Generator, *, identity: str) -> None:
        self._parts = {"model": attached.model, "compressors": attached.compressors, "optimizer": optimizer, "schedule": schedule}
        self._identity = identity
        self.rng, self.losses, self.tokens = rng, list[float](), 0

    @property
    def done(self) -> int:
        """Updates so far."""
        return len(self.losses)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        write_checkpoint(path, self._identity, {"losses": self.losses, "tokens": self.tokens, "rng": self.rng.bit_generator.state} | state)

    def read(self, path: Path) -> None:
        """Go on from a file; one that is missing, damaged or of another run changes nothing."""
        state = read_checkpoint(path, self._identity)
        if state is None:
            return
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.losses, self.tokens = list(state["losses"]), int(state["tokens"])
        self.rng.bit_generator.state = state["rng"]


def _groups(attached: Attachment, config: TrainConfig) -> list[dict[str, Any]]:
    """Optimizer groups: everything, and gate biases with a rate of their own and no decay."""
    named = list(attached.compressors.named_parameters())
    biases = [p for name, p in named if name.endswith("gate_bias")]
    others = [*attached.model.parameters(), *(p for name, p in named if not name.endswith("gate_bias"))]
    rate = config.learning_rate
    return [
        {"params": others, "lr": rate, "weight_decay": config.weight_decay},
        {"params": biases, "lr": rate * config.gate_bias_rate, "weight_decay": 0.0},
    ]


def coverage_loss(attached: Attachment, variant: VariantConfig) -> torch.Tensor:
    """``lambda * (coverage(K heads) + coverage(V heads))`` of the last forward, averaged over the sets of heads that the variant's scope names.

    A gate that K and V share counts in both.
    """
    function = registry.get("coverage", variant.coverage).function
    layers = attached.phase_profiles()
    sets = layers if variant.coverage_scope == "layer" else [tuple(torch.cat(branch) for branch in zip(*layers, strict=True))]
    losses = [function(heads_HS, threshold=variant.coverage_threshold) for branches in sets for heads_HS in branches]
    return variant.coverage_weight * torch.stack(losses).sum() / len(sets)
