"""Messages as they come from outside: read, checked field by field, refused by index and field.

Accepts a JSON list of messages, or an object of `messages` and `tools`, in the shape of DeepSeek's encoding tests:
roles system, developer, user, assistant, tool and latest_reminder, tools and tool calls as in OpenAI's chat API.
Refuses every field it does not know, for an ignored field is a prompt that silently lacks something.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fathom.model.files import read_text
from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import ToolCall, from_json, quotable, to_json
from fathom.runtime.text.segments import TASKS

MAX_BYTES = 64 << 20  # of a file of messages

_T = TypeVar("_T")
_D = TypeVar("_D")

_FIELDS = {  # role -> fields besides `role`; `mask` marks training data and says nothing about the prompt
    "system": {"content", "tools", "response_format", "mask"},
    "developer": {"content", "tools", "response_format", "task", "mask"},
    "user": {"content", "task", "mask"},
    "assistant": {"content", "reasoning_content", "tool_calls", "task", "wo_eos", "mask"},
    "tool": {"content", "tool_call_id", "mask"},
    "latest_reminder": {"content", "mask"},
}
_KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Message:
    """One checked message; a field that its role does not have keeps its empty value."""

    role: str
    content: str
    where: str = "messages[0]"  # for errors that only show when the messages are put together
    reasoning: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()  # the `function` objects
    tool_calls: tuple[ToolCall, ...] = ()
    response_format: Mapping[str, Any] | None = None  # a JSON schema
    task: str | None = None
    ends: bool = True  # False: an assistant turn left open for the model to continue (`wo_eos`)
    answers: int = 0  # a tool message: the position of its call among the assistant's calls


def user_message(text: str) -> list[Message]:
    """The conversation of one question."""
    return check_messages([{"role": "user", "content": text}])


def load_messages(path: Path) -> list[Message]:
    """Read and check a file of messages.

    Raises
    ------
    PromptError
        The file cannot be read, is not JSON, or holds a message that `check_messages` refuses.
    """
    text = read_text(path, MAX_BYTES, PromptError)
    try:
        return check_messages(from_json(text))
    except PromptError as error:
        raise PromptError(f"{path}: {error}") from error


def check_messages(data: object) -> list[Message]:
    """Check parsed JSON: a list of messages, or `{"messages": [...], "tools": [...]}`.

    Top-level tools belong to the first message, which must be a system or developer turn: that is where the format
    writes them.

    Raises
    ------
    PromptError
        One line with the index of the message and the field at fault.
    """
    messages: list[Message] = []
    for i, entry in enumerate(_entries(data)):
        where = f"messages[{i}]"
        fields = _typed(entry, dict, where)
        message = _message(fields, where)
        if message.role == "tool":
            message = replace(message, answers=_call_answered(fields, where, messages))
        messages.append(message)
    return messages


def _entries(data: object) -> Sequence[object]:
    fields = data if isinstance(data, dict) else {"messages": data}
    _only(fields, {"messages", "tools"}, "top level")
    entries = _required(fields, "messages", list, "top level")
    if not entries:
        raise PromptError("messages: empty")
    if "tools" not in fields:
        return entries
    first = _typed(entries[0], dict, "messages[0]")
    if first.get("role") not in ("system", "developer"):
        raise PromptError("tools: messages[0] must be a system or developer turn to carry them (its content may be '')")
    if "tools" in first:
        raise PromptError("tools: given at the top level and in messages[0]")
    return [{**first, "tools": fields["tools"]}, *entries[1:]]


def _message(fields: Mapping[str, Any], where: str) -> Message:
    role = _required(fields, "role", str, where)
    if role not in _FIELDS:
        raise PromptError(f"{where}.role: {role!r} is none of {', '.join(_FIELDS)}")
    _only(fields, {"role", *_FIELDS[role]}, f"{where} ({role})")
    calls = _optional(fields, "tool_calls", list, where, [])
    task = _optional(fields, "task", str, where, None)
    if task is not None and task not in TASKS:
        raise PromptError(f"{where}.task: {task!r} is none of {', '.join(TASKS)}")
    response_format = _optional(fields, "response_format", dict, where, None)
    if response_format is not None:
        if not response_format:
            raise PromptError(f"{where}.response_format: empty")
        _check_json(response_format, f"{where}.response_format")
    return Message(
        role=role,
        content=_content(fields, role, where, optional=bool(calls)),
        where=where,
        reasoning=_optional(fields, "reasoning_content", str, where, ""),
        tools=_tools(_optional(fields, "tools", list, where, []), f"{where}.tools"),
        tool_calls=_tool_calls(calls, f"{where}.tool_calls"),
        response_format=response_format,
        task=task,
        ends=not _optional(fields, "wo_eos", bool, where, default=False),
    )


def _content(fields: Mapping[str, Any], role: str, where: str, *, optional: bool) -> str:
    if role == "tool" and isinstance(fields.get("content"), list):  # OpenAI's content parts: DeepSeek joins them
        parts = enumerate(fields["content"])
        return "\n\n".join(_content_part(part, f"{where}.content[{i}]") for i, part in parts)
    if optional:
        return _optional(fields, "content", str, where, "")
    content = _required(fields, "content", str, where)
    if role == "developer" and not content:
        raise PromptError(f"{where}.content: empty, which a developer turn may not be")
    return content


def _content_part(value: object, where: str) -> str:
    fields = _typed(value, dict, where)
    _only(fields, {"type", "text"}, where)
    if fields.get("type") != "text":
        raise PromptError(f"{where}.type: {fields.get('type')!r}, want 'text'")
    return _required(fields, "text", str, where)


def _tool_calls(values: list[object], where: str) -> tuple[ToolCall, ...]:
    calls = tuple(_tool_call(value, f"{where}[{i}]") for i, value in enumerate(values))
    ids = [call.id for call in calls if call.id is not None]
    if len(set(ids)) != len(ids):
        raise PromptError(f"{where}: two calls have the same id")
    return calls


def _tool_call(value: object, where: str) -> ToolCall:
    fields = _typed(value, dict, where)
    _only(fields, {"id", "type", "function"}, where)
    function = _function(fields, where)
    _only(function, {"name", "arguments"}, f"{where}.function")
    text = _required(function, "arguments", str, f"{where}.function")
    try:
        arguments = _typed(from_json(text), dict, "its JSON")
        _check_json(arguments, "its JSON")
        for key in arguments:
            quotable(key)
    except PromptError as error:
        raise PromptError(f"{where}.function.arguments: {error}") from error
    return ToolCall(function["name"], arguments, _optional(fields, "id", str, where, None))


def _tools(values: list[object], where: str) -> tuple[Mapping[str, Any], ...]:
    functions = []
    for i, value in enumerate(values):
        fields = _typed(value, dict, f"{where}[{i}]")
        _only(fields, {"type", "function"}, f"{where}[{i}]")
        functions.append(_function(fields, f"{where}[{i}]"))
        _check_json(functions[-1], f"{where}[{i}].function")
    return tuple(functions)


def _function(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `function` of a tool or a tool call, which has at least a name that DSML can quote."""
    if _optional(fields, "type", str, where, "function") != "function":
        raise PromptError(f"{where}.type: {fields['type']!r}, want 'function'")
    function: dict[str, Any] = _required(fields, "function", dict, where)
    name = _required(function, "name", str, f"{where}.function")
    if not name:
        raise PromptError(f"{where}.function.name: empty")
    try:
        quotable(name)
    except PromptError as error:
        raise PromptError(f"{where}.function.name: {error}") from error
    return function


