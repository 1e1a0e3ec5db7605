"""Flags that several scripts share, and their checks."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from fathom.model.choices import (
    ALL,
    AUTO,
    DRAFTS,
    DSPARK,
    DTYPES,
    ENTRY_FORMATS,
    EXPERTS,
    FP8_PRODUCTS,
    INDEX_SCORES,
    KEY_FORMATS,
    NUMERICS,
    OFF,
    OP_SETS,
    OWN,
    RANK_TOKENS,
)
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.rounding import Rounding
from fathom.runtime.options import DEMO, TIMEOUT, RunOptions
from fathom.runtime.text.encoding import EFFORTS, EFFORTS_V41, V41
from fathom.scripts.hub import WEIGHTS
from fathom.scripts.paths import Models, Reports, Tensors

SHORTEST = 2  # seconds of --rank-timeout: a rank shows twice a second that it lives
DRAFT_TOKENS, DRAFT_CONFIDENCE = 5, 0.3
UNITS = {"K": 1 << 10, "M": 1 << 20}  # of a number of positions


def positive(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    """Argparse type: a whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def chance(text: str) -> float:
    """Argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def positions(text: str) -> int:
    """Argparse type: a number of positions of at least 1, as 131072, 128K or 1M; K is 1,024 and M 1,048,576."""
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of positions, such as 131072, 128K or 1M")
    return unit * int(digits)


def numbers(text: str) -> tuple[int, ...]:
    """Argparse type: whole numbers from 0 on between commas, ascending."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: want numbers between commas")
    return tuple(sorted({int(part) for part in parts}))


def lengths(text: str) -> tuple[int, ...]:
    """Argparse type: numbers of positions between commas, ascending, each as of `positions`."""
    return tuple(sorted({positions(part) for part in text.split(",")}))


def add_model(
    p: argparse.ArgumentParser,
    needs: str = WEIGHTS,
    *,
    default: Path | None = DEMO,
    action: type[Models] = Models,
    more: str = "",
    instead: Callable[[argparse._MutuallyExclusiveGroup], object] | None = None,
) -> None:
    """Add the flags of the checkpoint.

    Parameters
    ----------
    p
        Where to.
    needs
        What a model on the hub is asked for: WEIGHTS, HEADERS or INDEX, see `scripts.hub`.
    default
        None: the demo checkpoint too, but what else may be named instead can be seen.
    action, more
        What else than a folder and a name on the hub the flag takes, and what its help says of that.
    instead
        Adds flags of which one excludes this one.

    """
    group = p.add_mutually_exclusive_group()
    group.add_argument(
        "--model",
        action=action,
        default=default,
        help="checkpoint directory, or owner/name on the Hugging Face hub, from its cache or downloaded"
        f"{more} (default: the demo checkpoint)",
    )
    if instead is not None:
        instead(group)
    p.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
    p.set_defaults(hub_needs=needs, hub=None, headers=None)


def add_json(p: argparse.ArgumentParser, what: str) -> None:
    """Add the flag of a report in JSON."""
    p.add_argument("--json", action=Reports, metavar="FILE", help=f"write {what} there")


def add_prompt_format(p: argparse.ArgumentParser) -> None:
    """Add the flags of how a text becomes a prompt."""
    p.add_argument("--raw", action="store_true", help="no chat format: BOS, then the text as it is")
    p.add_argument("--think", action="store_true", help="let the model reason before it answers")
    p.add_argument(
        "--effort",
        metavar="REVISION:LEVEL",
        help="reasoning effort with --think; "
        + ", ".join(f"{r}:{'|'.join(levels)}" for r, levels in {**EFFORTS, V41: (*EFFORTS_V41, "1 to 100")}.items()),
    )


def add_sampling(p: argparse.ArgumentParser) -> None:
    """Add the flags of how a token is chosen; `check_sampling` looks at them."""
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="nucleus mass in (0, 1] (default 1)")
    p.add_argument("--seed", type=int, default=0, help="of the sampling generator (default 0)")


