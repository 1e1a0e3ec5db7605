"""tokenizer.json files in the forms that are published for the models that run here, with tiny vocabularies.

None is a published file: the vocabulary is trained on a few lines, what is around it is written as in the files that
are named below.
"""

import copy
import json
import string
from functools import cache

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
CORPUS = [
    "the capital of France is Paris",
    "你好，世界",
    "def f(x): return x * x  # naïve",
    "<think about it> </thinking> [INST what is 1 2 3 + 4567",
] * 4
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

# The regex of Llama 3, and the three of DeepSeek-V3 and V4.
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_AND_MARKS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_WORDS = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _WORDS_AND_MARKS]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL_PROCESSOR = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}

PIECES_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
LLAMA_2_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def added(id_, content, *, special=True, normalized=False):
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": id_, "content": content, **flags, "normalized": normalized, "special": special}


def template(name, id_):
    """A post_processor that puts one token before a text, as all of these files have it."""
    token, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{part: {**of, "type_id": 1} for part, of in piece.items()} for piece in (token, text)]
    second[1]["Sequence"]["id"] = "B"
    return {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, *second],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@cache
def _trained(first, alphabet, splitter, **limits):
    """The model field of a BPE trained on the corpus; `first` are its first tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(first),
        initial_alphabet=list(alphabet),
        show_progress=False,
        **limits,
    )
    made.train_from_iterator(CORPUS, trainer)
    return json.loads(made.to_str())["model"]


def _byte_level(first=()):
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return copy.deepcopy(_trained(tuple(first), tuple(sorted(pre_tokenizers.ByteLevel.alphabet())), splitter))


def _file(model, added_tokens, normalizer, pre_tokenizer, post_processor, decoder):
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


def deepseek():
    """DeepSeek-V3 and V4: no template, turns and thinking are tokens that are not special."""
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    model = _byte_level(names)
    turns = enumerate(["<｜User｜>", "<｜Assistant｜>", "<think>"], len(model["vocab"]))
    splitter = {"type": "Sequence", "pretokenizers": [*map(split, DEEPSEEK_WORDS), BYTE_LEVEL]}
    tokens = [added(i, name) for i, name in enumerate(names)] + [added(i, name, special=False) for i, name in turns]
    nothing = {"type": "Sequence", "normalizers": []}
    del model["ignore_merges"]
    return _file(model, tokens, nothing, splitter, BYTE_LEVEL_PROCESSOR, BYTE_LEVEL_DECODER)


def llama_3():
    """Llama 3: a word that is a token is that token, whatever the merges say; the template comes in a Sequence."""
    model = _byte_level() | {"ignore_merges": True}
    model["vocab"]["ĠParisian"] = len(model["vocab"])  # a token that no merges lead to
    first = len(model["vocab"])
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokens = [added(first + i, name) for i, name in enumerate(names)]
    splitter = {"type": "Sequence", "pretokenizers": [split(LLAMA_3_WORDS), BYTE_LEVEL]}
    processors = {"type": "Sequence", "processors": [BYTE_LEVEL_PROCESSOR, template(names[0], first)]}
    return _file(model, tokens, None, splitter, processors, BYTE_LEVEL_DECODER)


def smollm():
    """SmolLM: GPT-2's words, and every digit alone."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    model = _byte_level(names)
    model["merges"] = [" ".join(pair) for pair in model["merges"]]  # as older versions of the library write them
    digits = {"type": "Digits", "individual_digits": True}
    splitter = {"type": "Sequence", "pretokenizers": [digits, BYTE_LEVEL | {"use_regex": True}]}
    tokens = [added(i, name) for i, name in enumerate(names)]
    return _file(model, tokens, None, splitter, None, BYTE_LEVEL_DECODER)


def _pieces(controls):
    """A model as converted from SentencePiece: control tokens, 256 byte tokens, pieces."""
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    letters = ("▁", *string.ascii_letters, *"<>/[]?+.,好")
    model = copy.deepcopy(_trained((*controls, *BYTE_TOKENS), letters, words, limit_alphabet=len(letters)))
    return model | {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}


def llama_2():
    """Llama 2, Mistral 0.1 and 0.2: a normalizer marks words, the control tokens are in the vocabulary too."""
    names = ["<unk>", "<s>", "</s>"]
    tokens = [added(i, name) for i, name in enumerate(names)]
    return _file(_pieces(names), tokens, LLAMA_2_NORMALIZER, None, template("<s>", 1), PIECES_DECODER)


def mistral():
    """Mistral 0.3, and Llama 2 as exported later: a pre_tokenizer marks the first word; instructions are tokens."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokens = [added(i, name) for i, name in enumerate(names)]
    return _file(_pieces(names), tokens, None, METASPACE, template("<s>", 1), PIECES_DECODER)


def bare():
    """Llama 2 as converted with `add_prefix_space` false: no word is marked as the first."""
    fields = llama_2()
    fields["normalizer"] = {"type": "Sequence", "normalizers": LLAMA_2_NORMALIZER["normalizers"][1:]}
    fields["decoder"] = {"type": "Sequence", "decoders": PIECES_DECODER["decoders"][:-1]}
    return fields


BYTE_LEVEL_FORMS = {"DeepSeek": deepseek, "Llama 3": llama_3, "SmolLM": smollm}
PIECES_FORMS = {"Llama 2": llama_2, "Mistral": mistral}
FORMS = BYTE_LEVEL_FORMS | PIECES_FORMS


def write(fields, directory):
    """The folder, with the file in it."""
    (directory / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory
