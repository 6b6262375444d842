"""Configs: frozen dataclasses of what a trial and an evaluation depend on, canonical JSON out, a content hash each. `config_files` reads them.

Values out of bounds give one `ConfigError` line that names the field, the bound and the value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
HIGHEST_SEED = 2**63 - 1


class ConfigError(ValueError):
    """Bad input from a user: one line that names the field, the bound and the value."""


class WorkFailed(RuntimeError):
    """The input was good and the work did not succeed; the message says what to try."""


def require(holds: bool, field: str, bound: str, got: object) -> None:
    """ConfigError unless it holds: the field, what it must be and what it is."""
    if not holds:
        raise ConfigError(f"{field} must be {bound}, got {got!r}" if isinstance(got, str) else f"{field} must be {bound}, got {got}")


def check_seed(field: str, seed: int) -> None:
    """ConfigError unless torch's generator takes the seed."""
    require(seed >= 0, field, "at least 0", seed)
    require(seed <= HIGHEST_SEED, field, f"at most {HIGHEST_SEED} (2**63 - 1)", seed)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        require(self.window >= 1, "VariantConfig.window", "at least 1", self.window)
        require(1 <= self.stride <= self.window, "VariantConfig.stride", f"between 1 and window ({self.window})", self.stride)
        require(-self.window < self.origin <= 0, "VariantConfig.origin", f"above -window ({-self.window}) and at most 0", self.origin)
        require(self.coarse_factor >= 1, "VariantConfig.coarse_factor", "at least 1", self.coarse_factor)
        if self.coarse == "none":
            require(self.coarse_factor == 1, "VariantConfig.coarse_factor", '1 while coarse is "none"', self.coarse_factor)
        require(self.local_window >= 1, "VariantConfig.local_window", "at least 1 (the current token)", self.local_window)
        require(self.coverage_weight >= 0, "VariantConfig.coverage_weight", "at least 0", self.coverage_weight)
        require(0 <= self.coverage_threshold <= 1, "VariantConfig.coverage_threshold", "between 0 and 1", self.coverage_threshold)
        if self.coverage == "none":
            require(self.coverage_weight == 0, "VariantConfig.coverage_weight", 'zero while coverage is "none"', self.coverage_weight)
        if not self.compress:
            plain = {f.name: f.default for f in dataclasses.fields(self)} | {"compress": False}
            for name, default in plain.items():
                require(getattr(self, name) == default, f"VariantConfig.{name}", f"left at {default!r} while compress is false", getattr(self, name))

    @property
    def widest_stride(self) -> int:
        """Tokens between window starts in the coarsest layers; phases of all layers repeat with it."""
        return self.stride * self.coarse_factor


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
            require(getattr(self, name) >= 1, f"TaskConfig.{name}", "at least 1", getattr(self, name))
        for name in ("key_tokens", "name_tokens"):
            require(1 <= getattr(self, name) <= 4, f"TaskConfig.{name}", "between 1 and 4", getattr(self, name))
        different = self.keys**self.key_tokens
        require(self.records <= different, "TaskConfig.records", f"at most the number of different keys ({different})", self.records)
        for name in ("filler", "filler_in_sequence"):
            require(getattr(self, name) >= 0, f"TaskConfig.{name}", "at least 0", getattr(self, name))

    @property
    def record_length(self) -> int:
        """Tokens of a record: its key and its name."""
        return self.key_tokens + self.name_tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
            require(getattr(self, name) >= 1, f"WordsConfig.{name}", "at least 1", getattr(self, name))
        for name in ("demonstrations", "filler", "filler_in_sequence"):
            require(getattr(self, name) >= 0, f"WordsConfig.{name}", "at least 0", getattr(self, name))
        shown = self.demonstrations + self.queries
        if self.context is None:
            require(self.records >= shown, "WordsConfig.records", f"at least demonstrations + queries ({shown})", self.records)
        require(self.context is None or self.context >= 1, "WordsConfig.context", "at least 1", self.context)
        require(bool(self.padding), "WordsConfig.padding", "at least one character", self.padding)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
            require(getattr(self, name) >= 1, f"BaseConfig.{name}", "at least 1", getattr(self, name))
        require(self.heads % self.kv_heads == 0, "BaseConfig.kv_heads", f"a divisor of heads ({self.heads})", self.kv_heads)
        require(self.head_dim % 2 == 0, "BaseConfig.head_dim", "even", self.head_dim)
        for name in ("rope_theta", "learning_rate"):
            require(getattr(self, name) > 0, f"BaseConfig.{name}", "above 0", getattr(self, name))
        check_seed("BaseConfig.seed", self.seed)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        require(self.updates >= 0, "TrainConfig.updates", "at least 0", self.updates)
        require(self.batch >= 1, "TrainConfig.batch", "at least 1", self.batch)
        require(self.learning_rate > 0, "TrainConfig.learning_rate", "above 0", self.learning_rate)
        require(self.gate_bias_rate >= 0, "TrainConfig.gate_bias_rate", "at least 0", self.gate_bias_rate)
        require(self.warmup >= 0, "TrainConfig.warmup", "at least 0", self.warmup)
        require(self.weight_decay >= 0, "TrainConfig.weight_decay", "at least 0", self.weight_decay)
        require(self.clip > 0, "TrainConfig.clip", "above 0", self.clip)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        require(self.period >= 1, "ScoreConfig.period", "at least 1", self.period)
        require(self.prompts >= 2, "ScoreConfig.prompts", "at least 2 (cross-fitting halves them)", self.prompts)
        require(
            len(self.protocols) >= 1 and len(set(self.protocols)) == len(self.protocols),
            "ScoreConfig.protocols",
            "one or both protocols, each once",
            list(self.protocols),
        )
        require(self.replicates >= 1, "ScoreConfig.replicates", "at least 1", self.replicates)
        require(self.batch >= 1, "ScoreConfig.batch", "at least 1", self.batch)
        require(self.seed >= 0, "ScoreConfig.seed", "at least 0", self.seed)


