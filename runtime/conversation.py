"""A conversation over one loaded model: turns, the one token sequence that they are, and the state that holds it.

In the chat format the sequence of a turn is what `runtime.text.encoding` makes of all turns so far, to the token, as if
they came in a file of messages. The state goes on with it where what it holds is its beginning, and then only the new
tokens are run. It is not always: V4's format leaves the reasoning of earlier turns out and writes `</think>` where it
asked for `<think>`, so that with thinking every turn changes the end of the one before it. A copy of the caches is kept
from there, and the state goes back to it. An answer may also be spelled in other tokens than its text is encoded to;
where no copy helps, the conversation is read again from its start.

Raw text has no such form: there the sequence is what was read and what was chosen, one after the other.
"""

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fathom.model.checkpoint import strict_json
from fathom.model.errors import CapacityError, StateError
from fathom.runtime.decoding import Decoding, decoding
from fathom.runtime.drafting import Drafting, drafting
from fathom.runtime.generate import Generation, generate, prefill
from fathom.runtime.load import AnyLoaded
from fathom.runtime.memory import machine_memory, new_state
from fathom.runtime.options import RunOptions
from fathom.runtime.sampling import Sampling
from fathom.runtime.statefile import (
    Snapshot,
    check_context,
    check_forms,
    checked_file,
    fill,
    forms,
    read_saved,
    save_state,
    snapshot,
)
from fathom.runtime.text.encoding import check_chat_format, encode_messages, is_v41, raw_text
from fathom.runtime.text.messages import check_messages
from fathom.runtime.text.segments import THINK_END, Text
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from fathom.model.state import State

Turn = dict[str, Any]  # a message: role, content, and of an answer with thinking its reasoning_content


@dataclass(frozen=True, slots=True)
class Format:
    """How turns become tokens."""

    raw: bool = False  # as they are, without the chat format
    thinking: bool = False  # of the chat format: whether an answer begins with reasoning
    effort: str = ""  # what `effort_text` gives
    system: str = ""  # what the conversation opens with; "": nothing


class Stopped(Exception):
    """What `progress` may raise to end a reply while its prompt is read, between two calls of the model."""


class _Copy(NamedTuple):
    """The state as it was when it held these tokens."""

    tokens: list[int]
    snapshot: Snapshot


class Reply(NamedTuple):
    """An answer that is under way."""

    to_read: int  # tokens that are run before the first choice
    tokens: Generator[int]  # to be closed by whoever wants no more of them


