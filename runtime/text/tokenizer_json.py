"""tokenizer.json -> a vocabulary for text and one of control tokens, each field understood or refused.

The file may come from a stranger. The `tokenizers` library ignores fields that it does not know, panics at some
values, and may end the process at one (a `continuing_subword_prefix` that ends inside a character). So it is given
nothing that was not checked here, and of the file only what encoding text needs.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers

from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.json_values import MAX_INTEGER, Json, check_keys, integer, mapping, required
from fathom.model.errors import ConfigError, quoted, shown
from fathom.model.files import read_bounded
from fathom.runtime.errors import PromptError
from fathom.runtime.text.spelling import (
    BYTE_LEVEL,
    BYTE_TOKEN,
    FLAG,
    SURROGATE,
    Spelling,
    Values,
    check_values,
    parts,
    read_spelling,
)

MAX_BYTES: Final = 64 << 20  # DeepSeek-V4's file has 8 MB; Llama 3's 9, or 17 as newer versions write it

# `truncation` and `padding`, which shape batches, would cut or lengthen a prompt: they are left out, whatever they say.
TOP_LEVEL: Final = {
    *("version", "truncation", "padding", "added_tokens", "normalizer"),
    *("pre_tokenizer", "post_processor", "decoder", "model"),
}
# Dropout would draw another encoding each time; a prefix or suffix of pieces would be bytes that no text has.
MODEL: Final[Values] = {
    "type": ("BPE",),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "ignore_merges": (*FLAG, None),
    "fuse_unk": (*FLAG, None),
}
FLAGS: Final[Values] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), FLAG)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked tokenizer.json."""

    tokens: Mapping[int, str]  # those of text; no control token is among them
    controls: Mapping[str, int]  # every added token, special or not: what the library would find inside text
    rules: Mapping[str, str]  # control token -> a flag by which finding it would change the text beside it
    before: tuple[str, ...]  # the control tokens that the file's own template puts before a text
    spelling: Spelling
    bpe: tokenizers.Tokenizer  # of `tokens` alone


