"""The choices that a run has, by the names that its flags take; a command line is read before torch is imported."""

NUMERICS = DEPLOYED, PLAIN = ("deployed", "plain")  # names of two roundings, see `model.rounding`
DTYPES = ("bf16", "fp32")  # of activations and caches
RECORDED_DTYPES = ("bf16", "fp16", "fp32")  # of a run of any runtime
ENTRY_FORMATS = ("dtype", "fp8")  # of compressed entries, see `model.cache.formats`
KEY_FORMATS = ("dtype", "fp8", "fp4")  # of index keys
INDEX_SCORES = EXACT, FP8_SCORES = ("exact", "fp8")  # products of index queries and keys
ALL, OWN, AUTO = "all", "own", "auto"
FP8_PRODUCTS = _, _, OF_CODES = (AUTO, EXACT, "fp8")  # of FP8 weights, see `kernels.linear.triton_codes`
EXPERTS = _, WHOLE, ROWS = (AUTO, "whole", "rows")  # how routed experts lie on ranks, see `model.ranks.experts`
RANK_TOKENS = (AUTO, ALL, OWN)  # which of a call's tokens a rank has between attentions, see `model.ranks.ranks`
DRAFTS = OFF, LOOKUP, MTP, DSPARK, _ = ("off", "lookup", "mtp", "dspark", AUTO)  # what drafts tokens
CODED_BITS = (8, 4)  # of a number of a bounded cache, in a saved state, see `runtime.quantised_state`
SHARD_BITS = (2, 3, 4, 6, 8)  # of a number that is coded, those for which there is a packing
OP_SETS = ("reference", "cpu", "triton")  # see `kernels.ops`
