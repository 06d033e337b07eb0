"""Judges: real requests to a small HTTP server, and limits on the virtual clock."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakes import FakeEngine
from job_runs import read_lines, run, write_config
from producer_cases import World
from rollout_cases import virtual
from scorer_cases import PROMPT, TOKENIZER, sampled
from scoring_cases import SECTIONS

from asyncrl.base.errors import ConfigError, RewardFailure, TaskError
from asyncrl.config import RunConfig, TaskConfig
from asyncrl.config.load import checked
from asyncrl.extensions.scoring import judge
from asyncrl.extensions.scoring.judge import (
    Judge,
    MinuteLimits,
    check_endpoint,
    retry_after_s,
)
from asyncrl.extensions.scoring.judge_config import JudgeConfig
from asyncrl.job.check.config_check import validate
from asyncrl.journal.read import read_resume
from asyncrl.messages.records import Prompt, RewardPart
from asyncrl.tasks import TaskScorer, build_task
from asyncrl.tasks.rewards import UserCodeFailed

pytestmark = pytest.mark.extension("scoring")

Answer = Callable[[str], str | web.Response]
CUT = "<cut>"
"""Ends an answer that reached max_tokens."""


class Endpoint:
    """An OpenAI-compatible server that answers each request's text with `answer`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked = list[str]()
        self.bodies = list[dict[str, Any]]()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app)

    @property
    def base_url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def _models(self, request: web.Request) -> web.Response:
        keys = ("Bearer sk-right", "Bearer none")
        if request.headers["Authorization"] not in keys:
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"object": "list", "data": []})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body["messages"][0]["content"]
        self.asked.append(text)
        self.bodies.append(body)
        answer = self._answer(text)
        if isinstance(answer, web.Response):
            return answer
        message = {"role": "assistant", "content": answer.removesuffix(CUT)}
        finish = "length" if answer.endswith(CUT) else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": message}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response({**reply, "choices": [choice], "usage": usage})


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[Endpoint]:
    found = Endpoint(answer)
    await found.server.start_server()
    try:
        yield found
    finally:
        await found.server.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-right")
    monkeypatch.setattr(judge, "FIRST_DELAY_S", 0.001)


def settings(base_url: str, **values: Any) -> dict[str, Any]:
    given = {"prompt": "Grade {completion}", "model": "m", "key_variable": "JUDGE_KEY"}
    return {"base_url": base_url, **given, **values}


@asynccontextmanager
async def scorer_of(server: Endpoint, **values: Any) -> AsyncIterator[TaskScorer]:
    config = TaskConfig(
        files=["examples/data/capitals.jsonl"],
        reward={"judge": settings(server.base_url, **values)},  # type: ignore[arg-type]
    )
    scorer = TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
    try:
        yield scorer
    finally:
        await scorer.aclose()


# ---- modes


@pytest.mark.asyncio
async def test_judge_grades_each_text_once_and_counts_its_tokens() -> None:
    async with endpoint(lambda text: f"because ...\n{len(text) - 6}") as server:
        async with scorer_of(server, best=10.0) as scorer:
            texts = ["aa", "bbbb", "aa", "aa"]
            calls = (scorer.score(PROMPT, sampled(text)) for text in texts)
            assert await asyncio.gather(*calls) == [0.2, 0.4, 0.2, 0.2]
            assert isinstance(scorer.asked, Judge)
            counts = (scorer.asked.num_requests, scorer.asked.num_cached)
            assert (*counts, scorer.asked.num_tokens) == (2, 2, 20)
    assert sorted(server.asked) == ["Grade aa", "Grade bbbb"]
    assert server.bodies[0]["temperature"] == 0.0


@pytest.mark.asyncio
async def test_named_groups_of_an_answer_are_parts() -> None:
    replies = ["style: 8", "exact: 12, style: 8", "exact: 5, style: 8"]
    parse = r"exact: (?P<exact>\d+), style: (?P<style>\d+)?"
    async with endpoint(lambda _: replies.pop(0)) as server:
        async with scorer_of(server, best=10.0, parse=parse, retries=2) as scorer:
            found = await scorer.score(PROMPT, sampled("aa"))
    assert found == {"exact": RewardPart(0.5), "style": RewardPart(0.8)}
    assert replies == [], "answers without a grade, or with one too high, are repeated"


