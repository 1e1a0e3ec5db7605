"""A recording judged by the oracle, and what explains it: what `scripts.compare` says, as values.

from fathom.probes.verdict import judge
verdict = judge({"tokens": ids, "model.layers.3.self_attn.q_a_norm.output": x, ...}, Path("DIR"))
print(verdict.verdict, verdict.first, verdict.faults)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint.census import Census, census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.folder import TOKENIZER
from fathom.model.choices import PLAIN, RECORDED_DTYPES
from fathom.model.config import ModelConfig, check_widths
from fathom.model.errors import ConfigError
from fathom.model.rounding import FP8, GGML, Rounding
from fathom.probes.judge.causes import Explained, Gap, Place, places
from fathom.probes.judge.checks import Checks, Difference, Judged, Progress, Status, silent
from fathom.probes.judge.dump import in_memory
from fathom.probes.judge.exercised import Unseen, unseen
from fathom.probes.judge.faults_v41 import explained
from fathom.probes.judge.gguf import GgufCheckpoint, open_gguf
from fathom.probes.judge.naming import Line
from fathom.probes.judge.numerics import Found, find, other_numerics
from fathom.probes.judge.oracle import Noise, Parameters, Setting, Unknown
from fathom.probes.judge.recording import CHOICES, Recording
from fathom.runtime.text.alike import numbers_of

DTYPES: Final = dict(zip(RECORDED_DTYPES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
SECONDS: Final = 120.0
MOST_OF_GGUF: Final = 1 << 30  # bytes of a layer in float32, in which faults are tried: each of them reads it anew
CHOSEN_FIRST: Final = ("indexer.selected", "experts.ids")  # without them a wrong choice hides
WIDE: Final = 0.1  # a bound in units of a row's length that is said to be wide


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a recording."""

    verdict: str  # agrees | differs | nothing compared
    first: Difference | None  # layer by layer
    sites: list[Judged]
    faults: list[Explained]  # that explain what differs, best first, each once
    rounding: Rounding  # that it was judged as
    names: list[Line]  # what became of each tensor
    told: list[str]  # how they were read
    warnings: list[str]  # wide bounds, near ties, choices that were not recorded, a fault that was not looked for
    not_exercised: list[Unseen]  # what these rows could not have shown


def judge(  # noqa: PLR0913 -- as many as `compare` has flags
    recording: Mapping[str, Tensor] | Path,
    model: Path,
    *,
    tokens: Tensor | None = None,
    names: Mapping[str, str] | None = None,
    layers: Sequence[int] | None = None,
    numerics: str | None = None,
    dtype: str | None = None,
    gguf: Path | None = None,
    rows: int | Literal["all"] | None = None,
    calls: Sequence[int] | None = None,
    identify_seconds: float = SECONDS,
) -> Verdict:
    """Judge a recording against a checkpoint. What may be said is what the flags of `compare` of these names say.

    Parameters
    ----------
    recording
        Tensors by name, ours or those of a runtime that has a table; or a file or folder, as `compare` takes.
    model
        The checkpoint's folder.
    tokens
        The prompt, [t] int64, where the recording lacks it.
    names
        Their name -> the site's.
    layers
        To judge; None: all that were recorded, and the head.
    numerics
        Of the run: "deployed", "plain", or as "linears=none,kv=fp8,index=none"; None: found from the recording.
    dtype
        Of the run: "bf16", "fp16" or "fp32"; None: what its numbers fit in.
    gguf
        A file with the weights of the run, in place of the checkpoint's.
    rows
        Of a site that are judged, or "all"; None: what two minutes allow.
    calls
        Lengths of the calls of the run; None: as the recording says, or one.
    identify_seconds
        How long a fault is looked for; 0: none is.

    Raises
    ------
    ConfigError, CheckpointError, PromptError
        With one line naming what is at fault; the last of a tokenizer.json.

    """
    if calls is not None and min(calls, default=0) < 1:
        raise ConfigError(f"calls {list(calls)}: want lengths of 1 or more")
    config = ModelConfig.from_file(model / "config.json")
    dump = recording if isinstance(recording, Path) else in_memory(recording)
    opened_recording = Recording(dump, config, names, tokens)
    run = opened(
        opened_recording,
        weights_of(model, config, gguf, numerics),
        dtype,
        numerics,
        alike=ids_alike(model, config),
    )
    checks = Checks(run.setting, run.recording, rows_of(rows, run.recording))
    results = judge_layers(checks, layers)
    found = dict[tuple[str, ...], Explained]()
    warnings, size = rests_on(results, config), too_large(run.census) if gguf else 0.0
    if identify_seconds and size and places(results):
        warnings.append(f"No fault was looked for: a layer of {gguf} takes {size:.1f} GiB in float32.")
    elif identify_seconds:
        lengths = calls or run.recording.calls or [len(run.recording.tokens)]
        for place in explain(run, results, lengths, identify_seconds)[0]:
            if place.named is not None:
                found.setdefault(place.named.names, place.named)
    return Verdict(
        verdict_of(results),
        first_difference(results),
        results,
        sorted(found.values(), key=lambda fault: -fault.share),
        run.setting.rounding,
        run.recording.lines,
        run.recording.told,
        warnings,
        unseen(checks, results),
    )


