"""A call whose body begins like an earlier one is read from where that one ended, with the same result."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import Message, assistant, completion, user
from gateway_cases import RULES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from text_tokenizers import END, byte_level, save

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.capture import Capture, GatewayStats, Planned
from asyncrl.agents.endpoint.engine_route import EngineRoute, Sent
from asyncrl.agents.endpoint.forms.chat import ChatForm
from asyncrl.agents.endpoint.sent_chats import SentChats
from asyncrl.agents.endpoint.sessions import Sessions
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.config import GatewayConfig
from asyncrl.rollouts.tokenizer import HFChatTokenizer

SHIPPED = Path(str(resources.files("trl"))) / "chat_templates"
FILES = {
    file.stem: file
    for folder in (SHIPPED, Path(__file__).parent / "chat_templates")
    for file in folder.glob("*.jinja")
}

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
REST = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
HABITS = {
    "looks ahead": LOOP
    + "{{ loop.last }}{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}"
    + REST,
    "remembers": "{% set ns = namespace(n=0, prev='') %}"
    + LOOP
    + "{{ ns.n }}{{ ns.prev }}{% set ns.n = ns.n + 1 %}{% set ns.prev = m.role %}"
    + REST
    + "{{ ns.n }}{{ ns.prev }}",
}


@functools.cache
def renderer_for(name: str, folder: Path) -> HFChatTokenizer:
    if not (folder / "model").exists():
        save(byte_level(), folder / "model")
    file = folder / f"{name}.jinja"
    text = HABITS[name] if name in HABITS else FILES[name].read_text(encoding="utf-8")
    file.write_text(text.replace("strftime_now is defined", "false"), encoding="utf-8")
    return HFChatTokenizer(folder / "model", chat_template=file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def called(number: int, content: str = "") -> Message:
    function = {"name": "add", "arguments": {"b": number, "a": 1}}
    return assistant(content, tool_calls=[{"id": f"call_{number}", "type": "function", "function": function}])


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "add", "content": f"{number} it is"}


def tool(name: str) -> Message:
    function = {
        "name": name,
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


WORDS = st.sampled_from(
    ["", "x", " two\n", "so|it", "<think>\nWell.\n</think>\n\nFour.", "<tool_response>a</tool_response>"]
)
CHAT_TURN: st.SearchStrategy[list[Message]] = st.one_of(
    st.builds(lambda said, asked: [assistant(said), user(asked)], WORDS, WORDS),
    st.builds(lambda n, said: [called(n, said), result(n)], st.integers(0, 2), WORDS),
    st.builds(lambda said: [called(1, said), result(1), result(2)], WORDS),
    st.builds(lambda said: [assistant(said, reasoning_content="Hm."), user("go on")], WORDS),
)
START = st.sampled_from([[user("2+2?")], [{"role": "system", "content": "Be kind."}, user("2+2?")]])
TOOLS = st.sampled_from([None, [tool("add")], [tool("add"), tool("sub")]])


# ---- the whole way from bodies to ids


@dataclass
class Side:
    """A session that reads bodies: from where earlier ones ended, or each as a whole."""

    tokenizer: HFChatTokenizer
    is_whole: bool
    sent: SentChats = field(default_factory=SentChats)
    num_on: int = 0

    def __post_init__(self) -> None:
        parts: Any = (find_tool_format("hermes", ""), RULES, lambda *_: 0, lambda _: None)
        self.route = EngineRoute(Sessions(GatewayConfig()), None, self.tokenizer, *parts)  # type: ignore[arg-type]
        self.capture = Capture(self.tokenizer, GatewayStats())

    def ask(self, body: bytes) -> Planned | str:
        _, before = self.sent.find(body)
        try:
            read = self.route._read(
                Sent(ChatForm(), body, b"", None if self.is_whole else before, is_retry=False)
            )
            tools: Any = read.asked.tools or None  # type: ignore[union-attr]
            draft = self.capture.draft(read.asked.messages, tools, before=read.before)
        except (ApiError, ValueError) as refusal:
            return str(refusal)
        self.num_on += read.before is not None
        if not self.is_whole and read.place is not None:
            self.sent.add(body, before, read.place, draft)
        return self.capture.plan(draft, self.tokenizer.encode(draft.text))


def as_body(messages: list[Message], tools: Any, style: str) -> bytes:
    """As different clients write it."""
    params = {"model": "m", "tools": tools} if tools else {"model": "m"}
    chat = {"messages": [sent_back(message) for message in messages]}
    if style == "odd":
        return (
            json.dumps(params | {"messages": []})[:-2].encode()
            + b"   \n"
            + json.dumps(chat["messages"])[1:].encode()
            + b" }"
        )
    if style == "twice":
        return json.dumps(chat)[:-1].encode() + b', "messages": [{"role": "user", "content": "this one"}]}'
    spaced = {"indent": 1, "ensure_ascii": False} if style == "spaced" else {"separators": (",", ":")}
    return json.dumps(params | chat if style == "model first" else chat | params, **spaced).encode()  # type: ignore[arg-type]


def sent_back(message: Message) -> Message:
    """Arguments of calls are text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def end_of(name: str) -> str:
    """What ends an answer in this template's text, so that most calls are extended and not realigned."""
    ends = {"<|im_end|>": "qwen chatml lfm nemotron forgets merges", "<|eot_id|>": "llama", "</s>": "inst"}
    ends |= {"<｜end▁of▁sentence｜>": "deepseek"}
    return next((end for end, names in ends.items() if name.startswith(tuple(names.split()))), END)