def check_filler(owner: str, outer: int, in_sequence: int, score: ScoreConfig) -> None:
    """A sweep over P residues with matched target positions takes 3 (P - 1) filler tokens, and some more to mix gaps; ConfigError names what is short."""
    least = 3 * (score.period - 1)
    if "outer" in score.protocols:
        require(outer >= least, f"{owner}.filler", f"at least 3 * (period - 1) = {least} for ScoreConfig.period {score.period}", outer)
    if "in_sequence" in score.protocols:
        require(in_sequence > least, f"{owner}.filler_in_sequence", f"above 3 * (period - 1) = {least} for ScoreConfig.period {score.period}", in_sequence)


def check_period(variant: VariantConfig, score: ScoreConfig) -> None:
    """Every phase stands for equally many residues; ConfigError where the stride does not divide the period."""
    if variant.compress:
        whose = "" if variant.coarse == "none" else " of coarse layers"
        require(score.period % variant.widest_stride == 0, "ScoreConfig.period", f"a multiple of the stride{whose} ({variant.widest_stride})", score.period)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
            require(getattr(self, name) >= 1, f"CostConfig.{name}", "at least 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        check_seed("TrialConfig.seed", self.seed)
        check_period(self.variant, self.score)
        check_filler("TaskConfig", self.task.filler, self.task.filler_in_sequence, self.score)
        require(self.task.queries <= self.task.records, "TaskConfig.queries", f"at most records ({self.task.records})", self.task.queries)
        for name in ("keys", "names", "filler_tokens"):
            require(
                getattr(self.task, name) == getattr(self.base.task, name),
                f"TaskConfig.{name}",
                f"the base's ({getattr(self.base.task, name)})",
                getattr(self.task, name),
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        check_seed("EvaluationConfig.seed", self.seed)
        check_period(self.variant, self.score)
        check_filler("WordsConfig", self.words.filler, self.words.filler_in_sequence, self.score)


class Config(Protocol):
    """Any of the configs, those of `config_finetune` and `config_search` included: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data of a config; `config_files.from_dict` gives an equal config back."""
    plain: dict[str, Any] = json.loads(canonical_json(config))
    return plain


def canonical_json(config: Config) -> str:
    """Sorted keys, no spaces, every default written out: equal configs give equal bytes."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(config: Config) -> str:
    """sha256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()
