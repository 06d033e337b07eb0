"""Capture with every chat template of trl: a growing conversation is one branch, trained as sampled."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import Message, Play, assistant, check_trained, plan, user
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
NO_TEXT = {"idefics3", "llava_next", "smolvlm"}
"""They write the parts of a message, and nothing of a message that is a text."""
NO_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3"}
NO_TOOLS |= {"phi3", "phi3_5", "qwen2_5_vl", "chatml", "forgets", "inst", "merges_white_space", "shouts"}
CUTS_NOTHING = {"shouts"}
EDITED_REFUSED = NO_TEXT | CUTS_NOTHING | {"forgets"}  # it omits all but the last answer
REWRITES = {name for name in TEMPLATES if name.startswith(("deepseek", "nemotron_3"))}
REWRITES |= {"qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "forgets"}
"""The prompt of an answer says something of thoughts that is not in the history."""
ONE_CALL = {"llama3_1", "llama3_2", "gptoss"}
"""They refuse a message with two calls, or write the first one alone."""

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
THOUGHT = "<think>\nhm\n</think>\n\n"
HERMES = '<tool_call>{ "arguments":{"a" : 7}, "name":"add"}</tool_call>'
"""A form in which no template writes a call, to the letter."""


def base(name: str) -> str:
    return name.removesuffix("_training")


def renderers(folder: Path) -> Callable[..., HFChatTokenizer]:
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
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HFChatTokenizer]:
    return renderers(tmp_path_factory.mktemp("matrix"))


# ---- stories


@dataclass(frozen=True)
class Turn:
    """New messages, the sampled answer, the parsed answer, and the answer as the harness returns it."""

    new: list[Message]
    sampled: Callable[[Teller], str]
    got: Message
    back: Message


@dataclass(frozen=True)
class Teller:
    """Writes answers as the template does, for the chat that they answer."""

    renderer: HFChatTokenizer
    chat: list[Message]
    tools: Any

    def answer(self, message: Message, *then: Message, last: str, instead: str = "", before: str = "") -> str:
        """Return the answer with its end. `then`: messages after it; `last`: its last visible text;
        `before`: a prefix; `instead`: a replacement.
        """
        try:
            asked = self.renderer.render(self.chat, tools=self.tools)
            whole = self.renderer.render([*self.chat, message, *then], tools=self.tools)
        except ValueError:  # of a history with two calls
            return before + (instead or last)
        start = next(
            (at for at, pair in enumerate(zip(asked, whole, strict=False)) if len(set(pair)) > 1), len(asked)
        )
        shown = whole.find(last, start) + len(last)
        end = END.search(whole, shown)
        if end is None:
            return before + (instead or whole[start:shown])
        return before + (instead or whole[start : end.start()].rstrip("\n")) + end.group()

    def thought(self, rest: str) -> str:
        """A thought and the rest, after a prompt that may begin it."""
        begins = self.renderer.render(self.chat, tools=self.tools).rstrip().endswith("<think>")
        rest = re.sub(r"^\s*(<think>)?\s*</think>\s*", "", rest)
        return THOUGHT.removeprefix("<think>\n" if begins else "") + rest


def said(text: str) -> Callable[[Teller], str]:
    return lambda teller: teller.answer(assistant(text), user("more"), last=text)


def plain(new: list[Message], text: str) -> Turn:
    return Turn(new, said(text), assistant(text), assistant(text))


def called(number: int, content: str = "", *, count: int = 1, **fields: Any) -> Message:
    calls = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": "add", "arguments": {"a": 70 + at}}}
        for at in range(number, number + count)
    ]
    return assistant(content, tool_calls=calls, **fields)


def result(number: int) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"call{number:05d}",
        "name": "add",
        "content": f'tool "says" {number}',
    }


def calling(new: list[Message], number: int, got: Message, back: Message, **forms: str) -> Turn:
    """A call as the template writes it; `forms`: of Teller.answer."""

    def sampled(teller: Teller) -> str:
        return teller.answer(called(number), result(number), last=str(70 + number), **forms)

    return Turn(new, sampled, got, back)


def thinking(turn: Turn, how: str) -> Turn:
    """The turn with a thought, which is sent back in one of three ways."""
    got = {**turn.got, "content": THOUGHT + turn.got["content"]}
    apart = {**turn.back, "reasoning_content": "hm"}
    back = {"as it was": got, "apart": apart, "left out": turn.back}[how]
    return Turn(turn.new, lambda teller: teller.thought(turn.sampled(teller)), got, back)


def stopped(new: list[Message], text: str, before: str) -> Turn:
    """A stop text ends the answer: it is sampled, not shown, and put back by the harness."""
    shown = f"{before}Look.\n<code>{text}"
    return Turn(new, lambda _: f"{shown}</code>", assistant(shown), assistant(f"{shown}</code>"))


PLAIN = [plain([user("one")], "Four."), plain([user("two")], "Five."), plain([user("three")], "Six.")]


def plain_stories() -> Iterator[tuple[str, list[Turn]]]:
    yield "plain", PLAIN
    for how in ("as it was", "apart", "left out"):
        yield f"thoughts {how}", [thinking(turn, how) for turn in PLAIN]
    for name, before in (("stop text", ""), ("stop text after a thought", THOUGHT)):
        yield name, [stopped([user(f"u{number}")], str(number), before) for number in range(3)]


def tool_stories(name: str) -> Iterator[tuple[str, list[Turn]]]:
    forms: list[tuple[str, str, dict[str, str]]] = [
        ("tools", "", {}),
        ("text before a call", "I add.", {"before": "I add."}),
        ("text before a call, not shown", "", {"before": "I add."}),
        ("a call in another form", "", {"instead": HERMES}),
    ]
    for title, content, form in forms:
        messages = [called(number, content) for number in range(3)]
        one, two, three = (
            calling([user("go") if not at else result(at - 1)], at, message, message, **form)
            for at, message in enumerate(messages)
        )
        yield (
            title,
            [
                one,
                two,
                plain([result(1)], "Done."),
                Turn([user("again")], three.sampled, three.got, three.back),
            ],
        )
    for how in ("as it was", "apart", "left out"):
        one, two = (calling([user("go")], 0, *[called(0)] * 2), calling([result(0)], 1, *[called(1)] * 2))
        turns = [thinking(one, how), thinking(two, how), plain([result(1)], "Done."), *PLAIN[:1]]
        yield f"tools, thoughts {how}", turns
    both, answers = called(0, count=2), [result(0), result(1)]
    if base(name) in ONE_CALL:
        yield "parallel calls", [calling([user("go")], 0, both, both), plain(answers, "Done."), *PLAIN[:1]]
    else:

        def sampled(teller: Teller) -> str:
            return teller.answer(both, *answers, last="71")

        yield "parallel calls", [Turn([user("go")], sampled, both, both), plain(answers, "Done."), *PLAIN[:1]]


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
        self._check_prompt(planned.prompt_ids.tolist(), is_whole=planned.how in ("new", "extended"))
        text = turn.sampled(Teller(self.renderer, self.chat, self.tools))
        # one character at a time, as no tokenizer encodes it
        ids = [token for piece in PIECES.findall(text) for token in self.renderer.encode(piece)]
        self.play.answer(planned, "", turn.got, ids=ids)
        self.sampled.append((planned.prompt_ids.tolist(), list(ids)))
        self.chat.append(turn.back)

    def _check_prompt(self, ids: list[int], *, is_whole: bool) -> None:
        sent = self.renderer.decode(ids, skip_special_tokens=False)
        for message in self.chat:
            if message["role"] != "assistant":
                text = message["content"]
                assert text in sent or json.dumps(text)[1:-1] in sent, "nothing is dropped in silence"
        try:
            assert not is_whole or sent == self.renderer.render(self.chat, tools=self.tools)
        except ValueError:
            assert not is_whole, "what the template refuses is gone on from all the same"

    def check_training(self) -> int:
        """Return the number of branches."""
        branches = self.play.capture.rollout(0, Outcome(), 1.0)
        check_trained(branches, self.sampled)
        return len(branches)


@pytest.mark.parametrize(
    "name", sorted(name for name in TEMPLATES if base(name) not in NO_TEXT | CUTS_NOTHING)
)
def test_growing_conversation_is_one_branch_trained_as_sampled(
    name: str, renderer_for: Callable[[str], HFChatTokenizer]
) -> None:
    stories = [(title, turns, None) for title, turns in plain_stories()]
    if base(name) not in NO_TOOLS:
        stories += [(title, turns, TOOLS) for title, turns in tool_stories(name)]
    for title, turns, tools in stories:
        told = Told(renderer_for(name), tools)
        for turn in turns:
            told.turn(turn)
        assert set(told.hows[1:]) <= {"extended", "realigned"}, title
        assert told.hows[0] == "new"
        assert told.check_training() == 1, title
        if title == "plain":
            assert ("realigned" in told.hows) == (name in REWRITES), title


@pytest.mark.parametrize("name", sorted({base(name) for name in TEMPLATES} - EDITED_REFUSED))
@pytest.mark.parametrize("kind", ["edited", "trimmed"])
def test_edited_history_begins_one_branch(
    kind: str, name: str, renderer_for: Callable[[str], HFChatTokenizer]
) -> None:
    told = Told(renderer_for(name), None)
    for turn in PLAIN[:2]:
        told.turn(turn)
    if kind == "edited":
        told.chat[-1] = assistant("Edited.")
    else:
        told.chat = told.chat[2:]
    told.turn(PLAIN[2])
    told.turn(plain([user("four")], "Seven."))
    assert (told.hows[2], "edited" in told.hows[3:]) == ("edited", False)
    assert told.check_training() == 2


@pytest.mark.parametrize("name", sorted(name for name in TEMPLATES if base(name) in NO_TEXT))
def test_template_that_writes_no_texts_is_refused(
    name: str, renderer_for: Callable[[str], HFChatTokenizer]
) -> None:
    with pytest.raises(ValueError, match=r"leaves out what messages\[0\] says: (.|\n)*model.chat_template"):
        Told(renderer_for(name), None).turn(PLAIN[0])
