"""A recording judged by the oracle, and what explains it: what `scripts.compare` says, as values.

from fathom.probes.verdict import judge
verdict = judge({"tokens": ids, "model.layers.3.self_attn.q_a_norm.output": x, ...}, Path("DIR"))
print(verdict.verdict, verdict.first, verdict.faults)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint.census import Census, census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.choices import PLAIN, RECORDED_DTYPES
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.rounding import Rounding
from fathom.probes.judge.causes import Explained, Place, places
from fathom.probes.judge.checks import Checks, Difference, Judged, Progress, Status, silent
from fathom.probes.judge.dump import in_memory
from fathom.probes.judge.gguf import GgufCheckpoint, open_gguf
from fathom.probes.judge.naming import Line
from fathom.probes.judge.numerics import Found, find, other_numerics
from fathom.probes.judge.oracle import Noise, Parameters, Setting, Unknown
from fathom.probes.judge.recording import Recording

DTYPES: Final = dict(zip(RECORDED_DTYPES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
SECONDS: Final = 120.0


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


def judge(
    recording: Mapping[str, Tensor] | Path,
    model: Path,
    *,
    tokens: Tensor | None = None,
    names: Mapping[str, str] | None = None,
    layers: Sequence[int] | None = None,
    numerics: str | None = None,
    calls: Sequence[int] | None = None,
    identify_seconds: float = SECONDS,
) -> Verdict:
    """Judge a recording against a checkpoint.

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
        As the flag of `compare`; None: found from the recording.
    calls
        Lengths of the calls of the run; None: as the recording says, or one.
    identify_seconds
        How long a fault is looked for; 0: none is.

    Raises
    ------
    ConfigError, CheckpointError
        With one line naming what is at fault.

    """
    config = ModelConfig.from_file(model / "config.json")
    dump = recording if isinstance(recording, Path) else in_memory(recording)
    opened_recording = Recording(dump, config, names, tokens)
    run = opened(opened_recording, weights_of(model, config), None, numerics)
    results = judge_layers(Checks(run.setting, run.recording), layers)
    found = dict[tuple[str, ...], Explained]()
    if identify_seconds:
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
    )


class Run(NamedTuple):
    """A recorded run, and what it is judged as."""

    recording: Recording
    setting: Setting
    numerics: Found
    census: Census
    seen: bool  # whether the recording itself shows the dtype


def weights_of(model: Path, config: ModelConfig, gguf: Path | None = None) -> tuple[Parameters, Census]:
    """The weights of a checkpoint, of which files may be missing, or those of a GGUF."""
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
) -> Run:
    """A recording with the weights of its model, and with the dtype and numerics that are given, or that it shows."""
    config, (parameters, counted) = recording.config, weights
    seen = None if dtype else recording.run_dtype()
    of_run = DTYPES[dtype] if dtype else seen or torch.bfloat16
    rounding = Rounding.of(numerics or PLAIN)
    setting = Setting(config, parameters, recording.tokens, rounding, recording, Noise(of_run))
    found = find(setting, recording, said) if numerics is None else Found(rounding, {})
    return Run(recording, replace(setting, rounding=found.rounding), found, counted, seen=seen is not None)


def layers_needed(recording: Recording, layers: Sequence[int] | None) -> set[int]:
    """Layers whose weights judging takes: those judged, and those that must be run since no input was recorded."""
    needed = set[int]()
    for layer in range(recording.config.num_hidden_layers) if layers is None else layers:
        if layers is not None or any(name.startswith(f"layers.{layer}.") for name in recording.tensors):
            needed.add(layer)
            for before in range(layer - 1, -1, -1):
                if f"layers.{before}.streams" in recording.tensors:
                    break
                needed.add(before)
    return needed


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
    from fathom.probes.identify import Identifier  # noqa: PLC0415 -- runs our model, seconds to import

    others = {} if run.numerics.rests else other_numerics(run.setting, run.recording, said)
    identifier = Identifier(run.setting, run.recording, run.census, calls, others, seconds)
    return identifier.identify(results, said), others


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