def add_run_options(p: argparse.ArgumentParser, device: str = "cpu") -> None:
    """Add the flags of `RunOptions`; `device` is the default of its flag."""
    default = RunOptions()

    def one_of(field: str, choices: Sequence[str], what: str) -> None:
        p.add_argument(f"--{field.replace('_', '-')}", choices=choices, default=getattr(default, field), help=what)

    add_call(p, device)
    add_numerics(p, default.numerics, "(default)")
    one_of("dtype", DTYPES, "of activations and caches (default bf16)")
    one_of(
        "entry_format",
        ENTRY_FORMATS,
        "how compressed entries are stored: in the run's dtype (default), or fp8: the same numbers in 584 bytes"
        " instead of 1024 (V4)",
    )
    one_of(
        "key_format",
        KEY_FORMATS,
        "how index keys are stored: in the run's dtype (default), fp8 or fp4: the same numbers in 132 or 68 bytes"
        " instead of 256 (V4)",
    )
    one_of(
        "index_scores",
        INDEX_SCORES,
        "how the indexer scores keys: exact (default), or fp8, an approximation: queries rounded to E4M3 with a"
        " power of two per head, for products at the rate of FP8; with --key-format fp8 (V4)",
    )
    one_of(
        "fp8_products",
        FP8_PRODUCTS,
        "how FP8 linears of more than 16 tokens, and FP4 experts of more than 32, are summed: exact, in fp32; fp8,"
        " as a GPU's FP8 products do, codes by codes, promoted to fp32 each 128 columns (--numerics deployed, --dtype"
        " bf16); or auto: fp8 where the GPU has them (default) (V4)",
    )
    one_of(
        "experts",
        EXPERTS,
        "how routed experts lie on several ranks: whole, each on one rank, to which tokens are dispatched; rows of"
        " each on every rank; or auto, what the plan says is faster for the prompt and the answer, or where a command"
        " knows neither for a call of --prefill-chunk and 128 new tokens (default) (V4)",
    )
    p.add_argument(
        "--rank-tokens",
        "--dispatch",  # its name, and its values, of before
        choices=RANK_TOKENS,
        type=lambda given: {"all-reduce": ALL, "all-to-all": OWN}.get(given, given),
        default=default.rank_tokens,
        help="on several ranks, which of a call's tokens each has between attentions: all, its own, or auto, by their"
        " number (default) (V4); --dispatch, all-reduce and all-to-all are its name and values of before",
    )


def add_call(p: argparse.ArgumentParser, device: str = "cpu") -> None:
    """Add the flags of where a run is, and in what calls."""
    p.add_argument(
        "--prefill-chunk", type=positive, default=RunOptions().prefill_chunk, help="tokens per call (default 512)"
    )
    p.add_argument(
        "--device", choices=("cpu", "cuda"), default=device, help=f"where weights and caches are (default {device})"
    )


def add_numerics(p: argparse.ArgumentParser, default: str | None, told: str) -> None:
    """Add the flags of what is rounded, of which one excludes the other: both are `numerics`."""
    of_run = p.add_mutually_exclusive_group()
    of_run.add_argument(
        "--numerics",
        choices=NUMERICS,
        default=default,
        help=f"deployed: activations rounded as DeepSeek serves V4 {told}; plain: as transformers computes",
    )
    of_run.add_argument(
        "--rounding",
        dest="numerics",
        type=_rounding,
        metavar="linears=fp8|none,kv=fp8|none,index=fp4|fp8|none",
        help="each of the three roundings by itself: inputs of linears, KV, the indexer's queries and keys (fp4 with a"
        " Hadamard transform, fp8 by row without one); compare takes llama.cpp's linears=ggml, kv=f16, index=f16 too",
    )


def _rounding(text: str) -> str:
    try:
        return Rounding.of(text).numerics
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_op_set(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run on any op set."""
    p.add_argument(
        "--ops",
        choices=OP_SETS,
        help="backend: reference (the equations, whose memory no plan covers), cpu (PyTorch in tiles, on any device) or"
        " triton; default cpu, and triton with --device cuda",
    )


def add_graph(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that decode."""
    p.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="decode by a CUDA graph of one token, with all tripwires: of a V4 model with --device cuda, --ops triton,"
        " all caches in full and no draft head, where it is the default; elsewhere --graph is refused, and a report"
        " says why a run decodes eagerly",
    )


