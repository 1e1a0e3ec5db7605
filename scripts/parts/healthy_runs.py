"""Healthy runs of random models, judged: how many of their rows are called wrong, and how small an error is seen.

A model is drawn: its widths, its weights, a prompt, and how the prompt is cut into calls. Runs of bf16 and fp32 are
this runtime's own; fp16, which it has not, is the oracle with every tensor rounded where a run has one. Of some, only
rows of some positions are kept, or only some tensors. How each rounds is found, as `compare` finds it, and it is judged
as the probes judge theirs: every row, rotated dims and heads by themselves too.
"""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from fathom.model.checkpoint.published import published_tensors
from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.model.rounding import Rounding
from fathom.probes.judge.checks import Checks, Status
from fathom.probes.judge.numerics import ASSUMED, find
from fathom.probes.judge.oracle import F64, FACTOR, Ends, Layer, Noise, Parameters, Setting, sites_of
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES, Recording, stored_name
from fathom.probes.layers import views
from fathom.probes.subject import Subject
from fathom.probes.ways import record
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.tensorfile import write_safetensors
from fathom.scripts.make.selection import stored_forms
from fathom.scripts.make.shards import write_shards
from fathom.scripts.make.values import blocks

TOKENS: Final = (120, 420)  # of a prompt: fewer and more than two HCA blocks
SAMPLED: Final = 64  # rows of a site that have replicas from the start
OURS: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALL: Final = {**OURS, "fp16": torch.float16}
NUMERICS: Final = ("deployed", "plain", "linears=none,kv=fp8,index=fp8")
ROWS_KEPT: Final = 0.2  # of the runs, whose positions are drawn
SITES_KEPT: Final = 0.2  # of the runs, whose tensors are drawn
KEPT: Final = 0.7  # of the tensors, or the positions
WHOLE: Final = "all of it"
TIMES: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)  # the bound, by which a row is moved to see whether it is found

NARROW: Final = (sites.KV.name, sites.ENTRY.name, sites.INDEX_KEY_USED.name, sites.INDEX_QUERY_USED.name)


@dataclass
class Tally:
    """What became of the rows of one or several runs."""

    rows: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # by what was kept of them
    again: Counter[str] = field(default_factory=Counter)  # by site: rows that stood out and were explained
    alarms: list[dict[str, Any]] = field(default_factory=list)  # healthy sites that were said to differ
    moved: Counter[float] = field(default_factory=Counter)  # rows that were moved by so many bounds
    seen: Counter[float] = field(default_factory=Counter)  # those that were found

    def add(self, other: "Tally") -> None:
        """Add what another has."""
        self.rows += other.rows
        self.runs += other.runs
        self.again += other.again
        self.alarms += other.alarms
        self.moved += other.moved
        self.seen += other.seen


class Rounded(Noise):
    """A run of a dtype: no replicas, and every tensor rounded where a run has one."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__(dtype, replicas=0)
        self.generator = torch.Generator().manual_seed(seed)

    def moved(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Round to the run's dtype."""
        return x.to(dtype or self.dtype).to(F64)

    def stored(self, x: Tensor) -> Tensor:
        """Round to the run's dtype."""
        return x.to(self.dtype).to(F64)

    def summed(self, y: Tensor, size: Tensor) -> Tensor:
        """Add what fp32 accumulators are off: roundings of partial sums, each half a unit at most."""
        off = torch.rand(y.shape, generator=self.generator, dtype=F64) * 2 - 1
        return y + off * size * 2.0**-24


