"""Text to token ids and back, from the tokenizer.json of a checkpoint directory.

Control tokens come from `Control` segments and from nowhere else. The `tokenizers` library finds added tokens in the
text it encodes, and its switch against that spares tokens marked special only, which DeepSeek's `<｜User｜>` and
`<think>` need not be. So the vocabulary that encodes text is loaded without any control token, and every encoding is
checked: its tokens must spell the text, byte for byte.

Reads the kinds of tokenizer that `runtime.text.spelling` lists, and refuses others.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fathom.model.checkpoint.folder import TOKENIZER
from fathom.model.errors import quoted
from fathom.runtime.errors import PromptError
from fathom.runtime.text.segments import Control, Segment, Text, merge
from fathom.runtime.text.spelling import Place
from fathom.runtime.text.tokenizer_json import library_errors, read_vocabulary


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
        tokenizer.json is missing, damaged, or of a kind that is not read; one line that names the file and the field.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.path = directory / TOKENIZER
        self.vocab_size = vocab_size
        self._vocabulary = read_vocabulary(self.path)
        self._controls = {id_: name for name, id_ in self._vocabulary.controls.items()}
        self._bytes: dict[int, bytes] = {}  # of the ids seen so far

    def control_id(self, name: str) -> int:
        """The id of a control token, by its name.

        Raises
        ------
        PromptError
            tokenizer.json has no added token of that name, or one that would change the text beside it, or the model no
            row for it.
        """
        if name not in self._vocabulary.controls:
            raise PromptError(f"{self.path}: has no token {name}, which the prompt needs")
        if name in self._vocabulary.rules:
            rule = self._vocabulary.rules[name]
            raise PromptError(f"{self.path}: the token {quoted(name)} has {rule}, which changes text beside it")
        return self._check_range(self._vocabulary.controls[name])

    def before_text(self) -> list[Segment]:
        """The control tokens that tokenizer.json itself puts before a text; see `runtime.text.encoding.before_text`."""
        return [Control(name) for name in self._vocabulary.before]

    def encode(self, segments: Iterable[Segment], *, continued: bool = False) -> list[int]:
        """Token ids of a prompt.

        Parameters
        ----------
        segments
            Neighbouring texts are encoded as one.
        continued
            Whether they go on with what was read before. A text at their beginning is then taken as it is: it gets no
            space in front, which some tokenizers put before the first word of a text.

        Returns
        -------
        list[int]
            What the library gives for the rendered string, provided no text in it spells a control token. Segments
            that begin with `before_text` stand for what the library gives for the rest, with its template's tokens.

        Raises
        ------
        PromptError
            As `encode_text` and `control_id`.
        """
        ids: list[int] = []
        for segment, place in self._placed(merge(segments), continued=continued):
            if isinstance(segment, Control):
                ids.append(self.control_id(segment.name))
            else:
                ids += self.encode_text(segment.text, place)
        return ids

    def encode_text(self, text: str, place: Place = Place.START) -> list[int]:
        """Token ids of text in which nothing is a control token, whatever it spells. No BOS is added: see `raw_text`.

        Raises
        ------
        PromptError
            The text holds half a surrogate pair, an id is beyond the model's vocabulary, or the vocabulary cannot
            spell the text without loss. A SentencePiece vocabulary cannot spell `▁`: that is how it writes a space.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"prompt: character {error.start} is half of a surrogate pair") from error
        spelling = self._vocabulary.spelling
        text = spelling.prefix(text, place) + text
        with library_errors(self.path):
            ids = self._vocabulary.bpe.encode(text.replace(" ", spelling.space), add_special_tokens=False).ids
        if b"".join(map(self.token_bytes, ids)) != text.encode():
            raise PromptError(f"{self.path}: cannot spell the prompt without loss")
        assert self._controls.keys().isdisjoint(ids), "a control token out of text"
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens by name; bytes that are no UTF-8 become U+FFFD.

        The ids are a whole sequence: where the tokenizer puts a space before the first word of a text, a space at the
        beginning is left out, as the library's decoder leaves it out. `StreamDecoder` is for what goes on with a text.

        Raises
        ------
        PromptError
            An id that the model or tokenizer.json does not have.
        """
        text = self._text(ids)
        return text.removeprefix(" ") if self._vocabulary.spelling.strips else text

    def decode_segments(self, ids: Iterable[int]) -> list[Segment]:
        """The segments that `encode` makes these ids of: control tokens apart from text that merely spells one.

        Raises
        ------
        PromptError
            As `decode`.
        """
        spelling = self._vocabulary.spelling
        segments: list[Segment] = []
        run: list[int] = []
        for id_ in ids:
            if id_ in self._controls:
                segments += [Text(self._text(run)), Control(self._controls[self._check_range(id_)])]
                run = []
            else:
                run.append(id_)
        placed = self._placed(merge([*segments, Text(self._text(run))]))
        return merge(Text(spelling.without(s.text, place)) if isinstance(s, Text) else s for s, place in placed)

    def names(self, id_: int) -> bool:
        """Whether tokenizer.json has a token for an id of the model's vocabulary.

        Raises
        ------
        PromptError
            An id beyond the model's vocabulary.
        """
        self._check_range(id_)
        return id_ in self._controls or id_ in self._vocabulary.tokens

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

    def spelled(self, id_: int) -> str:
        """How tokenizer.json writes one token; PromptError as `token_bytes`."""
        self._check_range(id_)
        return self._controls[id_] if id_ in self._controls else self._vocabulary.tokens[id_]

    def _placed(self, segments: Sequence[Segment], *, continued: bool = False) -> Iterator[tuple[Segment, Place]]:
        """Each segment, and where a text in its place stands."""
        before = self.before_text()
        start = len(before) if segments[: len(before)] == before else 0
        for at, segment in enumerate(segments):
            if continued and at == 0:
                yield segment, Place.INSIDE
            else:
                yield segment, Place.START if at == start and not continued else Place.SECTION

    def _text(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def _look_up(self, id_: int) -> bytes:
        if id_ in self._controls:
            return self._controls[id_].encode()
        if id_ not in self._vocabulary.tokens:
            raise PromptError(f"{self.path}: has no token with id {id_}")
        return self._vocabulary.spelling.bytes_of(self._vocabulary.tokens[id_])

    def _check_range(self, id_: int) -> int:
        if not 0 <= id_ < self.vocab_size:
            raise PromptError(f"token id {id_}: the model's vocabulary has ids 0 to {self.vocab_size - 1}")
        return id_


class StreamDecoder:
    """Text from ids as they are generated: characters come out whole, and together they are `decode` of all ids.

    But for a space at their beginning: what is generated goes on with a prompt, and " Paris" is not the prompt's first
    word, so its space is text.
    """

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


class IdStream:
    """A `StreamDecoder` where there is no tokenizer.json: ids in decimal, a space between two."""

    def __init__(self) -> None:
        self._between = ""

    def push(self, id_: int) -> str:
        """The id, and the space before it."""
        between, self._between = self._between, " "
        return f"{between}{id_}"

    def finish(self) -> str:
        """Nothing: no id is cut short."""
        return ""
