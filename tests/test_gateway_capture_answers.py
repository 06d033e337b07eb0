"""In what forms an answer is found again when a harness sends it back, what is an edit, what a template may
not leave out, and what is sampled and not trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import END, CharRenderer, Message, Play, assistant, completion, plan, user
from gateway_cases import gateway_world, in_loop
from text_tokenizers import byte_level, save
from tokenizers import AddedToken

from asyncrl.agents.endpoint.capture import Capture, GatewayStats
from asyncrl.agents.endpoint.prefix_match import left_out
from asyncrl.agents.endpoint.reasoning import THINKING
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Completion, Outcome, SamplingRequest
from asyncrl.rollouts.tokenizer import HFChatTokenizer

Load = Callable[..., HFChatTokenizer]
EOT = "<|eot_id|>"
IM_END = "<|im_end|>"
SPECIAL = [
    "<|im_start|>",
    IM_END,
    "<|channel>",
    "<channel|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|turn>",
    "<turn|>",
    '<|"|>',
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tokenizer with a template that trl ships."""
    folder, tokenizer = tmp_path_factory.mktemp("answers"), byte_level()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    save(tokenizer, folder)
    ends = {"eos_token_id": [tokenizer.token_to_id(token) for token in (IM_END, EOT, "<turn|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends))

    def loaded(name: str, **settings: Any) -> HFChatTokenizer:
        file = folder / "template.jinja"
        shipped = Path(str(resources.files("trl"))) / "chat_templates" / f"{name}.jinja"
        file.write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")
        return HFChatTokenizer(folder, chat_template=file, chat_template_kwargs=settings)

    return loaded


# ---- forms of an answer


THOUGHT = "<think>\nhm\n</think>\n\n"
FORMS: dict[str, Message] = {
    "as it was": assistant(f"{THOUGHT}Four."),
    "spaced": assistant("<think>hm</think>Four."),
    "apart": assistant("Four.", reasoning_content="hm"),
    "both": assistant(f"{THOUGHT}Four.", reasoning_content="hm\n"),
    "left out": assistant("Four."),
}


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "qwen3_5_think", "llama3_1"])
def test_a_harness_may_send_an_answer_back_in_another_form_at_each_call(template: str, load: Load) -> None:
    for first in FORMS.values():
        for second in FORMS.values():
            play = Play(load(template))
            play.ask([user("2+2?")], f"{THOUGHT}Four.{IM_END}")
            play.ask([user("2+2?"), first, user("Sure?")], f"{THOUGHT}Four.{IM_END}")
            last = plan(play.capture, [user("2+2?"), second, user("Sure?"), first, user("Why?")])
            assert last.how in ("extended", "realigned")
            assert last.parent is not None
            assert last.parent.name == "chatcmpl-1"


@pytest.mark.parametrize(
    "edited", [assistant("<think>\nNo.\n</think>\n\nFour."), assistant("Four.", reasoning_content="No.")]
)
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5"])
def test_a_thought_that_was_edited_is_an_edit(edited: Message, template: str, load: Load) -> None:
    play = Play(load(template))
    play.ask([user("2+2?")], f"{THOUGHT}Four.{IM_END}")
    planned = plan(play.capture, [user("2+2?"), edited, user("Sure?")])
    assert (planned.how, planned.parent) == ("edited", None)


def test_equal_answers_with_other_thoughts_that_are_left_out_stay_apart_while_they_can() -> None:
    play = Play()
    for thought in ("one", "two"):
        play.ask([user("a")], f"<think>{thought}</think>yes{END}")
    apart = plan(play.capture, [user("a"), assistant("yes", reasoning_content="two"), user("b")])
    lost = plan(play.capture, [user("a"), assistant("yes"), user("b")])
    assert apart.parent is not None
    assert lost.parent is not None
    assert (apart.parent.name, lost.parent.name) == ("chatcmpl-1", "chatcmpl-0")


def test_a_branch_begins_where_the_history_was_edited_and_says_so() -> None:
    play = Play()
    play.ask([user("a")], f"1{END}")
    play.ask([user("a"), assistant("1"), user("b")], f"2{END}")
    planned = plan(play.capture, [user("a"), assistant("1"), user("b"), assistant("edited"), user("c")])
    assert planned.parent is not None
    assert (planned.how, planned.parent.name) == ("edited", "chatcmpl-0"), (
        "what comes before is not sent anew"
    )


CALL = '{"name": "add", "arguments": {"a": 1}}'
OTHER_ORDER = '{"arguments": {"a": 1}, "name": "add"}'
ADD: Message = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RESULT: Message = {"role": "tool", "tool_call_id": "c", "content": "The tool says 42"}


@pytest.mark.parametrize(
    ("sampled", "behind"),
    [
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>{EOT}", ""),
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>", IM_END),
        (f"I add.\n<tool_call>\n{CALL}</tool_call>{IM_END}", ""),
        (f"I add.\n<tool_call>{OTHER_ORDER}</tool_call>", IM_END),
    ],
)
def test_what_follows_a_call_is_not_said_twice_in_whatever_form_it_was_written(
    sampled: str, behind: str, load: Load
) -> None:
    renderer = load("qwen3")
    play = Play(renderer)
    play.ask([user("1?")], sampled, message=assistant("", tool_calls=[ADD]))
    planned = plan(play.capture, [user("1?"), assistant("", tool_calls=[ADD]), RESULT])
    added = renderer.decode(planned.added.tolist(), skip_special_tokens=False)
    assert planned.how == "realigned"
    assert added.partition("\n<|im_start|>user")[0].removeprefix(IM_END if EOT in sampled else "") == behind


# ---- what a template leaves out


def test_what_a_message_says_is_found_however_it_is_written_and_what_is_not_there_is_named() -> None:
    said = [user(text) for text in ("one", 'the "two"', "drei \u00fc", "Four  and\nfive")]
    text = r'one {"the \"two\""} drei \u00fc FOUR AND FIVE'
    assert left_out(said, text, THINKING) is None
    assert left_out([*said, user("six")], text, THINKING) == 4
    many = [user(f"message {number} says something") for number in range(3000)]
    whole = "".join(message["content"] for message in many)
    assert left_out(many, whole, THINKING) is None
    assert left_out([*many, user("no")], whole, THINKING) == 3000


def test_a_message_that_the_template_leaves_out_is_refused_with_the_reason(load: Load) -> None:
    system = {"role": "system", "content": "Secret."}
    why = r"leaves out what messages\[1\] says: it has no place there for role system; .*model.chat_template"
    with pytest.raises(ValueError, match=why):
        plan(Play(load("qwen3_vl")).capture, [user("Hi."), system])
    plan(Play(load("qwen3")).capture, [user("Hi."), system])


def test_a_developer_is_the_system_where_the_template_knows_none(load: Load) -> None:
    chat = [{"role": "developer", "content": "Be brief."}, user("Hi.")]
    as_system = [{"role": "system", "content": "Be brief."}, user("Hi.")]
    for template in ("qwen3", "qwen2_5", "deepseekv3", "llama3_1", "glm4moe"):
        renderer = load(template)
        assert renderer.render(chat) == renderer.render(as_system)
        assert "Be brief." in renderer.render(chat)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in load("gptoss").render(chat)


# ---- settings of the template


def test_settings_of_the_run_and_of_a_call_reach_the_template(load: Load) -> None:
    chat, off = [user("Hi.")], "<think>\n\n</think>\n\n"
    plain, no_thoughts = load("qwen3"), load("qwen3", enable_thinking=False)
    assert not plain.render(chat).endswith(off)
    for renderer, settings in (
        (plain, {"enable_thinking": False}),
        (no_thoughts, None),
        (no_thoughts, {"other": 1}),
    ):
        assert renderer.render(chat, settings=settings).endswith(off)
    assert not no_thoughts.render(chat, settings={"enable_thinking": True}).endswith(off)
    reserved = {
        "messages": [],
        "add_generation_prompt": False,
        "bos_token": "x",
        "chat_template": "x",
        "tokenize": 1,
    }
    assert plain.render(chat, settings=reserved) == plain.render(chat)


def test_settings_that_the_template_does_not_read_are_refused_in_a_config(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"does not read thinking(.|\n)*may set .*enable_thinking"):
        load("qwen3", thinking=False)


def test_a_call_with_other_settings_goes_on_from_the_same_answers(load: Load) -> None:
    capture = Play(load("qwen3")).capture
    chat: list[Message] = [user("Hi.")]
    renderer: Any = capture._renderer
    for number, settings in enumerate(({}, {"enable_thinking": False}, None, {"enable_thinking": False})):
        draft = capture.match(chat, None, settings=settings)
        assert draft.text.endswith("<think>\n\n</think>\n\n") == bool(settings)
        planned = capture.plan(draft, renderer.encode(draft.text))
        assert planned.how in (("new",) if not number else ("extended", "realigned"))
        play_ids = renderer.encode(f"Yes {number}.{EOT}")
        answer = assistant(f"Yes {number}.")
        capture.record(planned, completion(play_ids), answer, f"chatcmpl-{number}")
        chat = [*chat, answer, user("And?")]


# ---- what is sampled and not trained


def untrained(*are_trained: bool) -> Play:
    """A conversation; its third call, if there is one, goes on from the first."""
    play = Play()
    chats = [
        [user("a")],
        [user("a"), assistant("1"), user("b")],
        [user("a"), assistant("1"), user("b"), assistant("2"), user("c")],
    ]
    for number, is_trained in enumerate(are_trained, 1):
        play.answer(plan(play.capture, chats[number - 1]), f"{number}{END}", is_trained=is_trained)
    return play


@pytest.mark.parametrize(
    ("are_trained", "trained", "ends_with"),
    [((True, False, True), "13", "3"), ((False, True, False), "2", "2"), ((True, False, False), "1", "1")],
)
def test_what_is_not_trained_is_context_of_what_is(
    are_trained: tuple[bool, ...], trained: str, ends_with: str
) -> None:
    play = untrained(*are_trained)
    rewards = {
        f"chatcmpl-{number}": float(number) for number, is_trained in enumerate(are_trained) if is_trained
    }
    for outcome in (Outcome(), Outcome(turn_rewards=rewards)):
        (branch,) = play.capture.rollout(0, outcome, 1.0)
        assert play.renderer.decode(branch.token_ids[branch.loss_mask].tolist()) == trained
        assert play.renderer.decode(branch.token_ids.tolist()).endswith(ends_with)
        assert not branch.behaviour_logprobs[~branch.loss_mask].any()
        spanned = [place for span in branch.version_spans for place in range(span.start, span.end)]
        assert spanned == branch.loss_mask.nonzero()[0].tolist()
        assert [credit.reward for credit in branch.credits] == (
            list(rewards.values()) if outcome.turn_rewards else []
        )


def test_a_rollout_of_which_nothing_is_trained_is_a_failure_that_says_why() -> None:
    with pytest.raises(
        RolloutFailure, match=r"none of the 4 tokens that the harness sampled is trained(.|\n)*Way out"
    ):
        untrained(False, False).capture.rollout(0, Outcome(), 1.0)


def test_thoughts_have_the_marks_of_the_model() -> None:
    play = Play()
    play.capture = Capture(CharRenderer(), GatewayStats(), ("[THINK]", "[/THINK]"))
    play.ask([user("a")], f"[THINK]hm[/THINK]yes{END}")
    planned = plan(play.capture, [user("a"), assistant("yes", reasoning_content="hm"), user("b")])
    assert planned.how == "realigned"


# ---- over HTTP


@dataclass
class SaysInTurn:
    """An engine that says these texts, one a call."""

    tokenizer: HFChatTokenizer
    texts: list[str]
    prompts: list[str] = field(default_factory=list)

    async def generate(self, request: SamplingRequest, **_: Any) -> Completion:
        self.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        return completion(self.tokenizer.encode(self.texts[len(self.prompts) - 1]))


def gemma_call(text: str) -> list[tuple[str, str]] | None:
    """A tool format of one's own."""
    return [("add", '{"a": 1}')] if "call:add" in text else None


@in_loop
async def test_a_tools_result_reaches_a_gemma_that_spoke_before_its_call(load: Load) -> None:
    renderer = load("gemma4")
    engine = SaysInTurn(renderer, ["I should add.<|tool_call>call:add{a:1}<tool_call|>", "It is 42."])
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    tool_format = f"{__name__}:gemma_call"
    async with gateway_world(engine, tokenizer=renderer, tool_format=tool_format) as world:
        chat = [user("What is 1+1?")]
        _, answer = await world.post({"messages": chat, "tools": tools})
        message = answer["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": "THE TOOL SAYS 42",
        }
        status, _ = await world.post({"messages": [*chat, message, result], "tools": tools})
        behind = engine.prompts[1].removeprefix(engine.prompts[0] + engine.texts[0])
        assert (status, world.gateway.stats().realigned) == (200, 1)
        quoted = '<|"|>THE TOOL SAYS 42<|"|>'
        assert behind == "<|tool_response>response:add{value:" + quoted + "}<tool_response|>"


@in_loop
async def test_what_a_template_leaves_out_is_a_400_that_says_so(load: Load) -> None:
    renderer = load("qwen3_vl")
    async with gateway_world(SaysInTurn(renderer, []), tokenizer=renderer) as world:
        chat = [user("Hi."), {"role": "developer", "content": "Secret."}]
        status, answer = await world.post({"messages": chat})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "the chat template leaves out what messages[1] says" in answer["error"]["message"]


@in_loop
async def test_a_thought_with_the_marks_of_gemma_may_come_back_in_every_form(load: Load) -> None:
    renderer = load("gemma4")
    for thoughts in ("inline", "apart"):
        engine = SaysInTurn(renderer, ["<|channel>thought\nhm\n<channel|>Four.<turn|>", *["Yes.<turn|>"] * 4])
        config = {"tokenizer": renderer, "tool_format": "gemma4", "thoughts": thoughts}
        async with gateway_world(engine, **config) as world:
            chat = [user("2+2?")]
            _, answer = await world.post({"messages": chat})
            got = answer["choices"][0]["message"]
            assert ("hm" in got["content"]) == (thoughts == "inline")
            for back in (got, assistant("Four."), assistant("Four.", reasoning_content="hm")):
                await world.post({"messages": [*chat, back, user("Sure?")]})
            await world.post({"messages": [*chat, assistant("Four.", reasoning_content="no"), user("Sure?")]})
            stats = world.gateway.stats()
            assert (stats.extended + stats.realigned, stats.edited) == (3, 1)


@in_loop
async def test_a_stop_text_may_be_put_back_behind_a_thought_that_is_left_out(load: Load) -> None:
    renderer = load("gemma4")
    engine = SaysInTurn(renderer, ["<|channel>thought\nhm\n<channel|><code>1</code>", "Yes.<turn|>"])
    async with gateway_world(engine, tokenizer=renderer, tool_format="gemma4", thoughts="apart") as world:
        _, answer = await world.post({"messages": [user("2+2?")], "stop": ["</code>"]})
        shown = answer["choices"][0]["message"]["content"]
        assert shown == "<code>1"
        await world.post({"messages": [user("2+2?"), assistant(f"{shown}</code>"), user("Sure?")]})
        assert world.gateway.stats().realigned == 1
