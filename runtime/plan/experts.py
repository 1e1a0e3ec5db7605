"""Which way routed experts lie on ranks is faster, whole or by rows, for a prompt and an answer: by arithmetic."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fathom.kernels.ops import CPU
from fathom.model.architectures import Config
from fathom.model.checkpoint.census import Census
from fathom.model.choices import AUTO, OFF, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.runtime.options import NEW_TOKENS, RunOptions
from fathom.runtime.plan.gpus import GPUS, Rates
from fathom.runtime.plan.planner import Planner
from fathom.runtime.sharding import sharding_plan

WAYS = ROWS, WHOLE


class Work(NamedTuple):
    """What a run is asked."""

    prompt: int  # tokens
    new: int = NEW_TOKENS

    @classmethod
    def of(cls, count: int, prompt: int) -> "Work":
        """Of so many known tokens, of which the first are prefilled and each other is a step."""
        return cls(prompt, 1 + count - prompt)  # one token more than steps


class Choice(NamedTuple):
    """The way that is taken."""

    way: str  # WHOLE or ROWS
    why: str  # one line
    seconds: Mapping[str, float]  # by way; empty where no times decide


def faster(config: ModelConfig, census: Census, options: RunOptions, ranks: int, gpu: str | None, work: Work) -> Choice:
    """Choose how experts lie on several `ranks`: as the options say, or for AUTO the way that is faster.

    It follows from what it is given alone, so ranks that are given the same choose the same. Times are those of ranks
    that are all connected as GPUs of one machine are.

    Parameters
    ----------
    config, census, options
        Of the run.
    ranks
        How many there are.
    gpu
        Which of `GPUS` each has; None: none of these.
    work
        The prompt and the answer.

    Raises
    ------
    ConfigError
        As `sharding_plan`.

    """
    if options.experts != AUTO:
        return Choice(sharding_plan(config, ranks, options.experts).experts, "--experts says so", {})
    refused: dict[str, str] = {}
    for way in WAYS:
        try:
            sharding_plan(config, ranks, way)
        except ConfigError as error:
            refused[way] = str(error)
    if refused:
        return Choice(sharding_plan(config, ranks).experts, f"not the other way: {next(iter(refused.values()))}", {})
    if options.device == "cpu" or gpu is None or (rates := GPUS[gpu].rates) is None:
        return Choice(ROWS, f"no link between ranks is known of {gpu or 'this device'}, to estimate times with", {})
    seconds = {way: _seconds(planner(config, census, options, ranks, way), rates, work) for way in WAYS}
    way, other = sorted(WAYS, key=lambda one: seconds[one])
    told = f"{seconds[way]:.3g} s by arithmetic for {work.prompt:,} tokens of prompt and {work.new:,} new ones on {gpu}"
    return Choice(way, f"{told}, {seconds[other]:.3g} s {other}", seconds)


def planner(config: Config, census: Census, options: RunOptions, ranks: int, way: str) -> Planner:
    """A planner for times: with caches in full and without drafts, which are the same both ways."""
    plain = replace(options, kv=(), draft=OFF, draft_tokens=0, experts=way)
    return Planner(config, census, sharding_plan(config, ranks, way), plain, 0, CPU.name)


def _seconds(one: Planner, rates: Rates, work: Work) -> float:
    """Calls of the prompt, and the tokens that follow the first, each as the last one."""
    chunk, found = one.options.prefill_chunk, 0.0
    for first in range(0, work.prompt, chunk):
        count = min(chunk, work.prompt - first)
        found += one.prefill(count, first + count, rates).seconds
    token = one.token(work.prompt + work.new, rates)
    assert token is not None, "caches are in full"
    return found + (work.new - 1) * token.seconds
