"""The memory probe: its arithmetic, and that it sees what is too large, lies, is written elsewhere, or grows."""

import dataclasses
import pickle

import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.cache.entries import Entries
from fathom.model.cache.window import WindowRing
from fathom.model.errors import Tripwire
from fathom.model.observe.observer import listening
from fathom.model.transformer import Transformer
from fathom.probes import memory
from fathom.probes.child import call
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Text, Verdict
from fathom.probes.memory import (
    Memory,
    Peak,
    Process,
    Written,
    cache_bytes,
    call_bytes,
    layer_bytes,
    live_bytes,
    look,
    noise_up_to,
    poison,
)
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject, cannot_travel
from fathom.runtime.options import RunOptions
from fathom.runtime.report import peak_memory
from tests.make_checkpoint import tiny_config, write_checkpoint

ALLOCATED, LIES = "bytes allocated", "caches that claim other bytes than they hold"
ROWS = "rows that are missing, beyond, or hold something else"
MIB = 1 << 20


def measured(fault=None, probe=memory.QUICK, **subject):
    return run_probe(probe, Subject(fault=fault, **subject), silent).report


def failures(report):
    return {(finding.what, finding.layer): finding for finding in report.findings if finding.failed}


def taken_where_the_heap_has_room(size):
    """What a tensor of so many bytes takes in a process whose heap holds more than that, freed: see `_held_now`."""
    assert memory._give_back_at_once()
    blocks = [b"x" * 40_000 for _ in range(2 * size // 40_000)]  # below the threshold from which each is mapped
    top = b"x" * 40_000
    del blocks
    before = memory._held_now("cpu")
    tensor = torch.ones(size, dtype=torch.uint8)
    assert len(top) < len(tensor), "both are there still"
    return peak_memory("cpu") - before


def with_caches(change):
    """A fault that changes each cache of every new state."""

    class Changed(Transformer):
        def new_state(self, max_context, chunk):
            state = super().new_state(max_context, chunk)
            for cache in state.layers:
                change(cache)
            return state

    def inject(model):
        model.__class__ = Changed

    return Fault("local", "a fault of this test", "", inject=inject)


def allocated(change):
    """What fails of the bytes of a state for 438 positions, in calls of 64 tokens, whose caches are changed."""
    subject = Subject(fault=with_caches(change))
    layers = memory.allocations(subject.config, subject.model.new_state(438, 64), 64, 2)
    found = memory.allocation_findings(layers)
    return {(finding.what, finding.layer): finding for finding in found if finding.failed}


# --- the arithmetic


def test_bytes_by_hand():
    """The demo: head_dim 128, index_head_dim 128, window 16; 1000 positions in calls of 64, BF16."""
    config = Subject().config
    ring, csa, hca = (16 + 63) * 128 * 2, 250 * 128 * 2, 7 * 128 * 2
    frontier = 4 * 2 * (4 + 4) * 256  # values and gates; of the open window and the one before, two series
    wanted = [
        {"window": ring},
        {"window": ring, "entries": csa, "frontier": frontier, "indexer_keys": csa, "indexer_frontier": frontier},
        {"window": ring, "entries": hca, "frontier": 4 * 2 * 128 * 128},
    ]
    assert [layer_bytes(config, layer, 1000, 64, 2) for layer in range(3)] == wanted
    assert layer_bytes(config, 0, 10, 64, 4) == {"window": (16 + 9) * 128 * 4}  # no call is longer than the context
    total = cache_bytes(config, 1000, 64, 2)
    assert total["entries"] == 2 * csa + hca


def test_bytes_of_narrow_rows_by_hand():
    """The demo: 64 of 128 columns rotated. An entry is 64 + 2 * 64 + 1, filled up to 200; a key 128 + 4, or 64 + 4."""
    config = Subject().config
    for formats, entry, key in (
        (("fp8", "fp8"), 200, 132),
        (("fp8", "fp4"), 200, 68),
        (("dtype", "fp4"), 256, 68),
        (("fp8", "dtype"), 200, 256),
    ):
        sizes = cache_bytes(config, 1000, 64, 2, formats)
        assert (sizes["entries"], sizes["indexer_keys"]) == (entry * (2 * 250 + 7), key * 2 * 250)
        assert sizes["window"] == cache_bytes(config, 1000, 64, 2)["window"]


def test_a_call_does_not_depend_on_the_context():
    config = Subject().config
    far = dataclasses.replace(config, max_position_embeddings=1 << 24)
    assert call_bytes(config, 512, 2) == call_bytes(far, 512, 2)
    assert call_bytes(config, 512, 2) < 512 * (65024 // 4) * 4, "index scores of one call, fp32"


# --- the probe


def test_the_demo_passes():
    report = measured()
    assert not report.failed, failures(report)
    caches = report.parts[-1]
    by_component = {row[0]: row for row in caches.rows}
    assert by_component["entries"][4:7] == [2 * 108 + 3, 2 * 76 + 2, 2 * 76 + 2]  # of 433 positions, after 305 tokens
    assert by_component["window"][5] == by_component["window"][6] == 4 * 111


def test_keys_four_times_too_wide():
    failed = failures(measured(FAULTS["keys-four-times-too-wide"]))
    keys = {"predicted": 108 * 128 * 2, "stored": 4 * 108 * 128 * 2}
    for layer in (1, 3):
        assert failed[ALLOCATED, layer].evidence["off"] == {"indexer_keys": keys}


def test_a_cache_of_twice_the_size():
    def change(cache):
        cache.ring.data = torch.cat((cache.ring.data, cache.ring.data))

    failed = allocated(change)
    assert failed.keys() == {(ALLOCATED, layer) for layer in range(4)}
    assert failed[ALLOCATED, 0].measured == 2 * 79 * 128 * 2
    assert failures(measured(with_caches(change))).keys() >= failed.keys()


def test_a_component_that_lies():
    class Modest(Entries):
        def nbytes(self):
            return super().nbytes() // 2

    def change(cache):
        if "indexer_keys" in cache.components:
            cache.keys.__class__ = Modest

    failed = allocated(change)
    assert failed.keys() == {(LIES, None)}
    assert failed[LIES, None].measured == 2


def test_a_buffer_that_nobody_accounts_for():
    def change(cache):
        cache.ring.scratch = torch.zeros(10)
        cache.ring.view = cache.ring.data[3:]  # takes nothing

    failed = allocated(change)
    assert failed.keys() == {(ALLOCATED, layer) for layer in range(4)} | {(LIES, None)}
    assert failed[ALLOCATED, 0].measured == 79 * 128 * 2 + 40


class Elsewhere(WindowRing):
    """Writes the row beside, and keeps books as if it had not: no tripwire sees it."""

    def write(self, first, kv):
        super().write(first, kv)
        if first == 304:  # the last token
            self.data.copy_(self.data.roll(1, 0))


def test_rows_in_the_wrong_place():
    def change(cache):
        cache.ring.__class__ = Elsewhere

    failed = failures(measured(with_caches(change)))
    assert failed.keys() == {(ROWS, layer) for layer in range(4)}
    assert failed[ROWS, 2].measured == 111
    assert list(failed[ROWS, 2].evidence["rows"]) == ["window at 305"]


def test_rows_beyond_the_last():
    class Beyond(Entries):
        def append(self, new, store):
            super().append(new, store)
            self.data[-1] = 0

    def change(cache):
        if "entries" in cache.components:
            cache.entries.__class__ = Beyond

    failed = failures(measured(with_caches(change)))
    assert failed.keys() == {(ROWS, 1), (ROWS, 2), (ROWS, 3)}
    assert failed[ROWS, 1].evidence["rows"] == {"entries at 96": [107], "entries at 305": [107]}


def test_what_is_not_written():
    """The open window of a compressor that forgets to keep it."""
    model = Subject().model
    state, written = model.new_state(64, 16), Written(4)
    poison(state)
    with listening(model, written.listeners()):
        model(torch.arange(6), state)
    assert not any(one.wrong for one in look(state, written))
    state.layers[1].frontier.kv[1, 7] = torch.nan
    state.layers[2].frontier.gate[6, 0] = 1.0
    wrong = {(one.layer, one.component): one.wrong for one in look(state, written) if one.wrong}
    assert wrong == {(1, "frontier"): [1]}
    state.layers[2].frontier.kv[6], state.layers[2].frontier.gate[6] = 1.0, 1.0
    assert {(one.layer, one.component): one.wrong for one in look(state, written) if one.wrong}[2, "frontier"] == [6]


@pytest.mark.parametrize("name", ["ring-off-by-one", "ring-written-off-by-one"])
def test_a_read_of_poison_or_a_tripwire_ends_the_run(name):
    report = measured(FAULTS[name])
    assert any(what.startswith("tripwire at attention.") for what, _ in failures(report))
    assert (ALLOCATED, 0) in {(finding.what, finding.layer) for finding in report.findings}


def test_a_lost_frontier():
    failed = failures(measured(FAULTS["frontier-lost"]))
    assert list(failed[ROWS, 2].evidence["rows"]) == ["frontier at 96"]


def test_too_short_a_model_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=400), seed=1)
    report = measured(directory=tmp_path)
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, RunOptions("plain", "fp32")),
        ({"compress_ratios": [0, 0], "num_hidden_layers": 2}, RunOptions()),
        ({"sliding_window": 128}, RunOptions(prefill_chunk=7)),
        ({}, RunOptions(entry_format="fp8", key_format="fp4")),
        ({}, RunOptions(key_format="fp8")),
    ],
)
def test_other_checkpoints(tmp_path, config, options):
    write_checkpoint(tmp_path, tiny_config(**config), seed=1)
    report = measured(directory=tmp_path, options=options)
    assert not report.failed, failures(report)


