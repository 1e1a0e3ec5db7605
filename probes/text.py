"""Probe `text`: the prompt that the model reads, and the token that is drawn, are what they should be.

Prompts are written out by hand after DeepSeek's published encoding tests and made into ids by the `tokenizers` library,
which finds control tokens in a text by itself. What may be drawn is computed again in float64, without torch.
"""

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import tokenizers
import torch
from torch import Tensor

from fathom.model.errors import one_line
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.probes.fault import Parts
from fathom.probes.finding import Finding, Part, Plot, Report, Table, Text, at_most, exactly, judged, vacuous
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject
from fathom.runtime.conversation import Conversation as Chat
from fathom.runtime.conversation import Format
from fathom.runtime.errors import PromptError
from fathom.runtime.generate import Generation
from fathom.runtime.sampling import Sampling
from fathom.runtime.text.messages import check_messages
from fathom.runtime.text.parsing import parse_completion
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, ANSWER, ACTION = "<think>", "</think>", "<｜action｜>"
CONTROLS = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, ANSWER, ACTION, "｜DSML｜")

OFFER = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "add", "parameters": {"type": "object"}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
CALL = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="terms" string="false">[1, 2.5]</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true">7 km</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
CALLING = {
    "role": "assistant",
    "reasoning_content": "A tool adds.",
    "content": "One moment.",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": '{"terms": [1, 2.5], "unit": "7 km"}'}}
    ],
}
COMPLETION = f"A tool adds.{ANSWER}One moment.{CALL}{EOS}"


def _says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


class Conversation(NamedTuple):
    """Messages, and the prompt that they are to become."""

    name: str
    messages: Sequence[dict[str, Any]]
    prompt: str
    thinking: bool = False
    effort: str = ""


QUESTION, TURNS = [_says("user", "Capital of France?")], [_says("system", "Be brief."), _says("user", "Hello")]
HELLO = [*TURNS, _says("assistant", "Hi there!", reasoning_content="A greeting."), *QUESTION]
CONVERSATIONS = (
    Conversation("a question", QUESTION, f"{BOS}{USER}Capital of France?{ASSISTANT}{ANSWER}"),
    Conversation("a question, thinking", QUESTION, f"{BOS}{USER}Capital of France?{ASSISTANT}{THINK}", thinking=True),
    Conversation(
        "a question, thinking with effort",
        QUESTION,
        f"{BOS}Think hard.\n\n{USER}Capital of France?{ASSISTANT}{THINK}",
        thinking=True,
        effort="Think hard.\n\n",
    ),
    Conversation(
        "system and two turns",
        HELLO,
        f"{BOS}Be brief.{USER}Hello{ASSISTANT}{ANSWER}Hi there!{EOS}{USER}Capital of France?{ASSISTANT}{ANSWER}",
    ),
    Conversation(
        "two turns, thinking",  # what was thought in the first is left out
        HELLO,
        f"{BOS}Be brief.{USER}Hello{ASSISTANT}{ANSWER}Hi there!{EOS}{USER}Capital of France?{ASSISTANT}{THINK}",
        thinking=True,
    ),
    Conversation(
        "a finished answer, thinking",
        HELLO[:-1],
        f"{BOS}Be brief.{USER}Hello{ASSISTANT}{THINK}A greeting.{ANSWER}Hi there!{EOS}",
        thinking=True,
    ),
    Conversation(
        "a tool called, thinking",
        [
            _says("system", "You can add.", tools=[{"type": "function", "function": {
                "name": "add", "parameters": {"type": "object"}}}]),
            _says("user", "1 + 2.5?"),
            CALLING,
            _says("tool", "3.5"),
        ],
        f"{BOS}You can add.{OFFER}{USER}1 + 2.5?{ASSISTANT}{THINK}{COMPLETION}"
        f"{USER}<tool_result>3.5</tool_result>{ASSISTANT}{THINK}",
        thinking=True,
    ),
    Conversation(
        "a reminder and a task",
        [_says("latest_reminder", "Saturday"), _says("user", "Hot springs", task="action")],
        f"{BOS}{REMINDER}Saturday{USER}Hot springs{ASSISTANT}{ANSWER}{ACTION}",
    ),
)  # fmt: skip

