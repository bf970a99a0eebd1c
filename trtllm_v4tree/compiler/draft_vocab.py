"""The drafter's vocabulary: the tokens it may propose, fewer than the target's, so that its head is shorter.

Of a large vocabulary few tokens make most of a text. A drafter that scores only these reads a fraction of the head in every step;
what it cannot propose is never accepted, and the text stays the target's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trtllm_v4tree.errors import ConfigError

LEAST = 16


def parse_draft_vocab(text: str, vocab_size: int) -> tuple[int, ...]:
    """`N`: the N lowest token ids, which a byte-pair tokenizer gives to its most frequent words; else a JSON file with a list of ids.

    Returns ids in ascending order; raises ConfigError for a file that is not such a list, or too few or unknown tokens.
    """
    ids = range(int(text)) if text.isdecimal() and len(text) < 10 else _read(Path(text))
    if not LEAST <= len(ids) <= vocab_size:
        raise ConfigError(f"draft_vocab has {len(ids)} tokens: give {LEAST} to {vocab_size}, the model's vocab_size.")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ConfigError(f"draft_vocab holds token id {wrong}: ids go from 0 to {vocab_size - 1}.")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"draft_vocab holds {len(ids) - len(set(ids))} token ids more than once: give each once.")
    return tuple(sorted(ids))


def _read(path: Path) -> Sequence[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"draft_vocab {path} is neither a number nor a readable JSON file ({error}): give N or a file with a list of token ids."
        ) from error
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ConfigError(f"draft_vocab {path} is not a JSON list of integers: give the token ids to propose.")
    return ids
