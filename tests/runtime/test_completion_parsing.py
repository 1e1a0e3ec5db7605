"""Completion to message: the inverse of what an assistant turn says, and refusals of everything else."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import V4_TAGS, V41_TAGS
from fathom.runtime.text.encoding import encode_messages
from fathom.runtime.text.messages import check_messages, load_messages
from fathom.runtime.text.parsing import parse_completion
from fathom.runtime.text.segments import (
    ASSISTANT,
    CONTROLS,
    EOS,
    TASKS,
    THINK_END,
    THINK_START,
    Text,
    merge,
    render,
    split_controls,
)

OWN = Path(__file__).parent / "data" / "encoding"
PUBLISHED = OWN / "deepseek"

PARAMETER = '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'
INVOKE = f'<｜DSML｜invoke name="f">\n{PARAMETER}</｜DSML｜invoke>\n'
CALL = f"\n\n<｜DSML｜tool_calls>\n{INVOKE}</｜DSML｜tool_calls><｜end▁of▁sentence｜>"


def completions(segments):
    """What the model wrote in a conversation: after each `<think>` or `</think>` that opens an answer, through EOS."""
    for i, (before, opening) in enumerate(pairwise(segments)):
        plain = i + 2 < len(segments) and segments[i + 2] not in TASKS.values()
        if before == ASSISTANT and plain:
            yield opening, segments[i + 2 : segments.index(EOS, i) + 1]


def parsed(text, *, thinking=False):
    return parse_completion(split_controls(text), thinking=thinking)


def said(message):
    """The parts of an assistant message that a completion carries, arguments as values."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    return message.get("reasoning_content", ""), message.get("content", ""), calls


def conversation(message):
    tools = [{"function": {"name": "f"}}]
    return [{"role": "system", "content": "", "tools": tools}, {"role": "user", "content": "Q"}, message]