@pytest.mark.asyncio
async def test_completion_cannot_fill_in_places_of_the_prompt() -> None:
    async with endpoint(lambda text: "1") as server:
        prompt = "{prompt}|{answer}|{completion}"
        async with scorer_of(server, prompt=prompt) as scorer:
            await scorer.score(PROMPT, sampled("{answer}"))
    assert server.asked == ["say x|x|{answer}"]


SYSTEM = {"role": "system", "content": "be brief"}
CHAT = (
    {"role": "user", "content": "say x"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "again"},
)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (CHAT[:1], "say x"),
        ((SYSTEM, *CHAT[:1]), "say x"),
        ((SYSTEM, *CHAT), "user: say x\n\nassistant: x\n\nuser: again"),
    ],
)
def test_prompt_of_the_judge_has_the_whole_chat(
    messages: tuple[dict[str, str], ...], shown: str
) -> None:
    @virtual
    async def story() -> None:
        timed = Timed(prompt="{prompt}|{completion}")
        await timed(Prompt("0/7", messages), "c")
        assert timed.asked == [f"{shown}|c"]

    story()


@pytest.mark.asyncio
async def test_judge_compares_all_pairs_and_fails_both_without_a_verdict() -> None:
    def verdict(text: str) -> str:
        first, second = re.findall(r"<(\w+)>", text)
        if {first, second} == {"a", "zz"}:
            return "I cannot say"
        return "A" if len(first) > len(second) else "B"

    async with endpoint(verdict) as server:
        prompt = "Which is better, A <{first}> or B <{second}>?"
        values = {"mode": "compare", "prompt": prompt, "retries": 1}
        async with scorer_of(server, **values) as scorer:
            found = await scorer.score_group(PROMPT, ["bb", "ccc", None, "d", "bb"])
            assert found == [0.5, 1.0, 0.0, 0.0, 0.5]
            first, second, third = await scorer.score_group(PROMPT, ["a", "zz", "ccc"])
            assert third == 1.0
            assert {type(first), type(second)} == {RewardFailure}
            assert "answered 'I cannot say'" in str(first)


VERDICTS = {
    "score": {
        "7": "7",
        "Score: 7": "7",
        "It is right.\n\n**7**": "7",
        "**Grade:** 0.5.": "0.5",
        "So [[10]]": "10",
        "Grade: 7/10": None,
        "3 / 10": None,
        "3 /10": None,
        "8 out of 10": None,
        "Grade: 8 (out of 10)": None,
        "I cannot say, on a scale from 0 to 10": None,
        "Right and wrong, 7:10": None,
        "Grade: 7-8": None,
        "Grade: 7,5": None,
    },
    "compare": {
        "A": "A",
        "tie.": "tie",
        "Verdict: B": "B",
        "**Verdict:** A": "A",
        "So my verdict is [[A]]": "A",
        "Both are right.\nTie!": "Tie",
        "Answer B is better than A.": None,
        "Answer B is better than **A**": None,
        "The second one contains a": None,
        "Is it A, or B?": None,
        "Which one: A?": None,
    },
}


@pytest.mark.parametrize(
    ("mode", "answer", "verdict"),
    [(mode, *pair) for mode, texts in VERDICTS.items() for pair in texts.items()],
)
def test_default_pattern_reads_only_a_verdict_that_stands_alone(
    mode: str, answer: str, verdict: str | None
) -> None:
    prompt = "{completion}" if mode == "score" else "{first}{second}"
    values = settings("http://x/v1", mode=mode, prompt=prompt)
    found = JudgeConfig.model_validate(values).pattern.search(answer)
    assert (found and found[1]) == verdict


# ---- failures


@pytest.mark.asyncio
async def test_answer_that_is_cut_is_no_verdict() -> None:
    answers = iter(["The grade: 1" + CUT, "0", *["1" + CUT] * 2])
    async with endpoint(lambda text: next(answers)) as server:
        async with scorer_of(server, retries=1, max_tokens=9) as scorer:
            assert await scorer.score(PROMPT, sampled("a")) == 0.0
            with pytest.raises(RewardFailure, match="cut at task.reward.judge.max_tok"):
                await scorer.score(PROMPT, sampled("b"))
    assert len(server.asked) == 4


