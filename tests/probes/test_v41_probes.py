"""Probes on DeepSeek-V4.1: a healthy run passes all that are built for it, and a fault is found where it is."""

import dataclasses

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.model.attention import Attention
from fathom.model.draft import DelayedDspark, DelayedStage
from fathom.model.engram import Engram
from fathom.model.hyper import HyperConnection
from fathom.model.moe import TextGate
from fathom.model.v41 import DelayedConnection, EntryMaker, SharedIndexer, WindowAttention, begun
from fathom.probes import bits, drafting, load, memory, recall
from fathom.probes.layers import KINDS, runs
from fathom.probes.memory import call_bytes, live_bytes, noise_up_to
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject, another
from fathom.runtime.options import RunOptions
from fathom.scripts import make_checkpoint

LAYERS = {kind.name: kind(tokens=300, rows=16) for kind in KINDS}
PROBES = LAYERS | {
    "bits": dataclasses.replace(bits.QUICK, chunks=(3,), kept=(62,)),
    "drafting": dataclasses.replace(drafting.QUICK, apart=80, chains=0, texts=1, read=(40,), written=12),
    "load": load.QUICK,
    "memory": memory.QUICK,
    "recall": recall.QUICK,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("small") / "v41"
    assert make_checkpoint.main(["--small-v41", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def healthy(small):
    return Subject(small)


def failed(name, subject):
    report = run_probe(PROBES[name], subject, silent).report
    assert report.judged, f"{name} judged nothing"
    return [(finding.layer, finding.what) for finding in report.findings if finding.failed]


@pytest.mark.parametrize("name", PROBES)
def test_a_healthy_run_passes(healthy, name):
    assert not failed(name, healthy)


def test_every_site_is_judged_by_some_probe(healthy):
    judged = {result.of or result.site for run in runs(healthy, 300, 16, silent) for result in run.results}
    assert judged == {name for probe in LAYERS.values() for name in probe.judges}


def test_every_parameter_of_a_text_has_an_effect(healthy):
    """But the bias of images."""
    model = healthy.model
    names = [name for name in healthy.load().census.mappings if name.startswith(("layers.4.", "layers.6."))]
    asked = [name for name in names if ".experts." not in name]
    effects = dict(load.without_effect(model, asked, healthy.tokens(150), 150, 0))
    assert len(effects) == len(asked) > 40
    none = {name for name, same in effects.items() if same}
    assert none == {"layers.4.ffn.gate.bias_vl", "layers.6.ffn.gate.bias_vl"} == set(filter(load.of_images, asked))


@pytest.mark.parametrize("op", ["open_blocks", "select_open"])
def test_candidates_of_the_worst_scores_are_seen(small, op):
    def worst(q, head_weights, *more):
        return getattr(CPU, op)(q, -head_weights, *more)

    found = failed("bits", Subject(small, ops=CPU._replace(**{op: worst})))
    assert any("share that differ from fp64" in what for _, what in found)


@pytest.mark.parametrize("seed", range(3, 8))
def test_no_probe_makes_an_id_of_images_itself(small, seed):
    """Tokens that are changed, at whatever place, are those of texts."""
    subject = Subject(small, seed=seed)
    image, half = subject.config.of_images[0], subject.config.vocab_size // 2
    assert image not in {another(token, subject.config, half) for token in range(subject.config.vocab_size)}
    runs_of, _ = PROBES["bits"].followed(subject, silent)
    assert len(runs_of) == 2


def test_caches_in_fp4_are_predicted(small):
    subject = Subject(small, RunOptions(key_format="fp4"))
    assert not failed("memory", subject)


def test_a_call_at_a_far_position_takes_what_is_worked_out_by_hand(healthy):
    """Noise stands in all caches, numbers of tokens among them."""
    model, tokens = healthy.model, torch.tensor(healthy.tokens(64))
    taken = live_bytes(model, noise_up_to(model, 3000, 64), tokens)
    assert 0 < taken <= call_bytes(model.config, 64, 2)


def _undelayed(patch):
    def read_by(self, pre, streams, norm):
        del pre
        return HyperConnection.read(self, streams, norm)

    patch.setattr(DelayedConnection, "read_by", read_by)


def _forgotten(patch):
    """N-grams begin anew with each call."""
    right = Engram.rows

    def rows(self, call, tokens):
        tokens.last = lambda end, count: type(tokens).last(tokens, end, count)[-call.count :]
        return right(self, call, tokens)

    patch.setattr(Engram, "rows", rows)


def _rotated(patch):
    """Entries where V4 has them, at the first token of their block of 4."""
    right = EntryMaker.row

    def row(self, pooled, call, first, ratio):
        return right(self, pooled, call, first, 2 * ratio)

    patch.setattr(EntryMaker, "row", row)


def _of_images(patch):
    right = TextGate.choose_by

    def choose_by(self, prefix, weights):
        right(self, prefix, weights)
        self.bias = self.bias_of_images

    patch.setattr(TextGate, "choose_by", choose_by)


def _every_block(patch):
    right = SharedIndexer.build

    def build(self, *given):
        right(self, *given)
        self.restricted = False

    patch.setattr(SharedIndexer, "build", build)


def _one_side_turned(patch):
    """Index queries are multiplied by V4's Hadamard matrix, keys are not."""
    patch.setattr(SharedIndexer, "query_used", lambda self, q: self.arithmetic.rounded_index(q))


def _v4_window(patch):
    """Rotated dims of the window's keys are not rounded."""
    patch.setattr(WindowAttention, "kv", Attention.kv)


def _twice(patch):
    right = Engram.__init__

    def init(self, *given):
        right(self, *given)
        self.k_weight = self.k_weight * self.q_weight

    patch.setattr(Engram, "__init__", init)


def _taps_behind(patch):
    """The head reads what leaves the layers, as in V4."""
    right = DelayedDspark.__init__

    def init(self, model, weights):
        right(self, model, weights)
        self.target_layers = self.config.dspark.target_layer_ids

    patch.setattr(DelayedDspark, "__init__", init)


def _not_carried(patch):
    """Each stage reads one stream."""
    right = DelayedStage.run

    def run(self, carried, call, cache):
        return right(self, begun(carried.streams), call, cache)

    patch.setattr(DelayedStage, "run", run)


FAULTS = {
    "undelayed": (_undelayed, "mhc", 0, "experts.input"),
    "n-grams begin anew": (_forgotten, "bits", 1, "cut into calls"),
    "n-grams begin anew, against the oracle": (_forgotten, "projections", 1, "engram.rows"),
    "entries rotated elsewhere": (_rotated, "rope", 2, "attention.entry rotated dims"),
    "bias of images": (_of_images, "routing", 0, "experts.ids"),
    "bias of images, held": (_of_images, "load", 0, "numbers that differ"),
    "queries turned, keys not": (_one_side_turned, "recall", 2, "correlation of the scores"),
    "every block open": (_every_block, "attention", 7, "indexer.selected"),
    "weight of n-grams": (_twice, "load", 1, "numbers that differ"),
    "streams behind the layers": (_taps_behind, "drafting", None, "as if taps-one-layer-late"),
    "stages read one stream": (_not_carried, "drafting", None, "as if pre-not-carried"),
    "window in V4's form": (_v4_window, "projections", 0, "attention.kv"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(small, monkeypatch, name):
    put, probe, layer, what = FAULTS[name]
    put(monkeypatch)
    found = failed(probe, Subject(small))
    assert any(at == layer and what in told for at, told in found), found
    assert all(at is None or at >= layer for at, _ in found), found
