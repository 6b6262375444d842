"""Local text as token ids: documents, the held-out part, windows; and perplexity on them, by hand."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny
from tiny_tuning import VARIANT, VOCABULARY, write_text
from tokenizers_for_tests import known_words, shared

from mitigate import perplexity
from mitigate.config import ConfigError, WorkFailed
from mitigate.config_finetune import TextConfig
from mitigate.surgery import attach
from mitigate.tasks import text

TOKENIZER = known_words(VOCABULARY)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


def loaded(path: Path, *, length: int = 8, tokenizer: Any = TOKENIZER, **changes: Any) -> tuple[text.Text, TextConfig]:
    wanted = TextConfig(**{"path": str(path), "length": 8} | changes)
    return text.load(tokenizer, wanted, length=length), wanted


def test_documents_are_kept_apart_and_whole_ones_held_out(tmp_path: Path) -> None:
    documents = [f"{name} " * 5 for name in VOCABULARY[:10]]
    (tmp_path / "t.txt").write_text("\f".join(documents) + "\f \n")
    found, _ = loaded(tmp_path / "t.txt", held_out=0.2)
    assert found.documents == 10
    ids = TOKENIZER.convert_tokens_to_ids(VOCABULARY[:10])
    held = [4, 9]  # where the shares of the first 5 and the first 10 documents pass 1 and 2
    assert found.held_out.tolist() == [token for d in held for token in [ids[d]] * 5 + [EOS]]
    assert found.train.tolist() == [token for d in range(10) if d not in held for token in [ids[d]] * 5 + [EOS]]
    assert found.prefix.tolist() == [BOS]


@pytest.mark.parametrize(("share", "held"), [(0.1, 60), (0.5, 300), (0.01, 30)])
def test_the_share_is_held_out_and_at_least_one_document(tmp_path: Path, share: float, held: int) -> None:
    found, _ = loaded(write_text(tmp_path / "t.txt", words=29), held_out=share)
    assert len(found.held_out) == held
    assert len(found.train) == 600 - held


def test_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    words = " ".join(VOCABULARY)
    (tmp_path / "t.txt").write_text(words)
    found, _ = loaded(tmp_path / "t.txt", held_out=0.25, length=4)
    ids = [*TOKENIZER.convert_tokens_to_ids(VOCABULARY), EOS]
    assert (found.train.tolist(), found.held_out.tolist()) == (ids[:43], ids[43:])
    other, _ = loaded(write_text(tmp_path / "lines.txt", separator="\n\n"), separator="\n\n")
    assert other.documents == 20


def test_windows_do_not_overlap_and_spread(tmp_path: Path) -> None:
    path = write_text(tmp_path / "t.txt", words=29)
    found, wanted = loaded(path, held_out=0.2, windows=4)  # 120 tokens, 17 windows of 7
    windows = text.held_out_windows(found, wanted)
    assert windows.shape == (4, 8)
    assert (windows[:, 0] == BOS).all()
    starts = [next(i for i in range(114) if (found.held_out[i : i + 7] == row[1:]).all()) for row in windows]
    assert starts == [0, 28, 56, 84]
    every = text.held_out_windows(found, dataclasses.replace(wanted, windows=100))
    assert every[:, 1:].ravel().tolist() == found.held_out[: 17 * 7].tolist()


def test_training_windows_come_from_everywhere(tmp_path: Path) -> None:
    found, _ = loaded(write_text(tmp_path / "t.txt", words=29))
    rng = np.random.default_rng(0)
    rows = text.training_batch(found, rng, 2000, 8)
    assert rows.shape == (2000, 8)
    places = {tuple(found.train[i : i + 7]) for i in range(len(found.train) - 6)}
    drawn = {tuple(row[1:]) for row in rows}
    assert drawn <= places
    assert {tuple(found.train[:7]), tuple(found.train[-7:])} <= drawn
    assert np.array_equal(text.training_batch(found, np.random.default_rng(0), 2000, 8), rows)


def test_a_tokenizer_without_bos_has_no_prefix(tmp_path: Path) -> None:
    found, wanted = loaded(write_text(tmp_path / "t.txt"), tokenizer=shared("plain"))
    assert found.prefix.tolist() == []
    assert text.held_out_windows(found, wanted).shape[1] == 8
    assert text.training_batch(found, np.random.default_rng(0), 1, 8).shape == (1, 8)


def test_the_hash_follows_the_text(tmp_path: Path) -> None:
    path = write_text(tmp_path / "t.txt")
    one = loaded(path)[0].sha256
    path.rename(tmp_path / "other.txt")
    assert loaded(tmp_path / "other.txt")[0].sha256 == one
    write_text(path, words=31)
    assert loaded(path)[0].sha256 != one


def test_what_is_missing_or_too_short_is_said(tmp_path: Path) -> None:
    def refused(path: Path, **changes: Any) -> str:
        with pytest.raises(ConfigError) as error:
            loaded(path, **changes)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused(tmp_path / "absent.txt") == f"TextConfig.path: there is no text file {tmp_path}/absent.txt"
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path / "bytes.txt").startswith(f"TextConfig.path: {tmp_path}/bytes.txt must be UTF-8 text: ")
    (tmp_path / "short.txt").write_text("dog cat")
    assert "must have at least 7 tokens to train on (held_out = 0.1), got 3" in refused(tmp_path / "short.txt")
    write_text(tmp_path / "t.txt", documents=1, words=30)
    assert "must have at least 7 tokens held out (held_out = 0.1), got 3" in refused(tmp_path / "t.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    assert "got 0" in refused(tmp_path / "empty.txt")


# a datasets folder ---------------------------------------------------------------------------------------------------------------------------


class Whole:
    def __init__(self, columns: dict[str, list[str]]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name: str) -> list[str]:
        return self.columns[name]


def with_library(patch: pytest.MonkeyPatch, found: Any) -> None:
    def load(path: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    library = types.ModuleType("datasets")
    library.load_from_disk = load  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "datasets", library)


def test_a_datasets_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["dog cat fox", "wolf bear lion", "", "Anna"]
    table = Whole({"text": documents, "title": ["a", "b", "c", "d"]})
    with_library(monkeypatch, table)
    assert text.read(TextConfig(path=str(tmp_path))) == documents
    assert text.read(TextConfig(path=str(tmp_path), column="title")) == ["a", "b", "c", "d"]
    with pytest.raises(ConfigError, match=r"^TextConfig.column must be one of text, title, got 'body'$"):
        text.read(TextConfig(path=str(tmp_path), column="body"))
    with pytest.raises(ConfigError, match=r"^TextConfig.split must be left out, since \S+ has no splits, got 'train'$"):
        text.read(TextConfig(path=str(tmp_path), split="train"))
    with_library(monkeypatch, {"train": table, "test": Whole({"text": ["x"]})})
    assert text.read(TextConfig(path=str(tmp_path), split="test")) == ["x"]
    with pytest.raises(ConfigError, match=r"^TextConfig.split must be one of test, train, got None$"):
        text.read(TextConfig(path=str(tmp_path)))
    with_library(monkeypatch, FileNotFoundError("Directory is neither\na dataset"))
    with pytest.raises(ConfigError, match=r"^TextConfig.path: \S+ is no folder written by save_to_disk: Directory is neither a dataset$"):
        text.read(TextConfig(path=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^TextConfig.path: \S+ is a folder, which takes the datasets library to read; pip install datasets, or [^\n]+$"):
        text.read(TextConfig(path=str(tmp_path)))


# perplexity ----------------------------------------------------------------------------------------------------------------------------------


def windows(model: Any, count: int = 5, length: int = 13) -> np.ndarray:
    return np.random.default_rng(0).integers(model.config.vocab_size, size=(count, length))


def test_a_model_that_knows_nothing_has_the_vocabulary_as_its_perplexity() -> None:
    model = tiny("llama", wide=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = perplexity.measure(model, windows(model))
    assert found.perplexity == pytest.approx(model.config.vocab_size, rel=1e-5)
    assert found.bits_per_token == pytest.approx(math.log2(model.config.vocab_size), rel=1e-6)
    assert (found.tokens, found.windows, found.window_length) == (60, 5, 13)


@pytest.mark.parametrize("compressed", [False, True])
def test_perplexity_is_that_of_each_token_by_hand(compressed: bool) -> None:
    model = tiny("qwen2", wide=False)
    rows = windows(model)
    attached = attach(model, VARIANT) if compressed else None
    nats = []
    with torch.no_grad():
        for row in rows:
            chance = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0].double().log_softmax(-1)
            nats.append(np.mean([-float(chance[t, row[t + 1]]) for t in range(12)]))
    found = perplexity.measure(model, rows)
    assert found.nats_per_token == pytest.approx(np.mean(nats), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    assert found.nats_standard_error == pytest.approx(np.std(nats, ddof=1) / math.sqrt(5), rel=1e-4)
    together = perplexity.measure(model, rows, batch=3)
    assert together.nats_per_token == pytest.approx(found.nats_per_token, rel=1e-6)
    assert perplexity.measure(model, rows[:1]).nats_standard_error is None
    if attached is not None:
        attached.detach()
        assert perplexity.measure(model, rows).nats_per_token != found.nats_per_token


def test_a_window_beyond_the_models_positions_is_refused() -> None:
    model = tiny("llama", wide=False)
    with pytest.raises(ConfigError, match=r"^perplexity: a window must have at most the model's 2048 positions, got 2049 tokens$"):
        perplexity.measure(model, windows(model, 1, 2049))


@pytest.mark.parametrize(
    ("rows", "batch", "message"),
    [
        (np.zeros((2, 5), dtype=np.int64), 0, "perplexity: batch must be at least 1, got 0"),
        (np.zeros((2, 1), dtype=np.int64), 1, "perplexity: tokens of a window must be at least 2 (the first is given), got 1"),
        (np.zeros((0, 5), dtype=np.int64), 1, "perplexity: windows must be at least 1, got 0"),
        (np.zeros(5, dtype=np.int64), 1, "perplexity: tokens_NT must be integers [windows, tokens], got int64 of shape [5]"),
        (np.zeros((2, 5)), 1, "perplexity: tokens_NT must be integers [windows, tokens], got float64 of shape [2, 5]"),
        (np.full((2, 5), 30), 1, "perplexity: a token must be between 0 and 29, the last that the model knows, got 30"),
        (np.full((2, 5), -1), 1, "perplexity: a token must be between 0 and 29, the last that the model knows, got -1"),
    ],
)
def test_windows_that_cannot_be_are_one_error(rows: np.ndarray, batch: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        perplexity.measure(tiny("llama", wide=False), rows, batch=batch)
    assert str(error.value) == message


def test_a_training_model_is_measured_in_eval_mode_and_goes_on_training() -> None:
    model = tiny("llama", wide=False)
    wanted, narrow = perplexity.measure(model, windows(model)), windows(model).astype(np.int16)
    model.train()
    assert perplexity.measure(model, narrow) == wanted
    assert all(module.training for module in model.modules())


def test_a_perplexity_that_is_no_number_is_said_in_one_line() -> None:
    model = tiny("llama", wide=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
        with pytest.raises(WorkFailed, match=r"^perplexity: exp of \d+ nats per token is beyond all floats; [^\n]+$"):
            perplexity.measure(model, windows(model))
        model.lm_head.weight[3] = math.nan
        with pytest.raises(WorkFailed, match=r"^perplexity: the model's logits are not finite \(float32\); [^\n]+$"):
            perplexity.measure(model, windows(model))
