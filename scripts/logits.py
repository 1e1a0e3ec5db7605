"""`python -m scripts.logits`: the logits of every position of a token sequence, as one float32 tensor."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from model import strict_json
from model.errors import CapacityError, ConfigError
from runtime.load import DEMO, load
from runtime.memory import new_state
from scripts.cli import run
from scripts.flags import add_run_options, positive, run_options, writable

HEAD_ROWS = 64  # rows of logits at a time: those of a whole chunk would be the largest tensor of the run


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.logits", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="checkpoint directory (default: the demo checkpoint)")
    p.add_argument("--tokens", type=Path, required=True, help="JSON list of token ids")
    p.add_argument("--out", type=Path, required=True, help="safetensors file to write: logits [tokens, vocab] float32")
    p.add_argument("--decode-from", type=positive, help="prefill so many tokens, feed the rest one at a time")
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    writable(args.out)
    options = run_options(args)
    loaded = load(args.model, options)
    model, vocab = loaded.model, loaded.model.config.vocab_size
    tokens = torch.tensor(read_tokens(args.tokens, vocab), device=model.device)
    lengths = chunk_lengths(len(tokens), options.prefill_chunk, args.decode_from)
    state = new_state(model, len(tokens), max(lengths))
    partial = args.out.with_name(args.out.name + ".partial")
    console, start = Console(stderr=True), 0
    try:
        rows = create_logits(partial, len(tokens), vocab)
        for length in track(lengths, "logits", console=console, transient=True, disable=not console.is_terminal):
            hidden = model(tokens[start : start + length], state)
            for part in hidden.split(HEAD_ROWS):
                rows[start : start + len(part)] = model.logits(part).cpu().numpy()
                start += len(part)
        rows.flush()
        partial.replace(args.out)
    finally:
        partial.unlink(missing_ok=True)
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


def create_logits(path: Path, tokens: int, vocab: int) -> "np.memmap[tuple[int, int], np.dtype[np.float32]]":
    """Create a safetensors file with the tensor `logits` and return its rows, mapped: no copy of it stays in memory."""
    header = json.dumps({"logits": {"dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, tokens * vocab * 4]}})
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    path.write_bytes(len(padded).to_bytes(8, "little") + padded)
    return np.memmap(path, np.float32, "r+", offset=8 + len(padded), shape=(tokens, vocab))


if __name__ == "__main__":
    sys.exit(run(main))
