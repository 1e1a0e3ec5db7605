"""Text to token ids and back, from the tokenizer.json of a checkpoint directory.

Control tokens come from `Control` segments and from nowhere else. The `tokenizers` library finds added tokens in the
text it encodes, and its switch against that spares tokens marked special only, which DeepSeek's `<｜User｜>` and
`<think>` need not be. So the vocabulary that encodes text is loaded without any added token, and every encoding is
checked: it must spell its text again, byte for byte, without a control token.

Reads byte-level tokenizers, the kind that DeepSeek publishes, and refuses others.
"""

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from model import strict_json
from runtime.errors import PromptError
from runtime.segments import Control, Segment, Text, merge

# Byte-level vocabularies write each byte as one printable character: the printable ones of Latin-1 as themselves, the
# other 68 as the characters from U+0100 on, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(sorted(set(range(0x100)) - set(_PRINTABLE)))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}


class Tokenizer:
    """The tokenizer of one checkpoint.

    Parameters
    ----------
    directory
        The checkpoint's, with its tokenizer.json.
    vocab_size
        Rows of the model's embedding: an id that has none is an error here, not an index error in the model.

    Raises
    ------
    PromptError
        tokenizer.json is missing, damaged, or not byte-level; one line that names the file.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.path = directory / "tokenizer.json"
        self.vocab_size = vocab_size
        fields = _read(self.path)
        self._control_ids = _control_ids(fields, self.path)
        self._controls = {id_: name for name, id_ in self._control_ids.items()}
        self._text = _text_vocabulary(fields, self.path)
        self._post_processor = fields.get("post_processor")
        self._bytes: dict[int, bytes] = {}  # of the ids seen so far
        self._check_ids_agree()

    def control_id(self, name: str) -> int:
        """The id of a control token, by its name.

        Raises
        ------
        PromptError
            tokenizer.json has no added token of that name, or the model no row for it.
        """
        if name not in self._control_ids:
            raise PromptError(f"{self.path}: has no token {name}, which the prompt needs")
        return self._check_range(self._control_ids[name])

    def before_text(self) -> list[Segment]:
        """The control tokens that tokenizer.json itself puts before a text: BOS, in most files, or nothing.

        Raises
        ------
        PromptError
            Its post_processor does something else to a text than that, or names a token that is no added one.
        """
        return [Control(name) for name in _before_text(self._post_processor, self._control_ids, self.path)]

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a prompt.

        Parameters
        ----------
        segments
            Neighbouring texts are encoded as one.

        Returns
        -------
        list[int]
            What the library gives for the rendered string, provided no text in it spells a control token.

        Raises
        ------
        PromptError
            As `encode_text` and `control_id`.
        """
        ids: list[int] = []
        for segment in merge(segments):
            ids += [self.control_id(segment.name)] if isinstance(segment, Control) else self.encode_text(segment.text)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token, whatever it spells. No BOS is added.

        Raises
        ------
        PromptError
            The text holds half a surrogate pair, an id is beyond the model's vocabulary, or the vocabulary cannot
            spell the text without loss or without a control token.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"prompt: character {error.start} is half of a surrogate pair") from error
        ids = [self._check_range(id_) for id_ in self._text.encode(text, add_special_tokens=False).ids]
        controls = [self._controls[id_] for id_ in ids if id_ in self._controls]
        if controls:  # a vocabulary whose merges lead to a control token
            raise PromptError(f"{self.path}: encodes text as the control token {controls[0]}")
        normalizer = self._text.normalizer
        if self.decode(ids) != (text if normalizer is None else normalizer.normalize_str(text)):
            raise PromptError(f"{self.path}: cannot spell the prompt without loss")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens by name; bytes that are no UTF-8 become U+FFFD.

        Raises
        ------
        PromptError
            An id that the model or tokenizer.json does not have.
        """
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def decode_segments(self, ids: Iterable[int]) -> list[Segment]:
        """The text of ids with the control tokens kept apart from text that merely spells one.

        Raises
        ------
        PromptError
            As `decode`.
        """
        segments: list[Segment] = []
        run: list[int] = []
        for id_ in ids:
            if id_ in self._controls:
                segments += [Text(self.decode(run)), Control(self._controls[self._check_range(id_)])]
                run = []
            else:
                run.append(id_)
        return merge([*segments, Text(self.decode(run))])

    def names(self, id_: int) -> bool:
        """Whether tokenizer.json has a token for an id of the model's vocabulary.

        Raises
        ------
        PromptError
            An id beyond the model's vocabulary.
        """
        self._check_range(id_)
        return id_ in self._controls or self._text.id_to_token(id_) is not None

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that one token stands for, not always whole characters.

        Raises
        ------
        PromptError
            An id that the model or tokenizer.json does not have.
        """
        if id_ not in self._bytes:
            self._bytes[id_] = self._look_up(self._check_range(id_))
        return self._bytes[id_]

    def _look_up(self, id_: int) -> bytes:
        if id_ in self._controls:
            return self._controls[id_].encode()
        token = self._text.id_to_token(id_)
        if token is None:
            raise PromptError(f"{self.path}: has no token with id {id_}")
        if not _BYTE_OF.keys() >= set(token):  # the library, too, takes a token outside the alphabet as it stands
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def _check_range(self, id_: int) -> int:
        if not 0 <= id_ < self.vocab_size:
            raise PromptError(f"token id {id_}: the model's vocabulary has ids 0 to {self.vocab_size - 1}")
        return id_

    def _check_ids_agree(self) -> None:
        """The vocabulary may list a control token too, but then under the same id, and no other token under it."""
        for name, id_ in self._control_ids.items():
            if self._text.token_to_id(name) not in (None, id_) or self._text.id_to_token(id_) not in (None, name):
                raise PromptError(f"{self.path}: the token {name} and the vocabulary disagree about id {id_}")


