"""How a recording is made: a way to run a prompt, by this runtime or by another, and what passes at each site."""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fathom import probes
from fathom.kernels.ops import CPU, REFERENCE, Ops
from fathom.model.checkpoint.names import parameters
from fathom.model.choices import ALL, PLAIN, ROWS
from fathom.model.config import ModelConfig, check_widths
from fathom.model.errors import CheckpointError, ConfigError, one_line
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site, axes
from fathom.model.transformer import Transformer
from fathom.probes.judge.naming import TOKENS
from fathom.probes.judge.oracle import has
from fathom.probes.judge.recording import IN_FP32, OF_ENTRIES, WHOLE_MODEL, kept_of, stored_name
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from fathom.runtime.output import reserved

HEAD_ROWS: Final = 64  # rows of logits that are made at a time
OF_ROWS: Final = (sites.SELECTED, sites.CANDIDATES)  # as many as there are entries, until there are enough
STORED: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
WIDE: Final = (sites.LOGITS.name, sites.INDEX_WEIGHTS.name, sites.EXPERT_WEIGHTS.name, sites.EXPERT_LOGITS.name)
EXPORTER: Final = Path(probes.__path__[0]).parent / "scripts" / "exporters" / "record_transformers.py"
OLDEST: Final = 5, 23  # release of transformers whose model the exporter records; one of 5.17 refused to be read
LARGEST: Final = 8 << 30  # bytes of fp32 parameters of which transformers' model is built
OTHER_FILES: Final = 3  # the exporter's exit status: files that hold other weights than its model
LAST_WORDS: Final = 300  # characters of what an exporter said last


class OtherFilesError(CheckpointError):
    """Files that another runtime does not read as its model."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a prompt; on several ranks, the group is the subject's."""

    numerics: str = PLAIN
    dtype: str = "fp32"
    other_ops: bool = False  # the op set that the run does not use
    chunk: int | None = None  # tokens in a call; None: all of them
    rank_tokens: str = ALL
    experts: str = ROWS
    transformers: bool = False  # its model, with the weights of the file

    def says(self, subject: Subject) -> str:
        """Words for a table."""
        calls = f"calls of {self.chunk}" if self.chunk else "one call"
        if self.transformers:
            return f"transformers, {self.dtype}, {calls}"
        return f"{self.ops(subject).name}, {self.numerics}, {self.dtype}, {calls}"

    def ops(self, subject: Subject) -> Ops:
        """The op set: of the run, or the one that it is held against."""
        if not self.other_ops:
            return subject.ops
        return CPU if subject.ops.name == REFERENCE.name else REFERENCE

    def options(self, subject: Subject) -> RunOptions:
        """The run's options, but for what this way says."""
        spread = {} if subject.group.size == 1 else {"rank_tokens": self.rank_tokens, "experts": self.experts}
        return subject.with_options(numerics=self.numerics, dtype=self.dtype, **spread)

    def refused(self, subject: Subject) -> str | None:
        """Why a prompt cannot be run this way on this model and machine; None when it can."""
        if self.transformers and (why := without_transformers(subject)) is not None:
            return why
        try:
            check_widths(subject.config, self.options(subject).rounding)
        except ConfigError as error:
            return str(error)
        return None


def run(way: Way, subject: Subject, tokens: Sequence[int], path: Path) -> None:
    """Run a prompt this way and write its recording."""
    if way.transformers:
        _run_transformers(way, subject.directory, tokens, path)
        return
    model, count = subject.load(way.options(subject), way.ops(subject)).model, len(tokens)
    chunk = way.chunk or count
    record(model, tokens, [min(chunk, count - start) for start in range(0, count, chunk)], path)


def without_transformers(subject: Subject) -> str | None:
    """Why transformers cannot run this model here; None when it can."""
    config = subject.config
    if config.v41 is not None or importlib.util.find_spec("transformers") is None:
        return "transformers is not installed" if config.v41 is None else "transformers has no DeepSeek-V4.1"
    release = metadata.version("transformers")
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < OLDEST:
        return f"transformers {release} is installed, want {'.'.join(map(str, OLDEST))} or later"
    if config.n_shared_experts != 1:
        return f"transformers builds one shared expert, the model has {config.n_shared_experts}"
    ratios = {ratio for ratio, kind in zip(config.compress_ratios, config.layer_kinds, strict=True) if kind == "hca"}
    if len(ratios) > 1:
        return f"transformers has one ratio for all HCA layers, the model has {sorted(ratios)}"
    nbytes = sum(4 * prod(parameter.shape) for parameter in parameters(config).values())
    if nbytes > LARGEST:
        return f"the parameters take {nbytes / 2**30:.0f} GiB in fp32, more than {LARGEST >> 30}"
    return None


def _run_transformers(way: Way, directory: Path, tokens: Sequence[int], path: Path) -> None:
    """Write a recording of transformers' model, by the exporter that users have."""
    directory = directory.resolve()
    files = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(directory.iterdir()))
    path.write_bytes(_exported(way, directory, files, tuple(tokens)))


