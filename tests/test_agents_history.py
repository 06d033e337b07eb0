"""An agent's history costs nothing again, and changes nothing: what goes on from an earlier rendering or body
is what is rendered and read as a whole, for the chat templates that trl ships and for ones of every habit.
"""

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
from asyncrl.agents.endpoint.requests import RequestReader
from asyncrl.agents.endpoint.sent_chats import SentChats
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
    "asks for the last": LOOP + "{{ messages[-1].role }}{{ (messages|last).role }}" + REST,
    "remembers": "{% set ns = namespace(n=0, prev='') %}"
    + LOOP
    + "{{ ns.n }}{{ ns.prev }}{% set ns.n = ns.n + 1 %}{% set ns.prev = m.role %}"
    + REST
    + "{{ ns.n }}{{ ns.prev }}",
    "remembers what is no text": "{% set ns = namespace(n=none) %}"
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
    "ends early": "{% for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}"
    + "{{ m.content }}{% endfor %}!",
    "leaves out": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    + "{{ m.content }}{% endfor %}!",
    "filters": "{% for m in messages if m.role != 'tool' %}{{ loop.index }}{{ m.content }}{% endfor %}!",
    "has inner loops": LOOP
    + "{% for c in m.content %}{{ c }}{{ loop.last }}{{ loop.length }}{% endfor %}"
    + "{{ loop.index }}"
    + REST,
    "has macros": "{% macro say(m) %}{{ m.content }}{{ messages[0].content }}"
    + "{{ messages|length // 4 }}{% endmacro %}"
    + "{% for m in messages %}{{ say(m) }}{% endfor %}!",
    "goes round": "{% set c = cycler('a', 'b') %}"
    + LOOP
    + "{{ c.next() }}{{ loop.cycle('x', 'y', 'z') }}"
    + REST,
    "sees a change": LOOP + "{% if loop.changed(m.role) %}#{% endif %}" + REST,
    "writes all": LOOP + REST + "{{ messages|tojson }}",
    "writes all at first": "{{ messages|map(attribute='role')|join(',') }}" + LOOP + REST,
    "in a condition": "{% if tools %}"
    + LOOP
    + "{{ tools|length }}{% endfor %}{% else %}"
    + LOOP
    + "{% endfor %}{% endif %}!",
    "keeps all": "{% set ns = namespace(all=[]) %}{% for m in messages %}"
    + "{% set ns.all = ns.all + [m.content] %}{{ ns.all|length }}{% endfor %}{{ ns.all|join }}",
    "is undefined": "{% for m in messages %}{{ x }}{% if loop.first %}{% set x = 1 %}{% endif %}"
    + "{{ x }}{{ m.nothing }}{% endfor %}",
    "defines by what is there": "{% set x = messages[6].role if messages|length > 6 %}"
    + LOOP
    + "{{ x }}"
    + REST,
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
    """No rendering is compared with a whole one, which would hide that it went on wrongly."""
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
    """What it returns, or why it refuses."""
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


def test_a_template_that_is_continued_wrongly_is_rendered_as_a_whole_from_then_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ResumableTemplate.render
    monkeypatch.setattr(ResumableTemplate, "render", lambda *given: ("wrong", *right(*given)[1:]))
    renderer = HFChatTokenizer(renderer_for("chatml", folder).model_path)
    for _ in range(2):
        assert renderer.render_on([user("hi")]).text == renderer.render([user("hi")])
    assert caplog.text.count("continued wrongly") == 1


# ---- the whole way from bodies to ids


class Whole(HFChatTokenizer):
    """Renders every chat as a whole."""

    def render_on(self, messages: Any, *, after: Any = None, **options: Any) -> Rendered:
        return Rendered(self.render(messages, **options))


@functools.cache
def whole_renderer_for(name: str, folder: Path) -> Whole:
    return Whole(renderer_for(name, folder).model_path, chat_template=folder / f"{name}.jinja")


@dataclass
class Side:
    """A session whose drafts continue from earlier ones, or are each made as a whole."""

    tokenizer: HFChatTokenizer
    is_whole: bool
    sent: SentChats = field(default_factory=SentChats)
    num_on: int = 0

    def __post_init__(self) -> None:
        self.capture, self.reader = Capture(self.tokenizer, GatewayStats()), RequestReader(RULES)

    def ask(self, body: bytes) -> Planned | str:
        try:
            asked = self.reader.chat(body)
            before = None if self.is_whole else self.sent.find(asked.messages)
            draft = self.capture.draft(asked.messages, asked.tools or None, before=before)
        except (ApiError, ValueError) as refusal:
            return str(refusal)
        self.num_on += before is not None
        self.sent.add(draft)
        return self.capture.plan(draft, self.tokenizer.encode(draft.text))


