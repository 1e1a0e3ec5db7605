"""Measured runs as processes of their own, one at a time: how they are started, and what is watched from outside."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import ConfigError
from scripts.bench.child import memory
from scripts.paths import ROOT

THP = "THP_MEM_ALLOC_ENABLE"  # torch's allocator asks for huge pages
SAMPLED_S = 0.02  # how often memory that no file backs is looked at: the system keeps no peak of it
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Spec(NamedTuple):
    """One run."""

    side: str  # "ours" | "theirs"
    model: str  # absolute path of the checkpoint
    context: int  # tokens of the prompt
    chunk: int  # tokens of a call
    decode: int  # tokens after it, one by one
    threads: int
    seed: int  # of the tokens
    logits: str  # file that takes the logits after the prompt and after each decoded token
    components: bool = False  # of our side: time by op
    thp: bool = False
    dtype: str = "bf16"  # of transformers: bf16 | fp32


def warm(folder: Path) -> int:
    """Read every file of a checkpoint, so that the page cache holds them; returns their bytes."""
    total, buffer = 0, bytearray(1 << 24)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def measured(spec: Spec) -> dict[str, Any]:
    """Run it, from files in the page cache, and return what it found and its settings.

    ConfigError with its line where it refuses the checkpoint; RuntimeError with what it said where it ends otherwise,
    also when the system kills it.
    """
    warm(Path(spec.model))
    command = [sys.executable, "-m", "scripts.bench.child", json.dumps(spec._asdict())]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, cwd=ROOT, env=_environment(spec), stdout=out, stderr=err, text=True)  # noqa: S603
        try:
            peak = _watched(child)
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        err.seek(0)
        said, complaint = out.read(), err.read()
    if child.returncode == 2:
        raise ConfigError(f"{spec.side}: {complaint.strip()}")
    if child.returncode:
        raise RuntimeError(f"{spec.side}, {spec.context} tokens: ended with {child.returncode}: {complaint[-2000:]}")
    asked = {name: value for name, value in spec._asdict().items() if name not in {"model", "logits"}}
    return {**asked, **json.loads(said.splitlines()[-1]), "sampled_peak_anon": peak}


def _environment(spec: Spec) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != THP}
    return kept | dict.fromkeys(THREADS, str(spec.threads)) | ({THP: "1"} if spec.thp else {})


def _watched(child: subprocess.Popen[str]) -> int:
    """Wait for the end; returns the most bytes that no file backs (RssAnon + RssShmem), as often as was looked."""
    peak = 0
    while child.poll() is None:
        try:
            held = memory(str(child.pid))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        peak = max(peak, held.get("RssAnon", 0) + held.get("RssShmem", 0))
        time.sleep(SAMPLED_S)
    return peak
