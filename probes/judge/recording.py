"""A recording: tensors by site, of a prompt from position 0, made by any runtime.

`tokens` [t] int64, and any of `layers.{l}.{site}` and `{site}` (`model.observe.sites` has their names and shapes), in
any float dtype. Where rows of some positions only were kept, `positions` [n] int64 says which, or of one layer
`layers.{l}.positions`. A run of V4.1 whose late layers were given the end of the prompt alone (bounded replay) says
from which position on in `replay_start`, and in which layer that begins in `replay_layer`. It may also be a dump of
a runtime under its own names, see `probes.judge.dump` and `probes.judge.naming`.

Dumps are messy. A tensor may have a batch axis of one in front, its axes in another order, or heads and streams run
together: where its sizes can be read in one way only, it is read so, and `told` says it. Whatever can be read in no way
or in several is refused in one line.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.checkpoint import TORCH_DTYPES
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, quoted
from fathom.model.files import read_bounded
from fathom.model.observe import sites
from fathom.model.observe.sites import OF_V41, SITES, STEPS, Site, axes
from fathom.probes.judge.dump import Dump, open_dump
from fathom.probes.judge.naming import LAST, NO_SITE, POSITIONS, TOKENS, Line, Made, named
from fathom.probes.judge.oracle import LOGPROB_IDS, LOGPROBS, Replay, has

PAGE: Final = "scripts/exporters/README.md"
# One expert's rows come in the order of experts, not of tokens.
KEPT: Final = tuple(site for site in SITES if site not in (sites.ROUTED_GATE, sites.ROUTED_UP))


def kept_of(config: ModelConfig) -> tuple[Site, ...]:
    """Sites that a run of a model keeps, unless told."""
    return KEPT if config.v41 is None else (*KEPT, *OF_V41)


BEHIND: Final = {step.name: site.name for step, site in STEPS.items()}
OF_ENTRIES: Final = (
    *(site.name for site in (sites.ENTRY, sites.INDEX_KEY, sites.INDEX_KEY_USED)),
    *(step.name for step in STEPS if step.name.startswith(("attention.entry", "indexer.key"))),
)
# What serving engines return of a prompt: no site of a model, and no hook is needed.
RETURNED: Final = Site(LOGPROBS, "t n", "log-probabilities (natural) that some ids come next, at each position")
RETURNED_IDS: Final = Site(LOGPROB_IDS, "t n", "the ids that these are of, in any order")
WHOLE_MODEL: Final = (sites.EMBEDDED.name, sites.FOLDED.name, sites.HIDDEN.name, sites.LOGITS.name, LOGPROBS)
CHOICES: Final = (sites.SELECTED.name, sites.CANDIDATES.name, sites.EXPERT_IDS.name)
IN_FP32: Final = (".pre", ".post", ".comb", sites.ENGRAM_GATE.name)  # how sites end that are fp32 in runs of any dtype
SAYS_NOTHING: Final = (  # of the run's dtype
    *CHOICES,
    sites.EMBEDDED.name,
    sites.LOGITS.name,
    LOGPROBS,
    LOGPROB_IDS,
    sites.KV.name,
    sites.ENTRY.name,
)
FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE_NUMBERS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8, *FLOATS)  # some dump ids as floats
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SAMPLED: Final = 1 << 20  # numbers of a tensor that are looked at to find the dtype of the run
REPLAY_START, REPLAY_LAYER = "replay_start", "replay_layer"
MAP_BYTES: Final = 16 << 20
MOST_AXES: Final = 5  # of a tensor that is understood

SPELLED: Final = {"attention.latent_entry": "attention.entry_unrotated"}  # other names of sites

_BY_NAME: Final = {site.name: site for site in (*KEPT, *STEPS, *OF_V41, RETURNED, RETURNED_IDS)}


class _Tensor(NamedTuple):
    """A stored tensor and how it becomes its site's: drop `leading` axes of one, permute, then view."""

    stored: str
    leading: int
    order: tuple[int, ...]
    shape: tuple[int, ...]


