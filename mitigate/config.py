"""Configs: frozen dataclasses, strict TOML in, canonical JSON out, a content hash each.

A TOML file may name a preset where a table is expected (``variant = "w8s8"``, ``base = "tiny-1kv"``); `load_*` resolves the name to a file of
``configs/``. Unknown keys, wrong types and values out of bounds give one `ConfigError` line that names the field, the bound and the value.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

PRESETS = Path(__file__).parent / "configs"
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ConfigError(ValueError):
    """Bad input from a user: one line that names the field, the bound and the value."""


class WorkFailed(RuntimeError):
    """The input was good and the work did not succeed; the message says what to try."""


def _require(holds: bool, field: str, bound: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{field} must be {bound}, got {got!r}" if isinstance(got, str) else f"{field} must be {bound}, got {got}")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class VariantConfig:
    """One way to compress a KV cache. Strategy names (coarse, stagger, gate, bypass, coverage) are resolved by `mitigate.registry`.

    Args:
        compress: False is full attention; every other field must then keep its default.
        window: tokens pooled into one summary (W).
        stride: distance between window starts (S), 1 <= S <= W.
        origin: start of window 0 (o), -W < o <= 0, before any stagger.
        coarse: which layers are coarse: their window and stride are `coarse_factor` times W and S.
        stagger: how layers shift their grids against each other.
        gate: which pooling weights are learned: "scalar", "vector", "uniform", "scalar-no-bias", "content".
        tie: "none"; "gates" (K and V share one gate); "kv" (one summary serves as key and value and is held once).
        payload: "shared" (the layer's own K/V projection) or "per_offset" (one learned map per offset, started from the layer's).
        local_window: L, the last L tokens stay exact, the current one included; 1 keeps nothing but the open tail.
        bypass: which tokens of a window keep their exact KV for good.
        coverage: regularizer over a set of heads; coverage_weight is its lambda, coverage_threshold the hinge's tau.
        coverage_scope: the set: "layer" (the heads of each layer by themselves, averaged over layers) or "model" (all heads of all layers).
        key_norm: where the model's own key norm acts, if it has one: "pooled" (on the pooled key) or "tokens" (on each token's key, before pooling).
        rope_position: where a summary's key is rotated to: "last_stride" (first token of the window's last S tokens), "window_start", "window_end".
    """

    compress: bool = True
    window: int = 8
    stride: int = 8
    origin: int = 0
    coarse: str = "none"
    coarse_factor: int = 1
    stagger: str = "none"
    gate: str = "scalar"
    tie: Literal["none", "gates", "kv"] = "none"
    payload: Literal["shared", "per_offset"] = "shared"
    local_window: int = 16
    bypass: str = "none"
    coverage: str = "none"
    coverage_weight: float = 0.0
    coverage_threshold: float = 0.25
    coverage_scope: Literal["layer", "model"] = "layer"
    key_norm: Literal["pooled", "tokens"] = "pooled"
    rope_position: Literal["last_stride", "window_start", "window_end"] = "last_stride"

    def __post_init__(self) -> None:
        _require(self.window >= 1, "VariantConfig.window", "at least 1", self.window)
        _require(1 <= self.stride <= self.window, "VariantConfig.stride", f"between 1 and window ({self.window})", self.stride)
        _require(-self.window < self.origin <= 0, "VariantConfig.origin", f"above -window ({-self.window}) and at most 0", self.origin)
        _require(self.coarse_factor >= 1, "VariantConfig.coarse_factor", "at least 1", self.coarse_factor)
        if self.coarse == "none":
            _require(self.coarse_factor == 1, "VariantConfig.coarse_factor", '1 while coarse is "none"', self.coarse_factor)
        _require(self.local_window >= 1, "VariantConfig.local_window", "at least 1 (the current token)", self.local_window)
        _require(self.coverage_weight >= 0, "VariantConfig.coverage_weight", "at least 0", self.coverage_weight)
        _require(0 <= self.coverage_threshold <= 1, "VariantConfig.coverage_threshold", "between 0 and 1", self.coverage_threshold)
        if self.coverage == "none":
            _require(self.coverage_weight == 0, "VariantConfig.coverage_weight", 'zero while coverage is "none"', self.coverage_weight)
        if not self.compress:
            plain = {f.name: f.default for f in dataclasses.fields(self)} | {"compress": False}
            for name, default in plain.items():
                _require(getattr(self, name) == default, f"VariantConfig.{name}", f"left at {default!r} while compress is false", getattr(self, name))

    @property
    def widest_stride(self) -> int:
        """Tokens between window starts in the coarsest layers; phases of all layers repeat with it."""
        return self.stride * self.coarse_factor


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TaskConfig:
    """Key -> name retrieval. Prompt: BOS, records with filler, SEP, queries; each record is a key directly followed by its name.

    Args:
        keys, names, filler_tokens: sizes of the three disjoint vocabularies (BOS and SEP besides).
        key_tokens, name_tokens: tokens of a key and of a name, 1 to 4. An answer counts as right if all of its tokens are.
        records: records per prompt, keys distinct, names drawn freely.
        queries: queries per prompt, drawn with replacement in training, distinct in a sweep.
        filler: filler tokens of an outer-padded prompt; a sweep over P residues needs 3 (P - 1).
        filler_in_sequence: filler tokens of an in-sequence-padded prompt; what is more than 3 (P - 1) mixes the gaps.
    """

    keys: int = 64
    names: int = 64
    filler_tokens: int = 8
    key_tokens: int = 1
    name_tokens: int = 1
    records: int = 32
    queries: int = 16
    filler: int = 72
    filler_in_sequence: int = 96

    def __post_init__(self) -> None:
        for name in ("keys", "names", "filler_tokens", "records", "queries"):
            _require(getattr(self, name) >= 1, f"TaskConfig.{name}", "at least 1", getattr(self, name))
        for name in ("key_tokens", "name_tokens"):
            _require(1 <= getattr(self, name) <= 4, f"TaskConfig.{name}", "between 1 and 4", getattr(self, name))
        different = self.keys**self.key_tokens
        _require(self.records <= different, "TaskConfig.records", f"at most the number of different keys ({different})", self.records)
        for name in ("filler", "filler_in_sequence"):
            _require(getattr(self, name) >= 0, f"TaskConfig.{name}", "at least 0", getattr(self, name))

    @property
    def record_length(self) -> int:
        """Tokens of a record: its key and its name."""
        return self.key_tokens + self.name_tokens


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class WordsConfig:
    """Animal -> name retrieval on a model's own tokenizer; see `mitigate.tasks.words`.

    Args:
        records: records per prompt; `context` replaces it.
        context: tokens of a prompt, filled with as many records as fit, the queried ones near the middle; None for `records` records.
        demonstrations: records repeated, with their names, in front of the queries.
        queries: distinct records asked for in turn; each sees the right answers of those before it. 1 is the paper's form.
        between, after: text after a record's key and after its name; both empty is the paper's form, which small pretrained models hardly read.
        padding: text whose tokens are repeated as filler. separator: text between the records and the demonstrations, unless `chat`.
        filler, filler_in_sequence: as in `TaskConfig`.
        bos: put the tokenizer's BOS in front even where the tokenizer itself would not (under `chat` the template decides). Without one the first tokens of
            a prompt have to serve as an attention sink, and SmolLM2-135M-Instruct finds 0.16 of the names instead of 0.54.
        chat: records in the user's turn of the tokenizer's chat template, demonstrations and queries in the assistant's.
    """

    records: int = 64
    context: int | None = None
    demonstrations: int = 8
    queries: int = 8
    between: str = ":"
    after: str = "\n"
    padding: str = "\n"
    separator: str = "\n"
    filler: int = 72
    filler_in_sequence: int = 96
    bos: bool = True
    chat: bool = False

    def __post_init__(self) -> None:
        for name in ("records", "queries"):
            _require(getattr(self, name) >= 1, f"WordsConfig.{name}", "at least 1", getattr(self, name))
        for name in ("demonstrations", "filler", "filler_in_sequence"):
            _require(getattr(self, name) >= 0, f"WordsConfig.{name}", "at least 0", getattr(self, name))
        shown = self.demonstrations + self.queries
        if self.context is None:
            _require(self.records >= shown, "WordsConfig.records", f"at least demonstrations + queries ({shown})", self.records)
        _require(bool(self.padding), "WordsConfig.padding", "at least one character", self.padding)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BaseConfig:
    """Where a base model comes from. "tiny" is a Qwen3ForCausalLM trained here on the retrieval task and cached by this config's hash.

    Args:
        layers, hidden, heads, kv_heads, head_dim, intermediate: shape of the model; `intermediate` is the MLP's width.
        rope_theta: base of the rotary frequencies.
        updates: the curriculum must be through after so many.
        settle: updates after it, over which the rate decays to a tenth.
        learning_rate: of AdamW, until the curriculum is through.
        tokens_per_batch: a batch holds this // max(records, 4) prompts, at least 32.
        seed: of the start and of the prompts.
        task: what it learns; its vocabulary is the model's.
    """

    kind: Literal["tiny"] = "tiny"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 192
    rope_theta: float = 1000.0
    updates: int = 3000
    settle: int = 250
    learning_rate: float = 3e-3
    tokens_per_batch: int = 512
    seed: int = 0
    task: TaskConfig = dataclasses.field(default_factory=lambda: TaskConfig(filler=24, filler_in_sequence=36))

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "updates", "settle", "tokens_per_batch"):
            _require(getattr(self, name) >= 1, f"BaseConfig.{name}", "at least 1", getattr(self, name))
        _require(self.heads % self.kv_heads == 0, "BaseConfig.kv_heads", f"a divisor of heads ({self.heads})", self.kv_heads)
        _require(self.head_dim % 2 == 0, "BaseConfig.head_dim", "even", self.head_dim)
        for name in ("rope_theta", "learning_rate"):
            _require(getattr(self, name) > 0, f"BaseConfig.{name}", "above 0", getattr(self, name))
        _require(self.seed >= 0, "BaseConfig.seed", "at least 0", self.seed)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """Fine-tuning: AdamW on all weights (no decay on gate biases), half of the batches under each padding protocol.

    Args:
        updates: optimizer steps; 0 leaves the base and fresh gates as they are.
        batch: prompts per update.
        learning_rate: peak rate, reached after `warmup` updates; linear decay to 0 after that.
        clip: largest norm of the gradient.
        gate_bias_rate: multiplies the learning rate of gate biases. A gate logit ``Z.h + b`` moves about C times faster through Z (C weights that
            Adam steps together) than through b; at 1 a short fine-tune never learns the static gates that long training ends with.
    """

    updates: int = 600
    batch: int = 32
    learning_rate: float = 2e-3
    gate_bias_rate: float = 30.0
    warmup: int = 20
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        _require(self.updates >= 0, "TrainConfig.updates", "at least 0", self.updates)
        _require(self.batch >= 1, "TrainConfig.batch", "at least 1", self.batch)
        _require(self.learning_rate > 0, "TrainConfig.learning_rate", "above 0", self.learning_rate)
        _require(self.gate_bias_rate >= 0, "TrainConfig.gate_bias_rate", "at least 0", self.gate_bias_rate)
        _require(self.warmup >= 0, "TrainConfig.warmup", "at least 0", self.warmup)
        _require(self.weight_decay >= 0, "TrainConfig.weight_decay", "at least 0", self.weight_decay)
        _require(self.clip > 0, "TrainConfig.clip", "above 0", self.clip)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ScoreConfig:
    """The phase sweep.

    Args:
        period: residues P; must be a multiple of every stride scored with it.
        prompts: logical prompts, each scored at all P placements under each protocol. At a multiple of period^2 the target positions of all residues have
            exactly the same mean and variance; at fewer, what is left is recorded.
        protocols: padding protocols; A_min is the lowest over them.
        batch: placements per forward pass, rounded up to whole prompts.
        replicates: bootstrap replicates.
        seed: seed of the prompts; the same for every variant of a study, so that they are compared on the same examples.
    """

    period: int = 24
    prompts: int = 96
    protocols: tuple[Literal["outer", "in_sequence"], ...] = ("outer", "in_sequence")
    replicates: int = 2000
    batch: int = 48
    seed: int = 1

    def __post_init__(self) -> None:
        _require(self.period >= 1, "ScoreConfig.period", "at least 1", self.period)
        _require(self.prompts >= 2, "ScoreConfig.prompts", "at least 2 (cross-fitting halves them)", self.prompts)
        _require(
            len(self.protocols) >= 1 and len(set(self.protocols)) == len(self.protocols),
            "ScoreConfig.protocols",
            "one or both protocols, each once",
            list(self.protocols),
        )
        _require(self.replicates >= 1, "ScoreConfig.replicates", "at least 1", self.replicates)
        _require(self.batch >= 1, "ScoreConfig.batch", "at least 1", self.batch)
        _require(self.seed >= 0, "ScoreConfig.seed", "at least 0", self.seed)


def _check_filler(owner: str, outer: int, in_sequence: int, score: ScoreConfig) -> None:
    """A sweep over P residues with matched target positions takes 3 (P - 1) filler tokens, and some more to mix gaps; ConfigError names what is short."""
    least = 3 * (score.period - 1)
    if "outer" in score.protocols:
        _require(outer >= least, f"{owner}.filler", f"at least 3 * (period - 1) = {least} for ScoreConfig.period {score.period}", outer)
    if "in_sequence" in score.protocols:
        _require(in_sequence > least, f"{owner}.filler_in_sequence", f"above 3 * (period - 1) = {least} for ScoreConfig.period {score.period}", in_sequence)


def _check_period(variant: VariantConfig, score: ScoreConfig) -> None:
    if variant.compress:
        whose = "" if variant.coarse == "none" else " of coarse layers"
        _require(score.period % variant.widest_stride == 0, "ScoreConfig.period", f"a multiple of the stride{whose} ({variant.widest_stride})", score.period)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CostConfig:
    """Decode throughput: `steps` tokens after a context of `context` tokens, `batch` sequences, `repeats` rounds, in turn with full attention step by step.

    `steps` should be a multiple of the strides, so that the steps that pool are counted at their share (24 is, for 4, 6, 8 and 12).
    """

    context: int = 4096
    batch: int = 4
    steps: int = 24
    repeats: int = 12

    def __post_init__(self) -> None:
        for name in ("context", "batch", "steps", "repeats"):
            _require(getattr(self, name) >= 1, f"CostConfig.{name}", "at least 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrialConfig:
    """Everything one trial depends on. `seed` draws fresh gates and the fine-tuning prompts; the sweep's prompts have their own."""

    variant: VariantConfig = dataclasses.field(default_factory=VariantConfig)
    base: BaseConfig = dataclasses.field(default_factory=BaseConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    score: ScoreConfig = dataclasses.field(default_factory=ScoreConfig)
    cost: CostConfig = dataclasses.field(default_factory=CostConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "TrialConfig.seed", "at least 0", self.seed)
        _check_period(self.variant, self.score)
        _check_filler("TaskConfig", self.task.filler, self.task.filler_in_sequence, self.score)
        _require(self.task.queries <= self.task.records, "TaskConfig.queries", f"at most records ({self.task.records})", self.task.queries)
        for name in ("keys", "names", "filler_tokens"):
            _require(
                getattr(self.task, name) == getattr(self.base.task, name),
                f"TaskConfig.{name}",
                f"the base's ({getattr(self.base.task, name)})",
                getattr(self.task, name),
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EvaluationConfig:
    """A pretrained model scored as it stands, with its own attention or with an untrained variant attached.

    Args:
        model: a folder, a GGUF file, or a name on the Hugging Face hub; revision: of the hub's repository.
        dtype: of weights and activations.
        variant: `compress = false` is the model's own attention. Its gates are drawn with `seed`.
    """

    model: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    variant: VariantConfig = dataclasses.field(default_factory=lambda: VariantConfig(compress=False))
    words: WordsConfig = dataclasses.field(default_factory=WordsConfig)
    score: ScoreConfig = dataclasses.field(default_factory=lambda: ScoreConfig(prompts=24))
    cost: CostConfig = dataclasses.field(default_factory=lambda: CostConfig(context=1024, batch=1, repeats=4))
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "EvaluationConfig.seed", "at least 0", self.seed)
        _check_period(self.variant, self.score)
        _check_filler("WordsConfig", self.words.filler, self.words.filler_in_sequence, self.score)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
        _require(bool(self.path), "TextConfig.path", "a file or a folder", self.path)
        _require(bool(self.separator), "TextConfig.separator", "at least one character", self.separator)
        _require(0 < self.held_out < 1, "TextConfig.held_out", "above 0 and below 1", self.held_out)
        _require(self.length >= 2, "TextConfig.length", "at least 2", self.length)
        _require(self.windows >= 1, "TextConfig.windows", "at least 1", self.windows)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
            _require(getattr(self, name) >= 1, f"TuneConfig.{name}", "at least 1", getattr(self, name))
        for name in ("length", "watch_prompts"):
            _require(getattr(self, name) >= 2, f"TuneConfig.{name}", "at least 2", getattr(self, name))
        for name in ("positions", "gate_bias_rate", "warmup", "weight_decay", "text_loss", "answer_loss", "distill", "watch_every"):
            _require(getattr(self, name) >= 0, f"TuneConfig.{name}", "at least 0", getattr(self, name))
        for name in ("compressor_rate", "model_rate", "clip", "temperature"):
            _require(getattr(self, name) > 0, f"TuneConfig.{name}", "above 0", getattr(self, name))
        for name in ("retrieval", "final_rate"):
            _require(0 <= getattr(self, name) <= 1, f"TuneConfig.{name}", "between 0 and 1", getattr(self, name))
        _require(self.minutes is None or self.minutes > 0, "TuneConfig.minutes", "above 0", self.minutes)
        text, answers = self.text_loss + self.distill, self.answer_loss + self.distill
        _require(text > 0 or self.retrieval == 1, "TuneConfig.text_loss", "above 0 while text is trained on without distillation", self.text_loss)
        _require(answers > 0 or self.retrieval == 0, "TuneConfig.answer_loss", "above 0 while retrieval is trained on without distillation", self.answer_loss)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
        _require(self.seed >= 0, "FineTuneConfig.seed", "at least 0", self.seed)
        _require(self.new_tokens >= 1, "FineTuneConfig.new_tokens", "at least 1", self.new_tokens)
        _require(bool(self.prompt), "FineTuneConfig.prompt", "at least one character", self.prompt)
        _require(self.variant.compress, "FineTuneConfig.variant.compress", "true: there is nothing to train for full attention", self.variant.compress)
        window, length = self.variant.window * self.variant.coarse_factor, self.train.length
        _require(length > window, "TuneConfig.length", f"above the window ({window}): nothing shorter is compressed", length)
        plain = self.dtype == "float32" or self.train.what == "compressor"
        _require(plain, "FineTuneConfig.dtype", "float32 while the model's own weights are trained, whose small steps are lost in fewer bits", self.dtype)
        _check_period(self.variant, self.score)
        _check_filler("WordsConfig", self.words.filler, self.words.filler_in_sequence, self.score)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RungsConfig:
    """Cheaper looks at a trial before it gets its whole budget (successive halving). Anchors skip them.

    Args:
        updates: fine-tuning updates after which a trial pauses and is scored, rising, all below `trial.train.updates`; none for no rungs.
        prompts: logical prompts of the sweep at each rung; `trial.score.prompts` where left out.
        eta: of the trials of a bracket that reach a rung, the best 1/eta go on.
        bracket: trials that are compared with each other.
    """

    updates: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    eta: int = 3
    bracket: int = 9

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise((0, *self.updates)))
        _require(rising, "RungsConfig.updates", "rising, from at least 1", list(self.updates))
        as_long = len(self.prompts) in (0, len(self.updates))
        _require(as_long, "RungsConfig.prompts", f"one number for each of the {len(self.updates)} rungs, or left out", list(self.prompts))
        _require(all(count >= 2 for count in self.prompts), "RungsConfig.prompts", "at least 2 each (cross-fitting halves them)", list(self.prompts))
        _require(self.eta >= 2, "RungsConfig.eta", "at least 2", self.eta)
        _require(self.bracket >= self.eta, "RungsConfig.bracket", f"at least eta ({self.eta})", self.bracket)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ResourcesConfig:
    """What one running trial takes from a Ray cluster.

    Args:
        cpus: CPU cores, and torch threads.
        gpus: GPUs; a fraction shares one. 0 hides every GPU from the trial.
        memory_gib: GiB of memory that must be free to start; not a limit once it runs. None for no demand.
    """

    cpus: int = 1
    gpus: float = 0.0
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        _require(self.cpus >= 1, "ResourcesConfig.cpus", "at least 1", self.cpus)
        _require(self.gpus >= 0, "ResourcesConfig.gpus", "at least 0", self.gpus)
        _require(self.gpus <= 1 or self.gpus == int(self.gpus), "ResourcesConfig.gpus", "a fraction of one GPU or a whole number", self.gpus)
        _require(self.memory_gib is None or self.memory_gib > 0, "ResourcesConfig.memory_gib", "above 0", self.memory_gib)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SearchConfig:
    """A search: anchors first, then `trials` in all, proposed by the sampler over `space`.

    Args:
        name: folder under `results/`.
        trials: total number of trials; anchors, failures and trials stopped at a rung counted.
        workers: trials that run at once.
        seed: seeds the sampler; trial seeds are `trial.seed`.
        anchors: variant presets that run first, in this order.
        space: choices of each searched parameter (see `mitigate.search.space`).
        sampler: "tpe" or "random".
        require: what a trial must meet, such as "kv_kept <= 0.15" (see `mitigate.requirements`). A variant whose KV bytes break one is never proposed; a
            finished trial that breaks one is kept, and the sampler is told by how much.
        reproducible: the same proposals whatever the workers' timing. Each waits for a fixed set of earlier trials, and the sampler does not see throughput,
            which is never measured twice the same.
        lag: while `reproducible` and without rungs, trial n knows the trials up to n - lag. Those must have their costs measured, so
            workers wait for each other; a larger lag, or rungs, keeps them busy. With rungs, a trial knows the anchors and the brackets up to the last but
            one, and those of the first two brackets know nothing.
        max_hours: stop proposing after this many hours of one call, None for no limit.
        max_updates: stop proposing once the trials have done this many fine-tuning updates together, None for no limit.
        trial_timeout_s: a stage of a trial (training and scoring up to a rung, or measuring costs) that runs longer makes it infeasible.
        max_consecutive_failures: stop the search, with the first error, after so many in a row.
        rungs: cheaper looks at a trial before it gets its whole budget.
        resources: what one trial takes.
        trial: the template of every trial; its variant is replaced.
    """

    name: str
    trials: int
    workers: int = 2
    seed: int = 0
    anchors: tuple[str, ...] = ("full", "w8s8")
    space: dict[str, tuple[str | int | float, ...]] = dataclasses.field(default_factory=dict)
    sampler: Literal["tpe", "random"] = "tpe"
    require: tuple[str, ...] = ()
    reproducible: bool = False
    lag: int = 4
    max_hours: float | None = None
    max_updates: int | None = None
    trial_timeout_s: float = 1800.0
    max_consecutive_failures: int = 5
    rungs: RungsConfig = dataclasses.field(default_factory=RungsConfig)
    resources: ResourcesConfig = dataclasses.field(default_factory=ResourcesConfig)
    trial: TrialConfig = dataclasses.field(default_factory=TrialConfig)

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "").replace(".", "").isalnum() and not self.name.startswith(".")
        _require(plain, "SearchConfig.name", "letters, digits, '-', '_' and '.', not starting with '.'", self.name)
        _require(self.trials >= 1, "SearchConfig.trials", "at least 1", self.trials)
        _require(self.workers >= 1, "SearchConfig.workers", "at least 1", self.workers)
        _require(self.seed >= 0, "SearchConfig.seed", "at least 0", self.seed)
        _require(self.lag >= 1, "SearchConfig.lag", "at least 1", self.lag)
        _require(len(set(self.anchors)) == len(self.anchors), "SearchConfig.anchors", "distinct", list(self.anchors))
        _require(len(set(self.require)) == len(self.require), "SearchConfig.require", "distinct", list(self.require))
        for key, choices in self.space.items():
            _require(len(choices) >= 1, f"SearchConfig.space.{key}", "a list of at least one choice", list(choices))
            _require(len(set(choices)) == len(choices), f"SearchConfig.space.{key}", "distinct choices", list(choices))
        _require(self.max_hours is None or self.max_hours > 0, "SearchConfig.max_hours", "above 0", self.max_hours)
        _require(self.max_updates is None or self.max_updates > 0, "SearchConfig.max_updates", "above 0", self.max_updates)
        _require(self.trial_timeout_s > 0, "SearchConfig.trial_timeout_s", "above 0", self.trial_timeout_s)
        _require(self.max_consecutive_failures >= 1, "SearchConfig.max_consecutive_failures", "at least 1", self.max_consecutive_failures)
        whole = self.trial.train.updates
        _require(
            not self.rungs.updates or self.rungs.updates[-1] < whole, "RungsConfig.updates", f"below TrainConfig.updates ({whole})", list(self.rungs.updates)
        )


