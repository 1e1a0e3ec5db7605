"""Draft heads: a few blocks that guess what the model will say next. Their guesses are only ever checked, not said.

Preview MTP (one stage) reads the streams after the last layer and the token that follows; it drafts one token, and more
by reading its own streams again. DSpark (three stages) reads streams after some layers, and drafts a block of tokens in
one pass. Every stage is a block like an SWA layer with scored experts, with the rotation of SWA layers (no YaRN), and
keeps the KV of one window. Both use the model's embedding and output head.

Sources, where not said otherwise: DeepSeek's model.py of the preview and of Flash-0731, as mirrored, and of V4.1-Flash.
No accept loop was published, nor how MTP is fed. Secondary (vLLM): that MTP reads the token which follows a row, and
how it drafts more than one. Guessed: that MTP's embedding at position 0 is as everywhere (vLLM zeroes it), and that
Pro-0813 computes as Flash-0731 does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense
from fathom.model.attention import Attention, Beyond
from fathom.model.block import Block
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.layers import LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.mtp import Head
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import MAX_DRAFTS, LayerKind, ModelConfig
from fathom.model.hyper import HyperHead
from fathom.model.linear import Input, Linear
from fathom.model.observe.observer import observed
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.transformer import Transformer
from fathom.model.v41 import Carried, DelayedBlock, WindowAttention, begun


class Drafts(NamedTuple):
    """What a head drafts behind a token."""

    tokens: list[int]  # [k]
    logits: Tensor  # [k, vocab] float32, by which they were chosen
    confidence: Tensor | None  # [k] float32, logits of being accepted where those before are; None: MTP has none


class DraftState:
    """What a head remembers of a sequence: the KV of one window, in each stage.

    Rings count from the first row that the head was given: rotation knows differences of positions only.

    Attributes
    ----------
    first
        Position in the sequence of that row.
    position
        Position of the row that comes next.

    """

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.first = self.position = 0

    @property
    def written(self) -> int:
        """Rows that were given, and so the place of the next one in the rings' count."""
        return self.position - self.first

    def begin(self, position: int) -> None:
        """Forget all: the next row is of `position`."""
        for cache in self.layers:
            cache.rewind(max(0, self.written - cache.ring.data.shape[0]), self.written)
        self.first = self.position = position

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(sum(cache.nbytes().values()) for cache in self.layers)


class StreamListener:
    """Listens at `model.observe.sites.STREAMS` for a head: it keeps what the head reads, row by row.

    As many rows as the last window has, and as may be taken back behind it. A call from a position that was passed
    before, because what followed was taken back, replaces the rows from there on.
    """

    def __init__(self, head: "DraftHead", drafts: int) -> None:
        self.head = head
        self.kept = head.config.sliding_window + drafts
        self.rows: list[tuple[int, Tensor]] = []  # position of the first of them, and rows; in order, without a gap
        self._layers: dict[int, Tensor] = {}  # of the call that runs, what was read so far

    def __call__(self, layer: int | None, streams: Tensor) -> None:
        """Take rows from the streams [t, s, hidden] after a layer."""
        if layer not in self.head.target_layers:
            return
        self._layers[layer] = self.head.read(streams[-self.kept :])
        if layer != max(self.head.target_layers):
            return
        rows = torch.cat([self._layers[target] for target in self.head.target_layers], -1)
        self._layers.clear()
        call = observed(self.head.model).call
        assert call is not None, "streams outside of a call"
        assert isinstance(call.first, int), "a captured call passes no listener"
        self._forget(call.first)
        stop = call.first + call.count
        if self.rows and self.stop < call.first:
            self.rows.clear()
        self.rows.append((stop - rows.shape[0], rows))
        self.rows = [(first, part) for first, part in self.rows if first + part.shape[0] > stop - self.kept]

    def take(self, position: int, most: int) -> tuple[int, Tensor]:
        """The last rows before `position`, at most so many and one window; all are let go.

        Returns the position of the first, and [n, ...].
        """
        assert self.rows, "nothing was run"
        assert position <= self.stop, f"position {position}, and rows end at {self.stop}"
        self._forget(position)
        rows, self.rows = self.rows, []
        assert rows, f"no row before position {position}"
        found = torch.cat([part for _, part in rows])[-min(most, self.head.config.sliding_window) :]
        return position - found.shape[0], found

    @property
    def stop(self) -> int:
        """Position behind the last row."""
        first, last = self.rows[-1]
        return first + last.shape[0]

    def _forget(self, position: int) -> None:
        """Let go of rows from a position on."""
        self.rows = [(first, part[: position - first]) for first, part in self.rows if first < position]


