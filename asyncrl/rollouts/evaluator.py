"""Samples and scores the held-out prompts once, at one version. Knows no schedule, no weights, no
training.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev

from asyncrl.errors import EngineError, RolloutFailure, RolloutTimeout, RoomError
from asyncrl.messages.protocols import ChatTokenizer, SamplingEngine, Scorer
from asyncrl.messages.records import Completion, Prompt, Rollout, SamplingRequest, VersionSpan
from asyncrl.waits import TimeLimit

# What one evaluation comes to: means over prompts, with their standard error. Pure.


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion, or rollout of an agent: `length` in sampled tokens, of all its turns."""

    prompt_id: str
    reward: float
    length: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class EvalResult:
    """All scored samples of one evaluation at `version`; `num_failed` others have no reward, the last for
    `last_failure`.

    `seconds` from the time the version was published until all was scored. `num_skipped` and `num_abandoned`:
    evaluations so far that were due and did not begin, or did not end. `num_abandoned_calls`: of the eval
    task's reward function, so far, that did not end when they were cancelled.
    """

    version: int
    samples: Sequence[Sample]
    num_failed: int = 0
    last_failure: str = ""
    seconds: float = 0.0
    num_skipped: int = 0
    num_abandoned: int = 0
    num_abandoned_calls: int = 0

    def metrics(self) -> dict[str, float]:
        """By metric name. What needs a sample, or two prompts, is left out where there are none.

        eval/reward_mean, eval/reward_std   over prompts, each the mean of its samples (population standard
        deviation) eval/standard_error                 of reward_mean: samples of one prompt are not
        independent, prompts are eval/length_mean                    sampled tokens of a completion
        eval/truncated_fraction             completions that ran into rollout.max_tokens
        eval/failed                         samples without a reward; they are in none of the means
        eval/version, eval/seconds, eval/skipped, eval/abandoned, eval/abandoned_calls
        """
        metrics: dict[str, float] = {
            "eval/version": self.version,
            "eval/failed": self.num_failed,
            "eval/seconds": self.seconds,
            "eval/skipped": self.num_skipped,
            "eval/abandoned": self.num_abandoned,
            "eval/abandoned_calls": self.num_abandoned_calls,
        }
        if self.samples:
            means = self._prompt_means()
            metrics |= {
                "eval/reward_mean": fmean(means),
                "eval/reward_std": pstdev(means),
                "eval/length_mean": fmean(sample.length for sample in self.samples),
                "eval/truncated_fraction": fmean(sample.is_truncated for sample in self.samples),
            }
            if len(means) > 1:
                metrics["eval/standard_error"] = stdev(means) / math.sqrt(len(means))
        return metrics

    def _prompt_means(self) -> list[float]:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for sample in self.samples:
            rewards[sample.prompt_id].append(sample.reward)
        return [fmean(found) for found in rewards.values()]


log = logging.getLogger(__name__)

RunAgent = Callable[[str, Prompt, int], Awaitable[Rollout]]
"""(name, prompt, number of the sample) -> the rollout of an agent, scored. Raises RolloutFailure or
RoomError.
"""


