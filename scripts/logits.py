"""`python -m scripts.logits`: the logits of every position of a token sequence, as one float32 tensor."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from model import strict_json
from model.errors import CapacityError, ConfigError
from model.ranks import Group
from runtime.group import connected, leads, watched_load_any
from runtime.load import read_any_config
from runtime.memory import new_state
from runtime.options import DEMO
from runtime.watch import Watch
from scripts.cli import arguments, run_on_ranks
from scripts.flags import (
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_variants,
    chosen_ops,
    positive,
    run_options,
    writable,
)

HEAD_ROWS = 64  # rows of logits at a time: those of a whole chunk would be the largest tensor of the run


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.logits", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="checkpoint directory (default: the demo checkpoint)")
    p.add_argument("--tokens", type=Path, required=True, help="JSON list of token ids")
    p.add_argument("--out", type=Path, required=True, help="safetensors file to write: logits [tokens, vocab] float32")
    p.add_argument("--decode-from", type=positive, help="prefill so many tokens, feed the rest one at a time")
    add_run_options(p)
    add_op_set(p)
    add_variants(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: Watch | None = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    with connected(watch, args.device, args.rank_timeout) as group:
        return _logits(args, watch, group)


def _logits(args: argparse.Namespace, watch: Watch | None, group: Group) -> int:
    if group.rank == 0:
        writable(args.out)
    options = run_options(args)
    config = read_any_config(args.model, options)
    vocab, ops = config.vocab_size, chosen_ops(args, options, config)
    ids = read_tokens(args.tokens, vocab)
    model = watched_load_any(watch, args.model, options, ops, group, context=len(ids)).model
    tokens = torch.tensor(ids, device=model.device)
    lengths = chunk_lengths(len(tokens), options.prefill_chunk, args.decode_from)
    state = new_state(model, len(tokens), max(lengths), args.decode_from or len(tokens))
    console, start = Console(stderr=True), 0
    with _written(args.out, len(tokens), vocab, watch) as write:
        for length in track(lengths, "logits", console=console, transient=True, disable=not console.is_terminal):
            hidden = model(tokens[start : start + length], state)
            for part in hidden.split(HEAD_ROWS):
                write(start, model.logits(part))
                start += len(part)
    print(f"{args.out}: logits {[len(tokens), vocab]} float32 from {len(lengths)} calls", file=sys.stderr)
    return 0


def read_tokens(path: Path, vocab: int) -> list[int]:
    """Return the token ids of a JSON file; ConfigError naming the file and the first bad one."""
    try:
        tokens = strict_json.parse(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON ({error})") from error
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{path}: want a JSON list of at least one token id")
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab:
            raise ConfigError(f"{path}: entry {i} is {token!r:.40}, want a token id from 0 to {vocab - 1}")
    return tokens


def chunk_lengths(tokens: int, chunk: int, decode_from: int | None) -> list[int]:
    """Return the lengths of the calls that make up a run."""
    prefilled = tokens if decode_from is None else decode_from
    if prefilled > tokens:
        raise CapacityError(f"--decode-from {prefilled}: there are {tokens} tokens")
    whole, rest = divmod(prefilled, chunk)
    return [chunk] * whole + [rest] * (rest > 0) + [1] * (tokens - prefilled)


@contextlib.contextmanager
def _written(path: Path, tokens: int, vocab: int, watch: Watch | None) -> Iterator[Callable[[int, Tensor], None]]:
    """Yield what takes rows of logits, from a position on; the file is there after the ``with``, written by rank 0."""
    if not leads(watch):
        yield lambda *_: None
        return
    partial = path.with_name(path.name + ".partial")
    with contextlib.nullcontext() if watch is None else watch.unfinished(partial):
        try:
            rows = create_logits(partial, tokens, vocab)

            def write(start: int, logits: Tensor) -> None:
                rows[start : start + len(logits)] = logits.cpu().numpy()

            yield write
            rows.flush()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def create_logits(path: Path, tokens: int, vocab: int) -> "np.memmap[tuple[int, int], np.dtype[np.float32]]":
    """Create a safetensors file with the tensor `logits` and return its rows, mapped: no copy of it stays in memory."""
    header = json.dumps({"logits": {"dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, tokens * vocab * 4]}})
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    path.write_bytes(len(padded).to_bytes(8, "little") + padded)
    return np.memmap(path, np.float32, "r+", offset=8 + len(padded), shape=(tokens, vocab))


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
