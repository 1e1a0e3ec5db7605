"""Shard: the cache of one grouped-query layer, compressed once when the prompt has been read, and per token after that.

    [sinks, exact][middle: keys in their eigenbasis, values as codes][window, exact][stream: Hadamard and Lloyd-Max]
     positions 0-3      4 .. prompt - window - 1                     the last 64     what left the window since

While the prompt is read, everything is exact. With its last token the middle is compressed; the exact keys and values
of the prompt are let go. Room for these is taken with the prompt's first token: where layers read it one after the
other (`model.state.State`), one of them has it at a time. A token that leaves the window later is encoded by itself and
goes to the stream, never into the basis, and nothing that was decoded is ever encoded again. As long as there are no
more than sinks and window, the result is that of a full cache to the bit.

On several ranks each has the exact rows, the codes of values and the stream of its own KV heads. Keys share one
eigenbasis over the columns of all heads, so their codes, and the basis, are on every rank, which rebuilds the columns
of its heads; values share one codebook.

How long the prompt is must be known when buffers are allocated: it decides what the middle and the stream take.
Tokens after the prompt are attended one by one even where several come in one call, so that which of them are still in
the window does not depend on how they were grouped.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows, eigenbasis, product_quantise, qjl
from fathom.kernels.ops import CPU, Ops
from fathom.kernels.rope import reference as rope
from fathom.kernels.shard.reference import Middle, Stream, turn
from fathom.model.cache.gqa import KvShape
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.observe.invariants import finite

if TYPE_CHECKING:
    from fathom.kernels.formats.stored import EigenKeys, StreamKeys

STREAM_BITS = (2, 3, 4, 8)
DISTORTIONS = {
    "uniform": None,
    "measured": eigenbasis.measured_distortion,
    "published": eigenbasis.published_distortion,
}
TILE = 256  # tokens at a time while the middle is compressed


@dataclass(frozen=True)
class ShardSettings:
    """What a run chooses; the defaults are the published ones. ConfigError names a field that cannot be."""

    sinks: int = 4  # first tokens, kept exact
    window: int = 64  # last tokens, kept exact
    rank: int = 192  # components of int4 per token; with groups, as many bytes as that takes
    allocation: str = "uniform"  # one of DISTORTIONS: int4, or bits by group with measured or published distortions
    group: int = 64  # components that get equally many bits
    stream_bits: int = 8  # per number, one of STREAM_BITS
    sketch: bool = False  # one of the bits of the stream's keys for the sign of a projection of their error (QJL)
    sign_seed: int | None = None  # random signs before each Hadamard rotation; None: none, as published

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise ConfigError(f"shard: sinks={self.sinks} window={self.window}, want 0 and 1 at least")
        if self.allocation not in DISTORTIONS:
            raise ConfigError(f"shard: allocation={self.allocation!a}, want one of {', '.join(DISTORTIONS)}")
        if self.stream_bits not in STREAM_BITS:
            raise ConfigError(f"shard: stream_bits={self.stream_bits}, want one of {STREAM_BITS}")
        if self.rank < 2 or self.rank % 2:
            raise ConfigError(f"shard: rank={self.rank}, want an even number of components")
        if self.allocation != "uniform" and (self.group < 4 or self.group % 4 or self.rank % self.group):
            raise ConfigError(f"shard: group={self.group}, want a multiple of 4 that divides rank={self.rank}")

    def check(self, heads: int, head_dim: int) -> None:
        """Refuse what these settings cannot store: ConfigError."""
        if head_dim < 8 or head_dim & (head_dim - 1):
            raise ConfigError(f"shard: head_dim {head_dim}, want a power of two from 8 on")
        columns = f"the {heads} x {head_dim} columns of a layer's keys"
        if self.rank > heads * head_dim:
            raise ConfigError(f"shard: rank={self.rank} exceeds {columns}")
        if self.allocation != "uniform" and heads * head_dim % self.group:
            raise ConfigError(f"shard: group={self.group} does not divide {columns}")


class ShardCache:
    """Keys and values of one layer and one sequence.

    Parameters
    ----------
    shape
        What the layer writes.
    settings
        What the run chose; ConfigError where they do not fit `shape`.
    prompt
        Tokens of the prompt, after which the middle is compressed.
    max_context
        Tokens in all.
    dtype
        Of what is kept exact: the run's.
    device
        Of all buffers.
    rewind
        Tokens after the prompt that can be taken back: so many that have left the window last are kept exact too.

    """

    def __init__(
        self,
        shape: KvShape,
        settings: ShardSettings,
        prompt: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        rewind: int = 0,
    ) -> None:
        assert 0 <= prompt <= max_context, f"prompt of {prompt} in a context of {max_context}"
        settings.check(shape.heads.total, shape.head_dim)
        self.shape, self.settings = shape, settings
        self.prompt, self.max_context, self.dtype, self.device = prompt, max_context, dtype, device
        self.count = 0  # tokens held
        self.prompt_keys, self.prompt_values = self._rows(0), self._rows(0)  # [prompt, heads, d] while it is read
        self.exact = settings.sinks + settings.window
        heads, d = shape.heads.size, shape.head_dim
        # rows 0 .. sinks - 1 stay; position p beyond them is row sinks + (p - sinks) % window
        self.keys, self.values = self._rows(self.exact), self._rows(self.exact)
        # what the token at position p has pushed out of the window: row p % rewind
        self.left_keys, self.left_values = self._rows(rewind), self._rows(rewind)
        self.middle: Middle | None = None
        self.key_codes: EigenKeys | None = None  # of the middle, of all heads
        if prompt > self.exact:
            n, width = prompt - self.exact, shape.heads.total * d
            grouped = settings.allocation != "uniform"
            kept = min(width, 2 * settings.rank) if grouped else settings.rank  # the least code takes half of 4 bits
            groups = kept // settings.group if grouped else 0
            keys = self.key_codes = eigenbasis.eigen_keys(n, width, settings.rank, kept, groups, device)
            own_columns = shape.heads.own.times(d)  # columns
            self.middle = Middle(
                keys._replace(basis=own_columns.of(keys.basis), mean=own_columns.of(keys.mean)),
                product_quantise.codebook_values(n, heads, d, device),
                settings.sinks,
                shape.freqs.to(device),
                shape.interleaved,
            )
        rows = self._streamed(max_context) * heads
        bits, seed = settings.stream_bits, settings.sign_seed
        allocate: Callable[..., StreamKeys] = qjl.sketched_rows if settings.sketch else coded_rows.allocate
        self.stream_keys = allocate(rows, d, bits, device, seed)
        self.stream_values = coded_rows.allocate(rows, d, bits, device, seed)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, ops: Ops = CPU) -> Tensor:
        """Take t more tokens and attend from them to themselves and all before.

        Parameters
        ----------
        q
            [t, h, head_dim], rotary embedding applied.
        keys, values
            [t, heads, head_dim], rotary embedding applied to keys. CapacityError when they do not fit.
        ops
            What to compute with.

        Returns
        -------
        Tensor
            [t, h, head_dim] in the dtype of `q`.

        """
        t = q.shape[0]
        if self.count + t > self.max_context:
            raise CapacityError(f"shard: a cache of {self.max_context} tokens cannot take token {self.count + t - 1}")
        out = torch.empty_like(q)
        head = min(t, max(0, self.prompt - self.count))
        if head:
            out[:head] = self._read_prompt(q[:head], keys[:head], values[:head], ops)
        for i in range(head, t):
            self._append(keys[i], values[i])
            out[i : i + 1] = self._attend_all(q[i : i + 1], ops)
        return out

    def nbytes(self) -> int:
        """Bytes held: of all tensors of this cache, but not of the constants that all caches share."""
        return sum(tensor.nbytes for tensor in self.buffers().values())

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Views of what a saved state needs."""
        assert position == self.count, f"{self.count} tokens held at position {position}"
        return {name: self.buffers()[name][:rows] for name, (rows, _) in self._parts(position).items()}

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the cache holds now."""
        return {name: (rows, *shape) for name, (rows, shape) in self._parts(position).items()}

    def by_head(self) -> dict[str, tuple[int, int]]:
        """Where KV heads are: among a token's codes of values, and one row after the other in streams."""
        places = {"middle.values.codes": (1, self.shape.head_dim // product_quantise.CHANNELS)}
        places |= {f"{part}.{kind}": (1, 1) for part in ("exact", "prompt") for kind in ("keys", "values")}
        streamed = (name for name in self.buffers() if name.startswith("stream."))
        return places | dict.fromkeys((*streamed, "middle.values.largest"), (0, 1))

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        self._let_go()
        if 0 < position < self.prompt:
            self._begin()
        buffers = self.buffers()
        for name, (rows, _) in self._parts(position).items():
            buffers[name][:rows] = saved[name]
        self.count = position

    def rewind(self, position: int, end: int) -> None:
        """Forget the last tokens, all of the prompt or all behind it: the window holds again what it did."""
        for last in reversed(range(max(position, self.prompt, self.exact), end)):
            row, kept = self._row(last), last % self.left_keys.shape[0]
            self.keys[row], self.values[row] = self.left_keys[kept], self.left_values[kept]
        self.count = position

    def _rows(self, n: int) -> Tensor:
        return torch.zeros(n, self.shape.heads.size, self.shape.head_dim, dtype=self.dtype, device=self.device)

    def _begin(self) -> None:
        """Allocate what the prompt needs until its middle is compressed."""
        self.prompt_keys, self.prompt_values = self._rows(self.prompt), self._rows(self.prompt)

    def _let_go(self) -> None:
        """Free it."""
        self.prompt_keys = self.prompt_values = self._rows(0)

    def _streamed(self, position: int) -> int:
        """Tokens in the stream when `position` tokens are held."""
        return max(0, position - max(self.prompt, self.exact))

    def buffers(self) -> dict[str, Tensor]:
        """All tensors held, by name."""
        held = {"exact.keys": self.keys, "exact.values": self.values}
        held |= {"left.keys": self.left_keys, "left.values": self.left_values}
        held |= {"prompt.keys": self.prompt_keys, "prompt.values": self.prompt_values}
        if self.middle is not None and self.key_codes is not None:
            held |= {f"middle.keys.{name}": plane for name, plane in self.key_codes._asdict().items()}
            held |= {f"middle.values.{name}": plane for name, plane in self.middle.values._asdict().items()}
        held |= {f"stream.keys.{name}": plane for name, plane in qjl.planes(self.stream_keys).items()}
        return held | {f"stream.values.{name}": plane for name, plane in coded_rows.planes(self.stream_values).items()}

    def _parts(self, position: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Leading rows that matter at `position`, and the shape of a row, by name of buffer."""
        row = (self.shape.heads.size, self.shape.head_dim)
        if position < self.prompt:
            return {"prompt.keys": (position, row), "prompt.values": (position, row)}
        parts = {}
        for name, plane in self.buffers().items():
            rows = plane.shape[0]
            if name.startswith("exact"):
                rows = min(position, self.exact)
            elif name.startswith("stream"):
                rows = self._streamed(position) * self.shape.heads.size
            if not name.startswith(("prompt", "left")):
                parts[name] = (rows, tuple(plane.shape[1:]))
        return parts

    def _read_prompt(self, q: Tensor, keys: Tensor, values: Tensor, ops: Ops) -> Tensor:
        """Attend from tokens of the prompt; compress when the last of them is in."""
        first, stop = self.count, self.count + q.shape[0]
        if not first:
            self._begin()
        self.prompt_keys[first:stop], self.prompt_values[first:stop] = keys, values
        out = causal(ops, q, self.prompt_keys[:stop], self.prompt_values[:stop], first)
        self.count = stop
        if stop == self.prompt:
            self._compress(self.prompt_keys, self.prompt_values)
            self._let_go()
        return out

    def _compress(self, keys: Tensor, values: Tensor) -> None:
        """Fit and store the middle of the prompt, and copy what stays exact."""
        sinks, stop = self.settings.sinks, keys.shape[0] - self.settings.window
        for position in (*range(min(sinks, keys.shape[0])), *range(max(sinks, stop), keys.shape[0])):
            row = self._row(position)
            self.keys[row], self.values[row] = keys[position], values[position]
        middle, coded, heads = self.middle, self.key_codes, self.shape.heads
        if middle is None or coded is None:
            return
        cuts = [(low, min(low + TILE, stop)) for low in range(sinks, stop, TILE)]

        def plain_keys() -> Iterator[Tensor]:
            for low, high in cuts:
                cos, sin = rope.angles(torch.arange(low, high, device=self.device), middle.freqs)
                plain = turn(keys[low:high].float(), cos, -sin, interleaved=middle.interleaved)
                yield heads.whole(plain, 1).flatten(1)

        def rotated_values() -> Iterator[Tensor]:
            for low, high in cuts:
                yield coded_rows.signed_hadamard(values[low:high], self.stream_values.signs)

        for low, high in cuts:
            finite("keys", None, low, keys[low:high])
            finite("values", None, low, values[low:high])
        # what ranks share is the first's, however a device sums
        eigenbasis.fit(coded, plain_keys, DISTORTIONS[self.settings.allocation])
        for plane in coded:
            heads.of_first(plane)
        product_quantise.fit_codebook(middle.values, rotated_values, lambda tile: heads.whole(tile, 1))
        heads.of_first(middle.values.codebook)
        product_quantise.store(middle.values, rotated_values)

    def _row(self, position: int) -> int:
        sinks = self.settings.sinks
        return position if position < sinks else sinks + (position - sinks) % self.settings.window

    def _append(self, key: Tensor, value: Tensor) -> None:
        """Take one token after the prompt, [heads, d]; what it pushes out of the window goes to the stream."""
        row = self._row(self.count)
        if self.count >= self.exact:
            place = self._streamed(self.count) * self.shape.heads.size
            qjl.write(self.stream_keys, place, self.keys[row])
            coded_rows.write(self.stream_values, place, self.values[row])
            if rewind := self.left_keys.shape[0]:
                kept = self.count % rewind
                self.left_keys[kept], self.left_values[kept] = self.keys[row], self.values[row]
        self.keys[row], self.values[row] = key, value
        self.count += 1

    def _attend_all(self, q: Tensor, ops: Ops) -> Tensor:
        """Attend from the last token [1, h, d] to everything held."""
        n = min(self.count, self.exact)
        if self.count <= self.exact:  # nothing was compressed: the op of a full cache itself
            return causal(ops, q, self.keys[:n], self.values[:n], n - 1)
        streamed = self._streamed(self.count)
        stream = Stream(self.stream_keys, self.stream_values, streamed) if streamed else None
        return ops.attend_codes(q, self.keys[:n], self.values[:n], self.middle, stream, self.stream_values.signs)


def causal(ops: Ops, q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """The op of a full cache: tokens at positions ``first ..`` see keys [first + t, heads, d] up to their own."""
    return ops.attend_grouped(q, keys.transpose(0, 1), values.transpose(0, 1), first, None)
