"""Ranks that choose different tokens part at once, and none of the tokens is passed on."""

import pytest

from fathom.model.errors import RankDisagreement
from fathom.runtime.generate import Generation, generate
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sampling import Sampling
from tests import gloo

PROMPT = [0, 271, 290]


def chosen(group, seeds):
    """The tokens that a rank got out of `generate`, and where it was told that the ranks disagree."""
    loaded = load(DEMO, RunOptions(), group=group)
    record, out, error = Generation(), [], None
    stream = generate(
        loaded.model,
        loaded.model.new_state(32, 16),
        PROMPT,
        eos=loaded.model.config.eos_token_ids,
        limit=6,
        sampling=Sampling(temperature=5.0, seed=seeds[group.rank]),
        progress=lambda _: None,
        record=record,
    )
    try:
        out += stream
    except RankDisagreement as found:
        error = (found.site, found.layer, found.rank, found.coordinate, found.here, found.there)
    assert record.tokens == out
    return out, error


@pytest.mark.slow
def test_a_token_that_differs_is_never_passed_on():
    same = gloo.run(2, chosen, (7, 7))
    assert same[0] == same[1]
    assert len(same[0][0]) == 6
    assert same[0][1] is None
    other = gloo.run(2, chosen, (7, 8))
    assert other[0] == other[1]
    out, (site, layer, rank, coordinate, here, there) = other[0]
    assert (site, layer, rank, coordinate) == ("sampled token", None, 1, (0,))
    assert out == same[0][0][: len(out)], "up to there rank 0's tokens"
    assert here == same[0][0][len(out)] != there
