"""Animal -> name retrieval on any tokenizer: the paper's task (arXiv:2609.36322) for pretrained models, built from token ids.

Words that are single tokens are found at run time. A record is ``key, between, name, after``; a prompt is ``prefix, records among filler, separator,
demonstrations, queries``, where demonstrations and queries repeat records. What a tokenizer puts in front (BOS) and a chat template's opening are the
prefix and count as positions. Text is turned into ids piece by piece; ids are never decoded and encoded again.

A tokenizer with too few single-token words gets keys and names of several tokens each, all of one length; `Words.note` says so.

Shapes: K keys, N names, R records, Q queries, A tokens of a name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jinja2
import numpy as np

from mitigate.config import ConfigError, WordsConfig
from mitigate.tasks import placement
from mitigate.tasks.placement import Design, Ints
from mitigate.tasks.prompts import Content, Prompts, Sweep, assemble

ANIMALS = (
    "dog cat horse cow pig sheep goat chicken duck goose turkey rabbit mouse rat hamster squirrel fox wolf bear lion tiger leopard cheetah elephant giraffe "
    "zebra hippo rhino monkey gorilla kangaroo koala panda deer moose elk bison buffalo camel llama alpaca donkey mule otter beaver badger skunk raccoon "
    "weasel ferret mink seal walrus whale dolphin shark salmon trout tuna cod eel crab lobster shrimp oyster clam squid octopus frog toad newt lizard snake "
    "turtle tortoise crocodile alligator eagle hawk falcon owl crow raven sparrow robin pigeon dove swan pelican penguin ostrich emu peacock parrot flamingo "
    "stork crane heron gull ant bee wasp fly mosquito butterfly moth beetle spider scorpion cricket grasshopper dragonfly worm snail slug bat mole hedgehog "
    "lamb calf pony puppy kitten hen rooster bull ox hound bird fish insect lark finch magpie jackal hyena lynx cougar puma jaguar baboon lemur sloth"
).split()
NAMES = (
    "James John Robert Michael William David Richard Joseph Thomas Charles Daniel Matthew Anthony Mark Donald Steven Paul Andrew Kenneth Kevin Brian George "
    "Edward Ronald Timothy Jason Jeffrey Ryan Jacob Gary Nicholas Eric Jonathan Stephen Larry Justin Scott Brandon Benjamin Samuel Gregory Frank Alexander "
    "Raymond Patrick Jack Dennis Jerry Tyler Aaron Adam Nathan Henry Douglas Peter Kyle Walter Ethan Jeremy Harold Keith Christian Roger Noah Gerald Carl "
    "Terry Sean Austin Arthur Lawrence Jesse Dylan Bryan Joe Jordan Billy Bruce Albert Gabriel Logan Alan Juan Wayne Roy Ralph Eugene Vincent Russell Louis "
    "Philip Bobby Johnny Bradley Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Lisa Nancy Betty Margaret Sandra Ashley Emily "
    "Michelle Carol Amanda Melissa Deborah Rebecca Sharon Laura Kathleen Amy Angela Anna Emma Nicole Helen Samantha Katherine Christine Rachel Catherine "
    "Maria Heather Diane Ruth Julie Olivia Joyce Virginia Alice Grace Rose Judy Martha Gloria Ann Jean Kelly Lauren Joan Julia Sara Victoria Hannah"
).split()
COLOURS = "red blue green black white brown grey pink golden silver old young big small fast slow".split()

_MARK = "\u2042"  # stands for the prompt while a chat template is rendered
_ANCHORS = ("x", "a", "0", ")")  # text in front of a piece; the first one that the piece does not merge with
_LONGEST = 12  # tokens of a word, at most
_FEW_NAMES = 16  # enough that guessing does not pay


class Tokenizer(Protocol):
    """What is asked of a tokenizer; every transformers tokenizer has it."""

    bos_token_id: int | None
    unk_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """A task's token ids for one tokenizer.

    Attributes:
        keys: int64 [K, tokens of a key]. names: int64 [N, A].
        between, after: inside a record, after key and after name. filler: repeated as padding.
        prefix: in front of everything. opening: between the records and the demonstrations.
        note: what was changed to fit the tokenizer, one line; empty if nothing.
    """

    keys: Ints
    names: Ints
    between: Ints
    after: Ints
    filler: Ints
    prefix: Ints
    opening: Ints
    note: str

    @property
    def record_length(self) -> int:
        """Tokens of a record."""
        return self.keys.shape[1] + len(self.between) + self.names.shape[1] + len(self.after)


def pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` as it stands after other text: what it adds to an anchor, so that no start-of-text form slips in."""
    for anchor in _ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False)
        both = tokenizer.encode(anchor + text, add_special_tokens=False)
        if both[: len(before)] == before:
            return both[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)


