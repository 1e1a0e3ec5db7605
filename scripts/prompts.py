"""The flags that describe a prompt -> segments and token ids, in the format of the model's family."""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from fathom.model.architectures import Config
from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.folder import TOKENIZER
from fathom.model.errors import CapacityError, ConfigError, quoted, shown
from fathom.model.files import read_text
from fathom.runtime.errors import PromptError
from fathom.runtime.options import RunOptions, checked_config
from fathom.runtime.text.dsml import from_json
from fathom.runtime.text.encoding import (
    V41,
    check_chat_format,
    effort_text,
    effort_text_v41,
    encode_messages,
    is_v41,
    raw_text,
)
from fathom.runtime.text.messages import Message, check_messages, load_messages, user_message
from fathom.runtime.text.segments import BOS, EOS, Control, Segment, Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.paths import MAX_TEXT_BYTES


class Prompt(NamedTuple):
    """What a command line gives the model to read."""

    config: Config
    tokenizer: Tokenizer | None  # None: the model has no tokenizer.json, and none was needed
    segments: list[Segment]  # of ids that were given, none
    ids: list[int]


def read_prompt(args: argparse.Namespace, options: RunOptions) -> Prompt:
    """Read the config, the tokenizer and the prompt; a line for whatever is wrong with one of them, before any weight.

    Raises
    ------
    ConfigError, PromptError
        As `runtime.options.checked_config`, `runtime.text.tokenizer.Tokenizer`, `prompt_segments` and `read_tokens`.
    """
    check_prompt_flags(args)
    if all(given is None for given in (args.prompt, args.prompt_file, args.messages, args.tokens, args.load_state)):
        raise PromptError("one of --prompt, --prompt-file, --messages, --tokens or --load-state is needed")
    config = checked_config(args.model, options)
    if any(text is not None for text in (args.prompt, args.prompt_file, args.messages)):
        tokenizer = Tokenizer(args.model, config.vocab_size)
        segments = prompt_segments(args, config, tokenizer)
        return Prompt(config, tokenizer, segments, tokenizer.encode(segments, continued=args.load_state is not None))
    ids = [] if args.tokens is None else read_tokens(args.tokens, config.vocab_size)
    there = os.path.lexists(args.model / TOKENIZER)  # a link that leads nowhere is told, and no missing file
    return Prompt(config, Tokenizer(args.model, config.vocab_size) if there else None, [], ids)


def read_tokens(path: Path, vocab: int) -> list[int]:
    """Return the token ids of a JSON file; ConfigError naming the file and the first bad one."""
    text = read_text(path, MAX_TEXT_BYTES, ConfigError)
    try:
        tokens = strict_json.parse_text(text)
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON ({error})") from error
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{path}: want a JSON list of at least one token id")
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab:
            raise ConfigError(f"{path}: entry {i} is {token!r:.40}, want a token id from 0 to {vocab - 1}")
    return tokens


class Prompts(NamedTuple):
    """What a file of prompts gives the model to read, one after the other."""

    config: Config
    tokenizer: Tokenizer
    entries: list["Entry"]


class Entry(NamedTuple):
    """One prompt of a file."""

    line: int  # of the file, from 1 on
    name: str | int | None  # its "id"
    segments: list[Segment]
    ids: list[int]


def read_prompts(args: argparse.Namespace, options: RunOptions) -> Prompts:
    """Read a file of prompts, all of it; a line that names the number of the first bad one, before any weight.

    Raises
    ------
    ConfigError, PromptError, CapacityError
        As `read_prompt`; CapacityError for a prompt that --max-context has no room for.
    """
    check_prompt_flags(args)
    config = checked_config(args.model, options)
    check_logprobs(args.logprobs, config)
    tokenizer = Tokenizer(args.model, config.vocab_size)
    entries = []
    for number, line in enumerate(read_text(args.prompts_file, MAX_TEXT_BYTES, PromptError).split("\n"), 1):
        if not line.strip():
            continue
        try:
            name, what = _fields(from_json(line))
            segments = _segments(what, args, config, tokenizer)
            entries.append(Entry(number, name, segments, tokenizer.encode(segments)))
        except PromptError as error:
            raise PromptError(f"{args.prompts_file}: line {number}: {error}") from None
        needed = len(entries[-1].ids) + args.max_new_tokens - 1
        if args.max_context is not None and needed > args.max_context:
            parts = f"{len(entries[-1].ids)} prompt and {args.max_new_tokens} new tokens"
            raise CapacityError(
                f"{args.prompts_file}: line {number}: {parts} need {needed}, --max-context is {args.max_context}"
            )
    if not entries:
        raise PromptError(f"{args.prompts_file}: holds no prompt")
    return Prompts(config, tokenizer, entries)