class Run(NamedTuple):
    """A recorded run, and what it is judged as."""

    recording: Recording
    setting: Setting
    numerics: Found
    census: Census
    seen: bool  # whether the recording itself shows the dtype


def weights_of(
    model: Path, config: ModelConfig, gguf: Path | None = None, numerics: str | None = None
) -> tuple[Parameters, Census]:
    """The weights of a checkpoint, of which files may be missing, or those of a GGUF, whose runs have no FP8."""
    if gguf is not None and numerics is not None and Rounding.of(numerics).linears == FP8:
        raise ConfigError(
            f"--gguf {gguf}: no run rounds inputs of its linears to FP8, and {numerics} numerics do; say plain, or"
            " --rounding linears=ggml,... or linears=none,..."
        )
    where = gguf or model
    checkpoint = open_gguf(gguf, config) if gguf else Checkpoint.open(model, partial=True)
    counted = census(checkpoint.shapes(), config, where=str(where), absent=checkpoint.absent)
    types = checkpoint.types if isinstance(checkpoint, GgufCheckpoint) else None
    return Parameters(checkpoint, counted, types), counted


def opened(
    recording: Recording,
    weights: tuple[Parameters, Census],
    dtype: str | None = None,
    numerics: str | None = None,
    said: Progress = silent,
    alike: Tensor | None = None,
) -> Run:
    """A recording with the weights of its model, and with the dtype and numerics that are given, or that it shows."""
    config, (parameters, counted) = recording.config, weights
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{dtype}: no dtype of a run, want {', '.join(DTYPES)}")
    seen = None if dtype else recording.run_dtype()
    of_run = DTYPES[dtype] if dtype else seen or torch.bfloat16
    rounding = Rounding.of(numerics or PLAIN)
    check_widths(config, rounding)
    if rounding.linears == GGML and not parameters.types:
        raise ConfigError(f"{rounding.numerics}: the types of weights say how ggml rounds, and there is no GGUF")
    setting = Setting(
        config, parameters, recording.tokens, rounding, recording, Noise(of_run), replay=recording.replay, alike=alike
    )
    found = find(setting, recording, said) if numerics is None else Found(rounding, {})
    return Run(recording, replace(setting, rounding=found.rounding), found, counted, seen=seen is not None)


def ids_alike(model: Path, config: ModelConfig) -> Tensor | None:
    """What V4.1's n-gram tables are looked up by, [vocab]; None for a V4, and where there is no tokenizer.json."""
    if config.v41 is None or not (model / TOKENIZER).is_file():
        return None
    return torch.tensor(numbers_of(model, config))


def rows_of(rows: int | Literal["all"] | None, recording: Recording) -> int | None:
    """How many rows of a site are judged: so many, "all" of them, or what the time allows."""
    return len(recording.tokens) if rows == "all" else rows


def too_large(counted: Census) -> float:
    """GiB of a layer in float32, where a GGUF's are too many to try faults in; 0 where they are not."""
    layer = sum(math.prod(one.shape) for name, one in counted.demanded.items() if name.startswith("layers.0."))
    size = layer * torch.float32.itemsize
    return size / 2**30 if size > MOST_OF_GGUF else 0.0


def layers_needed(recording: Recording, layers: Sequence[int] | None) -> set[int]:
    """Layers whose weights judging takes: those judged, and those that these are computed from or read, unrecorded."""
    there, needed = recording.tensors, set[int]()
    named = [n for n in range(recording.config.num_hidden_layers) if any(x.startswith(f"layers.{n}.") for x in there)]
    open_ones = list(named if layers is None else layers)
    while open_ones:
        layer = open_ones.pop()
        if layer not in needed:
            needed.add(layer)
            open_ones += _read_by(recording, layer)
            if layer and f"layers.{layer - 1}.streams" not in there:
                open_ones.append(layer - 1)
    return needed


def _read_by(recording: Recording, layer: int) -> set[int]:
    """Other layers of V4.1 that one reads something of which was not recorded."""
    config = recording.config
    if config.v41 is None:
        return set()
    read = {f"layers.{layer - 1}.experts.pre": layer - 1} if layer else {}
    if config.ratio(layer):
        entries, selection = config.entry_source(layer), config.selection_source(layer)
        read |= {f"layers.{entries}.attention.entry": entries, f"layers.{selection}.indexer.selected": selection}
    if config.selects(layer):
        read[f"layers.{config.entry_source(layer)}.indexer.key_used"] = config.entry_source(layer)
        if layer > config.v41.candidate_source:
            read[f"layers.{config.v41.candidate_source}.indexer.candidates"] = config.v41.candidate_source
    return {source for name, source in read.items() if name not in recording.tensors} - {layer}