def read_vocabulary(path: Path) -> Vocabulary:
    """Read and check a tokenizer.json.

    Raises
    ------
    PromptError
        With one line naming the file, and the field where one is at fault.
    """
    data = read_bounded(path, MAX_BYTES, PromptError)
    try:
        fields = strict_json.parse(data)
    except ValueError as error:
        raise PromptError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise PromptError(f"{path}: not a JSON object")
    try:
        return _vocabulary(fields, path)
    except ConfigError as error:
        raise PromptError(f"{path}: {error}") from None
    except RecursionError:  # in a message that shows a value: how deep the parser goes depends on Python's version
        raise PromptError(f"{path}: not JSON: JSON is nested too deeply") from None


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Make one line of what the library raises: a plain Exception, or the PanicException of a panic in Rust.

    A panic has printed "thread ... panicked at ..." to stderr before it comes here. What is known to panic at loading
    is refused before; while encoding, a regex panics that takes more than ten million steps over a text.
    """
    try:
        yield
    except BaseException as error:
        kind = type(error)
        if kind is not Exception and (kind.__module__, kind.__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise PromptError(f"{path}: the tokenizers library says {quoted(str(error))}") from None


def _vocabulary(fields: Json, path: Path) -> Vocabulary:
    for name in fields:
        if name not in TOP_LEVEL:
            raise ConfigError(f"{quoted(name)[1:-1]}: unknown field")
    if fields.get("version", "1.0") != "1.0":
        raise ConfigError(f"version is {shown(fields['version'])}; supported: '1.0'")
    spelling = read_spelling(fields)
    model = _model(fields, spelling)
    tokens = _tokens(model)
    controls, rules = _controls(fields, model["vocab"])
    for name, id_ in controls.items():  # the vocabulary may list a control token too
        if tokens.pop(id_, name) != name:
            raise ConfigError(f"added_tokens: {quoted(name)} and model.vocab disagree about id {id_}")
    before = _before(fields.get("post_processor"), controls)
    # No merge makes a control token out of text, or a byte token, which is for characters that have no other.
    byte_tokens = filter(BYTE_TOKEN.fullmatch, model["vocab"]) if spelling.byte_tokens else ()
    merges = _merges(model, {*controls, *byte_tokens})
    text: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": spelling.splitter,
        "model": {
            "type": "BPE",
            "vocab": {token: id_ for id_, token in tokens.items()},
            "merges": merges,
            "byte_fallback": spelling.byte_tokens,
            "ignore_merges": model.get("ignore_merges") is True,
        },
    }
    with library_errors(path):
        bpe = tokenizers.Tokenizer.from_str(json.dumps(text))
    return Vocabulary(tokens, controls, rules, before, spelling, bpe)


def _model(fields: Json, spelling: Spelling) -> Json:
    model = mapping(required(fields, "model"), "model")
    for name in ("type", "vocab", "merges"):
        required(model, name, "model.")
    checked = {name: model[name] for name in model if name not in ("vocab", "merges", "unk_token")}
    check_values(checked, MODEL | {"byte_fallback": (True,) if spelling.byte_tokens else (False, None)}, "model")
    # What stands for unknown characters does not matter, nor whether several are one: a text that has them is refused.
    if (unknown := model.get("unk_token")) is not None and unknown not in list(mapping(model["vocab"], "model.vocab")):
        raise ConfigError(f"model.unk_token is {shown(unknown)}, which model.vocab lacks")
    return model


def _tokens(model: Json) -> dict[int, str]:
    """Id -> token."""
    tokens: dict[int, str] = {}
    for token, id_ in mapping(model["vocab"], "model.vocab").items():
        if SURROGATE.search(token):
            raise ConfigError(f"model.vocab: {quoted(token)} holds half of a surrogate pair")
        if type(id_) is not int or not 0 <= id_ <= MAX_INTEGER:
            want = f"want an integer from 0 to {MAX_INTEGER}"
            raise ConfigError(f"model.vocab: the id of {quoted(token)} is {shown(id_)}; {want}")
        if id_ in tokens:
            raise ConfigError(f"model.vocab: {quoted(tokens[id_])} and {quoted(token)} share the id {id_}")
        tokens[id_] = token
    return tokens


def _merges(model: Json, reserved: Collection[str]) -> list[list[str]]:
    """The merges in order, as pairs; without those of reserved tokens, which no text is merged to."""
    vocab, merges = model["vocab"], model["merges"]
    if not isinstance(merges, list):
        raise ConfigError(f"model.merges is {shown(merges)}; want a list")
    kept = []
    for place, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge  # the older form and the newer
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(token, str) for token in pair):
            raise ConfigError(f"model.merges[{place}] is {shown(merge)}; want two tokens")
        named = (*pair, "".join(pair))
        for token in named:
            if token not in vocab:
                raise ConfigError(f"model.merges[{place}]: model.vocab lacks {quoted(token)}")
        if not any(token in reserved for token in named):
            kept.append(pair)
    return kept


def _controls(fields: Json, vocab: Json) -> tuple[dict[str, int], dict[str, str]]:
    """Name -> id of every added token, and name -> flag of those that `Tokenizer` does not put into a prompt.

    The flags are rules for finding a token inside text: only between words (single_word), after the text was normalised
    (normalized), together with the white space beside it (lstrip, rstrip). Here nothing is found inside text, so that
    no text changes by them. But where such a token is put beside a text, the library would find it in the rendered
    string by its rule, and drop white space, or not find it: the prompt would be another. Not so by `normalized`, but
    in the older form made from SentencePiece, and there a prompt has no token beside its text but the template's.
    """
    controls: dict[str, int] = {}
    rules: dict[str, str] = {}
    free = len(vocab)  # the id that the library gives the next token; to the one in the file it pays no heed
    if not isinstance(tokens := required(fields, "added_tokens"), list):
        raise ConfigError(f"added_tokens is {shown(tokens)}; want a list")
    for place, token in enumerate(tokens):
        where = f"added_tokens[{place}]"
        check_keys(mapping(token, where), ("id", "content", *FLAGS), where)
        check_values({flag: token[flag] for flag in FLAGS}, FLAGS, where)
        id_, name = integer(token, "id", f"{where}.", least=0), token["content"]
        if not isinstance(name, str) or not name or SURROGATE.search(name):
            raise ConfigError(f"{where}.content is {shown(name)}; want a text")
        if name in controls:
            raise ConfigError(f"{where}: another added token is {quoted(name)} too")
        if id_ != vocab.get(name, free):
            raise ConfigError(f"{where}: {quoted(name)} has id {id_}, but {vocab.get(name, free)} by model.vocab")
        controls[name] = id_
        free = max(free, id_ + 1)
        for flag in ("single_word", "lstrip", "rstrip"):
            if token[flag]:
                rules[name] = flag
    return controls, rules


def _before(processor: Any, controls: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the tokens that a post_processor puts before a text; its byte-level kind moves offsets only."""
    steps = [mapping(step, "post_processor") for step in parts(processor, "post_processor", "processors")]
    for step in steps:
        if step.get("type") == "ByteLevel":
            check_values(step, BYTE_LEVEL, "post_processor")
    match [step for step in steps if step.get("type") != "ByteLevel"]:
        case []:
            return ()
        case [
            {
                "type": "TemplateProcessing",
                "single": [*pieces, {"Sequence": {"id": "A"}}],
                "special_tokens": dict(of),
                **rest,
            }
        ] if rest.keys() <= {"pair"}:  # which is for two texts
            names = tuple(_named(piece, of, controls) for piece in pieces)
            if "" not in names:
                return names
    raise ConfigError("post_processor is not a template that puts control tokens before a text, and no more")


def _named(piece: Any, of: Json, controls: Mapping[str, int]) -> str:
    """The control token that a piece of a template is; nothing where it is none, or one of another id."""
    match piece:
        case {"SpecialToken": {"id": str(name)}} if name in controls:
            match of.get(name):
                case {"ids": [int(id_)]} if id_ == controls[name]:
                    return name
    return ""
