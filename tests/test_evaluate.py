"""A pretrained model scored as it stands, on a tiny random Llama in a folder with a tokenizer of whole words."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import randomise
from tokenizers_for_tests import known_words, shared
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from mitigate import bases, config_files, evaluate, score
from mitigate.config import ConfigError, CostConfig, EvaluationConfig, ScoreConfig, VariantConfig, WordsConfig, WorkFailed, content_hash, to_dict
from mitigate.readout import logits_at
from mitigate.rows import Row
from mitigate.surgery import attach
from mitigate.tasks import words
from mitigate.tasks.words import ANIMALS, NAMES

TIMINGS = {"wall_s", "base_s", "score_s", "cost_s"}
CLOCKED = ("tokens_per_s", "tokens_per_s_full", "ratio")  # ends of what a clock says of the cost
WORDS = WordsConfig(records=6, demonstrations=2, queries=3, filler=21, filler_in_sequence=30)
SCORE = ScoreConfig(period=8, prompts=9, replicates=40, batch=20)
COST = CostConfig(context=21, batch=1, steps=2, repeats=2)
UNIFORM = config_files.load_variant("w8s8-uniform")
LEARNED = VariantConfig(window=4, stride=4, local_window=2)


def save(folder: Path, tokenizer: Any, *, vocabulary: int | None = None, seed: int = 1) -> None:
    """A random Llama that says little else than names, so that some of its answers are right, with a tokenizer."""
    size = vocabulary or len(tokenizer)
    shape = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(shape)
    randomise(model, seed)
    names = [index for token, index in tokenizer.get_vocab().items() if token in NAMES]
    with torch.no_grad():
        model.lm_head.weight[names] *= 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 animals and 16 names, one token each, and a BOS that the tokenizer does not add."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    save(path, known_words([*ANIMALS[:70], *NAMES[:16]]))
    return path


def wanted(folder: Path, variant: VariantConfig | None = None, **changes: Any) -> EvaluationConfig:
    given: dict[str, Any] = {"model": str(folder), "variant": variant or VariantConfig(compress=False), "words": WORDS, "score": SCORE, "cost": COST}
    return EvaluationConfig(**given | changes)


@pytest.fixture(scope="session")
def rows(folder: Path) -> dict[str, Row]:
    """Own attention, and two untrained variants."""
    variants = {"own": None, "uniform": UNIFORM, "learned": LEARNED}
    return {name: evaluate.evaluate(wanted(folder, variant)) for name, variant in variants.items()}


def answers(model: Any, tokenizer: Any, settings: EvaluationConfig, protocol: Any) -> list[dict[str, Any]]:
    """Every answer of a sweep through the whole model, one placement at a time, read off the ids by the words they stand for."""
    found, tokens = [], words.find(tokenizer, settings.words)
    sweep = words.sweep(tokens, settings.words, protocol, period=8, prompts=settings.score.prompts, seed=settings.score.seed)
    for prompt, batch in enumerate(sweep):
        for row in batch.tokens:
            spelt = tokenizer.convert_ids_to_tokens(row.tolist())
            with torch.inference_mode():
                chance = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0].double().softmax(-1)
            for query in range(3):
                at = len(spelt) - 4 * (3 - query)  # key, ":", name, "\n"
                key, name = spelt[at], spelt[at + 2]
                assert key in ANIMALS and name in NAMES
                stands = spelt.index(key)
                assert spelt[stands : stands + 4] == [key, ":", name, "\n"]
                gold = tokenizer.convert_tokens_to_ids(name)
                right = int(chance[at + 1].argmax()) == gold
                found.append({"prompt": prompt, "residue": stands % 8, "right": right, "gold": float(chance[at + 1, gold]), "position": stands})
    return found


@pytest.mark.parametrize("protocol", ["outer", "in_sequence"])
@pytest.mark.parametrize(("name", "variant"), [("own", None), ("uniform", UNIFORM)])
def test_scores_are_those_of_answers_counted_by_hand(rows: dict[str, Row], folder: Path, name: str, variant: VariantConfig | None, protocol: Any) -> None:
    """The model is loaded by transformers alone."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = rows[name].score(protocol)
    with attach(model, variant or VariantConfig(compress=False)):
        asked = answers(model, tokenizer, wanted(folder, variant), protocol)
    groups = [[answer for answer in asked if answer["residue"] == residue] for residue in range(8)]
    assert found.n == [len(group) for group in groups] == [27] * 8, "9 prompts with 3 queries each"
    accuracy = [sum(answer["right"] for answer in group) / 27 for group in groups]
    assert found.accuracy == pytest.approx(accuracy, abs=1e-12)
    assert 0 < min(accuracy) < max(accuracy) < 1, "a flat curve would prove little"
    assert found.gold_probability == pytest.approx([np.mean([answer["gold"] for answer in group]) for group in groups], rel=2e-4)
    assert found.nll == pytest.approx([-np.mean([math.log(answer["gold"]) for answer in group]) for group in groups], rel=2e-4)
    assert found.a_min.value == pytest.approx(min(accuracy))
    assert found.mean.value == pytest.approx(np.mean(accuracy))
    assert found.target_mean == pytest.approx([np.mean([answer["position"] for answer in group]) for group in groups])
    assert found.target_sd == pytest.approx([np.std([answer["position"] for answer in group]) for group in groups])
    assert (found.clusters, found.period) == (9, 8)