def add_draft(p: argparse.ArgumentParser) -> None:
    """Add the flags of scripts that draft tokens."""
    p.add_argument(
        "--draft",
        choices=DRAFTS,
        default=OFF,
        help="guess tokens and verify them in one call of the model; the text stays the same (--ops cpu or triton)."
        " lookup: what followed the last tokens before follows again; mtp, dspark: by the checkpoint's draft head;"
        " auto: by the one that it has, or lookup (default off)",
    )
    p.add_argument("--draft-tokens", type=positive, help=f"drafted at a time, at most 7 (default {DRAFT_TOKENS})")
    p.add_argument(
        "--draft-confidence",
        type=chance,
        metavar="P",
        help="of DSpark: run the longest beginning of a draft that is accepted as a whole with such a chance"
        f" (default {DRAFT_CONFIDENCE})",
    )


def add_variants(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run any variant of a layer's cache; probes hold the full one."""
    p.add_argument(
        "--kv",
        action="append",
        default=[],
        metavar="LAYERS=VARIANT",
        help="how layers remember what is older than their window, as in all=shard, hca=coda:window=128 or"
        " 3,5-9=shard:bits=8; may come several times, the later counts (default all=full)",
    )
    p.add_argument(
        "--coda-adapters",
        type=str,
        action=Tensors,
        metavar="FILE",
        help="CoDA-GQA-L adapters over a Llama-family checkpoint: coda_adapters.safetensors, or .pt as published",
    )


def add_threads(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that compute on a CPU for a user who waits."""
    p.add_argument(
        "--threads",
        type=positive,
        help="on a CPU (default: 1 for a small model, whose ops are slower with more; else the cores that are free)",
    )


def add_rank_timeout(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run on several ranks."""
    p.add_argument(
        "--rank-timeout",
        type=_timeout,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"end the run when a rank keeps the others waiting so long (default {TIMEOUT:g})",
    )


def _timeout(text: str) -> float:
    seconds = positive(text)
    if seconds < SHORTEST:
        raise argparse.ArgumentTypeError(f"{text}: want at least {SHORTEST} seconds")
    return float(seconds)


def seed(args: argparse.Namespace) -> int:
    """Return --seed; ConfigError where no generator takes it."""
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: want 0 to 2^63 - 1")
    return int(args.seed)


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse what no sampling can be: ConfigError naming the flag."""
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature}: want a number >= 0")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p {args.top_p}: want a number in (0, 1]")
    seed(args)


def run_options(args: argparse.Namespace) -> RunOptions:
    """Return what `add_run_options` parsed."""
    named = [field.name for field in fields(RunOptions) if field.name in args and not field.name.startswith("draft")]
    given = {name: getattr(args, name) for name in named}
    options = RunOptions(**given | {"kv": tuple(given.get("kv", ()))})
    if "draft" not in args:
        return options
    by, tokens, confidence = args.draft, args.draft_tokens, args.draft_confidence
    if by == OFF and tokens is not None:
        raise ConfigError(f"--draft-tokens {tokens}: needs --draft")
    if by not in {AUTO, DSPARK} and confidence is not None:
        raise ConfigError(f"--draft-confidence {confidence:g}: only with --draft dspark or auto")
    if by == OFF:
        return options
    confidence = DRAFT_CONFIDENCE if confidence is None else confidence
    return replace(options, draft=by, draft_tokens=tokens or DRAFT_TOKENS, draft_confidence=confidence)


def check_layers(layers: Sequence[int] | None, count: int) -> None:
    """Refuse layers that the model does not have: ConfigError."""
    for layer in layers or ():
        if layer >= count:
            raise ConfigError(f"--layers {layer}: the model has layers 0-{count - 1}")


def chunk_lengths(tokens: int, chunk: int, decode_from: int | None) -> list[int]:
    """Return the lengths of the calls that make up a run."""
    prefilled = tokens if decode_from is None else decode_from
    if prefilled > tokens:
        raise CapacityError(f"--decode-from {prefilled}: there are {tokens} tokens")
    whole, rest = divmod(prefilled, chunk)
    return [chunk] * whole + [rest] * (rest > 0) + [1] * (tokens - prefilled)
