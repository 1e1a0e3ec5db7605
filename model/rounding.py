"""Numerics are three choices: what a run rounds of its activations to a narrow format.

`deployed` rounds as DeepSeek serves V4, `plain` nothing, as Hugging Face transformers computes. Other runtimes take
other combinations: kernels for weights alone leave the inputs of linears as they are, and many indexers keep keys in
FP8. Nothing here needs torch.
"""

from dataclasses import asdict, dataclass
from typing import Final, Self

from fathom.model.choices import DEPLOYED, NUMERICS, PLAIN
from fathom.model.errors import ConfigError, quoted

NONE, FP8, FP4 = "none", "fp8", "fp4"
# Of other runtimes, for a judge: no run here has them. The last three are of V4.1, whose own are: inputs of linears and
# window KV in E4M3 by 32 columns, entries in E2M1 by 16, index queries and keys in E2M1 by 32 without Hadamard. They
# are: all in V4's record; the same, of entries that were rounded as DeepSeek rounds them before; all in E4M3 by 32.
F16, GGML = "f16", "ggml"
RECORD, TWICE, ALL_FP8 = "v4", "fp4+v4", "fp8-all"


@dataclass(frozen=True, slots=True)
class Rounding:
    """A format, or none, for each of three places."""

    linears: str  # inputs of linears: fp8 (E4M3 by 128 columns, of FP8 or FP4 weights), ggml (by the weight's type)
    kv: str  # window KV and entries: fp8 (E4M3 by 64 columns, but for rope dims), f16 (and attention); V4.1's see below
    index: str  # index queries and keys: fp4 (Hadamard, then E2M1 by 32 columns), fp8 (E4M3 by row), f16 (Hadamard)

    @property
    def numerics(self) -> str:
        """Its name: `deployed`, `plain`, or the choices as `--rounding` takes them."""
        named = next((name for name, known in ROUNDINGS.items() if known == self), None)
        return named or ",".join(f"{place}={form}" for place, form in asdict(self).items())

    @property
    def foreign(self) -> str:
        """The first choice that no run here has, as --rounding says it; empty where there is none."""
        choices = asdict(self).items()
        return next((f"{place}={form}" for place, form in choices if form not in OURS), "")

    @property
    def runnable(self) -> "Rounding":
        """The nearest that a run here has: nothing is rounded where others round as no run here does."""
        return Rounding(*(form if form in OURS else NONE for form in (self.linears, self.kv, self.index)))

    @classmethod
    def of(cls, numerics: str) -> Self:
        """The rounding of a name, or of choices such as ``linears=none,kv=fp8,index=fp8``; ConfigError for others."""
        if numerics in ROUNDINGS:
            return cls(**asdict(ROUNDINGS[numerics]))
        given: dict[str, str] = {}
        for part in numerics.split(","):
            place, _, form = part.partition("=")
            if place not in FORMS or place in given:
                raise ConfigError(f"{quoted(numerics)}: {_WANT}")
            if form not in FORMS[place]:
                raise ConfigError(f"{quoted(numerics)}: {place} is {' or '.join(FORMS[place])}")
            given[place] = form
        if missing := [place for place in FORMS if place not in given]:
            raise ConfigError(f"{quoted(numerics)}: says nothing of {missing[0]}; {_WANT}")
        return cls(**given)


OURS: Final = (NONE, FP8, FP4)
FORMS: Final = {
    "linears": (FP8, GGML, NONE),
    "kv": (FP8, F16, RECORD, TWICE, ALL_FP8, NONE),
    "index": (FP4, FP8, F16, NONE),
}
_WANT: Final = "want " + ",".join(f"{place}={'|'.join(forms)}" for place, forms in FORMS.items())
ROUNDINGS: Final = {DEPLOYED: Rounding(FP8, FP8, FP4), PLAIN: Rounding(NONE, NONE, NONE)}
assert tuple(ROUNDINGS) == NUMERICS, "every name has its rounding"
