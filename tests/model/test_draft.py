"""Drafting heads against the float64 oracle of `probes.draft_oracle`, and what they remember against a plain run."""

from typing import NamedTuple

import pytest
import torch

from kernels.ops import CPU, REFERENCE
from model.checkpoint.census import census
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.mtp import Head
from model.config import ModelConfig
from model.errors import Tripwire
from model.observe import sites
from model.observe.observer import listening
from probes.draft_oracle import Dspark, Mtp
from probes.oracle import Noise, Parameters
from runtime.load import load
from runtime.options import RunOptions
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint

PLAIN = RunOptions("plain", "fp32", draft="auto", draft_tokens=5)
DEPLOYED = RunOptions("deployed", "fp32", draft="auto", draft_tokens=5)
PROMPT = torch.randint(2, 300, (75,), generator=torch.Generator().manual_seed(5)).tolist()
DRAFTS = 5


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
        self.heard, self.drafts = self.head.listener(), self.head.new_state(DRAFTS)
        self.state = self.model.new_state(256, 32, rewind=DRAFTS)
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.model.blocks]

    def read(self, tokens):
        def note(layer, streams):
            self.heard(layer, streams)
            self.streams[layer].append(streams.clone())

        with listening(self.model, {sites.STREAMS: note}):
            for part in torch.tensor(tokens).split(32):
                self.model(part, self.state)

    def draft(self, sequence, k=DRAFTS):
        """Behind a sequence whose last token has not been run."""
        return self.head.draft(self.heard, sequence, len(sequence) - 1, k, self.drafts)


def judged(made, run, sequence, drafts, *, deployed):
    """What the oracle makes of the same streams, given what was drafted: logits, keys of each stage, confidence."""
    n, chosen, noise = len(sequence) - 1, torch.tensor(drafts.tokens), Noise(torch.float32, 0)
    whole = [torch.cat(parts)[:n].double() for parts in run.streams]
    how = {"stages": made.kind.stages, "deployed": deployed, "noise": noise}
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
    """What was not heard is not there: drafts are those of a sequence that begins where hearing began."""
    late, run = Run(made, PLAIN), Run(made, PLAIN)
    for part in torch.tensor(PROMPT[:30]).split(32):
        late.model(part, late.state)
    late.read(PROMPT[30:40])
    run.read(PROMPT[:40])
    drafts = late.draft(PROMPT[:41])
    assert (late.drafts.first, late.drafts.position) == (30, 40)
    assert far(drafts.logits, run.draft(PROMPT[:41]).logits.double()) > 1e-3, "the window is of 16"


def test_a_tripwire_watches_a_head(made):
    run = Run(made, PLAIN)
    run.head.norm[3] = float("nan")
    run.read(PROMPT[:9])
    with pytest.raises(Tripwire, match="hidden"):
        run.draft(PROMPT[:10])
