"""The generator `single_turn`: one prompt, one completion, one reward. Knows no group, no retry, no server."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from asyncrl.errors import PromptUnusable
from asyncrl.producers.rollout import RolloutAttempt
from asyncrl.producers.seeds import derive_seed
from asyncrl.types import ChatTokenizer, Completion, Rollout, SamplingEngine, SamplingRequest, Scorer, Trajectory


class SingleTurn:
    """Prompt -> chat ids -> completion -> text -> reward -> Trajectory. No state of its own."""

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: ChatTokenizer,
        scorer: Scorer,
        *,
        run_seed: int,
        max_tokens: int,
        max_prompt_tokens: int,
        temperature: float,
        stop: tuple[str, ...] = (),
    ) -> None:
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self.run_seed = run_seed
        self.max_tokens, self.max_prompt_tokens = max_tokens, max_prompt_tokens
        self.temperature, self.stop = temperature, stop

    def __repr__(self) -> str:
        return f"<SingleTurn max_tokens {self.max_tokens}, temperature {self.temperature}>"

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """One trajectory, the only branch. Raises RolloutFailure if the prompt is too long, refused, or cannot be scored."""
        prompt_ids = self._prompt_ids(attempt)
        completion = await self._engine.generate(
            SamplingRequest(
                request_id=attempt.request_id(turn=0),
                prompt_ids=prompt_ids,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                stop=self.stop,
                seed=derive_seed(self.run_seed, attempt.prompt.seed_id, attempt.sample_index, 0, attempt.attempt),
                route_key=f"g{attempt.group_id}",
            ),
            partial=attempt.partial,
            on_segment=functools.partial(attempt.on_segment, 0),
        )
        attempt.stopped_sampling()
        reward = await self._scorer.score(attempt.prompt, self._tokenizer.decode(completion.token_ids))
        return (make_trajectory(attempt.sample_index, prompt_ids, completion, reward),)

    def _prompt_ids(self, attempt: RolloutAttempt) -> tuple[int, ...]:
        prompt_ids = self._tokenizer.encode_chat(attempt.prompt.messages)
        if not 0 < len(prompt_ids) <= self.max_prompt_tokens:
            raise PromptUnusable(
                f"prompt {attempt.prompt.prompt_id} has {len(prompt_ids)} tokens",
                rule=f"a prompt has 1 to rollout.max_prompt_tokens={self.max_prompt_tokens}, and is never cut",
                way_out=f"raise rollout.max_prompt_tokens to {len(prompt_ids)} or more, or leave long prompts out of the task.",
            )
        return prompt_ids


def make_trajectory(sample_index: int, prompt_ids: tuple[int, ...], completion: Completion, reward: float) -> Trajectory:
    """The token record of a prompt and its one completion, P + N tokens; spans move from completion to trajectory."""
    num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)
    loss_mask = np.zeros(num_prompt + num_sampled, dtype=np.bool_)
    loss_mask[num_prompt:] = True
    logprobs = np.zeros(num_prompt + num_sampled, dtype=np.float32)
    logprobs[num_prompt:] = completion.behaviour_logprobs
    return Trajectory(
        sample_index=sample_index,
        token_ids=np.array(prompt_ids + completion.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(replace(span, start=span.start + num_prompt, end=span.end + num_prompt) for span in completion.version_spans),
        reward=reward,
        is_truncated=completion.finish_reason == "length",
        num_interruptions=completion.num_interruptions,
    )
