"""Triton: what runs on NVIDIA GPUs. Same names and signatures as `kernels.reference`.

Rules that every file keeps:

- Operands are upcast to fp32 as they are loaded, wherever anything but a `tl.dot` is computed from them. Triton's
  interpreter, on which the tests run, computes bf16 wrongly without a word. A dot takes its operands in the dtype that
  tensor cores take, unless `UPCAST` says that the kernel is interpreted.
- Results are rounded by `rounding.rounded` before they are stored: the interpreter's own conversion truncates.
- E8M0 scales, and E2M1 and E4M3 codes where they are taken apart, are passed as uint8 views.
- Every launch says ``enable_fp_fusion=False``: a product and a sum are rounded as the equation has them, on every
  version of Triton, whose defaults differ. Dots are not affected.
- The public op checks shapes, allocates, launches, and reads no value of a tensor: nothing waits for the device, and a
  step can be captured in a CUDA graph.
- No autotuning: tile sizes follow from shapes, so that a run computes the same on every machine of a kind.
"""
