"""Fine-tune a pretrained model and hold it against itself before, and against its own full attention: one config in, one result folder out.

The folder is written stage by stage, and a run that was cut short goes on where it was: ``run.json`` (what it belongs to), ``row_full.json``,
``row_before.json``, ``checkpoint.pt`` while training, ``bundle/``, ``phase_curves.png`` and ``.svg``, ``summary.json``, and ``row.json`` last of all.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mitigate import bases, evaluate, finetune, generate, perplexity
from mitigate.config import ConfigError, EvaluationConfig, VariantConfig, content_hash, to_dict
from mitigate.config_files import from_dict
from mitigate.config_finetune import FineTuneConfig
from mitigate.export import pretrained
from mitigate.files import write_atomic
from mitigate.report import style, tuning
from mitigate.results import read_row
from mitigate.rows import Row
from mitigate.surgery import Attachment, attach
from mitigate.tasks import text

RUN, SUMMARY, CHECKPOINT, BUNDLE = "run.json", "summary.json", "checkpoint.pt", "bundle"
ROWS = {"full": "row_full.json", "before": "row_before.json", "after": "row.json"}


def run(
    config: FineTuneConfig,
    out: Path,
    *,
    log: Callable[[str], None] = lambda line: None,
    on_update: Callable[[finetune.Progress], None] = lambda progress: None,
) -> tuple[dict[str, Row], dict[str, Any]]:
    """Do what the folder lacks: rows by stage ("full", "before", "after"), and what `summary.json` holds.

    Args:
        out: the result folder; new, empty, or of the same config, base and text.
        log: called with progress lines. on_update: called after each update of the training.

    Raises:
        ConfigError: the folder is of another config, base or text, or an input is bad. Nothing is written then.
        Diverged: training went wrong; the last checkpoint stays.
    """
    _check_folder(out, config)
    if (out / ROWS["after"]).is_file():
        log(f"{out} holds this result already")
        return {stage: read_row(out / name) for stage, name in ROWS.items()}, _json(out / SUMMARY)
    started = time.perf_counter()
    base = bases.load_pretrained(config.model, revision=config.revision, dtype=config.dtype)
    base_s = time.perf_counter() - started
    data = finetune.load_data(base, config)
    torch.manual_seed(config.seed)
    with attach(base.model, config.variant) as attached:
        _claim(out, config, base, data)
        log(f"text: {data.text.documents} documents, {len(data.text.train):,} tokens to train on, {len(data.text.held_out):,} held out")
        work = _Work(config, out, base, data, log)
        with attached.removed():
            own = Attachment(base.model, VariantConfig(compress=False))
            work.stage("full", lambda: evaluate.score_attached(own, base, _as_evaluated(config, own.variant), log=log))
        work.stage("before", lambda: evaluate.score_attached(attached, base, _as_evaluated(config, config.variant), log=log))
        tuned = finetune.fine_tune(attached, data, config, base_sha256=base.sha256, checkpoint=out / CHECKPOINT, on_update=on_update)
        log(f"fine-tune: {tuned.updates} updates, {tuned.tokens:,} tokens, {tuned.seconds:.0f} s")
        work.summary["training"] = _training(tuned)
        done: dict[str, Any] = {"updates": tuned.updates, "tokens": tuned.tokens, "final_loss": tuned.loss, "base_s": base_s, "train_s": tuned.seconds}

        def score() -> Row:
            row = evaluate.score_attached(attached, base, config, log=log)
            return row.model_copy(update=done | {"wall_s": row.wall_s + base_s + tuned.seconds})

        work.stage("after", score, finish=lambda row: _write_results(work, attached, row))
    (out / CHECKPOINT).unlink(missing_ok=True)
    return work.rows, work.summary


class _Work:
    """The stages of a run, what they found, and where it is written."""

    def __init__(self, config: FineTuneConfig, out: Path, base: bases.Pretrained, data: finetune.Data, log: Callable[[str], None]) -> None:
        self.config, self.out, self.base, self.data, self.log = config, out, base, data, log
        self.windows = text.held_out_windows(data.text, config.text)
        self.rows: dict[str, Row] = {}
        empty = {"prompt": config.prompt, "perplexity": {}, "sentences": {}, "base_sha256": base.sha256, "text_sha256": data.text.sha256}
        self.summary: dict[str, Any] = _json(out / SUMMARY) if (out / SUMMARY).is_file() else empty

    def stage(self, name: str, score: Callable[[], Row], finish: Callable[[Row], None] = lambda row: None) -> None:
        """Score, perplexity and a sentence of the model as it is now, unless they are in the folder. The row is written last."""
        path, config = self.out / ROWS[name], self.config
        if path.is_file() and name in self.summary["perplexity"]:
            self.rows[name] = read_row(path)
            return
        model, tokenizer = self.base.model, self.base.tokenizer
        said = generate.generate(model, tokenizer, config.prompt, max_new_tokens=config.new_tokens, chat=config.chat, seed=config.seed)
        found = perplexity.measure(model, self.windows)
        row = self.rows[name] = score()
        self.log(f"{tuning.STAGES[name]}: perplexity {found.perplexity:.2f}, mean accuracy {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}")
        self.summary["perplexity"][name], self.summary["sentences"][name] = asdict(found), asdict(said)
        if name == "full":
            self.summary["kv_bytes_full"] = row.cost.kv_bytes_counted if row.cost else None
        finish(row)
        write_atomic(self.out / SUMMARY, _dumped(self.summary))
        write_atomic(path, row.to_json().encode())


def _write_results(work: _Work, attached: Attachment, row: Row) -> None:
    """The figure and the bundle."""
    sheet = tuning.figure(work.rows, title=row.label)
    for suffix, content in (("png", style.png), ("svg", style.svg)):
        write_atomic(work.out / f"phase_curves.{suffix}", content(sheet))
    shutil.rmtree(work.out / BUNDLE, ignore_errors=True)  # of a run that was cut short just here
    changed = finetune.trained_names(attached, work.config.train.what)
    hashes = {"base_sha256": work.base.sha256, "text_sha256": work.data.text.sha256}
    pretrained.write(work.out / BUNDLE, attached, work.config, row, changed=changed, **hashes)


def _as_evaluated(config: FineTuneConfig, variant: VariantConfig) -> EvaluationConfig:
    """The config under which `mitigate score` gives the same numbers."""
    shared = ("model", "revision", "dtype", "words", "score", "cost", "seed")
    plain = to_dict(config)
    return from_dict(EvaluationConfig, {name: plain[name] for name in shared} | {"variant": to_dict(variant)})


def _training(tuned: finetune.Tuned) -> dict[str, Any]:
    """What `summary.json` keeps of the training: totals, and each update's losses as lists."""
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in tuned.steps] for name in ("answers", "loss", "cross_entropy", "divergence")}
    watched = [asdict(one) for one in tuned.watched]
    return {"updates": tuned.updates, "tokens": tuned.tokens, "seconds": tuned.seconds, "final_loss": tuned.loss, "steps": columns, "watched": watched}


def _check_folder(out: Path, config: FineTuneConfig) -> None:
    """ConfigError unless the folder is free, or of this config as far as the config can tell."""
    if (out / RUN).is_file():
        found = _json(out / RUN).get("config_sha256", "")
        if found != content_hash(evaluate.recorded(config)):
            raise ConfigError(f"{out} holds the run of another config ({str(found)[:8]}); choose another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty and holds no run of mitigate finetune; choose another --out")


def _claim(out: Path, config: FineTuneConfig, base: bases.Pretrained, data: finetune.Data) -> None:
    """Write down what the folder belongs to, or ConfigError if it belongs to another base or text."""
    kept = evaluate.recorded(config)
    belongs = {"config_sha256": content_hash(kept), "config": to_dict(kept), "base_sha256": base.sha256, "text_sha256": data.text.sha256}
    if not (out / RUN).is_file():
        write_atomic(out / RUN, _dumped(belongs))
        return
    found = _json(out / RUN)
    for name, what in (("base_sha256", "other weights"), ("text_sha256", "another text")):
        if found.get(name) != belongs[name]:
            raise ConfigError(f"{out} holds the run of {what} of the same name ({str(found.get(name))[:8]}); choose another --out")


def _dumped(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False).encode()


def _json(path: Path) -> dict[str, Any]:
    """A JSON object that this module wrote; ConfigError if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold an object")
    return found
