"""What `scripts.gpu` does: stages, each of commands in processes of their own, and the page of what came out."""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, NamedTuple

from fathom.model.errors import one_line
from fathom.probes.catalogue import QUICK as PROBES
from fathom.probes.finding import Part, Table, Text
from fathom.probes.report import Page, write
from fathom.runtime.report import Commit, commit
from fathom.scripts.bench import sass, turns
from fathom.scripts.bench.command import GPU_PARTS
from fathom.scripts.bench.gpu import LAYERS, READING, WHOLE
from fathom.scripts.bench.record import machine, versions
from fathom.scripts.console import Console, progress
from fathom.scripts.paths import AUDITS, CHECKOUT, ROOT

JSON = dict[str, Any]
COMPILED_BEFORE: Final = AUDITS / "gpu-compiled-before.json"  # of the kernels that were made anew since
BY_HAND: Final = AUDITS / "gpu-by-hand.json"  # what earlier runs showed
PASSED, FAILED, LATE, ABSENT = "passed", "FAILED", "OUT OF TIME", "not run"
WRONG: Final = (FAILED, LATE)
OUT_OF_TIME: Final = 124  # exit status of tests that were not all begun in time
TOLD: Final = 160  # characters of what a stage says
CHECKED: Final = 135.0  # seconds of a quick stage beside the others
TOGETHER: Final = 6  # processes that share the tests of a quick run
EVERY: Final = 23  # of that many tests a quick run has one, as each compiles kernels; a prime, unlike sides of grids
PROBING: Final = 6  # processes that share the probes of a quick run
FULL: Final = 3600.0  # of any stage of a full run
# Of kernels side by side, so that each group takes about as long: of the first run
GROUPS: Final = (
    ("norm", "quantise", "swiglu", "gate", "tripwires"), ("hyper", "streams", "compress"), ("linear", "codes"),
    ("experts", "expert_codes"), ("indexer", "topk"), ("attention",), ("shard", "differential", "banks"),
)  # fmt: skip
QUICK_LAYERS: Final = "V4-Flash"
SMALL: Final = "4"  # layers of a whole model of every kind, whose kernels are compiled beside the checks


class Stage(NamedTuple):
    """Commands, one after the other, until one fails."""

    name: str
    commands: tuple[tuple[str, ...], ...]  # a program and its arguments
    line: str  # a pattern: of all that is printed the last line with it is what the stage says
    limit: float  # seconds, of all commands
    needs: tuple[str, ...] = ()  # packages, and programs with a "$" before them
    same: bool = False  # whether all commands must print the same to stdout
    alone: bool = False  # whether it is timed: with nothing beside it
    rows: Path | None = None  # JSON of a bench, which grows


class Result(NamedTuple):
    """What came of a stage."""

    name: str
    command: str  # of them the last that ran
    status: str
    seconds: float
    told: str


# --- what is run


def stages(folder: Path, *, quick: bool) -> list[Stage]:
    """Every check and every timing; files go to `folder`."""
    limit = CHECKED if quick else FULL
    made = [*_tests(limit, quick=quick), *_texts(limit), *_recordings(folder, limit)]
    made += _probes(folder, limit, quick=quick)
    short = _scripts("generate", "--device", "cuda", "--prompt", QUESTION, "--max-new-tokens", "2")
    memcheck = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *short)
    made.append(Stage("memcheck", (memcheck,), "ERROR SUMMARY", limit, ("$compute-sanitizer",)))
    return [*made, *_benches(folder, quick=quick)]


QUESTION: Final = "What is the capital of France?"
RAW: Final = ("--raw", "--prompt", "The old farmer", "--max-new-tokens", "120", "--seed", "5")
IDS: Final = 421  # tokens of a recording, more than three windows


