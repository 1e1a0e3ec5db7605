"""Prompts as segments: text that a person or a model wrote, and control tokens that the format puts between.

A prompt held as one string cannot tell `<｜User｜>` the turn from `<｜User｜>` the seven characters in somebody's
question. Segments can, and stay apart until `Tokenizer.encode` turns each kind into ids by its own rule.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text: encoded by the vocabulary, never into a control token, whatever it spells."""

    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by the name it has in tokenizer.json."""

    name: str


Segment = Text | Control

BOS = Control("<｜begin▁of▁sentence｜>")
EOS = Control("<｜end▁of▁sentence｜>")
SYSTEM = Control("<｜System｜>")  # of V4.1
USER = Control("<｜User｜>")
ASSISTANT = Control("<｜Assistant｜>")
LATEST_REMINDER = Control("<｜latest_reminder｜>")
THINK_START = Control("<think>")
THINK_END = Control("</think>")
DSML = Control("｜DSML｜")
# DeepSeek's quick instructions: the `task` field of a message -> the token that asks for it.
TASKS = {task: Control(f"<｜{task}｜>") for task in ("action", "query", "authority", "domain", "title", "read_url")}

CONTROLS = (BOS, EOS, USER, ASSISTANT, LATEST_REMINDER, THINK_START, THINK_END, DSML, *TASKS.values())
_CONTROL_PATTERN = re.compile("(" + "|".join(re.escape(control.name) for control in CONTROLS) + ")")


def render(segments: Iterable[Segment]) -> str:
    """The prompt as the one string that DeepSeek's encoder returns; for reading and comparing, not for encoding."""
    return "".join(segment.text if isinstance(segment, Text) else segment.name for segment in segments)


def merge(segments: Iterable[Segment]) -> list[Segment]:
    """Join neighbouring texts and leave out empty ones.

    BPE merges reach across the pieces a prompt was written in, so only whole runs of text may be encoded.
    """
    merged: list[Segment] = []
    run: list[str] = []
    for segment in segments:
        if isinstance(segment, Text):
            run.append(segment.text)
            continue
        merged += _joined(run)
        merged.append(segment)
        run = []
    return merged + _joined(run)


def _joined(run: list[str]) -> list[Segment]:
    text = "".join(run)
    return [Text(text)] if text else []


def split_controls(trusted: str) -> list[Segment]:
    """Read the control tokens back out of a string whose author is trusted: a literal of the format, a rendered prompt.

    Never for text from outside: there every spelling of a control token would become one.
    """
    pieces = _CONTROL_PATTERN.split(trusted)  # text, control, text, ..., text
    return merge(Control(piece) if i % 2 else Text(piece) for i, piece in enumerate(pieces))
