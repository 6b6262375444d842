"""A model converted for good: saved and loaded again, refused by plain loaders, and undone to the bit all the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import VARIANTS, attached, same_weights, tiny, tokens, traces, weights, whole
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mitigate.config import ConfigError, VariantConfig
from mitigate.converted import CONVERTED_FILE, convert, load_converted, save_converted
from mitigate.surgery import Attachment

W8S8 = VariantConfig()


def as_converted(model: PreTrainedModel, variant: VariantConfig) -> Attachment:
    made = attached(model, variant)
    made.make_permanent(save_converted)
    return made


@pytest.mark.parametrize(("family", "name"), [("qwen3", "everything"), ("llama", "w8s8"), ("qwen2", "per-offset-tied")])
def test_a_converted_model_is_saved_and_loaded(family: str, name: str, tmp_path: Path) -> None:
    model = tiny(family, wide=False)
    ids = tokens(model, 40)
    with torch.no_grad():
        on = as_converted(model, VARIANTS[name])
        wanted = whole(model, ids)
        model.save_pretrained(tmp_path)
        assert {"config.json", CONVERTED_FILE} <= {path.name for path in tmp_path.iterdir()}
        again = load_converted(tmp_path)
        assert type(again.model) is type(model)
        assert again.variant == on.variant
        assert torch.equal(whole(again.model, ids), wanted)
        # Plain loaders must fail: they could only run full attention without a word.
        for loader in (AutoModelForCausalLM, type(model)):
            with pytest.raises(OSError, match="no file named"):
                loader.from_pretrained(tmp_path)


def test_a_converted_model_has_its_compressors(tmp_path: Path) -> None:
    model = tiny(wide=False)
    before, held, ids = traces(model), weights(model), tokens(model, 40)
    plain = whole(model, ids)
    on = convert(model, VARIANTS["everything"])
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for parameter in on.compressors.parameters())
    assert len(model.state_dict()) == len(held) + len(on.compressors.state_dict())
    with torch.no_grad():
        wanted = whole(model, ids)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        assert torch.equal(whole(twin, ids), wanted), "a copy is independent and still converted"
        twin.save_pretrained(tmp_path)
        assert torch.equal(whole(load_converted(tmp_path).model, ids), wanted)
        for parameter in model.parameters():
            parameter.mul_(2)
        with on.removed():
            assert torch.equal(whole(model, ids), plain)
        assert torch.equal(whole(model, ids), wanted)
    on.detach()
    assert traces(model) == before
    assert same_weights(model, held)


def test_tied_embeddings_and_bf16_survive(tmp_path: Path) -> None:
    shape = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).bfloat16().eval()
    on = convert(model, W8S8)
    with torch.no_grad():
        for parameter in on.compressors.parameters():
            parameter.normal_()
        model.save_pretrained(tmp_path)
        again = load_converted(tmp_path)
        assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
        assert again.model.dtype == torch.bfloat16
        assert {parameter.dtype for parameter in again.compressors.parameters()} == {torch.float32}
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], tensor), name


def test_a_folder_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ConfigError, match=r"^load_converted: .*cannot be read"):
        load_converted(tmp_path)
    model = tiny(wide=False)
    convert(model, W8S8)
    model.save_pretrained(tmp_path)
    path = tmp_path / CONVERTED_FILE
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        about = opened.metadata()
    tensors = load_file(path)
    one = next(name for name in tensors if name.endswith("gate_weight"))
    for changed in (
        {name: tensor for name, tensor in tensors.items() if name != one},
        tensors | {"more": torch.zeros(2)},
        tensors | {one: torch.zeros(3, 3)},
    ):
        save_file(changed, path, metadata=about)
        with pytest.raises(ConfigError, match=r"^load_converted: \S+ must be of shape .*, the file has .*$"):
            load_converted(tmp_path)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="must be of format mitigate-converted-1"):
        load_converted(tmp_path)
    for metadata in (about | {"dtype": "float31"}, about | {"variant": "{"}, {name: value for name, value in about.items() if name != "variant"}):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(ConfigError, match=r"^load_converted: the metadata of \S+ is damaged: [^\n]+$"):
            load_converted(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_folder_with_plain_weights_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    model = tiny("llama", wide=False)
    convert(model, W8S8)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=rf"^save_pretrained: \S+ must hold no weights that from_pretrained would load as full attention, got {name}$"):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_saving_before_and_after_the_conversion_needs_two_folders(tmp_path: Path) -> None:
    model = tiny("llama", wide=False)
    model.save_pretrained(tmp_path)
    on = convert(model, W8S8)
    with pytest.raises(ConfigError, match=r"got model\.safetensors$"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "converted")
    model.save_pretrained(tmp_path / "converted")  # over itself
    assert load_converted(tmp_path / "converted").variant == on.variant


def test_a_file_is_no_folder_to_save_to(tmp_path: Path) -> None:
    model = tiny("llama", wide=False)
    convert(model, W8S8)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"^save_pretrained: save_directory must be a folder, got [^\n]+$"):
            model.save_pretrained(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json"),
        ("{", "config.json"),
        ("[]", ""),
        ('{"model_type": "nobody"}', "nobody"),
        ('{"model_type": "gpt2"}', "it is of GPT2Config, and converted.safetensors of LlamaForCausalLM"),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
    ],
)
def test_a_missing_or_broken_config_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    model = tiny("llama", wide=False)
    convert(model, W8S8)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^load_converted: \S+config\.json cannot be used: [^\n]+$") as error:
        load_converted(tmp_path)
    assert message in str(error.value)


def test_full_attention_converts_to_itself() -> None:
    model = tiny(wide=False)
    before = traces(model)
    convert(model, VariantConfig(compress=False))
    assert traces(model) == before