TEXTS = (
    "The capital of France is Paris.",
    " leading and trailing ",
    "two  blanks,\ttabs\n\nand \r\n lines\n",
    "x = f(1234567890) # 3.14e-10",
    "热海大滚锅是世界著名温泉吗？",
    "Ünïcödé e\u0301 ñ \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 ✅",  # one picture of several characters, and a flag
    "\x00\x1f\u200b\ufeff",
)
PLANES = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x4E00, 0x9FA5), (0x1F300, 0x1F650))  # drawn texts are of these
DRAWN_TEXTS = 60

CHANCE = 1e-9  # that a right draw breaks a bound
KEPT = 3  # tokens in the nucleus at the run's logits, by choice of the temperature
LEAST = 0.04  # mass that the last of them must have there to be drawn often
TEMPERATURES = torch.logspace(-3, 3, 61, dtype=torch.float64)
STEPS = 12  # tokens generated
CALLS = 7  # tokens of a call of the prompt: it takes several

NOT_CLAIMED = """\
That a conversation of another shape is written as DeepSeek writes it: those of its published tests and many more are
for the tests of this repository, and so are the texts that ask for reasoning effort. What is drawn is counted, so a
distribution that is off by less than chance explains in this number of draws passes. That the logits themselves are
right is what all other pages are about. On several ranks no state is saved here."""


@dataclass(frozen=True)
class TextProbe(Probe):
    """Write prompts, read them back, and draw tokens; the field is a knob."""

    name: ClassVar[str] = "text"
    question: ClassVar[str] = "Is the prompt that the model reads, and the token that is drawn, what they should be?"
    reads: ClassVar[tuple[Site, ...]] = (sites.EMBEDDED, sites.LOGITS)
    in_runtime: ClassVar[bool] = True
    background: ClassVar[str] = """\
Before the first layer a conversation has become token ids, and behind the last one logits become a token. A model is
robust to what goes wrong there, which is why it goes unnoticed: with BOS left out or there twice, `<think>` where
`</think>` is due, or a turn that nothing ends, answers are worse, and nothing fails. A text that spells a control token
and becomes one lets its author speak in another role. A nucleus that ends one token early, or is cut before the
temperature is applied, is another distribution than was asked for, and every sample of it looks fine.

A state that is saved holds every token but the last one chosen: where that is lost, or another is read in its place,
the text goes on as fluently.

So prompts are held, token by token, against what is written out by hand, in ids that the `tokenizers` library finds by
itself; texts against what they are read back as. Tokens are drawn many times from logits whose nucleus is known,
borders that are reached exactly included, and from those of the run, and counted. And the run is watched: what it
reads must be the rows that the file's embedding has for the prompt and then for each token drawn, and what it draws is
drawn from the logits that it computed. And a run that is saved half way goes on from its file with the same bits."""
    noticed: ClassVar[str] = """\
Frequencies alone are a blunt tool: a nucleus whose last token has little mass may lose it unnoticed. What shows it is
to choose the border: logits whose likeliest tokens are equal, or a temperature at which the last token of the run's own
nucleus is still drawn often."""

    draws: int = 10_000  # from each of the constructed logits, and from each row of the run's
    rows: int = 4  # of the run's logits

    def needs(self, subject: Subject) -> str | None:
        """Control tokens to write a prompt with."""
        path = subject.directory / "tokenizer.json"
        if not path.is_file():
            return "the checkpoint has no tokenizer.json"
        if lacking := [name for name in CONTROLS if name not in _File(path).controls]:
            return f"tokenizer.json has no token {', '.join(lacking)}: it writes no conversation"
        return room(subject, _context(_File(path)))

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """The prompt first, then what is drawn from given logits, then a run."""
        parts, path = subject.parts, subject.directory / "tokenizer.json"
        file, tokenizer = _File(path), parts.tokenizer(subject.directory, subject.config.vocab_size)
        findings = [
            _conversations(parts, tokenizer, file),
            _raw(parts, tokenizer, file, subject),
            _texts(tokenizer, file, subject),
            _spelled(parts, tokenizer, file),
            _read_back(tokenizer, file),
            _greedy(parts, subject.seed),
            _seeds(parts),
        ]
        progress(0.2, "a run")
        prompt = file.ids(CONVERSATIONS[0].prompt)
        greedy = _run(subject, prompt, Sampling())
        heated = Sampling(_heated(greedy.logits[0])[0], top_p=0.9, seed=subject.seed)
        drawn = _run(subject, prompt, heated)
        findings += [*_chosen(parts, greedy, drawn, heated), _read(subject, file, greedy, drawn)]
        findings.append(_ended(subject, prompt, greedy))
        findings.append(_turns(subject, tokenizer, file))
        if subject.group.size == 1:  # of several ranks one writes the file
            findings.append(_gone_on(subject, file, drawn, heated))
        cases = [*CASES, *_cases_of(drawn, self.rows)]
        findings.append(_likelihoods(parts, cases))
        counts = []
        for done, case in enumerate(cases):
            progress(0.3 + 0.7 * done / len(cases), f"draws, {case.name}")
            count = _counts_again if done < len(CASES) else _counts
            counts.append(count(parts.sample, case, self.draws, subject.seed))
        findings += _judged_draws(cases, counts)
        if len(cases) == len(CASES):
            findings.append(vacuous("draws at the run's logits", f"no row has {KEPT} tokens that are likely enough"))
        failed = [finding.what for finding in findings if finding.failed]
        summary = (
            f"Checked: the token ids of {len(CONVERSATIONS)} conversations and {len(TEXTS) + DRAWN_TEXTS} texts,"
            f" {self.draws} sampled tokens from each of {len(cases)} distributions, and {2 * STEPS} generated tokens. "
            + (f"Wrong: {'; '.join(failed)}" if failed else "All are right")
            + "."
        )
        return Report(summary, tuple(findings), _parts(cases, counts), NOT_CLAIMED)


