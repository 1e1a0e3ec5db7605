"""How much of a checkpoint's files this process has looked at, by the kernel's own count."""

import sys
from pathlib import Path
from typing import Final

SMAPS: Final = Path("/proc/self/smaps")


def touched_bytes(directory: Path) -> int | None:
    """Bytes of mapped .safetensors files of `directory` that are in this process's memory now; None but on Linux.

    Pages are counted whole, and Linux maps up to 64 KiB around a page that is read where the file is cached already:
    at both ends of each stretch of rows that a rank reads, some of its neighbours' are counted. Pages that the system
    has dropped since are not.
    """
    if sys.platform != "linux":
        return None
    total, ours = 0, False
    files = {str(path.resolve()) for path in directory.glob("*.safetensors")}
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if " " in name:  # "7f..-7f.. rw-p 00000000 fe:00 1234   /path": a mapping; else "Rss:   4 kB", of the last one
            ours = line.split(maxsplit=5)[-1] in files
        elif ours and name == "Rss":
            total += 1024 * int(value.split()[0])
    return total
