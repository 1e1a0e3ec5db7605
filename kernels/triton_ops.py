"""TRITON, the op set of NVIDIA GPUs. A module of its own because it needs Triton, which not every platform has.

Rules that every `triton.py` keeps:

- Operands are upcast to fp32 as they are loaded, wherever anything but a `tl.dot` is computed from them. Triton's
  interpreter, on which the tests run, computes bf16 wrongly without a word. A dot takes its operands in the dtype that
  tensor cores take, unless `UPCAST` says that the kernel is interpreted.
- Results are rounded by `kernels.formats.triton_rounding.rounded` before they are stored: the interpreter's own
  conversion truncates.
- E8M0 scales, and E2M1 and E4M3 codes where they are taken apart, are passed as uint8 views.
- Every launch says ``enable_fp_fusion=False``: a product and a sum are rounded as the equation has them, on every
  version of Triton, whose defaults differ. Dots are not affected, nor a `tl.fma` that is written out.
- The public op checks shapes, allocates, launches, and reads no value of a tensor: nothing waits for the device, and a
  step can be captured in a CUDA graph. But of entries in a basis, whose mean is solved for once for each cache.
- Launches of a device follow each other, on one stream at a time: sums of split columns count on one set of counters.
- An argument that grows with a position, or with a call's tokens, is in `do_not_specialize` of its kernel, and no
  constant follows a position: what is 1, or a multiple of 16, would compile anew. Widths and strides of the model are
  specialised, because 16-byte loads hang on their alignment.
- No autotuning: tile sizes follow from shapes, so that a run computes the same on every machine of a kind.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import KernelInterface

from fathom.kernels import compiled
from fathom.kernels.attention import triton as attention
from fathom.kernels.compress import triton as compress
from fathom.kernels.differential import triton as differential
from fathom.kernels.experts import triton as experts
from fathom.kernels.experts import triton_expert_codes
from fathom.kernels.gate import triton as gate
from fathom.kernels.hyper import triton as hyper
from fathom.kernels.hyper import triton_streams as streams
from fathom.kernels.indexer import triton as indexer
from fathom.kernels.linear import triton as linear
from fathom.kernels.linear import triton_codes
from fathom.kernels.norm import triton as norm
from fathom.kernels.ops import CPU
from fathom.kernels.quantise import triton as activations
from fathom.kernels.shard import triton as shard
from fathom.kernels.swiglu import triton as swiglu

# What has no kernel of its own is a few passes of torch over one chunk. `kernels.ops.backend` names each.
TRITON = CPU._replace(
    name="triton",
    rms_norm=norm.rms_norm,
    rotate=activations.rotate,
    rotate_halves=activations.rotate_halves,
    norm_rotate=activations.norm_rotate,
    simulate_fp8=activations.simulate_fp8,
    simulate_fp4=activations.simulate_fp4,
    hadamard=activations.hadamard,
    round_index=activations.round_index,
    pack_fp8=activations.pack_fp8,
    unpack_fp8=activations.unpack_fp8,
    hyper_weights=hyper.hyper_weights,
    head_weights=hyper.head_weights,
    collapse=streams.collapse,
    read_streams=hyper.read_streams,
    expand=streams.expand,
    route=gate.route,
    route_weights=gate.route_weights,
    gate=gate.gate,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    linears=linear.linears,
    linears_fp8=triton_codes.linears_fp8,
    pool=compress.pool,
    store=compress.store,
    compress_at_once=compress.compress_at_once,
    select=indexer.select,
    select_fp8=indexer.select_fp8,
    attend=attention.attend,
    attend_banks=differential.attend,
    attend_codes=shard.attend,
    swiglu=swiglu.swiglu,
    experts=triton_expert_codes.experts,
    experts_fp8=triton_expert_codes.experts_fp8,
    sum_slots=experts.sum_slots,
    experts_up=triton_expert_codes.experts_up,
    experts_down=triton_expert_codes.experts_down,
)


@contextmanager
def reading(note: compiled.Reader) -> Iterator[None]:
    """`kernels.compiled.reading`, and inside the ``with`` also of all memory that launches are given."""

    def tell(*given: Any, **constants: Any) -> None:
        del constants
        compiled.note_read(*given)

    ours = [module for name, module in sys.modules.items() if name.startswith("fathom.kernels.")]
    kernels = {id(one): one for module in ours for one in vars(module).values() if isinstance(one, KernelInterface)}
    for kernel in kernels.values():
        kernel.add_pre_run_hook(tell)
    try:
        with compiled.reading(note):
            yield
    finally:
        for kernel in kernels.values():
            kernel.pre_run_hooks.remove(tell)