Config = (
    VariantConfig
    | TaskConfig
    | WordsConfig
    | BaseConfig
    | TrainConfig
    | ScoreConfig
    | CostConfig
    | TrialConfig
    | EvaluationConfig
    | TextConfig
    | TuneConfig
    | FineTuneConfig
    | SearchConfig
)
C = TypeVar(
    "C",
    VariantConfig,
    TaskConfig,
    WordsConfig,
    BaseConfig,
    TrainConfig,
    ScoreConfig,
    CostConfig,
    TrialConfig,
    EvaluationConfig,
    TextConfig,
    TuneConfig,
    FineTuneConfig,
    SearchConfig,
)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data of a config; `from_dict` gives an equal config back."""
    plain: dict[str, Any] = json.loads(canonical_json(config))
    return plain


def canonical_json(config: Config) -> str:
    """Sorted keys, no spaces, every default written out: equal configs give equal bytes."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(config: Config) -> str:
    """sha256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def replace(config: C, **changes: Any) -> C:
    """A copy with some fields changed, validated again."""
    return from_dict(type(config), to_dict(config) | {k: to_dict(v) if dataclasses.is_dataclass(v) else v for k, v in changes.items()})  # type: ignore[arg-type]


def from_dict(kind: type[C], data: dict[str, Any]) -> C:
    """Strictly validate plain data.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, or a value out of bounds.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(kind, error)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind.__name__} must hold plain TOML or JSON values: {error}") from None


