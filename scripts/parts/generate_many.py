"""What `scripts.generate` does with a file of prompts: one model, and for each prompt a state of its own.

An answer is written as soon as it is there: a run that is broken off has lost nothing but the answer under way. With
--resume the next one goes on behind it, provided that its prompts and settings are the same.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import torch
from rich.progress import track

from fathom.model.checkpoint import strict_json
from fathom.model.errors import ConfigError
from fathom.model.files import read_bounded
from fathom.model.ranks.ranks import Group
from fathom.model.state import State
from fathom.runtime.decoding import Decoding, check_graph, decoding
from fathom.runtime.drafting import check_draft, drafting
from fathom.runtime.generate import Generation, generate
from fathom.runtime.group.processes import connected, leads, watched_load_any
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import AnyLoaded
from fathom.runtime.memory import new_state
from fathom.runtime.op_sets import op_set
from fathom.runtime.options import RunOptions, usual
from fathom.runtime.output import adding_lines, write_json
from fathom.runtime.plan.experts import Work
from fathom.runtime.process import set_process
from fathom.runtime.report import report
from fathom.runtime.sampling import Sampling
from fathom.runtime.text.encoding import is_v41
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer
from fathom.scripts.console import Console
from fathom.scripts.flags import run_options
from fathom.scripts.parts.answers import likelihoods, message, summary_table
from fathom.scripts.prompts import Entry, Prompts

MAX_ANSWERS_BYTES: Final = 1 << 30  # of a file of answers that is to be gone on with


class Done(NamedTuple):
    """What an earlier run has written."""

    answers: Sequence[dict[str, Any]] = ()
    nbytes: int = 0  # of whole lines


def run_many(args: argparse.Namespace, prompts: Prompts, watch: Watch | None) -> int:
    """Run all prompts, as one of several ranks where there is a watch; returns the exit status."""
    done = _done(args, prompts.entries) if leads(watch) else Done()
    with connected(watch, args.device, args.rank_timeout) as group:
        return _run(args, prompts, done, watch, group)


def _run(args: argparse.Namespace, prompts: Prompts, done: Done, watch: Watch | None, group: Group) -> int:
    options, sampling = run_options(args), Sampling(args.temperature, args.top_p, args.seed)
    config, tokenizer, entries = prompts
    ops = op_set(args.ops or usual(options.device), options, config)
    if args.graph and args.max_new_tokens > 1:
        check_graph(config, options.device, ops)
    check_draft(config, options, ops, graph=args.graph)
    most = max(len(entry.ids) for entry in entries) + args.max_new_tokens - 1
    console = Console(stderr=True)
    with console.loading(args.model):
        work = Work(max(len(entry.ids) for entry in entries), args.max_new_tokens)
        context = args.max_context or most
        loaded = watched_load_any(watch, args.model, options, ops, group, context=context, work=work)
    set_process(args.threads, loaded)
    mark = _mark(args, loaded, options, sampling)
    for entry, answer in zip(entries, done.answers, strict=False):
        if answer["run"] != mark:
            raise ConfigError(f"{args.out}: the answer to line {entry.line} is of another model or other settings")
    model, runs = loaded.model, list[Generation]()
    # the first rank has read the file of answers
    answered = int(model.arithmetic.ranks.of_first(torch.tensor([len(done.answers)], device=model.device)))
    if answered:
        console.say(f"{args.out}: goes on behind {answered} answers")
    state, by = None, None
    with adding_lines(args.out if group.rank == 0 else None, done.nbytes) as add:
        left = entries[answered:]
        for entry in track(left, "prompts", console=console, transient=True, disable=not console.is_terminal):
            record, state, by = Generation(), None, None  # the state before is let go
            context = args.max_context or len(entry.ids) + args.max_new_tokens - 1
            state = new_state(model, context, options.prefill_chunk, len(entry.ids), options.draft_tokens)
            by = decoding(model, state, graph=args.graph, steps=args.max_new_tokens - 1, head=loaded.head)
            text = _text(args, loaded, (tokenizer, sampling), entry, state, by, record)
            answer = _answer(args, tokenizer, entry, record, v41=is_v41(loaded.model.config))
            add(json.dumps(answer | {"text": text, "run": mark}, ensure_ascii=False))
            runs.append(record)
    if state is not None and by is not None:
        data = report(loaded, options, state, runs, by)
        console.print(summary_table(data))
        if args.json is not None and group.rank == 0:
            write_json(args.json, data | {"prompts": len(runs), "run": mark, "sampling": asdict(sampling)})
    console.say(f"{args.out}: {len(entries)} answers")
    return 0


def _text(
    args: argparse.Namespace,
    loaded: AnyLoaded,
    how: tuple[Tokenizer, Sampling],
    entry: Entry,
    state: State,
    by: Decoding,
    record: Generation,
) -> str:
    """Run one prompt and return the text of its answer."""
    tokenizer, sampling = how
    decoder = StreamDecoder(tokenizer)
    tokens = generate(
        loaded.model,
        state,
        entry.ids,
        eos=loaded.model.config.eos_token_ids,
        limit=args.max_new_tokens,
        sampling=sampling,
        progress=lambda _: None,
        record=record,
        decode=by.step,
        drafting=drafting(run_options(args), loaded.head),
        alternatives=args.logprobs,
    )
    return "".join(map(decoder.push, tokens)) + decoder.finish()


def _answer(
    args: argparse.Namespace, tokenizer: Tokenizer, entry: Entry, record: Generation, *, v41: bool
) -> dict[str, Any]:
    """What is written of one answer, beside its text."""
    answer: dict[str, Any] = {"line": entry.line}
    if entry.name is not None:
        answer["id"] = entry.name
    answer |= {"ended": record.ended, "tokens": record.tokens, "prompt": entry.ids}
    answer |= {"prefill_s": record.prefill_s, "decode_s": record.decode_s}
    if not args.raw:
        answer["message"] = message(tokenizer, record.tokens, entry.segments, v41=v41)
    if args.logprobs is not None:
        answer["logprobs"] = likelihoods(tokenizer, record)
    return answer


def _mark(args: argparse.Namespace, loaded: AnyLoaded, options: RunOptions, sampling: Sampling) -> str:
    """What tells runs with other models or settings apart, as 16 hex digits."""
    told = {
        "config": loaded.model.config.fingerprint,
        "weights": loaded.weights_fingerprint,
        "options": options.to_json(),
        "ops": loaded.model.arithmetic.ops.name,
        "sampling": asdict(sampling),
        "flags": [args.max_new_tokens, args.logprobs, args.raw],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _done(args: argparse.Namespace, entries: Sequence[Entry]) -> Done:
    """What an earlier run has written, but for a line that it had only begun.

    ConfigError for a file that is there without --resume, or that answers other prompts.
    """
    if not args.out.exists():
        return Done()
    data = read_bounded(args.out, MAX_ANSWERS_BYTES, ConfigError)
    if data and not args.resume:
        raise ConfigError(f"--out {args.out}: is there; --resume goes on with it")
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    if len(lines) > len(entries):
        raise ConfigError(f"{args.out}: has {len(lines)} answers, {args.prompts_file} has {len(entries)} prompts")
    answers = []
    for number, (line, entry) in enumerate(zip(lines, entries, strict=False), 1):
        try:
            answer = strict_json.parse(line)
        except ValueError as error:
            raise ConfigError(f"{args.out}: line {number}: no JSON ({error})") from None
        if not isinstance(answer, dict) or answer.get("prompt") != entry.ids or "run" not in answer:
            raise ConfigError(f"{args.out}: line {number}: is no answer to line {entry.line} of {args.prompts_file}")
        answers.append(answer)
    return Done(answers, len(whole))