@pytest.mark.asyncio
async def test_malformed_answer_is_repeated_then_fails_the_rollout() -> None:
    answers = iter(["no", "11", "7", *["no"] * 9])
    async with endpoint(lambda text: next(answers)) as server:
        async with scorer_of(server, best=10.0, retries=2) as scorer:
            assert await scorer.score(PROMPT, sampled("a")) == 0.7
            assert [body["temperature"] for body in server.bodies] == [0.0, 0.5, 0.5]
            said = "in try 3 the judge answered 'no'(.|\n)*correct the judge m"
            with pytest.raises(RewardFailure, match=said):
                await scorer.score(PROMPT, sampled("b"))
            assert isinstance(scorer.asked, Judge)
            assert scorer.asked.num_retried == 4


def refusal(status: int, **headers: str) -> web.Response:
    body = {"error": {"message": "not now"}}
    return web.json_response(body, status=status, headers=headers)


@pytest.mark.asyncio
async def test_busy_endpoint_is_asked_again_when_it_says() -> None:
    date = format_datetime(datetime.now(UTC) - timedelta(seconds=5), usegmt=True)
    headers = {"Retry-After": "0.01"}
    answers = iter(
        [
            refusal(429, **headers),
            refusal(503),
            refusal(429, **{"Retry-After": date}),
            "1",
        ]
    )
    async with endpoint(lambda text: next(answers)) as server:
        async with scorer_of(server) as scorer:
            assert await scorer.score(PROMPT, sampled("a")) == 1.0
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("answer", "tries", "words"),
    [
        (refusal(400), 1, "was refused by the judge: BadRequestError"),
        (refusal(500), 3, "did not answer: InternalServerError"),
        (
            web.Response(text="<html>hello", content_type="text/html"),
            3,
            "not a chat completion: '<html>hello'",
        ),
        (
            web.json_response({"choices": [{"message": None}]}),
            3,
            "not a chat completion",
        ),
        (web.json_response({"choices": []}), 3, "not a chat completion"),
        (web.json_response([]), 3, "not a chat completion"),
        (web.json_response({"error": "full"}), 3, "did not answer: ReplyError: full"),
        (
            web.Response(text='{"choices"', content_type="application/json"),
            3,
            "answered '' .Expecting",
        ),
        (web.Response(text="", content_type="application/json"), 3, "answered '' .Exp"),
    ],
)
@pytest.mark.asyncio
async def test_failing_endpoint_costs_the_rollout(
    answer: web.Response, tries: int, words: str
) -> None:
    def again(text: str) -> web.Response:
        kind = answer.content_type
        return web.Response(text=answer.text, status=answer.status, content_type=kind)

    async with endpoint(again) as server:
        async with scorer_of(server, retries=2) as scorer:
            with pytest.raises(RewardFailure, match=words):
                await scorer.score(PROMPT, sampled("a"))
    assert len(server.asked) == tries


@pytest.mark.asyncio
async def test_spent_budget_ends_the_run() -> None:
    async with endpoint(lambda text: "1") as server:
        async with scorer_of(server, budget=15) as scorer:
            assert await scorer.score(PROMPT, sampled("a")) == 1.0
            assert await scorer.score(PROMPT, sampled("b")) == 1.0
            with pytest.raises(TaskError, match="used 20 tokens"):
                await scorer.score(PROMPT, sampled("c"))
            assert await scorer.score(PROMPT, sampled("a")) == 1.0, "from the cache"


def test_retry_after_has_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    date = "Thu, 01 Jan 2026 12:00:30 GMT"
    texts = ["7", "0.5", "-3", date, "Thu, 01 Jan 2026 11:00:00 GMT", "", "soon"]
    found = [retry_after_s(text, now) for text in texts]
    assert found == [7.0, 0.5, 0.0, 30.0, 0.0, None, None]


