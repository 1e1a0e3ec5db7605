"""Probe `ranks`: the model on several ranks is the model on one, at every site, and they hold what they say."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import Axis, axis
from fathom.model.choices import DEPLOYED, OWN, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, RankDisagreement, Tripwire
from fathom.model.observe.sites import Site
from fathom.model.ranks.ranks import Group
from fathom.probes.child import call_together
from fathom.probes.finding import Finding, Part, Report, Table, broken, exactly, judged
from fathom.probes.judge.oracle import Parameters
from fathom.probes.judge.pairs import Side
from fathom.probes.judge.recording import KEPT
from fathom.probes.probe import Probe, Progress, one_rank, room
from fathom.probes.same import Pair, compared, side
from fathom.probes.subject import Subject, cannot_travel, selects_all
from fathom.probes.ways import Way, run
from fathom.runtime.sharding import sharding_plan

LIMIT, GRACE = 300.0, 5.0  # seconds for the ranks of a group, and for the others once one has ended early
TIMEOUT = timedelta(seconds=60)  # for a collective: the others may be loading

WAYS: Final = {  # which tokens a rank has, and how experts lie
    "all tokens": Way(),
    "own tokens": Way(rank_tokens=OWN),
    "all tokens, whole experts": Way(experts=WHOLE),
    "own tokens, whole experts": Way(rank_tokens=OWN, experts=WHOLE),
    "all tokens, deployed": Way(DEPLOYED, "bf16"),
    "own tokens, deployed": Way(DEPLOYED, "bf16", rank_tokens=OWN),
    "own tokens, whole experts, deployed": Way(DEPLOYED, "bf16", rank_tokens=OWN, experts=WHOLE),
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
    reads: ClassVar[tuple[Site, ...]] = KEPT
    of_fathom: ClassVar[bool] = True
    background: ClassVar[str] = """\
Spread over ranks, a model keeps its meaning only if every rank holds the right rows of every weight, a token's experts
get all of their inputs, and what is the same on every rank is never added up over them. The public record of getting
this wrong is long: a replicated tensor that was summed as if each rank held a part of it (activations grow by the
number of ranks in each layer), sinks of rank 0 used by all, experts off by a rank, a selection of entries that differs
between ranks, after which their caches tell different stories.

Here weights are sharded by rows, so no product is ever summed over ranks, and what ranks exchange is moved as bits. A
group of processes is started, and each records its run of the prompt: with all tokens on every rank between attentions,
or only its own; with rows of every expert on each rank, or with whole experts, to which tokens are dispatched. Each
recording is compared with a run on one rank at every site, as `same` does it. Then the bytes that the ranks hold are
added up: the checkpoint's, and one more copy per further rank of exactly what the placement says is replicated, and of
scales whose blocks of rows it divides: once for each way in which experts lie."""
    between_ranks: ClassVar[bool] = True
    noticed: ClassVar[str] = """\
- Nothing is summed over ranks, and yet in `plain` numerics not all rows are bit-equal: a matrix product with fewer rows
  may be another kernel of BLAS, which sums in another order.
