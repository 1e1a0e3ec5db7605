"""Completion to message: the way back from what the model wrote.

Reads segments, not a string, so that text which merely spells a control token stays text. It takes well-formed
completions and says what is wrong with others; it repairs nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import V4_TAGS, Tags, from_json, to_json
from fathom.runtime.text.segments import DSML, EOS, THINK_END, Control, Segment, Text, merge

_SHOWN = 60  # characters of the culprit in an error


class _Between:
    """What stands between one DSML token and the next; the bracket at the end belongs to the tag that follows."""

    def __init__(self, tags: Tags) -> None:
        self.block_start = re.compile(rf"{tags.calls}>\n<")
        self.invoke = re.compile(rf'{tags.invoke} name="([^"]+)">\n\n?(</?)')
        self.parameter = re.compile(rf'{tags.parameter} name="([^"]*)" string="(true|false)">(.*)</', re.DOTALL)
        self.parameter_end = re.compile(rf"{tags.parameter}>\n(</?)")
        self.invoke_end = re.compile(rf"{tags.invoke}>\n(</?)")
        self.block_end = re.compile(rf"{tags.calls}>")


def parse_completion(segments: Sequence[Segment], *, thinking: bool, tags: Tags = V4_TAGS) -> dict[str, Any]:
    """The assistant message that a completion says.

    Parameters
    ----------
    segments
        What the model wrote after the prompt's `<think>` or `</think>`, EOS included. The answer to a `task` is plain
        in either mode: parse it with `thinking` false.
    thinking
        Whether the prompt ended with `<think>`.
    tags
        How the model writes the tags of tool calls.

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
        calls, rest = _tool_calls(rest, _Between(tags))
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


def _tool_calls(segments: list[Segment], between: _Between) -> tuple[list[dict[str, Any]], list[Segment]]:
    pieces: list[str] = []
    end = 0
    while end < len(segments) and segments[end] == DSML:
        piece, _ = _text(segments[end + 1 : end + 2])
        pieces.append(piece)
        end += 2 if piece else 1
    return _block(iter(pieces), between), segments[end:]


def _block(pieces: Iterator[str], between: _Between) -> list[dict[str, Any]]:
    """The calls of one block, given as the texts that follow its DSML tokens."""
    calls = []
    _match(between.block_start, pieces)
    bracket = "<"
    while bracket == "<":
        name, inner = _match(between.invoke, pieces)
        arguments: dict[str, str] = {}  # parameter -> the JSON of its value
        while inner == "<":
            key, bare, value = _match(between.parameter, pieces)
            if key in arguments:
                raise PromptError(f"completion: parameter {key!r} of {name!r} stands twice")
            arguments[key] = to_json(value) if bare == "true" else _checked_json(value, key, name)
            (inner,) = _match(between.parameter_end, pieces)
        (bracket,) = _match(between.invoke_end, pieces)
        text = ", ".join(f"{to_json(key)}: {value}" for key, value in arguments.items())
        calls.append({"type": "function", "function": {"name": name, "arguments": f"{{{text}}}"}})
    _match(between.block_end, pieces)
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
