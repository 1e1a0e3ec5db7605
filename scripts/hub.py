"""``--model owner/name``: found in the hub's cache, or downloaded, before anything else is looked at.

On several ranks the first of each machine does it, and the others wait for the folder.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.text import Text

from fathom.model.errors import ConfigError
from fathom.scripts.console import Console
from fathom.scripts.paths import HUB_NAME, Models, Named

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch

WEIGHTS: Final = "weights"  # all shards
HEADERS: Final = "headers"  # of all shards, and no weight: `args.headers` where the cache has not all of them
INDEX: Final = "index"  # what says which shards there are; `args.hub` gets some of them later


def locate(args: argparse.Namespace, watch: "Watch | None") -> None:
    """Put the folder in place of a name on the hub, with what the command needs of it; ConfigError where there is none.

    Nothing is done where --model is a folder, or nothing that could be a name.
    """
    name = str(args.model or "")
    if HUB_NAME.fullmatch(name) is None or Path(name).is_dir():
        if args.revision is not None:
            raise ConfigError(
                f"--revision {args.revision}: of a model on the hub, and {name or 'the demo'} is a folder"
            )
        return
    if watch is None:
        args.model = _found(args, name)
    elif watch.launch.local_rank == 0:
        args.model = _found(args, name)
        watch.tell(f"model for rank {watch.launch.rank} on", str(args.model))
    else:
        args.model = Path(watch.hear(f"model for rank {watch.launch.rank - watch.launch.local_rank} on"))
    noted: list[Named] = getattr(args, Models.kind)
    setattr(args, Models.kind, [n._replace(path=args.model) if str(n.path) == name else n for n in noted])


def _found(args: argparse.Namespace, name: str) -> Path:
    from fathom.runtime import hub

    with Console(stderr=True).status(Text(f"asking for {name}"), spinner="line"):
        args.hub = hub.locate(name, args.revision)
    if args.hub_needs == WEIGHTS:
        hub.fetch(args.hub)
    elif args.hub_needs == HEADERS and not hub.is_whole(args.hub):
        args.headers = hub.headers(args.hub)
    folder: Path = args.hub.folder
    return folder
