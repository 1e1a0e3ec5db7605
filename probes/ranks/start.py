"""Starting the ranks of a group as processes of this machine, and collecting what each found."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from probes.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0  # seconds for the whole of it
GRACE = 5.0  # seconds that the others have once one has ended early


def answers(subject: Subject, size: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Run `tokens` on `size` ranks; what each of them answered, see `probes.ranks.one`.

    A rank that ended without an answer, because another had ended, has an empty one.
    """
    request = asked(subject, tokens) | {"size": size}
    with tempfile.TemporaryDirectory() as folder:
        request["store"] = str(Path(folder) / "store")
        outputs = [Path(folder) / f"{rank}.json" for rank in range(size)]
        children = [_start(request | {"rank": rank}, output) for rank, output in enumerate(outputs)]
        try:
            _wait(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        found = [json.loads(text) if (text := output.read_text()) else {} for output in outputs]
        if not any(found):
            errors = [output.with_suffix(".err").read_text().strip().rpartition("\n")[2] for output in outputs]
            raise RuntimeError(f"no rank of probes.ranks.one answered: {'; '.join(errors)}")
    return found


def asked(subject: Subject, tokens: list[int]) -> dict[str, Any]:
    """What every rank is asked, as JSON."""
    return {
        "directory": str(subject.directory.resolve()),
        "options": subject.options.to_json(),
        "ops": subject.ops.name,
        "fault": subject.fault and subject.fault.name,
        "seed": subject.seed,
        "tokens": tokens,
    }


def _start(request: dict[str, Any], output: Path) -> subprocess.Popen[str]:
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "probes.ranks.one"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            text=True,
            cwd=ROOT,
        )
    assert child.stdin is not None
    json.dump(request, child.stdin)
    child.stdin.close()
    return child


def _wait(children: list["subprocess.Popen[str]"]) -> None:
    """Return when all have ended, or some time after the first that failed."""
    deadline = time.monotonic() + LIMIT
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() not in (None, 0) for child in children):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.05)
