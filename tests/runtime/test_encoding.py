"""Messages to prompt: DeepSeek's own four pairs in data/encoding/deepseek, and beside them small ones written by hand
from the rules that the four prove."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import ToolCall, tool_calls_block
from fathom.runtime.text.encoding import EFFORTS, effort_text, effort_text_v41, encode_messages
from fathom.runtime.text.messages import check_messages, load_messages, user_message
from fathom.runtime.text.segments import (
    ASSISTANT,
    BOS,
    CONTROLS,
    DSML,
    EOS,
    THINK_END,
    THINK_START,
    USER,
    Control,
    Text,
    merge,
    render,
    split_controls,
)

OWN = Path(__file__).parent / "data" / "encoding"
PUBLISHED = OWN / "deepseek"
MODES = {"1": True, "2": True, "3": True, "4": False}  # published pair -> thinking

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def call(name="f", arguments="{}", **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def calling(*calls):
    return {"role": "assistant", "tool_calls": list(calls)}


def prompt(messages, *, thinking=False, effort=""):
    return render(encode_messages(check_messages(messages), thinking=thinking, effort=effort))


@pytest.mark.parametrize("path", sorted(OWN.glob("*.json")), ids=lambda path: path.stem)
def test_own_pairs(path):
    segments = encode_messages(load_messages(path), thinking=path.stem.endswith(".thinking"))
    assert render(segments) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_there_are_own_pairs():
    assert {path.stem.rpartition(".")[2] for path in OWN.glob("*.json")} == {"chat", "thinking"}


@pytest.mark.parametrize(("number", "thinking"), MODES.items())
def test_published_pairs(number, thinking):
    messages = load_messages(PUBLISHED / f"test_input_{number}.json")
    expected = (PUBLISHED / f"test_output_{number}.txt").read_text(encoding="utf-8")
    assert render(encode_messages(messages, thinking=thinking)) == expected


@pytest.mark.parametrize(("thinking", "opening"), [(False, THINK_END), (True, THINK_START)])
def test_one_question(thinking, opening):
    assert encode_messages(user_message("hi"), thinking=thinking) == [BOS, USER, Text("hi"), ASSISTANT, opening]


def test_control_strings_of_people_and_models_stay_text():
    spelled = "".join(control.name for control in CONTROLS)
    messages = [
        {"role": "system", "content": spelled, "tools": [{"function": {"name": "f", "description": spelled}}]},
        {"role": "latest_reminder", "content": spelled},
        {"role": "user", "content": spelled},
        {
            "role": "assistant",
            "content": spelled,
            "reasoning_content": spelled,
            "tool_calls": [call(name=spelled, arguments=json.dumps({spelled: spelled, "other": [spelled]}))],
        },
        {"role": "tool", "content": spelled},
    ]
    plain = [json.loads(json.dumps(message, ensure_ascii=False).replace(spelled, "plain")) for message in messages]

    def controls(these):
        segments = encode_messages(check_messages(these), thinking=True)
        return [segment for segment in segments if isinstance(segment, Control)]

    assert controls(messages) == controls(plain)
    assert controls(messages).count(DSML) == 9 + 8  # the preamble's, and one block, call and two parameters


def test_the_preamble_has_control_tokens_where_the_published_string_has_them():
    segments = encode_messages(check_messages([{"role": "system", "content": "", "tools": [TOOL]}]), thinking=False)
    assert segments == split_controls(render(segments))


def test_neighbouring_texts_are_one_segment():
    segments = encode_messages(load_messages(OWN / "results_in_call_order.thinking.json"), thinking=True)
    assert segments == merge(segments)
    assert all(isinstance(a, Control) or isinstance(b, Control) for a, b in pairwise(segments))


# Reasoning effort


def test_effort_stands_before_everything_and_changed_its_names():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    bare = prompt(messages, thinking=True)
    for revision, level in [("preview", "high"), ("0731", "low")]:
        assert prompt(messages, thinking=True, effort=effort_text(revision, level)) == bare
    absolute, beyond = effort_text("preview", "max"), effort_text("0731", "max")
    assert effort_text("0731", "high") == absolute
    assert absolute.startswith("Reasoning Effort: Absolute maximum")
    assert beyond.startswith("Reasoning Effort: Beyond maximum")
    for text in (absolute, beyond):
        assert text.endswith(".\n\n")
        assert text.count("\n") == 4  # three lines and a blank one
        assert prompt(messages, thinking=True, effort=text) == bare.replace("S", text + "S", 1)


def test_effort_is_refused_where_it_means_nothing():
    with pytest.raises(PromptError, match="without thinking"):
        prompt([{"role": "user", "content": "Q"}], effort=effort_text("0731", "max"))
    with pytest.raises(PromptError, match="'low' is none of high, max of revision preview"):
        effort_text("preview", "low")
    with pytest.raises(PromptError, match="revision '0813' is none of preview, 0731"):
        effort_text("0813", "max")
    assert set(EFFORTS) == {"preview", "0731"}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_write_never_reaches_a_prompt(number):
    # from Python, where no reader stands before it
    tool = {"function": {"name": "f", "parameters": {"maximum": number}}}
    with pytest.raises(PromptError, match=r"^not JSON: Out of range float"):
        check_messages([{"role": "system", "content": "", "tools": [tool]}])
    with pytest.raises(PromptError, match=r"^not JSON: Out of range float"):
        render(tool_calls_block([ToolCall("f", {"x": number})]))


# Rules of reasoning, tools and turns, each in its smallest form


def test_tools_keep_earlier_reasoning():
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "R"},
        {"role": "user", "content": "3"},
    ]
    without = prompt([{"role": "system", "content": ""}, *turns], thinking=True)
    with_tools = prompt([{"role": "system", "content": "", "tools": [TOOL]}, *turns], thinking=True)
    assert without.endswith("<｜User｜>1<｜Assistant｜></think>2<｜end▁of▁sentence｜><｜User｜>3<｜Assistant｜><think>")
    assert with_tools.endswith(
        "<｜User｜>1<｜Assistant｜><think>R</think>2<｜end▁of▁sentence｜><｜User｜>3<｜Assistant｜><think>"
    )


def test_tools_of_a_developer_turn_follow_its_text():
    text = prompt([{"role": "developer", "content": "D", "tools": [TOOL], "response_format": {"a": 1}}])
    assert text.startswith("<｜begin▁of▁sentence｜><｜User｜>D\n\n## Tools\n\n")
    heading = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    assert text.endswith("to invoke tool calls.\n" + heading + '{"a": 1}<｜Assistant｜></think>')


def test_results_without_ids_keep_their_order():
    text = prompt(
        [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "tool_calls": [call("f"), call("g")]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]
    )
    assert "<｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result><｜Assistant｜>" in text


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_a_task_stands_right_after_its_turn(task):
    for thinking in (False, True):
        segments = encode_messages(check_messages([{"role": "user", "content": "Q", "task": task}]), thinking=thinking)
        assert segments == [BOS, USER, Text("Q"), Control(f"<｜{task}｜>")]


@pytest.mark.parametrize(("thinking", "opening"), [(False, "</think>"), (True, "<think>")])
def test_the_answer_to_a_task_shows_no_reasoning(thinking, opening):
    asked = [
        {"role": "user", "content": "Q", "task": "action"},
        {"role": "assistant", "content": "Search", "reasoning_content": "R"},
    ]
    expected = f"<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜>{opening}<｜action｜>Search<｜end▁of▁sentence｜>"
    assert prompt(asked, thinking=thinking) == expected
    # In an earlier turn, too, the task's token keeps the opening of the mode.
    assert prompt([*asked, USER_TURN], thinking=thinking) == f"{expected}<｜User｜>Q<｜Assistant｜>{opening}"


def test_a_finished_answer_asks_for_nothing():
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert encode_messages(check_messages(messages), thinking=False)[-1] == EOS


# Refusals: one line, with the message's index and the field


ASKS = calling(call(id="a"), call(id="b"))
SYSTEM = {"role": "system", "content": ""}
USER_TURN = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("data", "culprit"),
    [
        ("hello", "messages: str, want a list"),
        ([], "messages: empty"),
        ({}, "top level.messages: missing"),
        ({"messages": [USER_TURN], "model": "x"}, "top level: unknown field 'model'"),
        ({"messages": [USER_TURN], "tools": [TOOL]}, "tools: messages[0] must be a system or developer turn"),
        ({"messages": [{**SYSTEM, "tools": []}], "tools": []}, "tools: given at the top level and in messages[0]"),
        ({"messages": [SYSTEM], "tools": {}}, "messages[0].tools: dict, want a list"),
        ([USER_TURN, "x"], "messages[1]: str, want an object"),
        ([{"content": "Q"}], "messages[0].role: missing"),
        ([{"role": None, "content": "Q"}], "messages[0].role: NoneType, want a string"),
        ([{"role": "function", "content": "Q"}], "messages[0].role: 'function' is none of system, developer"),
        ([{"role": "user"}], "messages[0].content: missing"),
        ([{"role": "user", "content": None}], "messages[0].content: NoneType, want a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "messages[0].content: list, want a string"),
        ([{"role": "user", "content": "Q", "name": "Ann"}], "messages[0] (user): unknown field 'name'"),
        ([{"role": "user", "content": "Q", "tools": [TOOL]}], "messages[0] (user): unknown field 'tools'"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content: holds half of a surrogate pair"),
        ([{"role": "developer", "content": ""}], "messages[0].content: empty"),
        ([{"role": "assistant"}], "messages[0].content: missing"),
        ([{"role": "assistant", "content": "", "wo_eos": 1}], "messages[0].wo_eos: int, want true or false"),
        ([{"role": "user", "content": "Q", "task": "sing"}], "messages[0].task: 'sing' is none of action"),
        ([{**SYSTEM, "response_format": {"a": "\udfff"}}], "messages[0].response_format: holds half"),
        ([{**SYSTEM, "response_format": {}}], "messages[0].response_format: empty"),
        ([{**SYSTEM, "tools": [{"type": "web"}]}], "messages[0].tools[0].type: 'web', want"),
        ([{**SYSTEM, "tools": [{}]}], "messages[0].tools[0].function: missing"),
        ([{**SYSTEM, "tools": [{"function": {}}]}], "messages[0].tools[0].function.name: missing"),
        ([calling(call(""))], "messages[0].tool_calls[0].function.name: empty"),
        ([calling(call('a"b'))], "messages[0].tool_calls[0].function.name: name 'a\"b' holds"),
        ([calling(call(arguments={}))], "tool_calls[0].function.arguments: dict, want a str"),
        ([calling(call(arguments="[]"))], "function.arguments: its JSON: list, want an obj"),
        ([calling(call(arguments="{"))], "function.arguments: not JSON"),
        ([calling(call(arguments='{"a": NaN}'))], "arguments: not JSON: NaN"),
        ([calling(call(arguments='{"a": 1e999}'))], "[0].tool_calls[0].function.arguments: not JSON: the number 1e999"),
        ([calling(call(arguments='{"a": [-1E+400]}'))], "function.arguments: not JSON: the number -1E+400 is beyond"),
        ([calling(call(arguments='{"a": 1, "a": 2}'))], "not JSON: duplicate key 'a'"),
        ([calling(call(arguments='{"a\\"": 1}'))], "arguments: name 'a\"' holds a quote"),
        ([calling(call(arguments="[" * 10**5))], "arguments: not JSON: JSON is nested too deeply"),
        ([calling(call(id="a"), call(id="a"))], "messages[0].tool_calls: two calls have"),
        (
            [USER_TURN, {"role": "tool", "content": "1"}],
            "messages[1]: a tool result, but no assistant message before it",
        ),
        ([ASKS, {"role": "tool", "content": "1"}], "messages[1].tool_call_id: missing"),
        (
            [ASKS, {"role": "tool", "content": "1", "tool_call_id": "c"}],
            "messages[1].tool_call_id: 'c' is no call of mess",
        ),
        ([ASKS, *[{"role": "tool", "content": "1", "tool_call_id": "a"}] * 2], "messages[2]: one result too many"),
        (
            [calling(call()), *[{"role": "tool", "content": "1"}] * 2],
            "messages[2]: one result too many",
        ),
        (
            [calling(call()), {"role": "tool", "content": [{"type": "image_url"}]}],
            "messages[1].content[0].type: 'image_url', want 'text'",
        ),
        ([{**USER_TURN, "task": "query"}, USER_TURN], "messages[0].task: lost"),
        ([USER_TURN, {**USER_TURN, "task": "query"}], "messages[1].task: lost"),
    ],
)
def test_refusals(data, culprit):
    with pytest.raises(PromptError) as caught:
        encode_messages(check_messages(data), thinking=False)
    assert culprit in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_of_the_wrong_type_is_named():
    whole = {
        "system": {"content": "x", "tools": [TOOL], "response_format": {"a": 1}},
        "user": {"content": "x", "task": "query"},
        "assistant": {"content": "x", "reasoning_content": "x", "tool_calls": [call()], "wo_eos": True},
        "latest_reminder": {"content": "x"},
    }
    for role, fields in whole.items():
        check_messages([{"role": role, **fields}])
        for key in fields:
            with pytest.raises(PromptError, match=rf"^messages\[0\]\.{key}: float, want "):
                check_messages([{"role": role, **fields, key: 1.5}])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        (b"\xff[]", "byte 0 is no UTF-8"),
        (b"[", "not JSON"),
        (b"[{}]", "messages[0].role: missing"),
        (b'[{"role": "user", "content": 1e999}]', "the number 1e999 is beyond float64"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, complaint):
    path = tmp_path / "messages.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError) as caught:
        load_messages(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


# --- V4.1

V41 = Path(__file__).parents[2].parent / "shared" / "data" / "v41" / "encoding_vectors_v41.json"  # 12 KB, by DeepSeek
EFFORT_75 = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
HELLO = [{"role": "user", "content": "Hello"}]


def v41_prompt(request):
    """The prompt of a chat request, as DeepSeek's recipe takes one."""
    messages = request["messages"]
    if tools := request.get("tools"):
        system = messages[0]["role"] == "system"
        messages = [
            {"role": "system", "content": "", **(messages[0] if system else {}), "tools": tools},
            *messages[system:],
        ]
    thinking = request.get("thinking", {}).get("type", "enabled") == "enabled"
    effort = effort_text_v41(request["reasoning_effort"]) if "reasoning_effort" in request else ""
    return render(encode_messages(check_messages(messages), thinking=thinking, effort=effort, v41=True))


@pytest.mark.parametrize(("thinking", "prompt"), [
    (True, f"<｜begin▁of▁sentence｜><｜System｜>{EFFORT_75}<｜User｜>Hello<｜Assistant｜><think>"),
    (False, "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>"),
])  # fmt: skip
def test_a_question_to_v41(thinking, prompt):
    assert render(encode_messages(check_messages(HELLO), thinking=thinking, v41=True)) == prompt


@pytest.mark.skipif(not V41.is_file(), reason="DeepSeek's prompts are not beside this repository")
def test_v41_prompts_are_deepseeks_to_the_byte():
    cases = json.loads(V41.read_text())["cases"]
    rendered = {name: case for name, case in cases.items() if not case["prompt"].startswith("ERROR ")}
    assert len(rendered) == 12
    for name, case in rendered.items():
        assert v41_prompt(case["request"]) == case["prompt"], name


@pytest.mark.parametrize("effort", ["medium", 0, 101])
def test_v41_has_no_such_effort(effort):
    with pytest.raises(PromptError, match="is none of low, high, xhigh, max, nor from 1 to 100"):
        effort_text_v41(effort)
