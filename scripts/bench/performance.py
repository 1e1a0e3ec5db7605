"""`performance`: what a CPU takes, beside what its memory and its arithmetic allow, a commit before, and transformers.

Each run is a process of its own that imports the `kernels`, `model` and `runtime` of its commit. Those may be older
than this file, so it asks little of them: `load`, `RunOptions`, the op set.
"""

import argparse
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.probes.child import call
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.process import token_bytes
from fathom.scripts.bench.beside import (
    OURS,
    THEIRS,
    THREADS,
    Run,
    apart,
    check_family,
    checkpoint,
    measured,
    transformers,
    warm,
)
from fathom.scripts.bench.turns import JSON, Case, Clock, Measures, Rounds, Side, values
from fathom.scripts.paths import ROOT

FLOOR: Final = "floor"
TOKEN, HEAD = "token, ms", "head, ms"
READ: Final = 1 << 28  # bytes that are read to measure the memory, several times what caches hold
SQUARE: Final = 2048  # rows and columns of the product that measures arithmetic
BEFORE_DECODE: Final = 256  # tokens before the first that is decoded
WANTED: Final[dict[str | int, Measures]] = {"decode": {TOKEN: 3.0}, 512: {"call, s": 2.0}}  # times the floor, at most
WHOLE_LAYERS, WHOLE_CORES = 43, 16  # of V4-Flash; of the estimate


def performance(args: argparse.Namespace) -> Iterator[Case]:
    """What a CPU takes, beside what it could take, an earlier commit, and transformers.

    * *Two layers of V4-Flash* (CSA and HCA, 256 experts in FP4, the rest in FP8) at true dimensions with random
      weights, `deployed` numerics, bf16: a decoded token without the head, the head, and calls of several lengths. The
      *floor* is measured in the same round, with as many threads: a token's weights as stored over the rate at which
      memory is read; of a call the same or its multiplications over the rate of torch's product of two squares of 2048,
      in fp32 or bfloat16 as is faster, whichever takes longer. What is read twice, attention, and all else a token
      does, is not in the floor.
    * *The demo*, `deployed`: a decoded token, logits and choice included.
    * *Beside transformers*: a checkpoint of 1 GB in bf16 (515 million parameters), `plain` numerics. transformers reads
      a prompt in calls of 512 tokens with eager attention, its own cache and huge pages; logits are compared in every
      pair, or nothing is timed.

    Sides take turns, each run in a process of its own, files in the page cache; those of --before are run from a
    worktree that git makes. Parts are by a clock around every op; a decoded token is timed in a run without it.
    """
    if args.layers is None or args.before is None:
        raise ConfigError("want --layers, a folder that `make_checkpoint --layers 2,3` made, and --before, a commit")
    transformers()
    rounds, steps = Rounds.exactly(args.pairs), args.decode
    with worktree(args.before) as (before, commit), checkpoint(args.checkpoint, args.seed) as middle:
        folders = {OURS: ROOT, f"before ({commit[:12]})": before}
        for threads in dict.fromkeys(args.threads):
            table = f"Two layers of V4-Flash, {threads} thread{'s' if threads > 1 else ''}"
            for kind in ("decode", *args.tokens):
                asked = {"kind": kind, "threads": threads, "decode": steps, "head": False, "seed": args.seed}
                sides: dict[str, Side] = {FLOOR: partial(_floor, args.layers, kind, threads)}
                sides |= {name: partial(_run, folder, args.layers, asked) for name, folder in folders.items()}
                label = f"after {BEFORE_DECODE} tokens" if kind == "decode" else f"a call of {kind}"
                yield Case(table, label, sides, rounds, at_most=WANTED.get(kind), warm=False)
        asked = {"kind": "decode", "threads": 1, "decode": 8 * steps, "head": True, "seed": args.seed}
        sides = {name: partial(_run, folder, DEMO, asked) for name, folder in folders.items()}
        yield Case("The demo, 1 thread", f"after {BEFORE_DECODE} tokens", sides, rounds, warm=False)
        check_family(middle)
        for n in dict.fromkeys(args.context):
            runs = {
                OURS: Run(OURS, middle, n, args.our_chunk, steps, 1, args.seed, thp=False),
                THEIRS: Run(THEIRS, middle, n, 512, steps, 1, args.seed, dtype=args.theirs_dtype, thp=True),
            }
            sides = {side: partial(measured, run) for side, run in runs.items()}
            table = f"Beside transformers in {args.theirs_dtype}, 1 thread"
            yield Case(table, f"{n} tokens", sides, rounds, apart, {"decode, ms/token": 2.5}, warm=False)


