"""What a run of a bench was: its id, machine, versions, commit and settings, which stand before its rows as JSON.

Everything on a page, and in its tables and pictures, is of one such JSON: times of two runs, at two hours or on two
machines, say little about each other.
"""

import os
import platform
import uuid
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from fathom.model.checkpoint import strict_json
from fathom.model.errors import ConfigError
from fathom.model.files import read_bounded
from fathom.runtime.memory import machine_memory
from fathom.runtime.output import write_json
from fathom.runtime.report import commit, cpuinfo
from fathom.scripts import paths
from fathom.scripts.bench.turns import JSON

FLAGS: Final = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "bf16", "i8mm", "sve"}
)
PACKAGES: Final = ("torch", "transformers", "triton", "safetensors", "numpy")
# What decides where it is written, not what is measured.
UNTOLD: Final = ("name", "list", "command_line", "json", "out", "saved", *paths.KINDS)
MAX_SAVED_BYTES: Final = 64 << 20  # of a bench's JSON: several hundred times what a run writes


class Record:
    """One run, written to --json as it grows."""

    def __init__(self, args: Namespace) -> None:
        self.path: Path | None = args.json
        self.header: JSON = {
            "run": uuid.uuid4().hex[:12],
            "bench": args.name,
            "command": args.command_line,
            "commit": commit()._asdict(),
            "machine": machine(),
            "versions": versions(),
            "settings": settings(args),
        }

    def document(self, rows: Sequence[JSON], tables: Sequence[JSON], *, complete: bool = True) -> JSON:
        """Header, rows as `turns.run` returns them, and tables that nothing was timed for, as one JSON object."""
        return {**self.header, "complete": complete, "rows": list(rows), "tables": list(tables)}

    def write(self, document: JSON) -> None:
        """Write it to --json, where there is such a flag."""
        if self.path is not None:
            write_json(self.path, document)


def machine() -> JSON:
    """What was measured on: no name of a host or of a place."""
    found: JSON = {
        "processor": cpuinfo("model name") or platform.processor() or platform.machine(),
        "flags": sorted(FLAGS & {*cpuinfo("flags").split(), *cpuinfo("Features").split()}),
        "cores": os.cpu_count(),
        "memory_bytes": machine_memory(torch.device("cpu")),
        "huge_pages": _huge_pages(),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _huge_pages() -> str | None:
    """When the system gives transparent huge pages: always, madvise (to who asks) or never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0] if path.is_file() else None


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
    told = {name: value for name, value in vars(args).items() if name not in UNTOLD}
    return {name: paths.told(value) if isinstance(value, Path) else value for name, value in told.items()}


def saved(path: Path, bench: str) -> JSON:
    """Read what a run of a bench wrote to --json: ConfigError where it did not, or broke off before its end."""
    data = read_bounded(path, MAX_SAVED_BYTES, ConfigError)
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("bench") != bench or "rows" not in document:
        raise ConfigError(f"{path}: not what `scripts.bench {bench}` wrote")
    if not document["complete"]:
        raise ConfigError(f"{path}: the run broke off before its end")
    return document