def _scripts(name: str, *given: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"scripts.{name}", *given


def _on_device(path: Path) -> bool:
    """Whether some of a file's tests launch kernels there."""
    text = path.read_text(encoding="utf-8")
    apart = re.search(r"(?m)^pytestmark = pytest\.mark\.interpreted", text)
    return apart is None and re.search(r"@every_backend|OP_SETS|TRITON\b", text) is not None


def _tests(limit: float, *, quick: bool) -> list[Stage]:
    """The tests of ops, where the repository has them, with launches on the device. Quick: some, in a few processes."""
    files = [path for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py")) if _on_device(path)]
    made = []
    for group in [files[first::TOGETHER] for first in range(TOGETHER)] if quick else [[path] for path in files]:
        names = [path.stem.removeprefix("test_") for path in group]
        some = ("--device", "cuda", "--seconds", f"{limit - 20:g}", "--every", str(EVERY if quick else 1))
        how = ("-m", "not slow", "-q", "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", *some, *how, *(path.relative_to(ROOT).as_posix() for path in group))
        pattern = r"\d+ (?:passed|failed|error)"
        made.append(Stage(f"tests on the device: {', '.join(names)}", (command,), pattern, limit, ("pytest",)))
    return made


def _texts(limit: float) -> list[Stage]:
    """A text decoded kernel by kernel, by a graph, and by a graph that is given drafts: to the letter the same."""
    ways = (("--no-graph",), ("--graph",), ("--graph", "--draft", "lookup"))
    made = []
    for name, temperature in (("greedy", "0"), ("sampled", "1")):
        given = (*RAW, "--temperature", temperature, "--device", "cuda")
        commands = tuple(_scripts("generate", *given, *way) for way in ways)
        made.append(Stage(f"eager, graph and drafts: {name} text", commands, r"\w", limit, same=True))
    return made


def _recordings(folder: Path, limit: float) -> list[Stage]:
    """A run as it is deployed, and a plain one in fp32 whose last tokens are decoded, under `compare`."""
    draw, tokens = random.Random(3), folder / "ids.json"  # noqa: S311 -- any tokens do
    tokens.write_text(json.dumps([0, *(draw.randrange(3, 400) for _ in range(IDS - 1))]), encoding="ascii")
    made = []
    plain = ("--numerics", "plain", "--decode-from", "400")
    for name, options, judged in (("deployed, bf16", (), ()), ("plain, fp32", ("--dtype", "fp32", *plain), plain)):
        out = str(folder / f"{name.split(',')[0]}.safetensors")
        record = _scripts("record", "--device", "cuda", *options, "--tokens", str(tokens), "--out", out)
        compare = _scripts("compare", "--recording", out, "--prefill-chunk", "512", *judged)
        made.append(Stage(f"record and compare: {name}", (record, compare), "^(AGREES|DIFFERS|NOTHING)", limit))
    return made


def _probes(folder: Path, limit: float, *, quick: bool) -> list[Stage]:
    """All of them. Quick: dealt out to a few processes."""
    names = [probe.name for probe in PROBES]
    groups = [names[first::PROBING] for first in range(PROBING)] if quick else [["all"]]
    made = []
    for group in groups:
        command = _scripts("probe", *group, "--quick", "--device", "cuda", "--out", str(folder / "pages"))
        made.append(Stage(f"probes: {', '.join(group)}", (command,), r"^\d+ of \d+ probes", limit))
    return made


def _benches(folder: Path, *, quick: bool) -> list[Stage]:
    """Kernels held against their reference and timed: alone, or in a quick run side by side; then whole layers."""

    def stage(name: str, parts: Sequence[str], replays: int, limit: float, *, alone: bool = True) -> Stage:
        rows = folder / f"{name.replace(' ', '-')}.json"
        more = ("--only", *parts, "--replays", str(replays), "--json", str(rows))
        more += ("--of", QUICK_LAYERS) if quick and LAYERS in parts else ()
        return Stage(f"bench: {name}", (_scripts("bench", "gpu", *more),), "cases|takes", limit, alone=alone, rows=rows)

    if quick:
        kernels = [stage(group[0], group, 3, CHECKED, alone=False) for group in GROUPS]
        small = _scripts("bench", "gpu", "--only", WHOLE, "--whole", SMALL, "--replays", "1")
        compiled = Stage("bench: a small whole model", (small,), "^time:", CHECKED)
        return [*kernels, compiled, stage("whole model", (WHOLE,), 10, 60.0), stage("whole layers", (LAYERS,), 3, 45.0)]
    parts = [part for part in GPU_PARTS if part not in (LAYERS, WHOLE)]
    return [*(stage(part, (part,), 20, FULL) for part in (*parts, LAYERS)), stage("whole model", (WHOLE,), 20, FULL)]


# --- how


def absent(stage: Stage) -> list[str]:
    """What it needs that this machine does not have."""
    programs = [need[1:] for need in stage.needs if need[0] == "$" and shutil.which(need[1:]) is None]
    packages = [need for need in stage.needs if need[0] != "$" and importlib.util.find_spec(need) is None]
    return [*programs, *packages]


class Running:
    """Processes that run just now, each with a session of its own: a terminal that interrupts does not tell them."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.stopped, self.lock = False, threading.Lock()

    def add(self, pid: int) -> None:
        """One that was started; it is ended if the others were."""
        with self.lock:
            self.pids.add(pid)
            if self.stopped:
                _end(pid)

    def remove(self, pid: int) -> None:
        """One that has ended."""
        with self.lock:
            self.pids.discard(pid)

    def stop(self) -> None:
        """End all of them."""
        with self.lock:
            self.stopped = True
            for pid in self.pids:
                _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(pid, signal.SIGKILL)


def ran(stage: Stage, folder: Path, running: Running) -> Result:
    """Run the commands of a stage, and end with its time whatever it has started."""
    shown = [" ".join(_told(word) for word in command) for command in stage.commands]
    if lacks := absent(stage):
        return Result(stage.name, shown[0], ABSENT, 0.0, f"no {', '.join(lacks)} here")
    began, outputs, text, status, at = time.monotonic(), [], "", PASSED, 0
    for at, command in enumerate(stage.commands):
        stem = folder / f"{re.sub('[^a-z0-9]+', '-', stage.name.lower())}.{at}"
        out, err = stem.with_suffix(f".{at}.out"), stem.with_suffix(f".{at}.err")
        code = _end_of(command, out, err, began + stage.limit - time.monotonic(), running)
        outputs.append(out.read_bytes())
        text += "".join(path.read_text(encoding="utf-8", errors="replace") for path in (err, out))
        if code != 0:
            status = LATE if code in {None, OUT_OF_TIME} else FAILED
            break
    lines = [line for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if re.search(stage.line, line)]
    said = wanted[-1] if wanted and (status == PASSED or not stage.same) else lines[-1] if lines else "printed nothing"
    if stage.same and status == PASSED:
        other = [number for number, output in enumerate(outputs) if output != outputs[0]]
        if not outputs[0].strip() or other:
            status, at = FAILED, other[0] if other else 0
        same = f"{len(outputs)} times the same {len(outputs[0].decode(errors='replace'))} characters"
        said = same if status == PASSED else "not the same text as the first command's" if other else "no text"
    elif status == PASSED and not wanted:  # a check that says nothing has not been made
        status, said = FAILED, f"ended well, and did not say what it found: {said}"
    return Result(stage.name, shown[at], status, time.monotonic() - began, one_line(said.strip())[:TOLD])


def _end_of(command: Sequence[str], out: Path, err: Path, limit: float, running: Running) -> int | None:
    """The exit status of a command with its output in files; None: it was ended with all that it had started."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(  # noqa: S603
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment,
            start_new_session=True,
        )  # fmt: skip
        running.add(process.pid)
        try:
            return process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process.pid)
                process.wait()
            running.remove(process.pid)