# --- prompts


class _File:
    """A tokenizer.json, read by json and by the library alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = json.loads(path.read_text(encoding="utf-8"))
        self.controls = {token["content"]: token["id"] for token in fields["added_tokens"]}
        vocabulary = {id_: token for token, id_ in fields["model"]["vocab"].items()}
        self.names = vocabulary | {id_: name for name, id_ in self.controls.items()}

    @cached_property
    def library(self) -> tokenizers.Tokenizer:
        """Finds every control token that a text spells."""
        return tokenizers.Tokenizer.from_file(str(self.path))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, control tokens by name among them."""
        return list(self.library.encode(text, add_special_tokens=False).ids)

    def name(self, id_: int | None) -> str:
        """A token as messages tell it; None is the end."""
        return "the end" if id_ is None else one_line(self.names.get(id_, f"id {id_}"))


def _first_apart(name: str, ids: Sequence[int], due: Sequence[int], file: _File) -> str | None:
    """Where two sequences first differ, in words; None where nowhere."""
    for place, (one, other) in enumerate(zip_longest(ids, due)):
        if one != other:
            return f"{name}, token {place}: {file.name(one)} where {file.name(other)} is due"
    return None


def _counted(what: str, of: int, wrong: Sequence[str]) -> Finding:
    """None of so many may be wrong; the first that is, is named."""
    told = f", first {wrong[0]}" if wrong else ""
    return judged(f"{what}, of {of}{told}", len(wrong), exactly(0), wrong=list(wrong[:8]))


def _conversations(parts: Parts, tokenizer: Tokenizer, file: _File) -> Finding:
    wrong = []
    for one in CONVERSATIONS:
        messages = check_messages(list(one.messages))
        ids = tokenizer.encode(parts.encode_messages(messages, thinking=one.thinking, effort=one.effort))
        wrong.append(_first_apart(one.name, ids, file.ids(one.prompt), file))
    return _counted("conversations encoded otherwise than written", len(wrong), [place for place in wrong if place])


def _raw(parts: Parts, tokenizer: Tokenizer, file: _File, subject: Subject) -> Finding:
    """Raw text is BOS, then the text and nothing else."""
    wrong = []
    for text in TEXTS:
        ids = tokenizer.encode(parts.raw_text(text, subject.config, tokenizer))
        wrong.append(_first_apart(ascii(text[:20]), ids, [file.controls[BOS], *file.ids(text)], file))
    return _counted("raw prompts encoded otherwise than written", len(wrong), [place for place in wrong if place])


