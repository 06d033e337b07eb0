"""Failures of a rollout become data, and every token is counted once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeEngine, FakeScorer
from journal_cases import admit, make_partial, make_prompt, with_journal
from rollout_cases import scored, single_turn, virtual

from asyncrl.base.errors import EngineError, RequestRefused, RewardFailure
from asyncrl.config import TaskConfig
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import (
    Completion,
    GroupId,
    Prompt,
    Rollout,
    SamplingRequest,
    VersionSpan,
)
from asyncrl.rollouts.rollout import (
    EncodedPrompts,
    FailedRollout,
    RolloutAttempt,
    RolloutRunner,
    Score,
    SingleTurn,
    Slots,
    derive_seed,
)
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import Scorers
from asyncrl.trainer.random_init import make_character_tokenizer

PROMPT = Prompt("p7", ({"role": "user", "content": "hello"},))


@pytest.fixture(scope="module")
def scratch_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer("abc").save_pretrained(folder)
    return HFChatTokenizer(folder)


class Scripted:
    """A generator that plays one function an attempt."""

    def __init__(self, *attempts: Callable[[], Awaitable[Rollout]]) -> None:
        self._attempts = iter(attempts)

    async def sample(self, attempt: RolloutAttempt) -> Score:
        return scored(await next(self._attempts)())


async def good() -> Rollout:
    score = await single_turn(FakeEngine()).sample(RolloutAttempt("g0/r1", GroupId(0), PROMPT, 1))
    return await score()


def failing(error: Exception) -> Callable[[], Awaitable[Rollout]]:
    async def attempt() -> Rollout:
        raise error

    return attempt


async def hanging() -> Rollout:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def run(runner: RolloutRunner) -> Rollout | FailedRollout:
    return await runner.run(RolloutAttempt("g4/r1", GroupId(4), PROMPT, 1), slots=Slots(1), order=())


@virtual
async def test_single_turn_records_every_token() -> None:
    engine = FakeEngine(tokens=lambda _: 3)
    scorer = FakeScorer(lambda _, text: 0.5 if text == "zzz" else 0.0, latency_s=5.0)
    engine.policy_version = 9
    generator = single_turn(engine, scorer, run_seed=3, temperature=0.7)
    score = await generator.sample(RolloutAttempt("g4/r1", GroupId(4), PROMPT, 1))
    assert asyncio.get_running_loop().time() == 1.0, "a slow reward is not part of sampling"
    (trajectory,) = await score()
    assert trajectory.token_ids.tolist() == [*map(ord, "hello"), *map(ord, "zzz")]
    assert trajectory.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert trajectory.behaviour_logprobs.tolist() == [0.0] * 5 + [-1.0] * 3
    assert trajectory.version_spans == (VersionSpan(5, 8, 9),)
    assert (trajectory.reward, trajectory.sample_index, trajectory.is_truncated) == (0.5, 1, False)
    (request,) = engine.requests
    assert (request.request_id, request.route_key, request.temperature) == ("g4/r1/t0/a0", "g4", 0.7)
    assert request.seed == derive_seed(3, "p7", 1, 0)


@pytest.mark.parametrize(
    "error",
    [RewardFailure("no number"), RequestRefused("too long"), KeyError("turn"), TimeoutError("a tool's own")],
)
@virtual
async def test_rollout_errors_are_data_after_the_last_retry(error: Exception) -> None:
    runner = RolloutRunner(Scripted(*[failing(error)] * 3), timeout_s=10.0, retries=2)
    outcome = await run(runner)
    assert isinstance(outcome, FailedRollout)
    assert (outcome.sample_index, outcome.num_attempts, runner.num_retried) == (1, 3, 2)
    assert str(error) in str(outcome.failure)


class Spends(FakeEngine):
    """Samples 2 tokens, is interrupted, and samples one more; then fails, hangs or returns all."""

    def __init__(self, *ends: str) -> None:
        super().__init__()
        self._ends, self.spent = iter(ends), 0
        self.hangs = asyncio.Event()

    async def generate(self, request: SamplingRequest, **options: Any) -> Completion:
        before = options["partial"] or Completion()
        options["on_spent"](2)
        tokens = before.token_ids + (98, 99)
        kept = Completion(
            tokens, (-1.0,) * len(tokens), (VersionSpan(0, len(tokens), 5),), num_interruptions=1
        )
        options["on_segment"](kept)
        options["on_spent"](1)
        self.spent += 3
        match next(self._ends):
            case "refused":
                raise RequestRefused("no")
            case "hangs":
                self.hangs.set()
                await asyncio.Event().wait()
        tokens += (97,)
        return Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, len(tokens), 5),), "stop", 1)


@pytest.mark.parametrize(
    ("ends", "rewards"),
    [
        (["whole"], [1.0]),
        (["refused", "whole"], [1.0]),
        (["whole", "refused", "whole"], ["bad", 1.0]),
        (["whole", "whole", "whole"], ["bad", "bad", "bad"]),
        (["refused", "refused", "refused"], []),
        (["whole", "hangs"], ["bad"]),
        (["hangs"], []),
    ],
)
@pytest.mark.parametrize("resumed", [None, 4])
def test_the_journal_counts_every_sampled_token_once(
    ends: list[str], rewards: list[Any], resumed: int | None, tmp_path: Path
) -> None:
    async def story(journal: Journal) -> None:
        engine, left = Spends(*ends), iter(rewards)
        partial = None if resumed is None else make_partial(resumed)
        group_id, prompt = GroupId(0), make_prompt(0)
        admit(journal, 0)
        if partial is not None:
            journal.segment_nowait(group_id, 1, 0, 0, partial)
        runner = RolloutRunner(
            single_turn(engine, FakeScorer(lambda *_: next(left)), max_prompt_tokens=50),
            timeout_s=None,
            retries=2,
        )
        running = asyncio.ensure_future(
            runner.run(
                RolloutAttempt("g0/r1", group_id, prompt, 1, 0, partial, journal), slots=Slots(1), order=()
            )
        )
        if ends[-1] == "hangs":  # the group is dropped while it runs
            await engine.hangs.wait()
            running.cancel()
            journal.group_ended_nowait(group_id, "requeued", "dropped")
            await asyncio.wait({running})
        elif isinstance(outcome := await running, FailedRollout):
            journal.rollout_failed_nowait(group_id, 1, outcome.num_attempts, "no")
        else:
            journal.rollout_finished_nowait(group_id, outcome)
        state = await journal.read_resume(0)
        assert state.counted["tokens/generated"] == engine.spent + (resumed or 0)

    with_journal(tmp_path / "journal.sqlite", story)


@virtual
async def test_a_broken_part_and_cancellation_pass_the_boundary() -> None:
    broken = Scripted(failing(EngineError("engine-0", "died")))
    with pytest.raises(EngineError, match="engine-0: died"):
        await run(RolloutRunner(broken, timeout_s=2.5, retries=2))
    runner = RolloutRunner(Scripted(hanging, good), timeout_s=100.0, retries=2)
    task = asyncio.create_task(run(runner))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (runner.num_retried, runner.started_s) == (0, {})


def test_a_seed_depends_on_who_asks_and_on_nothing_else() -> None:
    seeds = {derive_seed(*who) for who in itertools.product((0, 1), ("p1", "p11"), *[(0, 1)] * 3)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    one = derive_seed(0, "p1", 0, 0, attempt=0)
    assert one == derive_seed(0, "p1", 0, 0) == 4802785385995688842, "a run repeats on another machine"


@pytest.mark.parametrize(("special_tokens", "said"), [("visible", "a<unk>b<|user|>"), ("stripped", "ab")])
@pytest.mark.parametrize("is_ended", [True, False])
def test_the_reward_sees_every_sampled_token_but_the_final_end(
    scratch_tokenizer: HFChatTokenizer, special_tokens: str, said: str, is_ended: bool
) -> None:
    ids = scratch_tokenizer.encode("a<unk>b<|user|>" + "<|im_end|>" * is_ended)
    spans = (VersionSpan(0, len(ids), 0),)
    completion = Completion(ids, (-1.0,) * len(ids), spans, "stop" if is_ended else "length")
    scored: list[str] = []

    async def generate(*_: Any, **__: Any) -> Completion:
        return completion

    def score(prompt: Prompt, text: str) -> float:
        scored.append(text)
        return 0.5

    task: Any = SimpleNamespace(score=score)
    settings = {"python": "a:B", "reward_pool": "inline", "special_tokens": special_tokens}
    generator = SingleTurn(
        SimpleNamespace(generate=generate),  # type: ignore[arg-type]
        EncodedPrompts(scratch_tokenizer),
        Scorers({"": task}, {"": TaskConfig.model_validate(settings)}, seed=0),
        run_seed=0,
        max_tokens=8,
        max_prompt_tokens=8,
        temperature=1.0,
    )
    prompt = Prompt("p0", ({"role": "user", "content": "ab"},))

    async def story() -> None:
        score = await generator.sample(RolloutAttempt("g0/r0", GroupId(0), prompt, 0))
        await score()

    asyncio.run(story())
    assert scored == [said]
