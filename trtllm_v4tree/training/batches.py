"""From documents to rows of tokens: a byte-level BPE, DeepSeek's chat marks, and batches that depend on (seed, step) alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from trtllm_v4tree.training.documents import DataError, Document

BOS, EOS, USER, ASSISTANT = range(4)
MARKS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose first ids are MARKS; numbers are split into groups of up to three digits.

    Raises DataError if the text is too short for `vocab_size` words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((piece for document in documents for piece in document.pieces()), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"the training files give only {tokenizer.get_vocab_size()} words for a vocabulary of {vocab_size}: "
            "add text, or give a --config with a smaller vocab_size (260 at least)."
        )
    return tokenizer


def encode_document(tokenizer: Tokenizer, document: Document) -> list[int]:
    """`<bos>` then `<user>question<assistant>answer<eos>` for each turn, or the plain text and `<eos>`."""
    ids = [BOS]
    for asked, answered in document.turns:
        ids += [USER, *tokenizer.encode(asked).ids, ASSISTANT, *tokenizer.encode(answered).ids, EOS]
    return [*ids, *tokenizer.encode(document.text).ids, EOS] if document.text else ids


class RowBatches:
    """Endless batches of `batch` rows of `length` tokens from shuffled documents.

    Every row begins with a document; more follow until it is full, and the rest of the last one is dropped.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, batch: int, seed: int) -> None:
        if sum(map(len, documents)) < length:
            raise DataError(f"the training files hold fewer than the {length} tokens of one row: add text.")
        self._documents = [np.asarray(ids, dtype=np.int32) for ids in documents]
        self._length, self._batch, self._seed = length, batch, seed
        self._rows: list[np.ndarray] = []
        self._epochs = 0

    @property
    def epochs(self) -> int:
        """How many times the documents were begun."""
        return self._epochs

    def batch(self, step: int) -> Tensor:
        """int64 [batch, length]; the same for the same seed and step."""
        while len(self._rows) < (step + 1) * self._batch:
            self._rows.extend(self._epoch(self._epochs))
            self._epochs += 1
        rows = self._rows[step * self._batch : (step + 1) * self._batch]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _epoch(self, number: int) -> Iterable[np.ndarray]:
        order = np.random.default_rng((self._seed, number)).permutation(len(self._documents))
        parts: list[np.ndarray] = []
        filled = 0
        for index in order:
            parts.append(self._documents[index])
            filled += len(parts[-1])
            if filled >= self._length:
                yield np.concatenate(parts)[: self._length]
                parts, filled = [], 0
