"""Generating with a variant attached and without, what its cache is counted to hold, and bundles for a pretrained base."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evaluate import save
from tiny_tuning import VARIANT, VOCABULARY, ready, settings, write_model, write_text
from tokenizers_for_tests import known_words
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from mitigate import bases, cli, cost, finetune
from mitigate.config import ConfigError, VariantConfig
from mitigate.export import bundle, pretrained
from mitigate.generate import bytes_line, encode, generate
from mitigate.rows import Row
from mitigate.surgery import attach

PROMPT = "dog cat fox : wolf bear lion : dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, another one of the same shape, a text, and bundles trained for the first: of the compressor alone, and with attention."""
    path = tmp_path_factory.mktemp("generate")
    write_model(path / "model")
    write_model(path / "other", seed=2)
    write_text(path / "text.txt")
    for what in ("compressor", "attention"):
        wanted = settings(path, train={"what": what})
        base, data, attached = ready(wanted)
        finetune.fine_tune(attached, data, wanted)
        row = Row(status="ok", label="tiny", config={}, config_sha256="", seed=0, versions={}, device="", backend="")
        changed = finetune.trained_names(attached, what)
        pretrained.write(path / what, attached, wanted, row, base_sha256=base.sha256, text_sha256=data.text.sha256, changed=changed)
        ids = torch.arange(3, 40)[None]
        with torch.no_grad():
            torch.save(base.model(input_ids=ids, use_cache=False).logits, path / f"{what}.pt")
    return path


@pytest.fixture
def base(folder: Path) -> bases.Pretrained:
    return bases.load_pretrained(str(folder / "model"))


def by_hand(base: bases.Pretrained, new: int) -> list[int]:
    """Greedy tokens, each from the whole sequence without a cache."""
    ids = encode(base.tokenizer, PROMPT)
    start = len(ids)
    for _ in range(new):
        ids.append(int(base.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == base.tokenizer.eos_token_id:
            break
    return ids[start:]


@torch.no_grad()
def test_attached_and_detached_again_it_says_what_it_said(base: bases.Pretrained) -> None:
    before = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=30)
    assert before.tokens == by_hand(base, 30)
    torch.manual_seed(0)
    with attach(base.model, VARIANT):
        during = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=30)
        assert during.tokens == by_hand(base, 30)
    assert during.tokens != before.tokens
    assert generate(base.model, base.tokenizer, PROMPT, max_new_tokens=30) == before
    assert before.prompt_tokens == 10, "with the BOS in front"
    assert before.text == base.tokenizer.decode(before.tokens, skip_special_tokens=True)


def test_bytes_are_counted_in_the_cache(base: bases.Pretrained) -> None:
    shape = cost.shape_of(base.model)
    own = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=30)
    assert own.kv_bytes == own.kv_bytes_full == 2 * 2 * 2 * 8 * 4 * own.kv_tokens, "K and V, layers, KV heads, head dim, bytes"
    with attach(base.model, VARIANT):
        found = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=30)
    assert found.kv_tokens == found.prompt_tokens + len(found.tokens) - 1
    assert found.kv_bytes == cost.bytes_at(VARIANT, shape, found.kv_tokens)
    share = 100 * found.kv_bytes / found.kv_bytes_full
    assert bytes_line(found) == (
        f"KV cache after {found.kv_tokens} tokens: {found.kv_bytes:,} bytes counted, {share:.1f} % of full attention's {found.kv_bytes_full:,}"
    )


def test_sampling_follows_its_seed_and_leaves_the_generator(base: bases.Pretrained) -> None:
    torch.manual_seed(7)
    drawn = [generate(base.model, base.tokenizer, PROMPT, max_new_tokens=12, temperature=1.5, seed=seed).tokens for seed in (0, 0, 1)]
    following = torch.rand(1)
    assert drawn[0] == drawn[1] != drawn[2]
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), following)


def test_prompts_that_cannot_be_are_refused(base: bases.Pretrained) -> None:
    with pytest.raises(ConfigError, match=r"^generate: prompt and continuation together must have at most the model's 2048 positions, got 2050 tokens$"):
        generate(base.model, base.tokenizer, PROMPT, max_new_tokens=2040)
    with pytest.raises(ConfigError, match=r"^--chat: "):
        generate(base.model, base.tokenizer, PROMPT, max_new_tokens=4, chat=True)
    tokenizer = known_words(VOCABULARY)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match=r"^--prompt must be text of which this tokenizer makes at least one token, got ''$"):
        encode(tokenizer, "")


