"""Continued renderings and bodies equal whole ones, for shipped chat templates and odd ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
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
from asyncrl.messages.work import Rendered, new_hash
from asyncrl.rollouts import tokenizer as tokenizer_module
from asyncrl.rollouts.chat_template import ResumableTemplate
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
    "counts all": LOOP + "{{ loop.index }}/{{ messages|length }}{{ loop.revindex }}" + REST,
    "looks ahead": LOOP
    + "{{ loop.last }}{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}"
    + REST,
    "indexes ahead": LOOP + "{{ messages[loop.index0 + 1].role }}{{ messages[loop.index0 - 1].role }}" + REST,
    "remembers": "{% set ns = namespace(n=0, prev='') %}"
    + LOOP
    + "{{ ns.n }}{{ ns.prev }}{% set ns.n = ns.n + 1 %}{% set ns.prev = m.role %}"
    + REST
    + "{{ ns.n }}{{ ns.prev }}",
    "remembers an object": "{% set ns = namespace(n=none) %}"
    + LOOP
    + "{% if ns.n %}{{ ns.n.x }}{% endif %}{% set ns.n = namespace(x=m.role) %}"
    + REST,
    "says the type": "{% set last = messages[-1].flag %}" + LOOP + "{{ last }}" + REST,
    "keeps order of keys": "{% set last = messages[-1].about %}" + LOOP + "{{ last|tojson }}" + REST,
    "cuts the first": "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    + LOOP
    + "{{ loop.index0 }}{{ loop.first }}{{ messages[0].content }}"
    + REST,
    "loops twice": "{% set ns = namespace(users=0) %}{% for m in messages %}"
    + "{% if m.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}<{{ ns.users // 3 }}{{ m.content }}>{% endfor %}{{ ns.users }}",
    "searches ahead": LOOP
    + "{% for f in messages[loop.index:] %}"
    + "{% if f.role == 'user' %}{{ f.content }}{% break %}{% endif %}{% endfor %}"
    + REST,
    "has macros": "{% macro say(m) %}{{ m.content }}{{ messages[0].content }}"
    + "{{ messages|length // 4 }}{% endmacro %}"
    + "{% for m in messages %}{{ say(m) }}{% endfor %}!",
    "writes all": LOOP + REST + "{{ messages|tojson }}",
}

GOING_ON = "qwen2_5 qwen3 qwen3_5_think qwen3_training llama3_1 llama3_2 deepseek_r1_distill glm4moe lfm2"
GOING_ON += " nemotron_3_nano"
"""Templates of models that run agents, and that must not render their history again."""


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


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no rendering with a whole one: that would hide errors."""
    monkeypatch.setattr(tokenizer_module, "CHECKED_MESSAGES", 0)


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
TURN = st.one_of(
    CHAT_TURN,
    st.just([{**user("odd"), "flag": 1, "about": {"a": 1, "b": 1}}]),
    st.just([{**user("odd"), "flag": True, "about": {"b": 1, "a": 1}}]),
)
START = st.sampled_from([[user("2+2?")], [{"role": "system", "content": "Be kind."}, user("2+2?")]])
TOOLS = st.sampled_from([None, [tool("add")], [tool("add"), tool("sub")]])


def outcome(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result, or the reason of a refusal."""
    try:
        return function(), ""
    except ValueError as refusal:
        return None, str(refusal)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", sorted([*FILES, *HABITS]))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=START, tools=TOOLS, turns=st.lists(st.tuples(st.integers(0, 3), TURN), min_size=1, max_size=9))
def test_a_rendering_that_goes_on_is_the_whole_one(
    name: str, start: Any, tools: Any, turns: list[tuple[int, list[Message]]], folder: Path
) -> None:
    renderer = renderer_for(name, folder)
    known: list[tuple[list[Message], Rendered | None, str]] = [(start, None, "")]
    for back, new in turns:  # from one of the newest chats on, so that it is a tree
        messages, after, text = known[-1 - min(back, len(known) - 1)]
        messages = [*messages, *new]
        whole, why = outcome(lambda: renderer.render(messages, tools=tools))  # noqa: B023
        part, why_too = outcome(lambda: renderer.render_on(messages, tools=tools, after=after))  # noqa: B023
        assert why == why_too
        if why:
            continue
        assert text[: part.num_before] + part.text == whole
        assert part.before.digest() == new_hash(whole[: part.num_before].encode()).digest()
        known.append((messages, part, whole))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", GOING_ON.split())
def test_an_agents_history_is_not_rendered_again(name: str, folder: Path) -> None:
    renderer, after, texts = renderer_for(name, folder), None, []
    chat = [{"role": "system", "content": "Be kind."}, user("Go on.")]
    for number in range(12):
        after = renderer.render_on(chat, tools=[tool("add")], after=after)
        texts.append(len(after.text))
        chat = [*chat, called(number, "I look."), result(number)]
    assert max(texts[4:]) <= max(texts[3:5]) + 8, (
        "a turn adds as much text as the one before, some digits aside"
    )
    assert after.num_before > 3 * texts[-1], "the rest was there before"


def test_wrong_continuation_falls_back_to_whole_renderings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ResumableTemplate.render
    monkeypatch.setattr(ResumableTemplate, "render", lambda *given: ("wrong", *right(*given)[1:]))
    renderer = HFChatTokenizer(renderer_for("chatml", folder).model_path)
    for _ in range(2):
        assert renderer.render_on([user("hi")]).text == renderer.render([user("hi")])
    assert caplog.text.count("continued wrongly") == 1


class Whole(HFChatTokenizer):
    """Renders every chat as a whole."""

    def render_on(self, messages: Any, *, after: Any = None, **options: Any) -> Rendered:
        return Rendered(self.render(messages, **options))


@functools.cache
def whole_renderer_for(name: str, folder: Path) -> Whole:
    return Whole(renderer_for(name, folder).model_path, chat_template=folder / f"{name}.jinja")


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
HOLDING = ["qwen2_5", "qwen3", "llama3_2", "deepseek_r1_distill", "glm4moe", "gptoss", *GOING_ON.split()[-2:]]


@pytest.mark.usefixtures("unchecked")
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
@example(  # the last chat continues by its messages, then by its text
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
    sides = [Side(renderer, is_whole=False), Side(whole_renderer_for(name, folder), is_whole=True)]
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


def test_kept_history_is_read_from_its_end(folder: Path) -> None:
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
