"""Where a base model comes from: a tiny Qwen3 trained here on the retrieval task by a curriculum and cached by its config's hash, or a pretrained model from
a folder, a GGUF file or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mitigate.checkpoint import read_checkpoint, write_checkpoint
from mitigate.config import BaseConfig, ConfigError, TaskConfig, VariantConfig, WorkFailed, content_hash, to_dict
from mitigate.files import write_atomic
from mitigate.readout import logits_at
from mitigate.surgery import attach
from mitigate.tasks import retrieval
from mitigate.tasks.prompts import Prompts

PASS_ACCURACY = 0.9  # running accuracy at which the curriculum doubles the records
PREVIOUS_WEIGHT = 0.5  # of the previous-token loss
HELPED_RECORDS = 2  # steps of the curriculum up to here get it
CHECKPOINT_FILE = "checkpoint.pt"
CHECKPOINT_EVERY = 100  # updates: some seconds; a checkpoint of the default base is 1.6 MB
PERFECT = 0.99  # accuracy on fresh prompts below which a base is refused: its faults would be taken for the compressor's


class BaseNotLearned(WorkFailed):
    """The curriculum ended without a base that retrieves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A loaded base: the model in eval mode, the sha256 of its weights, its accuracy on fresh prompts, and whether it came from the cache."""

    model: PreTrainedModel
    sha256: str
    accuracy: float
    cached: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A pretrained causal language model in eval mode, its tokenizer, and the sha256 of its weights."""

    model: PreTrainedModel
    tokenizer: Any
    sha256: str


def load_pretrained(name: str, *, revision: str | None = None, dtype: str = "float32") -> Pretrained:
    """Load a causal language model from a folder, a GGUF file (de-quantised; needs the `gguf` extra) or the hub. No code from there is run.

    Raises:
        ConfigError: it cannot be loaded from there, or weights are missing; the message is the loader's, on one line.
    """
    path = Path(name)
    source, options, packed = name, dict[str, Any](revision=revision, trust_remote_code=False), dict[str, Any]()
    if path.suffix == ".gguf" and path.is_file():
        source, options, packed = str(path.parent), options | {"gguf_file": path.name}, {"quantization_config": GgufConfig(dequantize=True)}
    elif not path.is_dir() and (path.is_file() or path.is_absolute() or name.startswith(".") or name.count("/") > 1 or path.suffix == ".gguf"):
        raise ConfigError(f"--model {name}: there is no such folder or GGUF file")
    if path.exists() and revision is not None:
        raise ConfigError(f"--model {name}: a revision is of a repository on the hub, and this is a path; got {revision!r}")
    packed |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # what is wrong is said below, on one line
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        with _without_load_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options, **packed)
    except Exception as error:  # loaders of configs, tokenizers and weights raise whatever their libraries do
        raise ConfigError(f"--model {name}: {_one_line(error)}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"--model {name}: {len(missing)} weights are missing from it, {missing[0]} among them")
    if others := sorted(found["mismatched_keys"]):
        weight, stored, wanted = others[0]
        what = f"{weight} of shape {list(stored)} where its config asks for {list(wanted)}"
        raise ConfigError(f"--model {name}: {len(others)} weights have other shapes than its config's, {what} among them")
    return Pretrained(model=model.eval(), tokenizer=tokenizer, sha256=_state_sha256(model))


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Without the loader's table of weights that are missing or of other shapes, which would be said again on many lines; other tables stay."""
    log = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        return "LOAD REPORT" not in said or not ("MISSING" in said or "MISMATCH" in said)

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _one_line(error: Exception, width: int = 240) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else f"{text[:width].rsplit(' ', 1)[0]} ..."


def _state_sha256(model: nn.Module) -> str:
    """Of every tensor's name, dtype, shape and bytes, in the order of names."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def build(config: BaseConfig) -> PreTrainedModel:
    """The untrained model; draws from torch's global generator."""
    shape = Qwen3Config(
        vocab_size=retrieval.vocabulary(config.task).size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=retrieval.BOS,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(shape)


def files(config: BaseConfig, cache: Path) -> dict[str, bytes]:
    """Content of a cached base's files by their path in the cache folder, for a machine that does not share it."""
    folder = Path("bases") / content_hash(config)[:16]
    return {str(folder / name): (cache / folder / name).read_bytes() for name in ("model.safetensors", "base.json")}


def load(config: BaseConfig, cache: Path, *, log: Callable[[str], None] = lambda line: None) -> Base:
    """The base of a config, from the cache or trained now. Two processes that ask at once train it once.

    A cached base is checked against its recorded sha256 and config; one that does not match is trained again. A training that was cut short goes on from
    its checkpoint in the cache, which is removed once the base is there.
    """
    folder = cache / "bases" / content_hash(config)[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        found = _read(config, folder, log)
        if found is None:
            found = _train_and_store(config, folder, log)
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return found


def _read(config: BaseConfig, folder: Path, log: Callable[[str], None]) -> Base | None:
    weights, record = folder / "model.safetensors", folder / "base.json"
    if not weights.exists() and not record.exists():
        return None
    try:
        meta = json.loads(record.read_text(encoding="utf-8"))
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
        if meta["sha256"] != sha256 or meta["config"] != to_dict(config):
            raise ValueError("its hash or config does not match")
        with torch.random.fork_rng(devices=[]):  # the drawn weights are overwritten; the caller's generator goes on as if trained here
            model = build(config)
        model.load_state_dict(load_file(weights))
        return Base(model=model.eval(), sha256=sha256, accuracy=float(meta["accuracy"]), cached=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        log(f"cached base {folder} is damaged ({str(error).splitlines()[0]}); training it again")
        return None


def _train_and_store(config: BaseConfig, folder: Path, log: Callable[[str], None]) -> Base:
    model = train(config, checkpoint=folder / CHECKPOINT_FILE, log=log)
    accuracy = check(model, config.task, seed=config.seed)
    if accuracy < PERFECT:
        raise BaseNotLearned(
            f"base {content_hash(config)[:12]} retrieves {accuracy:.3f} of fresh queries, below {PERFECT}; raise BaseConfig.settle or change BaseConfig.seed"
        )
    data = save({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    sha256 = hashlib.sha256(data).hexdigest()
    write_atomic(folder / "model.safetensors", data)
    meta = {"config": to_dict(config), "sha256": sha256, "accuracy": accuracy}
    write_atomic(folder / "base.json", json.dumps(meta, indent=1, sort_keys=True).encode())
    return Base(model=model, sha256=sha256, accuracy=accuracy, cached=False)


def _with_records(task: TaskConfig, records: int) -> TaskConfig:
    """The task at a step of the curriculum: fewer records, filler in proportion."""
    share = records / task.records
    return dataclasses.replace(task, records=records, filler=round(task.filler * share), filler_in_sequence=round(task.filler_in_sequence * share))


class _Run:
    """Everything that the training of a base continues from."""

    def __init__(self, config: BaseConfig) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = build(config)
        self.rng = np.random.default_rng(config.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.done, self.records, self.running, self.settling = 0, min(2, config.task.records), 0.0, 0
        self._identity = content_hash(config)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        counts = {"done": self.done, "records": self.records, "running": self.running, "settling": self.settling}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": self.rng.bit_generator.state}
        write_checkpoint(path, self._identity, state | counts)

    def read(self, path: Path) -> None:
        """Go on from a file; one that is missing, damaged or of another run changes nothing."""
        state = read_checkpoint(path, self._identity)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.done, self.records, self.running, self.settling = (state[name] for name in ("done", "records", "running", "settling"))


def train(config: BaseConfig, *, checkpoint: Path | None = None, log: Callable[[str], None] = lambda line: None) -> PreTrainedModel:
    """Train a base by the curriculum: 2 records, doubled each time the running accuracy passes 0.9, up to the task's.

    The rate stays put until the last step of the curriculum is passed, then decays to a tenth over `config.settle` updates. In the first
    steps a second loss asks the first layer for the previous token, read out through the embedding: retrieval is built on it, and the
    shared directions let the second layer compare it with the queried key. Without it the plateau at two records has no reliable end.

    Args:
        checkpoint: file to go on from, if it is there, and to leave the state in every `CHECKPOINT_EVERY` updates. On one machine and one number of
            threads, going on gives bit for bit what training in one go gives. A file of another config is not looked at.

    Raises:
        BaseNotLearned: the curriculum is not through after `config.updates` updates.
    """
    run, last = _Run(config), config.task.records
    if checkpoint is not None:
        run.read(checkpoint)
    if run.done:
        log(f"base: going on after update {run.done}")
    run.model.train()
    for step in range(run.done, config.updates + config.settle):
        if step >= config.updates and not run.settling:
            raise BaseNotLearned(
                f"base {content_hash(config)[:12]} is still at {run.records} of {last} records after {step} updates (running accuracy {run.running:.2f}); "
                "raise BaseConfig.updates or change BaseConfig.seed"
            )
        for group in run.optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - 0.9 * run.settling / config.settle)
        batch = max(32, config.tokens_per_batch // max(run.records, 4))
        prompts = retrieval.training_batch(_with_records(config.task, run.records), run.rng, batch, "outer" if step % 2 == 0 else "in_sequence")
        loss, accuracy = _loss(run.model, prompts, help_first_layer=run.records <= HELPED_RECORDS)
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.done, run.running = step + 1, 0.9 * run.running + 0.1 * accuracy
        if step % 50 == 49:
            log(f"base: update {run.done}, {run.records} of {last} records, loss {float(loss.detach()):.3f}, running accuracy {run.running:.3f}")
        if run.settling or (run.running > PASS_ACCURACY and run.records == last):
            run.settling += 1
            if run.settling > config.settle:
                break
        elif run.running > PASS_ACCURACY:
            run.records, run.running = min(run.records * 2, last), 0.0
        if checkpoint is not None and run.done % CHECKPOINT_EVERY == 0:
            run.write(checkpoint)
    return run.model.eval()


def _loss(model: PreTrainedModel, prompts: Prompts, *, help_first_layer: bool) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy of the queried names (nats), plus the previous-token loss if asked for; and the accuracy."""
    with _first_layer(model) as caught:
        logits, gold = _answers(model, prompts)
    loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten())
    if help_first_layer:
        guess = F.linear(model.model.norm(caught[0][:, 1:]), model.model.embed_tokens.weight)
        loss = loss + PREVIOUS_WEIGHT * F.cross_entropy(guess.flatten(0, 1), torch.from_numpy(prompts.tokens[:, :-1]).flatten())
    return loss, float((logits.argmax(-1) == gold).float().mean())


@contextmanager
def _first_layer(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The first decoder layer's output [B, T, C] of the forward inside the block."""
    caught: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: caught.append(output[0] if isinstance(output, tuple) else output))
    try:
        yield caught
    finally:
        handle.remove()


def _answers(model: PreTrainedModel, prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    plain = attach(model, VariantConfig(compress=False))
    return logits_at(plain, torch.from_numpy(prompts.tokens), torch.from_numpy(prompts.answer_from.ravel())), torch.from_numpy(prompts.gold).flatten(1)


@torch.no_grad()
def check(model: PreTrainedModel, task: TaskConfig, *, seed: int, prompts: int = 64) -> float:
    """Lower accuracy of the two protocols on fresh prompts, a fraction."""
    rng = np.random.default_rng([seed, 1])
    accuracies = []
    for protocol in ("outer", "in_sequence"):
        logits, gold = _answers(model, retrieval.training_batch(task, rng, prompts, protocol))
        accuracies.append(float((logits.argmax(-1) == gold).float().mean()))
    return min(accuracies)