def performance_tables(args: argparse.Namespace, rows: list[JSON]) -> list[JSON]:
    """An estimate of the whole of V4-Flash from its two layers."""
    found: dict[str, Measures] = {}
    for row in rows:
        if row["table"] == f"Two layers of V4-Flash, {args.threads[0]} thread":
            found[row["case"]] = {name: median(values(row, OURS, name)) for name in row["rounds"][0][OURS]}
    token = found[f"after {BEFORE_DECODE} tokens"]
    layers, head = token[TOKEN] / 1e3 * WHOLE_LAYERS / 2, token[HEAD] / 1e3
    token_bytes_read, head_bytes = _token_and_head(args.layers)
    bytes_read = (token_bytes_read * WHOLE_LAYERS / 2 + head_bytes) / 1e9
    one = f"{token[TOKEN]:.3g} ms for two layers x {WHOLE_LAYERS} / 2 + {token[HEAD]:.3g} ms of head"
    many = f"over {WHOLE_CORES}, where memory gives {WHOLE_CORES} times as much; {bytes_read:.3g} GB are read"
    cells = [
        ["a token, one core", one, f"{layers + head:.3g} s"],
        [f"a token, {WHOLE_CORES} cores", many, f"{(layers + head) / WHOLE_CORES:.3g} s"],
    ]
    for label, taken in found.items():
        if label.startswith("a call of"):
            whole = taken["call, s"] * WHOLE_LAYERS / 2
            cells += [
                [label, f"{taken['call, s']:.3g} s for two layers x {WHOLE_LAYERS} / 2, one core", f"{whole:.3g} s"],
                [f"{label}, {WHOLE_CORES} cores", f"over {WHOLE_CORES}", f"{whole / WHOLE_CORES:.3g} s"],
            ]
    note = (
        f"Not measured. V4-Flash has {WHOLE_LAYERS} layers, of which all but a few are as one of the two; reading the"
        " caches of a long context is not in it."
    )
    columns = ["what", "arithmetic", "estimate"]
    return [{"title": "The whole of V4-Flash, estimated", "columns": columns, "rows": cells, "note": note}]


def _run(folder: Path, model: Path, asked: dict[str, Any]) -> tuple[Measures, None]:
    warm(model)
    run = partial(call, profile, folder, model, environment=dict.fromkeys(THREADS, str(asked["threads"])))
    parts = run({**asked, "clock": True})
    return (parts if asked["kind"] != "decode" else parts | run({**asked, "clock": False})), None


def profile(folder: Path, model: Path, asked: dict[str, Any]) -> Measures:
    """In a process of its own: a call or decoded tokens with the code of `folder`; with a clock, parts in ms too."""
    for name in list(sys.modules):  # what the process was started with is of this folder
        if name.partition(".")[0] == "fathom":
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    package = "fathom." if (folder / "fathom.py").exists() else ""  # older commits have their folders at the top
    torch.set_num_threads(asked["threads"])
    clock, kind = Clock(), asked["kind"]
    loading = importlib.import_module(f"{package}runtime.load")
    assert str(loading.__file__).startswith(str(folder)), "the code of that commit, and not of this one"
    count = BEFORE_DECODE if kind == "decode" else kind
    if importlib.util.find_spec(f"{package}runtime.process") is not None:  # commits before it keep no memory
        importlib.import_module(f"{package}runtime.process").keep_memory()
    options = importlib.import_module(f"{package}runtime.options").RunOptions("deployed", "bf16", "cpu", count)
    ops = importlib.import_module(f"{package}kernels.ops").CPU
    ops = clock.watch(ops) if asked["clock"] else ops
    runs = loading.load(model, options, ops).model
    draw, vocabulary = torch.Generator().manual_seed(asked["seed"]), runs.config.vocab_size
    prompt = torch.randint(0, vocabulary, (count,), generator=draw)
    runs(prompt[:8], runs.new_state(8, 8))  # does not count
    state = runs.new_state(count + asked["decode"] + 1, count)
    clock.start()
    began = time.perf_counter()
    hidden = runs(prompt, state)
    taken = time.perf_counter() - began
    if kind != "decode":
        return {"call, s": taken, **clock.stop("call", 1e3)}
    times: list[float] = []
    heads: list[float] = []
    for step, token in enumerate(torch.randint(0, vocabulary, (asked["decode"] + 1, 1), generator=draw)):
        if step == 1:  # the first does not count
            clock.start()
            times.clear()
        began = time.perf_counter()
        hidden = runs(token, state)
        if asked["head"]:
            int(runs.logits(hidden)[0].argmax())
        times.append(1e3 * (time.perf_counter() - began))
    parts = clock.stop("token", 1e3 / asked["decode"]) if asked["clock"] else {}
    if asked["head"]:
        return {TOKEN: median(times), "tokens/s": 1e3 / median(times), **parts}
    for _ in range(3):
        began = time.perf_counter()
        runs.logits(hidden)
        heads.append(1e3 * (time.perf_counter() - began))
    return {TOKEN: median(times), HEAD: median(heads), **parts}