def find(tokenizer: Tokenizer, config: WordsConfig) -> Words:
    """Choose words and separators for a tokenizer.

    Raises:
        ConfigError: not enough different words of one length, no tokens for the padding, or no usable chat template.
    """
    prefix, opening = _frame(tokenizer, config)
    between, after, filler = (_ids(pieces(tokenizer, text)) for text in (config.between, config.after, config.padding))
    if not len(filler):
        raise ConfigError(f"WordsConfig.padding must be text of which this tokenizer makes at least one token, got {config.padding!r}")
    by_length = _by_length(tokenizer, NAMES)
    names = _of_one_length(by_length, lambda length: _FEW_NAMES)
    if names is None:
        most = max(map(len, by_length.values()), default=0)
        raise ConfigError(f"score: the tokenizer must have at least {_FEW_NAMES} names of one length up to {_LONGEST} tokens, got {most}")

    def wanted(key_tokens: int) -> int:
        """Records of a prompt if keys are so long, under the protocol with less filler."""
        if config.context is None:
            return config.records
        length = key_tokens + len(between) + names.shape[1] + len(after)
        overhead = _overhead(prefix, opening, length, config, min(config.filler, config.filler_in_sequence))
        return max((config.context - overhead) // length, config.demonstrations + config.queries)

    keys, note = _keys(tokenizer, config, wanted)
    notes = [note, f"names have {names.shape[1]} tokens each" if names.shape[1] > 1 else ""]
    notes += [f"{text!r} has no tokens" for text, ids in ((config.between, between), (config.after, after)) if text and not len(ids)]
    return Words(keys=keys, names=names, between=between, after=after, filler=filler, prefix=prefix, opening=opening, note="; ".join(filter(None, notes)))


def sweep(words: Words, config: WordsConfig, protocol: placement.Protocol, *, period: int, prompts: int, seed: int) -> Sweep:
    """The phase sweep of a task under a protocol: `prompts` logical prompts, each at its `period` placements.

    Raises:
        ConfigError: the context has no room for the demonstrations and the queried records, or for more records than there are keys.
    """
    filler = config.filler if protocol == "outer" else config.filler_in_sequence
    records, askable = _records(words, config, filler), None
    if config.context is not None:
        middle = max(config.queries, records // 10)
        askable = range((records - middle) // 2, (records + middle) // 2)
    design = Design(
        protocol=protocol,
        period=period,
        prompts=prompts,
        records=records,
        record_length=words.record_length,
        queries=config.queries,
        filler=filler,
        seed=seed,
        askable=askable,
    )
    return Sweep(design=design, draw=lambda rng, asked: _draw(words, config, rng, asked, records, filler), note=words.note)


def training_batch(words: Words, config: WordsConfig, rng: np.random.Generator, count: int, protocol: placement.Protocol) -> Prompts:
    """Random prompts of the task: one shift for all records of a prompt (outer), or random gaps (in-sequence). Any record may be asked for.

    Raises:
        ConfigError: as `sweep`.
    """
    filler = config.filler if protocol == "outer" else config.filler_in_sequence
    records = _records(words, config, filler)
    drawn = [_draw(words, config, rng, rng.permutation(records)[: config.queries], records, filler) for _ in range(count)]
    together: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in drawn]) for name in ("records", "filler", "tail", "asked")}
    columns = 1 if protocol == "outer" else records
    before = np.sort(rng.integers(filler + 1, size=(count, columns)), axis=1)
    return assemble(dataclasses.replace(drawn[0], **together), np.broadcast_to(before, (count, records)))


def _records(words: Words, config: WordsConfig, filler: int) -> int:
    """Records of a prompt; ConfigError if they do not fit, or there are too few keys."""
    records = config.records
    if config.context is not None:
        overhead = _overhead(words.prefix, words.opening, words.record_length, config, filler)
        records = _records_that_fit(config, overhead=overhead, length=words.record_length)
    if records > len(words.keys):
        raise ConfigError(f"score: {records} records take as many different keys, this tokenizer has {len(words.keys)}")
    return records


def _draw(words: Words, config: WordsConfig, rng: np.random.Generator, asked_Q: Ints, records: int, filler: int) -> Content:
    keys_RK = words.keys[rng.permutation(len(words.keys))[:records]]
    names_RA = words.names[rng.integers(len(words.names), size=records)]
    between, after = (np.broadcast_to(part, (records, len(part))) for part in (words.between, words.after))
    records_RL = np.concatenate([keys_RK, between, names_RA, after], axis=1)
    others = np.setdiff1d(np.arange(records), asked_Q)
    shown = np.concatenate([rng.permutation(others)[: config.demonstrations], asked_Q])
    name_at = keys_RK.shape[1] + len(words.between)
    query_at = len(words.opening) + words.record_length * (config.demonstrations + np.arange(len(asked_Q)))
    return Content(
        prefix=words.prefix,
        records=records_RL[None],
        filler=np.resize(words.filler, filler)[None],
        tail=np.concatenate([words.opening, records_RL[shown].ravel()])[None],
        answers=(query_at + name_at - 1)[:, None] + np.arange(names_RA.shape[1]),
        asked=asked_Q[None],
    )