def _texts(tokenizer: Tokenizer, file: _File, subject: Subject) -> Finding:
    """A text's ids are the library's, and are read back as the text, whole and as they come one by one."""
    draw = random.Random(f"text {subject.seed}")  # noqa: S311 -- texts, not secrets
    characters = [chr(code) for low, high in PLANES for code in range(low, high)]
    drawn = ["".join(draw.choices(characters, k=draw.randrange(1, 40))) for _ in range(DRAWN_TEXTS)]
    every = [*TEXTS, *drawn, *([] if subject.prompt is None else [subject.prompt])]
    wrong = []
    for text in every:
        ids, due = tokenizer.encode_text(text), file.ids(text)
        stream = StreamDecoder(tokenizer)
        streamed = "".join(map(stream.push, ids)) + stream.finish()
        if place := _first_apart(ascii(text[:20]), ids, due, file):
            wrong.append(place)
        elif not text == tokenizer.decode(ids) == streamed:
            wrong.append(f"{text[:20]!a}: read back as {tokenizer.decode(ids)[:40]!a}")
    return _counted("texts encoded, or read back, otherwise than they are", len(every), wrong)


def _spelled(parts: Parts, tokenizer: Tokenizer, file: _File) -> Finding:
    """A person's text stays text, whichever control token it spells."""
    texts = [*file.controls, *(f"a {name} b" for name in file.controls), "".join(file.controls)]
    wrong = []
    for text in texts:
        segments = parts.encode_messages(check_messages([_says("user", text)]), thinking=False)
        ids = tokenizer.encode(segments)
        found = [id_ for id_ in ids if id_ in file.controls.values()]
        due = [file.controls[name] for name in (BOS, USER, ASSISTANT, ANSWER)]
        place = _first_apart(f"control tokens of {text!a}", found, due, file)
        if place is None and tokenizer.decode_segments(ids) != segments:
            place = f"{text!a}: read back as another prompt"
        wrong.append(place)
    return _counted("texts that spell a control token and become one", len(texts), [place for place in wrong if place])


def _read_back(tokenizer: Tokenizer, file: _File) -> Finding:
    """What a model writes to call a tool is read as the message that it is."""
    try:
        found = parse_completion(tokenizer.decode_segments(file.ids(COMPLETION)), thinking=True)
        wrong = [f"{field}: {found.get(field)!a}" for field, due in CALLING.items() if found.get(field) != due]
    except PromptError as error:
        wrong = [str(error)]
    return _counted("fields of a completion that calls a tool, read back otherwise", len(CALLING), wrong)


# --- what is drawn


class Case(NamedTuple):
    """Logits, and how a token is drawn from them."""

    name: str
    logits: Tensor  # [vocab]
    temperature: float
    top_p: float


def _case(name: str, logits: Sequence[float], temperature: float, top_p: float) -> Case:
    """Logits at ids in no order: id 0 is not the likeliest."""
    ids = random.Random(len(logits)).sample(range(len(logits)), len(logits))  # noqa: S311
    return Case(name, torch.tensor(logits, dtype=torch.float32)[torch.tensor(ids)], temperature, top_p)


LADDER = [-0.5 * n for n in range(8)]
CASES = (  # of eight equal tokens each has a mass of 1/8, and four of them 1/2, without any rounding
    _case("equal, p reached exactly", [0.0] * 8, 1.0, 0.5),
    _case("equal, p just beyond", [0.0] * 8, 1.0, 0.5 + 2**-20),
    _case("equal, p just below", [0.0] * 8, 1.0, 0.5 - 2**-20),
    _case("equal, the least p", [0.0] * 8, 1.0, 1e-9),
    _case("one dominates", [9.0, *[0.0] * 7], 1.0, 0.99),
    _case("a tie at the border", [math.log(2), *[0.0] * 3, *[-9.0] * 4], 1.0, 0.5),
    _case("p = 1", LADDER, 1.0, 1.0),
    _case("hot", LADDER, 2.0, 0.8),
    _case("cold", LADDER, 0.5, 0.8),
)


def _likeliest(logits: Sequence[float]) -> list[int]:
    """All ids, the likeliest first, of equal ones the lower."""
    return sorted(range(len(logits)), key=lambda id_: (-logits[id_], id_))


