"""Ids that spell alike: to V4.1's n-gram tables `Cat`, ` cat` and `cat` are one token.

Source: DeepSeek's inference code for V4.1-Flash, engram.py, which does it with the normalizers of `tokenizers`.
Their tables of Unicode are older than Python's: of a character newer than theirs they know no accent and no case.
"""

import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fathom.model.checkpoint.folder import TOKENIZER
from fathom.model.errors import ConfigError
from fathom.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fathom.model.config import ModelConfig

BLANK: Final = re.compile(r"[ \t\r\n]+")
REPLACED: Final = "\N{REPLACEMENT CHARACTER}"
NO_BLANK: Final = "\x1c\x1d\x1e\x1f"  # which Python strips and Unicode's White_Space does not hold


def numbers_of(model: Path, config: "ModelConfig") -> list[int]:
    """The number of each id, by the tokenizer.json of a checkpoint; ConfigError where it is not the model's."""
    assert config.v41 is not None, "of its config"
    numbers = token_map(Tokenizer(model, config.vocab_size))
    found, want = max(numbers) + 1, config.v41.engram.compressed_vocab
    if found != want:
        raise ConfigError(f"{model / TOKENIZER}: {found} ids spell unlike, engram_compressed_vocab_size is {want}")
    return numbers


def token_map(tokenizer: Tokenizer) -> list[int]:
    """The number of each id of the vocabulary, [vocab]: ids that spell alike have one, in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(_key(tokenizer, id_), len(numbers)) for id_ in range(tokenizer.vocab_size)]


def _key(tokenizer: Tokenizer, id_: int) -> str:
    """What ids are alike in: their text, normalised, or a token's own spelling where it is no whole text."""
    if not tokenizer.names(id_):
        return ""
    text = tokenizer.token_bytes(id_).decode(errors="replace")
    if REPLACED in text:
        return tokenizer.spelled(id_)
    return normalised(text) or text


def normalised(text: str) -> str:
    """NFKC, no accents, lower case, each blank one space, none at the ends; a single space stays."""
    apart = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c.lower() for c in apart if not unicodedata.category(c).startswith("M"))
    joined = BLANK.sub(" ", bare)
    return joined if joined == " " else _stripped(joined)


def _stripped(text: str) -> str:
    start, stop = 0, len(text)
    while start < stop and text[start].isspace() and text[start] not in NO_BLANK:
        start += 1
    while stop > start and text[stop - 1].isspace() and text[stop - 1] not in NO_BLANK:
        stop -= 1
    return text[start:stop]
