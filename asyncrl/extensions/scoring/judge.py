"""Rewards by a model behind an OpenAI-compatible endpoint (`task.reward.judge`)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import blake2b
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.base.errors import (
    ComponentError,
    ConfigError,
    RequestRefused,
    TaskError,
    needing,
)
from asyncrl.base.failures import FailureKind, kind_of_error
from asyncrl.base.waits import waiting, within
from asyncrl.extensions.scoring.judge_config import PLACES, JudgeConfig
from asyncrl.messages.records import (
    Prompt,
    Reward,
    RewardPart,
)
from asyncrl.tasks.rewards import (
    Completions,
    UserCodeFailed,
    user_code,
)
from asyncrl.tasks.scorer import AskedScorer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)
T = TypeVar("T")
Errors = tuple[type[Exception], ...]

MINUTE_S = 60.0
MAX_KNOWN = 4096
"""Answers in the cache."""
FIRST_DELAY_S = 1.0
LARGEST_DELAY_S = 60.0
"""Back-off, doubled from try to try, where the endpoint names no time."""
LONGEST_PAUSE_S = 600.0
"""An endpoint that names a later time is asked again after this."""
CHECK_S = 10.0
"""Timeout of the request before the start, and to open a connection."""
CHARACTERS_PER_TOKEN = 4
"""Estimate for a request that is not sent yet; its real size replaces it."""
AGAIN = 0.5
"""Least temperature after a malformed answer: at 0 it would come again."""


class MinuteLimits:
    """A limit of requests and of tokens in any 60 s, in order of the calls.

    Example: 2 requests. Three calls at 0 s: two begin at 0 s, the third at 60 s.
    """

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self._max_requests = requests or math.inf
        self._max_tokens = tokens or math.inf
        # A waiting call holds it, so no later call overtakes a large request.
        self._lock = asyncio.Lock()
        self._used = deque[list[float]]()
        """(time, tokens) of the requests of the last minute."""
        self.paused_until_s = 0.0
        """No call begins before this time of the loop."""

    async def wait(self, tokens: float) -> list[float]:
        """Return the entry of a request once it fits into both limits; its tokens may
        be corrected. More tokens than the limit wait until the minute is empty.
        """
        clock = asyncio.get_running_loop().time
        async with self._lock:
            while True:
                delay_s = self._delay_s(tokens, clock())
                if delay_s <= 0:
                    break
                await asyncio.sleep(delay_s)
            # Stamped after all waits: a minute of a limit begins with the request.
            entry = [clock(), tokens]
            self._used.append(entry)
            return entry

    def _delay_s(self, tokens: float, now_s: float) -> float:
        while self._used and self._used[0][0] + MINUTE_S <= now_s:
            self._used.popleft()
        delay_s = self.paused_until_s - now_s
        used = sum(entry[1] for entry in self._used)
        is_full = len(self._used) >= self._max_requests
        if self._used and (is_full or used + tokens > self._max_tokens):
            delay_s = max(delay_s, self._used[0][0] + MINUTE_S - now_s)
        return delay_s


@dataclass(frozen=True, slots=True)
class JudgeResponse:
    """`is_cut`: at max_tokens. `num_tokens`: of request and answer."""

    text: str
    is_cut: bool
    num_tokens: int


AskJudge = Callable[..., Awaitable[JudgeResponse]]
"""ServedJudge.ask of a judge that the run serves."""


class Judge(AskedScorer):
    """Ask a judge within the limits of its endpoint.

    Waits: a request waits for a place (max_concurrent), then for both limits of a
    minute, then for the end of a pause that a 429 asked for. None of these waits counts
    as time of the rollout or of reward_timeout_s, which limits each request.

    Invariant: an answer that does not parse, and an endpoint that stays down, become
    UserCodeFailed (data). Only a spent budget is a TaskError.
    """

    def __init__(
        self, config: JudgeConfig, *, timeout_s: float, ask: AskJudge | None = None
    ) -> None:
        self.config = config
        self._served = ask if config.is_served else None
        self.scores_groups = config.mode != "score"
        self._timeout_s = timeout_s
        self._client: AsyncOpenAI | None = None
        self._pattern = config.pattern
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._limits = MinuteLimits(
            config.requests_per_minute, config.tokens_per_minute
        )
        self._known = OrderedDict[bytes, asyncio.Task[Any]]()
        """Of each text the answer, or the request for it. aclose() ends them."""
        self._num_reserved = 0
        """Estimated tokens of the requests in flight."""
        self.num_requests = 0
        self.num_retried = 0
        self.num_cached = 0
        self.num_tokens = 0

    async def __call__(
        self, prompt: Prompt, given: str | Completions
    ) -> Reward | list[float | UserCodeFailed]:
        """Return the reward of a completion, or of each in a group. Raises
        UserCodeFailed, RequestRefused, or TaskError for a spent budget.
        """
        # What an endpoint answers is as unknown as what user code does.
        with user_code(asyncio.CancelledError, ComponentError, RequestRefused):
            if isinstance(given, str):
                request = self._request(prompt, completion=given)
                return await self._ask(request, self._reward_of)
            texts = {
                index: text for index, text in enumerate(given) if text is not None
            }
            rewards = await self._compare(prompt, texts)
            return [rewards.get(index, 0.0) for index in range(len(given))]

    def gauges(self) -> dict[str, int]:
        return {
            "judge/requests": self.num_requests,
            "judge/tokens": self.num_tokens,
            "judge/cached": self.num_cached,
            "judge/retried": self.num_retried,
        }

    async def aclose(self) -> None:
        for question in self._known.values():
            question.cancel()
        if self._client is not None:
            await self._client.close()

    # ---- modes

    async def _compare(
        self, prompt: Prompt, texts: dict[int, str]
    ) -> dict[int, float | UserCodeFailed]:
        """Reward the share of comparisons that a completion wins; a tie is half a win.
        A pair without a verdict fails both.
        """
        pairs = [*combinations(texts, 2)]
        if not pairs:
            return dict.fromkeys(texts, 0.5)
        # Which of the two comes first alternates: judges prefer one place.
        sides = [(i, j) if (i + j) % 2 else (j, i) for i, j in pairs]
        results = await asyncio.gather(
            *(self._first_wins(prompt, texts[i], texts[j]) for i, j in sides)
        )
        rewards: dict[int, float | UserCodeFailed] = dict.fromkeys(texts, 0.0)
        for (first, second), share in zip(sides, results, strict=True):
            for index, won in ((first, 0.0), (second, 1.0)):
                before = rewards[index]
                if isinstance(share, UserCodeFailed):
                    rewards[index] = share
                elif not isinstance(before, UserCodeFailed):
                    part = abs(won - share) / (len(texts) - 1)
                    rewards[index] = before + part
        return rewards

    async def _first_wins(
        self, prompt: Prompt, first: str, second: str
    ) -> float | UserCodeFailed:
        if first == second:
            return 0.5
        request = self._request(prompt, first=first, second=second)
        try:
            # A surprise costs this pair, not the others.
            with user_code(asyncio.CancelledError, ComponentError):
                return await self._ask(
                    request, lambda found: VERDICTS[found[1].lower()]
                )
        except UserCodeFailed as failure:
            return failure

    def _request(self, prompt: Prompt, **texts: str) -> str:
        places = {"prompt": question_of(prompt), "answer": str(prompt.answer)} | texts
        # In one pass: a completion that contains {answer} must not get the answer.
        return PLACES.sub(lambda place: places[place[1]], self.config.prompt)

    def _reward_of(self, found: re.Match[str]) -> Reward:
        if not self._pattern.groupindex:
            return self._grade_of(found[1])
        grades = found.groupdict(default="")
        return {name: RewardPart(self._grade_of(text)) for name, text in grades.items()}

    def _grade_of(self, text: str) -> float:
        grade = float(text)
        if not 0 <= grade <= self.config.best:
            raise ValueError(f"{text} is not within 0..{self.config.best:g}")
        return grade / self.config.best

    # ---- requests

    async def _ask(self, request: str, read: Callable[[re.Match[str]], T]) -> T:
        """Return what `read` makes of the answer's match, from the cache if the same
        was asked before. Raises UserCodeFailed after all tries.
        """
        # surrogatepass: a completion may have any character
        key = blake2b(request.encode("utf-8", "surrogatepass")).digest()
        # Rollouts of a group often give the same short answer at the same time. They
        # share the request and its failure, and each of them may be cancelled.
        question = self._known.get(key)
        self.num_cached += question is not None
        if question is None:
            question = asyncio.ensure_future(self._tries(request, read))
            self._known[key] = question
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        with waiting("an answer of the judge", on=self.config.base_url or "judge"):
            try:
                found: T = await asyncio.shield(question)
            except Exception:
                # A later rollout asks again.
                if self._known.get(key) is question:
                    del self._known[key]
                raise
        return found

    async def _tries(self, request: str, read: Callable[[re.Match[str]], T]) -> T:
        busy, refused = _client_errors() if self._served is None else ((), ())
        temperature = self.config.temperature
        why = ""
        kind = FailureKind.REWARD_CRASH
        for number in range(self.config.retries + 1):
            self.num_retried += number > 0
            answer = ""
            try:
                reply = await self._send(request, temperature, number)
                answer, is_cut = _answer_of(reply)
                if is_cut:
                    limit = self.config.max_tokens
                    raise ValueError(f"cut at task.reward.judge.max_tokens={limit}")
                found = self._pattern.search(answer)
                if found is None or found[1] is None:
                    raise ValueError(f"{self._pattern.pattern} does not match")
                return read(found)
            except busy as error:
                text = self._text_of(error)
                why = f"did not answer: {text}"
                kind = kind_of_error(error, FailureKind.REWARD_TIMEOUT)
                delay_s = self._pause(error, number)
                logger.info("the judge pauses for %.1f s: %s", delay_s, text)
            except refused as error:  # a further try would be refused too
                text = self._text_of(error)
                # None: the error may show the key
                kind = kind_of_error(error, FailureKind.REWARD_CRASH)
                raise UserCodeFailed(
                    f"was refused by the judge: {text}", kind
                ) from None
            except ValueError as error:  # also broken JSON
                said = _without_key(self.config, answer)[-80:]
                reason = _without_key(self.config, str(error))[:200]
                why = f"answered {said!r} ({reason})"
                kind = FailureKind.CORRUPT_RESULT
                temperature = max(temperature, AGAIN)
        tries = self.config.retries + 1
        raise UserCodeFailed(f"has no verdict: in try {tries} the judge {why}", kind)

    async def _send(self, request: str, temperature: float, number: int) -> object:
        """Return one reply. Raises OpenAIError, TimeoutError, ValueError for broken
        JSON, or TaskError for a spent budget.
        """
        estimate = len(request) // CHARACTERS_PER_TOKEN + self.config.max_tokens
        async with self._places:
            used = await self._limits.wait(estimate)
            self.check_budget()
            self.num_requests += 1
            self._num_reserved += estimate
            try:
                if self._served is not None:
                    used[1] = 0  # unless it answers
                    # Its client has its own limits, and waits while the server
                    # restarts.
                    chat = await self._served(
                        request,
                        max_tokens=self.config.max_tokens,
                        temperature=temperature,
                        # By the try, and not by the order of requests: a resumed run
                        # draws the same answers.
                        seed=number,
                    )
                    used[1] = chat.num_tokens
                    return chat
                late = (
                    f"no whole reply within {self._timeout_s} s (task.reward_timeout_s)"
                )
                # The client limits each read only.
                async with within(self._timeout_s, partial(TimeoutError, late)):
                    reply = await self._create(request, temperature)
                total = getattr(getattr(reply, "usage", None), "total_tokens", None)
                if isinstance(total, int) and total > 0:
                    used[1] = total
                return reply
            except Exception as error:
                if _is_free(error):
                    used[1] = 0
                raise
            finally:
                self._num_reserved -= estimate
                self.num_tokens += int(used[1])

    async def _create(self, request: str, temperature: float) -> object:
        if self._client is None:
            self._client = _client(self.config, self._timeout_s)
        return await self._client.chat.completions.create(
            model=self.config.model,
            messages=[{"role": "user", "content": request}],
            max_tokens=self.config.max_tokens,
            temperature=temperature,
        )

    def check_budget(self) -> None:
        budget = self.config.budget
        if budget is not None and self.num_tokens + self._num_reserved >= budget:
            raise TaskError(
                "tasks",
                f"the judge {self.config.model} has used {self.num_tokens} tokens, "
                f"and up to {self._num_reserved} in open requests",
                rule=f"task.reward.judge.budget={budget} ends the run",
                way_out="raise it, and resume with --allow-change task.reward; nothing journaled is lost.",
            )

    def _pause(self, error: Exception, number: int) -> float:
        """Let no request begin before the endpoint wants one; return the seconds."""
        delay_s = min(LARGEST_DELAY_S, FIRST_DELAY_S * 2**number)
        headers = getattr(getattr(error, "response", None), "headers", {})
        asked_s = retry_after_s(headers.get("retry-after", ""), datetime.now(UTC))
        delay_s = delay_s if asked_s is None else min(asked_s, LONGEST_PAUSE_S)
        now_s = asyncio.get_running_loop().time()
        self._limits.paused_until_s = max(self._limits.paused_until_s, now_s + delay_s)
        return delay_s

    def _text_of(self, error: Exception) -> str:
        text = str(error)
        # What the endpoint said: the client's text may leave it out.
        if (response := getattr(error, "response", None)) is not None:
            text = f"{response.status_code} {response.text}"
        return f"{type(error).__name__}: {_without_key(self.config, text)[:200]}"


def _is_free(error: Exception) -> bool:
    """Return whether the endpoint did not begin the request: it refused it, or no
    connection was opened.
    """
    # By name: openai raises errors of httpx or of httpx2.
    causes = ("ConnectError", "ConnectTimeout", "PoolTimeout")
    is_refused = 400 <= getattr(error, "status_code", 0) < 500
    return is_refused or type(error.__cause__).__name__ in causes


def _client_errors() -> tuple[Errors, Errors]:
    """Return the errors after which a further try may help, and those of requests that
    would be refused again.
    """
    import openai

    busy = (
        openai.RateLimitError,
        openai.APIConnectionError,
        openai.InternalServerError,
        ReplyError,
        TimeoutError,
    )
    return busy, (openai.OpenAIError,)


class ReplyError(Exception):
    """A reply with status 200 and an error in it; some routers send those."""


def _answer_of(reply: Any) -> tuple[str, bool]:
    """Return the text of a reply, and whether it was cut at max_tokens. Raises
    ReplyError, or ValueError for anything but a chat completion.
    """
    if isinstance(reply, JudgeResponse):
        return reply.text, reply.is_cut
    if error := getattr(reply, "error", None):
        raise ReplyError(str(error))
    try:
        choice = reply.choices[0]
        answer = str(choice.message.content or "")
        is_cut = choice.finish_reason == "length"
    # The client checks no types, and returns anything but JSON as text.
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"not a chat completion: {str(reply)!r}") from error
    return answer, is_cut


VERDICTS = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Share of a win of {first}, by the judge's word."""


