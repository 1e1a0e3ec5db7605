"""Draft heads against `probes.judge.draft_oracle`, and what they remember against a plain run."""

from typing import NamedTuple

import pytest
import torch

from fathom.kernels.formats.stored import Dense
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head
from fathom.model.config import ModelConfig
from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.rounding import ROUNDINGS
from fathom.probes.judge.draft_oracle import Dspark, Mtp
from fathom.probes.judge.oracle import Noise, Parameters
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint

PLAIN = RunOptions("plain", "fp32", draft="auto", draft_tokens=7)
DEPLOYED = RunOptions("deployed", "fp32", draft="auto", draft_tokens=7)
PROMPT = torch.randint(2, 300, (75,), generator=torch.Generator().manual_seed(5)).tolist()
DRAFTS = 7  # that a call verifies, at most


class Made(NamedTuple):
    kind: Head
    directory: object
    config: ModelConfig
    parameters: Parameters


@pytest.fixture(scope="module", params=list(Head))
def made(request, tmp_path_factory):
    directory, kind = tmp_path_factory.mktemp("head"), request.param
    write_checkpoint(directory, tiny_config(**(DSPARK if kind is Head.DSPARK else {})), seed=3, head=kind)
    checkpoint, config = Checkpoint.open(directory), ModelConfig.from_file(directory / "config.json")
    return Made(kind, directory, config, Parameters(checkpoint, census(checkpoint.shapes(), config, head=True)))


class Run:
    """A model with its head, and the streams that it leaves behind."""

    def __init__(self, made, options, ops=CPU):
        loaded = load(made.directory, options, ops)
        self.model, self.head = loaded.model, loaded.head
        self.listener, self.drafts = self.head.listener(DRAFTS), self.head.new_state(DRAFTS)
        self.state = self.model.new_state(256, 32, rewind=DRAFTS)
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.model.blocks]

    def read(self, tokens):
        def note(layer, streams):
            self.listener(layer, streams)
            self.streams[layer].append(streams.clone())

        with listening(self.model, {sites.STREAMS: note}):
            for part in torch.tensor(tokens).split(32):
                self.model(part, self.state)

    def draft(self, sequence, k=5):
        """Behind a sequence whose last token has not been run."""
        return self.head.draft(self.listener, sequence, len(sequence) - 1, k, self.drafts)


def judged(made, run, sequence, drafts, *, deployed):
    """What the oracle makes of the same streams, given what was drafted: logits, keys of each stage, confidence."""
    n, chosen, noise = len(sequence) - 1, torch.tensor(drafts.tokens), Noise(torch.float32, 0)
    whole = [torch.cat(parts)[:n].double() for parts in run.streams]
    how = {"stages": made.kind.stages, "rounding": ROUNDINGS["deployed" if deployed else "plain"], "noise": noise}
    if made.kind is Head.MTP:
        found = Mtp(made.config, made.parameters, **how).draft(
            whole[-1], torch.tensor(sequence[1:]), len(chosen), chosen
        )
        return found.logits[0], [found.keys[0, :n]], None
    settings = made.config.dspark
    oracle = Dspark(made.config, made.parameters, **how)
    keys = oracle.main_keys(torch.stack([whole[layer] for layer in settings.target_layer_ids], 1))
    slots = torch.tensor([sequence[-1], *[settings.noise_token_id] * (settings.block_size - 1)])
    found = oracle.draft(keys, slots, chosen)
    return found.logits[0], [rows[0] for rows in keys], found.confidence[0]


def far(ours, theirs):
    """Largest distance, in units of the RMS of what is right."""
    return ((ours.double() - theirs).abs().max() / theirs.square().mean().sqrt()).item()


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 40, 75])
def test_drafts_are_those_of_the_oracle(made, length, ops):
    """On both sides of the window of 16; in plain fp32, where nothing is rounded."""
    run, sequence = Run(made, PLAIN, ops), [*PROMPT[:length], 17]
    run.read(sequence[:-1])
    drafts = run.draft(sequence)
    logits, keys, confidence = judged(made, run, sequence, drafts, deployed=False)
    assert far(drafts.logits, logits) < 1e-4
    assert drafts.tokens == drafts.logits.argmax(1).tolist()
    assert (drafts.confidence is None) == (confidence is None)
    if confidence is not None:
        assert far(drafts.confidence, confidence) < 1e-4
    for cache, rows in zip(run.drafts.layers, keys, strict=True):
        window, stop = made.config.sliding_window, run.drafts.position
        for position in range(max(run.drafts.first, stop - window), stop):
            place = position - run.drafts.first
            assert cache.ring.held_for(place) == place
            kept = cache.ring.data[place % len(cache.ring.data)]
            unrotated = made.config.head_dim - made.config.qk_rope_head_dim  # the rings count from another position
            assert far(kept[:unrotated], rows[position][:unrotated]) < 1e-4