class Remembering(Block):
    """A block that may be given KV to remember without being run."""

    def remember(self, x: Tensor, call: Call, cache: LayerCache) -> None:
        """Write the KV of rows x [m, hidden], as the attention's input would be."""
        attention = self.attention
        cache.write(call, attention.kv(Input(x, [attention.wkv], call, attention.arithmetic), call))
        cache.evict()


class BlockAttention(Attention):
    """DSpark's: every slot of a block sees the window before the block, and all slots of it."""

    def attend(self, q: Tensor, beyond: Beyond, call: Call, cache: LayerCache) -> Tensor:
        """Attend from q [t, heads, head_dim]; to the op, slots are heads of one query that stands at the last one."""
        first = call.first
        assert isinstance(first, int), "a block is not captured"
        (t, _, d), last = q.shape, first + call.count - 1
        one = q.reshape(1, -1, d)
        sees = cache.ring.data, last, self.window + t, *beyond, self.sink.repeat(t)
        return self.arithmetic.ops.attend(one, *sees).reshape(q.shape)


class SlotAttention(BlockAttention, WindowAttention):
    """The same in V4.1."""


class DelayedStage(Remembering, DelayedBlock):
    """A stage of V4.1's DSpark."""


class DraftHead:
    """What both heads are built of; `install` wraps their methods as it does a model's.

    Attributes
    ----------
    target_layers
        Layers of the model behind which the head reads the streams, in the order in which it does.
    most
        Tokens that it can draft at a time.

    """

    kind: Head
    attention: type[Attention] = Attention
    stage: type[Remembering] = Remembering
    target_layers: tuple[int, ...]
    most: int

    def __init__(self, model: Transformer, weights: Weights) -> None:
        config, arithmetic = model.config, model.arithmetic
        self.model, self.config, self.arithmetic = model, config, arithmetic
        rotation = Rotation(layer_frequencies(config, LayerKind.SWA).to(model.device))
        behind, count = config.num_hidden_layers, self.kind.stages
        self.blocks = [
            self.stage(config, layer, weights, arithmetic, rotation, self.attention)
            for layer in range(behind, behind + count)
        ]
        last = config.prefix(behind + count - 1)
        self.build_end(last, weights)
        self.norm = weights.vector(f"{last}.norm.weight").float()  # [hidden]

    def build_end(self, last: str, weights: Weights) -> None:
        """Build what reads the streams behind the last stage, whose names begin so."""
        self.hyper_head = HyperHead(self.config, f"{last}.", weights, self.arithmetic)

    def listener(self, drafts: int) -> StreamListener:
        """Return what listens to the model over one sequence, for up to so many drafts at a time."""
        return StreamListener(self, drafts)

    def read(self, streams: Tensor) -> Tensor:
        """What the head reads of the streams [n, s, hidden] after one layer: [n, ...]."""
        raise NotImplementedError

    def draft(
        self, listener: StreamListener, following: Sequence[int], position: int, k: int, state: DraftState
    ) -> Drafts:
        """Draft up to `k` tokens behind the last of a sequence, and remember the tokens before it.

        Parameters
        ----------
        listener
            Has the streams of the tokens before the last one, which are all taken.
        following
            Ids of the last tokens of the sequence, as many as are known of a window; the last one has not been run.
        position
            Where that one is in the sequence.
        k
            1 to `most`.
        state
            Advanced to the position of the last token. Where it does not join the rows there are, it begins anew.

        """
        raise NotImplementedError

    def new_state(self, drafts: int) -> DraftState:
        """Return an empty state, for up to so many drafts at a time."""
        config, formats, device = self.config, self.arithmetic.formats, self.model.device
        return DraftState(draft_caches(self.kind, config, formats, device, drafts))

    def call(self, tokens: Tensor, first: int) -> Call:
        """Begin a call of token ids [t] at places ``first ..`` of the rings."""
        return Call(tokens, first, self.arithmetic)

    def run(self, tokens: Tensor, call: Call, state: DraftState, streams: Tensor) -> Tensor:
        """Streams [m, s, hidden] through all stages; `tokens` [t] are their ids."""
        del tokens
        for block, cache in zip(self.blocks, state.layers, strict=True):
            streams = block(streams, call, cache)
        return streams

    def embed(self, tokens: Tensor, call: Call) -> Tensor:
        """Token ids [t] to [m, hidden]."""
        return self.model.embedding(tokens, call)

    def hidden(self, collapsed: Tensor) -> Tensor:
        """What the hyper head read [t, hidden] to the normed output."""
        return self.arithmetic.ops.rms_norm(collapsed, self.norm, self.config.rms_norm_eps)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Rows of the normed output [t, hidden] to logits [t, vocab] float32, by the model's head."""
        return self.model.head(hidden)

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """[t] int64 on the device."""
        return torch.tensor(tokens, dtype=torch.int64, device=self.model.device)

    def joined(self, listener: StreamListener, position: int, most: int, state: DraftState) -> Tensor:
        """Rows before `position` that the listener has, at most so many; the state joins them, or begins with them."""
        first, rows = listener.take(position, most)
        if first != state.position:
            state.begin(first)
        return rows


