"""`python -m scripts.compare`: hold a recording of any runtime against the oracle or another, and name the fault.

A recording is a safetensors file, see README; `python -m scripts.record` makes one of this runtime. A dump of another
runtime is read as it is, under its own names: files of transformers' or llama.cpp's names, and what SGLang's dumper,
ATOM, msprobe and ds4 write. Each layer is computed in float64 from what the recording has before it, so an error in one
layer says nothing about the next.
With --against two recordings of one prompt are compared with each other: which numbers are the same, where they part
first, and whether rounding explains it.
Exit status: 0 all that was compared agrees; 1 something differs, or too little could be compared; 2 bad arguments or
files.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.choices import PLAIN, RECORDED_DTYPES
from fathom.model.config import ModelConfig, check_widths
from fathom.model.errors import ConfigError
from fathom.model.rounding import GGML, Rounding
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_json, add_model, add_numerics, check_layers, numbers, positive
from fathom.scripts.hub import INDEX
from fathom.scripts.paths import Dumps, Reads, Writes

SECONDS = 120


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.compare", description=__doc__)
    add_model(p, INDEX)
    p.add_argument(
        "--gguf",
        action=Reads,
        metavar="F.gguf",
        help="weights of a llama.cpp or ds4 run, in place of the checkpoint's: of --model, config.json alone is read",
    )
    p.add_argument(
        "--recording",
        action=Dumps,
        required=True,
        metavar="PATH",
        help="what the other runtime computed: a file, a folder, or how the names of all its files begin",
    )
    p.add_argument("--against", action=Dumps, metavar="PATH", help="another recording of the same prompt")
    p.add_argument("--tokens", action=Reads, metavar="IDS.json", help="the prompt, a JSON list, where a dump lacks it")
    p.add_argument(
        "--explain-names", action="store_true", help="list what became of each tensor, and why; nothing is judged then"
    )
    p.add_argument(
        "--layers", type=numbers, help="layers to judge, as 0,17 (default: all that were recorded, and the head)"
    )
    add_numerics(p, None, "(default: found from the recording)")
    p.add_argument("--dtype", choices=RECORDED_DTYPES, help="of the recorded run (default: what its numbers fit in)")
    p.add_argument("--map", action=Reads, metavar="F.json", help="a JSON object, their tensor's name to the site's")
    p.add_argument("--against-map", action=Reads, metavar="F.json", help="the same for the tensors of --against")
    p.add_argument(
        "--rows", type=_rows, help="rows of a site that are judged, or all (default: what two minutes allow)"
    )
    p.add_argument("--no-identify", action="store_true", help="do not look for the fault that explains a difference")
    p.add_argument(
        "--identify-seconds",
        type=positive,
        default=SECONDS,
        help=f"look for the fault for so long; what was not tried is told (default {SECONDS})",
    )
    p.add_argument(
        "--prefill-chunk", type=positive, help="tokens per call of the recorded run (default: all in one call)"
    )
    p.add_argument("--decode-from", type=positive, help="from here on the recorded run took one token at a time")
    p.add_argument("--picture", action=Writes, metavar="F.svg", help="draw how far each site is off, layer by layer")
    p.add_argument("--html", action=Writes, metavar="F.html", help="write all of it as one page that stands alone")
    add_json(p, "verdict, first difference, sites and faults")
    return p


def _rows(text: str) -> int | str:
    return text if text == "all" else positive(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    config = ModelConfig.from_file(args.model / "config.json")
    check_widths(config, Rounding.of(args.numerics or PLAIN))
    check_layers(args.layers, config.num_hidden_layers)
    if args.gguf is None and args.numerics is not None and Rounding.of(args.numerics).linears == GGML:
        raise ConfigError(f"--rounding {args.numerics}: the types of weights say how ggml rounds, want --gguf")
    if args.picture is not None and args.picture.suffix != ".svg":
        raise ConfigError(f"--picture {args.picture}: want a name that ends in .svg")
    for flag, given in (("--json", args.json), ("--html", args.html), ("--picture", args.picture)):
        if args.explain_names and given is not None:
            raise ConfigError(f"--explain-names: judges nothing, so there is nothing for {flag}")
    if args.against is None and args.against_map is not None:
        raise ConfigError("--against-map: there is no --against")
    for flag, given in (("--picture", args.picture), ("--html", args.html)):
        if args.against is not None and given is not None:
            raise ConfigError(f"{flag}: draws one recording, and --against compares two")
    if args.html is not None and args.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html {args.html}: want a name that ends in .html")
    if args.against is None:
        from fathom.scripts.parts.judging import judge

        return judge(args, config)
    from fathom.scripts.parts.judging_two import judge_two

    return judge_two(args, config)


if __name__ == "__main__":
    sys.exit(run_alone(main))
