"""How many numbers share a scale, in every narrow form that V4 and V4.1 are stored in or compute with."""

from typing import Final

FP8_BLOCK: Final = 128  # rows, and columns, of a weight in FP8
SMALL_FP8_BLOCK: Final = 32  # the same in V4.1
ROW_BLOCK: Final = 32  # columns of a row of V4.1's n-gram tables
FP4_BLOCK: Final = 32  # columns of a row of a weight in FP4
NVFP4_BLOCK: Final = 16  # the same in NVFP4
LINEAR_GROUP: Final = 128  # columns of a linear's input, in deployed numerics
KV_GROUP: Final = 64  # columns of the window's KV, or of an entry, before its rope dims
INDEX_GROUP: Final = 32  # columns of an index query or key
ENTRY_GROUP: Final = 16  # columns of an entry of V4.1
