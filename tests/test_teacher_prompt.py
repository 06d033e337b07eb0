"""A teacher's own prompt: its tokens with every chat template, its columns, and the
losses of TRL and tinker-cookbook on the same batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from costly_cases import every_third_is_quick
from engine_processes import SECRET, engine_process
from taught_cases import VOCABULARY, make_scoring, plain_logprobs, taught
from template_oracle import (
    KINDS,
    Kind,
    Message,
    Oracle,
    Refused,
    collected,
    installed,
    story,
)
from tiny_model import make_tiny_model
from token_cases import trajectory_of
from torch import Tensor
from trainer_cases import MakeStep, batch_of, gradient_of
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import PromptUnusable, RewardFailure, RolloutFailure
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.extensions.scoring.teacher import Scoring, Teacher
from asyncrl.extensions.scoring.teacher_config import TeacherConfig
from asyncrl.extensions.scoring.teacher_prompt import TeacherPrompts
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.messages.records import Prompt, Rollout, Trajectory, VersionSpan
from asyncrl.messages.tokens import BEHAVIOUR, TEACHER, Tokens
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.extension("scoring")

TEMPLATES = installed() | collected(Path(__file__).parent / "chat_templates")
FOLDER = os.environ.get("ASYNCRL_TEMPLATES", "")
TEMPERATURE = 0.7


def config_of(model: Path | str = "m", **rollout: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {"python": "asyncrl.tasks.toy:Letters"},
        "rollout": {"max_prompt_tokens": 20_000} | rollout,
        "algorithm": {"distill_weight": 1},
        "teacher": {"policy": True, "prompt": "hint"},
    }
    return RunConfig.model_validate(values)


def rollout_of(before: Sequence[int], sampled: Sequence[int]) -> Rollout:
    """Return a rollout of one answer."""
    mask = np.arange(len(before) + len(sampled)) >= len(before)
    spans = (VersionSpan(len(before), len(mask), 0),)
    return (trajectory_of(0, [*before, *sampled], mask, np.where(mask, -1, 0), spans),)


def prompt_of(messages: Sequence[Message], **info: Any) -> Prompt:
    return Prompt("0/0", tuple(messages), info=info)


class Places:
    """Answers with the place of each token in the teacher's text."""

    async def ask(self, request: ScoreRequest) -> ScoreResponse:
        self.asked = request
        num = len(request.token_ids)
        places = range(request.start, num)
        return ScoreResponse(logprobs=[-float(place) for place in places])


def annotated(
    scoring: Scoring, rollout: Rollout, prompt: Prompt, siblings: Sequence[Rollout] = ()
) -> tuple[Rollout, Places]:
    places = Places()
    found = asyncio.run(scoring.annotate(places.ask, rollout, prompt, siblings))
    return found, places


def scoring_of(tokenizer: Any, source: str = "hint", **rollout: Any) -> Scoring:
    prompts = TeacherPrompts(source, config_of(**rollout), tokenizer)
    return make_scoring(prompts=prompts)


# ---- tokens


def oracle_of(template: str, kind: Kind, folder: Path) -> Oracle:
    if "▁" in template:  # sentencepiece would read it as a space
        kind = kind._replace(base="bytes")
    try:
        return Oracle(template, kind, folder)
    except Refused as refusal:
        if "bos_token" not in str(refusal):
            raise
        return Oracle(template, kind._replace(has_bos=True), folder)


def direct_ids(oracle: Oracle, chat: Sequence[Message]) -> list[int]:
    """Return the ids of transformers for the chat, with contents as texts or parts."""
    in_parts = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        for each in chat
    ]
    template = oracle.fast.apply_chat_template
    for form in ([*chat], in_parts):
        with contextlib.suppress(Exception):  # a template may raise anything
            text = template(form, add_generation_prompt=True, tokenize=False)
            if all(_bare(each["content"]) in _bare(text) for each in chat):
                return list(
                    template(form, add_generation_prompt=True, return_dict=False)
                )
    raise Refused("it writes neither texts nor parts")


def _bare(text: str) -> str:
    return "".join(text.split())


