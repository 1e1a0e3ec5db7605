"""Probe `ranks`: the model on several ranks is the model on one, at every site, and they hold what they say."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import Axis, axis
from fathom.model.choices import ALL, OWN, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, RankDisagreement, Tripwire
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Site
from fathom.model.ranks.ranks import Group
from fathom.probes.child import call_together
from fathom.probes.finding import Finding, Part, Report, Table, broken, exactly, judged
from fathom.probes.parity import COMPARED, SAME, Canonical, Comparison, Pair, Setting, Trace
from fathom.probes.probe import Probe, Progress, one_rank, room
from fathom.probes.subject import Subject, cannot_travel, run_tokens, selects_all
from fathom.runtime.load import load
from fathom.runtime.sharding import sharding_plan

LIMIT, GRACE = 300.0, 5.0  # seconds for the ranks of a group, and for the others once one has ended early
TIMEOUT = timedelta(seconds=60)  # for a collective: the others may be loading

# A rank multiplies fewer rows of a matrix, or fewer tokens: the order of sums changes and nothing else.
PLAIN = Pair("", Setting(), Setting(), SAME)
# Rounded as deployed, one value near a tie moves a row by a step of its format: at every site the second run is put
# back on the first, and a quarter of a site's rows may hold such a value (as in `probes.parity`).
DEPLOYED = Pair("", Setting("deployed", "bf16"), Setting("deployed", "bf16"), SAME, share=0.75, steered=True)
PAIRS = {  # which tokens a rank has, and how experts lie
    replace(PLAIN, name="all tokens"): (ALL, ROWS),
    replace(PLAIN, name="own tokens"): (OWN, ROWS),
    replace(PLAIN, name="all tokens, whole experts"): (ALL, WHOLE),
    replace(PLAIN, name="own tokens, whole experts"): (OWN, WHOLE),
    replace(DEPLOYED, name="all tokens, deployed"): (ALL, ROWS),
    replace(DEPLOYED, name="own tokens, deployed"): (OWN, ROWS),
    replace(DEPLOYED, name="own tokens, whole experts, deployed"): (OWN, WHOLE),
}

NOT_CLAIMED = """\
Ranks here are processes of one machine that talk through gloo; what NCCL does to the same calls is not shown. Both
sides of each comparison are this runtime, with the same weights and the same wiring: what is wrong on one rank already
is for the other probes. A rank that is slow, hangs or dies is not a matter of this page."""


@dataclass(frozen=True)
class Ranks(Probe):
    """Start ranks, run a prompt on them, and hold each against a run alone."""

    name: ClassVar[str] = "ranks"
    question: ClassVar[str] = "Does a model spread over several ranks compute what it computes on one?"
    reads: ClassVar[tuple[Site, ...]] = COMPARED
    of_fathom: ClassVar[bool] = True
    background: ClassVar[str] = """\
Spread over ranks, a model keeps its meaning only if every rank holds the right rows of every weight, a token's experts
get all of their inputs, and what is the same on every rank is never added up over them. The public record of getting
this wrong is long: a replicated tensor that was summed as if each rank held a part of it (activations grow by the
number of ranks in each layer), sinks of rank 0 used by all, experts off by a rank, a selection of entries that differs
between ranks, after which their caches tell different stories.

Here weights are sharded by rows, so no product is ever summed over ranks, and what ranks exchange is moved as bits. A
group of processes is started; each runs the prompt alone, then with the others, and compares the two at every site,
with all tokens on every rank between attentions and with its own tokens on each, with rows of every expert on each rank
and with whole experts, to which tokens are dispatched. In `plain` numerics only the order of sums is left to differ.
With activations rounded as deployed the second run is put back on the first after every site, as in `parity`. Then the
bytes that the ranks hold are added up: the checkpoint's, and one more copy per further rank of exactly what the
placement says is replicated, and of scales whose blocks of rows it divides: once for each way in which experts lie."""
    between_ranks: ClassVar[bool] = True
    noticed: ClassVar[str] = """\
- Nothing is summed over ranks, and yet in `plain` numerics fewer than half of the rows are bit-equal: a matrix product
  with fewer rows is another kernel of BLAS, which sums in another order. Put back on the one rank's values after every
  site, nearly all rows are equal in all their bits.