# --- the process


def judge(process):
    """Verdicts of the call and of the growth."""
    return [finding.verdict for finding in memory.process_findings(process)]


def process(**changes):
    taken = Peak(
        steady=True,
        base=200 * MIB,
        peaks=[220 * MIB, 228 * MIB],
        calls=[7 * MIB, 10 * MIB],
        far=12 * MIB,
        ballast=284 * MIB,
    )
    taken = taken._replace(**{name: value for name, value in changes.items() if name in Peak._fields})
    made = Process((1024, 8192), 65024, taken, 3 * MIB, 26 * MIB, 7 * MIB, bounded=True, weights_read=True)
    return made._replace(**{name: value for name, value in changes.items() if name in Process._fields})


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, ["pass", "pass"]),
        ({"peaks": [220 * MIB, 231 * MIB]}, ["pass", "fail"]),  # 5 MiB more than caches and call explain
        ({"far": 27 * MIB}, ["fail", "pass"]),
        ({"far": 500 * MIB, "bounded": False}, ["measured", "pass"]),
        ({"kept": 2 * MIB}, ["pass", "vacuous"]),
        ({"ballast": 229 * MIB}, ["pass", "vacuous"]),  # a peak that does not show 64 MiB shows nothing
        ({"steady": False}, ["pass", "measured"]),
        ({"weights_read": False}, ["pass", "measured"]),
    ],
)
def test_growth_is_judged(changes, verdicts):
    assert judge(process(**changes)) == verdicts


