"""How the tokens of a vocabulary write text: by bytes or by pieces, as tokenizer.json says in three of its fields.

Two kinds are published for the models that run here, and no other is read:

- Byte-level (DeepSeek, Llama 3, SmolLM): a token writes each byte as one printable character.
- Made from SentencePiece (Llama 2, Mistral): a token writes characters as they are and a space as `▁`; a character that
  no token has is written as a token for each of its bytes, such as `<0xE2>`. The first word of a text gets a space in
  front, which tokens of words begin with.

Every function here raises ConfigError with one line naming the field at fault; the caller puts the file before it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from fathom.model.checkpoint.json_values import Json, check_keys, mapping, required
from fathom.model.errors import ConfigError, shown

# Byte-level vocabularies write each byte as one printable character: the printable ones of Latin-1 as themselves, the
# other 68 as the characters from U+0100 on, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(sorted(set(range(0x100)) - set(_PRINTABLE)))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}

BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
SURROGATE: Final = re.compile("[\ud800-\udfff]")  # half a character: JSON can write it, UTF-8 cannot

# The values that a field may have; None also stands for a field that is not there.
Values = dict[str, tuple[object, ...]]
FLAG: Final = (True, False)

BYTE_LEVEL: Final[Values] = {"add_prefix_space": FLAG, "trim_offsets": FLAG, "use_regex": (*FLAG, None)}
# A splitter says where no merge reaches across. Should one drop text ("Removed"), the tokens do not spell that text.
SPLITTERS: Final[Mapping[str, Values]] = {
    "ByteLevel": BYTE_LEVEL | {"add_prefix_space": (False,)},
    "Digits": {"individual_digits": FLAG},
    "Split": {
        "behavior": ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"),
        "invert": FLAG,
    },
}
METASPACE: Final[Values] = {
    "type": ("Metaspace",),
    "replacement": ("▁",),
    "prepend_scheme": ("first", "always", "never"),
    "split": (False,),
}
PREPEND: Final = {"type": "Prepend", "prepend": "▁"}
REPLACE: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PIECES: Final = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Place(Enum):
    """Where in a prompt a text stands."""

    START = auto()  # nothing is before it, or what tokenizer.json itself puts before a text
    SECTION = auto()  # right after any other control token
    INSIDE = auto()  # it goes on with a text that was read before


@dataclass(frozen=True, slots=True)
class Spelling:
    """What tokens are in bytes, and what is done to a text before it is cut into tokens."""

    bytes_of: Callable[[str], bytes]  # of one token
    splitter: Json | None = None  # the pre_tokenizer for the library
    space: str = " "  # what tokens write for a space
    byte_tokens: bool = False  # a character that no token has is written as one token for each of its bytes
    prefixed: Collection[Place] = ()  # where a text gets a space in front
    unless_spaced: bool = False  # but not a text that begins with one
    strips: bool = False  # whether a decoded sequence loses the space that it begins with

    def prefix(self, text: str, place: Place) -> str:
        """The space that a text gets in front, or nothing."""
        spaced = self.unless_spaced and text.startswith((" ", self.space))
        return " " if text and place in self.prefixed and not spaced else ""

    def without(self, text: str, place: Place) -> str:
        """A decoded text without the space that it got in front."""
        return text.removeprefix(" ") if place in self.prefixed else text


def read_spelling(fields: Json) -> Spelling:
    """The spelling of a tokenizer.json, by its decoder, normalizer and pre_tokenizer."""
    decoder = parts(required(fields, "decoder"), "decoder", "decoders")
    normalizer = parts(fields.get("normalizer"), "normalizer", "normalizers")
    splitter = parts(fields.get("pre_tokenizer"), "pre_tokenizer", "pretokenizers")
    if decoder in (PIECES, [*PIECES, STRIP]):
        return Spelling(
            _bytes_of_piece,
            space="▁",
            byte_tokens=True,
            prefixed=_prefixed(normalizer, splitter),
            unless_spaced=bool(splitter),
            strips=STRIP in decoder,
        )
    if len(decoder) != 1 or mapping(decoder[0], "decoder").get("type") != "ByteLevel":
        raise ConfigError(f"decoder is {shown(fields['decoder'])}; supported: ByteLevel, and that of Llama 2")
    check_values(decoder[0], BYTE_LEVEL, "decoder")
    if normalizer:
        raise ConfigError(f"normalizer is {shown(fields['normalizer'])}; supported with a ByteLevel decoder: none")
    _check_splitter(splitter)
    return Spelling(_bytes_of_letters, {"type": "Sequence", "pretokenizers": splitter})


def _prefixed(normalizer: list[Any], splitter: list[Any]) -> Collection[Place]:
    """Where a text gets a space in front, in the older form with a normalizer, and in the newer with a pre_tokenizer.

    Neither splits a text. Both come to a space in front and a `▁` for each, so that the library gets neither.
    """
    everywhere = (Place.START, Place.SECTION)
    if not splitter:
        if normalizer not in ([REPLACE], [PREPEND, REPLACE]):
            raise ConfigError(
                f"normalizer is {shown(normalizer)}; supported with this decoder: Llama 2's, or Metaspace"
            )
        return everywhere if PREPEND in normalizer else ()
    if normalizer or len(splitter) > 1:
        raise ConfigError("normalizer and pre_tokenizer: supported with this decoder: one of them, of one part")
    check_values(mapping(splitter[0], "pre_tokenizer"), METASPACE, "pre_tokenizer")
    return {"first": (Place.START,), "always": everywhere, "never": ()}[splitter[0]["prepend_scheme"]]


def _check_splitter(splitter: list[Any]) -> None:
    """The pre_tokenizer of a byte-level vocabulary: splitters, and as the last one what writes bytes as characters."""
    for place, part in enumerate(splitter):
        where = f"pre_tokenizer[{place}]"
        kind = mapping(part, where).get("type")
        if not isinstance(kind, str) or kind not in SPLITTERS or (kind == "ByteLevel") != (place == len(splitter) - 1):
            raise ConfigError(f"{where}.type is {shown(kind)}; supported: Digits and Split, then ByteLevel as the last")
        check_values({name: part[name] for name in part if name != "pattern"}, SPLITTERS[kind], where)
        match part.get("pattern"):
            case {"Regex": str(text)} | {"String": str(text)} as pattern if (
                kind == "Split" and len(pattern) == 1 and not SURROGATE.search(text)
            ):
                continue
            case None if kind != "Split":
                continue
        raise ConfigError(f"{where}.pattern is {shown(part.get('pattern'))}; want, in a Split alone, a Regex or String")
    if not splitter:
        raise ConfigError("pre_tokenizer: missing; want one that ends in ByteLevel")


def parts(value: Any, where: str, name: str) -> list[Any]:
    """The parts of a Sequence; one part stands for itself, and null for none."""
    if value is None:
        return []
    if mapping(value, where).get("type") != "Sequence":
        return [value]
    check_keys(value, ("type", name), where)
    if not isinstance(value[name], list):
        raise ConfigError(f"{where}.{name} is {shown(value[name])}; want a list")
    return list(value[name])


def check_values(obj: Json, values: Values, where: str) -> None:
    """Check that an object has no fields but these (and its type), and in each a value that is implemented."""
    check_keys(obj, (), where, ("type", *values))
    for name, supported in values.items():
        value = obj.get(name)
        if not any(type(value) is type(one) and value == one for one in supported):  # True is not 1 here
            raise ConfigError(f"{where}.{name} is {shown(value)}; supported: {', '.join(map(shown, supported))}")


def _bytes_of_letters(token: str) -> bytes:
    if not _BYTE_OF.keys() >= set(token):  # the library, too, takes a token outside the alphabet as it stands
        return token.encode()
    return bytes(_BYTE_OF[character] for character in token)


def _bytes_of_piece(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return token.replace("▁", " ").encode() if byte is None else bytes.fromhex(byte[1])