def test_deployed_drafts_are_near_the_oracles(made):
    """Roundings fall on other sides at times; most logits are near."""
    run, sequence = Run(made, DEPLOYED), [*PROMPT[:40], 17]
    run.read(sequence[:-1])
    drafts = run.draft(sequence)
    logits, _, _ = judged(made, run, sequence, drafts, deployed=True)
    off = (drafts.logits.double() - logits).norm(dim=1) / logits.norm(dim=1)
    assert off.median() < 0.02, off


def test_rejected_rows_leave_no_trace(made):
    """Rows that were taken back are neither remembered nor heard: drafts are those of a run that never had them."""
    plain, taken_back = Run(made, PLAIN), Run(made, PLAIN)
    plain.read(PROMPT[:70])
    taken_back.read(PROMPT[:40])
    at = 40
    for wrong, kept in ((5, 1), (3, 4), (0, 1), (5, 6), (2, 3), (0, 1), (1, 1), (4, 5), (3, 1), (2, 3), (3, 4)):
        taken_back.draft(PROMPT[: at + 1])
        right = PROMPT[at : at + kept]
        taken_back.read([*right, *[7] * wrong])
        at += kept
        taken_back.state.rewind(at)
    assert at == 70
    ours, theirs = (run.draft(PROMPT[:71]) for run in (taken_back, plain))
    assert ours.tokens == theirs.tokens
    assert far(ours.logits, theirs.logits.double()) < 1e-5


def test_a_run_that_joins_late_begins_anew(made):
    """A head that is attached late behaves as if the sequence began there."""
    late, run = Run(made, PLAIN), Run(made, PLAIN)
    for part in torch.tensor(PROMPT[:30]).split(32):
        late.model(part, late.state)
    late.read(PROMPT[30:40])
    run.read(PROMPT[:40])
    drafts = late.draft(PROMPT[:41])
    assert (late.drafts.first, late.drafts.position) == (30, 40)
    assert far(drafts.logits, run.draft(PROMPT[:41]).logits.double()) > 1e-3, "the window is of 16"


def test_a_tripwire_watches_a_head(made):
    """Position and layer are those of the sequence and of the stage, though rings count from where rows began."""
    run = Run(made, PLAIN)
    run.head.blocks[0].attention.sink[0] = float("nan")
    for part in torch.tensor(PROMPT[:20]).split(32):
        run.model(part, run.state)
    run.read(PROMPT[20:29])
    position = 28 if made.kind is Head.MTP else 29
    with pytest.raises(Tripwire, match=rf"attention.streams of layer 4 at position {position}") as caught:
        run.draft(PROMPT[:30])
    assert caught.value.position == position


@pytest.mark.parametrize("broken", ["markov_out", "confidence", "head"])
def test_what_a_head_says_at_its_end_is_looked_at(made, broken):
    """A broken tensor there is not to pass for a head that is bad at drafting."""
    run = Run(made, PLAIN)
    if broken == "head":
        run.head.hyper_head.base[0] = float("nan")
    elif made.kind is Head.DSPARK:
        values = getattr(run.head, broken).data.clone()
        values[0, 0] = float("nan")
        setattr(run.head, broken, Dense(values))
    else:
        return
    run.read(PROMPT[:9])
    site = {"markov_out": "drafts.logits", "confidence": "drafts.confidence", "head": "hidden"}[broken]
    with pytest.raises(Tripwire, match=site):
        run.draft(PROMPT[:10])


@pytest.mark.parametrize("window", [1, 2, 5, 16])
@pytest.mark.parametrize("kept", [1, 3, 8])
def test_more_drafts_than_the_window_has_rows(tmp_path_factory, made, window, kept):
    """All rows of a call may be of tokens that are taken back, but the first: the window before it is still there."""
    directory = tmp_path_factory.mktemp("narrow")
    more = DSPARK if made.kind is Head.DSPARK else {}
    write_checkpoint(directory, tiny_config(sliding_window=window, **more), seed=3, head=made.kind)
    narrow = made._replace(directory=directory)
    plain, taken_back = Run(narrow, PLAIN), Run(narrow, PLAIN)
    plain.read(PROMPT[: 20 + kept])
    taken_back.read(PROMPT[:20])
    taken_back.draft(PROMPT[:21])
    taken_back.read([*PROMPT[20 : 20 + kept], *[7] * (8 - kept)])
    taken_back.state.rewind(20 + kept)
    ours, theirs = (run.draft(PROMPT[: 21 + kept]) for run in (taken_back, plain))
    assert ours.tokens == theirs.tokens
    assert far(ours.logits, theirs.logits.double()) < 1e-5
