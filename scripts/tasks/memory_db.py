"""What `scripts.memory_db` does once its command line is known to be good: `runtime.memory_db`, told on the console."""

import argparse
import io
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from fathom.model.architectures import config_from_file
from fathom.model.errors import ConfigError
from fathom.model.state import State
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.load import read_any_config
from fathom.runtime.memory_db import Memory
from fathom.runtime.merge import check_family
from fathom.runtime.options import RunOptions
from fathom.runtime.output import write_json
from fathom.runtime.process import set_process
from fathom.runtime.quantised_state import quantise_state
from fathom.runtime.statefile import forms, read_metadata, saved_options, saved_position
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.console import Console, visible
from fathom.scripts.flags import run_options
from fathom.scripts.prompts import read_prompt
from fathom.scripts.tasks.generate import prefill_progress


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
    sizes = quantise_state(args.state, args.bits, args.out)
    Console(stderr=True).say(
        f"{args.out}: keys and values in {args.bits} bits, {sizes.rows} -> {sizes.coded} bytes,"
        f" {sizes.rows / sizes.coded:.2f} times smaller; all of the state {sizes.before} -> {sizes.after},"
        f" {sizes.before / sizes.after:.2f} times",
    )
    return sizes._asdict() | {"bits": args.bits, "file_bytes": args.out.stat().st_size}


def merged(args: argparse.Namespace) -> dict[str, Any]:
    """Make one state of two; returns the report."""
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


def _load(args: argparse.Namespace, state: Path, basis: Path | None, context: int) -> Memory:
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
    config = config_from_file(args.model / "config.json")
    return saved_options(state, config, args.device, args.prefill_chunk, args.coda_adapters, basis)


def _held(path: Path, memory: Memory) -> dict[str, Any]:
    """What a saved state holds and takes, and what a saved full cache of as many tokens would hold; said too."""
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