class MtpHead(DraftHead):
    """The preview's: one stage, over the streams after the last layer and the tokens that follow.

    ``u = e_proj(enorm(embed(id))) + h_proj(hnorm(H))`` in every stream, through the block; a further draft is made by
    the same stage from its own streams and the token that was drafted, one position on.
    """

    kind = Head.MTP

    def __init__(self, model: Transformer, weights: Weights) -> None:
        super().__init__(model, weights)
        self.e_proj, self.h_proj = (
            Linear(weights.matrix(f"mtp.0.{name}.weight"), self.arithmetic) for name in ("e_proj", "h_proj")
        )  # [hidden, hidden]
        self.embed_norm, self.streams_norm = (
            weights.vector(f"mtp.0.{name}.weight").float() for name in ("enorm", "hnorm")
        )  # [hidden]
        self.target_layers = (self.config.num_hidden_layers - 1,)
        self.most = MAX_DRAFTS  # every further draft is another run of the stage

    def read(self, streams: Tensor) -> Tensor:
        """The streams [n, s, hidden] themselves."""
        return streams

    def streams(self, given: Tensor, following: Tensor, call: Call) -> Tensor:
        """Streams H [t, s, hidden] and ids [t] of the tokens that follow to the block's input, of the own tokens."""
        ops, eps = self.arithmetic.ops, self.config.rms_norm_eps
        embedded = self.e_proj(ops.rms_norm(self.embed(following, call), self.embed_norm, eps))
        given = call.own(given)
        m, s, hidden = given.shape
        normed = ops.rms_norm(given.reshape(m * s, hidden), self.streams_norm, eps)
        return embedded[:, None] + self.h_proj(normed).view(m, s, hidden)

    @torch.inference_mode()
    def draft(
        self, listener: StreamListener, following: Sequence[int], position: int, k: int, state: DraftState
    ) -> Drafts:
        """See `DraftHead.draft`."""
        rows = self.joined(listener, position, len(following), state)
        ids = self.ids(following[-rows.shape[0] :])
        self._remember(rows[:-1], ids[:-1], state)
        state.position = position
        given, token, tokens, logits = rows[-1:], ids[-1:], list[int](), list[Tensor]()
        for place in range(state.written - 1, state.written - 1 + k):
            call = self.call(token, place)
            streams = self.run(token, call, state, self.streams(given, token, call))
            logits.append(self.unembed(self.hidden(self.hyper_head(streams, call))))
            given = call.whole(streams)
            token = logits[-1].argmax(-1)
            tokens.append(int(token))
        state.layers[0].rewind(state.written, state.written - 1 + k)
        return Drafts(tokens, torch.cat(logits), None)

    def _remember(self, rows: Tensor, following: Tensor, state: DraftState) -> None:
        """Write the KV of rows that no draft is made from."""
        if not rows.shape[0]:
            return
        (stage,), call = self.blocks, Call(following, state.written, self.arithmetic)
        read = stage.attention_streams.read(self.streams(rows, following, call), stage.attention_norm)
        stage.remember(read.x, call, state.layers[0])


