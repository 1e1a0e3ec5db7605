"""Messages to prompt: the message encoding of DeepSeek-V4 and V4.1, as segments.

The format, as DeepSeek's encoder of the V4 checkpoints writes it: system text stands bare after BOS; a user or
developer turn opens with `<｜User｜>`; tool results are user turns; what the model is to write next follows
`<｜Assistant｜>` and either `<think>` or, to switch thinking off, `</think>`; assistant turns end with EOS. Of earlier
turns the reasoning is left out, unless tools are offered: then all of it stays.

V4.1 differs: a system text follows `<｜System｜>`, also in the middle, where it asks for an answer; with thinking that
token and how much effort is wanted stand there in any case; and DSML's tags begin with a space.

Where DeepSeek's encoder drops something without a word, this one raises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from fathom.model.architectures import Config
from fathom.model.llama.config import LlamaConfig
from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import V4_TAGS, V41_TAGS, Tags, to_json, tool_calls_block, tools_preamble
from fathom.runtime.text.messages import Message
from fathom.runtime.text.segments import (
    ASSISTANT,
    BOS,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    TASKS,
    THINK_END,
    THINK_START,
    USER,
    Segment,
    Text,
    merge,
)

if TYPE_CHECKING:
    from fathom.runtime.text.tokenizer import Tokenizer

_ABSOLUTE = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_BEYOND = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
# Revision of the checkpoint -> level -> the text that asks for it. 0731 (and 0813) moved every level up by one.
EFFORTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "preview": {"high": "", "max": _ABSOLUTE},
        "0731": {"low": "", "high": _ABSOLUTE, "max": _BEYOND},
    }
)

V41: Final = "4.1"  # its revision in --effort
EFFORTS_V41: Mapping[str, int] = MappingProxyType({"low": 50, "high": 75, "xhigh": 75, "max": 100})


def effort_text(revision: str, level: str) -> str:
    """The text that asks a checkpoint for a level of reasoning effort.

    Parameters
    ----------
    revision
        "preview" (the first Flash, Pro and DSpark) or "0731" (Flash-0731 and Pro-0813): "max" means different texts.
    level
        "high" or "max"; from 0731 on also "low", its default. The default of either revision adds no text.

    Raises
    ------
    PromptError
        No such revision, or the revision has no such level.
    """
    if revision not in EFFORTS:
        raise PromptError(f"reasoning effort: revision {revision!r} is none of {', '.join(EFFORTS)}")
    levels = EFFORTS[revision]
    if level not in levels:
        raise PromptError(f"reasoning effort: {level!r} is none of {', '.join(levels)} of revision {revision}")
    return levels[level]


def effort_text_v41(effort: str | int) -> str:
    """The text that asks V4.1 for reasoning effort: a level of `EFFORTS_V41`, or a number from 1 to 100.

    Raises
    ------
    PromptError
        Neither.
    """
    number = EFFORTS_V41.get(effort) if isinstance(effort, str) else effort
    if number is None or not 1 <= number <= 100:
        raise PromptError(f"reasoning effort: {effort!r} is none of {', '.join(EFFORTS_V41)}, nor from 1 to 100")
    return f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def is_v41(config: Config) -> bool:
    """Whether a model's prompts are V4.1's."""
    return not isinstance(config, LlamaConfig) and config.v41 is not None


def check_chat_format(config: Config, where: Path) -> None:
    """Refuse messages for a family whose chat format is not read: PromptError naming `where`."""
    if isinstance(config, LlamaConfig):
        raise PromptError(f"{where}: no chat format of a {config.model_type} model is read here, only --raw text")


def before_text(config: Config, tokenizer: "Tokenizer") -> list[Segment]:
    """What stands before a text that begins a sequence: the one rule, for every command that reads a text as it is.

    Of DeepSeek-V4 BOS. Its tokenizer adds none (`add_bos_token` is false in its tokenizer_config.json), because
    DeepSeek's encoder writes BOS itself at the head of every prompt: no sequence begins without it. Of others what
    their tokenizer.json puts before a text: BOS, in most files, or nothing.
    """
    return tokenizer.before_text() if isinstance(config, LlamaConfig) else [BOS]


def raw_text(text: str, config: Config, tokenizer: "Tokenizer") -> list[Segment]:
    """A prompt without chat format: `before_text`, then the text as it is."""
    return [*before_text(config, tokenizer), Text(text)]


class RawIds(NamedTuple):
    """Token ids of a raw text."""

    before: list[int]  # of `before_text`
    text: list[int]


def raw_ids(text: str, config: Config, tokenizer: "Tokenizer") -> RawIds:
    """The ids of `raw_text`, for who repeats or cuts the text; PromptError as `Tokenizer.encode`."""
    ids = tokenizer.encode(raw_text(text, config, tokenizer))
    count = len(before_text(config, tokenizer))
    return RawIds(ids[:count], ids[count:])


def encode_messages(
    messages: Sequence[Message], *, thinking: bool, effort: str = "", v41: bool = False
) -> list[Segment]:
    """The prompt for a conversation, up to where the model is to continue.

    Parameters
    ----------
    messages
        Checked messages, at least one (`check_messages`, `load_messages`).
    thinking
        Whether the model is to reason before it answers.
    effort
        What `effort_text`, or `effort_text_v41`, gave; it means something in thinking mode only. V4.1 has a default.
    v41
        Whether the prompt is V4.1's.

    Returns
    -------
    list[Segment]
        Neighbouring texts joined. Ends with EOS, and asks for nothing, when the last message is a finished answer.

    Raises
    ------
    PromptError
        A task that would not reach the prompt, or an effort without thinking.
    """
    if effort and not thinking:
        raise PromptError("reasoning effort: has no effect without thinking")
    turns = _merge_turns(messages)
    keep_reasoning = any(turn.tools for turn in turns)
    if thinking and not keep_reasoning:
        turns = _without_earlier_developers(turns)
    _check_tasks(turns)
    # Turns from here on are the current exchange: only they may show reasoning when earlier reasoning is dropped.
    reasons_from = 0 if keep_reasoning else _last_user(turns, v41=v41)
    segments: list[Segment] = [BOS]
    if v41 and (thinking or turns[0].role == "system"):
        segments.append(SYSTEM)
    segments.append(Text(effort_text_v41("high") if v41 and thinking and not effort else effort))
    for i, turn in enumerate(turns):
        thinks = thinking and i >= reasons_from
        answers_task = i > 0 and turns[i - 1].task is not None
        asks = v41 and turn.role == "system" and i > 0
        segments += [SYSTEM] if asks else []
        segments += _turn(turn, V41_TAGS if v41 else V4_TAGS, thinks=thinks and not answers_task)
        if i + 1 == len(turns) or turns[i + 1].role in ("assistant", "latest_reminder"):
            segments += _request(turn, thinks=thinks, thinking=thinking, asks=asks)
    return merge(segments)


def _turn(turn: Message, tags: Tags, *, thinks: bool) -> list[Segment]:
    """What the turn itself says."""
    if turn.role == "latest_reminder":
        return [LATEST_REMINDER, Text(turn.content)]
    if turn.role == "user":
        return [USER, Text(turn.content)]
    if turn.role == "assistant":
        reasoning: list[Segment] = [Text(turn.reasoning), THINK_END] if thinks else []
        calls = tool_calls_block(turn.tool_calls, tags) if turn.tool_calls else []
        return [*reasoning, Text(turn.content), *calls, *([EOS] if turn.ends else [])]
    opening: list[Segment] = [USER] if turn.role == "developer" else []  # a system turn has no token of its own
    return [*opening, Text(turn.content), *_instructions(turn, tags)]


def _instructions(turn: Message, tags: Tags) -> list[Segment]:
    """The tools and the answer format that a system or developer turn sets out after its text."""
    segments: list[Segment] = []
    if turn.tools:
        segments += [Text("\n\n"), *tools_preamble(turn.tools, tags)]
    if turn.response_format:
        schema = to_json(turn.response_format)
        heading = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        segments += [Text(heading + schema)]
    return segments


def _request(turn: Message, *, thinks: bool, thinking: bool, asks: bool) -> list[Segment]:
    """The tokens after a turn that ask for the assistant's; `asks`: a system turn that does."""
    if turn.task == "action":  # decided where an answer would start, as the first thing thought or said
        return [ASSISTANT, THINK_START if thinking else THINK_END, TASKS["action"]]
    if turn.task is not None:
        return [TASKS[turn.task]]
    if asks or turn.role in ("user", "developer"):
        return [ASSISTANT, THINK_START if thinks else THINK_END]
    return []