def test_the_row_says_what_was_run(rows: dict[str, Row], folder: Path) -> None:
    for name, variant in (("own", None), ("uniform", UNIFORM), ("learned", LEARNED)):
        row, settings = rows[name], dataclasses.replace(wanted(folder, variant), model="tiny-llama")  # where it lies is this machine's
        assert row.status == "ok"
        assert row.config == to_dict(settings)
        assert row.config_sha256 == content_hash(settings)
        assert config_files.from_dict(EvaluationConfig, row.config) == settings
        assert (row.updates, row.tokens, row.final_loss, row.train_s, row.trial) == (0, 0, None, 0.0, None)
        assert [found.protocol for found in row.scores] == ["outer", "in_sequence"]
        assert row.curve is not None
        assert row.cost is not None
        assert row.cost.kv_bytes_at_context == row.cost.kv_bytes_counted
        assert row.wall_s >= row.base_s + row.score_s + row.cost_s - 1e-6
        assert min(row.base_s, row.score_s, row.cost_s) > 0
        assert row.a_min == min(found.a_min.value for found in row.scores)
        assert Row.from_json(row.to_json()) == row
        assert {"python", "torch", "transformers"} <= set(row.versions)
        assert row.device.startswith("cpu (")
    assert rows["own"].label == "tiny-llama, own attention"
    assert rows["uniform"].label == "tiny-llama, w8s8-uniform untrained"
    assert rows["own"].backend == "transformers-sdpa" != rows["uniform"].backend
    assert rows["own"].cost is not None and rows["own"].cost.kv_kept == 1
    assert rows["uniform"].cost is not None and rows["uniform"].cost.kv_kept == pytest.approx(1 / 8)


def test_variants_are_asked_the_same(rows: dict[str, Row]) -> None:
    for protocol in ("outer", "in_sequence"):
        assert len({row.score(protocol).prompts_sha256 for row in rows.values()}) == 1
        assert len({tuple(row.score(protocol).nll) for row in rows.values()}) == 3, "and answer differently"
    assert len({row.base_sha256 for row in rows.values()}) == 1


def comparable(row: Row) -> dict[str, Any]:
    plain = row.model_dump(exclude=TIMINGS)
    return plain | {"cost": {key: value for key, value in plain["cost"].items() if not key.endswith(CLOCKED)}}


def test_the_same_config_gives_the_same_row(rows: dict[str, Row], folder: Path) -> None:
    torch.manual_seed(123)
    np.random.seed(123)
    assert comparable(evaluate.evaluate(wanted(folder, LEARNED))) == comparable(rows["learned"])
    other = evaluate.evaluate(wanted(folder, LEARNED, seed=1))
    assert other.score("outer").nll != rows["learned"].score("outer").nll, "another seed draws other gates"
    assert other.score("outer").prompts_sha256 == rows["learned"].score("outer").prompts_sha256, "and leaves the prompts"


