"""`python -m scripts.memory_db`: documents read once and asked again and again, in any process: states as a database.

`ingest` reads a document and saves what is left of it, `ask` puts questions to such a state and never changes it,
`quantise` writes it in 8 or 4 bits, `merge` makes one state of two. Any way to remember will do for the first two; with
`--kv all=coda` a state has one size, however long the document. Answers go to stdout, the rest to stderr.
"""

import argparse
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom.model.architectures import config_from_file
from fathom.model.choices import CODED_BITS
from fathom.model.errors import ConfigError
from fathom.runtime.options import RunOptions
from fathom.runtime.output import write_json
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console, visible
from fathom.scripts.flags import (
    add_call,
    add_json,
    add_model,
    add_run_options,
    add_threads,
    add_variants,
    positive,
    run_options,
)
from fathom.scripts.parts.answers import prefill_progress
from fathom.scripts.paths import Tensors, Texts, Writes
from fathom.scripts.prompts import read_prompt

if TYPE_CHECKING:
    from fathom.runtime.memory_db import Memory


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.memory_db", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = _command(commands, "ingest", "read a document and save the state that it leaves")
    add_model(one)
    text = one.add_mutually_exclusive_group(required=True)
    text.add_argument("--document", action=Texts, dest="prompt_file", metavar="FILE", help="UTF-8 text, taken as it is")
    text.add_argument("--text", dest="prompt", help="the same on the command line")
    add_run_options(one)
    add_variants(one)
    one.set_defaults(
        raw=True, messages=None, tokens=None, load_state=None, think=False, effort=None
    )  # of `read_prompt`
    two = _command(commands, "ask", "continue a state with a question, as if the document had not ended")
    two.add_argument(
        "--state", action=Tensors, required=True, help="from ingest, quantise, merge or generate --save-state"
    )
    two.add_argument(
        "--question",
        action="append",
        required=True,
        metavar="TEXT",
        help="what comes after the document, as it is: a space or line end at its start is the user's matter; may come"
        " several times, each time after the document alone",
    )
    two.add_argument("--max-new-tokens", type=positive, default=32, help="stop after this number (default 32)")
    three = _command(commands, "quantise", "code the bounded caches of a state in 8 or 4 bits")
    three.add_argument("state", action=Tensors, metavar="STATE", help="with coda layers of a Llama-family model")
    three.add_argument("--bits", type=int, choices=CODED_BITS, required=True, help="of a number of a key or value")
    four = _command(commands, "merge", "put one bounded state behind another; what does not fit is lost")
    four.add_argument("states", action=Tensors, nargs=2, metavar="STATE", help="exact states of one model and settings")
    for each in (two, four):
        _add_saved_run(each)
    two.add_argument(
        "--basis", action=Tensors, metavar="FILE", help="that the state was made with, as in shard:basis=FILE"
    )
    for each in (one, two, four):
        add_threads(each)
    for each in (one, three, four):
        each.add_argument("--out", action=Writes, required=True, metavar="STATE", help="the state's file to write")
    for each in (one, two, three, four):
        add_json(each, "the report")
    return p


