"""The words task token by token: one checker of a whole sweep, tried on planted mistakes and then over tokenizers, protocols and texts."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from tokenizers_for_tests import BOS, EOS, NeverDecodes, byte_level, known_words, letters_only, shared, stripping, three_letter_words

from mitigate.config import ConfigError, WordsConfig
from mitigate.tasks import words
from mitigate.tasks.placement import Positions, filler_needed
from mitigate.tasks.prompts import Prompts, Sweep
from mitigate.tasks.words import ANIMALS, NAMES

ProtocolName = Literal["outer", "in_sequence"]
PROTOCOLS: tuple[ProtocolName, ...] = ("outer", "in_sequence")
SINGLE = ("plain", "adds-bos", "has-bos", "metaspace", "metaspace-merging", "chat", "metaspace-chat")  # animals and names are single tokens
MOST = max(Counter(len(f" {colour} {animal}") for colour in words.COLOURS for animal in ANIMALS if len(colour + animal) <= 10).values())
KEYS = (*ANIMALS, *(f"{colour} {animal}" for colour in words.COLOURS for animal in ANIMALS))
PREFIX = {
    "plain": [],
    "has-bos": [BOS],
    "adds-bos": [BOS],
    "metaspace": [BOS],
    "metaspace-merging": [BOS],
    "letters": [],
    "chat": [BOS],
    "metaspace-chat": [BOS],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What a prompt of a sweep is made of, as token strings read off the tokenizer by hand."""

    prefix: list[str]
    between: list[str]
    after: list[str]
    filler: list[str]
    opening: list[str]
    keys: set[tuple[str, ...]]
    names: set[tuple[str, ...]]


Record = tuple[int, tuple[str, ...], tuple[str, ...]]  # position of the first token, key, name


def parse(row: list[str], expected: Expected, *, shown: int, filler: int) -> tuple[list[Record], list[Record]]:
    """Records, and what follows the opening, of one prompt; ValueError where it is malformed."""
    key, name = len(next(iter(expected.keys))), len(next(iter(expected.names)))
    length = key + len(expected.between) + name + len(expected.after)
    tail_at = len(row) - shown * length
    body_end = tail_at - len(expected.opening)
    if row[: len(expected.prefix)] != expected.prefix:
        raise ValueError("prefix")
    if row[body_end:tail_at] != expected.opening:
        raise ValueError("opening")

    def record(at: int) -> Record | None:
        parts, place = [], at
        for size in (key, len(expected.between), name, len(expected.after)):
            parts.append(tuple(row[place : place + size]))
            place += size
        right = parts[0] in expected.keys and list(parts[1]) == expected.between and parts[2] in expected.names and list(parts[3]) == expected.after
        return (at, parts[0], parts[2]) if right else None

    records, at, padding = [], len(expected.prefix), 0
    while at < body_end:
        found = record(at)
        if found is not None:
            records.append(found)
            at += length
        elif row[at] == expected.filler[padding % len(expected.filler)]:
            padding += 1
            at += 1
        else:
            raise ValueError(f"token {row[at]!r} at {at} is neither filler nor part of a record")
    if at != body_end or padding != filler:
        raise ValueError(f"{padding} filler tokens")
    tail = [record(tail_at + i * length) for i in range(shown)]
    if None in tail:
        raise ValueError("demonstrations and queries are records")
    return records, [found for found in tail if found is not None]


