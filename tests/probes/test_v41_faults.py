"""Faults of DeepSeek-V4.1 runtimes: what a wrong run records is placed, and the fault is named.

A run is the oracle's equations one after the other, each result rounded to bf16 as a run holds it; a wrong one has one
equation exchanged. Some faults are put by hand into tensors of DeepSeek's own code, where these lie beside the
repository.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.model.config import ModelConfig, check_widths
from fathom.model.errors import ConfigError
from fathom.model.observe.sites import STEPS
from fathom.model.rounding import Rounding
from fathom.probes.judge.checks import Checks, Status
from fathom.probes.judge.dump import in_memory
from fathom.probes.judge.faults_v41 import FAULTS, explained, starts
from fathom.probes.judge.oracle import Ends, Noise, Replay, Setting, hadamard, layer_of, sites_of
from fathom.probes.judge.oracle_v41 import Layer41
from fathom.probes.judge.recording import CHOICES, Recording
from fathom.probes.verdict import Run, first_difference, judge_layers, opened, weights_of
from tests.make_checkpoint import tiny_config, v41_config, write_checkpoint

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "v41" / "golden"  # 11 MB, not in the repository
TOKENS = 61
CALLS = (41, 1)  # a prompt and single tokens
UNROUNDED = (".pre", ".post", ".comb", "engram.gate", "experts.weights")
LEFT_OUT = {step.name for step in STEPS} - {"attention.entry_unrotated"}

# Where a run with the fault differs first: layer, site. The position is that of the first row which can differ.
FIRST = {
    "index-key-slot": (2, "indexer.selected"),
    "mhc-pre-recomputed": (0, "experts.input"),
    "mhc-undelayed": (0, "experts.input"),
    "mhc-last-mean": (None, "folded"),
    "post-not-doubled": (0, "attention.post"),
    "comb-transposed": (0, "attention.comb"),
    "eps-1e-6": (0, "attention.input"),
    "query-head-normed": (0, "attention.query"),
    "base-theta": (2, "attention.query"),
    "no-inverse-rotation": (0, "attention.unrotated"),
    "sinks-dropped": (0, "attention.mixed"),
    "entries-never-seen": (2, "attention.mixed"),
    "window-v4-record": (0, "attention.kv"),
    "entry-in-fp8": (2, "attention.entry"),
    "entry-v4-record": (2, "attention.entry"),
    "entry-at-end": (2, "attention.entry"),
    "entry-by-number": (2, "attention.entry"),
    "pairs-shifted": (2, "attention.entry_unrotated"),
    "pairs-averaged": (2, "attention.entry_unrotated"),
    "pairs-overlap": (2, "attention.entry_unrotated"),
    "selection-stale": (5, "attention.mixed"),
    "hadamard-kept": (2, "indexer.key_used"),
    "index-key-of-entry": (2, "indexer.key"),
    "index-key-of-rotated": (2, "indexer.key"),
    "index-key-unrotated": (2, "indexer.key"),
    "index-weights-unscaled": (2, "indexer.weights"),
    "candidates-off": (6, "indexer.selected"),
    "candidates-not-pinned": (4, "indexer.candidates"),
    "candidates-own": (6, "indexer.selected"),
    "engram-lookback": (1, "engram.rows"),
    "engram-raw-ids": (1, "engram.rows"),
    "engram-pad-raw": (1, "engram.rows"),
    "engram-joint-norm": (1, "engram.gate"),
    "engram-no-sqrt": (1, "engram.gate"),
    "engram-not-before": (1, "attention.pre"),
    "bias-vl-for-text": (0, "experts.ids"),
    "selection-bias-dropped": (0, "experts.ids"),
    "biased-weights": (0, "experts.weights"),
    "route-scale-dropped": (0, "experts.weights"),
    "clamps-dropped": (0, "experts.output"),
    "fp8-as-fnuz": (0, "attention.query"),
    "fp8-scales-ignored": (0, "attention.query"),  # a latent is normed: of one scale it is the same
}
QUICK = (
    "index-key-slot",
    "mhc-undelayed",
    "query-head-normed",
    "window-v4-record",
    "selection-stale",
    "engram-lookback",
)


class Held:
    """What a run has computed so far, by name."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    def rows(self, name, at):
        found = self.tensors.get(name)
        return found if found is None or at is None else found[at]