def judged(seed: int) -> tuple[tuple[str, str], Tally]:
    """Judge a run of the model of this seed; returns its numerics and dtype, and what became of it."""
    torch.set_num_threads(1)
    draw = random.Random(seed)  # noqa: S311 -- a model, not a secret
    numerics, dtype = NUMERICS[seed % 3], tuple(ALL)[seed // 3 % 3]
    with tempfile.TemporaryDirectory() as work, _model(Path(work), seed, draw) as directory:
        config = ModelConfig.from_file(directory / "config.json")
        count = draw.randint(*TOKENS)
        tokens = [config.bos_token_id, *(draw.randrange(config.vocab_size) for _ in range(count - 1))]
        if directory == DEMO and draw.random() < 0.5:
            tokens = Subject(seed=seed).tokens(count)
        setting = _setting(directory, config, tokens, Rounding.of(numerics), ALL[dtype])
        path = Path(work) / "run.safetensors"
        if dtype in OURS:
            model = load(directory, RunOptions(numerics, dtype)).model
            record(model, tokens, _calls(count, draw), path)
        else:
            _simulated(setting, seed, path)
        kept = _keep(path, draw)
        recording = Recording(path, config)
        setting = replace(setting, theirs=recording)
        told = {"seed": seed, "numerics": numerics, "dtype": dtype, "kept": kept}
        tally = Tally(runs=Counter({kept: 1}))
        found = find(setting, recording, lambda *_: None)
        if found.rounding != setting.rounding and not any(why.startswith(ASSUMED) for why in found.rests.values()):
            tally.alarms.append({**told, "found": found.rounding.numerics, "rests": found.rests})
        _judge(replace(setting, rounding=found.rounding), recording, tally, told)
        if kept == WHOLE:
            _move(setting, recording, tally, draw)
    return (numerics, dtype), tally


def _keep(path: Path, draw: random.Random) -> str:
    """Leave out of a recording what others do not record, or nothing; says which."""
    kind, file = draw.random(), load_file(path)
    tokens = file.pop("tokens")
    if kind < ROWS_KEPT:
        at = torch.tensor(sorted(draw.sample(range(len(tokens)), int(KEPT * len(tokens)))))
        of_tokens = {name for name in file if not name.endswith(OF_ENTRIES)}
        whole = {name for name in of_tokens if name.endswith((".streams", sites.EMBEDDED.name))}
        file = {name: x[at] if name in of_tokens - whole else x for name, x in file.items()}
        write_safetensors(path, {"tokens": tokens, "positions": at, **_contiguous(file)}, {})
        return "rows of some positions"
    if kind < ROWS_KEPT + SITES_KEPT:
        file = {name: x for name, x in file.items() if draw.random() < KEPT}
        write_safetensors(path, {"tokens": tokens, **_contiguous(file)}, {})
        return "some tensors"
    return WHOLE


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.contiguous() for name, x in tensors.items()}


def _setting(
    directory: Path, config: ModelConfig, tokens: Sequence[int], rounding: Rounding, dtype: torch.dtype
) -> Setting:
    parameters = Parameters.of(directory, config)
    return Setting(config, parameters, torch.tensor(tokens), rounding, Held({}), Noise(dtype))


