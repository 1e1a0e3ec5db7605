"""`python -m scripts.memory_db`: documents read once and asked again and again, in any process: states as a database.

`ingest` reads a document and saves what is left of it, `ask` puts questions to such a state and never changes it,
`quantise` writes it in 8 or 4 bits, `merge` makes one state of two. Any way to remember will do for the first two; with
`--kv all=coda` a state has one size, however long the document. Answers go to stdout, the rest to stderr.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from model.architectures import config_from_file
from model.errors import ConfigError
from model.state import State
from runtime.generate import Generation, generate, prefill
from runtime.load import DEMO, AnyLoaded, load_any, read_any_config
from runtime.memory import new_state
from runtime.merge import check_family, merge, mergeable
from runtime.options import RunOptions
from runtime.quantised_state import WIDTHS, coded_bits, load_any_state, quantise_state, read_any_saved
from runtime.sampling import Sampling
from runtime.segments import Text
from runtime.statefile import (
    Saved,
    forms,
    load_state,
    read_metadata,
    read_saved,
    save_state,
    saved_options,
    saved_position,
)
from runtime.tokenizer import StreamDecoder, Tokenizer
from scripts.cli import run_alone
from scripts.flags import add_run_options, add_variants, positive, run_options, writable
from scripts.generate import prefill_progress, print_text
from scripts.prompts import prompt_segments

MODEL = "checkpoint directory (default: the demo checkpoint)"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.memory_db", description=__doc__)
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    one = _command(commands, "ingest", ingest, "read a document and save the state that it leaves")
    one.add_argument("--model", type=Path, default=DEMO, help=MODEL)
    text = one.add_mutually_exclusive_group(required=True)
    text.add_argument("--document", type=Path, dest="prompt_file", metavar="FILE", help="UTF-8 text, taken as it is")
    text.add_argument("--text", dest="prompt", help="the same on the command line")
    add_run_options(one)
    add_variants(one)
    one.set_defaults(raw=True, messages=None, load_state=None)  # of `prompt_segments`
    two = _command(commands, "ask", ask, "continue a state with a question, as if the document had not ended")
    two.add_argument("--state", type=Path, required=True, help="from ingest, quantise, merge or generate --save-state")
    two.add_argument(
        "--question",
        action="append",
        required=True,
        metavar="TEXT",
        help="what comes after the document, as it is: a space or line end at its start is the user's matter; may come"
        " several times, each time after the document alone",
    )
    two.add_argument("--max-new-tokens", type=positive, default=32, help="stop after so many (default 32)")
    three = _command(commands, "quantise", quantise, "code the bounded caches of a state in 8 or 4 bits")
    three.add_argument("state", type=Path, metavar="STATE", help="with coda layers of a Llama-family model")
    three.add_argument("--bits", type=int, choices=WIDTHS, required=True, help="of a number of a key or value")
    four = _command(commands, "merge", merged, "put one bounded state behind another; what does not fit is lost")
    four.add_argument("states", type=Path, nargs=2, metavar="STATE", help="exact states of one model and settings")
    for each in (two, four):
        _add_saved_run(each)
    two.add_argument("--basis", type=Path, metavar="FILE", help="that the state was made with, as in shard:basis=FILE")
    for each in (one, three, four):
        each.add_argument("--out", type=Path, required=True, metavar="STATE", help="the state's file to write")
    for each in (one, two, three, four):
        each.add_argument("--json", type=Path, help="write the report there")
    return p


def _command(commands: Any, name: str, run: Any, says: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    made.set_defaults(run=run)
    return made


def _add_saved_run(p: argparse.ArgumentParser) -> None:
    """Add what a run over a saved state must be told; the rest of its options are those of the state."""
    default = RunOptions()
    p.add_argument("--model", type=Path, default=DEMO, help=MODEL)
    p.add_argument("--coda-adapters", metavar="FILE", help="those that the state was made with")
    p.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help="where to run (default cpu)")
    p.add_argument(
        "--prefill-chunk", type=positive, default=default.prefill_chunk, help="tokens per call (default 512)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    _check_paths(args)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    data = args.run(args, Console(stderr=True))
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def ingest(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Read a document and save its state; returns the report."""
    options = run_options(args)
    config = read_any_config(args.model, options)
    tokenizer = Tokenizer(args.model, config.vocab_size)
    tokens = tokenizer.encode(prompt_segments(args, config, tokenizer))
    loaded = _load(console, args.model, options, len(tokens))
    state = new_state(loaded.model, len(tokens), options.prefill_chunk, len(tokens))
    started = time.perf_counter()
    with prefill_progress(console, len(tokens)) as advance:
        prefill(loaded.model, state, tokens, advance)
    seconds = time.perf_counter() - started
    save_state(args.out, state, loaded, None)
    data = _held(args.out, loaded, options, state) | {"prefill_s": seconds}
    console.print(
        f"read {len(tokens)} tokens in {seconds:.2f} s, {len(tokens) / seconds:.1f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    _print_held(console, data)
    return data


def ask(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Continue the state with each question; returns the report."""
    options = _options_of(args, args.state, args.basis)
    config = read_any_config(args.model, options)
    tokenizer = Tokenizer(args.model, config.vocab_size)
    questions = [tokenizer.encode([Text(question)], continued=True) for question in args.question]
    if not all(questions):
        raise ConfigError("--question: is empty")
    held = saved_position(args.state) + bool(read_metadata(args.state).get("pending"))
    loaded = _load(console, args.model, options, held + max(map(len, questions)) + args.max_new_tokens - 1)
    saved, bits = read_any_saved(args.state, loaded), coded_bits(args.state)
    answers = []
    for question, tokens in zip(args.question, questions, strict=True):
        answer = _answer(args, loaded, saved, tokens, StreamDecoder(tokenizer))
        answers.append({"question": question, **answer})
    form = "exact" if bits is None else f"quantised: keys and values in {bits} bits, answers are not the exact state's"
    console.print(f"{args.state}: {saved.position} tokens, {form}", highlight=False, soft_wrap=True)
    return {"tokens": saved.position, "bits": bits, "options": options.to_json(), "answers": answers}


def _answer(
    args: argparse.Namespace, loaded: AnyLoaded, saved: Saved, question: list[int], decoder: StreamDecoder
) -> dict[str, Any]:
    """Load the state, run the question, print what follows."""
    tokens = [*([] if saved.pending is None else [saved.pending]), *question]
    context = saved.position + len(tokens) + args.max_new_tokens - 1  # the last new token is not run
    state = new_state(loaded.model, context, args.prefill_chunk, saved.prompt)
    load_any_state(args.state, state, loaded)
    record = Generation()
    stream = generate(
        loaded.model,
        state,
        tokens,
        eos=loaded.model.config.eos_token_ids,
        limit=args.max_new_tokens,
        sampling=Sampling(),
        progress=lambda _: None,
        record=record,
    )
    return {"text": print_text(stream, decoder), "prompt": tokens, "tokens": record.tokens, "ended": record.ended}


def quantise(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write a state in fewer bits; returns the report."""
    sizes = quantise_state(args.state, args.bits, args.out)
    console.print(
        f"{args.out}: keys and values in {args.bits} bits, {sizes.rows} -> {sizes.coded} bytes,"
        f" {sizes.rows / sizes.coded:.2f} times smaller; all of the state {sizes.before} -> {sizes.after},"
        f" {sizes.before / sizes.after:.2f} times",
        highlight=False,
        soft_wrap=True,
    )
    return sizes._asdict() | {"bits": args.bits, "file_bytes": args.out.stat().st_size}


def merged(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Make one state of two; returns the report."""
    check_family(config_from_file(args.model / "config.json"), str(args.states[0]))
    options = _options_of(args, args.states[0])
    read_any_config(args.model, options)
    loaded = mergeable(_load(console, args.model, options, 1), str(args.states[0]))
    saved = [read_saved(path, loaded) for path in args.states]
    for path, one in zip(args.states, saved, strict=True):
        if one.pending is not None:
            raise ConfigError(f"{path}: an answer is under way, one token is still to be run; merge what ingest saved")
    room = min(sum(one.position for one in saved), loaded.model.config.max_position_embeddings)
    states = []
    for path, one, context in zip(args.states, saved, (room, saved[1].position), strict=True):
        states.append(new_state(loaded.model, max(context, one.position), args.prefill_chunk, one.prompt))
        load_state(path, states[-1], loaded)
    kept = merge(loaded, states[0], states[1])
    save_state(args.out, states[0], loaded, None)
    data = _held(args.out, loaded, options, states[0]) | {"documents": [one.position for one in saved]}
    console.print(
        f"merged {saved[0].position} and {saved[1].position} tokens; over all layers"
        f" the rings keep {kept.ring_first} and {kept.ring_second} tokens, {kept.evicted} were offered to the banks;"
        f" exact banks keep {kept.exact_first} and {kept.exact_second} tokens and lose {kept.exact_lost};"
        f" summary banks keep {kept.summary_alone} averages as they were and make {kept.summary_pairs} of two each",
        highlight=False,
        soft_wrap=True,
    )
    _print_held(console, data)
    return data | {"kept": kept._asdict()}


def _load(console: Console, model: Path, options: RunOptions, context: int) -> AnyLoaded:
    with console.status(f"loading {model}", spinner="line"):
        return load_any(model, options, context=context)


def _options_of(args: argparse.Namespace, state: Path, basis: Path | None = None) -> RunOptions:
    """Options of the run that a state was made by."""
    config = config_from_file(args.model / "config.json")
    return saved_options(state, config, args.device, args.prefill_chunk, args.coda_adapters, basis)


def _check_paths(args: argparse.Namespace) -> None:
    """Refuse to write over what is read, a state above all, and where nothing can be written."""
    given = vars(args)
    states = given["states"] if "states" in given else [given.get("state")]
    named = [("state", path) for path in states]
    named += [("document", given.get("prompt_file")), ("basis", given.get("basis"))]
    adapters = given.get("coda_adapters")
    named.append(("file of adapters", None if adapters is None else Path(adapters)))
    inputs = [(what, path) for what, path in named if path is not None]
    out, report = given.get("out"), args.json
    if out is not None:
        partial = out.with_name(f"{out.name}.partial")  # which is written first
        for flag, path in (("--out", out), ("--out", partial), ("--json", report)):
            _check_written(flag, path, inputs)
        if report is not None and any(_same(report, path) for path in (out, partial)):
            raise ConfigError(f"--json {report}: is the file of --out")
    else:
        _check_written("--json", report, inputs)
    for path in (out, report):
        writable(path)


def _check_written(flag: str, written: Path | None, inputs: Sequence[tuple[str, Path]]) -> None:
    for what, path in inputs:
        if written is not None and _same(written, path):
            raise ConfigError(f"{flag} {written}: is the {what} that is read, which stays as it is")


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are of one file, which need not be there."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _held(path: Path, loaded: AnyLoaded, options: RunOptions, state: State) -> dict[str, Any]:
    """What a saved state holds and takes, and what a saved full cache of as many tokens would hold."""
    model = loaded.model
    full = replace(options, kv=()).formats(model.config)
    whole = State(model.config, state.position, options.prefill_chunk, full, torch.device("meta"))
    return {
        "tokens": state.position,
        "file_bytes": path.stat().st_size,
        "cache_bytes": state.nbytes(),
        "full_cache_bytes": sum(prod(shape) * dtype.itemsize for shape, dtype in forms(whole, state.position).values()),
        "options": options.to_json(),
        "weights_fingerprint": loaded.weights_fingerprint,
    }


def _print_held(console: Console, data: dict[str, Any]) -> None:
    console.print(
        f"the state holds {data['tokens']} tokens in a file of {data['file_bytes']} bytes; a full cache of them, saved,"
        f" takes {data['full_cache_bytes']}, {data['full_cache_bytes'] / data['file_bytes']:.2f} times as much",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(run_alone(main))