def _overhead(prefix: Ints, opening: Ints, record_length: int, config: WordsConfig, filler: int) -> int:
    """Tokens of a prompt besides its records."""
    return len(prefix) + filler + len(opening) + record_length * (config.demonstrations + config.queries)


def _records_that_fit(config: WordsConfig, *, overhead: int, length: int) -> int:
    assert config.context is not None
    fit = (config.context - overhead) // length
    least = config.demonstrations + config.queries
    if fit < least:
        need = f"{overhead + least * length} ({least} records of {length} tokens and {overhead} others)"
        raise ConfigError(f"WordsConfig.context must be at least {need}, got {config.context}")
    return fit


def _frame(tokenizer: Tokenizer, config: WordsConfig) -> tuple[Ints, Ints]:
    """Prefix, and what stands between records and demonstrations."""
    if not config.chat:
        plain, full = (tokenizer.encode("x", add_special_tokens=special) for special in (False, True))
        start = next((i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0)
        prefix = full[:start]
        if not prefix and config.bos and tokenizer.bos_token_id is not None:
            prefix = [tokenizer.bos_token_id]
        return _ids(prefix), _ids(pieces(tokenizer, config.separator))
    try:
        rendered = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True))
    except (ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"--chat: {' '.join(str(error).split())}") from None
    head, mark, foot = rendered.partition(_MARK)
    if not mark or _MARK in foot:
        raise ConfigError(f"--chat: the tokenizer's chat template must hold the user's text once, got {rendered.count(_MARK)} times")
    return _ids(tokenizer.encode(head, add_special_tokens=False)), _ids(pieces(tokenizer, foot))


def _keys(tokenizer: Tokenizer, config: WordsConfig, wanted: Callable[[int], int]) -> tuple[Ints, str]:
    """Keys of one length k, at least `wanted(k)` of them, and a note if they are not single tokens."""
    most = 0
    if config.context is not None:
        words = np.array(_by_length(tokenizer, _vocabulary_words(tokenizer)).get(1, []), dtype=np.int64).reshape(-1, 1)
        if len(words) >= wanted(1):
            return words, ""
        if len(words) ** 2 >= wanted(2):
            side = int(np.ceil(np.sqrt(wanted(2))))
            first, second = np.divmod(np.arange(side * side), side)
            return np.concatenate([words[first], words[second]], axis=1), f"{len(words)} single-token words for {wanted(1)} records: keys are pairs of them"
        most = len(words) ** 2
    for candidates in (ANIMALS, [f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS]):
        by_length = _by_length(tokenizer, candidates)
        keys = _of_one_length(by_length, wanted)
        if keys is not None:
            several = keys.shape[1] > 1
            return keys, f"fewer than {wanted(1)} single-token animals: keys have {keys.shape[1]} tokens each" if several else ""
        most = max(most, *map(len, by_length.values()), 0)
    known = f"{most} with this tokenizer (different keys of one length up to {_LONGEST} tokens)"
    if config.context is None:
        raise ConfigError(f"WordsConfig.records must be at most {known}, got {config.records}")
    raise ConfigError(f"WordsConfig.context must be short enough for records up to {known}, got {config.context}")


def _vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words that the vocabulary marks as starting after a space, by id."""
    found = sorted((index, match[1]) for token, index in tokenizer.get_vocab().items() if (match := re.fullmatch("[\u0120\u2581 ]([a-z]{3,})", token)))
    return [word for _, word in found]


def _by_length(tokenizer: Tokenizer, words: Iterable[str]) -> dict[int, list[tuple[int, ...]]]:
    """The different token ids of words by their number, up to `_LONGEST`, in order; words that the tokenizer does not know are left out."""
    found: dict[int, dict[tuple[int, ...], None]] = {}
    for word in words:
        ids = tuple(pieces(tokenizer, " " + word))
        if 1 <= len(ids) <= _LONGEST and tokenizer.unk_token_id not in ids:
            found.setdefault(len(ids), {})[ids] = None
    return {length: list(ids) for length, ids in sorted(found.items())}


def _of_one_length(by_length: dict[int, list[tuple[int, ...]]], wanted: Callable[[int], int]) -> Ints | None:
    """The words of the least length k of which there are `wanted(k)`; None if there is no such length."""
    return next((np.array(ids, dtype=np.int64) for length, ids in by_length.items() if len(ids) >= wanted(length)), None)


def _ids(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, dtype=np.int64)
