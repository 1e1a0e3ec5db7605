"""What `scripts.train_coda` does once its command line is known to be good.

Everything is read and refused before anything is written. The folder is a new one; the adapters of phase 1 are in it
as soon as they are trained, so that an interrupted run leaves them.
"""

import argparse
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import fingerprint
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.files import read_text
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import Trained
from fathom.model.variants.choice import Full, GroupedCoda
from fathom.probes.demo_language.vocabulary import vocabulary_size
from fathom.probes.report import write
from fathom.runtime.errors import PromptError
from fathom.runtime.kv import variants
from fathom.runtime.load import check_device
from fathom.runtime.report import commit
from fathom.runtime.text.encoding import before_text
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.console import Console, grid, progress
from fathom.scripts.flags import seed
from fathom.scripts.paths import told
from fathom.scripts.train.coda_banks import trainable
from fathom.scripts.train.coda_measure import Document, Learned, Line, cases, documents, learned, measure
from fathom.scripts.train.coda_network import Bounded, adapted, attentions, twin
from fathom.scripts.train.coda_page import NAME, Facts, page, table
from fathom.scripts.train.coda_training import Phase, check_checkpointing, train
from fathom.scripts.train.documents import CODA_CELLS, Batch, draw_batch, sequences, shuffled
from fathom.scripts.train.files import read_llama, write_adapters
from fathom.scripts.train.learning import Draw, curve
from fathom.scripts.train.llama_network import Network
from fathom.scripts.train.recipe import Recipe, recipe_of

SHORTEST: Final = 256  # tokens of a document of the demo language that tells its codes and asks for them
LENGTHS, DOCUMENTS = (512, 1024), 24  # of the demo language, to measure
HELD_OUT_TOKENS: Final = 20_000  # of a text, to measure
HELD_OUT_PART: Final = 10  # one in so many sequences of a text whose end is held out
MAX_TEXT_BYTES: Final = 1 << 30  # of a file
BETWEEN: Final = "\n\n"  # files of one text
OF_A_TEXT = ("length", "batch", "held_out", "held_out_tokens")  # flags that mean nothing without --text
OF_THE_DEMO = ("lengths", "documents")  # and with it


