"""`compare-transformers`: this runtime beside Hugging Face transformers, on the same files of a mid-size checkpoint.

Each run is a process of its own; the sides take turns, ours, theirs, theirs, ours, and so on, so that whatever else the
machine does falls on both. transformers reads a prompt in calls of --chunk tokens, with its own cache and huge pages
(THP_MEM_ALLOC_ENABLE=1), without which it is slower. Ours has no scores that grow with the call, and reads --our-chunk
tokens at once: an expert then gets enough of them to pay for the decoding of its weights.
Both compute in bf16 on the same threads, and their logits are compared in every pair. Where a processor has no bf16
instructions, transformers reads a prompt several times faster in fp32: `--theirs-dtype fp32` compares with that.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from model.checkpoint.config_json import read_json
from model.errors import ConfigError
from runtime.output import making
from scripts.bench import midsize
from scripts.bench.children import Spec, measured
from scripts.bench.comparison import (
    MEASURES,
    MEDIAN_APART,
    OURS,
    ROW_APART,
    THEIRS,
    Spread,
    apart,
    contexts,
    ratios,
    short,
    targets,
    values,
)
from scripts.bench.record import Record, rendered
from scripts.console import Console

SIZES = ("hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size")  # told of the checkpoint
HEADS = ("context", "what", "ours", "theirs", "ratio", "from .. to")
JSON = dict[str, Any]


class DisagreementError(Exception):
    """Both sides did not compute the same: no speed is worth comparing."""


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status: 1 where the sides did not compute the same."""
    try:
        results = compared(args, record, components=False)
    except DisagreementError as error:
        print(error, file=sys.stderr)
        return 1
    show(results, console)
    return 0


def compared(args: argparse.Namespace, record: Record, *, components: bool) -> JSON:
    """Run all pairs, then our side alone where it was asked for, and return the results; written as they come.

    With `components` our side is run once more at every context, with a clock around each op.
    """
    midsize.transformers()
    theirs = f"transformers, eager attention, DynamicCache, {args.theirs_dtype}, inference_mode, THP_MEM_ALLOC_ENABLE=1"
    results: JSON = {
        "about": ABOUT | {"theirs": theirs, "theirs_dtype": args.theirs_dtype},
        "runs": [],
        "agreement": [],
    }
    with checkpoint(args.checkpoint, args.seed) as model, tempfile.TemporaryDirectory() as scratch:
        results["checkpoint"] = about_checkpoint(model)

        def once(side: str, context: int, more: JSON, *, watched: bool = False) -> JSON:
            thp = side == THEIRS or args.ours_thp
            logits = str(Path(scratch) / side)
            chunk = args.chunk if side == THEIRS else args.our_chunk
            sizes = (chunk, args.decode, args.threads, args.seed)
            spec = Spec(side, str(model), context, *sizes, logits, components=watched, thp=thp, dtype=args.theirs_dtype)
            found = {"run": record.header["run"], **more, **measured(spec)}
            _tell(found)
            results["runs"].append(found)
            record.write(results, complete=False)
            return found

        for pair in range(args.pairs):
            for context in dict.fromkeys(args.context):
                for side in (OURS, THEIRS) if pair % 2 == 0 else (THEIRS, OURS):
                    once(side, context, {"pair": pair})
                logits = (load_file(Path(scratch) / side)["logits"] for side in (OURS, THEIRS))
                found = {"pair": pair, "context": context} | apart(*logits)
                results["agreement"].append(found)
                _same(found)
        alone = sorted({*args.ours_only, *(args.context if components else ())})
        for context in alone:
            once(OURS, context, {}, watched=components)
    results["targets"] = [target._asdict() | {"reached": target.reached} for target in targets(results["runs"])]
    record.write(results)
    return results


ABOUT = {
    "files": "in the page cache, read once before every run",
    "load_s": "from the files to a model that runs, imports not counted; our weights stay mapped files",
    "prefill_s": "the whole prompt in calls (--chunk, --our-chunk), caches allocated, logits of its last token",
    "decode_ms": "one token and its logits; the tokens are drawn, the same on both sides",
    "memory.VmHWM": "peak resident set, mapped files included: what the target of half the memory is about",
    "sampled_peak_anon": "peak of RssAnon + RssShmem, looked at every 20 ms: what no file backs",
    "ours": "numerics plain, bf16, ops cpu",
    "same": f"relative difference of logits: median row at most {MEDIAN_APART}, every row at most {ROW_APART}",
}


