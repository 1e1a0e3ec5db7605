"""What the answers of `probes.needle.probe` mean: verdicts, maps of depth and length, and tables by prompt length."""

from collections.abc import Callable, Mapping, Sequence

from probes.finding import Finding, HeatMap, Part, Report, Table, Text, at_least, at_most, judged, measured, vacuous
from probes.needle.answers import Answer

# Ways to run the documents; the last two run those that ask for the most common word.
RUN, RANDOM, WINDOW = "the run", "random selection", "window only"
WORDS, WORDS_WINDOW = "most common word, the run", "most common word, HCA window only"

# The demo checkpoint finds every code at every length from 256 to 16384 (audits/demo-checkpoint.md). One miss in twenty
# leaves room for other numerics, and none for a fault that hits one prompt length in four or one depth in ten.
FOUND = at_least(0.95)
# What luck leaves without the right entries: one code in 90; more with random entries, which in the shortest documents
# are a quarter of all.
BY_CHANCE, BY_WINDOW = at_most(0.5), at_most(0.2)
# Three of the four words have a sixth of the mentions each: guesses are right one time in four, and a lucky handful of
# documents may double that.
COUNTED, NOT_COUNTED = at_least(0.9), at_most(0.7)
DEPTHS = 10  # columns of a map
RATIO, BLOCK = 4, 128  # tokens of an entry in DeepSeek's CSA and HCA layers
BLOCK_PART = 16  # prompt lengths mod 128 that share a row

NOT_CLAIMED = """\
Documents come from the generator that made the training data, with other seeds: this says that the runtime keeps what
the checkpoint can use, not that a model of this size understands text. A fault that misplaces few entries may leave
every answer right; `recall` and `parity` look closer. Beyond the lengths it was trained on (2048) the model
extrapolates, and a loss there is the model's until another runtime disagrees."""


def share(answers: Sequence[Answer]) -> float:
    """How many of the answers are right."""
    return sum(answer.right for answer in answers) / len(answers)


def grouped(answers: Sequence[Answer], key: Callable[[Answer], int]) -> dict[int, list[Answer]]:
    """The answers by a key, ascending."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return dict(sorted(groups.items()))


def findings(found: Mapping[str, Sequence[Answer]]) -> list[Finding]:
    """The run's recall, all in all, by length and by residue; and what the other ways find, which must be little."""
    run = found[RUN]
    residues = {residue: share(group) for residue, group in grouped(run, lambda a: a.read % RATIO).items()}
    worst = min(residues, key=residues.__getitem__)
    missed = [f"length {a.length}, prompt of {a.read}, depth {a.depth:.2f}" for a in run if not a.right]
    told = [
        judged("recall", share(run), FOUND, questions=len(run), missed=missed[:8]),
        *(
            judged(f"recall at {length} tokens", share(group), FOUND, questions=len(group))
            for length, group in grouped(run, lambda a: a.length).items()
        ),
        judged(f"recall at the worst prompt length mod {RATIO}", residues[worst], FOUND, residue=worst),
        measured("smallest margin of a right code", min(answer.margin for answer in run), "logits"),
        _control("recall with a random selection", share(found[RANDOM]), BY_CHANCE.value),
        _control("recall with the window only", share(found[WINDOW]), BY_WINDOW.value),
    ]
    if WORDS in found:
        told += [
            judged("most common word", share(found[WORDS]), COUNTED, questions=len(found[WORDS])),
            _control(
                "most common word with the window only in HCA layers", share(found[WORDS_WINDOW]), NOT_COUNTED.value
            ),
        ]
    return told


def _control(what: str, right: float, most: float) -> Finding:
    """A way that must not find the answers: where it does, the task needs nothing that the run has more of."""
    if right <= most:
        return judged(what, right, at_most(most))
    return vacuous(what, f"{right:.0%} of the answers are right all the same, more than {most:.0%}")


def depth_map(way: str, answers: Sequence[Answer]) -> HeatMap:
    """Recall by the length of the document and by how deep in it the value stands."""
    by_length = grouped(answers, lambda a: a.length)
    values = []
    for group in by_length.values():
        cells = grouped(group, lambda a: min(int(a.depth * DEPTHS), DEPTHS - 1))
        values.append([share(cells[i]) if i in cells else None for i in range(DEPTHS)])
    return HeatMap(
        f"Codes found, {way}",
        "depth: where in the prompt the code was told",
        "tokens",
        tuple(f"{i / DEPTHS:.1f}" for i in range(DEPTHS)),
        tuple(map(str, by_length)),
        values,
        "Share of right answers. Empty: nothing was told there, codes stand at least 128 tokens before the questions.",
    )


def by_length(found: Mapping[str, Sequence[Answer]], ways: Sequence[str], title: str) -> Table:
    """Share of right answers in each way, and the run's margins."""
    rows: list[list[float | str | None]] = []
    for length, group in grouped(found[ways[0]], lambda a: a.length).items():
        shares = [share([a for a in found[way] if a.length == length]) for way in ways]
        margins = [a.margin for a in group]
        rows.append([length, len(group), *shares, min(margins), sum(margins) / len(margins)])
    columns = ("tokens", "questions", *ways, "smallest margin", "mean margin")
    return Table(title, columns, rows, f"Margins in logits, of {ways[0]}: the right token above the best wrong one.")


def by_residue(run: Sequence[Answer]) -> Table:
    """The run's recall and margins by the length of the prompt that an answer ends, mod 4 and mod 128."""
    groups = {f"{r} mod {RATIO}": group for r, group in grouped(run, lambda a: a.read % RATIO).items()}
    for part, group in grouped(run, lambda a: a.read % BLOCK // BLOCK_PART).items():
        groups[f"{part * BLOCK_PART} to {(part + 1) * BLOCK_PART - 1} mod {BLOCK}"] = group
    rows: list[list[float | str | None]] = [
        [name, len(group), share(group), min(a.margin for a in group), sum(a.margin for a in group) / len(group)]
        for name, group in groups.items()
    ]
    columns = ("prompt length", "questions", "recall", "smallest margin", "mean margin")
    return Table("By prompt length", columns, rows, "An entry closes every 4 tokens in CSA layers, every 128 in HCA.")


def report(found: Mapping[str, Sequence[Answer]]) -> Report:
    """All of it."""
    ways = (RUN, RANDOM, WINDOW)
    run = found[RUN]
    short, long = (end(answer.length for answer in run) for end in (min, max))
    span = f"{short} tokens" if short == long else f"{short} to {long} tokens"
    summary = (
        f"{share(run):.1%} of {len(run)} codes are found in documents of {span}, the smallest margin being"
        f" {min(answer.margin for answer in run):.2g} logits;"
        f" with a random selection {share(found[RANDOM]):.1%}, with the window only {share(found[WINDOW]):.1%}"
    )
    parts: list[Part] = [depth_map(way, found[way]) for way in ways]
    parts += [by_length(found, ways, "Codes by length"), by_residue(run)]
    if WORDS in found:
        summary += (
            f". The most common word is right in {share(found[WORDS]):.1%}, without HCA entries in"
            f" {share(found[WORDS_WINDOW]):.1%}"
        )
        parts.append(by_length(found, (WORDS, WORDS_WINDOW), "Most common word by length"))
    else:
        parts.append(Text("Most common word", "Not asked: the model has no HCA layer."))
    return Report(f"{summary}.", tuple(findings(found)), tuple(parts), NOT_CLAIMED)