def deviations(template: str, kind: Kind, folder: Path) -> set[str]:
    """Compare what a teacher is asked with the template's own tokens; return the chats
    that the template refuses.
    """
    oracle = oracle_of(template, kind, folder)
    tokenizer = HFChatTokenizer(folder)
    found = set[str]()
    for title in ("plain", "system first"):
        turn = story(title)[0]
        text = "Ask 10. The answer of an expert:\n\nIt is 97! Now answer."
        expert = [*turn.new[:-1], {"role": "user", "content": text}]
        try:
            student_ids = direct_ids(oracle, turn.new)
            teacher_ids = direct_ids(oracle, expert)
        except Refused:
            found.add(title)
            continue
        sampled = oracle.sampled(turn.new, turn, None)
        rollout = rollout_of(student_ids, sampled)
        for hint in (text, expert):
            prompt = prompt_of(turn.new, hint=hint)
            (branch,), places = annotated(scoring_of(tokenizer), rollout, prompt)
            assert places.asked.token_ids == [*teacher_ids, *sampled]
            assert places.asked.start == len(teacher_ids)
            # Of each sampled token, its own logprob.
            logprobs = taught(branch.tokens)[len(student_ids) :]
            ends = range(len(teacher_ids), len(teacher_ids) + len(sampled))
            assert logprobs.tolist() == [-float(place) for place in ends]
            assert not taught(branch.tokens)[: len(student_ids)].any()
            assert branch.token_ids.tolist() == [*student_ids, *sampled]
    return found


REFUSED = {name: {"system first"} for name in ("trl.gemma", "trl.gemma_training")}


@pytest.mark.parametrize(("number", "name"), every_third_is_quick(enumerate(TEMPLATES)))
def test_teacher_reads_its_prompt_and_the_same_sample(
    number: int, name: str, tmp_path: Path
) -> None:
    kind = KINDS[7 * number % len(KINDS)]
    assert deviations(TEMPLATES[name], kind, tmp_path) == REFUSED.get(name, set())


@pytest.mark.long
@pytest.mark.skipif(
    not FOLDER, reason="ASYNCRL_TEMPLATES names no folder of scripts/templates.py"
)
def test_collected_templates_are_cut_as_exactly(tmp_path: Path) -> None:
    for number, (name, template) in enumerate(collected(Path(FOLDER)).items()):
        (tmp_path / name).mkdir()
        with contextlib.suppress(Refused):  # it writes no chat
            deviations(template, KINDS[7 * number % len(KINDS)], tmp_path / name)


# ---- functions


FUNCTIONS = """
async def best(prompt, attempt, siblings):
    prompt.info["seen"] = True
    solved = [one for one in siblings if one.reward > attempt.reward]
    if not solved:
        return None
    return prompt.info["rule"] + solved[0].text
def broken(prompt, attempt, siblings):
    return prompt.info["no"]
def number(prompt, attempt, siblings):
    return 3
"""


@pytest.fixture
def tokenizer(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HFChatTokenizer:
    (tmp_path / "teacher_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return HFChatTokenizer(tiny_model_dir)


def test_function_sees_the_siblings_and_may_give_nothing(
    tokenizer: HFChatTokenizer,
) -> None:
    question = [{"role": "user", "content": "1+2"}]
    asked = tokenizer.encode_chat(question)
    said = {text: tokenizer.encode(text) for text in ("3", "4")}
    poor, solved = (
        (replace(branch, reward=reward),)
        for reward, text in ((0.0, "4"), (1.0, "3"))
        for branch in rollout_of(
            asked, [*said[text], tokenizer.encode("<|im_end|>")[0]]
        )
    )
    prompt = prompt_of(question, rule="it is ")
    scoring = scoring_of(tokenizer, "teacher_functions:best")
    assert scoring.reads_groups
    (branch,), places = annotated(scoring, poor, prompt, [solved])
    message = {"role": "user", "content": "it is 3"}
    expected = tokenizer.encode_chat([message])
    assert places.asked.token_ids[: places.asked.start] == [*expected]
    assert prompt.info == {"rule": "it is "}, "the function gets a copy"
    (branch,), places = annotated(scoring, solved, prompt, [poor])
    assert not hasattr(places, "asked")
    assert taught(branch.tokens).tolist() == branch.tokens.behaviour_logprobs.tolist()
    assert scoring.wait_s
    assert scoring.gauges() == {
        "teacher/tokens": 2,
        "teacher/untaught": 1,
        "teacher/wait_s": scoring.wait_s,
    }


@pytest.mark.parametrize(
    ("source", "hint", "kind", "words"),
    [
        ("other", "x", PromptUnusable, r"has no column other; .* \['hint'\]"),
        ("hint", 3, PromptUnusable, "teacher.prompt=hint is not a valid prompt: 3"),
        ("hint", "a" * 90, PromptUnusable, r"has \d+ tokens"),
        (
            "hint",
            [{"role": "assistant", "content": "3"}],
            PromptUnusable,
            "ends with the assistant's message '3'",
        ),
        ("teacher_functions:broken", "x", RewardFailure, "raised KeyError: 'no'"),
        ("teacher_functions:number", "x", PromptUnusable, "is not a valid prompt: 3"),
    ],
)
def test_prompt_that_the_teacher_cannot_read_costs_a_rollout(
    tokenizer: HFChatTokenizer,
    source: str,
    hint: Any,
    kind: type[RolloutFailure],
    words: str,
) -> None:
    question = [{"role": "user", "content": "1+2"}]
    rollout = rollout_of(tokenizer.encode_chat(question), tokenizer.encode("3"))
    scoring = scoring_of(tokenizer, source, max_prompt_tokens=64)
    with pytest.raises(kind, match=words) as caught:
        annotated(scoring, rollout, prompt_of(question, hint=hint))
    assert type(caught.value) is kind
    assert caught.value.way_out


# ---- TRL


QUESTIONS = ("1+2?", "a word with b", "7*7=?")
EXPERTS = ("3", "maybe bee or bat", "it is 49")
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampled token": (
        {"distillation_mode": "sampled_token", "distillation_alpha": 1.0},
        {"loss": "reinforce", "distill_loss": "reverse_kl"},
    ),
    **{
        f"whole vocabulary, alpha {alpha}": (
            {"distillation_mode": "full_logits", "distillation_alpha": alpha},
            {"distill_loss": "jsd", "distill_beta": alpha},
        )
        for alpha in (0.0, 0.5, 1.0)
    },
}