- Of the demo's matrices a rank holds fewer rows than a scale covers: it has that scale, and so have others."""

    sizes: tuple[int, ...] = (2, 4)  # ranks; those that do not divide experts and their columns are left out
    tokens: int = 264  # two entries of HCA and 66 of CSA; made more where the model needs more
    rows: int | None = None  # as of `Same`

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
        if len(left := left_out(subject)) == len(WAYS):
            return f"none of its ways can run: {next(iter(left.values()))}"
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
        parameters = Parameters.of(subject.directory, subject.config)
        with tempfile.TemporaryDirectory() as name:
            folder, alone = Path(name), dict[tuple[str, str], Side]()
            for way in (way for name, way in WAYS.items() if name not in left):
                if (way.numerics, way.dtype) not in alone:
                    path = folder / f"alone{len(alone)}.safetensors"
                    run(way, subject, tokens, path)
                    alone[way.numerics, way.dtype] = side(way, subject, path, parameters)
            for done, size in enumerate(sizes):
                progress(done / len(sizes), f"{size} ranks")
                answers = answers_of(subject, size, tokens, folder)
                if errors := {rank: one for rank, one in enumerate(answers) if isinstance(one, Exception)}:
                    findings.append(_ended(size, errors))
                    continue
                for n, pair in enumerate(Pair(name, way, way) for name, way in WAYS.items() if name not in left):
                    one = alone[pair.one.numerics, pair.one.dtype]
                    of_ranks = [
                        (rank, compared(pair, one, side(pair.other, subject, path, parameters), self.rows, _silent))
                        for rank, path in _unlike([answer.recordings[n] for answer in answers])
                    ]
                    judged_ = [
                        replace(of.finding(subject.config, f"{size} ranks, "), rank=rank) for rank, of in of_ranks
                    ]
                    findings.append(max(judged_, key=lambda finding: (finding.failed, finding.measured or 0.0)))
                    rows.append(_row(size, pair, findings[-1], answers[0].calls[n]))
                findings += [_bytes(subject, size, answers, experts) for experts in (ROWS, WHOLE)]
                places.append(_places(subject, size, answers))
        columns = ("ranks", "pair", "calls", "rows compared", "bit-equal", "worst over what rounding explains")
        note = (
            "Of all ranks, the one that is furthest off. Bytes are as stored; what is converted at load (norms"
            " and rotary frequencies, in fp32) is in `scripts.plan`."
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
    """Names of ways whose numerics the model cannot run, and why."""
    return {name: why for name, way in WAYS.items() if (why := way.refused(subject))}


# --- one rank


class Answer(NamedTuple):
    """What a rank recorded, and what it holds."""

    recordings: list[Path]  # of each way
    calls: list[dict[str, int]]  # by the tokens that a rank had, in the run of each way
    held: dict[str, int]  # bytes of weights, by how experts lie
    replicated: list[str]


def answers_of(subject: Subject, size: int, tokens: list[int], folder: Path) -> list[Any]:
    """Run `tokens` on `size` ranks: the `Answer` of each, or the error that ended it. Recordings are in `folder`.

    Raises
    ------
    ChildError
        All of them ended, and none because of a tripwire or a disagreement; a diagnostic is raised as it is.

    """
    calls = [(subject, tokens, folder, rank, size) for rank in range(size)]
    answers = call_together(rank_of, calls, LIMIT, GRACE)
    if not any(isinstance(one, (Answer, Tripwire, RankDisagreement)) for one in answers):
        raise answers[0]
    return answers


def rank_of(subject: Subject, tokens: list[int], folder: Path, rank: int, size: int) -> Answer:
    """What one of `size` processes that meet in `folder` records."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    found = answer(Group(rank, size, dist.group.WORLD), subject, tokens, folder)
    dist.destroy_process_group()
    return found


def answer(group: Group, subject: Subject, tokens: list[int], folder: Path) -> Answer:
    """Run the prompt with the others of `group` in each way.

    Each process holds the whole tensor at every site (`model.observe.sites`), so each of them records all.
    """
    left, paths, calls = left_out(subject), list[Path](), []
    for name, way in WAYS.items():
        if name in left:
            continue
        shared = replace(subject, group=group)  # one model at a time
        paths.append(folder / f"{group.size}.{group.rank}.{len(paths)}.safetensors")
        run(way, shared, tokens, paths[-1])
        calls.append(dict(shared.load(way.options(shared)).model.arithmetic.ranks.calls))
    shared = replace(subject, group=group)
    every = {experts: shared.load(shared.with_options(experts=experts)) for experts in (ROWS, WHOLE)}
    sizes = {experts: sum(loaded.held.values()) for experts, loaded in every.items()}
    return Answer(paths, calls, sizes, list(every[ROWS].sharding.replicated))


# --- all of them


def _ended(size: int, errors: dict[int, Exception]) -> Finding:
    """The run ended on some rank: by a tripwire or a disagreement, and where one ended the others, or else somehow."""
    told = {rank: error for rank, error in errors.items() if isinstance(error, (Tripwire, RankDisagreement))} or errors
    why = "; ".join(dict.fromkeys(f"{type(error).__name__}: {error}" for error in told.values()))
    return broken(f"{size} ranks: the run ended", why, ranks=sorted(told))


def _unlike(of_ranks: Sequence[Path]) -> list[tuple[int, Path]]:
    """Recordings of ranks, each content once: the first rank that has it."""
    first: dict[str, tuple[int, Path]] = {}
    for rank, path in enumerate(of_ranks):
        with path.open("rb") as file:
            first.setdefault(hashlib.file_digest(file, "sha256").hexdigest(), (rank, path))
    return list(first.values())


def _silent(share: float) -> None:
    del share


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


def _row(size: int, pair: Pair, finding: Finding, calls: Mapping[str, int]) -> list[Any]:
    counts = ", ".join(f"{name} {count}" for name, count in calls.items() if count)
    return [size, pair.name, counts, finding.evidence.get("rows"), finding.evidence.get("bit_equal"), finding.measured]


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
QUICK = Ranks(sizes=(2,), rows=8)