@contextmanager
def _model(work: Path, seed: int, draw: random.Random) -> Iterator[Path]:
    """The demo, or a model with drawn widths and weights."""
    if seed % 5 == 0:
        yield DEMO
        return
    obj = json.loads((DEMO / "config.json").read_text("utf-8"))
    heads, experts = draw.choice((2, 4, 8)), draw.choice((4, 8, 16))
    obj |= {
        "hidden_size": draw.choice((128, 256)),
        "head_dim": 64 + obj["qk_rope_head_dim"],
        "num_attention_heads": heads,
        "o_groups": draw.choice((1, 2)),
        "o_lora_rank": 128,
        "q_lora_rank": draw.choice((128, 256)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.choice((1, 2, 4)),
        "moe_intermediate_size": draw.choice((128, 256)),
        "index_topk": draw.choice((4, 16)),
        "swiglu_limit": draw.choice((0.5, 2.0, 10.0)),
        "sliding_window": draw.choice((8, 16, 64)),
    }
    tensors = published_tensors(ModelConfig.from_json(obj, f"seed {seed}"), *stored_forms(obj))
    directory = work / "model"
    directory.mkdir()
    write_shards(directory, tensors, lambda name: blocks(name, tensors, seed), lambda _: None)
    (directory / "config.json").write_text(json.dumps(obj))
    yield directory


def _calls(count: int, draw: random.Random) -> list[int]:
    """Lengths of calls: some long ones, short ones, and single tokens."""
    lengths: list[int] = []
    while (left := count - sum(lengths)) > 0:
        lengths.append(min(left, draw.choice((1, 3, 8, 9, 64, 200))))
    return lengths


@dataclass
class Held:
    """Tensors by name, as the oracle takes what was recorded."""

    tensors: dict[str, Tensor]

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """Rows of a tensor that holds all of them."""
        found = self.tensors.get(name)
        return found if found is None or at is None else found[at]


def _simulated(setting: Setting, seed: int, path: Path) -> None:
    """Write a recording of the oracle itself, each tensor rounded."""
    config, held = setting.config, Held({})
    noise = Rounded(setting.noise.dtype, seed)
    own = replace(setting, theirs=held, noise=noise)
    at = torch.arange(len(setting.tokens))
    held.tensors[sites.EMBEDDED.name] = Ends(own).computed(sites.EMBEDDED.name, at)[0]
    for number in range(config.num_hidden_layers):
        own.parameters.forget()
        layer = Layer(own, number, at)
        for site in sites_of(config, number):
            rows = layer.entries if site in OF_ENTRIES else at
            held.tensors[stored_name(site, number)] = layer.computed(site, rows)[0]
    for site in (sites.HIDDEN.name, sites.LOGITS.name):
        held.tensors[site] = Ends(own).computed(site, at)[0]
    wide = {name: x.long() if name.endswith(CHOICES) else x.float() for name, x in held.tensors.items()}
    write_safetensors(path, {"tokens": setting.tokens, **_contiguous(wide)}, {})


def _judge(setting: Setting, recording: Recording, tally: Tally, told: Mapping[str, Any]) -> None:
    """Judge every row of a healthy run."""
    checks = Checks(setting, recording, SAMPLED, every=True, views=views(setting.config))
    results = [one for layer in range(setting.config.num_hidden_layers) for one in checks.layer(layer)] + checks.ends()
    for one in results:
        tally.rows += one.rows
        if one.ties:
            tally.again[one.of or one.site] += one.ties
        if one.status is Status.DIFFERS:
            where = {"layer": one.layer, "site": one.of or one.site, "rows": one.wrong[:4], "why": one.why}
            tally.alarms.append({**told, **where, "worst": one.worst, "bound": one.bound})


# --- how small an error is seen


def _move(setting: Setting, recording: Recording, tally: Tally, draw: random.Random) -> None:
    """Move single rows by so many times their bound, in drawn directions, and see whether they are found."""
    left_out = (*CHOICES, *NARROW, sites.EMBEDDED.name)
    names = [name for name in recording.tensors if not name.endswith(left_out) and recording.at(name).numel()]
    for number, times in enumerate(TIMES):
        name = draw.choice(names)
        at = recording.at(name)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        site = name if layer is None else name.split(".", 2)[2]
        position = int(at[draw.randrange(len(at))])
        row = torch.tensor([position])
        part = Ends(setting) if layer is None else Layer(setting, layer, row)
        values = part.computed(site, row).flatten(1)
        bound = FACTOR * float((values[1:] - values[0]).square().mean(0).sum().sqrt())
        assert bound > 0, f"{name} is not rounded"
        theirs = recording.rows(name, row)
        assert theirs is not None, f"rows of {name} that it has"
        off = torch.randn(theirs.shape, dtype=F64, generator=torch.Generator().manual_seed(number))
        wrong = Moved(recording, name, position, theirs + off * (times * bound / float(off.norm())))
        checks = Checks(replace(setting, theirs=wrong), wrong, SAMPLED, every=True)
        tally.moved[times] += 1
        (judged,) = checks.ends(only=[site]) if layer is None else checks.layer(layer, only=[site])
        tally.seen[times] += judged.status is Status.DIFFERS


class Moved(Recording):
    """A recording in which one row is another."""

    def __init__(self, recording: Recording, name: str, position: int, row: Tensor) -> None:
        vars(self).update(vars(recording))
        self.moved, self.position, self.row = name, position, row

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """As recorded, but for the row."""
        found = super().rows(name, at)
        if name == self.moved and found is not None and at is not None:
            found = torch.where((at == self.position).view(-1, *[1] * (found.ndim - 1)), self.row, found)
        return found