def faults(
    batch: Prompts, strings: Callable[[list[int]], list[str]], expected: Expected, config: WordsConfig, protocol: str, period: int, records: int
) -> list[str]:
    """What is wrong with the P placements of one logical prompt."""
    found: set[str] = set()
    filler = config.filler if protocol == "outer" else config.filler_in_sequence
    parsed = []
    for row in batch.tokens.tolist():
        try:
            parsed.append(parse(strings(row), expected, shown=config.demonstrations + config.queries, filler=filler))
        except ValueError as error:
            found.add(str(error))
    if found or len(parsed) != period:
        return sorted(found | ({f"{len(parsed)} placements"} if not found else set()))
    if len({(tuple(r[1:] for r in body), tuple(r[1:] for r in tail)) for body, tail in parsed}) != 1:
        found.add("different contents")
    for number in range(len(parsed[0][0])):
        if sorted(body[number][0] % period for body, _ in parsed) != list(range(period)):
            found.add("a record does not stand once at each residue")
    for row, (body, tail) in enumerate(parsed):
        names = {key: (at, name) for at, key, name in body}
        if len(body) != records or len(names) != records:
            found.add(f"{len(body)} records, {len(names)} different keys")
        shown = [key for _, key, _ in tail]
        if len(set(shown)) != len(shown):
            found.add("a record is shown twice")
        if any(key not in names or names[key][1] != name for _, key, name in tail):
            found.add("a shown record is not one of the prompt's")
            continue
        for query, (at, key, name) in enumerate(tail[config.demonstrations :]):
            start = at + len(key) + len(expected.between)
            if batch.answer_from[query].tolist() != list(range(start - 1, start - 1 + len(name))):
                found.add("answer_from")
            if strings(batch.gold[row, query].tolist()) != list(name):
                found.add("gold")
            if batch.target[row, query] != names[key][0]:
                found.add(f"target is {batch.target[row, query] - names[key][0]:+d} off")
    return sorted(found)


@cache
def spellings(name: str, listed: tuple[str, ...], length: int) -> set[tuple[str, ...]]:
    """Token strings of ' word' in the middle of a text, of those that have so many."""
    tokenizer = shared(name)
    tokens = [tokenizer.convert_ids_to_tokens(tokenizer.encode(f"; {word}", add_special_tokens=False)) for word in listed]
    cut = [tuple(spelt[spelt.index(";") + 1 :]) for spelt in tokens]
    return {spelt for spelt in cut if len(spelt) == length}


def plain_text(tokenizer: Any, text: str) -> list[str]:
    """Token strings of punctuation and letters that nothing is merged from: one a character."""
    newline, space = ("\u010a", "\u0120") if "\u0120" in tokenizer.get_vocab() else ("\n", "\u2581")
    return [{"\n": newline, " ": space}.get(letter, letter) for letter in text]


def expected_of(name: str, config: WordsConfig, *, key: int, answer: int) -> Expected:
    """By hand, for the tokenizers whose alphabet stays apart."""
    tokenizer = shared(name)
    prefix, opening = PREFIX[name], plain_text(tokenizer, config.separator)
    if config.chat:
        bar = plain_text(tokenizer, " ") if name == "metaspace-chat" else []  # it puts one in front of what follows a special token
        prefix, opening = [BOS, *bar, *plain_text(tokenizer, "[user] ")], [EOS, *bar, *plain_text(tokenizer, "\n[assistant]\n")]
    return Expected(
        prefix=prefix,
        between=plain_text(tokenizer, config.between),
        after=plain_text(tokenizer, config.after),
        filler=plain_text(tokenizer, config.padding),
        opening=opening,
        keys=spellings(name, KEYS if key > 1 else tuple(ANIMALS), key),
        names=spellings(name, tuple(NAMES), answer),
    )


def swept(name: str, config: WordsConfig, protocol: ProtocolName, *, period: int, prompts: int = 2, seed: int = 0) -> tuple[words.Words, Sweep]:
    found = words.find(NeverDecodes(shared(name)), config)
    return found, words.sweep(found, config, protocol, period=period, prompts=prompts, seed=seed)