def as_body(messages: list[Message], tools: Any) -> bytes:
    params = {"model": "m", "tools": tools} if tools else {"model": "m"}
    return json.dumps(params | {"messages": [sent_back(message) for message in messages]}).encode()


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


BACK = st.sampled_from([0, 0, 0, 1, 2])
STEP = st.tuples(BACK, CHAT_TURN, st.sampled_from(["on", "on", "edit", "again", "drop"]), TOOLS)
HOLDING = ["qwen2_5", "qwen3", "llama3_2", "deepseek_r1_distill", "glm4moe", "gptoss", *GOING_ON.split()[-2:]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", [*HOLDING, "forgets", "shouts", "merges_white_space", "inst", "looks ahead", "remembers"]
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=START,
    tools=TOOLS,
    steps=st.lists(STEP, min_size=4, max_size=9),
    keeps=st.sampled_from([True, True, False]),
)
@example(  # the last chat goes on by its messages from the second call, and by its text from the third
    start=[user("2+2?")],
    tools=None,
    steps=[
        (0, [assistant(""), user("")], "on", None),
        (0, [called(1), result(1), result(2)], "on", None),
        (0, [assistant(""), user("")], "on", [tool("add")]),
        (0, [assistant(""), user("")], "on", None),
        (1, [called(1), result(1), result(2)], "edit", None),
        (0, [called(1), result(1), result(2)], "on", None),
    ],
    keeps=False,
)
def test_a_call_that_goes_on_is_sent_with_the_ids_of_one_that_is_read_as_a_whole(
    name: str, start: Any, tools: Any, steps: list[Any], keeps: bool, folder: Path
) -> None:
    renderer = renderer_for(name, folder)
    sides = [Side(renderer, is_whole=False), Side(whole_renderer_for(name, folder), is_whole=True)]
    chats: list[list[Message]] = []
    chat = start
    for number, (back, turn, kind, other_tools) in enumerate(steps):
        body = as_body(chat, tools if keeps else other_tools)
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
        Side(whole_renderer_for(name, folder), is_whole=True),
    ]
    for number, tools in enumerate([None, None, None, [tool("add")], None]):
        planned = [side.ask(as_body(chat, tools)) for side in sides]
        hows.append([str(isinstance(one, str) or one.how) for one in planned])
        turn = [called(1), result(1)] if number == 1 else [assistant(""), user("")]
        end = sides[0].tokenizer.encode(f"{'<tool_call>' * (number == 1)}{end_of(name)}")
        for side, one in zip(sides, planned, strict=True):
            assert not isinstance(one, str)
            side.capture.record(one, completion(end, -1.0 - number), turn[0], f"chatcmpl-{number}")
        chat = [*chat, *turn]
    expected = ["new", "extended", "realigned", "edited", "extended"]
    assert [how for how, _ in hows] == [how for _, how in hows] == expected


def test_an_agent_that_keeps_its_history_continues_from_its_last_draft(folder: Path) -> None:
    side, chat = Side(renderer_for("qwen2_5", folder), is_whole=False), [user("Go on.")]
    for number in range(6):
        planned = side.ask(as_body(chat, [tool("add")]))
        assert not isinstance(planned, str)
        side.capture.record(
            planned, completion(side.tokenizer.encode(f"no{END}")), assistant("no"), f"chatcmpl-{number}"
        )
        chat = [*chat, assistant("no"), user(f"Grüße {number}")]
    assert side.num_on == 5


def test_a_session_keeps_no_text_that_its_next_call_renders_anew(folder: Path) -> None:
    renderer = renderer_for("qwen2_5", folder)
    side, chat = Side(Whole(renderer.model_path), is_whole=False), [user("Go on. " * 1000)]
    for number in range(4):
        planned = side.ask(as_body(chat, None))
        assert not isinstance(planned, str)
        side.capture.record(
            planned, completion(side.tokenizer.encode(f"no{END}")), assistant("no"), f"chatcmpl-{number}"
        )
        chat = [*chat, assistant("no"), user("more")]
    assert side.num_on == 3
    kept = side.sent._drafts.values()
    assert sum(len(draft.text) + len(draft.rendered.text) for draft in kept if draft.rendered) == 0
