"""Capture with every chat template of trl: a growing conversation is one branch, trained as sampled."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gateway_capture_cases import Message, Play, assistant, check_trained, plan, user
from jinja2 import TemplateError
from text_tokenizers import byte_level, save
from tokenizers import AddedToken

from asyncrl.messages.records import Outcome
from asyncrl.rollouts.tokenizer import HFChatTokenizer

# the originals say what day it is: a test that runs at midnight sees one day
TEMPLATES = {
    Path(file.name).stem: file.read_text(encoding="utf-8").replace("strftime_now is defined", "false")
    for file in (resources.files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja")
}
OURS = Path(__file__).parent / "chat_templates"
TEMPLATES |= {file.stem: file.read_text(encoding="utf-8") for file in OURS.glob("*.jinja")}
NO_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3"}
NO_TOOLS |= {"phi3", "phi3_5", "qwen2_5_vl", "chatml", "inst", "merges_white_space"}
PARTS = {"idefics3", "llava_next", "smolvlm"}
"""They write the parts of a message, and nothing of a message that is a text."""
NO_TOOLS |= PARTS
REWRITES = re.compile(
    "cohere2|deepseek|glm4moe|gptoss|muse_glimmer|nemotron_3|qwen3_(5_think|5_nothink$|6|8|training)"
    "|idefics3|llava_next|smolvlm"
)
"""They write something of thoughts or channels, or a space, that is not in the answer."""

SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_(?:turn|utterance)>|</s>|<eos>|\[/?INST\]"
)
PIECES = re.compile(f"{SPECIAL.pattern}|.", re.DOTALL)
END = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|eot|eom|end|return|call|END_OF_TURN_TOKEN|observation|user)\|>"
    r"|<end_of_turn>|<turn\|>|<\|tool_response>|<｜end▁of▁sentence｜>|</s>|<eos>"
)
"""What ends an answer: some models write the beginning of the next turn."""

ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": ADD}]
Renderers = Callable[..., HFChatTokenizer]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def as_transformers(renderer: HFChatTokenizer, chat: list[Message]) -> str:
    """Return what the template itself writes; empty if it refuses the chat or takes only parts."""
    try:
        return str(renderer._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return ""


THOUGHT = "<think>\nhm\n</think>\n\n"


def base(name: str) -> str:
    return name.removesuffix("_training")


def renderers(folder: Path) -> Renderers:
    """One tokenizer, with the special tokens of all templates."""
    special = sorted({token for text in TEMPLATES.values() for token in SPECIAL.findall(text)})
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    save(tokenizer, folder)
    ends = [tokenizer.token_to_id(token) for token in special if END.fullmatch(token)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    @functools.cache
    def renderer(name: str, **settings: Any) -> HFChatTokenizer:
        file = folder / f"{name}.jinja"
        file.write_text(TEMPLATES[name], encoding="utf-8")
        return HFChatTokenizer(folder, chat_template=file, chat_template_kwargs=settings)

    return renderer


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("matrix"))


# ---- stories


class Turn(NamedTuple):
    """New messages, the sampled text, the parsed answer, and the answer as the harness returns it."""

    new: list[Message]
    sampled: str
    got: Message
    back: Message


def said(new: str, text: str) -> Turn:
    return Turn([user(new)], text, assistant(text), assistant(text))


def thinking(turn: Turn, how: str) -> Turn:
    """The turn with a thought, which is sent back in one of three ways."""
    got = {**turn.got, "content": THOUGHT + turn.got["content"]}
    back = {"as it was": got, "apart": {**turn.back, "reasoning_content": "hm"}, "left out": turn.back}[how]
    return Turn(turn.new, THOUGHT + turn.sampled, got, back)


def stopped(number: int, before: str) -> Turn:
    """A stop text ends the answer: it is sampled, not shown, and put back by the harness."""
    shown = f"{before}Look.\n<code>{number}"
    return Turn([user(f"u{number}")], f"{shown}</code>", assistant(shown), assistant(f"{shown}</code>"))


def called(number: int, content: str = "", *, count: int = 1) -> Message:
    calls = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": "add", "arguments": {"a": 70 + at}}}
        for at in range(number, number + count)
    ]
    return assistant(content, tool_calls=calls)


def result(number: int) -> Message:
    content = f'tool "says" {number}'
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "add", "content": content}


def calling(new: list[Message], call: Message, text: str = "") -> Turn:
    """Calls in a form in which no template writes them, to the letter."""
    arguments = [json.dumps(each["function"]["arguments"]) for each in call["tool_calls"]]
    forms = [f'<tool_call>{{ "arguments":{each}, "name":"add"}}</tool_call>' for each in arguments]
    return Turn(new, text + "\n".join(forms), call, call)


PLAIN = [said("one", "Four."), said("two", "Five."), said("three", "Six.")]
HOWS = ("as it was", "apart", "left out")


def stories(has_tools: bool) -> Iterator[tuple[str, list[Turn]]]:
    yield "plain", PLAIN
    for how in HOWS:
        yield f"thoughts {how}", [thinking(turn, how) for turn in PLAIN]
    for before in ("", THOUGHT):
        yield f"stop text after {before!r}", [stopped(number, before) for number in range(3)]
    if not has_tools:
        return
    done = Turn([result(1)], "Done.", assistant("Done."), assistant("Done."))
    for sampled, content in (("", ""), ("I add.", "I add."), ("I add.", "")):
        one, two, three = (called(number, content) for number in range(3))
        turns = [calling([user("go")], one, sampled), calling([result(0)], two, sampled), done]
        yield f"tools with {content!r}", [*turns, calling([user("again")], three, sampled)]
    for how in HOWS:
        turns = [calling([user("go")], called(0)), calling([result(0)], called(1))]
        yield f"tools, thoughts {how}", [*(thinking(turn, how) for turn in turns), done, PLAIN[0]]
    both = calling([user("go")], called(0, count=2))
    yield "parallel calls", [both, done._replace(new=[result(0), result(1)]), PLAIN[0]]


class Told:
    """Play a story; record its prompts and samples."""

    def __init__(self, renderer: HFChatTokenizer, tools: Any) -> None:
        self.play, self.renderer, self.tools = Play(renderer), renderer, tools
        self.chat: list[Message] = []
        self.hows: list[str] = []
        self.sampled: list[tuple[list[int], list[int]]] = []

    def turn(self, turn: Turn) -> None:
        self.chat += turn.new
        planned = plan(self.play.capture, self.chat, self.tools)
        self.hows.append(planned.how)
        prompt = planned.prompt_ids.tolist()
        sent = self._check_prompt(prompt, is_whole=planned.how in ("new", "extended"))
        text = turn.sampled + self._end(turn)
        if sent.rstrip().endswith("<think>"):
            text = text.removeprefix("<think>\n")
        # one character at a time, as no tokenizer encodes it
        ids = [token for piece in PIECES.findall(text) for token in self.renderer.encode(piece)]
        self.play.answer(planned, ids, turn.got)
        self.sampled.append((prompt, ids))
        self.chat.append(turn.back)

    def _end(self, turn: Turn) -> str:
        """Return what the template writes behind such an answer."""
        calls = turn.got.get("tool_calls")
        shown, then = (called(0), result(0)) if calls else (assistant("Answer 70"), user("more"))
        whole = self.renderer.render([user("go"), shown, then], tools=self.tools)
        end = END.search(whole, whole.index("70", whole.rindex("go")))
        return end.group() if end else ""

    def _check_prompt(self, ids: list[int], *, is_whole: bool) -> str:
        sent = self.renderer.decode(ids, skip_special_tokens=False)
        for message in self.chat:
            if message["role"] != "assistant":
                text = message["content"]
                assert text in sent or json.dumps(text)[1:-1] in sent, "nothing is dropped in silence"
        try:
            assert not is_whole or sent == self.renderer.render(self.chat, tools=self.tools)
        except ValueError:
            assert not is_whole, "what the template refuses is gone on from all the same"
        return sent

    def check_training(self) -> int:
        """Return the number of branches."""
        branches = self.play.capture.rollout(0, Outcome(), 1.0)
        check_trained(branches, self.sampled)
        return len(branches)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_growing_conversation_is_one_branch_trained_as_sampled(name: str, renderer_for: Renderers) -> None:
    has_tools = base(name) not in NO_TOOLS
    for title, turns in stories(has_tools):
        told = Told(renderer_for(name), TOOLS if has_tools else None)
        for turn in turns:
            told.turn(turn)
        assert told.hows[0] == "new"
        assert set(told.hows[1:]) <= {"extended", "realigned"}, title
        assert told.check_training() == 1, title
        if title == "plain":
            assert ("realigned" in told.hows) == bool(REWRITES.match(name))


@pytest.mark.parametrize("name", sorted({base(name) for name in TEMPLATES}))
@pytest.mark.parametrize("kind", ["edited", "trimmed"])
def test_edited_history_begins_one_branch(kind: str, name: str, renderer_for: Renderers) -> None:
    told = Told(renderer_for(name), None)
    for turn in PLAIN[:2]:
        told.turn(turn)
    if kind == "edited":
        told.chat[-1] = assistant("Edited.")
    else:
        told.chat = told.chat[2:]
    told.turn(PLAIN[2])
    told.turn(said("four", "Seven."))
    assert (told.hows[2], "edited" in told.hows[3:]) == ("edited", False)
    assert told.check_training() == 2


LATE = [
    [system("Be brief."), user("go"), system("Be kind.")],
    [user("go"), assistant("Yes."), user("on"), system("Be brief."), system("Be kind.")],
    [system("Be brief."), {"role": "developer", "content": "Be kind."}, user("go")],
]


@pytest.mark.parametrize("name", sorted({base(name) for name in TEMPLATES} - {"gemma"}))
def test_system_messages_reach_the_prompt_wherever_they_are(name: str, renderer_for: Renderers) -> None:
    renderer = renderer_for(name)
    kept = 0
    for chat in LATE:
        texts = [message["content"] for message in chat]
        others = [message for message in chat if message["role"] in ("user", "assistant")]
        merged = as_transformers(renderer, [system("Be brief.\n\nBe kind."), *others])
        as_given = as_transformers(renderer, chat)
        sent = renderer.render(chat)
        assert all(text in sent for text in texts)
        assert base(name) in PARTS or sent in (as_given, merged)
        kept += sent == as_given
    if name in ("qwen2_5", "qwen3", "llama3_1", "phi3"):
        assert kept == 2, "system messages stay where a template takes them; developer's become system's"
