"""What `scripts.memory_db` does once its command line is known to be good."""

import argparse
import io
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from model.architectures import config_from_file
from model.errors import ConfigError
from model.state import State
from runtime.arithmetic import cache_formats
from runtime.generate import Generation, generate, prefill
from runtime.load import AnyLoaded, load_any, read_any_config
from runtime.memory import new_state
from runtime.merge import check_family, merge, mergeable
from runtime.options import RunOptions
from runtime.output import write_json
from runtime.quantised_state import coded_bits, load_any_state, quantise_state, read_any_saved
from runtime.sampling import Sampling
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
from runtime.text.segments import Text
from runtime.text.tokenizer import StreamDecoder, Tokenizer
from runtime.threads import set_threads
from scripts.console import Console
from scripts.flags import run_options
from scripts.prompts import read_prompt
from scripts.tasks.generate import prefill_progress, print_text


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
    options = run_options(args)
    tokens = read_prompt(args, options).ids
    loaded = _load(args, options, len(tokens))
    state = new_state(loaded.model, len(tokens), options.prefill_chunk, len(tokens))
    started = time.perf_counter()
    with prefill_progress(Console(stderr=True), len(tokens)) as advance:
        prefill(loaded.model, state, tokens, advance)
    seconds = time.perf_counter() - started
    save_state(args.out, state, loaded, None)
    data = _held(args.out, loaded, options, state) | {"prefill_s": seconds}
    Console(stderr=True).say(
        f"read {len(tokens)} tokens in {seconds:.2f} s, {len(tokens) / seconds:.1f} tokens/s",
    )
    _print_held(data)
    return data


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Continue the state with each question; returns the report."""
    options = _options_of(args, args.state, args.basis)
    config = read_any_config(args.model, options)
    tokenizer = Tokenizer(args.model, config.vocab_size)
    questions = [tokenizer.encode([Text(question)], continued=True) for question in args.question]
    if not all(questions):
        raise ConfigError("--question: is empty")
    held = saved_position(args.state) + bool(read_metadata(args.state).get("pending"))
    loaded = _load(args, options, held + max(map(len, questions)) + args.max_new_tokens - 1)
    saved, bits = read_any_saved(args.state, loaded), coded_bits(args.state)
    answers = []
    for question, tokens in zip(args.question, questions, strict=True):
        answer = _answer(args, loaded, saved, tokens, StreamDecoder(tokenizer))
        answers.append({"question": question, **answer})
    form = "exact" if bits is None else f"quantised: keys and values in {bits} bits, answers are not the exact state's"
    Console(stderr=True).say(f"{args.state}: {saved.position} tokens, {form}")
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
    options = _options_of(args, args.states[0])
    read_any_config(args.model, options)
    loaded = mergeable(_load(args, options, 1), str(args.states[0]))
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
    Console(stderr=True).say(
        f"merged {saved[0].position} and {saved[1].position} tokens; over all layers"
        f" the rings keep {kept.ring_first} and {kept.ring_second} tokens, {kept.evicted} were offered to the banks;"
        f" exact banks keep {kept.exact_first} and {kept.exact_second} tokens and lose {kept.exact_lost};"
        f" summary banks keep {kept.summary_alone} averages as they were and make {kept.summary_pairs} of two each",
    )
    _print_held(data)
    return data | {"kept": kept._asdict()}


def _load(args: argparse.Namespace, options: RunOptions, context: int) -> AnyLoaded:
    with Console(stderr=True).loading(args.model):
        loaded = load_any(args.model, options, context=context)
    set_threads(args.threads, loaded)
    return loaded


def _options_of(args: argparse.Namespace, state: Path, basis: Path | None = None) -> RunOptions:
    """Options of the run that a state was made by."""
    config = config_from_file(args.model / "config.json")
    return saved_options(state, config, args.device, args.prefill_chunk, args.coda_adapters, basis)


def _held(path: Path, loaded: AnyLoaded, options: RunOptions, state: State) -> dict[str, Any]:
    """What a saved state holds and takes, and what a saved full cache of as many tokens would hold."""
    model = loaded.model
    full = cache_formats(replace(options, kv=()), model.config)
    # Shapes at a position do not depend on the room. On the meta device they would take torch's compiler, for seconds.
    whole = State(model.config, 1, 1, full, torch.device("cpu"))
    return {
        "tokens": state.position,
        "file_bytes": path.stat().st_size,
        "cache_bytes": state.nbytes(),
        "full_cache_bytes": sum(prod(shape) * dtype.itemsize for shape, dtype in forms(whole, state.position).values()),
        "options": options.to_json(),
        "weights_fingerprint": loaded.weights_fingerprint,
    }


def _print_held(data: dict[str, Any]) -> None:
    Console(stderr=True).say(
        f"the state holds {data['tokens']} tokens in a file of {data['file_bytes']} bytes; a full cache of them, saved,"
        f" takes {data['full_cache_bytes']}, {data['full_cache_bytes'] / data['file_bytes']:.2f} times as much",
    )
