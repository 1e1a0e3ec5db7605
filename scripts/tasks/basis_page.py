"""What `scripts.basis_page` does once its command line is known to be good."""

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from rich.progress import track

from kernels.formats.basis_fit import FIT, Fitted, rotated_bytes, shared_bytes
from model.config import ModelConfig
from probes.subject import Subject
from runtime.calibrate import fit_layers, samples
from runtime.load import load
from runtime.options import DEMO, RunOptions
from runtime.output import write_text
from runtime.report import commit
from scripts.console import Console

BITS: Final = (4, 6)
CONTEXTS: Final = (2048, 8192, 32768, 131072, 1048576)

TEMPLATE: Final = """\
---
command: {command}
commit: {commit}
checkpoint: demo
weights: {weights}
tokens: {tokens}
numerics: plain
dtype: fp32
---

# Entries in a basis, or rotated: what either loses at the same bytes

{verdict}

`shard` stores an entry rotated by Hadamard, at so many bits a number. With `basis=FILE` the nope dims are coefficients
in a basis fitted to the layer instead, more bits where their variance is, for at most the same bytes, the basis
included, spread over the entries of a context. `scripts.calibrate_kv` fits it, and uses it only where it loses less in
three ways: as predicted from the variances, on entries that the fit has not seen, and in what the layer's own queries
get from the entries that they attend to: in an HCA layer those that the fit has not seen, in a CSA layer all that were
selected. Mean and basis are of the first half of a layer's entries, {fit} for each nope dim or more; scales and bits of
the next quarter; what is measured, of the last.

Each cell: squared error of the basis over that of the rotation, predicted, of unseen entries, of attention; **bold**
where the basis is used. Below 1 the basis is better. Entries of {tokens} tokens of the demo's documents:
{counts}.

{tables}

## What it means

Where predicted distortion alone decided, CSA layers would take a basis too, at long contexts. The average entry does
get better, by prediction and measured; what attention gives gets worse, as long as the context may be. What tokens
select are rare entries, which are unlike the mean and lie outside of the directions that the variance gave bits to. An
HCA layer attends to all of its entries, and there all three agree, on entries that nothing was fitted to: in a basis
whose bytes are spread over enough of them less is lost, and in one for a shorter context more.

These are entries of a small model: most of the energy of its nope dims is their mean, which a basis stores once. Of the
published models nothing is known here; `scripts.calibrate_kv` measures it on theirs.
"""


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    options = RunOptions("plain", "fp32")
    ids = Subject(DEMO, options).tokens(args.tokens)
    loaded = load(DEMO, options, context=len(ids))
    config = loaded.model.config
    made = samples(loaded.model, ids, options.prefill_chunk)
    cases = [(bits, context) for bits in BITS for context in CONTEXTS]
    shown = track(cases, "fitting", console=Console(stderr=True), transient=True)
    found = {case: dict(fit_layers(config, made, *case)) for case in shown}
    text = TEMPLATE.format(
        command=args.command_line,
        commit=commit(),
        weights=loaded.weights_fingerprint,
        tokens=len(ids),
        fit=FIT,
        counts=", ".join(f"{len(each.entries)} of layer {layer}" for layer, each in made.items()),
        verdict=verdict(config, found),
        tables="\n\n".join("\n".join(table(config, found, bits)) for bits in BITS),
    )
    write_text(args.page, text)
    print(f"{args.page}: written", file=sys.stderr)
    return 0


def table(config: ModelConfig, found: dict[tuple[int, int], dict[int, Fitted]], bits: int) -> Iterator[str]:
    """Markdown lines: a row for each context, a column for each layer."""
    layers = list(next(iter(found.values())))
    names = [f"{config.layer_kind(layer).name} layer {layer}" for layer in layers]
    basis = shared_bytes(config.head_dim - config.qk_rope_head_dim)
    entry = rotated_bytes(config.head_dim, bits)
    yield f"**{bits} bits**, {entry} bytes an entry; a basis takes {basis:,} bytes a layer"
    yield ""
    yield f"| context | {' | '.join(names)} |"
    yield "|---|" + "---:|" * len(names)
    for context in CONTEXTS:
        cells = [cell(found[bits, context][layer]) for layer in layers]
        yield f"| {context // 1024}K | {' | '.join(cells)} |"


def cell(fitted: Fitted) -> str:
    """Losses of the basis over those of the rotation."""
    if fitted.based is None:
        return fitted.why_none
    shares = (based / rotated for based, rotated in zip(fitted.based, fitted.rotated, strict=True))
    text = ", ".join(f"{share:.2f}" for share in shares)
    return f"**{text}**" if fitted.pays else text


def verdict(config: ModelConfig, found: dict[tuple[int, int], dict[int, Fitted]]) -> str:
    """One line: which layers take a basis, from which context on."""
    said = []
    for bits in BITS:
        for layer in next(iter(found.values())):
            taken = [context for context in CONTEXTS if found[bits, context][layer].pays]
            if taken:
                kind = config.layer_kind(layer).name
                said.append(f"at {bits} bits {kind} layer {layer}, from a context of {min(taken) // 1024}K on")
    return f"**A basis is used {'; '.join(said) if said else 'nowhere'}; every other layer is rotated.**"
