"""rollout.slots=auto: the rule for any loads, and a simulated engine with a small KV
cache on the virtual clock.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from statistics import fmean

from fake_engine import FakeEngineServer
from fake_server import FakeChild
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import RolloutConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.slots_by_pressure import SlotsByPressure, kv_wanted, make_pressure
from asyncrl.launch.supervise import HEARTBEAT_PERIOD_S, Server, health_over
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.rollouts.pressure import MIN_LOOKS, SlotsRule
from asyncrl.rollouts.rollout import Slots
from asyncrl.testing.virtual_time import run_virtual

MEAN_TOKENS = 200
PROMPT_IDS = [97] * 10
KV_TOKENS = 8000
FITTING = KV_TOKENS / (MEAN_TOKENS + len(PROMPT_IDS))
"""Rollouts that fill the cache on average: lengths are geometric, so a running rollout
has sampled as many tokens on average as a whole one has.
"""
WINDOW_S = 150


@dataclass
class Outcome:
    """Slots and counts during the second WINDOW_S seconds."""

    slots: list[int]
    num_tokens: int
    num_preempted: int
    num_ended: int


def sampled_by_engine(
    num_slots: int, *, is_auto: bool, num_admitted: int = 100
) -> Outcome:
    """Sample without end, with a fixed number of slots or from a number on."""

    async def story() -> Outcome:
        fake = FakeEngineServer(
            slots=256,
            decode_s=0.02,
            end_fraction=1 / MEAN_TOKENS,
            max_length=1000,
            kv_tokens=KV_TOKENS,
        )
        pool = EnginePool([EngineServer(fake)], slots=256)
        slots = Slots(num_slots)
        serial = itertools.count()

        async def sample() -> None:
            while True:
                number = next(serial)
                name = f"g{number}/r0"
                slots.ask_nowait(name, (number,))
                await slots.wait(name)
                request = SamplingRequest(
                    request_id=name,
                    prompt_ids=PROMPT_IDS,
                    max_tokens=990,
                    seed=number,
                )
                completion = await pool.generate(request)
                assert len(completion.token_ids) == fake.spec.completion_length(number)
                slots.give_back_nowait(name)

        server = Server(FakeChild(fake), fake, health_over(fake, EngineHealth), 1.0)
        works = [sample() for _ in range(num_admitted)]
        tasks = [asyncio.ensure_future(work) for work in works]
        if is_auto:
            rule = SlotsRule(num_slots, most=256)
            pressure = SlotsByPressure([server], pool, slots, rule)
            tasks.append(asyncio.ensure_future(server.watch(10.0)))
            tasks.append(asyncio.ensure_future(pressure.follow()))
        await asyncio.sleep(WINDOW_S)
        before = fake.health()
        num_ended = slots.num_ended
        seen = []
        for _ in range(WINDOW_S):
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            seen.append(slots.capacity)
        after = fake.health()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Outcome(
            seen,
            after.tokens_generated - before.tokens_generated,
            after.num_preempted - before.num_preempted,
            slots.num_ended - num_ended,
        )

    return run_virtual(story())


def test_auto_finds_the_number_above_which_the_engine_thrashes() -> None:
    fitting = round(FITTING)
    below = sampled_by_engine(round(0.8 * fitting), is_auto=False)
    above = sampled_by_engine(round(1.6 * fitting), is_auto=False)
    # The engine of this test thrashes: above the limit, it begins a rollout three times
    # on average to end it once.
    assert below.num_preempted < 0.1 * below.num_ended
    assert above.num_preempted > 2 * above.num_ended
    for start in (8, 90):
        auto = sampled_by_engine(start, is_auto=True)
        assert 0.8 * FITTING <= fmean(auto.slots) <= 1.2 * FITTING
        assert auto.num_preempted < 0.5 * auto.num_ended
        assert auto.num_tokens > 0.8 * above.num_tokens


def test_cache_is_relieved_also_if_few_slots_are_in_use() -> None:
    auto = sampled_by_engine(100, is_auto=True, num_admitted=70)
    assert fmean(auto.slots) <= 1.2 * FITTING
    assert auto.num_preempted < 0.5 * auto.num_ended


def look_through(
    rule: SlotsRule, num_running: int, wanted: float, turnovers: int, num_ended: int = 0
) -> int:
    """Let the rule look at one engine; return the rollouts that have ended then."""
    for _ in range(turnovers * MIN_LOOKS):
        num_ended += num_running
        rule.look(1, wanted, num_running, num_ended)
    return num_ended


def test_slots_that_hold_nothing_back_are_not_raised() -> None:
    rule = SlotsRule(20, most=256)
    num_ended = look_through(rule, num_running=10, wanted=0.1, turnovers=4)
    assert rule.current == 20
    look_through(rule, 20, wanted=0.1, turnovers=1, num_ended=num_ended)
    assert rule.current == 30


def test_cut_is_judged_once_the_rollouts_above_it_have_ended() -> None:
    rule = SlotsRule(100, most=256)
    num_ended = look_through(rule, num_running=100, wanted=2.0, turnovers=1)
    assert rule.current == 83
    num_ended = look_through(rule, 100, wanted=2.0, turnovers=3, num_ended=num_ended)
    assert rule.current == 83
    # The rollouts above the number ended before this turnover.
    for _ in range(MIN_LOOKS):
        rule.look(1, 2.0, 83, num_ended + 82)
    assert rule.current == 83
    rule.look(1, 2.0, 83, num_ended + 83)
    assert rule.current == 69


@given(
    st.integers(1, 300),
    st.integers(1, 256),
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.floats(0, 5),
            st.integers(0, 1200),
            st.integers(0, 600),
        ),
        max_size=60,
    ),
)
def test_slots_stay_within_their_limits(
    start: int, most: int, loads: list[tuple[int, float, int, int]]
) -> None:
    rule = SlotsRule(start, most)
    num_ended = 0
    for num_engines, wanted, running, ended in loads:
        before = rule.current
        num_ended += ended
        now = rule.look(num_engines, wanted, running, num_ended)
        assert 1 <= now <= most
        assert before / 1.2 - 1 <= now <= 1.5 * before + 1


def test_first_number_fits_at_full_length() -> None:
    fakes = [FakeEngineServer(f"engine-{number}") for number in range(2)]
    servers = [
        Server(FakeChild(fake), fake, health_over(fake, EngineHealth), 1.0)
        for fake in fakes
    ]
    sizes = {
        "policy_version": 0,
        "num_running": 0,
        "num_queued": 0,
        "tokens_generated": 0,
    }
    for server, kv_tokens in zip(servers, (5000, 3000), strict=True):
        server.health = EngineHealth(**sizes, kv_tokens=kv_tokens)
    pool = EnginePool([EngineServer(fake) for fake in fakes], slots=64)
    config = RolloutConfig(slots="auto", max_prompt_tokens=200, max_tokens=300)
    slots = Slots(1)
    pressure = make_pressure(config, servers, pool, slots)
    assert pressure is not None
    # 500 tokens take 32 blocks of 16: five rollouts in the smaller cache, each engine.
    assert pressure.gauges() == {"rollout/slots": 10}
    # An engine that is down gets no work, and its last answer counts no more.
    pool.down_nowait("engine-1")
    pressure.look_nowait()
    assert slots.capacity == 5
    # Nothing is known of a cache while its engine sleeps.
    servers[0].health = EngineHealth(**sizes, asleep=["kv"], kv_fraction=1.0)
    pressure.look_nowait()
    assert slots.capacity == 5
    assert make_pressure(RolloutConfig(slots=7), servers, pool, slots) is None


def test_wanted_part_counts_the_queue() -> None:
    health = EngineHealth(
        policy_version=0,
        num_running=30,
        num_queued=10,
        tokens_generated=0,
        kv_fraction=0.9,
    )
    assert abs(kv_wanted(health) - 1.2) < 1e-12
