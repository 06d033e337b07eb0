"""Forms in which a harness returns an answer, edits, omitted messages, template settings, untrained calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_capture_cases import END, Message, Play, assistant, completion, plan, user
from gateway_cases import gateway_world, in_loop
from test_gateway_capture_matrix import renderers

from asyncrl.agents.endpoint.prefix_match import left_out
from asyncrl.agents.endpoint.reasoning import THINKING
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Outcome
from asyncrl.rollouts.tokenizer import HFChatTokenizer

Renderers = Callable[..., HFChatTokenizer]
EOT = "<|eot_id|>"
IM_END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("answers"))


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
def test_answer_may_return_in_another_form_at_each_call(template: str, renderer_for: Renderers) -> None:
    for first in FORMS.values():
        for second in FORMS.values():
            play = Play(renderer_for(template))
            play.ask([user("2+2?")], f"{THOUGHT}Four.{IM_END}")
            play.ask([user("2+2?"), first, user("Sure?")], f"{THOUGHT}Four.{IM_END}")
            last = plan(play.capture, [user("2+2?"), second, user("Sure?"), first, user("Why?")])
            assert last.how in ("extended", "realigned")
            assert last.parent is not None
            assert last.parent.name == "chatcmpl-1"


def test_edited_thought_is_an_edit(renderer_for: Renderers) -> None:
    play = Play(renderer_for("qwen3"))
    play.ask([user("2+2?")], f"{THOUGHT}Four.{IM_END}")
    planned = plan(play.capture, [user("2+2?"), assistant("Four.", reasoning_content="No."), user("Sure?")])
    assert (planned.how, planned.parent) == ("edited", None)


def test_equal_answers_are_told_apart_by_their_thoughts() -> None:
    play = Play()
    for thought in ("one", "two"):
        play.ask([user("a")], f"<think>{thought}</think>yes{END}")
    apart = plan(play.capture, [user("a"), assistant("yes", reasoning_content="two"), user("b")])
    lost = plan(play.capture, [user("a"), assistant("yes"), user("b")])
    assert apart.parent is not None
    assert lost.parent is not None
    assert (apart.parent.name, lost.parent.name) == ("chatcmpl-1", "chatcmpl-0")


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
def test_end_of_a_call_is_not_repeated(sampled: str, behind: str, renderer_for: Renderers) -> None:
    renderer = renderer_for("qwen3")
    play = Play(renderer)
    play.ask([user("1?")], sampled, message=assistant("", tool_calls=[ADD]))
    planned = plan(play.capture, [user("1?"), assistant("", tool_calls=[ADD]), RESULT])
    added = renderer.decode(planned.added.tolist(), skip_special_tokens=False)
    assert planned.how == "realigned"
    assert added.partition("\n<|im_start|>user")[0].removeprefix(IM_END if EOT in sampled else "") == behind


# ---- what a template leaves out


def test_message_is_found_however_the_template_writes_it() -> None:
    said = [user(text) for text in ("one", 'the "two"', "drei \u00fc", "Four  and\nfive")]
    text = r'one {"the \"two\""} drei \u00fc FOUR AND FIVE'
    assert left_out(said, text, THINKING) is None
    assert left_out([*said, user("six")], text, THINKING) == 4
    many = [user(f"message {number} says something") for number in range(3000)]
    whole = "".join(message["content"] for message in many)
    assert left_out(many, whole, THINKING) is None
    assert left_out([*many, user("no")], whole, THINKING) == 3000


def test_developer_is_the_system_where_the_template_knows_none(renderer_for: Renderers) -> None:
    chat = [{"role": "developer", "content": "Be brief."}, user("Hi.")]
    as_system = [{"role": "system", "content": "Be brief."}, user("Hi.")]
    for template in ("qwen3", "qwen2_5", "deepseekv3", "llama3_1", "glm4moe"):
        renderer = renderer_for(template)
        assert renderer.render(chat) == renderer.render(as_system)
        assert "Be brief." in renderer.render(chat)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in renderer_for("gptoss").render(chat)


# ---- settings of the template

OFF = "<think>\n\n</think>\n\n"


def test_settings_of_run_and_call_reach_the_template(renderer_for: Renderers) -> None:
    chat = [user("Hi.")]
    plain = renderer_for("qwen3")
    no_thoughts = renderer_for("qwen3", enable_thinking=False)
    assert not plain.render(chat).endswith(OFF)
    assert plain.render(chat, settings={"enable_thinking": False}).endswith(OFF)
    assert no_thoughts.render(chat, settings={"other": 1}).endswith(OFF)
    assert not no_thoughts.render(chat, settings={"enable_thinking": True}).endswith(OFF)
    reserved = {"messages": [], "add_generation_prompt": False, "bos_token": "x", "chat_template": "x"}
    assert plain.render(chat, settings=reserved) == plain.render(chat)
    with pytest.raises(ConfigError, match=r"does not read thinking(.|\n)*may set .*enable_thinking"):
        renderer_for("qwen3", thinking=False)


def test_call_with_other_settings_continues_the_same_answers(renderer_for: Renderers) -> None:
    renderer = renderer_for("qwen3")
    capture = Play(renderer).capture
    chat: list[Message] = [user("Hi.")]
    for number, settings in enumerate(({}, {"enable_thinking": False}, None, {"enable_thinking": False})):
        match = capture.match(chat, None, settings=settings)
        assert match.text.endswith(OFF) == bool(settings)
        planned = capture.plan(match, renderer.encode(match.text))
        assert planned.how in (("new",) if not number else ("extended", "realigned"))
        answer = assistant(f"Yes {number}.")
        capture.record(
            planned, completion(renderer.encode(f"Yes {number}.{EOT}")), answer, f"chatcmpl-{number}"
        )
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
def test_untrained_answers_are_context(are_trained: tuple[bool, ...], trained: str, ends_with: str) -> None:
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

    with pytest.raises(RolloutFailure, match=r"not one sampled token to train on(.|\n)*Way out"):
        untrained(False, False).capture.rollout(0, Outcome(), 1.0)


# ---- over HTTP


@in_loop
async def test_message_that_the_template_omits_gets_400(renderer_for: Renderers) -> None:
    renderer = renderer_for("qwen3_vl")
    async with gateway_world(tokenizer=renderer) as world:
        chat = [user("Hi."), {"role": "developer", "content": "Secret."}]
        status, answer = await world.post({"messages": chat})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "the chat template leaves out what messages[1] says" in answer["error"]["message"]