TEXTS = st.text() | st.lists(st.sampled_from([*(c.name for c in CONTROLS), "<", "</", ">\n", '"', "x"])).map("".join)
NAMES = TEXTS.map(lambda text: text.replace('"', "'"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(NAMES.filter(bool), st.dictionaries(NAMES, VALUES, max_size=3))


@settings(deadline=None)
@given(reasoning=TEXTS, content=TEXTS, calls=st.lists(CALLS, max_size=3), thinking=st.booleans(), v41=st.booleans())
def test_an_assistant_turn_comes_back_whole(reasoning, content, calls, thinking, v41):
    tool_calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    message = {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": tool_calls}
    prompt = encode_messages(check_messages(conversation(message)), thinking=thinking, v41=v41)
    ((opening, completion),) = completions(prompt)
    assert opening == (THINK_START if thinking else THINK_END)
    answer = parse_completion(completion, thinking=thinking, tags=V41_TAGS if v41 else V4_TAGS)
    assert said(answer) == said({**message, "reasoning_content": reasoning if thinking else ""})
    # And the answer is a message: put back, it gives the prompt again, though numbers may be spelled another way.
    again = encode_messages(check_messages(conversation(answer)), thinking=thinking, v41=v41)
    assert again == prompt


# Which of a pair's assistant messages follow `<｜Assistant｜>` and end: not a task's answer, nor one left open.
ANSWERS = {
    OWN / "results_in_call_order.thinking.json": [0, 1],
    OWN / "earlier_reasoning_dropped.thinking.json": [1, 2],
    OWN / "no_reasoning.chat.json": [0, 1, 2],
    OWN / "tasks.thinking.json": [1],
    PUBLISHED / "test_input_1.json": [0, 1],
    PUBLISHED / "test_input_2.json": [0, 1],
    PUBLISHED / "test_input_3.json": [0, 1],
    PUBLISHED / "test_input_4.json": [0],
}


@pytest.mark.parametrize(("path", "indices"), ANSWERS.items(), ids=[path.stem for path in ANSWERS])
def test_pairs_come_back(path, indices):
    thinking = not path.stem.endswith((".chat", "_4"))
    messages = [message for message in load_messages(path) if message.role == "assistant"]
    answers = list(completions(encode_messages(load_messages(path), thinking=thinking)))
    assert len(answers) == len(indices)
    for index, (opening, completion) in zip(indices, answers, strict=True):
        message = messages[index]
        thought = opening == THINK_START
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        expected = (message.reasoning if thought else "", message.content, calls)
        assert said(parse_completion(completion, thinking=thought)) == expected


def test_a_published_string_parses():
    text = (PUBLISHED / "test_output_1.txt").read_text(encoding="utf-8")
    first, second = (answer.partition("<｜User｜>")[0] for answer in text.split("<｜Assistant｜><think>")[1:])
    call = parsed(first, thinking=True)
    assert (
        call["reasoning_content"] == "The user wants to know the weather in Beijing. I should use the get_weather tool."
    )
    assert call["content"] == ""
    arguments = '{"location": "Beijing", "unit": "celsius"}'
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    assert parsed(second, thinking=True)["content"].startswith("The weather in Beijing is currently sunny with")


def test_tags_of_another_model_are_no_call():
    with pytest.raises(PromptError, match="malformed tool call"):
        parse_completion(split_controls(CALL), thinking=False, tags=V41_TAGS)


def test_values_that_are_json_stay_as_written():
    (call,) = parsed(CALL.replace(">1<", ">[1e3,  1.50]<"))["tool_calls"]
    assert call["function"]["arguments"] == '{"x": [1e3,  1.50]}'


def test_a_call_without_parameters_may_leave_the_blank_line_out():
    for body in ("", "\n"):  # DeepSeek's encoder writes the blank line, its parser takes either
        (call,) = parsed(CALL.replace(PARAMETER, body))["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}


def test_spelled_dsml_is_content():
    text = CALL.removesuffix(EOS.name)
    answer = parse_completion([Text(text), EOS], thinking=False)
    assert (answer["content"], answer["tool_calls"]) == (text, [])


def test_the_answer_to_a_task_is_plain():
    segments = merge([Text("Search"), EOS])
    assert parse_completion(segments, thinking=False)["content"] == "Search"


@pytest.mark.parametrize(
    ("text", "thinking", "complaint"),
    [
        ("", False, "ends where <｜end▁of▁sentence｜> is due after the message"),
        ("cut off", False, "ends where <｜end▁of▁sentence｜> is due after the message"),
        ("cut off", True, "ends where </think> is due after the reasoning"),
        ("a<｜end▁of▁sentence｜>", True, "<｜end▁of▁sentence｜> where </think> is due"),
        ("a</think>b<｜end▁of▁sentence｜>", False, "</think> where <｜end▁of▁sentence｜> is due"),
        ("a<think>b</think>c<｜end▁of▁sentence｜>", True, "<think> where </think> is due"),
        ("a<｜User｜>b<｜end▁of▁sentence｜>", False, "<｜User｜> where <｜end▁of▁sentence｜> is due"),
        ("a<｜end▁of▁sentence｜>b", False, "'b' after the end"),
        ("a<｜end▁of▁sentence｜><｜User｜>", False, "<｜User｜> after the end"),
        ("a" + CALL.lstrip("\n"), False, "｜DSML｜ does not open a tag on a line of its own"),
        (CALL.removesuffix(EOS.name), False, "ends where <｜end▁of▁sentence｜> is due"),
        (CALL.replace(EOS.name, "so" + EOS.name), False, "malformed tool call: 'tool_calls>so' where"),
        (CALL.replace("tool_calls>\n", "function_calls>\n", 1), False, "malformed tool call: 'function_calls>"),
        (CALL.replace(' name="f"', ""), False, "malformed tool call: 'invoke>\\n<' where"),
        (CALL.replace('"f"', '""'), False, "malformed tool call: 'invoke name=\"\">\\n<' where"),
        (CALL.replace('"false"', '"no"'), False, 'malformed tool call: \'parameter name="x" string="no">1</\' where'),
        (CALL.replace(">1<", ">one<"), False, "parameter 'x' of 'f': not JSON: damaged JSON: Expecting value"),
        (CALL.replace(">1<", ">NaN<"), False, "parameter 'x' of 'f': not JSON: NaN"),
        (CALL.replace(">1<", ">1e999<"), False, "parameter 'x' of 'f': not JSON: the number 1e999 is beyond float64"),
        (CALL.replace(">1<", "><"), False, "parameter 'x' of 'f': not JSON"),
        (
            CALL.replace(">1<", ">" + "[" * 10**5 + "<"),
            False,
            "parameter 'x' of 'f': not JSON: JSON is nested too deeply",
        ),
        (CALL.replace("</｜DSML｜invoke>\n", ""), False, "malformed tool call: 'tool_calls>' where"),
        (CALL.replace("</｜DSML｜tool_calls>", ""), False, "malformed tool call: 'invoke>\\n' where"),
        (CALL.replace("<｜DSML｜parameter", "<think><｜DSML｜parameter"), False, "malformed tool call: 'invoke name"),
        (CALL.replace(EOS.name, CALL), False, "'tool_calls>\\n\\n<' where 'tool_calls>' is due"),
    ],
)
def test_refusals(text, thinking, complaint):
    with pytest.raises(PromptError) as caught:
        parsed(text, thinking=thinking)
    assert str(caught.value).startswith("completion: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parameter_given_twice_is_refused():
    with pytest.raises(PromptError, match="parameter 'x' of 'f' stands twice"):
        parsed(CALL.replace(PARAMETER, PARAMETER * 2))


@settings(deadline=None)
@given(data=st.data())
def test_no_completion_does_anything_but_parse_or_say_why(data):
    """Cuts, doublings and swaps of a good completion: a message that renders to the same, or PromptError."""
    good = split_controls("R</think>C" + CALL)
    segments = data.draw(st.lists(st.sampled_from(good), max_size=12) | st.permutations(good))
    cut = data.draw(st.integers(0, len(segments)))
    segments = merge(segments[:cut])
    try:
        answer = parse_completion(segments, thinking=True)
    except PromptError:
        return
    ((_, completion),) = completions(encode_messages(check_messages(conversation(answer)), thinking=True))
    assert render(completion) == render(segments)
