"""DSML, the markup of the tools of DeepSeek-V4 and V4.1: the preamble that offers them and the blocks that call them.

Owns the literal texts of that format and its one rule of values: strings stand bare, all else is JSON. Names are
quoted without an escape, so a name that holds a quote cannot be written and is refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

from fathom.model.checkpoint import strict_json
from fathom.runtime.errors import PromptError
from fathom.runtime.text.segments import DSML, Segment, Text, split_controls


class Tags(NamedTuple):
    """How the three tags are written after their token."""

    calls: str
    invoke: str
    parameter: str


V4_TAGS: Final = Tags("tool_calls", "invoke", "parameter")
V41_TAGS: Final = Tags(" calls", " invoke", " parameter")

_TOOLS_INTRO = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜{calls}>" block like the following:

<｜DSML｜{calls}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{calls}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_OUTRO = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as an assistant message holds it."""

    name: str
    arguments: Mapping[str, Any]  # JSON values
    id: str | None = None  # what a tool message's tool_call_id refers to; not part of the prompt


def tools_preamble(functions: Iterable[Mapping[str, Any]], tags: Tags = V4_TAGS) -> list[Segment]:
    """The text that offers tools to the model.

    Parameters
    ----------
    functions
        The `function` objects of the tools, one line of JSON each, keys in the order given.
    tags
        Of V4 or V4.1.
    """
    schemas = "\n".join(to_json(function) for function in functions)
    return [*split_controls(_TOOLS_INTRO.format(**tags._asdict())), Text(schemas + _TOOLS_OUTRO)]


def tool_calls_block(calls: Sequence[ToolCall], tags: Tags = V4_TAGS) -> list[Segment]:
    """The block that an assistant turn ends with when it calls tools, its leading blank line included."""
    invokes = chain.from_iterable(_invoke(call, tags) for call in calls)
    return [Text("\n\n"), *_tag("<", f"{tags.calls}>\n"), *invokes, *_tag("</", f"{tags.calls}>")]


def _invoke(call: ToolCall, tags: Tags) -> list[Segment]:
    lines = [Text("\n")]  # stands between the opening tag and the closing one also when there is no parameter
    parameters = chain.from_iterable((*lines, *_parameter(key, value, tags)) for key, value in call.arguments.items())
    body = list(parameters) or lines
    opening = f'{tags.invoke} name="{quotable(call.name)}">'
    return [*_tag("<", opening), *body, *_tag("\n</", f"{tags.invoke}>\n")]


def _parameter(key: str, value: object, tags: Tags) -> list[Segment]:
    text, bare = (value, "true") if isinstance(value, str) else (to_json(value), "false")
    opening = f'{tags.parameter} name="{quotable(key)}" string="{bare}">'
    return [*_tag("<", opening), Text(text), *_tag("</", f"{tags.parameter}>")]


def _tag(bracket: str, rest: str) -> list[Segment]:
    return [Text(bracket), DSML, Text(rest)]


def quotable(name: str) -> str:
    """The name itself, if it can stand between quotes.

    Raises
    ------
    PromptError
        The name holds a quote: DSML has no escape, so it could not be read back.
    """
    if '"' in name:
        raise PromptError(f"name {name!r} holds a quote, which DSML cannot write")
    return name


def to_json(value: object) -> str:
    """JSON on one line, characters beyond ASCII as themselves: DeepSeek's spelling.

    Raises
    ------
    PromptError
        The value is nested too deeply to write, or holds NaN or infinity, which JSON has no way to write.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise PromptError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from error


def from_json(text: str) -> Any:
    """The value of a JSON text, read strictly.

    Raises
    ------
    PromptError
        What `model.checkpoint.strict_json` refuses: text that is no JSON, a number that is none or is beyond float64, a
        key given twice, nesting too deep to read.
    """
    try:
        return strict_json.parse_text(text)
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from error
