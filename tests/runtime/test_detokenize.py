"""Chunks of an incremental decoding against the tokenizer's decoding of the whole list."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trtllm_v4tree.runtime.detokenize import REPLACEMENT, Detokenizer

REPO = Path(__file__).resolve().parents[2]
SAVED = [root / "models" / "v4-nano" / "tokenizer.json" for root in (REPO.parent / "shared", REPO)]


def bytes_only_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.add_special_tokens([AddedToken(f"<{i}>", special=True) for i in range(4)])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def metaspace_tokenizer() -> Tokenizer:
    """Drops the space before the first token, so that decoding is not a plain concatenation."""
    words = {"▁one": 0, "▁two": 1, "s": 2, "▁": 3}
    made = Tokenizer(models.BPE(words, []))
    made.decoder = decoders.Metaspace()
    return made


@cache
def tokenizers() -> dict[str, Tokenizer]:
    saved = next((path for path in SAVED if path.exists()), None)
    return {
        "saved": Tokenizer.from_file(str(saved)) if saved else bytes_only_tokenizer(),
        "bytes": bytes_only_tokenizer(),
        "metaspace": metaspace_tokenizer(),
    }


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    runs = []
    while ids:
        size = sizes[len(runs) % len(sizes)]
        runs.append(ids[:size])
        ids = ids[size:]
    return runs


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@pytest.mark.parametrize("name", ["saved", "bytes", "metaspace"])
@settings(deadline=None, max_examples=150)
@given(data=st.data(), sizes=sizes)
def test_chunks_of_any_tokens_join_to_the_full_decoding(name: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = tokenizers()[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    detokenizer, chunks = Detokenizer(tokenizer), []
    for run in split(ids, sizes):
        pieces = detokenizer.pieces(run)
        chunks.append(detokenizer.append(run))
        assert len(pieces) == len(run) and "".join(pieces) == chunks[-1]
    assert "".join(chunks) + detokenizer.flush() == whole


@pytest.mark.parametrize("name", ["saved", "bytes"])
@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=20), sizes=sizes)
def test_valid_text_never_shows_a_replacement_character(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizers()[name]
    detokenizer = Detokenizer(tokenizer)
    chunks = [detokenizer.append(run) for run in split(tokenizer.encode(text, add_special_tokens=False).ids, sizes)]
    assert "".join(chunks) == text and REPLACEMENT not in "".join(chunks)
    assert detokenizer.flush() == ""


def test_a_split_character_appears_with_its_last_byte() -> None:
    tokenizer = bytes_only_tokenizer()
    ids = tokenizer.encode("é日🙂", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.append([i]) for i in ids] == ["", "é", "", "", "日", "", "", "", "🙂"]


def test_whole_text_before_a_split_character_is_shown_at_once() -> None:
    tokenizer = bytes_only_tokenizer()
    ids = tokenizer.encode("ab日", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.append(ids[:4]), detokenizer.append(ids[4:])] == ["ab", "日"]


def test_invalid_tail_comes_out_once_on_flush() -> None:
    tokenizer = bytes_only_tokenizer()
    ids = tokenizer.encode("a日", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.append(ids) == "a"
    assert detokenizer.flush() == REPLACEMENT and detokenizer.flush() == ""


def test_special_tokens_are_skipped() -> None:
    tokenizer = bytes_only_tokenizer()
    a, b = tokenizer.encode("ab", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    special = tokenizer.token_to_id("<1>")
    assert [detokenizer.append(run) for run in ([special], [a, special, b], [special])] == ["", "ab", ""]


def test_pieces_change_nothing() -> None:
    tokenizer = bytes_only_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("abc", add_special_tokens=False).ids
    assert detokenizer.pieces(ids) == ["a", "b", "c"]
    assert detokenizer.append(ids[:2]) == "ab"
    assert detokenizer.append(tokenizer.encode("é", add_special_tokens=False).ids) == "é"


def test_window_stays_short() -> None:
    """The work per token does not grow with the output."""
    longest = 0

    class Spy:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = bytes_only_tokenizer()
    detokenizer = Detokenizer(Spy())
    for i in tokenizer.encode("some text, é and 日本語 " * 20, add_special_tokens=False).ids:
        detokenizer.append([i])
    assert longest <= 8