- Of the demo's matrices a rank holds fewer rows than a scale covers: it has that scale, and so have others."""

    sizes: tuple[int, ...] = (2, 4)  # ranks; those that do not divide experts and their columns are left out
    tokens: int = 264  # two entries of HCA and 66 of CSA; made more where the model needs more

    def needs(self, subject: Subject) -> str | None:
        """Processes of its own, with a fault or op set that they know by name."""
        if (why := one_rank(subject, "it starts ranks of its own")) is not None:
            return why
        if subject.options.device != "cpu":
            return "it starts ranks on the CPU"
        if (why := cannot_travel(subject)) is not None:
            return why
        if not self._possible(subject):
            return f"no number of ranks among {', '.join(map(str, self.sizes))} divides experts and their columns"
        if len(left := left_out(subject)) == len(PAIRS):
            return f"none of its pairs can run: {next(iter(left.values()))}"
        return room(subject, self._length(subject))

    def _length(self, subject: Subject) -> int:
        config = subject.config
        return max(self.tokens, 2 * max(config.compress_ratios) + 8, selects_all(config) + 32)

    def _possible(self, subject: Subject) -> list[int]:
        return [size for size in self.sizes if _divides(subject.config, size)]

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """One group after the other."""
        tokens, findings, rows = subject.tokens(self._length(subject)), list[Finding](), list[Any]()
        sizes, places, left = self._possible(subject), list[Part](), left_out(subject)
        for done, size in enumerate(sizes):
            progress(done / len(sizes), f"{size} ranks")
            answers = answers_of(subject, size, tokens)
            if errors := {rank: one for rank, one in enumerate(answers) if isinstance(one, Exception)}:
                findings.append(_ended(size, errors))
                continue
            farthest = [_farthest(of_ranks) for of_ranks in zip(*(one.findings for one in answers), strict=True)]
            findings += [*farthest, *(_bytes(subject, size, answers, experts) for experts in (ROWS, WHOLE))]
            rows += _rows(size, farthest, answers, [pair for pair in PAIRS if pair.name not in left])
            places.append(_places(subject, size, answers))
        columns = ("ranks", "pair", "calls", "rows compared", "bit-equal", "largest", "bound")
        note = (
            "Distance of two rows: Euclidean, relative to the longer one. Of all ranks, the one that is farthest. Where"
            " the bound is for a share of a site's rows, the distance is the one within which that share lies: 0 where"
            " that share is equal to the bit. Bytes are as stored; what is converted when it is loaded (norms and"
            " rotary frequencies, in fp32) is in `scripts.plan`."
        )
        failed = [finding.what for finding in findings if finding.failed]
        summary = (
            f"A prompt of {len(tokens)} tokens on {' and '.join(map(str, sizes))} ranks: "
            + ("; ".join(failed) if failed else "every site agrees with a run on one rank")
            + (f"; left out, {' and '.join(left)}: {next(iter(left.values()))}" if left else "")
            + "."
        )
        whole = Table("Several ranks against one", columns, rows, note)
        return Report(summary, tuple(findings), (whole, *places), NOT_CLAIMED)


def _divides(config: ModelConfig, size: int) -> bool:
    try:
        for experts in (ROWS, WHOLE):
            sharding_plan(config, size, experts)
    except ConfigError:
        return False
    return True


def left_out(subject: Subject) -> dict[str, str]:
    """Names of pairs whose numerics the model cannot run, and why."""
    return {pair.name: why for pair in PAIRS if (why := pair.refused(subject))}


# --- one rank


class Answer(NamedTuple):
    """What a rank found, and what it holds."""

    findings: list[Finding]  # of each pair
    calls: list[dict[str, int]]  # by the tokens that a rank had, in the run of each pair
    held: dict[str, int]  # bytes of weights, by how experts lie
    replicated: list[str]


def answers_of(subject: Subject, size: int, tokens: list[int]) -> list[Any]:
    """Run `tokens` on `size` ranks: the `Answer` of each, or the error that ended it.

    Raises
    ------
    ChildError
        All of them ended, and none because of a tripwire or a disagreement; a diagnostic is raised as it is.

    """
    with tempfile.TemporaryDirectory() as folder:
        calls = [(subject, tokens, str(Path(folder) / "store"), rank, size) for rank in range(size)]
        answers = call_together(rank_of, calls, LIMIT, GRACE)
    if not any(isinstance(one, (Answer, Tripwire, RankDisagreement)) for one in answers):
        raise answers[0]
    return answers


