"""`decode`: how long a token takes, and which component takes the time, against what is remembered."""

import argparse

from scripts.bench.alone import JSON, Alone, show
from scripts.bench.record import Record
from scripts.console import Console


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench: a prompt is read once, and all repetitions go on from it; returns the exit status."""
    alone, rows = Alone(args), list[JSON]()
    for context in dict.fromkeys(args.context):
        state = alone.state(context + args.steps * (args.repetitions + 1), context)
        alone.read(alone.tokens(context), state)
        for repetition in range(-1, args.repetitions):  # the first does not count
            tokens = alone.tokens(args.steps)
            alone.clock.start()
            for token in tokens.split(1):
                alone.read(token, state)
            spent = alone.clock.stop()
            if repetition >= 0:
                rows.append({"context": context, "repetition": repetition, "tokens": args.steps, "components": spent})
    record.write(rows)
    show("decode", rows, "ms per token", 1, console)
    return 0