def retry_after_s(value: str, now: datetime) -> float | None:
    """Return the seconds of a Retry-After header, which has seconds or an HTTP date;
    None for another text (https://www.rfc-editor.org/rfc/rfc9110#field.retry-after).
    """
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


def question_of(prompt: Prompt) -> str:
    """Return the only message, or all as "role: text", without system messages."""
    turns = [each for each in prompt.messages if each["role"] != "system"]
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in turns)


def _without_key(config: JudgeConfig, text: str) -> str:
    """Hide the key, which some endpoints echo."""
    key = os.environ.get(config.key_variable or "")
    return text.replace(key, "[key]") if key else text


def _key_of(config: JudgeConfig) -> str:
    """Return the key. Raises ConfigError if its variable is not set."""
    if config.key_variable is None:
        return "none"  # the client refuses an empty one
    key = os.environ.get(config.key_variable, "")
    if not key.strip():
        raise ConfigError(
            f"the judge at {config.base_url} has no key: the environment lacks {config.key_variable}",
            way_out="set the variable, or task.reward.judge.key_variable=none for an endpoint without keys.",
        )
    return key


def _client(config: JudgeConfig, timeout_s: float) -> AsyncOpenAI:
    from openai import AsyncOpenAI, Timeout

    return AsyncOpenAI(
        base_url=config.base_url,
        api_key=_key_of(config),
        # Shorter than the whole limit, so that an unopened connection shows as such.
        timeout=Timeout(timeout_s, connect=min(CHECK_S, timeout_s / 2)),
        max_retries=0,  # ours also hold back the other requests
    )


