"""One config in, one Row out: load the base, attach the variant, fine-tune, score, measure, store the weights. Knows no Ray and no Optuna."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save

from mitigate import bases, cost, registry, score, train
from mitigate.config import TrialConfig, content_hash, to_dict
from mitigate.files import write_atomic
from mitigate.rows import ProtocolScore, Row, installed_versions
from mitigate.surgery import BACKEND, Attachment, attach

MODEL_FILE, COMPRESSOR_FILE = "model.safetensors", "compressor.safetensors"


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
        out: folder for the trained weights; None keeps none.
        cache: folder of trained bases; `./cache` by default.
        log: called with progress lines.

    Raises:
        ConfigError: the variant names an unknown strategy.
        BaseNotLearned, Diverged: training went wrong. Anything else is a bug; callers that must go on turn it into a Row themselves.
    """
    marks = [time.perf_counter()]
    registry.check(config.variant, layers=config.base.layers)
    cache = cache or Path("cache")
    base = bases.load(config.base, cache, log=log)
    marks.append(time.perf_counter())
    torch.manual_seed(config.seed)
    with attach(base.model, config.variant) as attached:
        trained = train.fine_tune(attached, config.task, config.train, seed=config.seed, on_update=_reporter(config, log))
        marks.append(time.perf_counter())
        scores = [
            score.summarise(score.run_sweep(attached, config.task, protocol, config.score), protocol, config.score) for protocol in config.score.protocols
        ]
        marks.append(time.perf_counter())
        with FileLock(cache / "bench.lock"):  # two workers of a machine do not measure at once
            measured = cost.measure(attached, config.cost, seed=config.seed)
        marks.append(time.perf_counter())
        if out is not None:
            store_weights(attached, out)
    base_s, train_s, score_s, cost_s = (after - before for before, after in itertools.pairwise(marks))
    worst, widest = min(scores, key=lambda s: s.a_min.value), max(scores, key=lambda s: s.gap.value)
    return Row(
        status="ok",
        label=label or registry.describe(config.variant),
        trial=trial,
        anchor=anchor,
        config=to_dict(config),
        config_sha256=content_hash(config),
        base_sha256=base.sha256,
        seed=config.seed,
        versions=installed_versions(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        backend=BACKEND if config.variant.compress else "transformers-sdpa",
        updates=trained.updates,
        tokens=trained.tokens,
        final_loss=trained.loss,
        wall_s=time.perf_counter() - marks[0],
        base_s=base_s,
        train_s=train_s,
        score_s=score_s,
        cost_s=cost_s,
        mean_accuracy=_average(scores),
        a_min=worst.a_min.value,
        a_min_low=min(s.a_min.low for s in scores),  # whichever protocol is the lower one
        a_min_high=worst.a_min.high,
        gap=widest.gap.value,
        gap_low=widest.gap.low,
        gap_high=widest.gap.high,
        scores=scores,
        cost=measured,
    )


def _average(scores: list[ProtocolScore]) -> float:
    return sum(s.mean.value for s in scores) / len(scores)


def _reporter(config: TrialConfig, log: Callable[[str], None]) -> Callable[[int, float], None]:
    every = max(config.train.updates // 6, 1)

    def report(done: int, loss: float) -> None:
        if done % every == 0:
            log(f"fine-tune: update {done}/{config.train.updates}, loss {loss:.3f}")

    return report


def store_weights(attached: Attachment, folder: Path) -> None:
    """Write the fine-tuned model and its compressors as safetensors, each file whole or not at all."""
    for name, module in ((MODEL_FILE, attached.model), (COMPRESSOR_FILE, attached.compressors)):
        write_atomic(folder / name, save({key: tensor.detach().contiguous() for key, tensor in module.state_dict().items()}))
