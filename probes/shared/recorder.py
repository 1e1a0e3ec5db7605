"""`Recorder`: keeps what passes chosen sites in a run, as an oracle needs it: on the CPU, rows joined over calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fathom.model.observe.sites import Listener, Site


class Recorder:
    """Listeners that keep clones of what passes.

    Of sites with a row per token (their shape begins with ``t``) the rows of `positions` are kept, all where it is
    None; of others (``n``: rows that a call brought forth) all. Positions are counted from the first call heard: attach
    before a new sequence begins.
    """

    def __init__(self, sites: Sequence[Site], positions: Sequence[int] | None = None) -> None:
        self._sites = tuple(sites)
        self._positions = None if positions is None else torch.tensor(sorted(set(positions)))
        self._kept: dict[tuple[str, int | None], list[Tensor]] = {}
        self._seen: dict[tuple[str, int | None], int] = {}

    def listeners(self) -> dict[Site, Listener]:
        """What `Observer.attached` takes."""
        return {site: self._listener(site) for site in self._sites}

    def rows(self, site: Site, layer: int | None) -> Tensor:
        """Rows kept, in order of position; narrower ones (selections of early calls) are filled up with -1."""
        parts = self._kept[site.name, layer]
        if site.shape.split()[1] == "n":
            width = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
        return torch.cat(parts)

    def joined(self) -> dict[tuple[str, int], Tensor]:
        """All rows that were kept of sites of layers, by the site's name and the layer."""
        return {(name, layer): torch.cat(parts) for (name, layer), parts in self._kept.items() if layer is not None}

    def _listener(self, site: Site) -> Listener:
        per_token = site.shape.split()[0] == "t"

        def listen(layer: int | None, tensor: Tensor) -> None:
            key = site.name, layer
            if per_token and self._positions is not None:
                first = self._seen.get(key, 0)
                self._seen[key] = first + tensor.shape[0]
                inside = (self._positions >= first) & (self._positions < self._seen[key])
                tensor = tensor[(self._positions[inside] - first).to(tensor.device)]
            self._kept.setdefault(key, []).append(tensor.detach().cpu().clone())

        return listen
