"""`prefill`: how fast a prompt is read, and which component takes the time, against the length of the prompt."""

import argparse

from scripts.bench.alone import JSON, Alone, show
from scripts.bench.record import Record
from scripts.console import Console


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    alone, rows = Alone(args), list[JSON]()
    alone.read(alone.tokens(alone.chunk), alone.state(alone.chunk, alone.chunk))  # touches the mapped weights
    for repetition in range(args.repetitions):
        for context in dict.fromkeys(args.context):
            tokens = alone.tokens(context)
            alone.clock.start()
            alone.read(tokens, alone.state(context, context))
            spent = alone.clock.stop()
            rows.append({"context": context, "repetition": repetition, "tokens": context, "components": spent})
    record.write(rows)
    show("prefill", rows, "ms per 1000 tokens", 1000, console)
    return 0