def about_checkpoint(folder: Path) -> JSON:
    """Bytes and the sizes that its config names."""
    config = read_json(path := folder / "config.json")
    if missing := [name for name in SIZES if name not in config]:
        raise ConfigError(f"{path}: {missing[0]}: missing; only checkpoints of DeepSeek-V4 are compared")
    sizes = {name: config[name] for name in SIZES}
    return {"bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")), **sizes}


@contextmanager
def checkpoint(folder: Path | None, seed: int) -> Iterator[Path]:
    """Yield the folder of a checkpoint: as it is, made and kept, or made for this run alone."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder.resolve()
        if not (place / "config.json").exists():
            print(f"writing a checkpoint of random weights to {place}", file=sys.stderr)
            with making(place) as unfinished:
                midsize.write(unfinished, midsize.MIDSIZE, seed)
        yield place


def _tell(run: JSON) -> None:
    pair = "alone" if "pair" not in run else f"pair {run['pair'] + 1}"
    parts = [f"{name} {value(run):.4g} {unit}" for name, (unit, value) in MEASURES.items()]
    print(f"{run['side']}, {run['context']} tokens, {pair}: {', '.join(parts)}", file=sys.stderr, flush=True)


def _same(found: JSON) -> None:
    if not found["same"]:
        worst, middle = max(found["relative"]), sorted(found["relative"])[len(found["relative"]) // 2]
        raise DisagreementError(
            f"pair {found['pair'] + 1}, {found['context']} tokens: logits differ by {middle:.3g} (median row) and"
            f" {worst:.3g} (worst row) of their norm; want at most {MEDIAN_APART} and {ROW_APART}"
        )


def rows(results: JSON) -> list[tuple[str, ...]]:
    """Cells of the table: medians and ratios at every context that both sides read."""
    runs = results["runs"]
    out: list[tuple[str, ...]] = []
    for context in contexts(runs):
        for what, (unit, _) in MEASURES.items():
            sides = [Spread.of(values(runs, side, context, what)) for side in (OURS, THEIRS)]
            ratio = Spread.of(ratios(runs, context, what))
            told = [short(side.median) for side in sides]
            spread = f"{ratio.low:.2f} .. {ratio.high:.2f}"
            out.append((str(context), f"{what}, {unit}", *told, f"{ratio.median:.2f}", spread))
    return out


def target_rows(results: JSON) -> list[tuple[str, ...]]:
    """Cells of the table of targets."""
    return [
        (t.what, str(t.context), f">= {t.least:g}", f"{t.found.median:.2f}", "reached" if t.reached else "missed")
        for t in targets(results["runs"])
    ]


def agreement_rows(results: JSON) -> list[tuple[str, ...]]:
    """Cells of the table that says how near the logits were, the worst pair of each context."""
    out: list[tuple[str, ...]] = []
    for context in contexts(results["runs"]):
        found = [one for one in results["agreement"] if one["context"] == context]
        worst = max(found, key=lambda one: max(one["relative"]))
        relative = Spread.of(worst["relative"])
        first = f"{max(one['prompt_max_abs'] for one in found):.3g}"
        equal = f"{sum(one['prompt_argmax_equal'] for one in found)} of {len(found)}"
        all_equal = f"{sum(one['argmax_equal'] for one in found)} of {sum(one['rows'] for one in found)}"
        out.append((str(context), str(relative), first, equal, all_equal))
    return out


TARGET_HEADS = ("target", "context", "asked for", "found", "")
AGREEMENT_HEADS = (
    "context", "rows apart, median (from .. to)", "prompt, largest difference", "prompt, same argmax",
    "all, same argmax",
)  # fmt: skip


def show(results: JSON, console: Console) -> None:
    """Print the tables."""
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (
        ("ours beside transformers, medians", HEADS, rows(results)),
        ("both compute the same", AGREEMENT_HEADS, agreement_rows(results)),
        ("targets, medians of the ratios", TARGET_HEADS, target_rows(results)),
    )
    for title, heads, cells in tables:
        console.print(rendered(title, heads, cells))
