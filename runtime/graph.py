"""Decode by a CUDA graph: one launch by the host for each token, instead of thousands.

A module of its own because its imports need Triton; `runtime.decoding` says which runs get here.
"""

import torch
from torch import Tensor

from model.step import DecodeStep

WARM_UPS = 3  # runs before the capture, as PyTorch advises: Triton compiles, cuBLAS and the allocator settle


class Captured:
    """A decode step that was captured once; ``captured(token)`` replays it, and is `DecodeStep.__call__`.

    The state is as it was when this is made: warm-up runs at its position, whose rows are the next token's anyway, and
    what else they change is put back (`DecodeStep.rehearsal`). A capture runs nothing. A state that is full has no
    position for that: CapacityError.

    The graph holds the addresses of the model's weights, the state's caches and the step's buffers: they live as long
    as it does. The memory in which it keeps what its launches hand to each other is its own, and is not used for
    anything else.

    Parameters
    ----------
    step
        On a CUDA device.

    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(step.model.device), step.rehearsal():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step.run()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph):
                step.run()

    def __call__(self, token: int) -> Tensor:
        """Run the next token; [vocab] float32 logits after it, which the next call overwrites."""
        self.step.place(token)
        self.graph.replay()
        return self.step.finish()