class StreamDecoder:
    """Text from ids as they are generated: characters come out whole, and together they are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id_: int) -> str:
        """The characters that this id completes; empty while one is still cut short.

        An embedding may have more rows than tokenizer.json has tokens. A model gone wrong chooses those too, and who
        looks for its fault wants to see them: they come out as `<token 129000>` instead of ending the run.

        Raises
        ------
        PromptError
            An id beyond the model's vocabulary.
        """
        if not self._tokenizer.names(id_):
            return self.finish() + f"<token {id_}>"
        return self._utf8.decode(self._tokenizer.token_bytes(id_))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character was never completed."""
        return self._utf8.decode(b"", final=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = strict_json.parse(path.read_bytes())
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise PromptError(f"{path}: not a JSON object")
    return fields


def _control_ids(fields: dict[str, Any], path: Path) -> dict[str, int]:
    """Name -> id of every added token, special or not: what the library would find inside text."""
    try:
        ids = {token["content"]: token["id"] for token in fields["added_tokens"]}
    except (KeyError, TypeError) as error:
        raise PromptError(f"{path}: its added_tokens are not a list of tokens with content and id") from error
    if not all(isinstance(name, str) and type(id_) is int for name, id_ in ids.items()):
        raise PromptError(f"{path}: an added token's content is no string or its id no integer")
    if len(set(ids.values())) != len(fields["added_tokens"]):
        raise PromptError(f"{path}: two added tokens share an id or a name")
    return ids


def _text_vocabulary(fields: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens, and without truncation and padding, which would change a prompt unseen."""
    decoder = fields.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise PromptError(f"{path}: its decoder is not ByteLevel, the only kind read here")
    text_only = {**fields, "added_tokens": [], "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(text_only))
    except Exception as error:  # the library has no narrower class for a file that it cannot read
        raise PromptError(f"{path}: {_first_line(error)}") from error


def _before_text(processor: Any, ids: dict[str, int], path: Path) -> list[str]:
    """Names of the tokens that a post_processor puts before a text; the byte-level kind moves offsets only."""
    wrong = PromptError(f"{path}: its post_processor is not a template that puts tokens before a text, and no more")
    if processor is None:
        return []
    match processor:
        case {"type": "ByteLevel"}:
            return []
        case {"type": "Sequence", "processors": [*parts]}:
            return [name for part in parts for name in _before_text(part, ids, path)]
        case {"type": "TemplateProcessing", "single": [*before, {"Sequence": {"id": "A"}}], "special_tokens": dict(of)}:
            names: list[str] = []
            for piece in before:
                match piece:
                    case {"SpecialToken": {"id": str(name)}} if name in ids and of.get(name, {}).get("ids") == [
                        ids[name]
                    ]:
                        names.append(name)
                    case _:
                        raise wrong
            return names
    raise wrong


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
