"""What a run of a bench was: its id, machine, versions, commit and settings, which stand before its results as JSON.

Speeds measured apart, at two hours or on two machines, say little about each other: `check_one_run` refuses to put
them side by side.
"""

import os
import platform
import uuid
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from model.errors import ConfigError
from runtime.memory import machine_memory
from runtime.output import write_json
from runtime.report import commit
from scripts import paths

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve")
PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy")
# What decides where it is written, not what is measured.
UNTOLD = ("name", "command_line", "json", "page", "out", "saved", *paths.KINDS)
SAME = ("run", "commit", "machine")  # what parts of one run have in common


class Record:
    """One run, written to --json as it grows."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.path: Path | None = args.json
        self.header: dict[str, Any] = {
            "run": uuid.uuid4().hex[:12],
            "bench": args.name,
            "command": args.command_line,
            "machine": machine(),
            "versions": versions(),
            "commit": commit()._asdict(),
            "settings": settings(args),
        }

    def document(self, results: Any, *, complete: bool = True) -> dict[str, Any]:
        """Return header and results as one JSON object."""
        return {**self.header, "complete": complete, "results": results}

    def write(self, results: Any, *, complete: bool = True) -> None:
        """Write what there is so far to --json, where there is such a flag; `complete`: that it is all."""
        if self.path is not None:
            write_json(self.path, self.document(results, complete=complete))


def machine() -> dict[str, Any]:
    """What was measured on: no name of a host or of a place."""
    cpu = torch.device("cpu")
    found: dict[str, Any] = {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in (_cpuinfo("flags") or _cpuinfo("Features")).split()],
        "cores": os.cpu_count(),
        "memory_bytes": machine_memory(cpu),
        "huge_pages": _huge_pages(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _huge_pages() -> str | None:
    """When the system gives transparent huge pages: always, madvise (to who asks) or never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0] if path.is_file() else None


def _cpuinfo(field: str) -> str:
    """A field of the first processor; empty where the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that are timed; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def settings(args: Namespace) -> dict[str, Any]:
    """Every flag that decides what is measured; of a path what `paths.told` says."""
    return {
        name: paths.told(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in UNTOLD
    }


def check_one_run(documents: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Refuse to put what several runs measured side by side: ConfigError naming the first two that differ.

    Parameters
    ----------
    documents
        Where each part comes from, and the part: a JSON object with `run`, `commit` and `machine`.

    """
    (first, one), *others = documents
    for name, other in others:
        for field in SAME:
            if one.get(field) != other.get(field):
                raise ConfigError(
                    f"{name} and {first} were made apart: {field} {other.get(field)} and {one.get(field)};"
                    " times are compared within one run alone"
                )


def rendered(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the console."""
    out = Table(*heads, title=title)
    for row in rows:
        out.add_row(*row)
    return out


def markdown(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A section of a page with one table."""
    return [
        f"## {title}",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
