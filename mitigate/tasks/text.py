"""Local text as token ids: a part to train on, and held-out windows to measure perplexity on.

Documents are kept apart by the tokenizer's EOS, where it has one. Whole documents are held out, evenly over their order, so that no sentence of them is ever
trained on; of a single document its last part is. A window begins with the tokenizer's BOS, where it has one, and goes on with consecutive tokens.

Shapes: N windows, B sequences, T tokens of each.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from mitigate.config import ConfigError
from mitigate.config_finetune import TextConfig
from mitigate.tasks.placement import Ints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text's tokens.

    Attributes:
        train, held_out: int64, documents one after the other.
        prefix: what every window begins with, int64 [0 or 1].
        documents: number of them, held-out ones included.
        sha256: of all documents' characters.
    """

    train: Ints
    held_out: Ints
    prefix: Ints
    documents: int
    sha256: str


def load(tokenizer: Any, config: TextConfig, *, length: int) -> Text:
    """Read a text and turn it into token ids, document by document.

    Args:
        length: tokens of a training sequence.

    Raises:
        ConfigError: the text is not there or cannot be read, or is too short for a training sequence and a held-out window.
    """
    documents = [document for document in read(config) if document.strip()]
    hasher = hashlib.sha256()
    for document in documents:
        hasher.update(document.encode() + b"\0")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [] if eos is None else [eos]
    tokens = [np.array([*tokenizer.encode(document, add_special_tokens=False), *ends], dtype=np.int64) for document in documents]
    kept, held = _parts(tokens, config.held_out)
    prefix = np.array([] if bos is None else [bos], dtype=np.int64)
    for part, found, wanted in (("to train on", kept, length), ("held out", held, config.length)):
        least = wanted - len(prefix)
        if len(found) < least:
            raise ConfigError(f"TextConfig.path: {config.path} must have at least {least} tokens {part} (held_out = {config.held_out}), got {len(found)}")
    return Text(train=kept, held_out=held, prefix=prefix, documents=len(documents), sha256=hasher.hexdigest())


def read(config: TextConfig) -> list[str]:
    """The documents of a text file or of a `datasets` folder.

    Raises:
        ConfigError: it is not there, is no UTF-8 text, or the `datasets` library is missing.
    """
    path = Path(config.path)
    if path.is_dir():
        return _read_dataset(path, config)
    try:
        return path.read_text(encoding="utf-8").split(config.separator)
    except FileNotFoundError:
        raise ConfigError(f"TextConfig.path: there is no text file {config.path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"TextConfig.path: {config.path} must be UTF-8 text: {error}") from None


def _read_dataset(path: Path, config: TextConfig) -> list[str]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"TextConfig.path: {path} is a folder, which takes the datasets library to read; pip install datasets, or give a text file") from None
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library raises on a folder that is none of its own
        raise ConfigError(f"TextConfig.path: {path} is no folder written by save_to_disk: {' '.join(str(error).split())[:200]}") from None
    if isinstance(found, dict):
        if config.split not in found:
            raise ConfigError(f"TextConfig.split must be one of {', '.join(sorted(found))}, got {config.split!r}")
        found = found[config.split]
    elif config.split is not None:
        raise ConfigError(f"TextConfig.split must be left out, since {path} has no splits, got {config.split!r}")
    if config.column not in found.column_names:
        raise ConfigError(f"TextConfig.column must be one of {', '.join(found.column_names)}, got {config.column!r}")
    return [str(document) for document in found[config.column]]


def _parts(documents: list[Ints], held_out: float) -> tuple[Ints, Ints]:
    """Tokens to train on and held-out tokens. Document d is held out if the share of the first d + 1 documents passes a whole number there."""
    empty = np.array([], dtype=np.int64)
    if len(documents) < 2:
        whole = np.concatenate([empty, *documents])
        cut = len(whole) - round(held_out * len(whole))
        return whole[:cut], whole[cut:]
    numbers = range(len(documents))
    held = {d for d in numbers if int((d + 1) * held_out + 1e-9) > int(d * held_out + 1e-9)} or {len(documents) - 1}
    kept, apart = ([documents[d] for d in numbers if (d in held) == wanted] for wanted in (False, True))
    return np.concatenate([empty, *kept]), np.concatenate([empty, *apart])


def training_batch(text: Text, rng: np.random.Generator, count: int, length: int) -> Ints:
    """Random windows of the part to train on: int64 [count, length]."""
    body = length - len(text.prefix)
    return _windows(text.train, text.prefix, rng.integers(len(text.train) - body + 1, size=count), body)


def held_out_windows(text: Text, config: TextConfig) -> Ints:
    """Windows of the held-out part that do not overlap, spread evenly over it: int64 [N, config.length]."""
    body = config.length - len(text.prefix)
    fit = len(text.held_out) // body
    count = min(config.windows, fit)
    starts = np.arange(count) * fit // count * body
    return _windows(text.held_out, text.prefix, starts, body)


def _windows(tokens: Ints, prefix: Ints, starts: Ints, body: int) -> Ints:
    rows = tokens[starts[:, None] + np.arange(body)]
    return np.concatenate([np.broadcast_to(prefix, (len(rows), len(prefix))), rows], axis=1)