def _told(word: str) -> str:
    """A word of a command as the page has it: no folder of this machine."""
    path = Path(word)
    return shlex.quote("python" if word == sys.executable else path.name if path.is_absolute() else word)


def run_stages(made: Sequence[Stage], folder: Path, console: Console, jobs: int) -> list[Result]:
    """Checks side by side, up to so many at once; then what is timed, one after the other. Results in their order."""
    found: dict[str, Result] = {}
    running = Running()
    with progress(console, len(made), "stages") as advance, ThreadPoolExecutor(jobs) as pool:

        def keep(result: Result) -> None:
            found[result.name] = result
            console.say(f"{result.status:12}{result.seconds:6.0f} s  {result.name}: {result.told}")
            advance(1)

        try:
            for done in as_completed([pool.submit(ran, stage, folder, running) for stage in made if not stage.alone]):
                keep(done.result())
            for stage in made:
                if stage.alone:
                    keep(ran(stage, folder, running))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running.stop()
            raise
    return [found[stage.name] for stage in made]


def run(args: argparse.Namespace) -> int:
    """Run all of it, or with --page nothing; write the page; returns the exit status."""
    kept = args.out / "gpu.json"
    if args.page:
        document = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else None
        args.out.mkdir(parents=True, exist_ok=True)
        write(page(document), args.out)
        print(f"wrote {args.out / 'gpu.md'}", file=sys.stderr)
        return 0
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = stages(folder, quick=args.quick)
        results = run_stages(made, folder, console, len(made) if args.quick else os.cpu_count() or 1)
        document = {
            "command": f"python -m scripts.gpu{' --quick' if args.quick else ''}",
            "commit": commit()._asdict(), "machine": machine(), "versions": versions(), "quick": args.quick,
            "stages": [result._asdict() for result in results], "rows": rows_of(made),
        }  # fmt: skip
        if args.logs is not None:
            shutil.make_archive(str(args.logs.with_suffix("")), "zip", folder)
    args.out.mkdir(parents=True, exist_ok=True)
    write(page(document), args.out)
    console.say(f"{_verdict(document)}; wrote {args.out / 'gpu.md'}")
    return int(any(result.status in WRONG for result in results))