class Recording:
    """An opened recording; `rows` gives what was recorded.

    Parameters
    ----------
    dump
        The file or folder, or what was opened of it.
    config
        Of the model that it is a run of.
    names
        Their name -> the site's name, for a file that calls tensors otherwise.
    tokens
        The prompt, [t] int64, for a dump that lacks it.

    Raises
    ------
    ConfigError, CheckpointError
        With one line naming the file, and the tensor where one is at fault.

    """

    def __init__(
        self,
        dump: Path | Dump,
        config: ModelConfig,
        names: Mapping[str, str] | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        dump = open_dump(dump) if isinstance(dump, Path) else dump
        self.path, self.config, self.names = dump.path, config, dict(names or {})
        self._told: dict[str, list[str]] = {}  # how it was read -> names
        self.calls: tuple[int, ...] = ()  # tokens of each call, where the dump says it
        self.lines: list[Line] = []  # what became of each tensor
        self._held = {made.told: made for made in self._found(dump, tokens)}
        self.tokens = self._tokens(tokens)
        self._check_images()
        self.positions = self._positions(POSITIONS)
        self.of_layers = dict(self._positions_of_layers())  # those of layers that have their own
        self.replay = self._replay()
        self.tensors: dict[str, _Tensor] = {}
        for stored in self._held:
            self._take(stored)
        if unknown := [name for name in self.names if name not in self._held]:
            raise ConfigError(f"{self.path}: has no tensor {quoted(unknown[0])}, which --map names")
        self._check_logprobs()
        if not self.tensors:
            some = "; ".join(f"{quoted(line.theirs)}: {line.why}" for line in self.lines[:3] if not line.site)
            raise ConfigError(
                f"{self.path}: no site among its tensors ({some or TOKENS}); {PAGE} lists them, --map renames"
            )

    def _found(self, dump: Dump, tokens: Tensor | None) -> Iterator[Made]:
        """The tensors of a dump: under our names as they are, or as tables say."""
        own = not dump.tables and any(_site(piece.name)[0] is not None for piece in dump.pieces)
        seen = set[str]()
        for piece in dump.pieces:
            if own or piece.name in self.names or (not dump.tables and piece.name in (TOKENS, POSITIONS)):
                if piece.name in seen:
                    raise ConfigError(f"{self.path}: two tensors are called {quoted(piece.name)}")
                seen.add(piece.name)
                yield Made("", piece.name, piece.outline, piece.read)
        if own:
            return
        there = named(dump, self.config, tokens, {*seen, *self.names})
        self.calls = there.calls
        self.lines += there.lines
        for told in (*([f"as {dump.form}"] if dump.form else []), *there.told):
            self._told[told] = []
        for site, made in there.tensors.items():
            if site not in seen:
                yield made

    @property
    def others(self) -> list[str]:
        """Tensors that are no site, by their names."""
        return [line.theirs for line in self.lines if not line.site]

    @property
    def told(self) -> list[str]:
        """How tensors were read that were not as their sites say, those read alike in one line."""
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {how}" if names else how
            for how, names in self._told.items()
        ]

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """Rows of a tensor at positions (or of entries), float64; None where not all of them were recorded.

        Parameters
        ----------
        name
            ``layers.{l}.{site}`` or ``{site}``.
        at
            [n] int64; None for all that there are.

        """
        if name not in self.tensors:
            return None
        data = self._read(self.tensors[name])
        if at is None:
            return data.to(torch.float64)
        own = self.at(name)
        place = torch.searchsorted(own, at).clamp(max=len(own) - 1)
        return data[place].to(torch.float64) if torch.equal(own[place], at) else None

    def known(self, name: str, at: Tensor) -> Tensor:
        """Rows that it has at these positions (or of these entries), as `rows`."""
        found = self.rows(name, at)
        assert found is not None, f"rows of {name} that {self.path} has"
        return found

    def at(self, name: str) -> Tensor:
        """Positions (or entries) of a tensor's rows."""
        count = self.tensors[name].shape[0]
        if name.endswith(OF_ENTRIES) or count == len(self.tokens):
            return torch.arange(count)
        positions = self.positions_of(_site(name)[1])
        if positions is not None and count == len(positions):
            return positions
        return torch.tensor([len(self.tokens) - 1])

    def positions_of(self, layer: int | None) -> Tensor | None:
        """Positions whose rows were kept of a layer, or of what is of none; None: all."""
        return self.positions if layer is None else self.of_layers.get(layer, self.positions)

    def run_dtype(self) -> torch.dtype | None:
        """The narrowest dtype that holds more than half of the activations: that of the run, however it was dumped.

        None where nothing is recorded that shows it: some sites are fp32 in runs of any dtype, some narrower.
        """
        held = {torch.bfloat16: 0, torch.float16: 0}
        looked = 0
        for name, tensor in self.tensors.items():
            if name.endswith((*IN_FP32, ".weights", "_used", *SAYS_NOTHING)):
                continue
            data = self._read(tensor).flatten()
            some = data[:: max(1, data.numel() // SAMPLED)].to(torch.float32)
            some = some[some.isfinite()]
            looked += 1
            for dtype in held:
                held[dtype] += bool((some.to(dtype).float() == some).all())
        if not looked:
            return None
        return next((dtype for dtype, count in held.items() if 2 * count > looked), torch.float32)

    # --- reading the file

    def _read(self, tensor: _Tensor) -> Tensor:
        data = self._held[tensor.stored].read()
        return data.reshape(data.shape[tensor.leading :]).permute(tensor.order).reshape(tensor.shape)

    def _tokens(self, given: Tensor | None) -> Tensor:
        """The prompt; ConfigError where it is not known, or not the one that was given."""
        if self._stored(TOKENS) not in self._held and given is not None:
            return given
        tokens = self._numbers(TOKENS, self.config.vocab_size)
        if given is not None and not torch.equal(tokens, given):
            both = min(len(tokens), len(given))
            first = int((torch.cat((tokens[:both] != given[:both], torch.ones(1, dtype=torch.bool)))).nonzero()[0])
            where = f"the first other one is at position {first}"
            raise ConfigError(f"{self.path}: its {len(tokens)} tokens are not the {len(given)} of --tokens: {where}")
        return tokens

    def _check_images(self) -> None:
        """Refuse a prompt with an image, whose experts are chosen otherwise: ConfigError."""
        if self.config.v41 is None:
            return
        image = self.config.v41.image_token_id
        at = (self.tokens == image).nonzero()
        if len(at):
            raise ConfigError(
                f"{self.path}: {TOKENS}[{int(at[0])}] is {image}, a part of an image; prompts of text alone are judged"
            )

    def _numbers(self, name: str, below: int) -> Tensor:
        """A list of whole numbers from 0 on."""
        if self._stored(name) not in self._held:
            raise ConfigError(f"{self.path}: has no tensor {name}, [t] int64; --tokens can give it")
        data = self._held[self._stored(name)].read()
        data = data[0] if data.ndim == 2 and data.shape[0] == 1 else data
        if data.dtype not in (torch.int64, torch.int32) or data.ndim != 1 or not len(data):
            raise ConfigError(f"{self.path}: {name} is {list(data.shape)} {data.dtype}, want [n] int64")
        data = data.long()
        if int(data.min()) < 0 or int(data.max()) >= below:
            wrong = int(((data < 0) | (data >= below)).nonzero()[0])
            raise ConfigError(f"{self.path}: {name}[{wrong}] is {int(data[wrong])}, want 0 to {below - 1}")
        return data

    def _stored(self, name: str) -> str:
        """What the file calls the tokens, or the positions."""
        mapped = (stored for stored, site in self.names.items() if site == name)
        return next(mapped, next((stored for stored, made in self._held.items() if made.site == name), name))

    def _positions_of_layers(self) -> Iterator[tuple[int, Tensor | None]]:
        for layer in range(self.config.num_hidden_layers):
            if self._stored(name := stored_name(POSITIONS, layer)) in self._held:
                yield layer, self._positions(name)

    def _replay(self) -> Replay | None:
        """Where a bounded replay begins, of a run of V4.1."""
        if self._stored(REPLAY_START) not in self._held:
            return None
        if self.config.v41 is None:
            raise ConfigError(
                f"{self.path}: has {REPLAY_START}, and no layer of a V4 is given the end of a prompt alone"
            )
        start = self._numbers(REPLAY_START, len(self.tokens))
        layer = torch.tensor([self.config.v41.kv_sources[-1] + 1])  # as vLLM does
        if self._stored(REPLAY_LAYER) in self._held:
            layer = self._numbers(REPLAY_LAYER, self.config.num_hidden_layers)
        if len(start) != 1 or len(layer) != 1:
            raise ConfigError(f"{self.path}: {REPLAY_START} and {REPLAY_LAYER} are one number each")
        replay = Replay(int(start[0]), int(layer[0]))
        self._told[
            f"from layer {replay.layer} on, nothing before position {replay.start} is seen in a window ({REPLAY_START})"
        ] = []
        return replay

    def _positions(self, name: str) -> Tensor | None:
        if self._stored(name) not in self._held:
            return None
        positions = self._numbers(name, len(self.tokens))
        if torch.equal(positions, torch.arange(len(self.tokens))):
            return None  # all of them
        if len(positions) > 1 and bool((positions[1:] <= positions[:-1]).any()):
            raise ConfigError(f"{self.path}: {name} do not ascend")
        return positions

    def _check_logprobs(self) -> None:
        """Refuse log-probabilities without the ids that they are of, or of ids that are none: ConfigError."""
        there = [name for name in (LOGPROBS, LOGPROB_IDS) if name in self.tensors]
        if len(there) == 1:
            missing = LOGPROBS if there == [LOGPROB_IDS] else LOGPROB_IDS
            raise ConfigError(f"{self.path}: has {there[0]} without {missing}, which is of the same shape")
        if not there:
            return
        values, ids = (self.tensors[name].shape for name in (LOGPROBS, LOGPROB_IDS))
        if values != ids:
            raise ConfigError(f"{self.path}: {LOGPROBS} is {list(values)} and {LOGPROB_IDS} is {list(ids)}")
        given = self._read(self.tensors[LOGPROB_IDS]).double()
        wrong = ~((given >= 0) & (given < self.config.vocab_size) & (given == given.floor()))
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ConfigError(
                f"{self.path}: {LOGPROB_IDS}[{row}, {column}] is {float(given[row, column]):g}, want 0 to"
                f" {self.config.vocab_size - 1}"
            )

    def _take(self, stored: str) -> None:
        """Understand one tensor of the file, or note that it is none of ours."""
        name = self.names.get(stored, self._held[stored].site or stored)
        if name in (TOKENS, POSITIONS, REPLAY_START, REPLAY_LAYER) or _of_positions(name, self.config):
            return
        shape = tuple(self._held[stored].outline.shape)
        site, layer = _site(name)
        if site is None or (site in OF_V41 and self.config.v41 is None):
            if stored in self.names:
                raise ConfigError(f"{self.path}: --map {quoted(stored)}: {quoted(name)} is no site; {PAGE} lists them")
            self.lines.append(Line(stored, shape, "", NO_SITE))
            return
        if layer is not None and layer >= self.config.num_hidden_layers:
            why = f"layer {layer} is beyond the model's {self.config.num_hidden_layers}"  # a draft head's, for one
            self.lines.append(Line(stored, shape, "", why))
            return
        if layer is not None and not has(self.config, layer, site.name):
            raise ConfigError(f"{self.path}: {quoted(stored)}: {self._without(layer, site.name)}")
        name = stored_name(site.name, layer)
        if name in self.tensors:
            raise ConfigError(f"{self.path}: {quoted(stored)} and {quoted(self.tensors[name].stored)} are both {name}")
        made = bool(self._held[stored].site)
        try:
            self.tensors[name] = self._understood(stored, name, site, layer)
        except ConfigError as error:
            if not made:
                raise
            self.lines = [line for line in self.lines if line.site != name]
            self.lines.append(Line(stored, shape, "", str(error).partition(f"{quoted(stored)} is ")[2]))
        else:
            self.lines += [] if made else [Line(stored, shape, name, "")]

    def _without(self, layer: int, name: str) -> str:
        """That a layer does not have a site, and why."""
        if self.config.v41 is not None and self.config.ratio(layer):
            return f"layer {layer} has no {name} of its own"
        return f"layer {layer} is {self.config.layer_kind(layer).name}, which has no {name}"

    def _understood(self, stored: str, name: str, site: Site, layer: int | None) -> _Tensor:
        """How the stored shape becomes the site's."""
        found = self._held[stored].outline
        if found.dtype not in (WHOLE_NUMBERS if site.name in (*CHOICES, LOGPROB_IDS) else FLOATS):
            dtype = DTYPE_NAMES.get(found.dtype, found.dtype)
            raise ConfigError(f"{self.path}: {quoted(stored)} is {dtype}, want a float dtype")
        leading, shape = 0, tuple(found.shape)
        wanted = self._wanted(site, layer, shape)
        readings = {reading for want in wanted for reading in _readings(shape, want)}
        while not readings and len(shape) > 1 and shape[0] == 1:
            shape, leading = shape[1:], leading + 1
            readings = {reading for want in wanted for reading in _readings(shape, want)}
        straight = {reading for reading in readings if reading[0] == tuple(range(len(shape)))}
        readings = straight or readings
        if len(readings) != 1:
            names = " ".join(site.shape.split())
            ways = "in no way" if not readings else f"in {len(readings)} ways"
            sizes = " or ".join(str(list(want)) for want in wanted)
            tokens = f"{len(self.tokens)} tokens"
            raise ConfigError(
                f"{self.path}: {quoted(stored)} is {list(found.shape)}: {ways} [{names}] = {sizes} of {tokens}"
            )
        order, view = readings.pop()
        if order != tuple(range(len(shape))):
            self._told.setdefault(f"read with its axes in the order {list(order)}", []).append(
                f"{name} {list(found.shape)}"
            )
        elif (
            view[0] == 1
            and len(self.tokens) > 1
            and site.name in LAST
            and ((positions := self.positions_of(layer)) is None or len(positions) > 1)
        ):
            self._told.setdefault("read as the last token's row", []).append(f"{name} {list(found.shape)}")
        elif leading:
            self._told.setdefault("read without its batch axis", []).append(f"{name} {list(found.shape)}")
        return _Tensor(stored, leading, order, view)

    def _wanted(self, site: Site, layer: int | None, found: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that a tensor of a site may have, its axes apart: for all tokens, or for the positions."""
        known, free = axes(self.config), math.prod(found)
        ratio = 0 if layer is None else self.config.ratio(layer)
        known["keys"] = len(self.tokens) + (len(self.tokens) // ratio if ratio else 0)
        rows = [len(self.tokens)]
        if site.name in OF_ENTRIES:
            assert layer is not None, f"{site.name} of no layer"
            rows = [len(self.tokens) // self.config.ratio(layer)]
        else:
            positions = self.positions_of(layer)
            rows += [len(positions)] if positions is not None else []
            rows += [1] if site.name in LAST else []
        first, *rest = site.shape.split()
        assert first in ("t", "n"), site.shape
        shapes = []
        for count in rows:
            widest = free // max(count, 1)  # of a selection: whatever it has
            shapes.append((count, *(known.get(axis, widest) for axis in rest)))
        return shapes


def read_map(path: Path) -> dict[str, str]:
    """Read a file that says which of their names is which site: a JSON object of strings. ConfigError otherwise."""
    try:
        found: Any = strict_json.parse(read_bounded(path, MAP_BYTES, ConfigError))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ConfigError(f"{path}: want a JSON object, their name -> site")
    return found


def stored_name(site: str, layer: int | None) -> str:
    """What a site of a layer, or of the whole model, is called in a recording."""
    return site if layer is None else f"layers.{layer}.{site}"


def _site(name: str) -> tuple[Site | None, int | None]:
    """The site and layer that a name stands for."""
    if name in WHOLE_MODEL or name == LOGPROB_IDS:
        return _BY_NAME[name], None
    word, _, rest = name.partition(".")
    number, _, site = rest.partition(".")
    if word != "layers" or not (number.isascii() and number.isdigit() and len(number) < 7) or site in WHOLE_MODEL:
        return None, None
    return _BY_NAME.get(SPELLED.get(site, site)), int(number)


def _of_positions(name: str, config: ModelConfig) -> bool:
    """Whether a name says which positions one layer's rows are of."""
    return any(name == stored_name(POSITIONS, layer) for layer in range(config.num_hidden_layers))


def _readings(shape: tuple[int, ...], want: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Orders of the axes of `shape` that make it `want`, its axes after the first perhaps run together."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    if len(shape) > MOST_AXES:
        return found
    joined = {want, (want[0], math.prod(want[1:]))}
    for order in itertools.permutations(range(len(shape))):
        if tuple(shape[axis] for axis in order) in joined:
            found.add((order, want))
    return found