class Evaluator:
    """`samples` completions of each prompt, or rollouts of an agent, at most `slots` of them sampled at once.

    Waits:      evaluate sleeps in the engine and the scorer; a completion takes at most sample_timeout_s
    (None: no limit). An agent
                has a limit of its own.
    Invariant:  every token of a result was sampled at its version: _check_version refuses any other. Seeds
    depend on prompt
                and sample alone, so that two evaluations differ by the weights and by nothing else.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: ChatTokenizer,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        slots: int,
        temperature: float,
        max_tokens: int,
        max_prompt_tokens: int,
        stop: tuple[str, ...] = (),
        sample_timeout_s: float | None = None,
        seed_of: Callable[[str, int], int],
        run_agent: RunAgent | None = None,
    ) -> None:
        """`run_agent`: a sample is a rollout of this agent, whose calls go to the same engine with the same
        seeds each time.
        """
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self.prompts, self.samples, self.slots = tuple(prompts), samples, slots
        self.temperature, self.stop = temperature, stop
        self.max_tokens, self.max_prompt_tokens = max_tokens, max_prompt_tokens
        self.sample_timeout_s = sample_timeout_s
        self._seed_of, self._run_agent = seed_of, run_agent

    def __repr__(self) -> str:
        return f"<Evaluator {len(self.prompts)} prompts x {self.samples}, {self.slots} slots>"

    async def evaluate(self, version: int) -> EvalResult:
        """All samples, in the order of prompts. Raises RoomError if the engine is gone, or serves another
        version.
        """
        free, broken = asyncio.Semaphore(self.slots), list[RoomError]()

        async def one(prompt: Prompt, index: int) -> Sample | RolloutFailure:
            try:
                return await self._bounded(prompt, index, version, free, broken)
            except RoomError as error:
                broken.append(error)  # those that wait for a slot need not ask a broken engine too
                raise

        outcomes = await asyncio.gather(
            *(one(prompt, index) for prompt in self.prompts for index in range(self.samples)),
            return_exceptions=True,
        )
        if broken:
            raise broken[0]
        samples, failures = list[Sample](), list[RolloutFailure]()
        for outcome in outcomes:
            if isinstance(outcome, Sample):
                samples.append(outcome)
            elif isinstance(outcome, RolloutFailure):
                failures.append(outcome)
            else:
                raise outcome
        return EvalResult(version, tuple(samples), len(failures), str(failures[-1]) if failures else "")

    async def _bounded(
        self, prompt: Prompt, index: int, version: int, free: asyncio.Semaphore, broken: list[RoomError]
    ) -> Sample | RolloutFailure:
        """One sample; like a rollout's, its failure is data. The slot is free again before the completion is
        scored.
        """
        request_id = f"eval-v{version}/{prompt.prompt_id}/s{index}"
        try:
            async with free:
                if broken:
                    raise broken[0]
                if self._run_agent is not None:
                    return _sample(
                        request_id, prompt, await self._run_agent(request_id, prompt, index), version
                    )
                completion = await self._generate(prompt, index, request_id)
            _check_version(request_id, completion.version_spans, version)
            reward = await self._scorer.score(prompt, self._tokenizer.decode(completion.token_ids))
        except RoomError:
            raise
        except RolloutFailure as failure:
            log.warning("%s failed: %s", request_id, failure)
            return failure
        except Exception as error:  # the rollout boundary of evaluations, as in producers
            log.warning("%s broke", request_id, exc_info=True)
            return RolloutFailure(
                f"{request_id} raised {type(error).__name__}: {error}",
                way_out="the controller's log has the traceback.",
            )
        return Sample(
            prompt.prompt_id, reward, len(completion.token_ids), completion.finish_reason == "length"
        )

    async def _generate(self, prompt: Prompt, index: int, request_id: str) -> Completion:
        prompt_ids = self._tokenizer.encode_chat(prompt.messages)
        if not 0 < len(prompt_ids) <= self.max_prompt_tokens:
            raise RolloutFailure(
                f"prompt {prompt.prompt_id} has {len(prompt_ids)} tokens",
                rule=f"a prompt has 1 to rollout.max_prompt_tokens={self.max_prompt_tokens}, and is never "
                f"cut",
                way_out="raise rollout.max_prompt_tokens, or leave long prompts out of eval.task.",
            )
        request = SamplingRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
            seed=self._seed_of(prompt.prompt_id, index),
            route_key=prompt.prompt_id,
        )
        limit = TimeLimit(self.sample_timeout_s)
        try:
            async with limit:
                return await self._engine.generate(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RolloutTimeout(f"{request_id} is not finished after {self.sample_timeout_s} s") from None


def _sample(request_id: str, prompt: Prompt, rollout: Rollout, version: int) -> Sample:
    _check_version(request_id, [span for branch in rollout for span in branch.version_spans], version)
    is_truncated = any(branch.is_truncated for branch in rollout)
    return Sample(
        prompt.prompt_id, rollout[0].reward, sum(branch.num_sampled for branch in rollout), is_truncated
    )


def _check_version(request_id: str, spans: Sequence[VersionSpan], version: int) -> None:
    versions = sorted({span.version for span in spans})
    if versions != [version]:
        raise EngineError(
            "engine-eval",
            f"request {request_id} has tokens of policy_version {', '.join(map(str, versions)) or 'none'}",
            rule=f"every token of this evaluation is sampled at policy_version {version}",
            way_out="make sure that nobody else publishes to the eval engine, then start the run again.",
        )