def check_endpoint(config: JudgeConfig) -> None:
    """Ask the endpoint for its models, which costs nothing. Blocks. Raises ConfigError
    if the client is missing, or the endpoint cannot be reached, refuses the key, or
    answers with anything but JSON.
    """
    with needing("judge", "task.reward.judge"):
        import openai
    where = f"the judge at {config.base_url}"
    with openai.OpenAI(
        base_url=config.base_url,
        api_key=_key_of(config),
        timeout=CHECK_S,
        max_retries=0,
    ) as client:
        try:
            response: Any = client.models.with_raw_response.list().http_response
        except openai.APIStatusError as error:
            response = error.response
        except openai.APIConnectionError as error:
            raise ConfigError(
                f"{where} cannot be reached: {error.__cause__ or error}",
                way_out="start it, or correct task.reward.judge.base_url.",
            ) from error
    if response.status_code in (401, 403):
        raise ConfigError(
            f"{where} refuses the key of {config.key_variable} ({response.status_code})",
            way_out="set the variable to a key of this endpoint.",
        )
    kind = response.headers.get("content-type", "no type")
    if "json" not in kind:
        text = _without_key(config, response.text)
        raise ConfigError(
            f"{where} answers /models with {kind}: {text[:80]!r}",
            rule="an OpenAI-compatible endpoint answers with JSON",
            way_out="correct task.reward.judge.base_url; it usually ends with /v1.",
        )
