"""The memory plan of a Llama-family run on its one rank: weights and caches exactly, a call by a bound.

As `runtime.plan.call`, the bound is read off `model/llama/` and the ops that it runs on: what each function keeps alive
while another runs, and what that one takes itself. It does not grow with the context, except for the full cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.grouped import cpu as gqa
from kernels.linear import cpu as linear
from kernels.linear.cpu import _native_bfloat16
from model.checkpoint.binding import Form
from model.checkpoint.census import Census
from model.llama.config import LlamaConfig
from model.state import layer_caches
from runtime.arithmetic import DTYPES, cache_formats
from runtime.options import RunOptions
from runtime.plan.grouped import attend
from runtime.plan.ops import F32, TILE_SLACK, Costs
from runtime.plan.planner import RESERVE, most
from runtime.plan.sizes import Alive, Moment, moment
from runtime.plan.weights import Weights, stored_bytes

HEAD_ROWS: Final = 64  # rows of logits made at once, see `scripts.logits`; generation makes one


class LlamaPlan(NamedTuple):
    """What a run needs, in bytes."""

    context: int  # positions
    chunk: int  # tokens of a call, at most
    own_weights: int  # memory that weights take
    mapped_weights: int  # bytes of mapped files that the model looks at
    cache_bytes: int
    call: Moment  # the largest of any call
    reserve: int  # beside tensors
    host: int = 0  # no Python list grows with the run

    @property
    def needed(self) -> int:
        """Memory without which the run fails: all but mapped files."""
        return self.own_weights + self.cache_bytes + self.call.nbytes + self.host + self.reserve


@dataclass(frozen=True, slots=True)
class LlamaPlanner:
    """Plans of a run, for any context and chunk."""

    config: LlamaConfig
    census: Census
    options: RunOptions

    def plan(self, context: int, chunk: int | None = None) -> LlamaPlan:
        """Plan for `context` positions in calls of up to `chunk` tokens (None: the run's own); monotone in both."""
        options, config = self.options, self.config
        chunk = min(chunk or options.prefill_chunk, context)
        held = self._weights()
        # between these sizes, what a call takes grows with its tokens
        bounds = {1, linear.FEW, max(1, gqa.ROWS // config.num_attention_heads), chunk}
        moments = [one for tokens in sorted(bounds) if tokens <= chunk for one in self._moments(tokens, context)]
        return LlamaPlan(
            context,
            chunk,
            held.own,
            held.mapped,
            self._caches(context, chunk),
            max(moments, key=lambda one: one.nbytes),
            RESERVE[options.device],
        )

    def largest_context(self, memory: int, chunk: int | None = None) -> int:
        """Most positions that fit in so many bytes, at most those that the model has; 0 where none does."""
        return most(lambda n: self.plan(n, chunk).needed <= memory, self.config.max_position_embeddings)

    def _caches(self, context: int, chunk: int) -> int:
        """Bytes of all caches; of a layer that depends on the prompt's length, for the length that takes most.

        It takes some bytes for each token of the prompt and others for each that follows: the most at one of the ends.
        """
        formats, meta = cache_formats(self.options, self.config), torch.device("meta")
        sizes = []
        for prompt in (0, context) if formats.prompted else (None,):
            caches = layer_caches(self.config, context, chunk, formats, meta, prompt)
            sizes.append(sum(sum(cache.nbytes().values()) for cache in caches))
        return max(sizes)

    def _weights(self) -> Weights:
        """Norms are held in fp32; all else as stored, on the CPU as views of the mapped files."""
        found = Weights(own=self.config.head_dim // 2 * F32)  # rotary frequencies
        for name, binding in self.census.bindings.items():
            shape = self.census.demanded[name].shape
            stored = stored_bytes(binding.form, shape)
            if len(shape) == 1 and binding.form is not Form.F32:
                found += Weights(stored, own=shape[0] * F32)
            elif self.options.device == "cpu":
                found += Weights(stored, mapped=stored)
            else:
                found += Weights(stored, own=stored)
        if self.options.coda_adapters is not None:
            size = Path(self.options.coda_adapters).stat().st_size
            found += Weights(size, own=size)
        return found

    def _costs(self) -> Costs:
        gpu = self.options.device == "cuda"
        narrow = not gpu and _native_bfloat16(torch.device("cpu"))
        return Costs(DTYPES[self.options.dtype].itemsize, deployed=False, narrow=narrow, gpu=gpu)

    def _linear(self, costs: Costs, tokens: int, rows: int, columns: int) -> int:
        """A product in the costliest form that any matrix is stored in."""
        forms = {binding.form for binding in self.census.bindings.values()}
        return max(costs.linear(tokens, rows, columns, form) for form in forms)

    def _moments(self, t: int, context: int) -> Iterator[Moment]:
        """Every moment of a call of t tokens that could be the largest: `LlamaTransformer.__call__` and `logits`."""
        c, costs = self.config, self._costs()
        row = t * c.hidden_size * costs.item
        yield moment("embedding", {"stream": row}, work=t * c.hidden_size * F32)
        yield from self._attention(t, context, costs)
        yield from self._feed_forward(t, costs)
        normed = costs.rms_norm(t, c.hidden_size)
        yield moment("final norm", {"stream": row}, work=row + normed)
        rows = min(HEAD_ROWS, t)
        product = self._linear(Costs(F32, deployed=False, narrow=False), rows, c.vocab_size, c.hidden_size)
        yield moment("logits", {"output": row, "rows in fp32": rows * c.hidden_size * F32}, work=product)

    def _attention(self, t: int, context: int, costs: Costs) -> Iterator[Moment]:
        """The first half of `Block.__call__`."""
        c = self.config
        D, heads, kv_heads, d = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        row, q, k = t * D * costs.item, t * heads * d * costs.item, t * kv_heads * d * costs.item
        alive: Alive = {"stream": row}
        yield moment("norm", alive, work=costs.rms_norm(t, D))
        alive = alive | {"sublayer input": row}
        yield moment("queries", alive, work=self._linear(costs, t, heads * d, D))
        alive = alive | {"heads": q}
        yield moment("keys and values", alive, work=k + self._linear(costs, t, kv_heads * d, D))
        alive = alive | {"heads": q + 2 * k, "cosines and sines": t * d * F32}
        yield moment(
            "rotation", alive, work=max(rotate_halves(costs, t * heads * d), q + rotate_halves(costs, t * kv_heads * d))
        )
        alive = alive | {"heads": 2 * q + 3 * k}
        streams = 1
        if self.options.coda_adapters is not None:
            streams, alive = 2, alive | {"noise queries": 3 * q}
        kinds = set(cache_formats(self.options, c).variants)
        yield moment("attend", alive, work=max(attend(kind, costs, c, t, streams * heads, context) for kind in kinds))
        if streams == 2:  # both streams come back in the run's dtype, and are subtracted in fp32
            yield moment("subtract", alive, work=2 * q + 6 * t * heads * d * F32 + TILE_SLACK)
        alive = alive | {"heads": 3 * q + 3 * k}
        yield moment("output", alive, work=self._linear(costs, t, D, heads * d))
        yield moment("sum", {"stream": row, "sublayer output": row}, work=row)

    def _feed_forward(self, t: int, costs: Costs) -> Iterator[Moment]:
        """The second half; the stream that the block was given is still its caller's."""
        D, I = self.config.hidden_size, self.config.intermediate_size
        row, wide = t * D * costs.item, t * I * costs.item
        alive: Alive = {"stream": 2 * row}
        yield moment("norm", alive, work=costs.rms_norm(t, D))
        alive = alive | {"sublayer input": row}
        yield moment("gate and up", alive, work=wide + self._linear(costs, t, I, D))
        yield moment("SwiGLU", alive | {"gate and up": 2 * wide}, work=costs.swiglu(t * I))
        yield moment("down", alive | {"SwiGLU": wide}, work=self._linear(costs, t, D, I))
        yield moment("sum", {"stream": 2 * row, "sublayer output": row}, work=row)


def rotate_halves(costs: Costs, numbers: int) -> int:
    """`rotate_halves` of so many numbers: at its end, or for the second half, as much again in fp32 twice."""
    wide = 0 if costs.item == F32 else numbers * F32
    return wide + 2 * numbers * F32 + TILE_SLACK