def rank_of(subject: Subject, tokens: list[int], store: str, rank: int, size: int) -> Answer:
    """What one of `size` processes that meet in the file `store` finds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
    found = answer(Group(rank, size, dist.group.WORLD), subject, tokens)
    dist.destroy_process_group()
    return found


def answer(group: Group, subject: Subject, tokens: list[int]) -> Answer:
    """Run the prompt alone and then with the others of `group`, for each pair, and compare the two.

    Each process holds the whole tensor at every site (`model.observe.sites`), so each of them can tell where it parts.
    """
    left, findings, calls = left_out(subject), [], []
    for pair, (tokens_of, experts) in PAIRS.items():
        if pair.name in left:
            continue
        numerics = {"numerics": pair.one.numerics, "dtype": pair.one.dtype}
        options = subject.with_options(**numerics, rank_tokens=tokens_of, experts=experts)
        alone, held = subject.load(options).model, Trace()
        with listening(alone, Canonical(subject.config, held).listeners()):
            alone.logits(run_tokens(alone, tokens, len(tokens))[0])
        comparison = Comparison(pair, subject.config, subject.file_weights, held)
        model = load(subject.directory, options, subject.ops, group).model
        if subject.fault is not None:
            subject.fault.inject(model)
        with listening(model, Canonical(subject.config, comparison).listeners()):
            model.logits(run_tokens(model, tokens, len(tokens))[0])
        comparison.close()
        findings.append(replace(comparison.finding(f"{group.size} ranks, "), rank=group.rank))
        calls.append(dict(model.arithmetic.ranks.calls))
    every = {
        experts: load(subject.directory, subject.with_options(experts=experts), subject.ops, group)
        for experts in (ROWS, WHOLE)
    }
    sizes = {experts: sum(loaded.held.values()) for experts, loaded in every.items()}
    return Answer(findings, calls, sizes, list(every[ROWS].sharding.replicated))


# --- all of them


def _ended(size: int, errors: dict[int, Exception]) -> Finding:
    """The run ended on some rank: by a tripwire or a disagreement, and where one ended the others, or else somehow."""
    told = {rank: error for rank, error in errors.items() if isinstance(error, (Tripwire, RankDisagreement))} or errors
    why = "; ".join(dict.fromkeys(f"{type(error).__name__}: {error}" for error in told.values()))
    return broken(f"{size} ranks: the run ended", why, ranks=sorted(told))


def _farthest(of_ranks: Sequence[Finding]) -> Finding:
    return max(of_ranks, key=lambda finding: (finding.failed, finding.measured))


def _bytes(subject: Subject, size: int, answers: Sequence[Answer], experts: str) -> Finding:
    """Bytes that the ranks hold, and those of the checkpoint with the announced copies.

    Of `experts` that lie whole each is on one rank, and the shared one on all of them.
    """
    checkpoint = Checkpoint.open(subject.directory)
    counted = census(checkpoint.shapes(), subject.config)
    announced = [note.partition(":")[0] for note in sharding_plan(subject.config, size, experts).replicated]
    wanted = 0
    for name, mapping in counted.mappings.items():
        tensors = [checkpoint.tensors[part] for part in (mapping.weight, mapping.scale, mapping.global_scale) if part]
        stored = sum(tensor.nbytes for tensor in tensors)
        if mapping.part is not None:  # one expert of a stack
            stored = tensors[0].nbytes * prod(counted.demanded[name].shape) // prod(tensors[0].shape)
        along = axis(name)
        everywhere = along is Axis.NONE or along.value in announced
        whole = experts == WHOLE and "experts." in name
        if whole:
            everywhere = "shared_experts." in name
        wanted += stored * (size if everywhere else 1)
        if everywhere or whole:
            continue
        if mapping.global_scale is not None:
            wanted += 4 * (size - 1)
        elif mapping.scale is not None:  # a scale of several rows is held by each rank that has one of them
            rows, scale = counted.demanded[name].shape[0], checkpoint.tensors[mapping.scale]
            several = -(-rows // scale.shape[0])
            each = rows // size
            ends = [(rank * each // several, ((rank + 1) * each - 1) // several) for rank in range(size)]
            copies = sum(last - first + 1 for first, last in ends) - scale.shape[0]
            wanted += copies * scale.nbytes // scale.shape[0]
    held = sum(one.held[experts] for one in answers)
    what = f"{size} ranks, experts {'whole' if experts == WHOLE else 'by rows'}: bytes of weights held by all"
    return judged(what, held, exactly(wanted), "B", copies_of=announced)


def _rows(size: int, findings: Sequence[Finding], answers: Sequence[Answer], pairs: Sequence[Pair]) -> list[Any]:
    """A row of each pair; bit-equal are the fewest of any rank."""
    rows = []
    for at, (pair, finding) in enumerate(zip(pairs, findings, strict=True)):
        calls = ", ".join(f"{name} {count}" for name, count in answers[0].calls[at].items() if count)
        equal = min(one.findings[at].evidence["bit_equal"] for one in answers)
        rows.append([size, pair.name, calls, finding.evidence["rows"], equal, finding.measured, pair.demands])
    return rows


def _places(subject: Subject, size: int, answers: Sequence[Answer]) -> Table:
    """What each rank holds."""
    columns = (
        *("rank", "heads", "output groups", "output columns", "vocabulary", "SwiGLU's columns", "bytes"),
        *("or experts", "bytes"),
    )
    rows: list[list[float | str | None]] = []
    by_rows, whole = (sharding_plan(subject.config, size, experts).ranks for experts in (ROWS, WHOLE))
    for rank, (shard, other, one) in enumerate(zip(by_rows, whole, answers, strict=True)):
        places = (shard.heads, shard.groups, shard.output, shard.vocabulary, shard.inner, other.experts)
        *parts, experts = [f"{part.start} .. {part.stop - 1}" if part.split else "all" for part in places]
        rows.append([rank, *parts, one.held[ROWS], experts, one.held[WHOLE]])
    note = "; ".join(["Replicated: all else, and beside whole experts the shared one", *answers[0].replicated])
    return Table(f"{size} ranks: who holds what", columns, rows, f"{note}.")


FULL = Ranks()
QUICK = Ranks(sizes=(2,))
