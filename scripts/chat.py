"""`python -m scripts.chat`: a conversation over one loaded model. Answers to stdout as they come, the rest to stderr.

Each line of the input is a message, from a terminal or a pipe. A line that begins with / is a command, and /help lists
them; a message that begins with / is typed with one more. Ctrl-C ends an answer and, the second time, at the prompt,
the chat (on several ranks the first one does); so does the end of the input.
"""

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from fathom.model.architectures import Config
from fathom.model.errors import CapacityError, StateError
from fathom.runtime.errors import PromptError
from fathom.runtime.options import checked_config, usual
from fathom.runtime.output import write_json
from fathom.runtime.text.encoding import check_chat_format, encode_messages, is_v41
from fathom.runtime.text.messages import user_message
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.console import Console
from fathom.scripts.flags import (
    add_draft,
    add_graph,
    add_json,
    add_model,
    add_op_set,
    add_prompt_format,
    add_rank_timeout,
    add_run_options,
    add_sampling,
    add_threads,
    add_variants,
    check_sampling,
    positions,
    positive,
    run_options,
)
from fathom.scripts.parts.answers import prefill_progress, print_text, summary_table
from fathom.scripts.parts.chat_input import RESET, SAVE, Entry, User
from fathom.scripts.prompts import check_prompt_flags, effort

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import Group
    from fathom.runtime.conversation import Conversation
    from fathom.runtime.generate import Generation
    from fathom.runtime.group.watchdog import Watch


