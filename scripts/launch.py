"""What a launcher such as torchrun says of this process, and nothing else reads it: the environment."""

import os
from collections.abc import Mapping

from fathom.model.errors import ConfigError
from fathom.runtime.group.store import Launch

# Set by every launcher for each process it starts, and by nobody else. (MASTER_ADDR and MASTER_PORT are also found in
# environments in which nothing was launched.)
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
PORTS = 65535


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return this process's place among those that a launcher started; None when no launcher did.

    A launch is told by any of RANK, WORLD_SIZE and LOCAL_RANK; then all of them, MASTER_ADDR and MASTER_PORT must be
    there: ConfigError naming what is not, or makes no sense. WORLD_SIZE=1 is a launch of one process, which runs alone.
    """
    if not any(name in environment for name in PLACE):
        return None
    if missing := [name for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        raise ConfigError(f"environment: {', '.join(missing)} not set, while others of a launcher are (see torchrun)")
    size = _whole(environment, "WORLD_SIZE", 1, None)
    return Launch(
        rank=_whole(environment, "RANK", 0, size - 1),
        size=size,
        local_rank=_whole(environment, "LOCAL_RANK", 0, size - 1),
        address=environment["MASTER_ADDR"],
        port=_whole(environment, "MASTER_PORT", 1, PORTS),
        kept_by_launcher=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_whole({"TORCHELASTIC_RESTART_COUNT": "0", **environment}, "TORCHELASTIC_RESTART_COUNT", 0, None),
    )


def _whole(environment: Mapping[str, str], name: str, low: int, high: int | None) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and int(text) >= low and (high is None or int(text) <= high)):
        raise ConfigError(f"environment: {name}={text[:40]!a}: want {low} to {'any number' if high is None else high}")
    return int(text)
