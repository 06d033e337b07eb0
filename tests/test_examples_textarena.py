"""The example of a TextArena game with two players, over a real gateway."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable

import pytest
from agent_cases import last_turn, text_of
from gateway_cases import ScriptedEngine, gateway_world

from asyncrl.agents import Outcome, Session, Task

pytestmark = pytest.mark.extras


def play(
    ours: Callable[[list[int]], str],
    theirs: Callable[[list[int]], str],
    monkeypatch: pytest.MonkeyPatch,
    index: int = 0,
) -> tuple[Outcome, int, int]:
    """Return the outcome of a game, its branches and the calls of the policy."""
    pytest.importorskip("textarena", reason="pip install textarena")
    from examples.textarena.nim import Games, run

    item = Games(size=4, seed=0).prompt(index)
    task = Task("0/0", (), dict(item.info), seed=5)

    def engine(move: Callable[[list[int]], str]) -> ScriptedEngine:
        def answer(prompt: str) -> str:
            return move(list(map(int, last_turn(prompt)[1])))

        return ScriptedEngine(lambda request: answer(text_of(request)))

    async def story() -> tuple[Outcome, int, int]:
        async with gateway_world(engine(ours)) as world:
            async with gateway_world(engine(theirs)) as frozen:
                monkeypatch.setenv("OPPONENT_URL", f"{frozen.url}/v1")
                monkeypatch.setenv("OPPONENT_KEY", frozen.session.key)
                session = Session(f"{world.url}/v1", world.session.key, "policy")
                async with session.client:
                    outcome = await run(task, session, frozen=True)
                rollout = world.session.rollout(0, outcome, outcome.reward or 0.0)
                return outcome, len(rollout), len(world.engine.requests)

    return asyncio.run(story())


def takes_one(piles: list[int]) -> str:
    return f"{next(pile for pile, size in enumerate(piles) if size)}1"


def plays_best(piles: list[int]) -> str:
    """Leave piles whose exclusive or is 0: then the other player loses."""
    total = functools.reduce(operator.xor, piles)
    best = [pile for pile, size in enumerate(piles) if size ^ total < size]
    return f"{best[0]}{piles[best[0]] - (piles[best[0]] ^ total)}"


def cheats(piles: list[int]) -> str:
    return "09"


@pytest.mark.parametrize("index", [0, 1])
def test_moves_of_the_frozen_player_are_not_trained(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    won, num_branches, num_moves = play(plays_best, takes_one, monkeypatch, index)
    assert won == Outcome(1.0, {"won": 1.0, "invalid": 0.0})
    assert num_branches == num_moves, "each move is a conversation of its own"
    lost, *_ = play(cheats, cheats, monkeypatch, index)
    assert lost == Outcome(0.0, {"won": 0.0, "invalid": 1.0})