CONTEXT: Final = 8192  # positions, where the model has so many


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.chat", description=__doc__)
    add_model(p)
    p.add_argument("--system", default="", metavar="TEXT", help="what the conversation opens with")
    add_prompt_format(p)
    add_sampling(p)
    p.add_argument("--max-new-tokens", type=positive, help="of an answer (default: as many as the context holds)")
    p.add_argument(
        "--max-context", type=positions, help=f"positions to hold, as 128K (default {CONTEXT}, or the model's)"
    )
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_draft(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    add_json(p, "turns, tokens and report")
    p.set_defaults(messages=None, tokens=None, load_state=None)  # flags of a prompt that there are none of
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    check_sampling(args)
    check_prompt_flags(args)
    if args.raw and args.system:
        raise PromptError("--raw: excludes --system, which is a part of the chat format")
    config = checked_config(args.model, run_options(args))
    tokenizer = Tokenizer(args.model, config.vocab_size)
    if not args.raw:  # before the weights: what the format needs should be there
        check_chat_format(config, args.model)
        asked = effort(args.effort, config)
        tokenizer.encode(encode_messages(user_message("?"), thinking=args.think, effort=asked, v41=is_v41(config)))
    return run(args, config, tokenizer, watch)


def run(args: argparse.Namespace, config: Config, tokenizer: Tokenizer, watch: "Watch | None") -> int:
    """Talk, as one of several ranks where there is a watch; returns the exit status."""
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        return _chat(args, config, tokenizer, watch, group)


def _chat(args: argparse.Namespace, config: Config, tokenizer: Tokenizer, watch: "Watch | None", group: "Group") -> int:
    from fathom.runtime.conversation import Conversation, Format
    from fathom.runtime.decoding import check_graph
    from fathom.runtime.drafting import check_draft
    from fathom.runtime.group.processes import watched_load_any
    from fathom.runtime.op_sets import op_set
    from fathom.runtime.process import set_process
    from fathom.runtime.report import report

    options, form = run_options(args), Format(args.raw, args.think, effort(args.effort, config), args.system)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    ops = op_set(args.ops or usual(options.device), options, config)
    if args.graph:
        check_graph(config, options.device, ops)
    check_draft(config, options, ops, graph=args.graph)
    context = args.max_context or min(CONTEXT, config.max_position_embeddings)
    console = Console(stderr=True)
    with console.loading(args.model):
        loaded = watched_load_any(watch, args.model, options, ops, group, context=context)
    set_process(args.threads, loaded)
    talk = Conversation(loaded, options, tokenizer, form, context, graph=args.graph)
    user = User(args, console, watch)
    chat = Chat(args, talk, console, user)
    console.say(f"{args.model}: a context of {context:,} tokens; /help lists the commands")
    for entry in user.entries():
        chat.obey(entry)
    data: dict[str, Any] = {}
    if chat.runs and talk.state is not None and talk.by is not None:
        data = report(loaded, options, talk.state, chat.runs, talk.by)
        console.print(summary_table(data))
    if args.json is not None and group.rank == 0:
        write_json(args.json, data | {"turns": talk.turns, "tokens": talk.tokens, "sampling": asdict(chat.sampling)})
    return 0


class Chat:
    """What is done with what the user says; every rank does the same."""

    def __init__(self, args: argparse.Namespace, talk: "Conversation", console: Console, user: User) -> None:
        from fathom.runtime.sampling import Sampling

        self.args, self.talk, self.console, self.user = args, talk, console, user
        self.sampling = Sampling(args.temperature, args.top_p, args.seed)
        self.runs: list[Generation] = []

    def obey(self, entry: Entry) -> None:
        """Answer a message or carry out a command; a line, and nothing else, where that cannot be."""
        try:
            self._carry_out(entry)
        except CapacityError as error:
            self.console.say(f"{error}; /{SAVE} it for a chat with a larger --max-context, or /{RESET}")
        except (StateError, PromptError) as error:
            self.console.say(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            self.console.say(f"{error.filename}: {error.strerror}")
        except KeyboardInterrupt:
            if self.user.watch is not None:
                raise
            self.user.interrupts += 1
            self.console.say("interrupted")

    def _carry_out(self, entry: Entry) -> None:
        match entry.kind:
            case "say":
                self._answer(entry.text)
            case "save":
                self.talk.save(Path(entry.text))
                self.console.say(f"{entry.text}: {len(self.talk.tokens):,} tokens saved")
            case "load":
                self.talk.load(Path(entry.text))
                self.console.say(f"{entry.text}: {len(self.talk.tokens):,} tokens loaded")
            case "reset":
                self.talk.reset()
                self.console.say("the conversation is forgotten")

    def _answer(self, text: str) -> None:
        from fathom.runtime.conversation import Stopped
        from fathom.runtime.generate import Generation

        record = Generation()
        with _interruptible() as interrupted:

            def advance(count: int) -> None:
                shown(count)
                if interrupted():
                    raise Stopped

            limit = self.args.max_new_tokens
            reply = self.talk.reply(text, sampling=self.sampling, record=record, limit=limit, progress=advance)
            try:
                with prefill_progress(self.console, reply.to_read) as shown, contextlib.closing(reply.tokens) as tokens:
                    print_text(takewhile(lambda _: not interrupted(), tokens), StreamDecoder(self.talk.tokenizer))
            except Stopped:
                self.console.say("interrupted: the message is taken back")
            finally:
                if record.tokens:
                    self.runs.append(record)
            if interrupted():
                self.user.interrupts += 1
                record.ended = "interrupt"
        if record.tokens:
            self.console.say(self._told(record))

    def _told(self, record: "Generation") -> str:
        """Say how an answer went."""
        ended = "the end of the context" if record.ended == "limit" and self.talk.full else record.ended
        taken = min(len(self.talk.tokens), self.talk.max_context)
        return (
            f"({record.prompt:,} tokens read in {record.prefill_s:.2f} s, {len(record.tokens):,} written in"
            f" {record.decode_s:.2f} s, ended by {ended}; {taken:,} of {self.talk.max_context:,} in the context)"
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Take Ctrl-C as a wish, which is asked for between calls of the model; the second one breaks into a call."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        del number, frame
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # of several ranks, or ignored: as it was set
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