def check(name: str, config: WordsConfig, protocol: ProtocolName, *, period: int, prompts: int = 2, seed: int = 0) -> None:
    found, sweep = swept(name, config, protocol, period=period, prompts=prompts, seed=seed)
    expected = expected_of(name, config, key=found.keys.shape[1], answer=found.names.shape[1])
    batches = list(sweep)
    assert len(batches) == prompts
    assert len({batch.tokens.shape[1] for batch in batches}) == 1, "one length"
    assert len({batch.answer_from.tobytes() for batch in batches}) == 1, "queries at the same positions"
    for batch in batches:
        assert faults(batch, shared(name).convert_ids_to_tokens, expected, config, protocol, period, config.records) == []


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, WordsConfig, int]:
    name, period = draw(st.sampled_from((*SINGLE, "letters"))), draw(st.integers(2, 9))
    queries, demonstrations = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    config = WordsConfig(
        records=max(1, queries + demonstrations + draw(st.integers(0, 9))),
        queries=queries,
        demonstrations=demonstrations,
        between=draw(st.sampled_from([":", "", " = "])),
        after=draw(st.sampled_from(["\n", "", ";", "..\n"])),
        padding=draw(st.sampled_from(["\n", "#", "-+!"])),
        separator=draw(st.sampled_from(["\n", "", "Q:"])),
        filler=filler_needed(period) + draw(st.integers(0, 9)),
        filler_in_sequence=filler_needed(period) + draw(st.integers(1, 20)),
        chat=name.endswith("chat") and draw(st.booleans()),
    )
    return name, config, period


@settings(deadline=None, max_examples=120)
@given(drawn=configs(), protocol=st.sampled_from(PROTOCOLS), seed=st.integers(0, 1000))
@example(drawn=("metaspace-chat", WordsConfig(chat=True), 24), protocol="in_sequence", seed=0)
@example(drawn=("letters", WordsConfig(), 24), protocol="outer", seed=0)
def test_prompts_are_token_exact(drawn: tuple[str, WordsConfig, int], protocol: ProtocolName, seed: int) -> None:
    name, config, period = drawn
    check(name, config, protocol, period=period, seed=seed)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_training_prompts_are_token_exact_and_shift_at_random(protocol: ProtocolName) -> None:
    config, count = WordsConfig(records=9, queries=3, demonstrations=2, filler=11, filler_in_sequence=13), 60
    found = words.find(NeverDecodes(shared("has-bos")), config)
    expected, spell = expected_of("has-bos", config, key=1, answer=1), shared("has-bos").convert_ids_to_tokens
    batch = words.training_batch(found, config, np.random.default_rng(0), count, protocol)
    for row in range(count):
        one = Prompts(tokens=batch.tokens[row : row + 1], answer_from=batch.answer_from, target=batch.target[row : row + 1])
        assert faults(one, spell, expected, config, protocol, 1, config.records) == []
    assert len({tuple(row) for row in batch.tokens.tolist()}) == count
    assert len(set(batch.target.min(axis=1).tolist())) > 5, "shifted"
    again = words.training_batch(found, config, np.random.default_rng(0), count, protocol)
    assert np.array_equal(again.tokens, batch.tokens)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["adds-bos", "chat", "letters"])
def test_target_positions_are_matched_with_everything_in_front_counted(name: str, protocol: ProtocolName) -> None:
    """A prefix of any length turns residues; the moments must not notice."""
    config = WordsConfig(records=12, queries=3, demonstrations=2, filler=filler_needed(5) + 4, filler_in_sequence=30, chat=name == "chat")
    _, sweep = swept(name, config, protocol, period=5, prompts=25, seed=3)
    positions = Positions(period=5)
    for batch in sweep:
        positions.add(batch.target)
    assert set(positions.count_P.tolist()) == {75}
    assert np.ptp(positions.mean_P) < 1e-9
    assert np.ptp(positions.sd_P) < 1e-9


SMALL = WordsConfig(records=7, queries=2, demonstrations=3, filler=12, filler_in_sequence=17)


def _swap(batch: Prompts, one: int, other: int) -> Prompts:
    tokens = batch.tokens.copy()
    tokens[:, [one, other]] = tokens[:, [other, one]]
    return dataclasses.replace(batch, tokens=tokens)


def _copy(batch: Prompts, source: int, to: int, size: int = 4) -> Prompts:
    tokens = batch.tokens.copy()
    tokens[:, np.arange(to, to + size)] = tokens[:, np.arange(source, source + size)]
    return dataclasses.replace(batch, tokens=tokens)