def test_a_call_is_bounded_far_out_and_an_untiled_one_is_not():
    """64 tokens at position 65472: the reference op set holds the scores of every head, 32 MiB."""
    taken = {}
    for ops in (CPU, REFERENCE):
        subject = Subject(ops=ops, options=RunOptions(prefill_chunk=64))
        state = noise_up_to(subject.model, 65472, 64)
        taken[ops.name] = live_bytes(subject.model, state, torch.arange(64))
    assert 0 < taken["cpu"] <= call_bytes(subject.config, 64, 2) < taken["reference"]


def test_a_process_of_its_own():
    taken = call(memory.peak_of_prompts, Subject(options=RunOptions(prefill_chunk=32)), (64, 128), 1024, 1)
    assert taken.base < taken.peaks[0] <= taken.peaks[1] < taken.ballast
    assert 0 < taken.calls[0] <= taken.calls[1] <= taken.far


def test_what_is_free_in_the_heap_is_not_held_before():
    size = 16 * MIB
    assert call(taken_where_the_heap_has_room, size) >= 0.95 * size


def test_a_tripwire_in_the_process_is_a_finding(monkeypatch):
    def trips(*_):
        raise Tripwire("logits", 3, 17, "NaN", "finite")

    monkeypatch.setattr(memory, "call", trips)
    report = measured(None, Memory(planned=(2048, 256)))
    assert failures(report)["tripwire at logits", 3].evidence["position"] == 17
    assert report.summary.endswith(
        "then a tripwire ended the run: logits of layer 3 at position 17: NaN, expected finite."
    )


def test_the_process_carries_the_fault():
    subject = Subject(fault=FAULTS["top-k-halved"], options=RunOptions(prefill_chunk=32))
    with pytest.raises(Tripwire, match=r"indexer\.selected of layer 1"):
        call(memory.peak_of_prompts, subject, (64, 128), 256, 1)


def test_what_another_process_cannot_carry():
    local = Fault("local", "a fault of this test", "")
    assert cannot_travel(Subject()) is None
    subject = Subject(fault=FAULTS["frontier-lost"], ops=REFERENCE, seed=3, prompt="text")
    assert pickle.loads(pickle.dumps(subject)) == subject
    assert "fault local" in cannot_travel(Subject(fault=local))
    assert "op set" in cannot_travel(Subject(ops=REFERENCE._replace(name="mine")))
    with pytest.raises(pickle.PicklingError, match="local"):
        pickle.dumps(Subject(fault=local))
    report = measured(local, Memory(prompts=(64, 128)))
    assert any("local" in part.text for part in report.parts if isinstance(part, Text))