def _merge_turns(messages: Sequence[Message]) -> list[Message]:
    """Turn runs of user and tool messages into one user turn each, the tool results in the order of their calls."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and _joins(message, runs[-1][0]):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_one_turn(run) for run in runs]


def _joins(message: Message, first: Message) -> bool:
    if first.role not in ("user", "tool"):
        return False
    # A turn with a task is closed: the next question begins a turn of its own.
    return message.role == "tool" or (message.role == "user" and first.task is None)


def _one_turn(run: Sequence[Message]) -> Message:
    first = run[0]
    if first.role not in ("user", "tool"):
        return first
    for message in run[1:]:
        if message.task is not None:
            raise PromptError(f"{message.where}.task: lost, because the turn is merged into the one of {first.where}")
    # Results move among the places of results only; what the user said in between stays where it is.
    results = iter(sorted((message for message in run if message.role == "tool"), key=lambda result: result.answers))
    parts = [
        f"<tool_result>{next(results).content}</tool_result>" if message.role == "tool" else message.content
        for message in run
    ]
    return replace(first, role="user", content="\n\n".join(parts))


def _without_earlier_developers(turns: Sequence[Message]) -> list[Message]:
    """A developer turn belongs to the exchange it opens and goes with its reasoning."""
    last = _last_user(turns)
    return [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]


def _last_user(turns: Sequence[Message], *, v41: bool = False) -> int:
    roles = ("user", "developer", "system") if v41 else ("user", "developer")
    return max((i for i, turn in enumerate(turns) if turn.role in roles and (i or turn.role != "system")), default=-1)


def _check_tasks(turns: Sequence[Message]) -> None:
    for turn, following in pairwise(turns):
        if turn.task is not None and following.role not in ("assistant", "latest_reminder"):
            raise PromptError(f"{turn.where}.task: lost, because no assistant turn follows but {following.where}")