def _one_row_later(batch: Prompts) -> Prompts:
    tokens, target = batch.tokens.copy(), batch.target.copy()
    tokens[0, 1:41] = np.roll(tokens[0, 1:41], 1)  # the body: 7 records and 12 filler tokens behind the BOS
    return dataclasses.replace(batch, tokens=tokens, target=target + np.eye(len(target), 1, dtype=np.int64))


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda b: dataclasses.replace(b, target=b.target - 1), "target is -1 off"),  # BOS not counted
        (lambda b: dataclasses.replace(b, target=b.target + 1), "target is +1 off"),
        (lambda b: dataclasses.replace(b, answer_from=b.answer_from + 1), "answer_from"),
        (lambda b: dataclasses.replace(b, answer_from=b.answer_from - 4), "answer_from"),
        (lambda b: dataclasses.replace(b, tokens=b.tokens[:, 1:]), "prefix"),
        (lambda b: dataclasses.replace(b, tokens=np.roll(b.tokens, -1, axis=1)), "prefix"),
        (lambda b: _swap(b, -2, -6), "a shown record is not one of the prompt's"),  # the names of two queries
        (lambda b: _copy(b, -4, -20), "a record is shown twice"),  # a query's record as a demonstration
        (lambda b: _copy(b, -4, -8), "a record is shown twice"),  # asked twice
        (lambda b: _swap(b, -1, -2), "demonstrations and queries are records"),
        (lambda b: dataclasses.replace(b, tokens=b.tokens[:-1], target=b.target[:-1]), "3 placements"),
        (lambda b: dataclasses.replace(b, tokens=b.tokens[[0, 0, 2, 2]], target=b.target[[0, 0, 2, 2]]), "a record does not stand once at each residue"),
        (_one_row_later, "a record does not stand once at each residue"),
        (lambda b: dataclasses.replace(b, tokens=np.concatenate([b.tokens[:3], b.tokens[:1]])), "a record does not stand once at each residue"),
    ],
)
def test_the_checker_sees_a_planted_mistake(plant: Callable[[Prompts], Prompts], complaint: str) -> None:
    found, sweep = swept("adds-bos", SMALL, "outer", period=4)
    expected = expected_of("adds-bos", SMALL, key=1, answer=1)
    batch = next(iter(sweep))
    order = np.argsort(batch.target[:, 0])
    batch = dataclasses.replace(batch, tokens=batch.tokens[order], target=batch.target[order])
    strings = shared("adds-bos").convert_ids_to_tokens
    assert faults(batch, strings, expected, SMALL, "outer", 4, 7) == []
    assert complaint in faults(plant(batch), strings, expected, SMALL, "outer", 4, 7)
    assert found.record_length == 4


# words ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_single_token_words_are_found(name: str) -> None:
    tokenizer = shared(name)
    found = words.find(NeverDecodes(tokenizer), WordsConfig())
    space = "\u2581" if name.startswith("metaspace") else "\u0120"
    assert tokenizer.convert_ids_to_tokens(found.keys[:, 0].tolist()) == [space + animal for animal in dict.fromkeys(ANIMALS)]
    assert tokenizer.convert_ids_to_tokens(found.names[:, 0].tolist()) == [space + other for other in dict.fromkeys(NAMES)]
    assert found.note == ""
    assert found.record_length == 4
    assert [tokenizer.convert_ids_to_tokens(part.tolist()) for part in (found.between, found.after, found.filler, found.opening)] == [
        [":"],
        *[plain_text(tokenizer, "\n")] * 3,
    ]


def test_the_lists_of_words() -> None:
    assert len(set(ANIMALS)) == len(ANIMALS) >= 128
    assert len(set(NAMES)) == len(NAMES) >= 128
    assert not set(ANIMALS) & set(words.COLOURS)
    assert all(word.isalpha() and word.islower() for word in ANIMALS)
    assert all(word.isalpha() and word.istitle() for word in NAMES)