def rows_of(made: Iterable[Stage]) -> list[JSON]:
    """Rows of all benches, also of one that was ended before its last."""
    written = [stage.rows for stage in made if stage.rows is not None and stage.rows.is_file()]
    return [row for path in written for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


# --- the page


def page(document: JSON | None) -> Page:
    """Right or not, then how fast; behind it, or without a run that was kept, what earlier ones showed."""
    measured = _first_commit() if document is None else document["commit"]["hash"]
    since = newer(measured)
    parts = [*([] if document is None else _found(document)), since, *_by_hand(), *_compiled()]
    if document is None:
        facts: JSON = {"command": "python -m scripts.gpu --page", "commit": str(commit()), "versions": versions()}
    else:
        facts = {name: document[name] for name in ("command", "machine", "versions")}
        facts["commit"] = str(Commit(**document["commit"]))
    told = [
        since.note if isinstance(since, Table) else since.text,
        QUICK if document is not None and document["quick"] else "",
    ]
    return Page("gpu", "Fathom on a GPU", _verdict(document), " ".join(filter(None, told)), parts, facts, document)


QUICK: Final = (
    "A quick run: kernels were timed beside other stages, which makes them slower, long ones by twice and more; whole"
    " layers and tokens were timed alone."
)
NOTHING: Final = "Of this code NOTHING was measured on a GPU"


def _verdict(document: JSON | None) -> str:
    if document is None:
        return NOTHING
    found = document["stages"]
    wrong = [f"{stage['name']} ({stage['status']})" for stage in found if stage["status"] in WRONG]
    none = [stage["name"] for stage in found if stage["status"] == ABSENT]
    passed = sum(stage["status"] == PASSED for stage in found)
    told = [f"{passed} of {len(found)} checks passed on one {document['machine']['gpu']}"]
    told += [f"NOT: {', '.join(wrong)}"] if wrong else []
    return "; ".join([*told, *([f"not run: {', '.join(none)}"] if none else [])])


def _found(document: JSON) -> list[Part]:
    checks = [
        [stage["name"], f"`{stage['command']}`", f"{stage['status']}: {stage['told']}", f"{stage['seconds']:.0f}"]
        for stage in document["stages"]
    ]
    made: list[Part] = [Table("Right or not", ("check", "command", "result", "s"), checks)]
    columns = ("part", "case", "now, us", f"{READING}, us", "floor, us", "now / read", "now / floor")
    kernels: list[list[str]] = []
    whole: list[list[str]] = []
    for row in document["rows"]:
        there = (turns.values(row, side, "us") if side in row["sides"] else [] for side in ("triton", READING, "floor"))
        now, read, floor = (turns.Spread.of(times).median if times else None for times in there)
        ratios = [None if now is None or not other else now / other for other in (read, floor)]
        cells = ["" if value is None else turns.short(value) for value in (now, read, floor, *ratios)]
        if now is None:
            cells[0] = "differs" if turns.differs(row) else "not timed"
        (whole if row["table"].startswith("whole") else kernels).append([row["table"], row["case"], *cells])
    if kernels:
        made.append(Table("Kernels", columns, kernels, READS))
    if whole:
        made.append(Table("Whole layers, tokens and calls of a prompt", columns, whole))
    return made


READS: Final = (
    "A launch that only reads as many bytes is what one launch can reach. A floor is bytes or FLOPs at the device's"
    " rate, which no launch reaches."
)


def _by_hand() -> list[Part]:
    """What earlier runs on a GPU showed, written down by hand; an installed package has no such record."""
    told = json.loads(BY_HAND.read_text(encoding="utf-8")) if CHECKOUT else []
    return [Table(table["title"], tuple(table["columns"]), table["rows"], table["note"]) for table in told]


def _first_commit() -> str | None:
    """The commit that the notes of the first run name."""
    found = re.search(r"at commit ([0-9a-f]{12})", BY_HAND.read_text(encoding="utf-8")) if CHECKOUT else None
    return found[1] if found else None


def newer(measured: str | None, root: Path = ROOT) -> Table | Text:
    """Files of Triton, of kernels or how they are cut up, that are others than at the commit that was measured."""
    title, git = "Kernels that are newer than what was measured", shutil.which("git")

    def told(*words: str) -> list[str] | None:
        if git is None:
            return None
        done = subprocess.run([git, *words], cwd=root, check=False, capture_output=True, text=True)  # noqa: S603
        return done.stdout.splitlines() if done.returncode in (0, 1) and not done.stderr else None

    kernels = told("grep", "-l", "--untracked", "-e", "@triton.jit", "-e", "^import triton", "--", "kernels")
    changed = None if measured is None else told("diff", "--numstat", "--no-renames", measured, "--", "kernels")
    if kernels is None or changed is None:
        return Text(title, "Which these are git cannot tell here: take every number above for one of older kernels.")
    rows = []
    for added, removed, name in (line.split("\t") for line in changed):
        if name in kernels:
            since = told("rev-list", "--count", f"{measured}..HEAD", "--", name)
            rows.append([f"`{name}`", "" if since is None else since[0], added, removed])
    if not rows:
        return Text(title, f"None of the {len(kernels)} files of kernels: they are as they were at {measured:.12}.")
    note = (
        f"{len(rows)} of {len(kernels)} files of kernels are newer than what was measured, at commit {measured:.12},"
        " which says nothing of them."
    )
    return Table(title, ("file", "commits since", "lines added", "removed"), rows, note)


def _compiled() -> list[Part]:
    """What the machine code of the hot kernels says, by the oldest Triton that was recorded: GPU machines bring it."""
    if not CHECKOUT:
        return []
    recorded = json.loads(sass.RECORDED.read_text(encoding="utf-8"))
    version = min(recorded, key=lambda text: [int(part) for part in text.split(".")])
    made: list[Part] = [
        Table(f"Compiled by Triton {version} for {gpu}", tuple(sass.HEADS), sass.rows(figures), "")
        for gpu, figures in recorded[version].items()
    ]
    before = json.loads(COMPILED_BEFORE.read_text(encoding="utf-8"))
    made += [
        Table(
            f"Before, at commit {before['commit']}: by Triton {before['triton']} for {gpu}", tuple(sass.HEADS), rows, ""
        )
        for gpu, rows in ((gpu, sass.rows(figures)) for gpu, figures in before["found"].items())
    ]
    return [*made, Text("What is counted", COMPILED)]


COMPILED: Final = """Instructions of a thread for each weight, or each number of a key, that a loop reads: that with
most products of tensor cores, else the longest; "in all" where a kernel has none. With what stands in it: loads (how
many, of how many bytes each), products, waits for them or for copies. A stack is of registers that were spilled. Few
instructions are no proof of speed, which only a device can show. `tests/kernels/test_hot_kernels.py` compiles these
kernels and holds them against this record, which `python -m tests.kernels.hot_kernels` writes. What was before was
counted in the same way."""