class Rows(Held):
    """The same, where late layers hold the rows from a position on alone."""

    def __init__(self, tensors, start):
        self.tensors, self.start = tensors, start

    def rows(self, name, at):
        found = self.tensors.get(name)
        if found is None or at is None:
            return found
        return found[at] if len(found) == TOKENS or ".entry" in name or ".key" in name else found[at - self.start]


def _late(name, layer):
    word, _, rest = name.partition(".")
    return word in ("folded", "hidden", "logits") or (word == "layers" and int(rest.partition(".")[0]) >= layer)


class Made:
    """A checkpoint, and recordings of runs of it."""

    def __init__(self, directory, adjust):
        write_checkpoint(directory, v41_config(), seed=41, shards=1, adjust=adjust)
        self.config = ModelConfig.from_file(directory / "config.json")
        self.weights = weights_of(directory, self.config)
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(3, 120, (TOKENS,), generator=generator)
        self.tokens[0], self.tokens[5] = 0, 3  # the second has a tiny embedding
        self.alike = torch.arange(self.config.vocab_size) // 2
        self.healthy = self.recorded(Layer41, {})

    def recorded(self, wrong, before, rounding="deployed"):
        """Sites of a run, float64, each from those before it as the run holds them."""
        held = Held(before)
        still = Noise(torch.bfloat16, replicas=0)
        setting = Setting(
            self.config, self.weights[0], self.tokens, Rounding.of(rounding), held, still, layer=wrong,
            alike=self.alike,
        )  # fmt: skip
        every, ends = torch.arange(TOKENS), Ends(setting)
        held.tensors["embedded"] = ends.computed("embedded", every)[0]
        for number in range(self.config.num_hidden_layers):
            layer = layer_of(setting, number, every)
            for site in sites_of(self.config, number):
                if site not in LEFT_OUT:
                    of_entries = site.startswith(("attention.entry", "indexer.key"))
                    found = layer.computed(site, layer.entries if of_entries else every)[0]
                    held.tensors[f"layers.{number}.{site}"] = stored(site, found)
        for site in ("folded", "hidden", "logits"):
            held.tensors[site] = stored(site, ends.computed(site, every)[0])
        return held.tensors

    def bounded(self, kept, late):
        """A run whose layers from `late` on were given the last `kept` tokens, and what a recording of it holds."""
        start, tensors = TOKENS - kept, {}
        replay, every = Replay(start, late), torch.arange(start, TOKENS)
        held = Held({name: x for name, x in self.healthy.items() if not _late(name, late)})
        still = Noise(torch.bfloat16, replicas=0)
        setting = Setting(
            self.config, self.weights[0], self.tokens, Rounding.of("deployed"), Rows(held.tensors, start), still,
            replay=replay, alike=self.alike,
        )  # fmt: skip
        for number in range(late, self.config.num_hidden_layers):
            layer = layer_of(setting, number, every)
            for site in sites_of(self.config, number):
                if site not in LEFT_OUT:
                    assert not site.startswith(("attention.entry", "indexer.key")), "late layers make none"
                    held.tensors[f"layers.{number}.{site}"] = stored(site, layer.computed(site, every)[0])
            tensors[f"layers.{number}.positions"] = every
        for site in ("folded", "hidden", "logits"):
            held.tensors[site] = stored(site, Ends(setting).computed(site, every)[0])
        tensors["positions"] = every
        return held.tensors | tensors

    def judged(self, tensors, layers=None, numerics="deployed"):
        found = {name: x.long() if name.endswith(CHOICES) else x for name, x in tensors.items()}
        run = opened(
            Recording(in_memory(found | {"tokens": self.tokens}), self.config), self.weights, "bf16", numerics,
            alike=self.alike,
        )  # fmt: skip
        return run, judge_layers(Checks(run.setting, run.recording), layers)