def judge_layers(checks: Checks, layers: Sequence[int] | None, said: Progress = silent) -> list[Judged]:
    """All recorded sites, or those of some layers; ConfigError where one that is asked for cannot be judged at all."""
    parameters = checks.setting.parameters
    for layer in layers or ():
        if not checks.recorded(layer):
            raise ConfigError(f"--layers {layer}: no site of it is in {checks.where}")
        for name in [*parameters.mappings, *parameters.absent]:
            if name.startswith(f"layers.{layer}."):
                try:
                    parameters.mapping(name)
                except Unknown as unknown:
                    raise ConfigError(f"--layers {layer}: {unknown}") from None
    chosen = range(checks.config.num_hidden_layers) if layers is None else layers
    chosen = [layer for layer in chosen if checks.recorded(layer)]
    results: list[Judged] = []
    for number, layer in enumerate(chosen):

        def some(what: str, share: float, number: int = number) -> None:
            said(what, (number + share) / len(chosen))

        results += checks.layer(layer, some)
    ends = [] if layers is not None else checks.ends(said)
    before = [judged for judged in ends if judged.site == "embedded"]
    return before + results + [judged for judged in ends if judged.site != "embedded"]


def explain(
    run: Run, results: Sequence[Judged], calls: Sequence[int], seconds: float, said: Progress = silent
) -> tuple[list[Place], dict[str, Rounding]]:
    """What explains each site that differs, and which other roundings were tried as causes."""
    if not places(results):
        return [], {}
    others = {} if run.numerics.rests or run.setting.config.v41 else other_numerics(run.setting, run.recording, said)
    return identified(run, results, calls, seconds, said, others), others


def identified(
    run: Run,
    results: Sequence[Judged],
    calls: Sequence[int],
    seconds: float,
    said: Progress,
    others: Mapping[str, Rounding],
    gap: Callable[[Judged], Gap] | None = None,
) -> list[Place]:
    """What explains each site that differs; `gap`: what is to be explained of it, see `Identifier`."""
    if run.setting.config.v41 is not None:
        return explained(run.setting, run.recording, results, calls, seconds, said, gap)
    from fathom.probes.identify import Identifier  # noqa: PLC0415 -- runs our model, seconds to import

    return Identifier(run.setting, run.recording, run.census, calls, others, seconds, gap).identify(results, said)


def dtype_name(dtype: torch.dtype) -> str:
    """As flags name it."""
    return next(name for name, known in DTYPES.items() if known is dtype)


def verdict_of(results: Sequence[Judged]) -> str:
    """Of all that was recorded: what is not judged is no agreement, and most of it leaves none."""
    if any(judged.status is Status.DIFFERS for judged in results):
        return "differs"
    agree = sum(judged.status is Status.AGREES for judged in results)
    return "agrees" if agree and 2 * agree >= len(results) else "nothing compared"


def first_difference(results: Sequence[Judged]) -> Difference | None:
    """The first difference, layer by layer."""
    return next((judged.first for judged in results if judged.first is not None), None)


def rests_on(results: Sequence[Judged], config: ModelConfig) -> list[str]:
    """What an agreement rests on: rows that only near ties explain, choices that were not recorded, wide bounds."""
    lines = []
    if ties := [judged for judged in results if judged.ties]:
        rows = sum(judged.ties for judged in ties)
        lines.append(
            f"Looked at again: {rows} {'row' if rows == 1 else 'rows'} of {', '.join(judged.name for judged in ties)}"
            " stood out, and rounding explains them: near ties that it may take either way, or more draws of it."
        )
    if some := [judged for judged in results if judged.open]:
        rows = sum(judged.open for judged in some)
        lines.append(
            f"Not looked at again to the end: {rows} {'row' if rows == 1 else 'rows'} of"
            f" {', '.join(judged.name for judged in some)}. They follow from too many others that were not recorded, or"
            " are too many; a near tie may explain them."
        )
    if assumed := {site for judged in results for site in judged.assumed}:
        lines.append(
            f"Not recorded, so the oracle's own choice was gone on with: {', '.join(sorted(assumed))}. Bounds there let"
            " near ties go both ways."
        )
    wide = [
        j
        for j in results
        if j.status is Status.AGREES and j.bound > WIDE and j.site not in CHOICES and not j.site.endswith("_used")
    ]
    if wide:
        most = max(wide, key=lambda judged: judged.bound)
        layer = None if most.free else most.layer  # None: rounding is of the layers before, too
        recorded = {judged.site for judged in results if layer is None or judged.layer == layer}
        selects = layer is None or config.selects(layer)
        needed = CHOSEN_FIRST if selects else CHOSEN_FIRST[1:]
        missing = [site for site in needed if site not in recorded]
        more = f" Record the sites between, {' and '.join(missing)} first." if missing else ""
        lines.append(
            f"Bounds are as wide as {most.bound:.0%} of a row at {most.name}: rounding may do so much between recorded"
            f" tensors, and a fault may hide in it.{more}"
        )
    return lines
