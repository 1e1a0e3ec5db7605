"""Triton kernels run in its interpreter, here and nowhere else: it must be said before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
