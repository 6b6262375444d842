"""One config in, one Row out: load the base, attach the variant, fine-tune, score, measure, store the weights. Knows no Ray and no Optuna."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save

from mitigate import bases, cost, registry, score, train
from mitigate.config import TrialConfig, content_hash, to_dict
from mitigate.files import write_atomic
from mitigate.outcomes import OUTCOMES_FILE, Answers, pack
from mitigate.rows import ProtocolScore, Row, installed_versions, worst_of
from mitigate.surgery import BACKEND, Attachment, attach
from mitigate.tasks import retrieval
from mitigate.tasks.placement import Protocol

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
        out: folder for the trained weights and each query's outcome; None keeps none.
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
        row = score_trained(attached, config, label=label, out=out, cache=cache, log=log)
        if out is not None:
            store_weights(attached, out)
    base_s, train_s = (after - before for before, after in itertools.pairwise(marks))
    done: dict[str, Any] = {"trial": trial, "anchor": anchor, "base_sha256": base.sha256}
    done |= {"updates": trained.updates, "tokens": trained.tokens, "final_loss": trained.loss}
    return row.model_copy(update=done | {"base_s": base_s, "train_s": train_s, "wall_s": time.perf_counter() - marks[0]})


def score_trained(
    attached: Attachment,
    config: TrialConfig,
    *,
    label: str = "",
    out: Path | None = None,
    cache: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Row:
    """Phase sweeps and cost of a model that was trained under `config`: the Row of a trial, less what only training can say."""
    marks = [time.perf_counter()]
    swept = {protocol: _sweep(attached, config, protocol, log) for protocol in config.score.protocols}
    scores = [scored for scored, _ in swept.values()]
    if out is not None:
        write_atomic(out / OUTCOMES_FILE, pack({protocol: answers for protocol, (_, answers) in swept.items()}))
    marks.append(time.perf_counter())
    lock = (cache or Path("cache")) / "bench.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):  # two workers of a machine do not measure at once
        measured = cost.measure(attached, config.cost, seed=config.seed)
    marks.append(time.perf_counter())
    score_s, cost_s = (after - before for before, after in itertools.pairwise(marks))
    return Row(
        status="ok",
        label=label or registry.describe(config.variant),
        config=to_dict(config),
        config_sha256=content_hash(config),
        seed=config.seed,
        versions=installed_versions(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        backend=BACKEND if config.variant.compress else "transformers-sdpa",
        wall_s=marks[-1] - marks[0],
        score_s=score_s,
        cost_s=cost_s,
        scores=scores,
        curve=score.find_period(scores),
        cost=measured,
        **worst_of(scores),
    )


def _sweep(attached: Attachment, config: TrialConfig, protocol: Protocol, log: Callable[[str], None]) -> tuple[ProtocolScore, Answers]:
    settings = config.score
    sweep = retrieval.sweep(config.task, protocol, period=settings.period, prompts=settings.prompts, seed=settings.seed)
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
    for name, module in ((MODEL_FILE, attached.model), (COMPRESSOR_FILE, attached.compressors)):
        write_atomic(folder / name, save({key: tensor.detach().contiguous() for key, tensor in module.state_dict().items()}))


def restore(config: TrialConfig, folder: Path) -> Attachment:
    """The model that `store_weights` left in a folder, in eval mode with its compressors attached."""
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten at once
        model = bases.build(config.base)
        attached = attach(model, config.variant)
    model.load_state_dict(load_file(folder / MODEL_FILE))
    attached.compressors.load_state_dict(load_file(folder / COMPRESSOR_FILE))
    model.eval()
    return attached
