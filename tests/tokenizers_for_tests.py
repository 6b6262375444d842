"""Small tokenizers made here, offline, and a wrapper that shows what a task asks of one: nothing may ever be decoded."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mitigate.tasks.words import ANIMALS, NAMES

BOS, EOS, UNK = "<s>", "</s>", "<unk>"
SPACE, BAR = "\u0120", "\u2581"  # how a space is written by byte-level and by SentencePiece vocabularies
CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


class NeverDecodes:
    """The tokenizer with what `words.Tokenizer` names and nothing else; decoding, or anything unexpected, raises."""

    bos_token_id: int | None

    def __init__(self, tokenizer: Any) -> None:
        self._inner, self.bos_token_id, self.unk_token_id = tokenizer, tokenizer.bos_token_id, tokenizer.unk_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._inner.get_vocab())

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        assert not tokenize
        return self._inner.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the words task asked the tokenizer for {name!r}")


def three_letter_words(count: int) -> list[str]:
    """Different made-up words, a count of up to 17,576."""
    return ["".join(letters) for letters in itertools.islice(itertools.product(string.ascii_lowercase, repeat=3), count)]


def grown(words: Iterable[str], space: str, alphabet: Iterable[str]) -> models.BPE:
    """A BPE in which each word behind a space grows letter by letter into one token, and everything else stays as it is."""
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, UNK, *sorted(set(alphabet))])}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word) + 1):
            merges[space + word[: end - 1], word[end - 1]] = None
            vocabulary.setdefault(space + word[:end], len(vocabulary))
    return models.BPE(vocab=vocabulary, merges=list(merges), unk_token=None)


def fast(model: Any, *, pre: Any, decoder: Any, adds_bos: bool = False, bos: str | None = None, template: str | None = None, **special: Any) -> Any:
    """A transformers tokenizer around a model of the tokenizers library."""
    inner = Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = pre, decoder
    if adds_bos:
        assert bos is not None
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=EOS, **special)
    made.chat_template = template
    return made


def byte_level(words: Iterable[str] = (*ANIMALS, *NAMES), **options: Any) -> Any:
    """As GPT-2 and Llama 3: bytes, a space belongs to the word behind it (`Ġdog`)."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast(grown(words, SPACE, pre.alphabet()), pre=pre, decoder=decoders.ByteLevel(), **options)


def metaspace(words: Iterable[str] = (*ANIMALS, *NAMES), *, together: Iterable[tuple[str, str]] = (), **options: Any) -> Any:
    """As Llama 2: `▁dog`, and text that starts without a space is given one. `together` are pairs of characters that it merges before all else."""
    alphabet = [BAR, *string.ascii_letters, *string.digits, *string.punctuation, "\n", *(a + b for a, b in together)]
    model = grown(words, BAR, alphabet)
    if together:
        made = grown(words, BAR, alphabet)
        merges = [(BAR + w[: e - 1], w[e - 1]) for w in words for e in range(1, len(w) + 1)]
        model = models.BPE(vocab=_vocabulary(made), merges=[*together, *dict.fromkeys(merges)], unk_token=None)
    return fast(model, pre=pre_tokenizers.Metaspace(replacement=BAR, prepend_scheme="always"), decoder=decoders.Metaspace(), **options)


def _vocabulary(model: models.BPE) -> dict[str, int]:
    return Tokenizer(model).get_vocab(with_added_tokens=False)


def letters_only() -> Any:
    """Bytes and no merges: every word is as many tokens as it has letters, and one for the space."""
    return byte_level(())


def known_words(words: Iterable[str], *, keeps_newlines: bool = True) -> Any:
    """Whole words or `<unk>`: what is not listed cannot be told apart."""
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, UNK, "x", ":", *(["\n"] if keeps_newlines else []), *words])}
    pre = pre_tokenizers.Split("\n", "isolated") if keeps_newlines else pre_tokenizers.WhitespaceSplit()
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre, pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(":", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=UNK, bos_token=BOS, eos_token=EOS)


def stripping() -> Any:
    """Byte-level behind a normaliser that strips the ends of a text: a text of nothing but white space has no tokens."""
    made = byte_level()
    made.backend_tokenizer.normalizer = normalizers.Strip()
    return made


@cache
def shared(name: str) -> Any:
    """The tokenizers that many tests read, made once."""
    return {
        "plain": lambda: byte_level(),  # no BOS at all
        "adds-bos": lambda: byte_level(bos=BOS, adds_bos=True),
        "has-bos": lambda: byte_level(bos=BOS),
        "metaspace": lambda: metaspace(bos=BOS, adds_bos=True),
        "metaspace-merging": lambda: metaspace(bos=BOS, adds_bos=True, together=[("x", ":"), ("x", "\n")]),
        "letters": letters_only,
        "chat": lambda: byte_level(bos=BOS, adds_bos=True, template=CHAT),
        "metaspace-chat": lambda: metaspace(bos=BOS, adds_bos=True, template=CHAT),
        "many-words": lambda: byte_level((*ANIMALS, *NAMES, *three_letter_words(6000)), bos=BOS),
        "some-words": lambda: byte_level((*NAMES, *three_letter_words(200)), bos=BOS),
    }[name]()