@lru_cache(maxsize=1)  # a fault of ours does not change it: the matrix of faults asks for one recording again and again
def _exported(way: Way, directory: Path, files: tuple[tuple[str, int], ...], tokens: tuple[int, ...]) -> bytes:
    """Return the recording.

    Raises
    ------
    OtherFilesError
        Files and model have other weights.
    RuntimeError
        The exporter broke down.

    """
    del files  # which they were, and of when
    with tempfile.TemporaryDirectory() as folder:
        ids, out = Path(folder) / "ids.json", Path(folder) / "recording.safetensors"
        ids.write_text(json.dumps(tokens))
        command = [sys.executable, str(EXPORTER), "--model", str(directory), "--tokens", str(ids), "--out", str(out)]
        command += ["--dtype", way.dtype, *(["--chunk", str(way.chunk)] if way.chunk else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- of this package
        said = one_line(done.stderr.strip()[-LAST_WORDS:])
        if done.returncode == OTHER_FILES:
            raise OtherFilesError(f"transformers: {said.rpartition('; ')[2]}")
        if done.returncode:
            raise RuntimeError(f"{EXPORTER.name} ended with status {done.returncode}: {said}")
        return out.read_bytes()


def record(
    model: Transformer,
    tokens: Sequence[int],
    lengths: Sequence[int],
    path: Path | None,
    kept: Sequence[Site] | None = None,
    layers: Sequence[int] | None = None,
    *,
    steer: Mapping[Site, Listener] | None = None,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run tokens from position 0 and write what passes; returns how many tensors that are, tokens aside.

    Parameters
    ----------
    model
        The model, whose state is a new one.
    tokens, lengths
        Token ids, and the lengths of the calls that they are run in.
    path
        The file, replaced when all is written; None on a rank of which another writes it: all ranks see all of it.
    kept, layers
        Sites, None: the usual ones; and layers of which they are kept, None: all, and what is behind the last layer.
    steer
        Listeners that write into what passes before it is recorded.
    after
        Called after each call.

    """
    kept = kept_of(model.config) if kept is None else kept
    chosen = range(model.config.num_hidden_layers) if layers is None else layers
    planned = _planned(model.config, kept, chosen, len(tokens), model.arithmetic.dtype, whole=layers is None)
    ids, start = torch.tensor(tokens, device=model.device), 0
    state = model.new_state(len(tokens), max(lengths))
    described = {name: (STORED[dtype], shape) for name, (dtype, shape) in planned.items()}
    with contextlib.nullcontext(lambda *_: None) if path is None else reserved(path, described) as append:

        def write(name: str, rows: Tensor) -> None:
            append(name, rows.detach().cpu().contiguous().view(torch.uint8).numpy().data)

        write(TOKENS, ids)
        with listening(model, _writers(kept, planned, steer or {}, write)):
            for length in lengths:
                hidden = model(ids[start : start + length], state)
                if sites.LOGITS.name in planned:
                    for part in hidden.split(HEAD_ROWS):
                        write(sites.LOGITS.name, model.logits(part))  # what is told, which need not be what passed
                start += length
                after()
    return len(planned) - 1


def _planned(
    config: ModelConfig, kept: Sequence[Site], layers: Sequence[int], tokens: int, dtype: torch.dtype, *, whole: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of the recording, by its name."""
    known = axes(config)
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {TOKENS: (torch.int64, (tokens,))}
    for site in kept:
        places = [None] if site.name in WHOLE_MODEL else [layer for layer in layers if has(config, layer, site.name)]
        for layer in places:
            if layer is None and not whole and site != sites.EMBEDDED:
                continue
            rows, entries = tokens, 0 if layer is None or not config.ratio(layer) else tokens // config.ratio(layer)
            if site.name in OF_ENTRIES:
                rows = entries
            free = min(config.index_topk, entries) if site == sites.SELECTED else 0
            if site == sites.CANDIDATES and config.v41 is not None:
                free = min(config.v41.candidate_blocks, -(-entries // config.v41.candidate_block_size))
            shape = (rows, *(known.get(axis, free) for axis in site.shape.split()[1:]))
            found[stored_name(site.name, layer)] = _dtype(site, dtype), shape
    return found


def _dtype(site: Site, dtype: torch.dtype) -> torch.dtype:
    if site in OF_ROWS:
        return torch.int32
    if site == sites.EXPERT_IDS:
        return torch.int64
    fp32 = site.name in WIDE or site.name.endswith(IN_FP32)
    return torch.float32 if fp32 else dtype


def _writers(
    kept: Sequence[Site],
    planned: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    steer: Mapping[Site, Listener],
    write: Callable[[str, Tensor], None],
) -> dict[Site, Listener]:
    """Write what passes, where it is planned, after it was steered."""

    def listener(site: Site) -> Listener:
        def listen(layer: int | None, x: Tensor) -> None:
            if site in steer:
                steer[site](layer, x)
            if site != sites.LOGITS and (place := stored_name(site.name, layer)) in planned:
                dtype, shape = planned[place]
                if site in OF_ROWS:
                    x = torch.nn.functional.pad(x, (0, shape[1] - x.shape[1]), value=-1)
                write(place, x.to(dtype))

        return listen

    return {site: listener(site) for site in {*kept, *steer}}