@pytest.mark.asyncio
async def test_server_that_trickles_is_left_at_the_limit() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", trickle)
    server = TestServer(app)
    await server.start_server()
    try:
        url = str(server.make_url("/v1"))
        values = settings(url, retries=1, max_tokens=9)
        trickled = Judge(JudgeConfig.model_validate(values), timeout_s=0.5)
        with pytest.raises(UserCodeFailed, match="no whole reply within 0.5 s"):
            async with asyncio.timeout(60.0):
                await trickled(PROMPT, "a")
        assert trickled.num_requests == 2
        assert trickled.num_tokens == 2 * (len("Grade a") // 4 + 9)
        await trickled.aclose()
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("status", "num_tokens"), [(429, 0), (400, 0), (500, 10), (None, 0)]
)
@pytest.mark.asyncio
async def test_request_without_a_reply_costs_its_estimate_if_it_began(
    status: int | None, num_tokens: int
) -> None:
    async with endpoint(lambda text: refusal(status or 200)) as server:
        url = server.base_url if status else "http://127.0.0.1:9/v1"
        values = settings(url, retries=0, max_tokens=9)
        asked = Judge(JudgeConfig.model_validate(values), timeout_s=30.0)
        with pytest.raises(UserCodeFailed):
            await asked(PROMPT, "a")
        await asked.aclose()
    assert (asked.num_requests, asked.num_tokens) == (1, num_tokens)