def nucleus(case: Case) -> dict[int, float]:
    """What may be drawn: id to probability, in float64.

    The smallest set of most likely tokens whose mass reaches `top_p`, of equal ones the lower id first.
    """
    logits = case.logits.tolist()
    order = _likeliest(logits)
    mass = [math.exp((logits[id_] - logits[order[0]]) / case.temperature) for id_ in order]
    whole = math.fsum(mass)
    enough = (n for n, part in enumerate(accumulate(mass), 1) if part >= case.top_p * whole)
    count = len(order) if case.top_p == 1 else next(enough, len(order))
    kept = math.fsum(mass[:count])
    return {id_: part / kept for id_, part in zip(order[:count], mass[:count], strict=True)}


Sample = Callable[[Tensor, Sampling, torch.Generator], int]


def _counts(sample: Sample, case: Case, draws: int, seed: int) -> Counter[int]:
    sampling = Sampling(case.temperature, case.top_p, seed)
    generator = sampling.generator()
    return Counter(sample(case.logits, sampling, generator) for _ in range(draws))


# A fault elsewhere does not change them: the matrix of faults asks for the same counts again and again.
_counts_again = lru_cache(maxsize=len(CASES))(_counts)


def spread(mass: float, draws: int, tokens: int) -> float:
    """How far a count may be from ``draws * mass`` for one of so many tokens.

    Bernstein's inequality for a sum of `draws` independent draws of variance m (1 - m): it is beyond
    ``sqrt(2 n m (1 - m) x) + x / 3`` with a chance of at most ``2 exp(-x)``. With ``x = log(2 tokens / CHANCE)`` the
    chance that any token of a case is beyond is at most `CHANCE`, for any number of draws.
    """
    x = math.log(2 * tokens / CHANCE)
    return math.sqrt(2 * draws * mass * max(0.0, 1 - mass) * x) + x / 3


def _judged_draws(cases: Sequence[Case], counts: Sequence[Counter[int]]) -> Iterator[Finding]:
    """Nothing outside of the nucleus is drawn, all in it that must be is, and each as often as it should."""
    wrong, worst = [], (0.0, "")
    for case, count in zip(cases, counts, strict=True):
        due, draws = nucleus(case), count.total()
        beyond = sorted(set(count) - set(due))
        # one in it is not drawn at all with a chance of (1 - m)^n <= exp(-n m)
        never = [id_ for id_, mass in due.items() if not count[id_] and draws * mass > math.log(len(due) / CHANCE)]
        wrong += [f"{case.name}: id {id_} is drawn, and not in the nucleus of {len(due)}" for id_ in beyond]
        wrong += [f"{case.name}: id {id_} is in the nucleus of {len(due)}, and never drawn" for id_ in never]
        for id_, mass in due.items():
            off = abs(count[id_] - draws * mass) / spread(mass, draws, len(due))
            worst = max(worst, (off, f"{case.name}, id {id_}"))
    of = sum(len(case.logits) for case in cases)
    yield _counted("tokens in the nucleus but never drawn, or drawn but not in it", of, wrong)
    beyond_chance = f", at {worst[1]}" if worst[0] > 1 else ""
    what = f"times drawn, off what the probability says, over what chance explains{beyond_chance}"
    yield judged(what, worst[0], at_most(1), at=worst[1])


