"""One config in, one Row out: load the base, attach the variant, fine-tune, score, measure, store the weights; in one go, or stage by stage for a search.
Knows no Ray and no Optuna."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from mitigate import bases, cost, registry, score, train
from mitigate.config import ConfigError, ScoreConfig, TaskConfig, TrialConfig, content_hash, to_dict
from mitigate.files import write_atomic
from mitigate.outcomes import OUTCOMES_FILE, Answers, pack
from mitigate.rows import ProtocolScore, Row, installed_versions, worst_of
from mitigate.stage import Stage
from mitigate.surgery import Attachment, attach
from mitigate.tasks import retrieval
from mitigate.tasks.placement import Protocol

MODEL_FILE, COMPRESSOR_FILE, CHECKPOINT_FILE = "model.safetensors", "compressor.safetensors", "checkpoint.pt"


def run_trial(
    config: TrialConfig,
    *,
    label: str = "",
    trial: int | None = None,
    anchor: bool = False,
    out: Path | None = None,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Row:
    """Run one trial on this process's CPU.

    Args:
        config: everything the result depends on.
        label: shown in tables; the registry's description if empty.
        trial, anchor: recorded in the Row.
        out: folder for the trained weights and each query's outcome; None keeps none.
        cache: folder of trained bases; `./cache` by default.
        log: called with progress lines.

    Raises:
        ConfigError: the variant names an unknown strategy.
        BaseNotLearned, Diverged: training went wrong. Anything else is a bug; callers that must go on turn it into a Row themselves.
    """
    cache = cache or Path("cache")
    attached, row = _train_and_score(config, Stage(), label=label, trial=trial, anchor=anchor, out=out, cache=cache, log=log, checkpoint=None)
    with attached:
        return with_cost(row, attached, config, cache=cache)


def run_stage(
    config: TrialConfig,
    *,
    stage: Stage,
    out: Path,
    label: str = "",
    trial: int | None = None,
    anchor: bool = False,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Row:
    """One step of a trial of a search; see `Stage`. All steps together give what `run_trial` gives, on one machine bit for bit.

    Args:
        out: the trial's folder. A score stage goes on from the checkpoint that it finds there and leaves one; the last one leaves the weights.

    Returns:
        After a score stage the Row without cost, after the cost stage the whole Row. Updates and seconds are those of all stages so far; what an execution
        that was cut short did is not in them.
    """
    cache = cache or Path("cache")
    if stage.kind == "cost":
        row = Row.from_json((out / stage.scored_file).read_text(encoding="utf-8"))
        with _trained(config, out, stage.device) as attached:
            return with_cost(row, attached, config, cache=cache)
    attached, row = _train_and_score(config, stage, label=label, trial=trial, anchor=anchor, out=out, cache=cache, log=log, checkpoint=out / CHECKPOINT_FILE)
    attached.detach()
    before = out / dataclasses.replace(stage, rung=stage.rung - 1).scored_file
    if not before.is_file():
        return row
    earlier = Row.from_json(before.read_text(encoding="utf-8"))
    return row.model_copy(update={name: getattr(row, name) + getattr(earlier, name) for name in ("wall_s", "base_s", "train_s", "score_s")})


def _train_and_score(
    config: TrialConfig,
    stage: Stage,
    *,
    label: str,
    trial: int | None,
    anchor: bool,
    out: Path | None,
    cache: Path,
    log: Callable[[str], None],
    checkpoint: Path | None,
) -> tuple[Attachment, Row]:
    """The trained model, attached, and its Row without cost."""
    marks = [time.perf_counter()]
    registry.check(config.variant, layers=config.base.layers)
    base = bases.load(config.base, cache, log=log)
    marks.append(time.perf_counter())
    torch.manual_seed(config.seed)
    attached = attach(base.model.to(stage.device), config.variant)  # type: ignore[arg-type]
    try:
        trained = train.fine_tune(
            attached, config.task, config.train, seed=config.seed, until=stage.updates, checkpoint=checkpoint, on_update=_reporter(config, log)
        )
        marks.append(time.perf_counter())
        whole = stage.updates is None or stage.updates >= config.train.updates
        row = score_trained(attached, config, prompts=stage.prompts, label=label, out=out if whole else None, log=log)
        if out is not None and whole:
            store_weights(attached, out)
    except BaseException:
        attached.detach()
        raise
    base_s, train_s = (after - before for before, after in itertools.pairwise(marks))
    done: dict[str, Any] = {"trial": trial, "anchor": anchor, "base_sha256": base.sha256}
    done |= {"rung": None if stage.updates is None else stage.rung, "updates": trained.updates, "tokens": trained.tokens, "final_loss": trained.loss}
    return attached, row.model_copy(update=done | {"base_s": base_s, "train_s": train_s, "wall_s": time.perf_counter() - marks[0]})


def score_trained(
    attached: Attachment,
    config: TrialConfig,
    *,
    prompts: int | None = None,
    label: str = "",
    out: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Row:
    """Phase sweeps of a model that was trained under `config`: the Row of a trial, less its cost and what only training can say.

    Args:
        prompts: logical prompts; the config's if None.
        out: folder for each query's outcome; None keeps none.
    """
    started = time.perf_counter()
    settings = config.score if prompts is None else dataclasses.replace(config.score, prompts=prompts)
    swept = {protocol: _sweep(attached, config.task, settings, protocol, log) for protocol in settings.protocols}
    scores = [scored for scored, _ in swept.values()]
    if out is not None:
        write_atomic(out / OUTCOMES_FILE, pack({protocol: answers for protocol, (_, answers) in swept.items()}))
    score_s = time.perf_counter() - started
    device = attached.model.device
    return Row(
        status="ok",
        label=label or registry.describe(config.variant),
        config=to_dict(config),
        config_sha256=content_hash(config),
        seed=config.seed,
        versions=installed_versions(),
        device=device_name(device),
        backend=attached.backend,
        wall_s=score_s,
        score_s=score_s,
        scores=scores,
        curve=score.find_period(scores),
        **worst_of(scores),
    )


def device_name(device: torch.device) -> str:
    """Such as "cpu (x86_64, 1 threads)" or "cuda (NVIDIA H100 80GB HBM3)"."""
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)" if device.type == "cpu" else f"{device.type} ({torch.cuda.get_device_name(device)})"


def with_cost(row: Row, attached: Attachment, config: TrialConfig, *, cache: Path) -> Row:
    """The Row with the measured cost of its model in it. Two processes of a machine do not measure at once."""
    started = time.perf_counter()
    lock = cache / "bench.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        measured = cost.measure(attached, config.cost, seed=config.seed)
    cost_s = time.perf_counter() - started
    return row.model_copy(update={"cost": measured, "cost_s": cost_s, "wall_s": row.wall_s + cost_s})


def _sweep(attached: Attachment, task: TaskConfig, settings: ScoreConfig, protocol: Protocol, log: Callable[[str], None]) -> tuple[ProtocolScore, Answers]:
    sweep = retrieval.sweep(task, protocol, period=settings.period, prompts=settings.prompts, seed=settings.seed)
    found = score.run_sweep(attached, sweep, batch=settings.batch, log=log)
    answers = Answers(correct_ER=found.correct_ER, cluster_E=found.cluster_E.astype("int32"), prompts_sha256=found.sha256)
    return score.summarise(found, sweep, settings), answers


def _reporter(config: TrialConfig, log: Callable[[str], None]) -> Callable[[int, float], None]:
    every = max(config.train.updates // 6, 1)

    def report(done: int, loss: float) -> None:
        if done % every == 0:
            log(f"fine-tune: update {done}/{config.train.updates}, loss {loss:.3f}")

    return report


def store_weights(attached: Attachment, folder: Path) -> None:
    """Write the fine-tuned model and its compressors as safetensors, each file whole or not at all."""
    for name, module in _parts(attached):
        write_atomic(folder / name, save({key: tensor.detach().contiguous() for key, tensor in module.state_dict().items()}))


def restore(config: TrialConfig, folder: Path) -> Attachment:
    """The model that `store_weights` left in a folder, in eval mode with its compressors attached. ConfigError names a file that is damaged or not there."""
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten at once
        model = bases.build(config.base)
        attached = attach(model, config.variant)
    _load_weights(attached, folder)
    model.eval()
    return attached


def _load_weights(attached: Attachment, folder: Path) -> None:
    for name, module in _parts(attached):
        path = folder / name
        try:
            module.load_state_dict(load_file(path))
        except FileNotFoundError:
            raise ConfigError(f"{path} is not there") from None
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        except RuntimeError:  # of `load_state_dict`, with every tensor's name
            raise ConfigError(f"{path} is damaged: it holds other tensors than the trial's config asks for") from None


def _parts(attached: Attachment) -> tuple[tuple[str, nn.Module], ...]:
    return (MODEL_FILE, attached.model), (COMPRESSOR_FILE, attached.compressors)


def _trained(config: TrialConfig, folder: Path, device: str) -> Attachment:
    """The trained model on a device. Where its weights lie on another machine the same shapes at random, which cost the same."""
    if (folder / MODEL_FILE).is_file() and device == "cpu":
        return restore(config, folder)
    attached = attach(bases.build(config.base).to(device).eval(), config.variant)  # type: ignore[arg-type]
    if (folder / MODEL_FILE).is_file():
        _load_weights(attached, folder)
    return attached