def test_a_label_and_a_log(folder: Path) -> None:
    log: list[str] = []
    settings = wanted(folder, score=dataclasses.replace(SCORE, protocols=("outer",), prompts=2, batch=1))
    row = evaluate.evaluate(settings, label="mine", log=log.append)
    assert row.label == "mine"
    assert [found.protocol for found in row.scores] == ["outer"]
    assert log[0] == "words: 70 keys and 16 names, records of 4 tokens, prefix of 1"
    assert all(line.startswith("score: outer, ") for line in log[1:])
    assert len(log) == 3
    assert not any("nan" in line for line in log)


@pytest.mark.parametrize(
    ("model", "variant", "label"),
    [
        ("some/where/model-7b", VariantConfig(compress=False), "model-7b, own attention"),
        ("org/name", UNIFORM, "name, w8s8-uniform untrained"),
        ("a/SmolLM2.Q4_1.gguf", VariantConfig(compress=False), "SmolLM2.Q4_1, own attention"),
    ],
)
def test_labels(model: str, variant: VariantConfig, label: str) -> None:
    assert evaluate.default_label(EvaluationConfig(model=model, variant=variant)) == label


def test_reduced_precision(folder: Path) -> None:
    row = evaluate.evaluate(wanted(folder, dtype="bfloat16", score=dataclasses.replace(SCORE, protocols=("outer",), prompts=2)))
    assert row.cost is not None
    assert row.cost.kv_bytes_per_token == 2 * 2 * 8 * 2 * 2, "layers, KV heads, head dim, key and value, bytes"
    assert row.base_sha256 != bases.load_pretrained(str(folder)).sha256, "other numbers are another base"