class DsparkHead(DraftHead):
    """DSpark's: three stages, over the means of the streams after some layers.

    What it reads of a committed token becomes KV of every stage, from ``main_norm(main_proj(.))``. A pass runs a block
    of slots: the last token, and noise for those to come. A slot's logits are moved by the token drafted before it.
    """

    kind = Head.DSPARK
    attention = BlockAttention
    markov = "markov_head.markov_w1", "markov_head.markov_w2"

    def __init__(self, model: Transformer, weights: Weights) -> None:
        super().__init__(model, weights)
        assert self.config.dspark is not None, "the census asks for it"
        self.settings = self.config.dspark
        self.main_proj = Linear(weights.matrix("mtp.0.main_proj.weight"), self.arithmetic)  # [hidden, targets * hidden]
        self.main_norm = weights.vector("mtp.0.main_norm.weight").float()  # [hidden]
        last = f"mtp.{self.kind.stages - 1}"
        self.markov_in, markov_out, confidence = (
            weights.operand(f"{last}.{name}.weight") for name in (*self.markov, "confidence_head.proj")
        )
        self.markov_out, self.confidence = Dense(markov_out), Dense(confidence)  # [vocab, rank], [1, hidden + rank]
        self.target_layers, self.most = self.config.draft_taps, self.settings.block_size

    def read(self, streams: Tensor) -> Tensor:
        """Mean [n, hidden] over the streams [n, s, hidden]."""
        return streams.mean(1)

    @torch.inference_mode()
    def draft(
        self, listener: StreamListener, following: Sequence[int], position: int, k: int, state: DraftState
    ) -> Drafts:
        """See `DraftHead.draft`. All slots are run, whatever k: fewer are not what the head was trained on."""
        self._remember(self.joined(listener, position, len(following), state), state)
        state.position = position
        slots = [following[-1], *[self.settings.noise_token_id] * (self.settings.block_size - 1)]
        tokens, place = self.ids(slots), state.written
        call = self.call(tokens, place)
        collapsed = self.collapsed(tokens, call, state)
        for cache in state.layers:
            cache.rewind(place, place + len(slots))
        return self._chosen(following[-1], collapsed[:k], self.unembed(self.hidden(collapsed[:k])))

    def collapsed(self, tokens: Tensor, call: Call, state: DraftState) -> Tensor:
        """Ids [t] of the slots through all stages, and the streams behind them as one [t, hidden]."""
        streams = self.embed(tokens, call)[:, None].repeat(1, self.config.hc_mult, 1)
        return self.hyper_head(self.run(tokens, call, state, streams), call)

    def _remember(self, rows: Tensor, state: DraftState) -> None:
        """Write the KV of rows [n, targets * hidden] in every stage."""
        x = self.arithmetic.ops.rms_norm(self.main_proj(rows), self.main_norm, self.config.rms_norm_eps)
        call = Call(self.ids([0] * rows.shape[0]), state.written, self.arithmetic)  # ids are not read
        for stage, cache in zip(self.blocks, state.layers, strict=True):
            stage.remember(call.own(x), call, cache)

    def _chosen(self, token: int, collapsed: Tensor, logits: Tensor) -> Drafts:
        """Choose slot by slot, from what the hyper head read [k, hidden], not normed, and logits [k, vocab]."""
        ops, tokens, confidence = self.arithmetic.ops, list[int](), list[Tensor]()
        for slot in range(logits.shape[0]):
            before = self.markov_in[token][None].to(self.arithmetic.dtype)  # [1, rank]
            logits[slot] += ops.linear(before, self.markov_out, wide=True)[0]
            confidence.append(
                ops.linear(torch.cat((collapsed[slot : slot + 1], before), 1), self.confidence, wide=True)
            )
            token = int(logits[slot].argmax())
            tokens.append(token)
        return Drafts(tokens, logits, torch.cat(confidence).flatten())


class DelayedDspark(DsparkHead):
    """V4.1's: it reads streams as they enter layers, and a stage reads them by the weights of the stage before."""

    attention = SlotAttention
    stage = DelayedStage
    markov = "markov_head.embed", "markov_head.head"
    blocks: list[DelayedStage]  # type: ignore[assignment]

    def build_end(self, last: str, weights: Weights) -> None:
        """Nothing: the last stage's `pre` reads the streams."""

    def collapsed(self, tokens: Tensor, call: Call, state: DraftState) -> Tensor:
        """See `DsparkHead.collapsed`."""
        carried = begun(self.embed(tokens, call)[:, None].repeat(1, self.config.hc_mult, 1))
        for block, cache in zip(self.blocks, state.layers, strict=True):
            carried = block.run(carried, call, cache)
        return self.folded(carried)

    def folded(self, carried: Carried) -> Tensor:
        """Streams behind the last stage as one [t, hidden]."""
        return self.arithmetic.ops.collapse(carried.streams, carried.pre)


def build_head(kind: Head, model: Transformer, weights: Weights) -> DraftHead:
    """Return the draft head of this kind for a model."""
    if kind is Head.MTP:
        return MtpHead(model, weights)
    return (DsparkHead if model.config.v41 is None else DelayedDspark)(model, weights)


def draft_caches(
    kind: Head, config: ModelConfig, formats: CacheFormats, device: torch.device, drafts: int
) -> list[LayerCache]:
    """Return an empty cache for each stage, with room for what a draft of so many tokens writes and takes back."""
    if kind is Head.DSPARK:
        assert config.dspark is not None, "the census asks for it"
        drafts = config.dspark.block_size
    behind = config.num_hidden_layers
    return [
        LayerCache(config, behind + stage, config.max_position_embeddings, 1, formats, device, drafts)
        for stage in range(kind.stages)
    ]