def _fields(value: object) -> tuple[str | int | None, object]:
    """The id of a line, and its prompt: text, or what `check_messages` takes."""
    if not isinstance(value, dict):
        return None, value
    rest = dict(value)
    name = rest.pop("id", None)
    if name is not None and type(name) not in {str, int}:
        raise PromptError(f"id is {shown(name)}; want a text or a whole number")
    if "prompt" not in rest:
        return name, rest
    if others := [key for key in rest if key != "prompt"]:
        raise PromptError(f"{quoted(others[0])} beside a prompt")
    return name, rest["prompt"]


def _segments(what: object, args: argparse.Namespace, config: Config, tokenizer: Tokenizer) -> list[Segment]:
    """The segments of one prompt of a file."""
    if isinstance(what, str):
        if not what:
            raise PromptError("the prompt is empty")
        if args.raw:
            return raw_text(what, config, tokenizer)
        messages = user_message(what)
    elif isinstance(what, dict | list):
        messages = check_messages(what)
    else:
        raise PromptError(f"{shown(what)}; want a text, messages, or an object of them")
    if args.raw:
        raise PromptError("messages, which are of the chat format, with --raw")
    return _chat(messages, args, config, "")


def prompt_segments(args: argparse.Namespace, config: Config, tokenizer: Tokenizer) -> list[Segment]:
    """Return the prompt of the text or messages that the flags give, as the model's family writes it."""
    if args.messages is not None:
        return _chat(load_messages(args.messages), args, config, f"{args.messages}: ")
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file, MAX_TEXT_BYTES, PromptError)
    if not text:
        raise PromptError("the prompt is empty")
    if args.raw:
        return [Text(text)] if args.load_state is not None else raw_text(text, config, tokenizer)
    segments = _chat(user_message(text), args, config, "")
    return segments if args.load_state is None else segments[1:]  # the saved state has its BOS already


def _chat(messages: list[Message], args: argparse.Namespace, config: Config, where: str) -> list[Segment]:
    """Messages in the chat format, up to where the model answers."""
    check_chat_format(config, args.model)
    asked = effort(args.effort, config)
    segments = encode_messages(messages, thinking=args.think, effort=asked, v41=is_v41(config))
    if [segment for segment in segments if isinstance(segment, Control)][-1] in (BOS, EOS):
        raise PromptError(f"{where}the last message asks for no answer, nothing is left to generate")
    return segments


def check_logprobs(count: int | None, config: Config) -> None:
    """Refuse more alternatives than there are tokens: ConfigError."""
    if count is not None and count > config.vocab_size:
        raise ConfigError(f"--logprobs {count}: the vocabulary has {config.vocab_size} tokens")


def check_prompts_file(args: argparse.Namespace) -> None:
    """Refuse flags that contradict a file of prompts, or that mean nothing without one: PromptError."""
    if args.prompts_file is None:
        if args.out is not None or args.resume:
            raise PromptError(
                f"{'--out' if args.out is not None else '--resume'}: means nothing without --prompts-file"
            )
        return
    if args.out is None:
        raise PromptError("--prompts-file: needs --out F.jsonl, where the answers go")
    if args.load_state is not None or args.save_state is not None:
        raise PromptError("--prompts-file: excludes --load-state and --save-state, which are of one prompt")


def check_prompt_flags(args: argparse.Namespace) -> None:
    """Refuse flags of a prompt that contradict each other: PromptError."""
    if args.effort is not None and not args.think:
        raise PromptError("--effort: means nothing without --think")
    if args.raw and (args.think or args.messages is not None):
        raise PromptError("--raw: excludes --think and --messages, which are parts of the chat format")
    if args.tokens is not None and (args.raw or args.think):
        raise PromptError("--tokens: excludes --raw and --think, which say how a text becomes tokens")
    if args.load_state is None:
        return
    if args.messages is not None or args.effort is not None:
        raise PromptError("--load-state: excludes --messages and --effort, which belong at the start of a conversation")
    if args.prompt is None and args.prompt_file is None and (args.raw or args.think):
        raise PromptError("--load-state: --raw and --think say how to encode a prompt, and there is none")


def effort(choice: str | None, config: Config) -> str:
    """Return the text that --effort asks for, "" for none; PromptError for what it cannot be of this model."""
    if choice is None:
        return ""
    revision, colon, level = choice.partition(":")
    if not colon:
        raise PromptError(f"--effort {choice}: want REVISION:LEVEL, for example preview:max")
    if is_v41(config) and revision != V41:
        raise PromptError(f"--effort {choice}: the model is a DeepSeek-V4.1, want {V41}:LEVEL")
    try:
        if is_v41(config):
            return effort_text_v41(int(level) if level.isascii() and level.isdigit() else level)
        return effort_text(revision, level)
    except PromptError as error:
        raise PromptError(f"--effort {choice}: {error}") from error
