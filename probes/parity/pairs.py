"""The settings that `probes.parity.probe` compares, which pairs of them should agree, and how a setting is run."""

import math
from dataclasses import dataclass

from kernels.ops import CPU, REFERENCE, Ops
from model.config import check_deployed
from model.errors import ConfigError
from model.observe.observer import listening
from probes.finding import Bound, at_most
from probes.parity import transformers_side
from probes.parity.compare import Canonical, Comparison, Sink
from probes.subject import Subject, run_tokens

# Largest relative distance of two rows that only the order of sums keeps apart. fp32 rounds by 2^-24 = 6e-8, so a sum
# of 512 terms in another order is off by some sqrt(512) of that, 1.4e-6; terms that cancel and layers that add up make
# it more. transformers computes RoPE's frequencies by another formula, an ulp apart: at position 700 that is an angle
# of up to 4e-5 in the few fastest of many dims.
SAME = at_most(5e-5)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the model."""

    numerics: str = "plain"
    dtype: str = "fp32"
    other_ops: bool = False  # the op set that the run does not use
    chunk: int | None = None  # tokens in a call; None: all of them
    transformers: bool = False

    def says(self, subject: Subject) -> str:
        """Words for a table."""
        if self.transformers:
            return "transformers, fp32, one call"
        ops = other_ops(subject.ops).name if self.other_ops else subject.ops.name
        return f"{ops}, {self.numerics}, {self.dtype}, {f'calls of {self.chunk}' if self.chunk else 'one call'}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings and what is demanded of them.

    Where activations are rounded to FP8 or FP4, sums in another order move the few values that lie within 1e-6 of a tie
    by a whole step, and everything that is computed from them. Such a pair is `steered`: after every site the second
    run goes on from where the first was, and only `share` of a site's rows must hold the bound.
    """

    name: str
    one: Setting
    other: Setting
    bound: Bound | None = None  # None: they differ by design and are measured
    share: float = 1.0  # of the rows of each site that must hold the bound
    steered: bool = False

    @property
    def alike(self) -> bool:
        """Whether both round activations the same: then the farthest row is telling, and else the median row."""
        return (self.one.numerics, self.one.dtype) == (self.other.numerics, self.other.dtype)

    @property
    def demands(self) -> str:
        """The bound and where it has to hold, in words; empty for a pair that is measured."""
        if self.bound is None:
            return ""
        rows = "" if self.share == 1 else f" in {self.share:.0%} of a site's rows"
        return f"{self.bound}{rows}{', steered' if self.steered else ''}"


PLAIN = Setting()
DEPLOYED = Setting(numerics="deployed")

OP_SET = Pair("op set", PLAIN, Setting(other_ops=True), SAME)
TRANSFORMERS = Pair("transformers", PLAIN, Setting(transformers=True), SAME)
# A row of the widest model's experts holds 10^4 rounded values: a few rows in a hundred hold one that is moved.
DEPLOYED_OP_SET = Pair(
    "op set, deployed", DEPLOYED, Setting("deployed", other_ops=True), SAME, share=0.75, steered=True
)
UNSTEERED = Pair("op set, deployed, not steered", DEPLOYED, Setting("deployed", other_ops=True))
NUMERICS = Pair("numerics", PLAIN, DEPLOYED)
DTYPE = Pair("dtype", PLAIN, Setting(dtype="bf16"))


def chunks(tokens: int) -> Pair:
    """The whole prompt in one call, against calls of `tokens`."""
    return Pair(f"calls of {tokens}", PLAIN, Setting(chunk=tokens), SAME)


@dataclass(frozen=True, slots=True)
class Ran:
    """A pair and what came of it: a comparison, or why there is none."""

    pair: Pair
    comparison: Comparison | None
    refused: str = ""


def other_ops(ops: Ops) -> Ops:
    """The op set that a run with `ops` is held against."""
    return CPU if ops.name == REFERENCE.name else REFERENCE


def refused(pair: Pair, subject: Subject) -> str | None:
    """Why a pair cannot run on this model and machine; None when it can."""
    settings = (pair.one, pair.other)
    if any(setting.transformers for setting in settings) and (why := transformers_side.unavailable(subject.config)):
        return why
    if any(setting.numerics == "deployed" for setting in settings):
        try:
            check_deployed(subject.config)
        except ConfigError as error:
            return str(error)
    return None


def run(setting: Setting, subject: Subject, tokens: list[int], sink: Sink) -> None:
    """Run the prompt and show `sink` everything that passes."""
    canonical = Canonical(subject.config, sink)
    if setting.transformers:
        transformers_side.run(subject.directory.resolve(), tokens, canonical)
        return
    options = subject.with_options(numerics=setting.numerics, dtype=setting.dtype)
    model = subject.load(options, other_ops(subject.ops) if setting.other_ops else None).model
    with listening(model, canonical.listeners()):
        model.logits(run_tokens(model, tokens, setting.chunk or len(tokens))[0])


def bound_of(pair: Pair) -> float:
    """From which distance on a row is worth an example, and within which a decision's scores are equal."""
    return math.inf if pair.bound is None else pair.bound.value
