"""Completion to message: the way back from what the model wrote.

Reads segments, not a string, so that text which merely spells a control token stays text. It takes well-formed
completions and says what is wrong with others; it repairs nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import from_json, to_json
from fathom.runtime.text.segments import DSML, EOS, THINK_END, Control, Segment, Text, merge

_SHOWN = 60  # characters of the culprit in an error

# What stands between one DSML token and the next; the bracket at the end belongs to the tag that follows.
_BLOCK_START = re.compile(r"tool_calls>\n<")
_INVOKE = re.compile(r'invoke name="([^"]+)">\n\n?(</?)')
_PARAMETER = re.compile(r'parameter name="([^"]*)" string="(true|false)">(.*)</', re.DOTALL)
_PARAMETER_END = re.compile(r"parameter>\n(</?)")
_INVOKE_END = re.compile(r"invoke>\n(</?)")
_BLOCK_END = re.compile(r"tool_calls>")


def parse_completion(segments: Sequence[Segment], *, thinking: bool) -> dict[str, Any]:
    """The assistant message that a completion says.

    Parameters
    ----------
    segments
        What the model wrote after the prompt's `<think>` or `</think>`, EOS included. The answer to a `task` is plain
        in either mode: parse it with `thinking` false.
    thinking
        Whether the prompt ended with `<think>`.

    Returns
    -------
    dict[str, Any]
        `role`, `reasoning_content`, `content` and `tool_calls` in OpenAI's shape, arguments as the text of a JSON
        object: a message that `check_messages` accepts.

    Raises
    ------
    PromptError
        The completion breaks the format: an end missing, a control token out of place, malformed DSML.
    """
    rest = merge(segments)
    reasoning = ""
    if thinking:
        reasoning, rest = _text(rest)
        rest = _after(THINK_END, rest, "after the reasoning")
    content, rest = _text(rest)
    calls: list[dict[str, Any]] = []
    if rest and rest[0] == DSML:
        if not content.endswith("\n\n<"):
            raise PromptError(f"completion: {DSML.name} does not open a tag on a line of its own")
        content = content.removesuffix("\n\n<")
        calls, rest = _tool_calls(rest)
    rest = _after(EOS, rest, "after the message")
    if rest:
        raise PromptError(f"completion: {_shown(rest[0])} after the end")
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": calls}


def _text(segments: list[Segment]) -> tuple[str, list[Segment]]:
    """The text at the start, empty if there is none, and what follows."""
    if segments and isinstance(segments[0], Text):
        return segments[0].text, segments[1:]
    return "", segments


def _after(control: Control, segments: list[Segment], place: str) -> list[Segment]:
    if not segments:
        raise PromptError(f"completion: ends where {control.name} is due {place}")
    if segments[0] != control:
        raise PromptError(f"completion: {_shown(segments[0])} where {control.name} is due {place}")
    return segments[1:]


def _tool_calls(segments: list[Segment]) -> tuple[list[dict[str, Any]], list[Segment]]:
    pieces: list[str] = []
    end = 0
    while end < len(segments) and segments[end] == DSML:
        piece, _ = _text(segments[end + 1 : end + 2])
        pieces.append(piece)
        end += 2 if piece else 1
    return _block(iter(pieces)), segments[end:]


def _block(pieces: Iterator[str]) -> list[dict[str, Any]]:
    """The calls of one block, given as the texts that follow its DSML tokens."""
    calls = []
    _match(_BLOCK_START, pieces)
    bracket = "<"
    while bracket == "<":
        name, inner = _match(_INVOKE, pieces)
        arguments: dict[str, str] = {}  # parameter -> the JSON of its value
        while inner == "<":
            key, bare, value = _match(_PARAMETER, pieces)
            if key in arguments:
                raise PromptError(f"completion: parameter {key!r} of {name!r} stands twice")
            arguments[key] = to_json(value) if bare == "true" else _checked_json(value, key, name)
            (inner,) = _match(_PARAMETER_END, pieces)
        (bracket,) = _match(_INVOKE_END, pieces)
        text = ", ".join(f"{to_json(key)}: {value}" for key, value in arguments.items())
        calls.append({"type": "function", "function": {"name": name, "arguments": f"{{{text}}}"}})
    _match(_BLOCK_END, pieces)
    for piece in pieces:
        raise PromptError(f"completion: {DSML.name}{piece[:_SHOWN]!r} after the end of the tool calls")
    return calls


def _match(pattern: re.Pattern[str], pieces: Iterator[str]) -> tuple[str, ...]:
    piece = next(pieces, None)
    found = None if piece is None else pattern.fullmatch(piece)
    if found is None:
        seen = "the end" if piece is None else repr(piece[:_SHOWN])
        raise PromptError(f"completion: malformed tool call: {seen} where {pattern.pattern!r} is due")
    return found.groups()


def _checked_json(text: str, key: str, name: str) -> str:
    """The text itself, kept as the model wrote it, once it is known to be JSON."""
    try:
        from_json(text)
    except PromptError as error:
        raise PromptError(f"completion: parameter {key!r} of {name!r}: {error}") from error
    return text


def _shown(segment: Segment) -> str:
    return segment.name if isinstance(segment, Control) else repr(segment.text[:_SHOWN])
