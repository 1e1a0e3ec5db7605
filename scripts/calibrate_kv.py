"""`python -m scripts.calibrate_kv`: fit a basis to the entries of each layer, for ``--kv LAYERS=shard:basis=FILE``.

A text is run through the full cache, in fp32 and without rounding. Where a layer's entries are better remembered in a
basis than rotated, at the same bytes, as predicted, on entries that the fit has not seen, and by what attention gives,
the file has the basis; for the other layers it says what either loses.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from fathom.model.choices import SHARD_BITS
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.files import read_text
from fathom.runtime.options import RunOptions
from fathom.runtime.text.encoding import raw_ids
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positions, positive
from fathom.scripts.paths import MAX_TEXT_BYTES, Models, Texts, Writes

if TYPE_CHECKING:
    from fathom.kernels.formats.basis_fit import Fitted, Loss
    from fathom.probes.subject import Subject

TOKENS = 32768
CONTEXT = 131072


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.calibrate_kv", description=__doc__)
    p.add_argument("model", action=Models, help="checkpoint directory")
    p.add_argument("--out", action=Writes, required=True, help="safetensors file to write")
    p.add_argument("--text", action=Texts, help="file to run (default: documents of the demo, if the model reads them)")
    p.add_argument("--tokens", type=positive, help=f"of the text, at most (default {TOKENS}, or the model's positions)")
    p.add_argument("--bits", type=int, choices=SHARD_BITS, default=6, help="of a rotated row's values (default 6)")
    p.add_argument(
        "--context",
        type=positions,
        default=CONTEXT,
        help=f"positions over whose entries the bytes of a basis are spread (default {CONTEXT})",
    )
    p.add_argument("--prefill-chunk", type=positive, default=512, help="tokens per call (default 512)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (default cpu)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    from fathom.probes.subject import Subject
    from fathom.runtime.basis import write_basis
    from fathom.runtime.calibrate import fit_layers, samples, with_entries
    from fathom.runtime.kv import variants
    from fathom.runtime.load import load

    options = RunOptions("plain", "fp32", args.device, args.prefill_chunk)
    subject = Subject(args.model, options)
    config = subject.config
    if config.v41 is not None:
        raise ConfigError(f"{args.model}: a basis is of --kv, which is not built for DeepSeek-V4.1")
    if not with_entries(config):
        raise ConfigError(f"{args.model}: has SWA layers alone, which remember no entries")
    variants([f"all=shard:bits={args.bits}"], config)  # refuses widths that cannot be rotated
    room = config.max_position_embeddings
    if args.tokens is not None and args.tokens > room:
        raise CapacityError(f"--tokens {args.tokens}: beyond the model's max_position_embeddings {room}")
    ids = _tokens(subject, args.text, args.tokens or min(TOKENS, room))
    loaded = load(args.model, options, context=len(ids))
    made = samples(loaded.model, ids, options.prefill_chunk)
    found = dict(fit_layers(config, made, args.bits, args.context))
    told = {"tokens": len(ids), "context": args.context}
    write_basis(args.out, found, config, loaded.weights_fingerprint, args.bits, told)
    counts = {layer: len(sample.entries) for layer, sample in made.items()}
    Console().print(table(config, found, counts, args.bits, args.context))
    based = [layer for layer, each in found.items() if each.pays]
    print(f"{args.out}: a basis for {len(based)} of {len(found)} layers {based or ''}".rstrip(), file=sys.stderr)
    return 0


def table(config: ModelConfig, found: "dict[int, Fitted]", counts: dict[int, int], bits: int, context: int) -> Table:
    """Losses of both forms by layer, at the same bytes; of a basis the bits of its groups, and of the rope dims."""
    from fathom.kernels.formats.basis_fit import rotated_bytes, shared_bytes

    out = Table("layer", "kind", "entries", "form", "B/entry", "predicted", "measured", "attention", "chosen")
    out.caption = "squared errors over squared lengths: of entries, as predicted and of unseen ones; of attention"
    for layer, each in found.items():
        name = (str(layer), config.layer_kind(layer).name, str(counts[layer]))
        won, lost = ("", "yes") if each.pays else ("yes", "")
        out.add_row(
            *name, f"rotated, {bits} bits", str(rotated_bytes(config.head_dim, bits)), *_told(each.rotated), won
        )
        if each.based is None:
            out.add_row("", "", "", f"basis: {each.why_none}", "-", "-", "-", "-", lost)
            continue
        width = config.head_dim - config.qk_rope_head_dim
        shared = shared_bytes(width) / (context // config.ratio(layer))
        form = f"basis, {' '.join(map(str, each.bits))} | {each.rope_bits}"
        out.add_row("", "", "", form, f"{each.row_bytes} + {shared:.1f}", *_told(each.based), lost)
    return out


def _told(loss: "Loss") -> tuple[str, ...]:
    return tuple(f"{value:.1e}" for value in loss)


def _tokens(subject: "Subject", text: Path | None, most: int) -> list[int]:
    """BOS and the text, or documents of the demo's language; ConfigError where there is neither."""
    if text is None:
        if not subject.speaks_demo_language:
            raise ConfigError("--text: this model does not read the demo's language; give a text that it does read")
        return subject.tokens(most)
    written = read_text(text, MAX_TEXT_BYTES, ConfigError)
    ids = raw_ids(written, subject.config, Tokenizer(subject.directory, subject.config.vocab_size))
    if not ids.text:
        raise ConfigError(f"{text}: the text is empty")
    return [*ids.before, *ids.text][:most]


if __name__ == "__main__":
    sys.exit(run_alone(main))