# where a model comes from --------------------------------------------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_the_hash_follows_every_weight(folder: Path, tmp_path: Path) -> None:
    before = bases.load_pretrained(str(folder))
    assert not before.model.training
    assert bases.load_pretrained(str(folder)).sha256 == before.sha256 == bases.load_pretrained(str(copied(folder, tmp_path / "copy"))).sha256
    seen = {before.sha256}
    for name, tensor in before.model.state_dict().items():
        tensor.view(-1)[-1] += 1e-3
        before.model.save_pretrained(tmp_path / name)
        before.tokenizer.save_pretrained(tmp_path / name)
        seen.add(bases.load_pretrained(str(tmp_path / name)).sha256)
    assert len(seen) == 1 + len(before.model.state_dict()) == 22


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "header"),
        (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:3000]), "header"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no file named"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not a valid JSON file"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (edit_config(model_type="nobody"), "nobody"),
        (edit_config(num_attention_heads="x"), "num_attention_heads"),
        (edit_config(intermediate_size=64), "6 weights have other shapes than its config's, model.layers.0.mlp.down_proj.weight of shape [32, 40] where its"),
        (edit_config(num_hidden_layers=3), "9 weights are missing from it, model.layers.2.input_layernorm.weight among them"),
        (edit_config(auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}, model_type="nobody"), "custom code"),
    ],
)
def test_a_damaged_model_is_one_line(folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """Above all: weights that are missing are not made up."""
    path = copied(folder, tmp_path / "model")
    damage(path)
    with pytest.raises(ConfigError) as error:
        evaluate.evaluate(wanted(path))
    assert str(error.value).startswith(f"--model {path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))


@pytest.mark.parametrize("name", ["absent", "./absent", "a/b/absent", "absent.gguf"])
def test_a_missing_path_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    given = str(tmp_path / name) if name == "absent" else name
    with pytest.raises(ConfigError) as error:
        bases.load_pretrained(given)
    assert str(error.value) == f"--model {given}: there is no such folder or GGUF file"


def test_a_file_that_is_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder or GGUF file"):
        bases.load_pretrained(str(folder / "config.json"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"^--model .*x\.gguf: [^\n]+$"):
        bases.load_pretrained(str(tmp_path / "x.gguf"))


def test_a_revision_of_a_path_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"a revision is of a repository on the hub, and this is a path; got 'main'$"):
        bases.load_pretrained(str(folder), revision="main")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", shared("adds-bos"), vocabulary=1000)
    with pytest.raises(ConfigError, match=r"^--model .*: its tokenizer makes token \d+, and the model knows 1000; they do not belong together$"):
        evaluate.evaluate(wanted(tmp_path / "model"))


def test_a_model_that_says_no_numbers_ends_the_sweep_at_once(folder: Path) -> None:
    base = bases.load_pretrained(str(folder))
    with torch.no_grad():
        base.model.lm_head.weight[5] = math.nan
    said: list[str] = []
    with pytest.raises(WorkFailed, match=r"^score: the model's logits are not finite \(float32\); look for NaN and infinities in its weights, or [^\n]+$"):
        evaluate.score_variant(base, wanted(folder), log=said.append)
    assert [line.split(":")[0] for line in said] == ["words"], "not a prompt was counted"


def test_a_training_model_is_scored_in_eval_mode_and_goes_on_training(folder: Path, rows: dict[str, Row]) -> None:
    base = bases.load_pretrained(str(folder))
    base.model.config.attention_dropout = 0.5
    for layer in base.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    base.model.train()
    assert evaluate.score_variant(base, wanted(folder)).scores == rows["own"].scores
    assert all(module.training for module in base.model.modules())


def test_a_model_that_cannot_carry_a_variant_is_one_line(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"^attach: GPT2LMHeadModel has no decoder layers with self-attention$"):
        evaluate.evaluate(wanted(tmp_path / "gpt2", UNIFORM))


def test_what_cannot_be_scored_is_found_before_anything_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In-sequence prompts have more filler: a context with room for the outer ones alone is refused at once, not after half of the work."""
    runs: list[Any] = []
    monkeypatch.setattr(score, "run_sweep", lambda *args, **kwargs: runs.append(args))
    settings = wanted(folder, words=dataclasses.replace(WORDS, context=1 + 21 + 1 + 4 * (5 + 5)))
    with pytest.raises(ConfigError, match=r"^WordsConfig\.context must be at least 72 \(5 records of 4 tokens and 52 others\), got 63$"):
        evaluate.evaluate(settings)
    assert runs == []


def test_scoring_leaves_the_model_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bases.Pretrained] = []
    real = bases.load_pretrained
    monkeypatch.setattr(bases, "load_pretrained", lambda *args, **kwargs: held.append(real(*args, **kwargs)) or held[-1])
    evaluate.evaluate(wanted(folder, UNIFORM, score=dataclasses.replace(SCORE, protocols=("outer",), prompts=2)))
    (base,) = held
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids).logits, LlamaForCausalLM.from_pretrained(folder)(input_ids=ids).logits)


def test_a_prompt_longer_than_the_models_positions_is_refused_before_anything_is_scored(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = copied(folder, tmp_path / "short")
    edit_config(max_position_embeddings=70)(short)
    monkeypatch.setattr(score, "run_sweep", lambda *args, **kwargs: pytest.fail("something was scored"))
    with pytest.raises(ConfigError, match=r"^score: a prompt must have at most the model's 70 positions, got \d+; ask for fewer records"):
        evaluate.evaluate(wanted(short))


def test_a_head_that_scales_its_logits_is_read_as_the_model_gives_them() -> None:
    """Granite divides its logits, Cohere and Gemma 2 do more: the answers' probabilities are those of the whole forward."""
    shape = GraniteConfig(
        vocab_size=30, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, logits_scaling=7.0
    )
    model = GraniteForCausalLM(shape).eval()
    randomise(model, 3)
    tokens, positions = torch.randint(30, (2, 19), generator=torch.Generator().manual_seed(0)), torch.tensor([4, 11, 18])
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits[:, positions]
        found = logits_at(attach(model, VariantConfig(compress=False)), tokens, positions)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