@pytest.mark.parametrize("status", [200, 400, 429])
@pytest.mark.asyncio
async def test_key_in_an_error_is_hidden(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    def echo(text: str) -> web.Response:
        return web.json_response({"error": "key sk-right is poor"}, status=status)

    caplog.set_level("INFO", logger="asyncrl")
    async with endpoint(echo) as server:
        async with scorer_of(server, retries=0) as scorer:
            with pytest.raises(RewardFailure, match=r"key \[key\] is poor"):
                await scorer.score(PROMPT, sampled("a"))
    assert "sk-right" not in caplog.text


# ---- limits


@virtual
async def test_limits_hold_in_every_minute() -> None:
    limit = MinuteLimits(tokens=10)
    begun = list[tuple[float, float]]()
    clock = asyncio.get_running_loop().time

    async def call(at_s: float, units: float) -> None:
        await asyncio.sleep(at_s)
        await limit.wait(units)
        begun.append((clock(), units))

    given = [(0, 4), (1, 4), (2, 4), (3, 1), (70, 6), (71, 25), (72, 1)]
    await asyncio.gather(*(call(*each) for each in given))
    assert begun == [
        (0, 4),
        (1, 4),
        (60, 4),
        (60, 1),
        (120, 6),
        (180, 25),
        (240, 1),
    ]


class Timed(Judge):
    """A judge whose requests take 5 s of the virtual clock and answer `word`."""

    def __init__(self, word: str = "1", **values: Any) -> None:
        self.word = word
        config = JudgeConfig.model_validate(settings("http://judge/v1", **values))
        super().__init__(config, timeout_s=30.0)
        self.begun = list[float]()
        self.asked = list[str]()
        self.running = self.peak = 0
        self.errors = list[Exception]()

    async def _create(self, request: str, temperature: float) -> Any:
        self.begun.append(asyncio.get_running_loop().time())
        self.asked.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(5.0)
        self.running -= 1
        if self.errors:
            raise self.errors.pop()
        message = {"role": "assistant", "content": self.word}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return openai.types.chat.ChatCompletion.model_validate(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        )


@pytest.mark.parametrize(
    ("values", "begun", "peak"),
    [
        ({"max_concurrent": 2}, [0, 0, 5, 5, 10, 10], 2),
        ({"requests_per_minute": 4}, [0, 0, 0, 0, 60, 60], 4),
        # A request is estimated at 2 + 18 tokens, and has 10.
        ({"tokens_per_minute": 45, "max_tokens": 18}, [0, 0, 60, 60, 120, 120], 2),
        ({"tokens_per_minute": 1, "max_tokens": 18}, [0, 60, 120, 180, 240, 300], 1),
    ],
)
def test_requests_keep_the_limits(
    values: dict[str, Any], begun: list[float], peak: int
) -> None:
    @virtual
    async def story() -> None:
        timed = Timed(**values)
        texts = [f"t{number}" for number in range(6)]
        assert await asyncio.gather(*(timed(PROMPT, t) for t in texts)) == [1.0] * 6
        assert (timed.begun, timed.peak) == (begun, peak)

    story()


def busy(wait_s: int) -> openai.RateLimitError:
    import httpx

    request = httpx.Request("POST", "http://judge/v1")
    headers = {"Retry-After": str(wait_s)}
    response = httpx.Response(429, headers=headers, request=request)
    return openai.RateLimitError("busy", response=response, body=None)


@virtual
async def test_limits_hold_after_a_pause() -> None:
    # A request is estimated at 2 + 18 tokens.
    timed = Timed(tokens_per_minute=45, max_tokens=18, requests_per_minute=3)
    timed.errors.append(busy(90))

    async def ask(at_s: float, text: str) -> None:
        await asyncio.sleep(at_s)
        await timed(PROMPT, text)

    times = {"a": 0, "b": 10, "c": 10, "d": 71, "e": 71}
    await asyncio.gather(*(ask(at_s, text) for text, at_s in times.items()))
    assert timed.begun == [0, 95, 95, 155, 155, 215]


@virtual
async def test_requests_in_flight_count_for_the_budget() -> None:
    timed = Timed(budget=40, max_tokens=18)
    calls = (timed(PROMPT, f"t{number}") for number in range(3))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[:2] == [1.0, 1.0]
    assert isinstance(results[2], TaskError)
    assert "used 0 tokens, and up to 40 in open requests" in str(results[2])
    assert timed.num_tokens == 20
    assert await timed(PROMPT, "t3") == 1.0


@virtual
async def test_equal_requests_share_a_failure() -> None:
    timed = Timed(retries=1)
    timed.errors += [busy(1) for _ in range(4)]
    calls = (timed(PROMPT, "a") for _ in range(3))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {str(result)[:36] for result in results} == {
        "has no verdict: in try 2 the judge d"
    }
    assert len(timed.begun) == 2
    timed.errors.clear()
    assert await timed(PROMPT, "a") == 1.0


@virtual
async def test_busy_endpoint_holds_back_all_requests() -> None:
    timed = Timed(max_concurrent=1)
    timed.errors.append(busy(30))
    assert await asyncio.gather(timed(PROMPT, "a"), timed(PROMPT, "b")) == [1.0, 1.0]
    assert timed.begun == [0, 35, 40]


@virtual
async def test_surprise_in_a_pair_spares_the_others() -> None:
    class Surprised(Timed):
        async def _create(self, request: str, temperature: float) -> Any:
            if "c" not in request:
                raise RuntimeError("surprise")
            return await super()._create(request, temperature)

    values = {"mode": "compare", "prompt": "{first} {second}"}
    found = await Surprised(word="A", **values)(PROMPT, ["a", "b", "c"])
    assert isinstance(found, list)
    assert [str(reward)[:29] for reward in found] == [
        *["raised RuntimeError: surprise"] * 2,
        "0.5",
    ]


@virtual
async def test_queue_of_the_judge_is_no_time_of_the_rollout() -> None:
    timed = Timed(requests_per_minute=1)
    config = TaskConfig(
        files=["examples/data/capitals.jsonl"],
        reward={"judge": settings("http://judge/v1")},  # type: ignore[arg-type]
        reward_timeout_s=10.0,
    )
    scorer = TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
    scorer.asked = timed
    lengths = count(1)
    engine = FakeEngine(tokens=lambda _: next(lengths))
    values = {"group_size": 3, "timeout_s": 10.0, "num_tickets": 1, "retries": 0}
    scorers = SimpleNamespace(of=lambda prompt: scorer)
    async with World(engine=engine, scorer=scorers, **values) as world:
        await asyncio.sleep(130.0)
        (group,) = world.sink.finished
    assert timed.begun == [1, 61, 121]
    assert [branch.reward for branch in group.trajectories] == [1.0] * 3


# ---- before the start


def test_judge_is_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, base_url: str, **values: Any) -> None:
        config = JudgeConfig.model_validate(settings(base_url, **values))
        with pytest.raises(ConfigError, match=words):
            check_endpoint(config)

    async def story() -> None:
        async with endpoint(lambda text: "1") as server:

            async def check(*arguments: Any, **values: Any) -> None:
                await asyncio.to_thread(refused, *arguments, **values)

            right = JudgeConfig.model_validate(settings(server.base_url))
            await asyncio.to_thread(check_endpoint, right)
            monkeypatch.delenv("JUDGE_KEY")
            await check("has no key: .* lacks JUDGE_KEY", server.base_url)
            monkeypatch.setenv("JUDGE_KEY", "sk-wrong")
            await check("refuses the key of JUDGE_KEY .401.", server.base_url)
            page = server.base_url.removesuffix("/v1") + "/page"
            await check("answers /models with text/plain", page)
            gone = server.base_url
        await check("cannot be reached", gone)

    asyncio.run(story())


