"""What `scripts.measure_demo` does once its command line is known to be good."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress

from kernels.ops import CPU, Ops
from model.errors import ConfigError
from model.transformer import Transformer
from probes.ablations import random_selection, without_entries
from probes.demo_language.prompts import Prompt, common_prompts, fact_prompts, needle_prompts
from probes.demo_language.vocabulary import vocabulary_size
from runtime.load import LoadedV4, load
from runtime.output import write_json, write_text
from runtime.report import commit
from scripts.console import Console
from scripts.flags import run_options

TEMPLATE = """\
---
checkpoint: {checkpoint}
weights: {weights}
config: {config}
ops: {ops}
numerics: {numerics}
dtype: {dtype}
device: {device}
commit: {commit}
command: {command}
---

# The demo checkpoint: what it knows, and what it needs to know it

**Needles: {needles:.1f} % found at the worst of the lengths from {shortest} to {longest} tokens; with the window
alone, {needles_cut:.1f} % at the best. Facts: at worst {facts:.1f} %. Most common word: at worst {common:.1f} %; with
HCA layers cut to their window, {common_cut:.1f} % at the best length.**

Right answers in %, greedy, the words before each answer forced; in brackets the number of questions.

{table}

## The columns

- *as shipped*: the model as it is, from the stored FP8 and FP4 weights.
- *random selection*: CSA layers attend to as many visible entries as ever, but drawn at random.
- *CSA window only*: CSA layers attend to no entry. HCA layers are intact.
- *HCA window only*: HCA layers attend to no entry. CSA layers are intact.
- *window alone*: neither attends to any entry; what is left is the sliding window of {window} tokens in every layer.

## The tasks

- *facts*: 57 countries, four relations each, right before the value.
- *needle*: sentences that bind a name to a number, afresh in every document; the question repeats the sentence. Those
  asked for end at least 128 tokens before the first question (a quarter of the document below 512 tokens).
- *most common*: which of a few marker words occurs most often in the whole document. The `needle` probe asks this too,
  of other documents, drawn from other seeds, and counts for itself: a wrong answer there is not in this table.

## What this does not claim

Documents come from the generator that made the training data, with other seeds. The numbers say that each path of the
architecture is needed and works, not that a model of this size understands text. Beyond the lengths it was trained on
(see the card in `model/demo`) the model extrapolates, and a loss there is the model's unless another runtime disagrees.

Measured in {seconds:.0f} s.
"""


def variants() -> dict[str, Ops]:
    """What is cut out, by the name of its column."""
    return {
        "as shipped": CPU,
        "random selection": random_selection(CPU, seed=0),
        "CSA window only": without_entries(CPU, csa=True, hca=False),
        "HCA window only": without_entries(CPU, csa=False, hca=True),
        "window alone": without_entries(CPU, csa=True, hca=True),
    }


@dataclass(frozen=True)
class Score:
    """Right answers out of all."""

    right: int
    total: int

    def __str__(self) -> str:
        return f"{100 * self.right / self.total:.1f}"


def score(model: Transformer, prompts: Sequence[Prompt], chunk: int) -> Score:
    """Run each prompt and count the answers that have the highest logit."""
    right = total = 0
    for prompt in prompts:
        ids = torch.tensor(prompt.ids, device=model.device)
        state = model.new_state(len(ids), chunk)
        wanted = {answer.position: answer.token for answer in prompt.answers}
        for start in range(0, len(ids), chunk):
            hidden = model(ids[start : start + chunk], state)
            rows = [position for position in wanted if start <= position < start + chunk]
            if rows:
                best = model.logits(hidden[[row - start for row in rows]]).argmax(-1).tolist()
                right += sum(token == wanted[row] for token, row in zip(best, rows, strict=True))
        total += len(wanted)
    return Score(right, total)


def measure(args: argparse.Namespace, console: Console) -> tuple[LoadedV4, dict[str, dict[str, Score]]]:
    """Return the scores: row (task and length) -> column (variant) -> score."""
    options = run_options(args)
    loaded = {name: load(args.model, options, ops) for name, ops in variants().items()}
    if (vocab := loaded["as shipped"].model.config.vocab_size) != vocabulary_size():
        raise ConfigError(f"{args.model}: has {vocab} tokens, the demo language has {vocabulary_size()}")
    rows: dict[str, list[Prompt]] = {
        "facts, as text": fact_prompts(),
        "facts, as chat": fact_prompts(chat=True),
    }
    for length in args.lengths:
        documents = max(2, args.documents * 1024 // max(length, 1024))
        rows[f"needle, {length} tokens"] = needle_prompts(length, documents, seed=length, questions=args.questions)
    for length in args.lengths:
        documents = max(3, args.documents * 1024 // max(length, 1024))
        rows[f"most common, {length} tokens"] = common_prompts(length, documents, seed=length)
    scores: dict[str, dict[str, Score]] = {}
    tokens = {row: sum(len(p.ids) for p in prompts) for row, prompts in rows.items()}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=sum(tokens.values()) * len(loaded))
        for row, prompts in rows.items():
            scores[row] = {}
            for name, one in loaded.items():
                bar.update(task, description=f"{row}, {name}")
                scores[row][name] = score(one.model, prompts, options.prefill_chunk)
                bar.advance(task, tokens[row])
            console.say(f"{row}: {', '.join(f'{name} {s}' for name, s in scores[row].items())}")
    return loaded["as shipped"], scores


def page(args: argparse.Namespace, loaded: LoadedV4, scores: dict[str, dict[str, Score]], seconds: float) -> str:
    """Return the audit as Markdown."""

    def percents(kind: str, column: str) -> list[float]:
        return [100 * by[column].right / by[column].total for row, by in scores.items() if row.startswith(kind)]

    columns = list(variants())
    table = [f"| task (questions) | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for row, by in scores.items():
        table.append(f"| {row} ({by[columns[0]].total}) | {' | '.join(str(by[column]) for column in columns)} |")
    return TEMPLATE.format(
        checkpoint=loaded.directory.resolve().name,
        weights=loaded.weights_fingerprint,
        config=loaded.model.config.fingerprint,
        ops=loaded.model.arithmetic.ops.name,
        numerics=args.numerics,
        dtype=args.dtype,
        device=args.device,
        commit=commit(),
        command=args.command_line,
        shortest=min(args.lengths),
        longest=max(args.lengths),
        needles=min(percents("needle", "as shipped")),
        needles_cut=max(percents("needle", "window alone")),
        facts=min(percents("facts", "as shipped")),
        common=min(percents("most common", "as shipped")),
        common_cut=max(percents("most common", "HCA window only")),
        table="\n".join(table),
        window=loaded.model.config.sliding_window,
        seconds=seconds,
    )


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    console, started = Console(stderr=True), time.perf_counter()
    loaded, scores = measure(args, console)
    write_text(args.out, page(args, loaded, scores, time.perf_counter() - started))
    data: dict[str, Any] = {
        row: {name: {"right": s.right, "total": s.total} for name, s in by.items()} for row, by in scores.items()
    }
    write_json(args.out.with_suffix(".json"), data)
    print(f"wrote {args.out}", file=sys.stderr)
    return 0