def _call_answered(fields: Mapping[str, Any], where: str, earlier: Sequence[Message]) -> int:
    """The position, among the latest assistant's calls, of the call that a tool message answers."""
    asked = max((i for i, message in enumerate(earlier) if message.tool_calls), default=None)
    if asked is None:
        raise PromptError(f"{where}: a tool result, but no assistant message before it calls a tool")
    calls = earlier[asked].tool_calls
    answered = {message.answers for message in earlier[asked:] if message.role == "tool"}
    call_id = _optional(fields, "tool_call_id", str, where, None)
    if call_id is not None:
        position = next((i for i, call in enumerate(calls) if call.id == call_id), None)
        if position is None:
            raise PromptError(f"{where}.tool_call_id: {call_id!r} is no call of messages[{asked}]")
    elif len(calls) > 1 and any(call.id is not None for call in calls):
        raise PromptError(f"{where}.tool_call_id: missing, and messages[{asked}] makes several calls with ids")
    else:
        position = len(answered)  # calls without ids are answered in their order
    if position in answered or position >= len(calls):
        raise PromptError(f"{where}: one result too many for the calls of messages[{asked}]")
    return position


def _required(fields: Mapping[str, Any], key: str, kind: type[_T], where: str) -> _T:
    if key not in fields:
        raise PromptError(f"{where}.{key}: missing")
    return _typed(fields[key], kind, f"{where}.{key}")


def _optional(fields: Mapping[str, Any], key: str, kind: type[_T], where: str, default: _D) -> _T | _D:
    """The field, or `default` where it is absent or null, which the chat APIs use alike."""
    return default if fields.get(key) is None else _required(fields, key, kind, where)


def _typed(value: object, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        raise PromptError(f"{where}: {type(value).__name__}, want {_KINDS[kind]}")
    if isinstance(value, str):
        _check_unicode(value, where)
    return value


def _only(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(str(key) for key in fields if key not in known)
    if unknown:
        raise PromptError(f"{where}: unknown field {unknown[0]!r}")


def _check_json(value: object, where: str) -> None:
    _check_unicode(to_json(value), where)


def _check_unicode(text: str, where: str) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError(f"{where}: holds half of a surrogate pair, which is no character")