@pytest.mark.parametrize(
    ("name", "bos", "prefix"), [("plain", True, []), ("has-bos", True, [0]), ("has-bos", False, []), ("adds-bos", True, [0]), ("adds-bos", False, [0])]
)
def test_what_stands_in_front(name: str, bos: bool, prefix: list[int]) -> None:
    config = dataclasses.replace(SMALL, bos=bos)
    found, sweep = swept(name, config, "outer", period=4)
    assert found.prefix.tolist() == prefix
    batch = next(iter(sweep))
    key = shared(name).convert_ids_to_tokens(int(batch.tokens[0, batch.target[0, 0]]))
    assert key.removeprefix("\u0120") in ANIMALS
    assert batch.tokens.shape[1] == len(prefix) + 12 + 7 * 4 + 1 + 5 * 4


def test_all_that_a_tokenizer_puts_in_front_counts_and_what_it_puts_behind_does_not() -> None:
    tokenizer = byte_level(bos=BOS)
    frame = processors.TemplateProcessing(single=f"{EOS} {BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer.backend_tokenizer.post_processor = frame
    assert tokenizer.encode("x", add_special_tokens=True)[:2] == [1, 0]
    found = words.find(NeverDecodes(tokenizer), SMALL)
    assert found.prefix.tolist() == [1, 0]
    batch = next(iter(words.sweep(found, SMALL, "outer", period=4, prompts=2, seed=0)))
    assert (batch.tokens[:, :2] == [1, 0]).all()
    assert not (batch.tokens[:, 2:] < 3).any()
    assert np.isin(batch.tokens[np.arange(4)[:, None], batch.target], found.keys).all()


@pytest.mark.parametrize("name", ["plain", "adds-bos", "chat", "letters"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ids_are_those_of_the_written_prompt(name: str, protocol: ProtocolName) -> None:
    """Where no piece merges with its neighbour, writing the prompt out and encoding it whole gives the same ids: no space and no special token too many."""
    config = dataclasses.replace(SMALL, chat=name == "chat")
    tokenizer = shared(name)
    found, sweep = swept(name, config, protocol, period=4)
    expected = expected_of(name, config, key=found.keys.shape[1], answer=found.names.shape[1])
    filler = config.filler if protocol == "outer" else config.filler_in_sequence
    for batch in sweep:
        for row in batch.tokens.tolist():
            records, shown = parse(tokenizer.convert_ids_to_tokens(row), expected, shown=5, filler=filler)
            spelt = ["".join((*key, ":", *answer)).replace("\u0120", " ") + "\n" for _, key, answer in records + shown]
            body, used = "", len(expected.prefix)
            for (at, _, _), text in zip(records, spelt, strict=False):
                body, used = body + "\n" * (at - used) + text, at + found.record_length
            body += "\n" * (filler + len(records) - body.count("\n"))
            tail = "".join(spelt[len(records) :])
            if config.chat:
                written = tokenizer.apply_chat_template([{"role": "user", "content": body}], tokenize=False, add_generation_prompt=True)
                assert tokenizer.encode(written + tail, add_special_tokens=False) == row
            else:
                assert tokenizer.encode(body + "\n" + tail) == row


def test_pieces_stand_as_after_other_text() -> None:
    for name in (*SINGLE, "letters"):
        tokenizer = shared(name)
        for text in (":", "\n", " = ", "-+!", "[/x]", ""):
            assert tokenizer.convert_ids_to_tokens(words.pieces(tokenizer, text)) == plain_text(tokenizer, text), (name, text)
    merging = shared("metaspace-merging")
    assert "x:" in merging.convert_ids_to_tokens(merging.encode("x:")), "the first anchor does merge"


@pytest.mark.parametrize(("head", "foot"), [("<s>[INST]", " [/INST]"), ("[", "]")])
def test_the_foot_of_a_chat_template_follows_the_users_text(head: str, foot: str) -> None:
    """A SentencePiece tokenizer gives text that starts a string a space of its own; the foot starts none."""
    tokenizer = NeverDecodes(shared("metaspace"))
    tokenizer.apply_chat_template = lambda messages, **_: head + messages[0]["content"] + foot  # type: ignore[method-assign]
    found = words.find(tokenizer, WordsConfig(chat=True))
    strings = shared("metaspace").convert_ids_to_tokens
    assert strings(found.opening.tolist()) == plain_text(shared("metaspace"), foot)
    assert strings(found.prefix.tolist()) == [*([BOS] if head.startswith(BOS) else []), "\u2581", *head.removeprefix(BOS)]


# too few words -------------------------------------------------------------------------------------------------------------------------------


def test_words_of_several_tokens_where_single_ones_are_missing() -> None:
    found, sweep = swept("letters", WordsConfig(), "outer", period=24)
    assert found.note == f"fewer than 64 single-token animals: keys have {found.keys.shape[1]} tokens each; names have {found.names.shape[1]} tokens each"
    assert sweep.note == found.note
    assert found.keys.shape[1] > 1
    assert len({tuple(key) for key in found.keys.tolist()}) == len(found.keys) >= 64
    four = [name for name in NAMES if len(name) == found.names.shape[1] - 1]
    assert len(four) == len(found.names) >= 16
    assert sum(len(name) < len(four[0]) for name in NAMES if len(name) == len(four[0]) - 1) < 16, "no shorter length has enough"
    batch = next(iter(sweep))
    assert batch.answer_from.shape == (8, found.names.shape[1])
    few = words.find(NeverDecodes(letters_only()), WordsConfig(records=16))
    assert few.keys.shape[1] < found.keys.shape[1], "fewer records take shorter keys"
    assert len(few.keys) >= 16


def test_single_token_names_with_longer_keys() -> None:
    found = words.find(NeverDecodes(shared("some-words")), WordsConfig())
    assert found.names.shape[1] == 1
    assert found.note == f"fewer than 64 single-token animals: keys have {found.keys.shape[1]} tokens each"


def test_unknown_words_are_no_words() -> None:
    """With one `<unk>` for all unknown words, a key or a name that reads `<unk>` would stand for any of them."""
    tokenizer = known_words([*ANIMALS[:70], *NAMES[:30]])
    found = words.find(NeverDecodes(tokenizer), WordsConfig())
    strings = tokenizer.convert_ids_to_tokens
    assert strings(found.keys[:, 0].tolist()) == list(ANIMALS[:70])
    assert strings(found.names[:, 0].tolist()) == list(NAMES[:30])


def refusal(tokenizer: Any, config: WordsConfig, protocol: ProtocolName = "outer") -> str:
    with pytest.raises(ConfigError) as error:
        words.sweep(words.find(tokenizer, config), config, protocol, period=2, prompts=2, seed=0)
    assert "\n" not in str(error.value)
    return str(error.value)


def templated(template: str | None) -> Any:
    return NeverDecodes(byte_level(bos=BOS, template=template))


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        (lambda: known_words([*ANIMALS, *NAMES[:10]]), WordsConfig(), "score: the tokenizer must have at least 16 names of one length up to 12 tokens, got 10"),
        (
            lambda: known_words([*ANIMALS[:20], *NAMES]),
            WordsConfig(),
            "WordsConfig.records must be at most 20 with this tokenizer (different keys of one length up to 12 tokens), got 64",
        ),
        (
            letters_only,
            WordsConfig(context=200_000),
            f"WordsConfig.context must be short enough for records up to {MOST} with this tokenizer (different keys of one length up to 12 tokens), got 200000",
        ),
        (stripping, WordsConfig(), "WordsConfig.padding must be text of which this tokenizer makes at least one token, got '\\n'"),
        (lambda: templated(None), WordsConfig(chat=True), "--chat: Cannot use chat template functions because tokenizer.chat_template is not set"),
        (lambda: templated("{{ raise_exception('a system\nmessage first') }}"), WordsConfig(chat=True), "--chat: a system message first"),
        (lambda: templated("{{ nothing.at.all }}"), WordsConfig(chat=True), "--chat: 'nothing' is undefined"),
        (lambda: templated("hello"), WordsConfig(chat=True), "--chat: the tokenizer's chat template must hold the user's text once, got 0 times"),
        (
            lambda: templated("{{ messages[0]['content'] }} {{ messages[0]['content'] }}"),
            WordsConfig(chat=True),
            "--chat: the tokenizer's chat template must hold the user's text once, got 2 times",
        ),
        (
            lambda: shared("many-words"),
            WordsConfig(context=100),
            "WordsConfig.context must be at least 202 (16 records of 4 tokens and 138 others), got 100",
        ),
        (lambda: shared("many-words"), WordsConfig(context=1), "WordsConfig.context must be at least 202 (16 records of 4 tokens and 138 others), got 1"),
    ],
)
def test_what_cannot_be_built_is_one_line(tokenizer: Callable[[], Any], config: WordsConfig, message: str) -> None:
    assert refusal(tokenizer(), config).startswith(message)


def test_text_without_tokens_is_noted() -> None:
    config = WordsConfig(padding="#")
    found = words.find(NeverDecodes(stripping()), config)
    assert found.note == "'\\n' has no tokens"
    assert found.record_length == 3
    assert not len(found.opening)


# long contexts -------------------------------------------------------------------------------------------------------------------------------


@cache
def many_words() -> words.Words:
    """For any context up to 9,000 tokens: the vocabulary's words, all of them."""
    return words.find(NeverDecodes(shared("many-words")), WordsConfig(context=9000))


@settings(deadline=None, max_examples=25)
@given(
    context=st.integers(260, 9000), queries=st.integers(1, 8), demonstrations=st.integers(0, 8), protocol=st.sampled_from(PROTOCOLS), seed=st.integers(0, 99)
)
def test_a_context_is_filled_and_asked_near_its_middle(context: int, queries: int, demonstrations: int, protocol: ProtocolName, seed: int) -> None:
    config = WordsConfig(context=context, queries=queries, demonstrations=demonstrations, filler=9, filler_in_sequence=20)
    tokenizer, found = shared("many-words"), many_words()
    sweep = words.sweep(found, config, protocol, period=3, prompts=2, seed=seed)
    assert (found.record_length, found.note) == (4, "")
    filler = 9 if protocol == "outer" else 20
    expected = Expected(
        prefix=[BOS],
        between=[":"],
        after=["\u010a"],
        filler=["\u010a"],
        opening=["\u010a"],
        keys={(key,) for key in tokenizer.convert_ids_to_tokens(found.keys[:, 0].tolist())},
        names=spellings("many-words", tuple(NAMES), 1),
    )
    for batch in sweep:
        length = batch.tokens.shape[1]
        assert context - 4 < length <= context
        records = (length - 2 - filler) // 4 - queries - demonstrations
        assert faults(batch, tokenizer.convert_ids_to_tokens, expected, config, protocol, 3, records) == []
        # The queried records lie within the middle tenth of the records, or as many of them as are asked for.
        span = max(queries, records // 10)
        first, last = 1 + 4 * ((records - span) // 2), 1 + 4 * ((records + span) // 2) + filler
        assert first <= batch.target.min() <= batch.target.max() <= last
        if context > 2000:
            assert 0.4 * context < batch.target.min() <= batch.target.max() < 0.6 * context


@pytest.mark.parametrize(("filler", "filler_in_sequence"), [(9, 20), (20, 9)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_least_context_that_an_error_names_is_enough(filler: int, filler_in_sequence: int, protocol: ProtocolName) -> None:
    config = WordsConfig(context=1, filler=filler, filler_in_sequence=filler_in_sequence)
    least = int(refusal(shared("many-words"), config, protocol).split("at least ")[1].split()[0])
    sweep = words.sweep(many_words(), dataclasses.replace(config, context=least), protocol, period=3, prompts=2, seed=0)
    assert next(iter(sweep)).tokens.shape[1] == least
    assert f"at least {least} " in refusal(shared("many-words"), dataclasses.replace(config, context=least - 1), protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pairs_of_words_where_single_ones_run_out(protocol: ProtocolName) -> None:
    """A hundred made-up words (and what they grow from) for 128 Ki tokens: 26,000 records with keys of two tokens."""
    config = WordsConfig(context=131_072)
    tokenizer = shared("some-words")
    found, sweep = swept("some-words", config, protocol, period=2)
    assert found.keys.shape[1] == 2
    assert len({tuple(key) for key in found.keys.tolist()}) == len(found.keys)
    batch = next(iter(sweep))
    length, filler = batch.tokens.shape[1], 72 if protocol == "outer" else 96
    assert 131_072 - 5 < length <= 131_072
    records = (length - 2 - filler) // 5 - 16
    assert records > 26_000
    assert found.note == f"{len(words._vocabulary_words(tokenizer))} single-token words for {(131_072 - 2 - 72) // 4 - 16} records: keys are pairs of them"
    expected = Expected(
        prefix=[BOS],
        between=[":"],
        after=["\u010a"],
        filler=["\u010a"],
        opening=["\u010a"],
        keys={tuple(pair) for pair in np.array(tokenizer.convert_ids_to_tokens(found.keys.ravel().tolist())).reshape(-1, 2).tolist()},
        names=spellings("some-words", tuple(NAMES), 1),
    )
    assert faults(batch, tokenizer.convert_ids_to_tokens, expected, config, protocol, 2, records) == []
    assert 0.44 * length < batch.target.min() <= batch.target.max() < 0.56 * length


def test_vocabulary_words_are_single_tokens_behind_a_space() -> None:
    tokenizer = shared("many-words")
    listed = words._vocabulary_words(tokenizer)
    assert {*ANIMALS, *three_letter_words(6000)} - set(listed) == {"ox"}, "three letters at least"
    assert not {"James", "Ja", "jam es"} & set(listed)
    found = words.find(NeverDecodes(tokenizer), WordsConfig(context=4000))
    assert tokenizer.convert_ids_to_tokens(found.keys[:, 0].tolist()) == ["\u0120" + word for word in listed]


# draws ---------------------------------------------------------------------------------------------------------------------------------------


def test_a_sweep_depends_on_its_arguments_only() -> None:
    def tokens(config: WordsConfig = SMALL, protocol: ProtocolName = "outer", seed: int = 0, prompts: int = 2) -> list[bytes]:
        return [batch.tokens.tobytes() for batch in swept("adds-bos", config, protocol, period=4, seed=seed, prompts=prompts)[1]]

    np.random.seed(1)
    before = tokens()
    np.random.seed(2)
    assert tokens() == before
    assert (
        len(
            {
                json.dumps([str(hash(b)) for b in made])
                for made in (before, tokens(seed=1), tokens(protocol="in_sequence"), tokens(dataclasses.replace(SMALL, queries=1)))
            }
        )
        == 4
    )
    assert before[0] != before[1]
    sweep = swept("adds-bos", SMALL, "outer", period=4)[1]
    assert [b.tokens.tobytes() for b in sweep] == [b.tokens.tobytes() for b in sweep], "iterating again starts again"


def test_every_animal_and_name_is_drawn_about_evenly() -> None:
    config = WordsConfig(records=20, queries=1, demonstrations=4, filler=3, filler_in_sequence=4)
    found, sweep = swept("adds-bos", config, "outer", period=2, prompts=600)
    tokens = np.concatenate([batch.tokens[:1] for batch in sweep])
    counts = np.bincount(tokens[:, :84].ravel(), minlength=len(shared("adds-bos")))
    for part in (found.keys, found.names):
        drawn = counts[part[:, 0]]
        assert drawn.sum() == 600 * 20
        assert drawn.min() > 0.5 * drawn.mean()
        assert drawn.max() < 1.6 * drawn.mean()
    answers = np.concatenate([batch.gold[:1, :, 0] for batch in sweep]).ravel()
    assert len(set(answers.tolist())) > 130, "asked names are as varied as the others"
