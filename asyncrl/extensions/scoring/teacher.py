"""Clients of a teacher: its logprobs of sampled tokens, for distillation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from asyncrl.base.errors import ConfigError, EngineError, EngineLost
from asyncrl.base.http import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.engines.engine import CallScope
from asyncrl.engines.link import LOGPROB_SLACK
from asyncrl.engines.openai_scope import ASK_AGAIN_S, OpenAIScope, Read
from asyncrl.engines.role_client import CALL_TIMEOUT_S, RoleClient
from asyncrl.extensions.scoring.teacher_config import TEACHER_SLOTS, TeacherConfig
from asyncrl.extensions.scoring.teacher_prompt import TeacherPrompts
from asyncrl.messages.engine_api import EngineHealth, ScoreRequest, ScoreResponse
from asyncrl.messages.records import Prompt, Rollout, Trajectory
from asyncrl.messages.tokens import (
    DISTILL_IDS,
    DISTILL_LOGPROBS,
    SUPPORT,
    TEACHER,
    Ragged,
    Values,
)

NAME = "teacher"
VERSION = "teacher_version"
"""Metric of a rollout: the policy_version of the weights that scored it."""
BUSY = frozenset({429, 502, 503, 504})
"""Answers of a busy server, or of a proxy before it: the call is repeated."""
MAX_PAUSE_S = 30.0
"""Longest pause before it is."""


Ask = Callable[[ScoreRequest], Awaitable[ScoreResponse]]


@dataclass(kw_only=True)
class Scoring:
    """Asks a teacher about rollouts, and writes its answers as token columns. `num_ids`:
    the tokenizer's ids are below it. `scores`: whether it scores a task. `prompts`: None:
    it reads the student's. `notes_version`: as a metric of the rollout.
    """

    temperature: float
    top_k: int
    num_ids: int
    scores: Callable[[str], bool]
    prompts: TeacherPrompts | None
    notes_version: bool
    num_scored: int = 0
    num_untaught: int = 0
    wait_s: float = 0.0
    """Time of all questions together, with restarts and queues."""

    @property
    def reads_groups(self) -> bool:
        return self.prompts is not None and self.prompts.reads_groups

    def gauges(self) -> dict[str, float]:
        gauges = {"teacher/tokens": self.num_scored, "teacher/wait_s": self.wait_s}
        if self.prompts is not None:
            gauges["teacher/untaught"] = self.num_untaught
        return gauges

    async def annotate(
        self,
        ask: Ask,
        rollout: Rollout,
        prompt: Prompt,
        siblings: Sequence[Rollout] = (),
    ) -> Rollout:
        """Return the rollout with the columns of the teacher in each branch; or unchanged
        if another teacher scores its task. Raises RolloutFailure (data) or EngineError.
        """
        if not self.scores(prompt.task):
            return rollout
        branches = list[Trajectory]()
        ids = None
        if self.prompts is not None:
            ids = await self.prompts.ids(rollout, prompt, siblings)
            if ids is None:
                self.num_untaught += 1
                return tuple(map(_untaught, rollout))
            assert len(rollout) == 1, "the settings refuse agents"
        for branch in rollout:
            request = self._request(branch, ids)
            if request is None:
                branches.append(_untaught(branch))
                continue
            start_s = time.perf_counter()
            try:
                answer = await ask(request)
            finally:
                self.wait_s += time.perf_counter() - start_s
            branches.append(self._taught(branch, request, answer))
        return tuple(branches)

    def _request(
        self, branch: Trajectory, ids: Sequence[int] | None
    ) -> ScoreRequest | None:
        """Return None if all calls of a branch are untrained, such as greedy calls.

        Example: the student's prompt 5 6, its answer 7 8, and the teacher's prompt 1 2 3.
        The text is 1 2 3 7 8, scored from place 3 on.
        """
        (places,) = np.nonzero(branch.loss_mask)
        if not len(places):
            return None
        start, end = int(places[0]), int(places[-1]) + 1
        before = branch.token_ids[:start].tolist() if ids is None else list(ids)
        return ScoreRequest(
            # What follows the last sampled token changes no logprob before it.
            token_ids=before + branch.token_ids[start:end].tolist(),
            start=len(before),
            temperature=self.temperature,
            top_k=self.top_k,
        )

    def _taught(
        self, branch: Trajectory, request: ScoreRequest, answer: ScoreResponse
    ) -> Trajectory:
        """Return the branch with the answer in its columns. Raises EngineError."""
        logprobs = np.array(answer.logprobs, np.float32)
        top_ids = np.array(answer.top_ids, np.int32)
        top_logprobs = np.array(answer.top_logprobs, np.float32)
        num_scored = len(request.token_ids) - request.start
        num_top = num_scored * self.top_k
        is_whole = len(logprobs) == num_scored
        is_whole &= len(top_ids) == len(top_logprobs) == num_top
        is_finite = np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()
        if not is_whole or not is_finite or not (logprobs <= LOGPROB_SLACK).all():
            raise EngineError(
                NAME,
                f"answered {len(logprobs)} logprobs and {len(top_ids)} likeliest ids for "
                f"{num_scored} tokens: {logprobs[:8].tolist()}",
                rule=f"one finite logprob a token, none above 0, and {self.top_k} ids",
                way_out=f"read {NAME}'s log.",
            )
        # Between the first and the last sampled token stand answers of tools and users,
        # which the teacher has scored along.
        has_term = branch.loss_mask.copy()
        start = int(np.argmax(has_term))
        end = start + num_scored
        # Under a grammar the teacher would have sampled other tokens: no term.
        for span in branch.tokens.calls:
            has_term[span.start : span.end] = False
        # The same for a call of an agent with its own top_p, top_k or min_p.
        has_term &= branch.tokens.column(SUPPORT).sizes == 0
        is_kept = has_term[start:end]
        taught = branch.tokens.behaviour_logprobs.copy()
        taught[has_term] = logprobs[is_kept]
        columns: dict[str, Values] = {TEACHER: taught}
        if self.top_k > 0:
            # A padded vocabulary has ids that no text has, and that the trained model
            # may lack.
            of_kept = np.repeat(is_kept, self.top_k) & (top_ids < self.num_ids)
            sizes = np.zeros(len(has_term), np.int32)
            sizes[start:end] = of_kept.reshape(-1, self.top_k).sum(axis=1)
            columns[DISTILL_IDS] = Ragged(top_ids[of_kept], sizes)
            columns[DISTILL_LOGPROBS] = Ragged(top_logprobs[of_kept], sizes)
        self.num_scored += int(branch.loss_mask.sum())
        metrics = dict(branch.metrics)
        if self.notes_version:
            metrics[VERSION] = float(answer.version)
        tokens = branch.tokens.with_columns(columns)
        return replace(branch, tokens=tokens, metrics=metrics)


def _untaught(branch: Trajectory) -> Trajectory:
    """Return the branch without a distance to the teacher."""
    columns: dict[str, Values] = {TEACHER: branch.tokens.behaviour_logprobs.copy()}
    return replace(branch, tokens=branch.tokens.with_columns(columns))


class Teacher(RoleClient):
    """Client of a teacher's server. `max_length`: tokens of the longest text. `top_k`: as
    in its requests.
    """

    def __init__(
        self,
        caller: Caller,
        config: TeacherConfig,
        *,
        max_length: int = 0,
        top_k: int = 0,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        # Twice the server's slots: the next requests arrive early.
        super().__init__(caller, places=2 * TEACHER_SLOTS, on_lost=on_lost)
        self.config = config
        self._max_length = max_length
        self._top_k = top_k

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        return await self.call("/score", request, ScoreResponse)


class Scored(TypedDict):
    """Not a model: a long text has a hundred thousand of them, and the controller would
    stand still for seconds.
    """

    logprob: float


class PromptScores(Read):
    prompt_logprobs: list[dict[int, Scored] | None] | None = None


class Completions(Read):
    choices: list[PromptScores] = Field(min_length=1, max_length=1)


class ServedModel(Read):
    id: str
    max_model_len: int | None = None


class ServedModels(Read):
    data: list[ServedModel] = Field(min_length=1)


class ServedTeacher(Teacher):
    """A teacher behind /v1/completions with prompt_logprobs, as vLLM serves it: the
    first model of the server. Its logprobs are of temperature 1.
    """

    def _open_scope(self) -> CallScope:
        self._process = OpenAIScope(self._caller, 0)
        return self._process

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        served = await self._process.get("/v1/models", ServedModels, timeout_s)
        model = served.data[0]
        self._model = model.id
        # The server samples one more token, which is not used.
        if model.max_model_len is not None and model.max_model_len <= self._max_length:
            raise self._unusable(
                f"max_model_len={model.max_model_len} for texts of {self._max_length} tokens"
            )
        return EngineHealth(
            policy_version=0, num_running=0, num_queued=0, tokens_generated=0
        )

    async def ready(self, timeout_s: float) -> EngineHealth:
        """Try the server until it scores. Raises ConfigError if it reports no logprobs;
        CallLost, or ConfigError for its own failure, after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        request = ScoreRequest(token_ids=[0, 0], start=1, top_k=self._top_k)
        while True:
            left_s = max(end_s - loop.time(), ASK_AGAIN_S)
            try:
                health = await self.health(timeout_s=left_s)
                await self._post(request, left_s)
                return health
            except CallGarbled as failure:
                raise self._unusable(str(failure)) from failure
            except CallRefused as failure:
                # A server that others start again, or a proxy before it.
                is_passing = failure.status >= 500 or failure.status in BUSY
                if not is_passing or loop.time() >= end_s:
                    raise self._unusable(str(failure)) from failure
            except CallLost:
                if loop.time() >= end_s:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        return await self.repeat(
            "an answer to /v1/completions", partial(self._send, request)
        )

    async def _send(self, request: ScoreRequest) -> ScoreResponse:
        """Return the answer of a server that may be busy. Raises EngineError."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + CALL_TIMEOUT_S
        pause_s = ASK_AGAIN_S
        async with self._scope.calls():
            while True:
                try:
                    return await self._post(request, CALL_TIMEOUT_S)
                except CallRefused as refusal:
                    if refusal.status not in BUSY or clock() + pause_s > end_s:
                        raise
                # The call keeps its place, so that a busy server gets fewer calls.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _post(self, request: ScoreRequest, timeout_s: float) -> ScoreResponse:
        """Ask the server for the logprobs of a text. Raises ConfigError for an answer
        without them, CallRefused or CallLost.
        """
        body = {
            "model": self._model,
            "prompt": request.token_ids,
            "prompt_logprobs": request.top_k,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = await self._process.post(
            "/v1/completions", body, Completions, timeout_s
        )
        told = (answer.choices[0].prompt_logprobs or [])[request.start :]
        asked = request.token_ids[request.start :]
        logprobs, top = list[float](), list[tuple[int, float]]()
        for token, entry in zip(asked, told, strict=False):
            by_id = {number: one["logprob"] for number, one in (entry or {}).items()}
            # The entry has the token itself, also if it is not a likely one.
            likeliest = sorted(by_id.items(), key=lambda item: -item[1])
            if token not in by_id or len(likeliest) < request.top_k:
                break
            logprobs.append(by_id[token])
            top += likeliest[: request.top_k]
        if len(logprobs) < len(asked):
            raise self._unusable(
                f"prompt_logprobs={request.top_k} gave {len(logprobs)} of {len(asked)} tokens their logprobs"
            )
        return ScoreResponse(
            logprobs=logprobs,
            top_ids=[number for number, _ in top],
            top_logprobs=[logprob for _, logprob in top],
        )

    def _unusable(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name} at {self._caller.url} cannot score: {what}",
            rule="its /v1/completions answers prompt_logprobs",
            way_out="serve the teacher with vLLM, or set teacher.base_url=none: then the run serves it.",
        )