def _likelihoods(parts: Parts, cases: Sequence[Case]) -> Finding:
    """Log-probabilities of a token and of the likeliest, before temperature and top-p, beside float64 without torch.

    A sum of n exponentials and its logarithm are off by at most (n + 8) roundings of 2^-53 where the largest of them
    is 1, a logit less the largest by one of its own size.
    """
    worst = (0.0, "")
    for case in cases:
        logits = case.logits.tolist()
        order = _likeliest(logits)
        whole = logits[order[0]] + math.log(math.fsum(math.exp(x - logits[order[0]]) for x in logits))
        bound = (len(logits) + 8 + 4 * max(map(abs, logits))) * 2**-53
        asked, count = order[len(order) // 2], min(KEPT, len(logits))
        found = parts.likelihood(case.logits, asked, count)
        told = [(found.token, found.logprob), *found.top]
        for (id_, logprob), due in zip_longest(told, [asked, *order[:count]], fillvalue=(-1, math.inf)):
            off = abs(logprob - (logits[id_] - whole)) / bound if id_ == due else math.inf
            worst = max(worst, (off, f"{case.name}, id {id_}"))
    at = f", at {worst[1]}" if worst[0] > 1 else ""
    what = f"log-probabilities told of tokens, off float64 over what rounding explains{at}"
    return judged(what, worst[0], at_most(1), at=worst[1])


def _greedy(parts: Parts, seed: int) -> Finding:
    """Without temperature it is the first of the largest."""
    draw = torch.Generator().manual_seed(seed)
    rows = list(torch.randint(-9, 9, (200, 40), generator=draw).float())  # with ties in most of them
    rows += [torch.zeros(5), torch.tensor([-0.0, 0.0]), torch.tensor([0.0, -0.0]), torch.tensor([-3e38, 3e38, 3e38])]
    wrong, ties = [], 0
    for place, row in enumerate(rows):
        values = row.tolist()
        due, taken = values.index(max(values)), parts.sample(row, Sampling(), draw)
        ties += values.count(max(values)) > 1
        if taken != due:
            wrong.append(f"row {place}: id {taken} where {due} is due, of {values.count(max(values))} equal")
    assert ties > len(rows) // 2, "most rows are to have a tie"
    return _counted("greedy choices that are not the first of the largest", len(rows), wrong)


def _seeds(parts: Parts) -> Finding:
    """A seed gives the same draws again, and another one others: of 8 equal tokens, 64 times."""
    one, again, other = (
        [parts.sample(torch.zeros(8), sampling, generator) for _ in range(64)]
        for sampling, generator in ((given, given.generator()) for given in (Sampling(1.0, seed=s) for s in (1, 1, 2)))
    )
    wrong = [] if one == again else ["one seed, twice: other tokens"]
    wrong += [] if one != other else ["two seeds: the same tokens"]
    return _counted("seeds that do not decide what is drawn", 2, wrong)


# --- a run


class Ran(NamedTuple):
    """What `generate` did."""

    prompt: list[int]
    tokens: list[int]  # chosen
    given: list[int]  # yielded
    ended: str
    position: int  # of the state at the end
    logits: Tensor  # [n, vocab], one row for each choice
    embedded: Tensor  # [t, hidden], of all that was read
    pending: int | None  # chosen and not read


def _run(
    subject: Subject,
    prompt: list[int],
    sampling: Sampling,
    eos: Collection[int] = (),
    state: State | None = None,
    limit: int = STEPS,
) -> Ran:
    """Generate up to `limit` tokens, in a new state or one that goes on."""
    model, record = subject.model, Generation()
    state = state or _new_state(subject, prompt)
    logits: list[Tensor] = []
    embedded: list[Tensor] = []
    with listening(
        model,
        {
            sites.LOGITS: lambda _, x: logits.append(x.detach().cpu().clone()),
            sites.EMBEDDED: lambda _, x: embedded.append(x.detach().cpu().clone()),
        },
    ):
        given = list(
            subject.parts.generate(
                model, state, prompt, eos=eos, limit=limit, sampling=sampling, progress=lambda _: None, record=record
            )
        )
    rows = torch.cat(logits), torch.cat(embedded)
    return Ran(prompt, record.tokens, given, record.ended, state.position, *rows, record.pending)


def _new_state(subject: Subject, prompt: Sequence[int]) -> State:
    return subject.model.new_state(len(prompt) + STEPS, CALLS)


def _chosen(parts: Parts, greedy: Ran, drawn: Ran, sampling: Sampling) -> Iterator[Finding]:
    """Each token is chosen from the logits of its place: the first of the largest, or one of the nucleus."""
    wrong = [
        f"token {place}: id {token}"
        for place, (token, row) in enumerate(zip(greedy.tokens, greedy.logits.tolist(), strict=True))
        if token != row.index(max(row))
    ]
    yield _counted("generated greedily: tokens that are not the first of the largest logits", STEPS, wrong)
    generator = sampling.generator()
    wrong = []
    for place, (token, row) in enumerate(zip(drawn.tokens, drawn.logits, strict=True)):
        if token not in nucleus(Case("", row, sampling.temperature, sampling.top_p)):
            wrong.append(f"token {place}: id {token} is not in the nucleus")
        elif token != (due := parts.sample(row, sampling, generator)):
            wrong.append(f"token {place}: id {token} where {due} is drawn next with this seed")
    yield _counted(
        "generated with a temperature: tokens drawn otherwise than the logits and the seed say", STEPS, wrong
    )


def _read(subject: Subject, file: _File, *runs: Ran) -> Finding:
    """What was read is the prompt, and then every token chosen but the last: rows of the file's embedding."""
    embedding = subject.file_weights.vector("embed.weight").cpu()
    wrong, of = [], 0
    for ran in runs:
        due = [*ran.prompt, *ran.tokens[:-1]]
        rows = embedding[torch.tensor(due)].to(ran.embedded.dtype)
        of += len(due)
        apart = next(
            (n for n, (one, other) in enumerate(zip(ran.embedded, rows, strict=False)) if not torch.equal(one, other)),
            min(len(ran.embedded), len(rows)),
        )
        if (len(ran.embedded), ran.position) != (len(due), len(due)) or apart < len(due):
            token = file.name(due[apart]) if apart < len(due) else "the end"
            wrong.append(f"position {apart}: another token than {token} is read, {len(ran.embedded)} in all")
    return _counted("runs that read another sequence than the prompt and what was drawn", len(runs), wrong)


def _context(file: _File) -> int:
    """Positions of a conversation of two messages; every character of an answer may be a token."""
    return 2 * (len(file.ids(CONVERSATIONS[0].prompt)) + 4 * STEPS)


def _turns(subject: Subject, tokenizer: Tokenizer, file: _File) -> Finding:
    """A second message is read behind the first and its answer, as written.

    What is read again reaches back to where that differs from what was read before.
    """
    embedding, wrong = subject.file_weights.vector("embed.weight").cpu(), []
    question, follows = "Capital of France?", "Hello"
    for name, asks in (("chat", ANSWER), ("thinking", THINK)):
        conversation = subject.parts.conversation(
            subject.load(subject.options), subject.options, tokenizer, Format(thinking=asks == THINK), _context(file)
        )
        prompt, before = f"{BOS}{USER}{question}{ASSISTANT}", list[int]()
        for message in (question, follows):
            read, chosen = _replied(subject, conversation, message)
            due = [*file.ids(prompt + asks), *chosen[:-1]]
            known = next((n for n, (a, b) in enumerate(zip_longest(before, due)) if a != b), len(due))
            wanted = embedding[torch.tensor(due[-len(read) :])].to(read.dtype)
            if len(due) - len(read) > known or not torch.equal(read, wanted):
                wrong.append(f"{name}, message {message!r}: another sequence than {prompt + asks!a} and its answer")
                break
            before = due
            said = file.library.decode(chosen, skip_special_tokens=False).removesuffix(EOS)
            answer = said if asks == ANSWER else said.partition(ANSWER)[2]
            prompt += f"{ANSWER}{answer}{EOS}{USER}{follows}{ASSISTANT}"
    return _counted("conversations of two messages that are read otherwise than written", 2, wrong)


def _replied(subject: Subject, conversation: Chat, message: str) -> tuple[Tensor, list[int]]:
    """Rows that were embedded for a reply [t, hidden], and the tokens chosen."""
    rows, record = list[Tensor](), Generation()
    with listening(subject.model, {sites.EMBEDDED: lambda _, x: rows.append(x.detach().cpu())}):
        tuple(conversation.reply(message, sampling=Sampling(), record=record, limit=STEPS).tokens)
    return torch.cat(rows), record.tokens


def _ended(subject: Subject, prompt: list[int], greedy: Ran) -> Finding:
    """A run ends at EOS, which it does not give away; here a token that is known to come stands for EOS."""
    eos = greedy.tokens[-1]
    first = greedy.tokens.index(eos)
    ran = _run(subject, prompt, Sampling(), (eos,))
    due = {"given": greedy.tokens[:first], "tokens": greedy.tokens[: first + 1], "ended": "eos"}
    wrong = [f"{field} is {getattr(ran, field)}, not {value}" for field, value in due.items()
             if getattr(ran, field) != value]  # fmt: skip
    return _counted("facts of a run that EOS is to end, otherwise", len(due), wrong)


def _gone_on(subject: Subject, file: _File, drawn: Ran, sampling: Sampling) -> Finding:
    """A run that stops and is saved reads, where it goes on from the file, the token it chose last, to the same logits.

    It stops where that is neither the likeliest token nor the one before again, so that these are told from it.
    """
    what, best = "runs that go on from a saved state with another token or logits", drawn.logits.argmax(1).tolist()
    stops = [n for n in range(2, STEPS) if drawn.tokens[n - 1] not in (best[n - 1], drawn.tokens[n - 2])]
    if not stops:
        return vacuous(what, f"of {STEPS} tokens drawn each is the likeliest one, or the one before it again")
    parts, loaded, due = subject.parts, subject.load(), drawn.tokens[stops[0] - 1]
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder) / "drawn.state", _new_state(subject, drawn.prompt)
        begun = _run(subject, drawn.prompt, sampling, state=state, limit=stops[0])
        parts.save_state(path, state, loaded, begun.pending)
        state = _new_state(subject, drawn.prompt)
        pending = parts.load_state(path, state, loaded)
    if pending != due:
        read = "nothing" if pending is None else file.name(pending)
        wrong = [f"behind {stops[0]} tokens: {read} is to be read where {file.name(due)} is due"]
    else:
        model = loaded.model
        gone_on = model.logits(model(torch.tensor([pending], device=model.device), state))[0].cpu()
        same = torch.equal(gone_on, drawn.logits[stops[0]])
        wrong = [] if same else [f"behind {stops[0]} tokens: other logits than without the file"]
    return _counted(what, 1, wrong)


