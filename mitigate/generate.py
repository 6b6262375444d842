"""Continue a prompt with a model, with or without a variant attached, and count what its cache holds.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
import torch

from mitigate.cache import empty, held_bytes
from mitigate.config import ConfigError, VariantConfig, WorkFailed, check_seed, require
from mitigate.cost import bytes_at, shape_of
from mitigate.perplexity import check_length, check_tokens
from mitigate.readout import in_eval_mode, not_finite

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures: beyond them logits become infinities or all the same


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A continuation.

    Attributes:
        text: without special tokens. tokens: its ids. prompt_tokens: number of tokens in front of it.
        kv_bytes: counted in the tensors that the cache held at the end, after `kv_tokens` tokens.
        kv_bytes_full: of full attention after as many tokens, closed form.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    kv_tokens: int
    kv_bytes: int
    kv_bytes_full: int


def encode(tokenizer: Any, prompt: str, *, chat: bool = False) -> list[int]:
    """Token ids of a prompt, as a user's turn of the chat template, or as text behind the tokenizer's BOS, where it has one.

    Raises:
        ConfigError: there is no usable chat template, or no token at all.
    """
    if chat:
        try:
            turn = [{"role": "user", "content": prompt}]
            found = tokenizer.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
        except (ValueError, jinja2.TemplateError) as error:
            raise ConfigError(f"--chat: {' '.join(str(error).split())}") from None
    else:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        found = bos + tokenizer.encode(prompt, add_special_tokens=False)
    if not found:
        raise ConfigError(f"--prompt must be text of which this tokenizer makes at least one token, got {prompt!r}")
    return list(found)


def check_options(*, max_new_tokens: int, temperature: float, seed: int) -> None:
    """ConfigError unless `generate` can work with these."""
    require(max_new_tokens >= 1, "--max-new-tokens", "at least 1", max_new_tokens)
    require(temperature == 0 or COLDEST <= temperature <= HOTTEST, "--temperature", f"0, or between {COLDEST:g} and {HOTTEST:g}", temperature)
    check_seed("--seed", seed)


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, chat: bool = False, temperature: float = 0.0, seed: int = 0) -> Generated:
    """Continue a prompt, greedily or by sampling.

    Args:
        model: a causal language model; an attached variant is used.
        max_new_tokens: the continuation ends here, or before at the tokenizer's EOS.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn with `seed` from the whole distribution.

    Raises:
        ConfigError: an option is out of bounds, prompt and continuation are longer than the model's positions, `encode` refuses the prompt, or the model
            does not know one of its tokens.
        WorkFailed: a weight of the model or its logits are not finite.
    """
    check_options(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    encoded = encode(tokenizer, prompt, chat=chat)
    check_tokens(model, max(encoded), "generate: the tokenizer")
    _check_weights(model)
    ids = torch.tensor([encoded], device=model.device)
    check_length(model, ids.shape[1] + max_new_tokens, "generate: prompt and continuation together")
    eos = tokenizer.eos_token_id
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    cache = empty()
    with in_eval_mode(model), _finite_logits(model), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=0 if eos is None else eos,
            **options,
        )
    new = found[0, ids.shape[1] :].tolist()
    held = int(cache.get_seq_length())
    return Generated(
        text=tokenizer.decode(new, skip_special_tokens=True),
        tokens=new,
        prompt_tokens=ids.shape[1],
        kv_tokens=held,
        kv_bytes=held_bytes(cache),
        kv_bytes_full=bytes_at(VariantConfig(compress=False), shape_of(model), held),
    )


def _check_weights(model: Any) -> None:
    """WorkFailed if a weight is not finite: after a short prompt such logits may be finite all the same, since an attention kernel can drop NaN."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) and not bool(parameter.isfinite().all()):
            raise WorkFailed(f"generate: {name} holds NaN or infinities; nothing that the model says means anything")


@contextmanager
def _finite_logits(model: Any) -> Iterator[None]:
    """WorkFailed as soon as a next token's logits are no distribution."""

    def check(_: Any, args: Any, output: Any) -> None:
        if not bool(output.logits[:, -1].float().logsumexp(-1).isfinite().all()):
            raise not_finite("generate", model)

    handle = model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def bytes_line(found: Generated) -> str:
    """What the cache held beside full attention's, in a sentence."""
    share = f"{100 * found.kv_bytes / found.kv_bytes_full:.1f} %" if found.kv_bytes_full else "nothing"
    return f"KV cache after {found.kv_tokens} tokens: {found.kv_bytes:,} bytes counted, {share} of full attention's {found.kv_bytes_full:,}"