class Conversation:
    """Turns of one conversation; on several ranks all of them must do the same.

    Parameters
    ----------
    loaded
        The model.
    options
        Of the run that it was loaded for.
    tokenizer
        Of the same checkpoint.
    form
        PromptError for a chat format that the model's family has none of here.
    max_context
        Positions that the state holds.
    graph
        Whether tokens are decoded by a CUDA graph, see `runtime.decoding.decoding`.

    """

    def __init__(
        self,
        loaded: AnyLoaded,
        options: RunOptions,
        tokenizer: Tokenizer,
        form: Format,
        max_context: int,
        *,
        graph: bool | None = None,
    ) -> None:
        if not form.raw:
            check_chat_format(loaded.model.config, loaded.directory)
        self.loaded, self.options, self.tokenizer, self.form = loaded, options, tokenizer, form
        self.max_context, self.graph = max_context, graph
        self.state: State | None = None
        self.by: Decoding | None = None
        self.drafting: Drafting | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew: no turn but the system's, and an empty state."""
        self.turns: list[Turn] = [{"role": "system", "content": self.form.system}] if self.form.system else []
        self.tokens: list[int] = []  # what the turns have become, the last chosen token included
        self.held: list[int] = []  # what the state holds, of them and of a message that was taken back
        self.prompt: int | None = None  # tokens of the first message, on which some caches depend
        self._copy: _Copy | None = None
        self._drop()

    @property
    def full(self) -> bool:
        """Whether an answer has ended because the context has."""
        return len(self.tokens) > self.max_context

    def reply(
        self,
        text: str,
        *,
        sampling: Sampling,
        record: Generation,
        limit: int | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Reply:
        """Take a message, and yield the tokens of the answer as `generate` does.

        Whoever stops taking them ends the answer there, and what came is the turn. A reply that ends before its first
        token, by `Stopped` or an error, leaves no turn, nor does one that is refused.

        Parameters
        ----------
        text
            The user's message.
        sampling, record
            As of `generate`; `record.prompt` counts the tokens that were run before the first choice.
        limit
            Tokens of the answer at most; None: as many as the context holds.
        progress
            Called with the number of tokens that each call of the prompt held.

        Raises
        ------
        PromptError
            A message that cannot be encoded.
        CapacityError
            A message that the context has no room for.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        tokens = self._encoded(turns, text)
        if len(tokens) > self.max_context:
            raise CapacityError(
                f"the context of {self.max_context} tokens has no room for this message: with it the conversation has"
                f" {len(tokens)}"
            )
        room = self.max_context - len(tokens) + 1  # the last token chosen is not run
        new = self._caught_up(tokens)
        return Reply(len(new), self._reply(turns, tokens, new, min(room, limit or room), sampling, record, progress))

    def save(self, path: Path) -> None:
        """Write state and turns to one file, as `save_state`, which `generate --load-state` takes too.

        StateError where nothing was said yet, OSError naming the file where it cannot be written.
        """
        if self.state is None:
            raise StateError("nothing to save: no message was read yet, or not since the last one was broken off")
        common = next((i for i, (a, b) in enumerate(zip(self.held, self.tokens, strict=False)) if a != b), None)
        common = min(len(self.held), len(self.tokens)) if common is None else common
        beyond = self.held[common:]
        pending = self.tokens[len(self.held)] if not beyond and len(self.tokens) > len(self.held) else None
        told = {"raw": self.form.raw, "turns": self.turns, "tokens": self.tokens, "beyond": beyond}
        save_state(path, self.state, self.loaded, pending, json.dumps(told, ensure_ascii=False))

    def load(self, path: Path) -> None:
        """Take over a conversation that `save` wrote, in place of this one.

        Raises
        ------
        StateError
            With one line naming the file: it is damaged, of another model or other settings, has no conversation, or
            one of the other format, or is longer than the context. This conversation is as it was then; only of a file
            that was tampered with the state is gone, and is read again with the next message.
        """
        saved = read_saved(path, self.loaded)
        turns, tokens, held = self._parsed(path, saved.metadata.get("conversation"), saved.position)
        check_context(path, saved, self.max_context)
        with checked_file(path) as (tensors, _):
            self._make(saved.prompt)
            assert self.state is not None, "just made"
            try:
                check_forms(path, tensors.forms, forms(self.state, saved.position))
                fill(path, self.state, saved, tensors)
            except StateError:
                self._drop()
                raise
        self.turns, self.tokens, self.held = turns, tokens, held
        self.prompt, self._copy = saved.prompt, None

    # ---- the sequence

    def _encoded(self, turns: Sequence[Turn], text: str) -> list[int]:
        """The whole sequence up to where the model is to answer `text`, the last of `turns`."""
        if not self.form.raw:
            messages = check_messages(list(turns))
            config, form = self.loaded.model.config, self.form
            segments = encode_messages(messages, thinking=form.thinking, effort=form.effort, v41=is_v41(config))
            return self.tokenizer.encode(segments)
        if self.tokens:
            return [*self.tokens, *self.tokenizer.encode([Text(text)], continued=True)]
        return self.tokenizer.encode(raw_text(text, self.loaded.model.config, self.tokenizer))

    def _answer(self, chosen: Sequence[int]) -> Turn:
        """The turn that chosen tokens are."""
        said = list(chosen[:-1] if chosen[-1] in self.loaded.model.config.eos_token_ids else chosen)
        turn: Turn = {"role": "assistant"}
        if self.form.thinking:
            end = self.tokenizer.control_id(THINK_END.name)
            at = said.index(end) if end in said else len(said)
            turn["reasoning_content"] = self._text(said[:at])
            said = said[at + 1 :]
        return turn | {"content": self._text(said)}

    def _text(self, tokens: Sequence[int]) -> str:
        decoder = StreamDecoder(self.tokenizer)
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    # ---- the state

    def _reply(
        self,
        turns: list[Turn],
        tokens: list[int],
        new: list[int],
        limit: int,
        sampling: Sampling,
        record: Generation,
        progress: Callable[[int], None],
    ) -> Generator[int]:
        assert self.state is not None, "just caught up"
        assert self.by is not None, "of the state"
        model, state = self.loaded.model, self.state
        try:
            if self.form.thinking:  # the next turn writes another token in place of the last one
                self._read(new[:-1], record, progress)
                self._copy = _Copy(tokens[:-1], snapshot(state))
                new = new[-1:]
            yield from generate(
                model,
                state,
                new,
                eos=model.config.eos_token_ids,
                limit=limit,
                sampling=sampling,
                progress=progress,
                record=record,
                decode=self.by.step,
                drafting=self.drafting,
                before=tokens[: state.position],
            )
        except (Stopped, GeneratorExit):  # between two calls
            raise
        except BaseException:  # in a call, after which some layers are further than others
            self._drop()
            raise
        finally:
            if self.state is not None:
                self.held = [*tokens, *record.tokens][: state.position]
            if record.tokens:
                self.turns, self.tokens = [*turns, self._answer(record.tokens)], [*tokens, *record.tokens]
            elif not self.tokens:  # the next message is the first one then, and may be of another length
                self._drop()

    def _read(self, tokens: Sequence[int], record: Generation, progress: Callable[[int], None]) -> None:
        """Run tokens of the prompt that are not its last."""
        if not tokens:
            return
        assert self.state is not None, "caught up"
        started = time.perf_counter()
        with nullcontext() if self.drafting is None else self.drafting.listening(self.loaded.model):
            prefill(self.loaded.model, self.state, tokens, progress)
        record.prompt, record.prefill_s = len(tokens), time.perf_counter() - started

    def _caught_up(self, tokens: list[int]) -> list[int]:
        """Bring the state to hold a beginning of `tokens`, as much as there is, and return the rest."""
        if self.state is None or not _begins(tokens, self.held):
            copy = self._copy if self._copy is not None and _begins(tokens, self._copy.tokens) else None
            first = len(tokens) if self.prompt is None or not self.tokens else self.prompt
            self._make(first)
            assert self.state is not None, "just made"
            if copy is not None:
                copy.snapshot.restore(self.state)
                self.held = copy.tokens
        return tokens[len(self.held) :]

    def _make(self, prompt: int | None) -> None:
        """Make an empty state in place of what there is: never two at once."""
        self._drop()
        self.prompt = prompt
        rewind = self.options.draft_tokens
        self.state = new_state(self.loaded.model, self.max_context, self.options.prefill_chunk, prompt, rewind)
        self.drafting = drafting(self.options, self.loaded.head)
        if self.form.thinking:
            size, there = sum(self.state.nbytes().values()), machine_memory(torch.device("cpu"))
            if size * (2 if self.options.device == "cpu" else 1) > there:
                self._drop()
                raise CapacityError(
                    f"thinking keeps a copy of the caches, {size} bytes, in the host's memory of {there}"
                )
        self.by = decoding(self.loaded.model, self.state, graph=self.graph, steps=1, head=self.loaded.head)

    def _drop(self) -> None:
        self.state = self.by = None
        self.held = []

    # ---- files

    def _parsed(self, path: Path, text: str | None, position: int) -> tuple[list[Turn], list[int], list[int]]:
        """Turns, tokens, and what the state holds, of a file's conversation; StateError where it is none."""
        if text is None:
            raise StateError(f"{path}: holds no conversation, but the state of another command")
        try:
            told = strict_json.parse_text(text)
            raw, turns, tokens, beyond = (told[name] for name in ("raw", "turns", "tokens", "beyond"))
            check_messages(turns)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path}: its conversation cannot be read ({error})") from None
        vocabulary = range(self.loaded.model.config.vocab_size)
        for ids in (tokens, beyond):
            if not isinstance(ids, list) or not all(type(id_) is int and id_ in vocabulary for id_ in ids):
                raise StateError(f"{path}: its conversation has tokens that the model has not")
        held = [*tokens[: max(0, position - len(beyond))], *beyond]
        if len(held) != position:
            raise StateError(f"{path}: its conversation has {len(held)} tokens where its state has {position}")
        if raw is not self.form.raw:
            kinds = ("in the chat format", "raw text")
            raise StateError(f"{path}: a conversation {kinds[raw is True]}, this one is {kinds[self.form.raw]}")
        return turns, tokens, held


def _begins(tokens: Sequence[int], held: Sequence[int]) -> bool:
    """Whether `tokens` begin with what is held, and go on after it."""
    return len(held) < len(tokens) and list(tokens[: len(held)]) == list(held)