def _heated(row: Tensor) -> tuple[float, Tensor]:
    """The temperature at which the `KEPT`-th likeliest token has most of the mass, and the likeliest tokens' masses."""
    best = row.double().sort(descending=True).values
    masses = ((best - best[0]) / TEMPERATURES[:, None]).softmax(1)[:, :KEPT]  # [temperatures, KEPT]
    hottest = int(masses[:, -1].argmax())
    return float(TEMPERATURES[hottest]), masses[hottest]


def _cases_of(ran: Ran, count: int) -> list[Case]:
    """Rows of the run's logits whose nucleus ends in the middle of a likely token: those where it is likeliest."""
    found = []
    for place, row in enumerate(ran.logits):
        temperature, masses = _heated(row)
        if float(masses[-1]) >= LEAST:
            top_p = float(masses[:-1].sum() + masses[-1] / 2)
            found.append((float(masses[-1]), Case(f"token {place} of the run", row, temperature, top_p)))
    return [case for _, case in sorted(found, key=lambda one: -one[0])[:count]]


def _parts(cases: Sequence[Case], counts: Sequence[Counter[int]]) -> tuple[Part, ...]:
    prompts = "\n\n".join(f"**{one.name}**\n\n```\n{one.prompt}\n```" for one in CONVERSATIONS)
    rows: list[list[float | str | None]] = []
    for case, count in zip(cases, counts, strict=True):
        due, draws = nucleus(case), count.total()
        worst = max(abs(count[id_] - draws * mass) / spread(mass, draws, len(due)) for id_, mass in due.items())
        rows.append([case.name, case.temperature, case.top_p, len(due), len(count), worst])
    columns = ("logits", "temperature", "top-p", "tokens in the nucleus", "tokens drawn", "of what chance explains")
    note = (
        f"How often a token is drawn of {counts[0].total()} times, off its probability in float64 times that: the"
        " token that is farthest, over the distance that Bernstein's inequality allows with a chance of"
        f" {CHANCE:g} in all of a case."
    )
    last = nucleus(cases[-1])
    shown: dict[str, Sequence[tuple[float, float]]] = {
        "float64": [(float(n), mass) for n, mass in enumerate(last.values(), 1)],
        "drawn": [(float(n), counts[-1][id_] / counts[-1].total()) for n, id_ in enumerate(last, 1)],
    }
    return (
        Table("Draws", columns, rows, note),
        Plot(f"Probability and share of the draws, {cases[-1].name}", "token, the likeliest first", "share", shown),
        Text("Prompts as they should be", prompts),
    )


FULL = TextProbe()
QUICK = TextProbe(draws=4_000, rows=2)