def _command(commands: Any, name: str, says: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    return made


def _add_saved_run(p: argparse.ArgumentParser) -> None:
    """Add what a run over a saved state must be told; the rest of its options are those of the state."""
    add_model(p)
    p.add_argument(
        "--coda-adapters", type=str, action=Tensors, metavar="FILE", help="those that the state was made with"
    )
    add_call(p)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    data = {"ingest": ingest, "ask": ask, "quantise": quantise, "merge": merged}[args.command](args)
    if args.json is not None:
        write_json(args.json, data)
    return 0


def ingest(args: argparse.Namespace) -> dict[str, Any]:
    """Read a document and save its state; returns the report."""
    from fathom.runtime.memory_db import Memory
    from fathom.runtime.process import set_process

    console, options = Console(stderr=True), run_options(args)
    tokens = read_prompt(args, options).ids
    with console.loading(args.model):
        memory = Memory.open(args.model, options, context=len(tokens))
    set_process(args.threads, memory.loaded)
    started = time.perf_counter()
    with prefill_progress(console, len(tokens)) as advance:
        memory.ingest(tokens, advance)
    seconds = time.perf_counter() - started
    memory.save(args.out)
    console.say(f"read {len(tokens)} tokens in {seconds:.2f} s, {len(tokens) / seconds:.1f} tokens/s")
    return _held(args.out, memory) | {"prefill_s": seconds}


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Continue the state with each question; returns the report."""
    from fathom.runtime.load import read_any_config
    from fathom.runtime.statefile import read_metadata, saved_position

    config = read_any_config(args.model, _options_of(args, args.state, args.basis))
    tokenizer = Tokenizer(args.model, config.vocab_size)
    questions = [tokenizer.encode([Text(question)], continued=True) for question in args.question]
    if not all(questions):
        raise ConfigError("--question: is empty")
    held = saved_position(args.state) + bool(read_metadata(args.state).get("pending"))
    memory = _load(args, args.state, args.basis, held + max(map(len, questions)) + args.max_new_tokens - 1)
    shown = visible if sys.stdout.isatty() else str  # a terminal gets no control characters, whatever the model says
    answers = []
    for question, tokens in zip(args.question, questions, strict=True):
        answer = memory.ask(
            tokens, max_new_tokens=args.max_new_tokens, tell=lambda piece: print(shown(piece), end="", flush=True)
        )
        print(flush=True)
        answers.append({"question": question, **answer._asdict()})
    form = f"quantised: keys and values in {memory.bits} bits, answers are not the exact state's"
    Console(stderr=True).say(f"{args.state}: {memory.tokens} tokens, {'exact' if memory.bits is None else form}")
    options = memory.options.to_json()
    return {"tokens": memory.tokens, "bits": memory.bits, "options": options, "answers": answers}


def quantise(args: argparse.Namespace) -> dict[str, Any]:
    """Write a state in fewer bits; returns the report."""
    from fathom.runtime.quantised_state import quantise_state

    sizes = quantise_state(args.state, args.bits, args.out)
    Console(stderr=True).say(
        f"{args.out}: keys and values in {args.bits} bits, {sizes.rows} -> {sizes.coded} bytes,"
        f" {sizes.rows / sizes.coded:.2f} times smaller; all of the state {sizes.before} -> {sizes.after},"
        f" {sizes.before / sizes.after:.2f} times",
    )
    return sizes._asdict() | {"bits": args.bits, "file_bytes": args.out.stat().st_size}


def merged(args: argparse.Namespace) -> dict[str, Any]:
    """Make one state of two; returns the report."""
    from fathom.runtime.merge import check_family

    check_family(config_from_file(args.model / "config.json"), str(args.states[0]))
    memory = _load(args, args.states[0], None, 1)
    other = memory.empty()
    other.restore(args.states[1])
    documents = [memory.tokens, other.tokens]
    kept = memory.merge(other)
    memory.save(args.out)
    Console(stderr=True).say(
        f"merged {documents[0]} and {documents[1]} tokens; over all layers"
        f" the rings keep {kept.ring_first} and {kept.ring_second} tokens, {kept.evicted} were offered to the banks;"
        f" exact banks keep {kept.exact_first} and {kept.exact_second} tokens and lose {kept.exact_lost};"
        f" summary banks keep {kept.summary_alone} averages as they were and make {kept.summary_pairs} of two each",
    )
    return _held(args.out, memory) | {"documents": documents, "kept": kept._asdict()}


def _load(args: argparse.Namespace, state: Path, basis: Path | None, context: int) -> "Memory":
    from fathom.runtime.memory_db import Memory
    from fathom.runtime.process import set_process

    with Console(stderr=True).loading(args.model):
        memory = Memory.load(
            state,
            args.model,
            adapters=args.coda_adapters,
            basis=basis,
            device=args.device,
            chunk=args.prefill_chunk,
            context=context,
        )
    set_process(args.threads, memory.loaded)
    return memory


def _options_of(args: argparse.Namespace, state: Path, basis: Path | None) -> RunOptions:
    """Options of the run that a state was made by."""
    from fathom.runtime.statefile import saved_options

    config = config_from_file(args.model / "config.json")
    return saved_options(state, config, args.device, args.prefill_chunk, args.coda_adapters, basis)


def _held(path: Path, memory: "Memory") -> dict[str, Any]:
    """What a saved state holds and takes, and what a saved full cache of as many tokens would hold; said too."""
    import torch

    from fathom.model.state import State
    from fathom.runtime.arithmetic import cache_formats
    from fathom.runtime.statefile import forms

    model = memory.loaded.model
    assert memory.state is not None, "it was saved"
    full = cache_formats(replace(memory.options, kv=()), model.config)
    # Shapes at a position do not depend on the room. On the meta device they would take torch's compiler, for seconds.
    whole = State(model.config, 1, 1, full, torch.device("cpu"))
    size = path.stat().st_size
    full_size = sum(prod(shape) * dtype.itemsize for shape, dtype in forms(whole, memory.tokens).values())
    Console(stderr=True).say(
        f"the state holds {memory.tokens} tokens in a file of {size} bytes; a full cache of them, saved,"
        f" takes {full_size}, {full_size / size:.2f} times as much",
    )
    return {
        "tokens": memory.tokens,
        "file_bytes": size,
        "cache_bytes": memory.state.nbytes(),
        "banks": memory.banks(),
        "full_cache_bytes": full_size,
        "options": memory.options.to_json(),
        "weights_fingerprint": memory.loaded.weights_fingerprint,
    }


if __name__ == "__main__":
    sys.exit(run_alone(main))