def _one_line(kind: type, error: pydantic.ValidationError) -> str:
    found = error.errors(include_url=False)
    first = next((e for e in found if e["type"] == "unexpected_keyword_argument"), found[0])  # a misspelt key explains a missing one
    owner, path = kind, [str(part) for part in first["loc"]]
    for part in path[:-1]:
        field = next((f for f in dataclasses.fields(owner) if f.name == part), None)
        inner = _config_class(field.type) if field else None
        if inner is None:
            break
        owner = inner
    where = f"{owner.__name__}.{path[-1]}" if path else owner.__name__
    if first["type"] == "unexpected_keyword_argument":
        known = [f.name for f in dataclasses.fields(owner)]
        return f"{where} is not a known key{did_you_mean(path[-1], known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{where} is missing"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _config_class(annotation: Any) -> type | None:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    found = globals().get(name)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def did_you_mean(word: str, known: list[str]) -> str:
    """'; did you mean X?' for a near miss, else the list of what is known."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; ConfigError names the file when it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} is not there") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path} is a folder") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def preset_names(kind: Literal["variants", "bases", "spaces"]) -> list[str]:
    """Names of the presets under `configs/<kind>/`."""
    return sorted(path.stem for path in (PRESETS / kind).glob("*.toml"))


def preset_path(kind: Literal["variants", "bases", "spaces"], name: str) -> Path:
    """File of a preset; ConfigError suggests a near name."""
    names = preset_names(kind)
    if name not in names:
        raise ConfigError(f"there is no {kind[:-1]} preset {name!r}{did_you_mean(name, names)}")
    return PRESETS / kind / f"{name}.toml"


def load_variant(name: str) -> VariantConfig:
    """The variant of a preset. A preset file holds `summary`, `source` and the table `variant`."""
    return from_dict(VariantConfig, read_toml(preset_path("variants", name)).get("variant", {}))


def load_base(name: str) -> BaseConfig:
    """The base of a preset under `configs/bases/`."""
    return from_dict(BaseConfig, read_toml(preset_path("bases", name)))


def _resolve_names(trial: dict[str, Any]) -> dict[str, Any]:
    resolved = dict(trial)
    if isinstance(resolved.get("variant"), str):
        resolved["variant"] = to_dict(load_variant(resolved["variant"]))
    if isinstance(resolved.get("base"), str):
        resolved["base"] = to_dict(load_base(resolved["base"]))
    return resolved


def load_trial(path: Path) -> TrialConfig:
    """A TrialConfig from TOML, or the `trial` table of a search config (whose variant is then full attention)."""
    data = read_toml(path)
    if "trials" in data or "space" in data:
        return load_search(path).trial
    return from_dict(TrialConfig, _resolve_names(data))


def load_fine_tune(path: Path, *, model: str | None = None) -> FineTuneConfig:
    """A FineTuneConfig from TOML, with `model` instead of its own if given. Relative paths in it are looked for from the current folder."""
    data = read_toml(path)
    return from_dict(FineTuneConfig, _resolve_names(data) | ({} if model is None else {"model": model}))


def load_search(path: Path) -> SearchConfig:
    """A SearchConfig from TOML; `space = "name"` takes `configs/spaces/name.toml`."""
    data = read_toml(path)
    if isinstance(data.get("space"), str):
        data["space"] = read_toml(preset_path("spaces", data["space"]))
    if isinstance(data.get("trial"), dict):
        if "variant" in data["trial"]:
            raise ConfigError("SearchConfig.trial.variant must be left out: the anchors and the space supply it")
        # A placeholder that asks nothing of the period; every trial's variant is checked against it on its own.
        data["trial"] = _resolve_names(data["trial"]) | {"variant": {"compress": False}}
    config = from_dict(SearchConfig, data)
    for name in config.anchors:
        load_variant(name)
    return config