def test_a_chat_prompt_is_rendered(base: bases.Pretrained) -> None:
    tokenizer: PreTrainedTokenizerFast = base.tokenizer
    tokenizer.chat_template = "{% for message in messages %}x : {{ message['content'] }}{% endfor %}{% if add_generation_prompt %} :{% endif %}"
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "dog", chat=True)) == ["x", ":", "dog", ":"]


# bundles -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["compressor", "attention"])
def test_a_bundle_brings_the_trained_model_back(folder: Path, base: bases.Pretrained, what: str) -> None:
    described = pretrained.read(folder / what)
    attached = pretrained.put_on(base, folder / what, described)
    assert pretrained.variant_of(described) == VARIANT == attached.variant
    with torch.no_grad():
        found = base.model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    assert torch.equal(found, torch.load(folder / f"{what}.pt"))
    files = {path.name for path in (folder / what).iterdir()}
    assert files == {"MANIFEST.json", "pretrained.json", "compressor.safetensors", "row.json"} | ({"base_delta.safetensors"} if what == "attention" else set())
    assert described["base"] == {"name": "model", "sha256": described["base"]["sha256"], "class": "LlamaForCausalLM", "dtype": "float32"}
    assert len(described["trained"]["changed_tensors"]) == (8 if what == "attention" else 0)
    total = sum(path.stat().st_size for path in (folder / what).iterdir())
    assert total < (folder / "model" / "model.safetensors").stat().st_size, "the base's own weights are not in it"


def test_a_bundle_of_another_base_is_refused_by_both_hashes(folder: Path, base: bases.Pretrained) -> None:
    other = bases.load_pretrained(str(folder / "other"))
    described = pretrained.read(folder / "compressor")
    message = f"^{folder}/compressor was made for model with weights {base.sha256[:12]} in float32, and this model has {other.sha256[:12]}$"
    with pytest.raises(ConfigError, match=message):
        pretrained.put_on(other, folder / "compressor", described)
    assert other.model.config._attn_implementation == "sdpa", "nothing was attached"


def changed_bundle(folder: Path, to: Path, change: Any) -> Path:
    """A copy with changed files and a manifest that agrees with them."""
    shutil.copytree(folder, to)
    change(to)
    bundle.write_manifest(to)
    return to


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_damaged_bundle_is_refused(folder: Path, base: bases.Pretrained, tmp_path: Path) -> None:
    def refused(name: str, source: str, change: Any) -> str:
        path = changed_bundle(folder / source, tmp_path / name, change)
        with pytest.raises(ConfigError) as error:
            pretrained.put_on(base, path, pretrained.read(path)).detach()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "pretrained.json must be mitigate-pretrained-compressor of version 1" in refused("a", "compressor", lambda p: edit(p / "pretrained.json", format=2))
    assert "pretrained.json is not valid JSON" in refused("b", "compressor", lambda p: (p / "pretrained.json").write_text("{"))
    assert "pretrained.json is missing" in refused("c", "compressor", lambda p: (p / "pretrained.json").unlink())
    narrow = {"window": 2, "stride": 2}
    assert "gate.bias must be [2, 2], got [4, 2]" in refused("d", "compressor", lambda p: edit(p / "pretrained.json", variant=narrow))
    assert "base_delta.safetensors is missing" in refused("e", "attention", lambda p: (p / "base_delta.safetensors").unlink())
    path = tmp_path / "f"
    shutil.copytree(folder / "compressor", path)
    (path / "row.json").write_text("{}")
    with pytest.raises(bundle.DamagedBundle, match=r"row.json is not what the manifest says"):
        pretrained.read(path)


# as users type it ----------------------------------------------------------------------------------------------------------------------------


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["generate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mitigate: ")]
    assert len(error) == 1
    return error[0].removeprefix("mitigate: ")


def test_the_command_prints_the_text_and_the_bytes(folder: Path, base: bases.Pretrained, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(folder / "model"), "--prompt", PROMPT, "--max-new-tokens", "12"]
    own = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=12)
    assert said(common, capsys) == [own.text, bytes_line(own)]
    pretrained.put_on(base, folder / "attention", pretrained.read(folder / "attention"))
    converted = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=12)
    assert said([*common, "--bundle", str(folder / "attention")], capsys) == [converted.text, bytes_line(converted)]
    untrained = said([*common, "--variant", "w8s4", "--threads", str(torch.get_num_threads())], capsys)
    assert "bytes counted" in untrained[-1]
    assert said([*common, "--variant", "w8s4", "--temperature", "2", "--seed", "5"], capsys) != untrained


def test_the_command_refuses_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, prompt = ["--model", str(folder / "model")], ["--prompt", PROMPT]
    assert "was made for model with weights" in refused(["generate", "--model", str(folder / "other"), *prompt, "--bundle", str(folder / "compressor")], capsys)
    assert "this model has" in refused(["generate", *model, *prompt, "--dtype", "bfloat16", "--bundle", str(folder / "compressor")], capsys)
    assert "must have at most the model's 2048 positions" in refused(["generate", *model, *prompt, "--max-new-tokens", "5000"], capsys)
    assert refused(["generate", *model, *prompt, "--max-new-tokens", "0"], capsys) == "--max-new-tokens must be at least 1, got 0"
    for temperature, got in (("-1", "-1.0"), ("nan", "nan"), ("inf", "inf"), ("1e-320", "1e-320"), ("1e7", "10000000.0")):
        said = refused(["generate", *model, *prompt, "--temperature", temperature], capsys)
        assert said == f"--temperature must be 0, or between 1e-06 and 1e+06, got {got}"
    assert refused(["generate", *model, *prompt, "--seed", "-1"], capsys) == "--seed must be at least 0, got -1"
    assert refused(["generate", *model, *prompt, "--seed", str(10**22)], capsys) == f"--seed must be at most {2**63 - 1} (2**63 - 1), got {10**22}"
    assert refused(["generate", *model, *prompt, "--threads", "0"], capsys) == "--threads must be at least 1, got 0"
    assert "there is no variant preset 'w8s5'" in refused(["generate", *model, *prompt, "--variant", "w8s5"], capsys)
    assert "is no bundle: it has no MANIFEST.json" in refused(["generate", *model, *prompt, "--bundle", str(tmp_path)], capsys)
    assert "is a compressor for a pretrained base, without golden vectors" in refused(["verify", str(folder / "compressor")], capsys)
    assert "is a compressor for a pretrained base, without golden vectors" in refused(["score", "--bundle", str(folder / "compressor")], capsys)
    (tmp_path / "compressor.json").write_text("{}")
    assert "is the bundle of a trial" in refused(["generate", *model, *prompt, "--bundle", str(tmp_path)], capsys)


def test_a_model_with_as_many_kv_heads_as_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = known_words(VOCABULARY)
    shape = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert said(["--model", str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "3"], capsys)[-1].endswith("100.0 % of full attention's 6,144")


def shrunk(folder: Path, tokens: int) -> Path:
    """The model in a folder, with embeddings for the first tokens alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(tokens)
    model.save_pretrained(folder)
    return folder


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shrunk(write_model(tmp_path / "model"), 8)
    message = r"the tokenizer makes token \d+, and the model knows 8; they do not belong together"
    assert re.fullmatch(f"generate: {message}", refused(["generate", "--model", str(model), "--prompt", PROMPT], capsys))
    write_text(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r"^--model \S+: its tokenizer makes token \d+, and the model knows 8; they do not belong together$"):
        ready(settings(tmp_path))
    model = shrunk(write_model(tmp_path / "model"), len(known_words(VOCABULARY)) - 1)
    (tmp_path / "text.txt").write_text("\f".join([" ".join(VOCABULARY)] * 20))
    with pytest.raises(ConfigError, match=r"^--model \S+: its tokenizer makes token \d+, and the model knows \d+; they do not belong together$"):
        ready(settings(tmp_path))


def test_a_model_that_says_no_numbers_fails_in_one_line(base: bases.Pretrained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failed() -> str:
        base.model.save_pretrained(tmp_path)
        base.tokenizer.save_pretrained(tmp_path)
        assert cli.main(["generate", "--model", str(tmp_path), "--prompt", PROMPT]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        return next(line for line in printed.err.splitlines() if line.startswith("mitigate: "))

    with torch.no_grad():
        projection = base.model.model.layers[0].self_attn.q_proj.weight
        kept, projection[0, 0] = projection[0, 0].clone(), math.nan
        assert "generate: model.layers.0.self_attn.q_proj.weight holds NaN or infinities" in failed()
        projection[0, 0] = kept
        base.model.lm_head.weight.fill_(3e38)  # finite, and its products are not
        assert "generate: the model's logits are not finite (float32); look for " in failed()


def test_a_training_model_says_what_it_says_in_eval_mode_and_goes_on_training(base: bases.Pretrained) -> None:
    before = generate(base.model, base.tokenizer, PROMPT, max_new_tokens=6)
    for layer in base.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    base.model.train()
    assert generate(base.model, base.tokenizer, PROMPT, max_new_tokens=6) == before
    assert all(module.training for module in base.model.modules())


def test_a_sliding_window_model_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = known_words(VOCABULARY)
    save(tmp_path / "model", tokenizer)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, sliding_window=16)).save_pretrained(tmp_path / "model")
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", PROMPT, "--variant", "w8s4"]
    assert refused(arguments, capsys) == "attach: layer 0 has a sliding window of 16 tokens; only full-attention layers are supported"
    assert VariantConfig().compress
