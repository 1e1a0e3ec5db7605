"""The tokenizer of the demo: byte-level, every word of the language with its leading space is one token.

The model of the tokenizer is a BPE without merges and with `ignore_merges`: a piece that stands in the vocabulary is
one token, any other piece falls apart into its UTF-8 bytes. So all text can be encoded and decoding gives it back.
"""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fathom.probes.demo_language import words

BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK = range(7)
# The order gives the ids. DeepSeek's strings; bars are U+FF5C, the underscores U+2581.
SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
# Markers that the decoded answer must still show: a parser of the answer looks for them.
SHOWN = frozenset({"<think>", "</think>", "｜DSML｜"})
SIZE_STEP = 128


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as `tokenizers` uses it."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in kept}
    moved = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def spelled(text: str) -> str:
    """Text as the byte-level vocabulary writes it."""
    return "".join(byte_letters()[byte] for byte in text.encode())


@cache
def vocabulary() -> dict[str, int]:
    """Token text (as it reads, not as it is spelled) of every word and mark, and its id.

    Bytes and special tokens stand in front: ids 0 to 14 are special, 15 to 270 the bytes.
    """
    texts = [*words.STARTERS, *words.STOPS, *(" " + word for word in words.words())]
    first = len(SPECIAL) + 256
    singles = {chr(byte): len(SPECIAL) + byte for byte in range(128)}
    longer = [text for text in texts if text not in singles]
    return {text: singles[text] for text in texts if text in singles} | {t: first + i for i, t in enumerate(longer)}


def vocabulary_size() -> int:
    """Rows of the embedding: all tokens, rounded up to a multiple of 128."""
    return -(-(max(vocabulary().values()) + 1) // SIZE_STEP) * SIZE_STEP


def build_tokenizer() -> Tokenizer:
    """The tokenizer, as `tokenizer.json` holds it. It adds no BOS by itself, as DeepSeek's does not."""
    ids = {text: i for i, text in enumerate(SPECIAL)}
    ids |= {byte_letters()[byte]: len(SPECIAL) + byte for byte in range(256)}
    ids |= {spelled(text): i for text, i in vocabulary().items()}
    unused = range(max(ids.values()) + 1, vocabulary_size())
    ids |= {f"<｜place▁holder▁no▁{i}｜>": token for i, token in enumerate(unused)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL if text not in SHOWN])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPECIAL if text in SHOWN])
    return tokenizer