def trl_batch(
    model: Any, folder: Path, completions: list[list[int]], **args: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Return TRL's trainer, made without its constructor, and its inputs: the student's
    and its own teacher's.
    """
    from accelerate import Accelerator
    from transformers import AutoTokenizer
    from trl.experimental.sdft import sdft_trainer as trl
    from trl.trainer.utils import pad

    tokenizer = AutoTokenizer.from_pretrained(folder)
    made: Any = object.__new__(trl.SDFTTrainer)
    vars(made).update(
        args=SimpleNamespace(
            teacher_prompt_template="{prompt}\n\n{privileged_context}",
            distillation_is_clip=None,
            teacher_model_kind="base",
            **args,
        ),
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template_kwargs={},
        max_prompt_length=None,
        num_loss_tokens_to_skip=0,
        temperature=TEMPERATURE,
        model_kwarg_keys=("logits_to_keep",),
        model=model,
        accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    prompts = [[{"role": "user", "content": text}] for text in QUESTIONS]
    inputs = dict[str, Tensor]()
    texts = {
        "prompt": (made._tokenize_prompts(prompts), "left"),
        "completion": (completions, "right"),
    }
    for name, (rows, side) in texts.items():
        ids = [torch.tensor(row) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        inputs[f"{name}_ids"] = pad(ids, tokenizer.pad_token_id, padding_side=side)
        inputs[f"{name}_mask"] = pad(ones, 0, padding_side=side)
    builder = trl.DemonstrationTeacherContextBuilder(made)
    both = (inputs["completion_ids"], inputs["completion_mask"])
    return made, inputs | builder.build(prompts, [*EXPERTS], *both)


class Lesson(NamedTuple):
    """Sampled answers, and their rollouts with the scores of a teacher that knows more."""

    teacher: Any
    student: Any
    completions: list[list[int]]
    branches: list[Trajectory]


@pytest.fixture
def lesson(tiny_model_dir: Path, tmp_path: Path) -> Lesson:
    folder = make_tiny_model(tmp_path / "teacher", seed=1)
    teacher_model, student_model = (
        AutoModelForCausalLM.from_pretrained(path) for path in (folder, tiny_model_dir)
    )
    rng = np.random.default_rng(2)
    completions = [rng.integers(6, VOCABULARY, num).tolist() for num in (4, 9, 6)]
    ours = HFChatTokenizer(tiny_model_dir)
    prompts = [
        prompt_of([{"role": "user", "content": text}], hint=f"{text}\n\n{expert}")
        for text, expert in zip(QUESTIONS, EXPERTS, strict=True)
    ]
    rollouts = []
    for prompt, sampled in zip(prompts, completions, strict=True):
        (branch,) = rollout_of(ours.encode_chat(prompt.messages), sampled)
        # On-policy: the engine has drawn from these weights.
        logprobs = np.append(0, plain_logprobs(student_model, branch, TEMPERATURE))
        drawn = np.where(branch.loss_mask, logprobs, 0).astype(np.float32)
        tokens = branch.tokens.with_columns({"behaviour_logprobs": drawn})
        rollouts.append((replace(branch, tokens=tokens),))
    scoring = make_scoring(
        TEMPERATURE,
        top_k=VOCABULARY,
        prompts=TeacherPrompts("hint", config_of(tiny_model_dir), ours),
    )
    spec = {
        "name": "teacher",
        "slots": 1,
        "score_slots": 2,
        "max_length": 300,
        "model_path": str(folder),
        "device": "cpu",
        "aside_dir": str(tmp_path),
    }

    async def story(url: str) -> list[Rollout]:
        caller = Caller("teacher", url, SECRET)
        teacher = Teacher(caller, TeacherConfig(path=str(folder)))
        calls = map(partial(scoring.annotate, teacher.score), rollouts, prompts)
        found = await asyncio.gather(*calls)
        await caller.aclose()
        return found

    with engine_process("embedded", spec, tmp_path / "server") as server:
        branches = [branch for (branch,) in asyncio.run(story(server.url))]
    return Lesson(teacher_model, student_model, completions, branches)


# TRL's import is no warning of ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.xdist_group("trl")
def test_loss_of_a_teacher_that_knows_more_equals_trls_sdft(
    lesson: Lesson, make_step: MakeStep, tiny_model_dir: Path
) -> None:
    teacher_model, student_model, completions, branches = lesson
    rows = [(one.token_ids.tolist(), one.loss_mask.tolist()) for one in branches]
    header, _ = batch_of([rows])
    arrays = Tokens.join([one.tokens for one in branches])
    plain = arrays.kept(lambda column: column.name in (BEHAVIOUR, TEACHER))
    for mode, (args, algorithm) in MODES.items():
        trainer, inputs = trl_batch(student_model, tiny_model_dir, completions, **args)
        logits = trainer._compute_teacher_student_logits(
            student_model, teacher_model, inputs
        )
        student_model.zero_grad()
        loss = trainer._compute_self_distillation_loss(student_model, inputs, logits)
        loss.backward()
        settings = {"distill_weight": 1.0, "reward_weight": 0, "aggregate": "sequence"}
        given = plain
        if algorithm["distill_loss"] == "jsd":
            settings["distill_top_k"] = VOCABULARY
            given = arrays
        step = make_step(algorithm=settings | algorithm, temperature=TEMPERATURE)
        found = gradient_of(step, header, given).loss
        assert found == pytest.approx(loss.item(), abs=1e-5), mode
        for name, parameter in student_model.named_parameters():
            torch.testing.assert_close(
                step.masters.named[name].grad, parameter.grad, rtol=1e-4, atol=1e-5
            )


class PlainTeacher:
    """What the cookbook asks of tinker's SamplingClient, by plain transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def compute_logprobs(self, given: Any) -> Any:
        ids = torch.tensor(given.to_ints())
        with torch.no_grad():
            logits_TV = self._model(ids[None]).logits[0] / TEMPERATURE
        scores_TV = torch.log_softmax(logits_TV, -1)[:-1]
        logprobs = scores_TV.gather(1, ids[1:, None])[:, 0].tolist()

        async def answer() -> list[float | None]:
            return [None, *logprobs]

        return SimpleNamespace(coroutine=answer)


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_advantages_of_a_teacher_that_knows_more_equal_the_cookbooks(
    lesson: Lesson, tiny_model_dir: Path
) -> None:
    """pip install --no-deps --target DIR tinker-cookbook tinker chz tml-renderers pyrage
    blobfile termcolor pycryptodomex; PYTHONPATH=DIR. Its other dependencies are ours.
    """
    why = "tinker-cookbook is not on the path"
    sdft = pytest.importorskip("tinker_cookbook.distillation.sdft", reason=why)
    import tinker

    ours = HFChatTokenizer(tiny_model_dir)
    chats = [
        [{"role": "user", "content": f"{text}\n\n{expert}"}]
        for text, expert in zip(QUESTIONS, EXPERTS, strict=True)
    ]
    teacher_prompts = [
        tinker.ModelInput.from_ints([*map(int, ours.encode_chat(chat))])
        for chat in chats
    ]
    data = []
    for branch in lesson.branches:
        # Position t predicts token t + 1.
        shifted = {
            "target_tokens": torch.tensor(branch.token_ids[1:], dtype=torch.int64),
            "mask": torch.tensor(branch.loss_mask[1:], dtype=torch.float32),
            "logprobs": torch.tensor(branch.tokens.behaviour_logprobs[1:]),
        }
        tensors = {
            name: tinker.TensorData.from_torch(one) for name, one in shifted.items()
        }
        inputs = tinker.ModelInput.from_ints(branch.token_ids[:-1].tolist())
        data.append(tinker.Datum(model_input=inputs, loss_fn_inputs=tensors))
    places = [{"group_idx": number} for number in range(len(data))]
    given = (PlainTeacher(lesson.teacher), teacher_prompts)
    asyncio.run(sdft.compute_sdft_advantages(data, places, *given))
    for datum, branch in zip(data, lesson.branches, strict=True):
        theirs = datum.loss_fn_inputs["advantages"].to_torch().numpy()
        ours_T = taught(branch.tokens) - branch.tokens.behaviour_logprobs
        is_sampled = branch.loss_mask[1:]
        assert is_sampled.any()
        np.testing.assert_allclose(
            ours_T[1:][is_sampled], theirs[is_sampled], atol=1e-5
        )
