"""Thoughts and forced tool calls over HTTP, with the chat templates that trl ships."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import check_trained, completion, user
from gateway_cases import World, gateway_world, in_loop, num_forked
from test_gateway_capture_matrix import (
    NO_TEXT,
    NO_TOOLS,
    TEMPLATES,
    TOOLS,
    Teller,
    base,
    called,
    renderers,
    result,
)
from text_tokenizers import byte_level, save

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.messages.records import Completion, Outcome, SamplingRequest
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars
from asyncrl.rollouts.tokenizer import HFChatTokenizer

KNOWING = sorted({base(name) for name in TEMPLATES} - NO_TEXT - NO_TOOLS)
OPENING = {name for name in KNOWING if name in ("qwen3_5_think", "qwen3_6", "qwen3_8")}
OPENING |= {name for name in KNOWING if name.startswith("nemotron")}
"""Their prompts begin a thought."""


Renderers = Callable[[str], HFChatTokenizer]


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("templates"))


@dataclass
class Told:
    """An engine that says what it was given, one answer a call."""

    tokenizer: HFChatTokenizer
    answers: list[str] = field(default_factory=list)
    grammar: str | None = None
    sampled: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)

    async def generate(self, request: SamplingRequest, **_: Any) -> Completion:
        ids = self.tokenizer.encode(self.answers.pop(0))
        self.grammar = request.grammar
        self.sampled.append((request.prompt_ids.tolist(), ids))
        return completion(ids, -len(self.sampled))

    def prompt(self) -> str:
        return self.tokenizer.decode(self.sampled[-1][0], skip_special_tokens=False)


def world_of(engine: Told, template: str, **config: Any) -> Any:
    sizes = {"max_tokens": 400, "max_prompt_tokens": 20_000, "max_length": 24_000, "vocab_size": 2000}
    return gateway_world(engine, tool_format="auto", template=template, **sizes, **config)


def check_one_branch(world: World, engine: Told) -> None:
    assert num_forked(world) == 0
    rollout = world.session.rollout(0, Outcome(), 1.0)
    assert len(rollout) == 1
    check_trained(rollout, engine.sampled)


NAMED = {"type": "function", "function": {"name": "add"}}
FORCED = {"tools": TOOLS, "tool_choice": NAMED}


@pytest.mark.parametrize("name", KNOWING)
@in_loop
async def test_forced_call_is_not_begun_inside_a_thought(name: str, renderer_for: Renderers) -> None:
    """It is called, its result is in the next prompt, and both are one branch."""
    renderer, tool_format = renderer_for(name), find_tool_format("auto", TEMPLATES[name])
    engine, prefill = Told(renderer), tool_format.prefill("add") or ""
    chat = [user("go")]
    shown = renderer.render(chat, tools=TOOLS)
    assert shown.rstrip().endswith("<think>") == (name in OPENING)
    _, found, rest = Teller(renderer, chat, TOOLS).answer(called(0), result(0), last="70").partition(prefill)
    assert found, "this is how the template writes a call"
    async with world_of(engine, TEMPLATES[name]) as world:
        engine.answers.append(rest)
        status, answer = await world.post({"messages": chat, **FORCED})
        assert status == 200, answer
        begun = engine.prompt().removeprefix(shown).removesuffix(prefill)
        assert begun == ("\n</think>\n\n" if name in OPENING else "")
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 70})
        engine.answers.append("Done.")
        more = [*chat, choice["message"], {**result(0), "tool_call_id": call["id"]}]
        status, answer = await world.post({"messages": more, "tools": TOOLS})
        assert status == 200, answer
        if name in OPENING and not name.startswith("nemotron"):
            assert engine.prompt() == renderer.render(more, tools=TOOLS), "as the template writes no thought"
        check_one_branch(world, engine)


@pytest.mark.parametrize("has_token", [False, True], ids=["text", "token"])
@pytest.mark.parametrize("space", ["\n", ""])
@in_loop
async def test_forced_call_with_a_grammar_follows_the_opened_thought(
    tmp_path: Path, has_token: bool, space: str
) -> None:
    """The thought is sampled, free, and nothing is written for the model."""
    prompt = "<|im_start|>assistant\\n"
    opening = TEMPLATES["qwen2_5"].replace(f"{prompt}' }}}}", f"{prompt}<think>{space}' }}}}")
    assert opening != TEMPLATES["qwen2_5"]
    tokenizer, marks = byte_level(), ["<think>", "</think>"] if has_token else []
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *marks])
    save(tokenizer, tmp_path)
    (tmp_path / "opening.jinja").write_text(opening)
    renderer = HFChatTokenizer(tmp_path, chat_template=tmp_path / "opening.jinja")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 70}}\n</tool_call>'
    engine = Told(renderer, [f"hm\n</think>\n\n{call}"] * 2)
    async with world_of(engine, opening) as world:
        for choice in (NAMED, "required"):
            status, answer = await world.post({"messages": [user("go")], **FORCED, "tool_choice": choice})
            assert status == 200, answer
            assert engine.prompt() == renderer.render([user("go")], tools=TOOLS)
            (told,) = answer["choices"][0]["message"]["tool_calls"]
            assert told["function"]["arguments"] == '{"a": 70}'
            assert engine.grammar is not None
            grammars, (_, ids) = TokenGrammars(renderer._tokenizer, 440), engine.sampled[-1]
            assert grammars.begin(engine.grammar, ids[:-1]).allowed()[ids[-1]], "all of it is allowed"
            with pytest.raises(GrammarError):
                grammars.begin(engine.grammar, renderer.encode("</think>I say"))