def stored(site, x):
    if site in CHOICES:
        return x
    return (x.float() if site.endswith(UNROUNDED) or site == "logits" else x.bfloat16()).double()


def adjusted(name, values):
    if name == "embed.weight":
        values[3] *= 1e-7  # an epsilon of 1e-6 shows in it
    return values


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("v41"), adjusted)


def named(run: Run, results):
    places = explained(run.setting, run.recording, results, CALLS, 120.0, lambda *_: None)
    return {place.judged.name: place.faults for place in places}


def test_every_fault_has_a_place():
    assert FIRST.keys() == FAULTS.keys()


def test_a_healthy_run_agrees(made):
    _, results = made.judged(made.healthy)
    assert {one.status for one in results} == {Status.AGREES}


@pytest.mark.parametrize("kv", ["fp8", "v4", "fp4+v4", "fp8-all", "none"])
def test_what_other_runtimes_keep_is_found_and_agrees(made, kv):
    """Window KV and entries in V4's record, once or twice rounded; or all in E4M3 by 32 columns."""
    rounding = f"linears=fp8,kv={kv},index=fp4"
    run, results = made.judged(made.recorded(Layer41, {}, rounding), [0, 2, 4], None)
    assert run.setting.rounding == Rounding.of(rounding)
    assert {one.status for one in results} == {Status.AGREES}


def test_a_v4_keeps_nothing_as_v41_does():
    config = ModelConfig.from_json(tiny_config(), "here")
    with pytest.raises(ConfigError, match=r"--rounding linears=none,kv=v4,index=none: kv=v4 is of V4\.1"):
        check_widths(config, Rounding.of("linears=none,kv=v4,index=none"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FIRST])
def test_a_fault_is_placed_and_named_first(made, name):
    layer, site = FIRST[name]
    wrong = FAULTS[name].make(CALLS)
    last = "layers.4.indexer.key_used"  # which decode reads of the step before: of a healthy run here
    tensors = made.recorded(wrong, {last: made.healthy[last]} if name == "index-key-slot" else {})
    layers = None if layer is None else sorted({0, layer})
    run, results = made.judged(tensors, layers)
    first = first_difference(results)
    assert first is not None
    assert (first.layer, first.site) == (layer, site)
    found = named(run, [one for one in results if one.name == (site if layer is None else f"layers.{layer}.{site}")])
    best, *others = next(iter(found.values()))
    if name == "mhc-undelayed":  # where the experts alone are looked at, both are the same
        assert {best.name, others[0].name} == {"mhc-undelayed", "mhc-pre-recomputed"}
        run, results = made.judged(tensors, [1])
        found = named(run, results)
        best = found["layers.1.attention.input"][0]
        assert found["layers.1.experts.input"][0].name == name
    assert (best.name, best.share >= 0.9) == (name, True)
    assert not best.plain


@pytest.mark.parametrize("late", [5, 6])
def test_rows_of_a_bounded_replay_are_judged_by_what_they_saw(made, late):
    """Late layers were given the last 30 tokens: fewer rows, and windows that see nothing before them."""
    kept = 30
    tensors = made.bounded(kept, late)
    told = {"replay_start": torch.tensor([TOKENS - kept]), "replay_layer": torch.tensor([late])}
    if late == 5:  # behind the last source of entries: where vLLM begins, and what is meant where nothing is said
        del told["replay_layer"]
    run, results = made.judged(tensors | told)
    assert {one.status for one in results} == {Status.AGREES}
    assert not any(one.free for one in results)
    assert {one.recorded for one in results if one.layer == late and one.site == "streams"} == {kept}
    assert f"from layer {late} on, nothing before position {TOKENS - kept} is seen in a window (replay_start)" in (
        run.recording.told
    )
    _, results = made.judged(tensors, [late])  # it is not said: windows are thought to reach further back
    first = first_difference(results)
    assert (first.layer, first.site) == (late, "attention.mixed")


