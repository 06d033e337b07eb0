"""Rewards run off the loop and within a limit; an error is a failure, never a reward of
0.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rollout_cases import virtual
from scorer_cases import PROMPT, TOKENIZER, make_scorer, sampled
from token_cases import completion_of

from asyncrl.base.errors import RewardFailure, RolloutFailure, TaskError
from asyncrl.base.user_code import GRACE_S, MAX_HUNG
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Completion, Prompt
from asyncrl.messages.tokens import NO_COMPLETION
from asyncrl.tasks import TaskScorer, build_task
from asyncrl.tasks.rewards import UserCodeFailed, as_reward, optional


class Stop(BaseException):
    """An error of a test framework or trio."""


def interrupts(*text: str) -> float:
    """Raise what a sampled program may raise."""
    raise KeyboardInterrupt(*text)


async def stops(*_: Any) -> float:
    raise Stop("enough")


RAISES: list[tuple[Any, str]] = [
    (
        lambda *_: {}["no such thing"],
        "KeyError: 'no such thing' .test_tasks_scorer.py line",
    ),
    (lambda *_: sys.exit(3), "SystemExit: 3"),
    (lambda *_: next(iter(())), "StopIteration"),  # which asyncio futures do not take
    (stops, ".*Stop: enough"),
    (lambda *_: interrupts(), "KeyboardInterrupt"),
    (
        lambda *_: interrupts("\ud800" + 9_000_000 * "x"),
        r"KeyboardInterrupt: .ud800x{1900,2000} .test_tasks",
    ),
]


@pytest.mark.parametrize("pool", ["inline", "thread"])
@pytest.mark.parametrize(("function", "words"), RAISES)
@pytest.mark.asyncio
async def test_raised_error_of_a_reward_is_a_failure(
    pool: str, function: Any, words: str
) -> None:
    said = rf"the reward of prompt 0/7 raised {words}(.|\n)*'an answer'"
    with pytest.raises(RewardFailure, match=said):
        await make_scorer(function, pool).score(PROMPT, sampled("an answer"))


@pytest.mark.parametrize(
    "value", [1, False, 0.25, np.float32(0.25), np.bool_(True), np.array([0.5])]
)
def test_numbers_of_all_kinds_are_rewards(value: Any) -> None:
    assert as_reward(value) == float(np.asarray(value).item())


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        float("nan"),
        float("inf"),
        -1.001e18,
        1j,
        [1.0],
        np.array([1.0, 2.0]),
        {},
    ],
)
def test_value_that_is_no_finite_number_is_a_failure(value: Any) -> None:
    with pytest.raises(UserCodeFailed, match="^returned "):
        as_reward(value)


@pytest.mark.parametrize("pool", ["inline", "thread"])
@pytest.mark.asyncio
async def test_reward_that_changes_its_prompt_changes_only_its_copy(pool: str) -> None:
    def spoil(prompt: Prompt, completion: str, answer: Any, **_: Any) -> float:
        prompt.messages[0]["content"].append("spoiled")  # type: ignore[attr-defined]
        answer["values"].append(9)
        prompt.info["unit"]["name"] = "spoiled"
        return float(len(answer["values"]))

    prompt = Prompt(
        "0/7",
        ({"role": "user", "content": ["how many?"]},),
        {"values": [1, 2]},
        {"unit": {"name": "m"}},
    )
    before = copy.deepcopy(prompt)
    scorer = make_scorer(lambda *given: spoil(*given, given[0].answer), pool)
    for _ in range(2):
        assert await scorer.score(prompt, sampled("3")) == 3.0
    assert prompt == before
    locked = replace(prompt, answer=threading.Lock())
    scorer = make_scorer(lambda shown, *_: float(shown.answer is locked.answer), pool)
    assert await scorer.score(locked, sampled("3")) == 1.0


@pytest.mark.asyncio
async def test_a_coroutine_made_for_a_cancelled_rollout_is_closed() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    begun, gate = asyncio.Event(), threading.Event()

    async def waits() -> float:
        return 1.0

    coroutine = waits()

    def makes(*_: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        gate.wait(60)
        return coroutine

    scorer = make_scorer(makes, "thread")
    scoring = asyncio.ensure_future(scorer.score(PROMPT, sampled("x")))
    await begun.wait()
    scoring.cancel()
    await asyncio.wait({scoring})
    gate.set()
    await asyncio.to_thread(int)  # by the same thread, so after it
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@virtual
async def test_async_rewards_run_together_within_the_limit() -> None:
    async def waits(*_: Any) -> float:
        await asyncio.sleep(5.0)
        return 0.5

    scorer = make_scorer(waits, "inline", reward_workers=1)
    assert (
        await asyncio.gather(*(scorer.score(PROMPT, sampled("")) for _ in range(100)))
        == [0.5] * 100
    )
    assert asyncio.get_running_loop().time() == 5.0
    scorer = make_scorer(waits, "inline", reward_timeout_s=4.0)
    with pytest.raises(
        RewardFailure, match=r"did not return within 4.0 s .task.reward_timeout_s."
    ):
        await scorer.score(PROMPT, sampled(""))


@pytest.mark.asyncio
async def test_threads_run_at_most_reward_workers_at_once() -> None:
    free, full, gate = threading.Semaphore(3), threading.Barrier(3), threading.Event()
    loop = asyncio.get_running_loop()

    def counts(*_: Any) -> float:
        assert free.acquire(blocking=False), "a fourth one at the same time"
        full.wait(60.0)
        # the loop is free while three threads are blocked
        loop.call_soon_threadsafe(gate.set)
        goes_on = gate.wait(60.0)
        free.release()
        return float(goes_on)

    scorer = make_scorer(counts, "thread", reward_workers=3)
    assert (
        await asyncio.gather(*(scorer.score(PROMPT, sampled("")) for _ in range(12)))
        == [1.0] * 12
    )


@pytest.mark.asyncio
async def test_hung_thread_costs_only_its_own_rollout() -> None:
    gate = threading.Event()

    def hangs_on_x(prompt: Prompt, completion: str) -> float:
        return float(completion != "x" or gate.wait(30.0))

    scorer = make_scorer(hangs_on_x, "thread", reward_workers=2, reward_timeout_s=3.0)
    with pytest.raises(RewardFailure, match="did not return within"):
        await scorer.score(PROMPT, sampled("x"))
    assert (
        await asyncio.gather(*(scorer.score(PROMPT, sampled("y")) for _ in range(5)))
        == [1.0] * 5
    )
    assert scorer.num_abandoned == 1
    gate.set()


@pytest.mark.asyncio
async def test_hung_threads_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.base.user_code.MAX_HUNG", 1)
    gate = threading.Event()
    scorer = make_scorer(
        lambda *_: float(gate.wait(60.0)), "thread", reward_timeout_s=0.01
    )
    with pytest.raises(RewardFailure, match="did not return within"):
        await scorer.score(PROMPT, sampled("x"))
    with pytest.raises(
        TaskError, match="1 calls of the reward function x:y are still running"
    ):
        await scorer.score(PROMPT, sampled("x"))
    gate.set()


@pytest.mark.asyncio
async def test_cancelled_score_leaves_no_unread_exception() -> None:
    begun, gate = threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))

    def fails(*_: Any) -> str:
        begun.set()
        gate.wait(60.0)
        return "1.0"

    scoring = asyncio.create_task(
        make_scorer(fails, "thread").score(PROMPT, sampled(""))
    )
    await asyncio.to_thread(begun.wait, 60.0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    gate.set()
    await loop.shutdown_default_executor()
    del scoring
    gc.collect()
    assert complaints == []


REWARDS = """
    import asyncio, os, sys, time
    def moody(prompt, completion, answer):
        if completion == "hang":
            while True: time.sleep(1)
        if completion == "die": os._exit(7)
        if completion == "raise": raise KeyError("no")
        if completion == "interrupt": raise KeyboardInterrupt
        if completion == "torch": return "torch" in sys.modules
        if completion == "pid": return os.getpid()
        return 1.0
    def sure(prompt, completion, answer, sampled):
        assert sampled.finish_reason == "length"
        return sum(sampled.behaviour_logprobs)
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rewards_here.py and rows.jsonl."""
    (tmp_path / "rewards_here.py").write_text(textwrap.dedent(REWARDS))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say x", "answer": "x"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "rewards_here", raising=False)
    return tmp_path


def process_scorer(
    name: str, **settings: Any
) -> AbstractAsyncContextManager[TaskScorer]:
    config = TaskConfig(
        files=["rows.jsonl"], reward=name, reward_pool="process", **settings
    )
    return aclosing(TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0))


@pytest.mark.asyncio
async def test_reward_sees_the_logprobs_that_it_asks_for(rewards: Path) -> None:
    def longest(prompt: Prompt, completion: str, *, sampled: Completion) -> float:
        return float(len(sampled.token_ids))

    assert await make_scorer(longest).score(PROMPT, sampled("four")) == 4.0
    for pool in ("thread", "inline"):
        config = TaskConfig(
            files=["rows.jsonl"], reward="rewards_here:sure", reward_pool=pool
        )
        scorer = TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
        assert await scorer.score(PROMPT, sampled("four")) == -2.0


@pytest.mark.parametrize(
    ("special_tokens", "text"), [("visible", "a<x>b"), ("stripped", "ab")]
)
@pytest.mark.asyncio
async def test_reward_sees_special_tokens_but_no_end_of_turn(
    special_tokens: str, text: str
) -> None:
    def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            ("" if skip_special_tokens else "<x>") if one == 1 else chr(one)
            for one in ids
        )

    tokenizer: Any = SimpleNamespace(end_ids={0}, decode=decode)
    seen: list[str] = []
    task: Any = SimpleNamespace(
        score=lambda prompt, completion: seen.append(completion) or 1.0
    )
    config = TaskConfig(
        python="x:y", reward_pool="inline", special_tokens=special_tokens
    )  # type: ignore[arg-type]
    scorer = TaskScorer(task, config, tokenizer, seed=0)
    for ids in ((97, 1, 98, 0), (97, 1, 98)):
        assert await scorer.score(PROMPT, completion_of(ids)) == 1.0
    assert seen == [text, text]


def test_only_a_further_parameter_gets_the_record() -> None:
    def third(prompt: Any, sampled: Any, answer: Any) -> float:
        return 0.0

    def only(prompt: Any, completion: Any, sampled: Any, /) -> float:
        return 0.0

    def fourth(prompt: Any, completion: Any, answer: Any, sampled: Any) -> float:
        return 0.0

    def named(*args: Any, sampled: Any) -> float:
        return 0.0

    asks = [
        bool(optional(one, NO_COMPLETION))
        for one in (third, only, fourth, named, print)
    ]
    assert asks == [False, False, True, True, False]


MOODS = {
    "interrupt": "raised KeyboardInterrupt",
    "die": "ended its process .exit code 7.",
    "raise": "raised KeyError",
}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_processes_survive_whatever_the_reward_does(rewards: Path) -> None:
    async with process_scorer(
        "rewards_here:moody", reward_workers=2, reward_timeout_s=60.0
    ) as scorer:
        assert await scorer.score(PROMPT, sampled("fine")) == 1.0
        assert await scorer.score(PROMPT, sampled("torch")) == 0.0, (
            "torch was loaded into a reward process"
        )
        words = [*MOODS, "fine"]
        calls = (scorer.score(PROMPT, sampled(word)) for word in words)
        *found, last = await asyncio.gather(*calls, return_exceptions=True)
        for error, word in zip(found, words, strict=False):
            with pytest.raises(RewardFailure, match=MOODS[word]):
                raise error  # type: ignore[misc]
        assert last == 1.0
    async with process_scorer("rewards_here:sure", reward_workers=1) as scorer:
        assert await scorer.score(PROMPT, sampled("four")) == -2.0
    async with process_scorer(
        "rewards_here:moody", reward_workers=2, reward_timeout_s=1.0
    ) as scorer:
        calls = (scorer.score(PROMPT, sampled("hang")) for _ in range(3))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, BaseException)
            with pytest.raises(RewardFailure, match=r"did not return within 1.0 s"):
                raise error
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise ValueError('not here')", "the reward of prompt 0/7 raised .*not here"),
        ("import os; os.kill(os.getpid(), 9)", "lost its process outside of any call"),
    ],
)
async def test_score_that_no_process_can_build_is_a_failure(
    rewards: Path, module: str, words: str
) -> None:
    async with process_scorer("rewards_here:moody", reward_workers=1) as scorer:
        (rewards / "rewards_here.py").write_text(module)
        with pytest.raises(RewardFailure, match=words):
            await scorer.score(PROMPT, sampled("x"))
    assert multiprocessing.active_children() == []


KILLED_RUN = """
    import asyncio, os, signal
    from types import SimpleNamespace
    from asyncrl.base.user_code import run_loop
    from asyncrl.config import TaskConfig
    from asyncrl.messages.records import Prompt
    from token_cases import completion_of
    from asyncrl.tasks import TaskScorer, build_task
    async def main():
        config = TaskConfig(files=["rows.jsonl"], reward="rewards_here:moody", reward_pool="process")
        tokenizer = SimpleNamespace(end_ids=(), decode=lambda ids, **_: "".join(map(chr, ids)))
        scorer = TaskScorer(build_task(config, 0), config, tokenizer, seed=0)
        print(int(await scorer.score(Prompt("0/0", ()), completion_of([*map(ord, "pid")]))), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if __name__ == "__main__":
        run_loop(main())
"""


@pytest.mark.slow
def test_reward_processes_die_with_a_killed_run(rewards: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED_RUN)]
    # The test modules are on the path of pytest only.
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "kit")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=rewards,
        env=env,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=60)


# ---- coroutines that ignore cancellation


@virtual
async def test_call_that_cancels_itself_is_a_failure() -> None:
    async def cancels_its_task(*_: Any) -> float:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(1.0)
        return 1.0

    with pytest.raises(
        RolloutFailure, match="the reward function x:y raised CancelledError"
    ):
        await make_scorer(cancels_its_task).score(PROMPT, sampled(""))
    assert not asyncio.current_task().cancelling(), "nobody cancelled its caller"  # type: ignore[union-attr]


@virtual
async def test_abandoned_calls_are_named_once_and_end_the_run() -> None:
    gate = asyncio.Event()

    async def swallows_until_the_gate_opens(*_: object) -> float:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        return 1.0

    told: list[str] = []
    scorer = make_scorer(swallows_until_the_gate_opens, warn=told.append)
    found = await asyncio.gather(
        *(scorer.score(PROMPT, sampled("")) for _ in range(MAX_HUNG)),
        return_exceptions=True,
    )
    assert {type(error) for error in found} == {RewardFailure}
    assert asyncio.get_running_loop().time() == 10.0 + GRACE_S
    (warning,) = told
    assert "x:y" in warning
    with pytest.raises(
        TaskError, match="64 calls of the reward function x:y are still running"
    ):
        await scorer.score(PROMPT, sampled(""))
    gate.set()
    await asyncio.sleep(0.1)
    assert await scorer.score(PROMPT, sampled("")) == 1.0, "they have ended"
    assert scorer.num_abandoned == MAX_HUNG, "so far"


SCRIPT = """
    import asyncio, os, signal, sys, threading
    from asyncrl.base import user_code
    user_code.GRACE_S = 0.1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    async def never_ends():
        while True:
            try: await asyncio.sleep(3600)
            except: pass
    async def main():
        hung = [asyncio.ensure_future(asyncio.to_thread(threading.Event().wait)) for _ in range(100)]
        hung.append(asyncio.ensure_future(never_ends()))
        await asyncio.to_thread(int)
        if "stopped" in sys.argv:
            stop = asyncio.get_running_loop().stop
            try: stop()
            except RuntimeError: await asyncio.sleep(0.01)
        if "left" in sys.argv:
            await asyncio.to_thread(os._exit, 0)
        if "interrupted" in sys.argv:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(60)
        return 7
    sys.exit(user_code.run_loop(main()))
"""


@pytest.mark.parametrize(
    ("how", "code"), [([], 7), (["interrupted"], -2), (["left"], 1), (["stopped"], 7)]
)
def test_a_process_ends_though_a_call_in_it_never_does(
    how: list[str], code: int
) -> None:
    """Hung coroutines and hung threads delay neither the end of the loop nor of the
    process.
    """
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert not re.search("was never|ignored|destroyed", done.stderr)
