"""Fine-tune a pretrained model with a variant attached, on local text and on retrieval prompts, and towards the logits of its own full attention.

Each update is of text or of retrieval prompts. Everything random is drawn from one generator, so that its state is the place in the data, and a run that goes
on from a checkpoint goes on to the bit, unless a budget in minutes sets the pace of its schedule.

Shapes: B sequences, T tokens, A positions whose next token is asked for, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mitigate import score
from mitigate.bases import Pretrained
from mitigate.checkpoint import write_checkpoint
from mitigate.config import ConfigError, VariantConfig, content_hash
from mitigate.config_finetune import FineTuneConfig, TuneConfig
from mitigate.evaluate import check_vocabulary, recorded
from mitigate.perplexity import check_length, check_tokens
from mitigate.readout import logits_at
from mitigate.surgery import Attachment, attach
from mitigate.tasks import text, words
from mitigate.train import Diverged, coverage_loss

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on: a text's tokens, and the words of the retrieval task."""

    text: text.Text
    words: words.Words


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one update: tokens [B, T] and the positions [A] whose next tokens are asked for, of retrieval prompts (`answers`) or of text."""

    tokens: torch.Tensor
    positions: torch.Tensor
    answers: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """One update's losses, means over the positions asked for: `cross_entropy` and `divergence` in nats, None where it has no weight."""

    answers: bool
    loss: float
    cross_entropy: float
    divergence: float | None


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A small sweep while training: fractions, on other prompts than those of the final sweeps."""

    update: int
    a_min: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training is: `share` of its budget, from 0 to 1."""

    update: int
    share: float
    step: Step
    watched: Watched | None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What fine-tuning did: `updates` over `tokens` tokens in `seconds`, pauses left out; every update's losses, every small sweep."""

    updates: int
    tokens: int
    seconds: float
    steps: tuple[Step, ...]
    watched: tuple[Watched, ...]

    @property
    def loss(self) -> float | None:
        """Mean loss of the last tenth of the updates; None without updates."""
        last = self.steps[-max(len(self.steps) // 10, 1) :]
        return float(np.mean([step.loss for step in last])) if last else None


def load_data(base: Pretrained, config: FineTuneConfig) -> Data:
    """The text and the words for a base's tokenizer.

    Raises:
        ConfigError: the text or the words are not to be had, hold tokens that the model does not know, or a sequence is longer than the model's positions.
    """
    check_length(base.model, config.train.length, "TuneConfig.length")
    check_length(base.model, config.text.length, "TextConfig.length")
    found = words.find(base.tokenizer, config.words)
    check_vocabulary(base, found, config.model)
    lengths = [words.training_batch(found, config.words, np.random.default_rng(0), 1, p).tokens.shape[1] for p in config.score.protocols]
    check_length(base.model, max(lengths), "WordsConfig: a prompt")
    window = config.variant.window * config.variant.coarse_factor
    if min(lengths) <= window:
        raise ConfigError(f"WordsConfig: a prompt must have more tokens than a window ({window}), got {min(lengths)}; ask for more records")
    loaded = text.load(base.tokenizer, config.text, length=config.train.length)
    check_tokens(base.model, max(int(part.max(initial=0)) for part in (loaded.train, loaded.held_out, loaded.prefix)), f"--model {config.model}: its tokenizer")
    return Data(text=loaded, words=found)


def draw(data: Data, config: FineTuneConfig, rng: np.random.Generator, update: int) -> Batch:
    """All sequences of an update. Which updates are of retrieval prompts follows from their number alone; these take the protocols in turn."""
    train = config.train
    count, share = train.batch * train.accumulate, train.retrieval
    before, after = math.floor(update * share + 1e-9), math.floor((update + 1) * share + 1e-9)
    if after > before:
        protocol = config.score.protocols[before % len(config.score.protocols)]
        prompts = words.training_batch(data.words, config.words, rng, count, protocol)
        return Batch(tokens=torch.from_numpy(prompts.tokens), positions=torch.from_numpy(prompts.answer_from.ravel()), answers=True)
    tokens = torch.from_numpy(text.training_batch(data.text, rng, count, train.length))
    places = train.length - 1
    asked = np.arange(places) if not 0 < train.positions < places else np.sort(rng.permutation(places)[: train.positions])
    return Batch(tokens=tokens, positions=torch.from_numpy(asked), answers=False)


def divergence(student_BAV: torch.Tensor, teacher_BAV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Mean KL(teacher || student) over positions, nats, times the temperature's square so that its gradient does not fade with it."""
    student, teacher = ((x.float() / temperature).flatten(0, 1).log_softmax(-1) for x in (student_BAV, teacher_BAV))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def fine_tune(
    attached: Attachment,
    data: Data,
    config: FineTuneConfig,
    *,
    base_sha256: str = "",
    checkpoint: Path | None = None,
    until: int | None = None,
    on_update: Callable[[Progress], None] = lambda progress: None,
) -> Tuned:
    """Train what `config.train.what` names; everything else stays as it is to the bit. The compressors stay fp32 whatever the model's precision.

    Args:
        attached: the untrained model with its variant.
        base_sha256: of the model; a checkpoint belongs to one.
        checkpoint: file to go on from if it is there, and to leave the state in, every `checkpoint_every` updates and at the end.
        until: pause after so many updates of the schedule; None for all of them.
        on_update: called after each update.

    Raises:
        ConfigError: there is nothing to train, or the checkpoint is of another run.
        Diverged: a loss is not finite.
    """
    settings = config.train
    with _trainable(attached, settings) as groups:
        run = _Run(attached, data, config, groups)
        run.teacher = _teacher(attached, settings)  # before a checkpoint changes the weights
        identity = f"{content_hash(recorded(config))} {base_sha256} {data.text.sha256}"
        if checkpoint is not None and checkpoint.is_file():
            run.restore(checkpoint, identity)
        saved = run.update
        while run.share < 1 and (until is None or run.update < until):
            on_update(run.advance())
            if checkpoint is not None and run.update % settings.checkpoint_every == 0:
                run.save(checkpoint, identity)
                saved = run.update
        if checkpoint is not None and saved < run.update:
            run.save(checkpoint, identity)
    attached.model.eval()
    return Tuned(updates=run.update, tokens=run.tokens, seconds=run.seconds, steps=tuple(run.steps), watched=tuple(run.watched))


def trained_names(attached: Attachment, what: str) -> list[str]:
    """Names of the model's own parameters that are trained."""
    named = dict(attached.model.named_parameters())
    if what == "compressor":
        return []
    if what == "all":
        return list(named)
    wanted = {id(parameter) for layer in attached.layers for name in PROJECTIONS for parameter in _projection(layer.module, name).parameters()}
    return [name for name, parameter in named.items() if id(parameter) in wanted]


def _projection(module: nn.Module, name: str) -> nn.Module:
    found = getattr(module, name, None)
    if not isinstance(found, nn.Module):
        raise ConfigError(f'TuneConfig.what must be "compressor" or "all": {type(module).__name__} has no {name}, got \'attention\'')
    return found


@contextmanager
def _trainable(attached: Attachment, settings: TuneConfig) -> Iterator[list[dict[str, Any]]]:
    """Optimizer groups, each with its peak rate; gradients are asked of nothing else meanwhile."""
    named = list(attached.compressors.named_parameters())
    own = set(trained_names(attached, settings.what))
    rate = settings.compressor_rate
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if not name.endswith("gate_bias")], "peak": rate, "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if name.endswith("gate_bias")], "peak": rate * settings.gate_bias_rate, "weight_decay": 0.0},
        {"params": [p for n, p in attached.model.named_parameters() if n in own], "peak": settings.model_rate, "weight_decay": settings.weight_decay},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        gate = attached.variant.gate
        raise ConfigError(f"FineTuneConfig.variant.gate must be one that learns, or TuneConfig.what more than the compressor, got {gate!r}")
    before = [(parameter, parameter.requires_grad) for parameter in attached.model.parameters()]
    for name, parameter in attached.model.named_parameters():
        parameter.requires_grad_(name in own)
    try:
        yield groups
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
            parameter.grad = None


def _teacher(attached: Attachment, settings: TuneConfig) -> Attachment | None:
    """The model with its own attention: the same weights where they stay, else a copy of them as they are now. None without distillation."""
    if not settings.distill:
        return None
    if settings.what == "compressor":
        return Attachment(attached.model, VariantConfig(compress=False))
    with attached.removed():
        model = copy.deepcopy(attached.model)
    return attach(model.requires_grad_(False).eval(), VariantConfig(compress=False))


class _Run:
    """Everything that one update hands to the next."""

    def __init__(self, attached: Attachment, data: Data, config: FineTuneConfig, groups: list[dict[str, Any]]) -> None:
        self.attached, self.data, self.config, self.settings = attached, data, config, config.train
        self.optimizer = torch.optim.AdamW(groups, lr=config.train.compressor_rate, betas=(0.9, 0.98), fused=True)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.rng = np.random.default_rng([config.seed, 3])
        self.teacher: Attachment | None = None
        self.update, self.tokens, self.seconds = 0, 0, 0.0
        self.steps: list[Step] = []
        self.watched: list[Watched] = []

    @property
    def share(self) -> float:
        """Of the budget, updates or minutes, whichever is further."""
        minutes = self.settings.minutes
        return max(self.update / self.settings.updates, 0.0 if minutes is None else self.seconds / (60 * minutes))

    def rate(self) -> float:
        """Factor on every peak rate: up over `warmup` updates; down to `final_rate` at the end of the budget."""
        settings = self.settings
        rise = (self.update + 1) / settings.warmup if self.update < settings.warmup else 1.0
        return min(rise, 1 - (1 - settings.final_rate) * min(self.share, 1.0))

    def advance(self) -> Progress:
        """One update, and a small sweep where one is due."""
        started, settings = time.perf_counter(), self.settings
        batch = draw(self.data, self.config, self.rng, self.update)
        factor = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self._backward(tokens_BT, batch) for tokens_BT in batch.tokens.split(settings.batch)]
        means = [None if None in column else float(np.mean(column)) for column in zip(*parts, strict=True)]
        loss, cross_entropy, kl = means
        assert loss is not None and cross_entropy is not None
        if not np.isfinite(loss):
            raise Diverged(f"fine_tune: the loss is {loss} at update {self.update + 1}; lower the learning rates")
        nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        self.optimizer.step()
        self.update, self.tokens = self.update + 1, self.tokens + batch.tokens.numel()
        self.steps.append(Step(answers=batch.answers, loss=loss, cross_entropy=cross_entropy, divergence=kl))
        if settings.watch_every and self.update % settings.watch_every == 0:
            self.watched.append(self._watch())
        self.seconds += time.perf_counter() - started
        return Progress(update=self.update, share=min(self.share, 1.0), step=self.steps[-1], watched=self.watched[-1] if self.watched else None)

    def _backward(self, tokens_BT: torch.Tensor, batch: Batch) -> tuple[float, float, float | None]:
        """Add one pass's share to the gradients; gives its loss, cross-entropy and divergence."""
        attached, settings, variant = self.attached, self.settings, self.attached.variant
        tokens_BT, positions_A = tokens_BT.to(attached.model.device), batch.positions.to(attached.model.device)
        wanted = self._wanted(tokens_BT, positions_A)
        attached.collect_gates(variant.coverage_weight > 0)
        with _recomputing(attached.model) if settings.recompute else nullcontext():
            logits = logits_at(attached, tokens_BT, positions_A).float()
            weight = settings.answer_loss if batch.answers else settings.text_loss
            cross_entropy = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, positions_A + 1].flatten())
            loss, kl = weight * cross_entropy, None
            if wanted is not None:
                kl = divergence(logits, wanted, settings.temperature)
                loss = loss + settings.distill * kl
            if variant.coverage_weight > 0:
                loss = loss + coverage_loss(attached, variant)
            (loss / settings.accumulate).backward()
        attached.collect_gates(False)
        return float(loss.detach()), float(cross_entropy.detach()), None if kl is None else float(kl.detach())

    @torch.no_grad()
    def _wanted(self, tokens_BT: torch.Tensor, positions_A: torch.Tensor) -> torch.Tensor | None:
        """The teacher's logits [B, A, V]."""
        if self.teacher is None:
            return None
        shared = self.teacher.model is self.attached.model
        off: AbstractContextManager[None] = self.attached.removed() if shared else nullcontext()
        with off:
            return logits_at(self.teacher, tokens_BT, positions_A)

    def _watch(self) -> Watched:
        settings, sweeping = self.settings, self.config.score
        protocol, seed = sweeping.protocols[0], sweeping.seed + 1
        sweep = words.sweep(self.data.words, self.config.words, protocol, period=sweeping.period, prompts=settings.watch_prompts, seed=seed)
        accuracy_R = score.run_sweep(self.attached, sweep, batch=sweeping.batch).correct_ER.mean(axis=0)
        return Watched(update=self.update, a_min=float(accuracy_R.min()), mean=float(accuracy_R.mean()))

    def save(self, path: Path, identity: str) -> None:
        """Everything that `restore` needs, whole or not at all. The model's own weights are in it as far as they are trained."""
        named = dict(self.attached.model.named_parameters())
        state = {
            "compressors": self.attached.compressors.state_dict(),
            "model": {name: named[name].detach() for name in trained_names(self.attached, self.settings.what)},
            "optimizer": self.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": json.dumps(self.rng.bit_generator.state),
            "counts": {"update": self.update, "tokens": self.tokens, "seconds": self.seconds},
            "steps": [asdict(step) for step in self.steps],
            "watched": [asdict(watched) for watched in self.watched],
        }
        write_checkpoint(path, identity, state)

    @torch.no_grad()
    def restore(self, path: Path, identity: str) -> None:
        """Go on from a checkpoint; ConfigError if it is damaged or of another run."""
        try:
            state = torch.load(path, map_location=self.attached.model.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{path} is no checkpoint that can be read: {' '.join(str(error).split())[:160]}; delete it to start again") from None
        if not isinstance(state, dict) or state.get("identity") != identity:
            raise ConfigError(f"{path} is the checkpoint of another config, base or text; choose another folder")
        self.attached.compressors.load_state_dict(state["compressors"])
        named = dict(self.attached.model.named_parameters())
        for name, tensor in state["model"].items():
            named[name].copy_(tensor)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"].cpu())
        self.rng.bit_generator.state = json.loads(state["numpy"])
        self.update, self.tokens, self.seconds = state["counts"]["update"], state["counts"]["tokens"], state["counts"]["seconds"]
        self.steps = [Step(**step) for step in state["steps"]]
        self.watched = [Watched(**watched) for watched in state["watched"]]


@contextmanager
def _recomputing(model: Any) -> Iterator[None]:
    """Activations are recomputed in the backward pass inside this block."""
    on, off = ("activation_checkpointing_enable", "activation_checkpointing_disable")
    if not hasattr(model, on):
        on, off = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")
    getattr(model, on)()
    model.train()
    try:
        yield
    finally:
        model.eval()
        getattr(model, off)()
