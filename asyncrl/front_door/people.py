"""The keys of whoever tries an agent by hand: calls with one, an outcome with the other, then calls again. Knows no harness, no worker."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable

from asyncrl.errors import RolloutFailure, RoomError
from asyncrl.front_door.recorder import Recorder
from asyncrl.front_door.shape import renumbered, shape_text
from asyncrl.gateway.leases import Leases
from asyncrl.gateway.server import Gateway
from asyncrl.gateway.sessions import GatewaySession
from asyncrl.types import Outcome, Prompt, Rollout


class PeoplesKey:
    """A session that is followed by another one under the same key.

    Life:       open -> calls -> an outcome is posted: what was sampled since the last one is a rollout, and is recorded -> a new
                session -> ... -> close: what has no outcome yet is recorded without a reward.
    Invariant:  a completion is in one rollout: the calls that are in hand when an outcome comes are answered 410 and are in none.
    """

    def __init__(
        self, gateway: Gateway, leases: Leases, recorder: Recorder, *, say: Callable[[str], None], on_broken: Callable[[RoomError], None]
    ) -> None:
        self.key, self.outcome_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._gateway, self._recorder, self._say, self._on_broken = gateway, recorder, say, on_broken
        self._name = f"people/{secrets.token_hex(4)}"  # drawn, so that the next time does not draw the same tokens
        self._num_rollouts = 0
        self._session = self._open()
        leases.on_outcome(self.outcome_key, self._take, sampling_key=self.key)

    def __repr__(self) -> str:
        return f"<PeoplesKey {self._num_rollouts} rollouts, {self._session!r}>"

    def close(self) -> None:
        """No calls any more; what was begun is recorded. Raises RoomError if that cannot be written."""
        self._session.end_nowait("the gateway was ended")
        try:
            rollout = self._session.rollout(0, Outcome(), 0.0)
        except RolloutFailure:  # nothing was sampled
            return
        self._keep(self._session, None, rollout)

    def _open(self) -> GatewaySession:
        number = self._num_rollouts
        return self._gateway.open_for_people_nowait(self.key, f"{self._name}/{number}", prompt_id=self._name, sample_index=number)

    def _take(self, outcome: Outcome) -> None:
        """An outcome was posted. Raises RolloutFailure, and nothing has changed, if it does not fit what was sampled."""
        parts = [*outcome.turn_rewards.values(), *outcome.branch_rewards.values()]
        reward = sum(parts) / len(parts) if outcome.reward is None and parts else outcome.reward
        session = self._session
        rollout = session.rollout(0, outcome, reward or 0.0)
        session.end_nowait("an outcome was posted: it ended this rollout, and the key goes on with a new one")
        self._num_rollouts += 1
        self._session = self._open()
        try:
            self._keep(session, reward, rollout)
        except RoomError as error:
            self._on_broken(error)
            raise RolloutFailure(f"this rollout cannot be recorded: {error.what}") from error

    def _keep(self, session: GatewaySession, reward: float | None, rollout: Rollout) -> None:
        messages = tuple(session.opening or ())
        digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        prompt = Prompt(f"people/{digest}", messages)  # who begins with the same words plays the same prompt: a group to be replayed
        index = self._recorder.next_sample(prompt.prompt_id)
        self._recorder.record(prompt, 0, reward, renumbered(rollout, index))
        self._say(f"rollout {session.sample_index}: reward {'none' if reward is None else f'{reward:.4g}'}, {shape_text(rollout)}")