class Material(NamedTuple):
    """What adapters are trained on and measured by."""

    draw: Draw
    held: dict[int, list[Document]]  # by length
    summary: str  # for the console
    sha256: str | None = None  # of the text that is trained on


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    start = time.process_time()
    _check(args)
    recipe, config = recipe_of(args), LlamaConfig.from_file(args.model / "config.json")
    variant = _variant(args, recipe, config)
    bounded = Bounded.of(variant, detach=args.detach_evicted)
    if (why := trainable(bounded.settings)) is not None:
        raise ConfigError(f"--coda {args.coda}: there are no gradients of {why}")
    material = _demo(args, config) if args.text is None else _text(args, recipe, config)
    console = Console()
    if args.device == "cpu":
        torch.set_num_threads(args.threads or 1)  # the order of additions must not depend on the machine's cores
    base, weights = read_llama(args.model).to(args.device), fingerprint(Checkpoint.open(args.model))
    parameters = sum(parameter.numel() for parameter in base.parameters())
    stages = [adapted(base, args.seed, recipe)]
    moving = sum(parameter.numel() for layer in attentions(stages[0]) for parameter in layer.parameters())
    console.say(f"{args.model}: {moving:,} parameters are trained, of a model of {parameters:,}", material.summary)
    for phase, kv, folder in (
        (Phase(1, recipe, None), Full(), args.out / "phase-1"),
        (Phase(2, recipe, bounded), variant, args.out),
    ):
        stages.append(twin(stages[-1]))
        _train(args, console, stages[-1], phase, material.draw)
        folder.mkdir(parents=True, exist_ok=True)
        size = write_adapters(stages[-1], Trained(config.fingerprint, weights, str(kv)), folder)
        console.say(f"{folder}: {size:,} bytes")
    training = time.process_time() - start
    lines, layers = _measure(console, base, stages, bounded, material)
    facts = Facts(
        checkpoint=args.model.resolve().name,
        weights=weights,
        config=config.fingerprint,
        text=_names(args.text),
        text_sha256=material.sha256,
        held_out=_names(args.held_out),
        kv=str(variant),
        detach_evicted=args.detach_evicted,
        seed=args.seed,
        recipe=recipe,
        device=args.device,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        commit=str(commit()),
        command=args.command_line,
        parameters=parameters,
        seconds=time.process_time() - start,
        training=training,
    )
    made = page(lines, layers, facts)
    console.say(f"{made.verdict}.", made.summary)
    write(made, args.out)
    if args.page is not None:
        write(replace(made, name=args.page.stem), args.page.parent)
    console.say(f"wrote {args.out / NAME}.md")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other: ConfigError, before anything is read."""
    check_checkpointing(args.checkpointing)
    check_device(args.device)
    seed(args)
    without, useless = ("without", OF_A_TEXT) if args.text is None else ("with", OF_THE_DEMO)
    for name in useless:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: means nothing {without} --text")
    if args.device != "cpu" and args.threads is not None:
        raise ConfigError(f"--threads {args.threads}: means nothing with --device {args.device}")


def _variant(args: argparse.Namespace, recipe: Recipe, config: LlamaConfig) -> GroupedCoda:
    """The bounded cache, as `--kv` spells it; ConfigError for settings that cannot be."""
    sizes = ",".join(f"{name}={getattr(recipe, name)}" for name in ("window", "exact", "summary", "block"))
    rule = f"all=coda:{sizes}" + (f",{args.coda}" if args.coda else "")
    where = f"--coda {args.coda}" if args.coda else "the bounded cache"
    try:
        variant = variants([rule], config)[0]
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'--kv {rule}: ')}") from None
    assert isinstance(variant, GroupedCoda), "by its rule"
    if variant.eta_logit != GroupedCoda().eta_logit or variant.untrained:
        raise ConfigError(f"{where}: eta_logit has a flag of its own, and untrained is of runs")
    return variant


def _demo(args: argparse.Namespace, config: LlamaConfig) -> Material:
    """Documents of the demo language; ConfigError or CapacityError for a model or lengths that cannot have them."""
    if config.vocab_size != (size := vocabulary_size()):
        raise ConfigError(f"{args.model}: vocab_size is {config.vocab_size}, the demo language has {size}; say --text")
    lengths, count = args.lengths or LENGTHS, args.documents or DOCUMENTS
    if min(lengths) < SHORTEST:
        raise ConfigError(f"--lengths {min(lengths)}: want at least {SHORTEST}, for codes, questions and a gap")
    _check_room("--lengths", max(lengths), config)
    held = {length: documents(length, count, args.seed + 1) for length in lengths}
    summary = f"documents of the demo language; {count} others of each length are measured on"
    return Material(partial(draw_batch, cells=CODA_CELLS), held, summary)


def _text(args: argparse.Namespace, recipe: Recipe, config: LlamaConfig) -> Material:
    """Sequences of a text, and of what is held out of it; PromptError for one that is too short."""
    _check_room("--length", recipe.length, config)
    if recipe.length <= recipe.window:
        raise ConfigError(f"--length {recipe.length}: fits into --window {recipe.window}, nothing would be evicted")
    tokenizer = Tokenizer(args.model, config.vocab_size)
    first = tokenizer.encode(before_text(config, tokenizer))
    if recipe.length <= len(first):
        raise ConfigError(f"--length {recipe.length}: the tokenizer puts {len(first)} tokens before a text")

    def rows(text: str, paths: Sequence[Path], least: int) -> Tensor:
        cut = sequences(first, tokenizer.encode([Text(text)], continued=True), recipe.length)
        if len(cut) < least:
            have = "1 sequence" if len(cut) == 1 else f"{len(cut)} sequences"
            raise PromptError(
                f"{', '.join(map(str, paths))}: {have} of {recipe.length} tokens, want at least {least};"
                " a smaller --length makes more"
            )
        return cut

    text = _read(args.text)
    training = rows(text, args.text, 1 if args.held_out else 2)
    most = max(1, (args.held_out_tokens or HELD_OUT_TOKENS) // recipe.length)
    if args.held_out:
        held = rows(_read(args.held_out), args.held_out, 1)[:most]
    else:
        count = max(1, min(most, len(training) // HELD_OUT_PART))
        training, held = training[:-count], training[-count:]
    drawn = (recipe.phase1_steps + recipe.phase2_steps) * recipe.accumulate * recipe.batch
    summary = (
        f"{len(training)} sequences of {recipe.length} tokens, {len(held)} more held out;"
        f" each is trained on {drawn / len(training):.1f} times"
    )
    kept = [Document(row) for row in held.tolist()]
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Material(shuffled(training, recipe.batch), {recipe.length: kept}, summary, sha256)


def _read(paths: Sequence[Path]) -> str:
    return BETWEEN.join(read_text(path, MAX_TEXT_BYTES, PromptError) for path in paths)


def _names(paths: Sequence[Path] | None) -> tuple[str, ...]:
    return tuple(told(path) for path in paths or ())


def _check_room(flag: str, length: int, config: LlamaConfig) -> None:
    if length > (room := config.max_position_embeddings):
        raise CapacityError(f"{flag} {length}: beyond the model's max_position_embeddings {room}")


def _train(args: argparse.Namespace, console: Console, network: Network, phase: Phase, draw: Draw) -> None:
    """Run a phase, its curve on the console."""
    device = torch.device(args.device)

    def drawn(rng: random.Random) -> Batch:
        return draw(rng).to(device)

    with curve(console, phase.steps, phase.name, f"{phase.name} ") as tell:
        train(network, phase, args.seed, drawn, tell, checkpointing=args.checkpointing == phase.number)


def _measure(
    console: Console, base: Network, stages: Sequence[Network], bounded: Bounded, material: Material
) -> tuple[list[Line], list[Learned]]:
    """What every case shows at every length, a table of each on the console; and what the layers have learnt."""
    compared, lines = cases(base, stages, bounded), list[Line]()
    for length, held in material.held.items():
        with progress(console, len(compared) * len(held), "documents measured") as advance:
            added = measure(compared, length, held, advance)
        shown = table(added)
        console.say(shown.title)
        console.print(grid(shown))
        lines += added
    return lines, learned(stages[-1], material.held[max(material.held)], bounded)
