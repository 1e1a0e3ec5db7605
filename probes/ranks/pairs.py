"""The runs on several ranks that are held against a run alone."""

from dataclasses import replace

from model.choices import ALL_REDUCE, ALL_TO_ALL
from probes.parity.pairs import SAME, Pair, Setting, refused
from probes.subject import Subject
from runtime.options import RunOptions

# A rank multiplies fewer rows of a matrix, or fewer tokens: the order of sums changes and nothing else.
_PLAIN = Setting()
# Rounded as deployed, one value near a tie moves a row by a step of its format: at every site the second run is put
# back on the first, and a quarter of a site's rows may hold such a value (as in `probes.parity.pairs`).
_DEPLOYED = Setting(numerics="deployed", dtype="bf16")

DISPATCH = {
    "all-reduce": ALL_REDUCE,
    "all-to-all": ALL_TO_ALL,
    "all-reduce, deployed": ALL_REDUCE,
    "all-to-all, deployed": ALL_TO_ALL,
}
PAIRS = (
    Pair("all-reduce", _PLAIN, _PLAIN, SAME),
    Pair("all-to-all", _PLAIN, _PLAIN, SAME),
    Pair("all-reduce, deployed", _DEPLOYED, _DEPLOYED, SAME, share=0.75, steered=True),
    Pair("all-to-all, deployed", _DEPLOYED, _DEPLOYED, SAME, share=0.75, steered=True),
)


def left_out(subject: Subject) -> dict[str, str]:
    """Names of pairs whose numerics the model cannot run, and why."""
    return {pair.name: why for pair in PAIRS if (why := refused(pair, subject))}


def between(pair: Pair, subject: Subject) -> RunOptions:
    """The options of both runs of a pair."""
    options = subject.with_options(numerics=pair.one.numerics, dtype=pair.one.dtype)
    return replace(options, dispatch=DISPATCH[pair.name])
