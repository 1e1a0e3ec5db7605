"""Decode by a CUDA graph: one launch by the host for each token, instead of thousands.

`Step` runs the model itself on one token whose position is on the device: caches are passed whole, at their capacity,
nothing is read on the host between the token and the logits, and no Python value depends on either. Every invariant of
`model.observe` is measured on the device, and looked at when the token has run. `Captured` is a step as a CUDA graph.
"""

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Apart
from fathom.kernels.triton_ops import TRITON
from fathom.model.cache.layers import LayerCache
from fathom.model.errors import ConfigError
from fathom.model.observe.deferred import Deferred
from fathom.model.observe.observer import observed
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.model.variants.choice import Full

WARM_UPS = 3  # runs before the capture, as PyTorch advises: Triton compiles, cuBLAS and the allocator settle


def refusal(model: Transformer) -> str | None:
    """Why no call of this model can be captured; None where it can."""
    arithmetic = model.arithmetic
    if arithmetic.ops != TRITON:
        return f"ops {arithmetic.ops.name}: a captured call is of Triton's kernels, ops triton, with none replaced"
    other = {str(v) for v in arithmetic.formats.variants if not isinstance(v, Full)}
    if other:
        return f"--kv {min(other)}: a captured call writes full caches only"
    for layer, block in enumerate(model.blocks):
        if any(isinstance(of, Apart) for of in block.experts.matrices):
            return f"layer {layer}: its routed experts are stored in several forms"
    return None


class Step:
    """The next token of a sequence: `place`, then `run` or a replay of what was captured of it, then `finish`.

    ``step(token)`` is all three. Steps, calls of the model and saves of the state may follow each other in any order.

    What must never happen is looked at in `place` where it is the caches', and else in `finish`: caches have advanced
    by then, and the state is of no more use. Listeners are refused: nothing of a replay passes Python.

    Parameters
    ----------
    model
        With the op set TRITON and caches in full; ConfigError, saying why, for another.
    state
        Of that model, or of one with the same config and formats; at any position.

    Attributes
    ----------
    token, position
        [1] and [] int64, on the device.
    logits
        [vocab] float32, those of the last step; the next one overwrites them.

    """

    def __init__(self, model: Transformer, state: State) -> None:
        if (why := refusal(model)) is not None:
            raise ConfigError(f"no captured call: {why}")
        self.model, self.state = model, state
        self.caches: list[LayerCache] = []
        for cache in state.layers:
            assert isinstance(cache, LayerCache), f"a V4 layer got {type(cache).__name__}"
            self.caches.append(cache)
        device, vocabulary = model.device, model.config.vocab_size
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.logits = torch.zeros(vocabulary, dtype=torch.float32, device=device)
        self.deferred = Deferred(len(model.blocks), device)

    @torch.inference_mode()
    def __call__(self, token: int) -> Tensor:
        """Run the next token; [vocab] float32 logits after it, which the next step overwrites.

        CapacityError, before anything is changed, when the state is full; Tripwire.
        """
        self.place(token)
        self.run()
        return self.finish()

    @torch.inference_mode()
    def place(self, token: int) -> None:
        """Put the token and the state's position where `run` reads them; CapacityError when the state is full."""
        observer, at = observed(self.model), self.state.position
        assert not observer.listening, "nothing of a captured call passes listeners: detach them"
        assert 0 <= token < len(self.logits), f"token {token} of {len(self.logits)}"
        self.state.reserve(1)
        observer.stands(self.state.layers, at, at, 1)
        self.token.fill_(token)
        self.position.fill_(at)
        self.deferred.clear()

    @torch.inference_mode()
    def run(self) -> None:
        """Compute the logits of `token` at `position`, and write the caches: work for the device alone."""
        observer = observed(self.model)
        self.deferred.begin(self.position, 1)
        observer.deferred = self.deferred
        try:
            with self.model.arithmetic.ranks.leaving(self.deferred.left):
                hidden = self.model.run(self.token, self.model.call(self.token, self.position), self.state)
                self.logits.copy_(self.model.logits(hidden)[0])
            self.deferred.end()
        finally:
            observer.deferred = None

    @torch.inference_mode()
    def finish(self) -> Tensor:
        """Advance the state's bookkeeping, then look at what was measured: Tripwire or RankDisagreement.

        Returns `logits`.
        """
        observer, at = observed(self.model), self.state.position
        for cache in self.caches:
            cache.advance(at)
        self.state.position += 1
        observer.stands(self.state.layers, at + 1, at, 0)
        if observer.checking:
            self.deferred.look(at)
        self.model.arithmetic.ranks.look(self.deferred.left)
        return self.logits


class Captured:
    """A step that was captured once; ``captured(token)`` replays it, and is `Step.__call__`.

    The state is as it was when this is made: warm-up runs at its position, and writes the rows of the next token alone.
    A capture runs nothing. A state that is full has no position for that: CapacityError.

    The graph holds the addresses of the model's weights, the state's caches and the step's buffers: they live as long
    as it does. The memory in which it keeps what its launches hand to each other is its own, and is not used for
    anything else.

    Parameters
    ----------
    step
        On a CUDA device.

    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph = torch.cuda.CUDAGraph()
        step.place(0)
        with torch.cuda.device(step.model.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step.run()
            torch.cuda.current_stream().wait_stream(side)
            # What other threads do meanwhile ends no capture: NCCL's looks at its events.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                step.run()

    def __call__(self, token: int) -> Tensor:
        """Run the next token; [vocab] float32 logits after it, which the next call overwrites."""
        self.step.place(token)
        self.graph.replay()
        return self.step.finish()
