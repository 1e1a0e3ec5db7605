"""Probe `parity`: two settings of one model, compared at every site; names the first site, layer and token apart."""

from dataclasses import dataclass
from typing import ClassVar

from model.checkpoint.census import census
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.weights import open_weights
from model.config import ModelConfig
from model.observe.sites import Site
from probes.finding import Report
from probes.parity.compare import COMPARED, Comparison, Trace
from probes.parity.pairs import (
    DEPLOYED_OP_SET,
    DTYPE,
    NUMERICS,
    OP_SET,
    TRANSFORMERS,
    UNSTEERED,
    Pair,
    Ran,
    Setting,
    bound_of,
    chunks,
    refused,
    run,
)
from probes.parity.report import report
from probes.parity.transformers_side import HIDDEN_INSIDE
from probes.probe import Probe, Progress, room
from probes.subject import Subject, selects_all


@dataclass(frozen=True)
class Parity(Probe):
    """Compare pairs of settings on one prompt; the fields are knobs."""

    name: ClassVar[str] = "parity"
    question: ClassVar[str] = "Where do two settings that should agree first part: which site, layer and token?"
    reads: ClassVar[tuple[Site, ...]] = COMPARED
    background: ClassVar[str] = """\
A model can be run in many ways that should make no difference: with the equations written out (`reference`) or in tiles
(`cpu`), the prompt in one call or in many, by this runtime or by another. Where two of them disagree, one is wrong,
and a comparison of the answers alone says neither which nor where: by the end of a few layers everything differs.

So both sides are watched at every site, in the order in which a token passes them, and each row (a token's query, its
streams, an entry) is compared by itself: the distance of the two rows, relative to the longer. The first site, layer
and token beyond the bound is where to look. Two op sets and two chunkings share the wiring of the layers and cannot see
a fault in it; `DeepseekV4ForCausalLM` of transformers shares nothing but the file, which is decoded to fp32 for it.

Where activations are rounded to FP8 and FP4, the last bit of a sum can decide a whole step of the format, and whatever
follows from that differs. Such a pair is *steered*: after every site the second run is put back on the first, so that
each site is compared from equal inputs."""
    noticed: ClassVar[str] = """\
- The two op sets are no closer to each other than this one is to transformers, and all select the same entries.
  It need not be so: a selection may end among entries at the ReLU's zero, where any choice is as good, and `torch.topk`
  may choose otherwise than this runtime (the lowest entry). Such a token is excused and goes on with the first run's
  choice.
- With activations rounded as deployed, two right op sets part all the same: one value of one token rounds the other
  way, and what follows from it differs, selections and logits included. Put back on the first run after each site, they
  agree within the bound: all of it was that rounding. So nobody can ask deployed logits to agree closely, and where
  they are let differ, faults pass; what can be asked is agreement at every site from equal inputs.
- Judging the median row of the deployed op sets, without putting them back, passes on this checkpoint and fires on a
  healthy one with random weights: an HCA entry carries one flipped value of a block of tokens to every later token.
- Rounding as deployed changes what is selected, and moves the logits of the median token, more than BF16 alone."""

    tokens: int = 700  # five blocks of 128 and a part of one; made more where the model needs more, see `length`
    pairs: tuple[Pair, ...] = (
        OP_SET,
        chunks(7),  # divides neither 4 nor 128: calls end at every residue of both
        TRANSFORMERS,
        NUMERICS,
        DTYPE,
        DEPLOYED_OP_SET,
        UNSTEERED,
    )

    def length(self, config: ModelConfig) -> int:
        """Tokens to run: at least two entries of each kind, and twice as many as the selection takes."""
        needed = (config.sliding_window, 2 * max(config.compress_ratios), 2 * selects_all(config))
        return max(self.tokens, max(needed) + 4)

    def needs(self, subject: Subject) -> str | None:
        """Entries of every kind, and more of them than are selected."""
        return room(subject, self.length(subject.config))

    def vacuous(self, subject: Subject) -> str | None:
        """Say why the comparison could not show a difference."""
        if all(pair.bound is None or refused(pair, subject) for pair in self.pairs):
            return "no pair of settings that should agree can be run"
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Hold one side of each pair, and compare the other as it runs."""
        tokens = subject.tokens(self.length(subject.config))
        checkpoint = Checkpoint.open(subject.directory)
        weights = open_weights(checkpoint, census(checkpoint.shapes(), subject.config, where=str(subject.directory)))
        held: tuple[Setting, Trace] | None = None  # of one setting at a time: pairs that share it stand together
        ran: list[Ran] = []
        for pair in self.pairs:
            progress(len(ran) / len(self.pairs), pair.name)
            if why := refused(pair, subject):
                ran.append(Ran(pair, None, why))
                continue
            if held is None or held[0] != pair.one:
                held = pair.one, Trace()
                run(pair.one, subject, tokens, held[1])
            comparison = Comparison(subject.config, weights, held[1], bound_of(pair), pair.steered)
            run(pair.other, subject, tokens, comparison)
            comparison.close(HIDDEN_INSIDE if pair.other.transformers else ())
            ran.append(Ran(pair, comparison))
        return report(ran, subject, len(tokens))


FULL = Parity()
# Few calls, because each decodes the experts' weights anew; 101 is odd: its calls too end within windows of both kinds.
QUICK = Parity(tokens=264, pairs=(OP_SET, chunks(101), TRANSFORMERS, DEPLOYED_OP_SET))
