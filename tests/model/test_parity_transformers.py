"""Plain fp32 logits against transformers' DeepseekV4ForCausalLM, through the files that `save_pretrained` writes."""

import pytest
import torch

from tests.transformers_model import load_ours, oracle, our_logits, their_logits

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 130, 257, 600)
CHUNKS = (1, 3, 4, 127, 128, 129, 512)
# (compress ratios, hc_mult, top-k): 600 tokens make 150 CSA entries, so 8 selects and 256 never does
MODELS = {
    "flash": ((0, 0, 4, 128, 4), 4, 8),
    "pro, no SWA layer": ((128, 128, 4, 128, 4), 4, 16),
    "two streams": ((0, 4, 128), 2, 8),
    "all entries selected": ((4, 128, 4), 4, 256),
    "SWA alone": ((0, 0), 4, 8),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def pair(request, tmp_path_factory):
    ratios, hc_mult, index_topk = MODELS[request.param]
    theirs = oracle(ratios, hc_mult=hc_mult, index_topk=index_topk, seed=sum(ratios) + hc_mult)
    directory = tmp_path_factory.mktemp("saved")
    theirs.save_pretrained(directory)
    return theirs, load_ours(directory)


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_all_positions(pair, length):
    theirs, ours = pair
    tokens = tokens_of(length)
    expected = their_logits(theirs, tokens)
    assert 0.3 < expected.std() < 3, "the bound below is meant for logits of unit scale"
    assert (our_logits(ours, tokens) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("length", [5, 257])
def test_the_same_32_greedy_tokens(pair, length):
    theirs, ours = pair
    prompt = tokens_of(length)
    expected = theirs.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=32,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, length:].tolist()
    state = ours.new_state(length + 32, 64)  # short calls, so that the SWA ring of 191 wraps
    hidden, chosen = [ours(part, state) for part in prompt.split(64)][-1], []
    for _ in range(32):
        chosen.append(int(ours.logits(hidden[-1:]).argmax()))
        hidden = ours(torch.tensor(chosen[-1:]), state)
    assert chosen == expected


@pytest.mark.slow
def test_report(pair, request):
    """Print the rows of audits/plain-parity.md: `python -m pytest tests/model -m slow -s -k report`."""
    theirs, ours = pair
    worst = [(our_logits(ours, t) - their_logits(theirs, t)).abs().max().item() for t in map(tokens_of, LENGTHS)]
    tokens = tokens_of(600)
    whole = our_logits(ours, tokens)
    splits = [
        (our_logits(ours, tokens, [len(part) for part in tokens.split(chunk)]) - whole).abs().max().item()
        for chunk in CHUNKS
    ]
    name = request.node.callspec.id
    print(f"\n| {name} | parity | " + " | ".join(f"{x:.1e}" for x in worst) + " |")
    print(f"| {name} | chunks | " + " | ".join(f"{x:.1e}" for x in splits) + " |")
    assert max(worst) < 1e-3
    assert max(splits) < 2e-5
