"""Configs of a pretrained model that is fine-tuned: its text, the training, and all of it together."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic.dataclasses import dataclass

from mitigate.config import STRICT, CostConfig, ScoreConfig, VariantConfig, WordsConfig, check_filler, check_period, check_seed, require


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextConfig:
    """Local text: what a pretrained model is fine-tuned on, and a held-out part on which its perplexity is measured.

    Args:
        path: a UTF-8 text file, or a folder written by `save_to_disk` of the `datasets` library.
        separator: in a file, what parts one document from the next. A file without it is one document.
        column, split: of a `datasets` folder, the column that holds the text, and the split where there are several.
        held_out: share of the documents that is never trained on (of a single document, its last part).
        length: tokens of a held-out window, the BOS in front included.
        windows: held-out windows that are scored, spread evenly over the held-out tokens; fewer where these are few.
    """

    path: str
    separator: str = "\f"
    column: str = "text"
    split: str | None = None
    held_out: float = 0.1
    length: int = 512
    windows: int = 16

    def __post_init__(self) -> None:
        require(bool(self.path), "TextConfig.path", "a file or a folder", self.path)
        require(bool(self.separator), "TextConfig.separator", "at least one character", self.separator)
        require(0 < self.held_out < 1, "TextConfig.held_out", "above 0 and below 1", self.held_out)
        require(self.length >= 2, "TextConfig.length", "at least 2", self.length)
        require(self.windows >= 1, "TextConfig.windows", "at least 1", self.windows)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TuneConfig:
    """How a pretrained model is fine-tuned with a variant attached: AdamW on text and on retrieval prompts, an update of one or the other.

    Args:
        what: what is trained: "compressor"; "attention" (the compressor and the q, k, v and o projections); "all" (every weight).
        updates: optimizer steps of the schedule.
        minutes: budget of training time; whichever of updates and minutes ends first sets the schedule's pace. None for no limit.
        batch, accumulate: sequences of a forward pass, and passes of an update.
        length: tokens of a text sequence, the BOS in front included.
        positions: positions of a text sequence whose next token is asked for, drawn for each update; 0 for all of them.
        retrieval: share of the updates that are of retrieval prompts; the others are of text.
        compressor_rate, model_rate: peak learning rates of the compressor and of the model's own weights.
        gate_bias_rate: multiplies the compressor's rate for gate biases, as in `TrainConfig`.
        warmup: updates until the peak; linear decay to `final_rate` times the peak after that.
        weight_decay: of all but gate biases. clip: largest norm of the gradient.
        text_loss, answer_loss: weights of the cross-entropy of the text's next tokens and of the answers.
        distill: weight of KL(full attention || variant) over the same positions, from the same base with its own attention, untrained. temperature: of both.
        checkpoint_every: updates between checkpoints. watch_every: updates between small sweeps while training, 0 for none; watch_prompts: their prompts.
        recompute: recompute activations in the backward pass, which saves memory and takes more time.
    """

    what: Literal["compressor", "attention", "all"] = "compressor"
    updates: int = 1000
    minutes: float | None = None
    batch: int = 2
    accumulate: int = 1
    length: int = 256
    positions: int = 96
    retrieval: float = 0.5
    compressor_rate: float = 2e-3
    model_rate: float = 2e-5
    gate_bias_rate: float = 30.0
    warmup: int = 20
    final_rate: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    text_loss: float = 0.0
    answer_loss: float = 1.0
    distill: float = 1.0
    temperature: float = 1.0
    checkpoint_every: int = 50
    watch_every: int = 0
    watch_prompts: int = 2
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "accumulate", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"TuneConfig.{name}", "at least 1", getattr(self, name))
        for name in ("length", "watch_prompts"):
            require(getattr(self, name) >= 2, f"TuneConfig.{name}", "at least 2", getattr(self, name))
        for name in ("positions", "gate_bias_rate", "warmup", "weight_decay", "text_loss", "answer_loss", "distill", "watch_every"):
            require(getattr(self, name) >= 0, f"TuneConfig.{name}", "at least 0", getattr(self, name))
        for name in ("compressor_rate", "model_rate", "clip", "temperature"):
            require(getattr(self, name) > 0, f"TuneConfig.{name}", "above 0", getattr(self, name))
        for name in ("retrieval", "final_rate"):
            require(0 <= getattr(self, name) <= 1, f"TuneConfig.{name}", "between 0 and 1", getattr(self, name))
        require(self.minutes is None or self.minutes > 0, "TuneConfig.minutes", "above 0", self.minutes)
        text, answers = self.text_loss + self.distill, self.answer_loss + self.distill
        require(text > 0 or self.retrieval == 1, "TuneConfig.text_loss", "above 0 while text is trained on without distillation", self.text_loss)
        require(answers > 0 or self.retrieval == 0, "TuneConfig.answer_loss", "above 0 while retrieval is trained on without distillation", self.answer_loss)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FineTuneConfig:
    """A pretrained model fine-tuned with a variant attached, and scored with its own attention, before and after.

    Args:
        model, revision, dtype: as in `EvaluationConfig`.
        variant: must compress. Its gates are drawn with `seed`; a coverage loss is added with its weight.
        words: the retrieval task, of the training prompts and of the sweeps. text: what else it is trained on.
        score, cost: of the sweeps and of the cost measurement.
        prompt, new_tokens: what each model continues for the record, and by how many tokens at most.
        chat: the prompt is a user's turn of the tokenizer's chat template.
        seed: of gates and of the training data; the sweep's prompts have their own.
    """

    model: str
    text: TextConfig
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    variant: VariantConfig = dataclasses.field(default_factory=VariantConfig)
    words: WordsConfig = dataclasses.field(default_factory=WordsConfig)
    train: TuneConfig = dataclasses.field(default_factory=TuneConfig)
    score: ScoreConfig = dataclasses.field(default_factory=lambda: ScoreConfig(prompts=24))
    cost: CostConfig = dataclasses.field(default_factory=lambda: CostConfig(context=1024, batch=1, repeats=4))
    prompt: str = "The capital of France is"
    new_tokens: int = 24
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed("FineTuneConfig.seed", self.seed)
        require(self.new_tokens >= 1, "FineTuneConfig.new_tokens", "at least 1", self.new_tokens)
        require(bool(self.prompt), "FineTuneConfig.prompt", "at least one character", self.prompt)
        require(self.variant.compress, "FineTuneConfig.variant.compress", "true: there is nothing to train for full attention", self.variant.compress)
        window, length = self.variant.window * self.variant.coarse_factor, self.train.length
        require(length > window, "TuneConfig.length", f"above the window ({window}): nothing shorter is compressed", length)
        plain = self.dtype == "float32" or self.train.what == "compressor"
        require(plain, "FineTuneConfig.dtype", "float32 while the model's own weights are trained, whose small steps are lost in fewer bits", self.dtype)
        check_period(self.variant, self.score)
        check_filler("WordsConfig", self.words.filler, self.words.filler_in_sequence, self.score)