STYLES = st.sampled_from(["openai", "openai", "openai", "model first", "spaced", "odd", "twice"])
BACK = st.sampled_from([0, 0, 0, 1, 2])
STEP = st.tuples(BACK, CHAT_TURN, st.sampled_from(["on", "on", "edit", "again", "drop"]), TOOLS, STYLES)
HOLDING = [
    "qwen2_5",
    "qwen3",
    "llama3_2",
    "deepseek_r1_distill",
    "glm4moe",
    "gptoss",
    "lfm2",
    "nemotron_3_nano",
]


@pytest.mark.parametrize(
    "name", [*HOLDING, "forgets", "shouts", "merges_white_space", "inst", "looks ahead", "remembers"]
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=START,
    style=STYLES,
    tools=TOOLS,
    steps=st.lists(STEP, min_size=4, max_size=9),
    keeps=st.sampled_from([True, True, False]),
)
@example(  # the last chat goes on by its messages from the second call, and by its text from the third
    start=[user("2+2?")],
    style="openai",
    tools=None,
    steps=[
        (0, [assistant(""), user("")], "on", None, "openai"),
        (0, [called(1), result(1), result(2)], "on", None, "openai"),
        (0, [assistant(""), user("")], "on", [tool("add")], "openai"),
        (0, [assistant(""), user("")], "on", None, "openai"),
        (1, [called(1), result(1), result(2)], "edit", None, "openai"),
        (0, [called(1), result(1), result(2)], "on", None, "openai"),
    ],
    keeps=False,
)
def test_continued_call_has_the_ids_of_a_whole_one(
    name: str, start: Any, style: str, tools: Any, steps: list[Any], keeps: bool, folder: Path
) -> None:
    renderer = renderer_for(name, folder)
    sides = [Side(renderer, is_whole=False), Side(renderer, is_whole=True)]
    chats: list[list[Message]] = []
    chat = start
    for number, (back, turn, kind, other_tools, other_style) in enumerate(steps):
        given_tools, given_style = (tools, style) if keeps else (other_tools, other_style)
        body = as_body(chat, given_tools, given_style)
        on, whole = (side.ask(body) for side in sides)
        if isinstance(on, str) or isinstance(whole, str):
            assert on == whole
            chat = chats[-1 - min(back, len(chats) - 1)] if chats else start
            continue
        assert (tuple(on.prompt_ids.tolist()), on.how, on.num_reused) == (
            tuple(whole.prompt_ids.tolist()),
            whole.how,
            whole.num_reused,
        )
        assert on.prompt_hash.digest() == whole.prompt_hash.digest()
        raw = f"{turn[0]['content']}{'<tool_call>' if 'tool_calls' in turn[0] else ''}{end_of(name)}"
        ids = renderer.encode(raw)
        for side, planned in zip(sides, (on, whole), strict=True):
            side.capture.record(planned, completion(ids, -1.0 - number), turn[0], f"chatcmpl-{number}")
        chats.append([*chat, *turn])
        chat = chats[-1 - min(back, len(chats) - 1)]
        if kind == "edit":
            chat = [*chat[:-2], assistant("another"), *chat[-1:]]
        elif kind == "drop":
            chat = chat[2:] or chat
        elif kind == "again":
            chat = chat[: -len(turn)] or chat


def test_tools_that_a_template_does_not_write_change_nothing_in_how_a_call_goes_on(folder: Path) -> None:
    name, chat, hows = "merges_white_space", [user("2+2?")], list[list[str]]()
    sides = [
        Side(renderer_for(name, folder), is_whole=False),
        Side(renderer_for(name, folder), is_whole=True),
    ]
    for number, tools in enumerate([None, None, None, [tool("add")], None]):
        planned = [side.ask(as_body(chat, tools, "model first" if tools else "openai")) for side in sides]
        hows.append([str(isinstance(one, str) or one.how) for one in planned])
        turn = [called(1), result(1)] if number == 1 else [assistant(""), user("")]
        end = sides[0].tokenizer.encode(f"{'<tool_call>' * (number == 1)}{end_of(name)}")
        for side, one in zip(sides, planned, strict=True):
            assert not isinstance(one, str)
            side.capture.record(one, completion(end, -1.0 - number), turn[0], f"chatcmpl-{number}")
        chat = [*chat, *turn]
    expected = ["new", "extended", "realigned", "edited", "extended"]
    assert [how for how, _ in hows] == [how for _, how in hows] == expected


def test_an_agent_that_keeps_its_history_is_read_from_where_it_ended(folder: Path) -> None:
    for style in ("openai", "model first", "spaced", "odd"):
        side, chat = Side(renderer_for("qwen2_5", folder), is_whole=False), [user("Go on.")]
        for number in range(6):
            planned = side.ask(as_body(chat, [tool("add")], style))
            assert not isinstance(planned, str)
            side.capture.record(
                planned, completion(side.tokenizer.encode(f"no{END}")), assistant("no"), f"chatcmpl-{number}"
            )
            chat = [*chat, assistant("no"), user(f"Grüße {number}")]
        assert side.num_on == 5, style