def test_run_and_check_reach_the_judge(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "answer": "a"}))
    architecture = {"model_type": "llama", "vocab_size": 64}
    config = checked(
        RunConfig,
        {
            "model": {"scratch": {"characters": "ab", "architecture": architecture}},
            "task": {
                "files": [str(rows)],
                "reward": {"judge": settings("http://127.0.0.1:9/v1")},
            },
        },
    )
    with pytest.raises(ConfigError, match="the judge at http://127.0.0.1:9/v1 cannot"):
        validate(config)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_run_is_paid_by_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(text: str) -> str:
        return "0.5" if text.startswith("held out") else "A"

    monkeypatch.delenv("JUDGE_KEY")  # a forked run has the tests' environment
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{a} 2", "answer": a}) for a in "abcdefgh"]
    rows.write_text("\n".join(lines))
    async with endpoint(answer) as server:
        values = {"mode": "compare", "prompt": "{prompt}\n{first}\n{second}"}
        values["key_variable"] = "none"
        reward = {"judge": settings(server.base_url, **values)}
        path = write_config(tmp_path, trainer={"num_steps": 3})
        config = yaml.safe_load(path.read_text())
        config["task"] = {"files": [str(rows)], "reward": reward}
        given = settings(server.base_url, prompt="held out {completion}")
        given["key_variable"] = "none"
        task = {"files": [str(rows)], "reward": {"judge": given}}
        config["eval"] = {"task": task, "engine": "rollout", "num_prompts": 4}
        path.write_text(yaml.safe_dump(config))
        done = await asyncio.to_thread(run, path, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    trained = [text for text in server.asked if not text.startswith("held out")]
    # The evaluation after the last step may be in it or not.
    assert len(server.asked) >= last["judge/requests"] > len(trained) >= 12
    assert last["judge/tokens"] == 10 * last["judge/requests"]
    journaled = read_resume(tmp_path / "run" / "journal.sqlite", 3).counted
    assert len(server.asked) >= journaled["judge/requests"] >= last["judge/requests"]
    assert last["reward/mean"] == pytest.approx(0.5)


# ---- docs/rewards.md

REPLIES = [
    ("Reply with one number from 0", "A good answer: 7", [0.7, 0.7]),
    ("End with A, B or tie", "Tie.", [0.5, 0.5]),
    ("Is the answer right and short", "5", [1.0, 1.0]),
]


@pytest.mark.parametrize(("asks", "reply", "expected"), REPLIES)
@pytest.mark.asyncio
async def test_a_judge_of_the_page(
    asks: str, reply: str, expected: list[float]
) -> None:
    (text,) = (section for section in SECTIONS if asks in section)
    values = yaml.safe_load(text)["task"]["reward"]["judge"]
    async with endpoint(lambda text: reply) as server:
        values.pop("base_url", None)
        # These are of a judge without base_url.
        values.pop("max_length", None)
        async with scorer_of(server, **values) as scorer:
            texts = ["It is Paris", "Paris"]
            found: Any = (
                await scorer.score_group(PROMPT, texts)
                if scorer.scores_groups
                else [await scorer.score(PROMPT, sampled(text)) for text in texts]
            )
    assert found == expected
    assert all("say x" in question and asks in question for question in server.asked)