def test_a_bounded_replay_is_of_v41_and_one_number(made):
    with pytest.raises(ConfigError, match="replay_start and replay_layer are one number each"):
        made.judged(made.healthy | {"replay_start": torch.tensor([3, 4])})
    with pytest.raises(ConfigError, match=r"layers\.5\.positions do not ascend"):
        made.judged(made.healthy | {"layers.5.positions": torch.tensor([3, 2])})


def test_calls_begin_where_their_lengths_say():
    assert starts((3, 2, 1), 8).tolist() == [0, 0, 0, 3, 3, 5, 6, 7]
    assert starts((4,), 6).tolist() == [0, 0, 0, 0, 4, 4]


# --- by hand, in tensors of DeepSeek's code


@pytest.fixture(scope="module")
def theirs():
    if not GOLDEN.is_dir():
        pytest.skip("DeepSeek's tensors are not beside this repository")
    config = ModelConfig.from_file(GOLDEN / "config.json")
    return config, weights_of(GOLDEN, config), load_file(GOLDEN / "golden_deployed.safetensors")


def collapsed_and_normed(found, streams, pre, weight):
    x = (found[pre].float()[..., None] * found[streams].float()).sum(1).bfloat16().float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight.float()).bfloat16()


def undelayed(found, weight):
    norm = weight("layers.4.attn_norm.weight")
    return collapsed_and_normed(found, "layers.4.engram.streams", "layers.4.attention.pre", norm)


def recomputed(found, weight):
    norm = weight("layers.4.ffn_norm.weight")
    return collapsed_and_normed(found, "layers.4.attention.streams", "layers.4.experts.pre", norm)


def averaged(found, weight):
    del weight
    return found["layers.8.streams"].float().mean(1).bfloat16()


def unturned(found, weight):
    del weight
    return found["layers.4.attention.mixed"]


def hadamard_kept(found, weight):
    """E2M1 by 32 of the rotated key, as DeepSeek's code rounds: codes by comparison."""
    del weight
    blocks = hadamard(found["layers.4.indexer.key"].double()).bfloat16().double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6)))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    code = ((blocks / scale).abs()[..., None] - grid).abs().argmin(-1)
    return (grid[code] * blocks.sign() * scale).flatten(-2).bfloat16()


def unscaled(found, weight):
    del weight
    return found["layers.4.experts.weights"] / 1.5


@pytest.mark.parametrize(("name", "site", "change"), [
    ("mhc-undelayed", "layers.4.attention.input", undelayed),
    ("mhc-pre-recomputed", "layers.4.experts.input", recomputed),
    ("mhc-last-mean", "folded", averaged),
    ("no-inverse-rotation", "layers.4.attention.unrotated", unturned),
    ("hadamard-kept", "layers.4.indexer.key_used", hadamard_kept),
    ("route-scale-dropped", "layers.4.experts.weights", unscaled),
])  # fmt: skip
def test_a_fault_put_by_hand_into_their_tensors_is_named(theirs, name, site, change):
    config, weights, found = theirs
    wrong = change(found, weights[0].checkpoint.read)
    run = opened(Recording(in_memory(found | {site: wrong}), config), weights, "bf16", "deployed")
    results = judge_layers(Checks(run.setting, run.recording), None if name == "mhc-last-mean" else [4])
    first = first_difference(results)
    assert first is not None
    assert (site if first.layer is None else f"layers.{first.layer}.{first.site}").endswith(site)
    best = named(run, [one for one in results if one.name == site])[site][0]
    assert (best.name, best.share >= 0.9) == (name, True)
