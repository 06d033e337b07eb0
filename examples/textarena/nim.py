"""Two players of TextArena's Nim (https://github.com/LeonGuertler/TextArena): the policy,
and a frozen version of it, or a player of random moves.

    pip install textarena
    asyncrl run examples/textarena/nim.yaml

Or two policies that learn against each other, as the roles `first` and `second`:

    asyncrl run examples/textarena/duel.yaml

The game is TextArena's own. Only the words are shorter, so that a model of random
weights learns them: it reads the piles as `345`, and takes 2 of the first one with `02`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import textarena as ta

from asyncrl.agents import Outcome, Session, Task
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item

NUM_PILES, MOST = 3, 5
Player = Callable[[list[int]], Awaitable[str]]
"""Answer to the piles, such as `02`."""


async def run(task: Task, session: Session, *, frozen: bool = False) -> Outcome:
    """Play one game. The reward is 1 for a win; a loss earns 0.1 for each move that was
    allowed, 0.3 at most, so that a model of random weights learns to move at all.

    `frozen`: the opponent is the model at OPPONENT_URL, with the key OPPONENT_KEY.
    """
    game = ta.make("Nim-v0", piles=task.info["piles"])
    game.reset(num_players=2, seed=task.seed % 2**32)
    draw = random.Random(task.seed)
    opponent = a_model(rival(session), "frozen") if frozen else at_random(draw)
    ours = task.info["seat"]
    players = {ours: a_model(session.client, session.model), 1 - ours: opponent}
    is_over = False
    num_allowed = 0
    while not is_over:
        seat, _ = game.get_observation()
        piles = game.state.game_state["piles"]
        said = await players[seat](piles)
        was_allowed = is_allowed(said, piles)
        # A game that ends by the opponent's invalid move teaches nothing.
        if seat != ours and not was_allowed:
            said = await at_random(draw)(piles)
        is_over, _ = game.step(f"[{' '.join(said[:2])}]")
        num_allowed += seat == ours and was_allowed
    rewards, infos = game.close()
    has_won = rewards[ours] > 0
    is_invalid = bool(infos[ours]["invalid_move"])
    reward = 1.0 if has_won else 0.1 * min(3, num_allowed)
    return Outcome(reward, {"won": float(has_won), "invalid": float(is_invalid)})


async def duel(task: Task, session: Session) -> Outcome:
    """Play one game of two policies. Each earns 1 for a win, or 0.1 for each allowed move,
    0.3 at most.
    """
    game = ta.make("Nim-v0", piles=task.info["piles"])
    game.reset(num_players=2, seed=task.seed % 2**32)
    names = session.roles
    players = [a_model(session.child(name).client, name) for name in names]
    num_moves, num_allowed = [0, 0], [0, 0]
    is_over = False
    while not is_over:
        seat, _ = game.get_observation()
        piles = game.state.game_state["piles"]
        said = await players[seat](piles)
        num_moves[seat] += 1
        num_allowed[seat] += is_allowed(said, piles)
        is_over, _ = game.step(f"[{' '.join(said[:2])}]")
    wins, _ = game.close()
    rewards = dict[str, float]()
    metrics = dict[str, float]()
    for seat, name in enumerate(names):
        has_won = wins[seat] > 0
        metrics[f"won/{name}"] = float(has_won)
        metrics[f"allowed/{name}"] = num_allowed[seat] / max(1, num_moves[seat])
        # A game may end before the second player's first move.
        if num_moves[seat]:
            rewards[name] = 1.0 if has_won else 0.1 * min(3, num_allowed[seat])
    return Outcome(None, metrics, rewards)


def is_allowed(said: str, piles: list[int]) -> bool:
    if len(said) < 2 or not said[:2].isdecimal():
        return False
    pile, number = map(int, said[:2])
    return pile < len(piles) and 0 < number <= piles[pile]


def rival(session: Session) -> Any:
    return session.client.with_options(
        base_url=os.environ["OPPONENT_URL"], api_key=os.environ["OPPONENT_KEY"]
    )


def a_model(client: Any, model: str) -> Player:
    async def move(piles: list[int]) -> str:
        # The piles say all, so each move is a conversation of its own.
        shown = "".join(map(str, piles))
        messages = [{"role": "user", "content": shown}]
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content or ""

    return move


def at_random(draw: random.Random) -> Player:
    async def move(piles: list[int]) -> str:
        pile = draw.choice([pile for pile, size in enumerate(piles) if size])
        return f"{pile}{draw.randint(1, piles[pile])}"

    return move


class Games:
    """`size` beginnings of a game, half of them with the first move for the policy."""

    def __init__(self, *, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Item:
        draw = random.Random(f"{self._seed} {index}")
        piles = [draw.randint(1, MOST) for _ in range(NUM_PILES)]
        text = "".join(map(str, piles))
        return Item(text, info={"piles": piles, "seat": index % 2})

    def score(self, prompt: Prompt, completion: str) -> float:
        raise NotImplementedError("the agent has the reward")