# --- floors


def _floor(model: Path, kind: str | int, threads: int) -> tuple[Measures, None]:
    return call(floor, model, kind, environment=dict.fromkeys(THREADS, str(threads))), None


def floor(model: Path, kind: str | int) -> Measures:
    """In a process of its own: what a token, or a call of so many, takes at the rates of torch's sum and product."""
    reads, wide, narrow = reading(), multiplying(torch.float32), multiplying(torch.bfloat16)
    rates = {
        "reading, GB/s": reads / 1e9, "fp32 products, GFLOP/s": wide / 1e9, "bf16 products, GFLOP/s": narrow / 1e9,
    }  # fmt: skip
    if isinstance(kind, str):
        token, head = _token_and_head(model)
        return {TOKEN: 1e3 * token / reads, HEAD: 1e3 * head / reads, **rates}
    loaded = load(model, RunOptions("deployed", "bf16", "cpu", 512))
    config, held, weights = loaded.model.config, 0.0, 0.0
    assert isinstance(config, ModelConfig)
    share = config.num_experts_per_tok / config.n_routed_experts
    for name, nbytes in loaded.held.items():
        if "embed" in name or name.startswith("head"):
            continue
        routed = ".ffn.experts." in name
        held += nbytes * (1 - (1 - share) ** kind if routed else 1)  # of the experts those that some token goes to
        shape = loaded.census.demanded[name].shape
        weights += shape[0] * shape[1] * (share if routed else 1) if len(shape) == 2 else 0
    return {"call, s": max(held / reads, 2 * kind * weights / max(wide, narrow)), **rates}


def _token_and_head(model: Path) -> tuple[int, int]:
    """Bytes of weights that a token reads in all layers, and those of the head."""
    loaded = load(model, RunOptions("deployed", "bf16", "cpu", 512))
    head = loaded.held["head.weight"]
    return token_bytes(loaded) - head, head


def reading() -> float:
    """Read bandwidth of all threads in bytes a second: torch.sum, best of several runs."""
    return READ / _best(torch.ones(READ // 8, dtype=torch.int64).sum)


def multiplying(dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's product, the second matrix transposed or not: the best."""
    one, other, out = (torch.ones(SQUARE, SQUARE, dtype=dtype) for _ in range(3))
    taken = min(_best(partial(torch.mm, one, second, out=out)) for second in (other, other.T))
    return 2 * SQUARE**3 / taken


def _best(run: Any) -> float:
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)


@contextmanager
def worktree(commit: str) -> Iterator[tuple[Path, str]]:
    """A folder with the files of a commit, and its hash; ConfigError where git knows none of that name."""
    git = shutil.which("git")
    if git is None:
        raise ConfigError("--before: needs git, which is not installed")
    known = subprocess.run(  # noqa: S603
        [git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}"],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if known.returncode:
        raise ConfigError(f"--before {commit}: git knows no such commit here")
    found = known.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "before"
        subprocess.run([git, "worktree", "add", "--quiet", "--detach", place, found], cwd=ROOT, check=True)  # noqa: S603
        try:
            yield place, found
        finally:
            subprocess.run([git, "worktree", "remove", "--force", place], cwd=ROOT, check=True)  # noqa: S603
