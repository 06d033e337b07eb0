"""Rewards that any program posts for rollouts, while they run or hours after their end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.base.errors import RewardFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import Refused
from asyncrl.base.waits import waiting, within
from asyncrl.journal.journal import Journal
from asyncrl.journal.schema import REWARD
from asyncrl.messages.records import Outcome, Rollout

ONCE = "a rollout has one reward; the same one may be posted again"


@dataclass(slots=True, eq=False)
class ExpectedReward:
    """The reward of a rollout, until it is durable in the journal.

    `check` and `settled` are None while the rollout runs. Then `check` raises
    RolloutFailure for an outcome that does not fit its completions, and posts wait for
    `settled`: done once the reward is durable, cancelled if the run ends before.
    """

    rollout_id: str
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    check: Callable[[Outcome], object] | None = None
    settled: asyncio.Future[None] | None = None
    is_written: bool = False
    """The journal has its outcome, or is about to."""


class LateRewards:
    """Expected rewards by the digest of their keys. The journal has only digests, so
    that a reader of the run's files cannot set its rewards.

    Life: of a reward: expected, while its rollout runs -> awaited, after its end ->
        settled in the journal; or withdrawn, with a reason, once nobody needs it.
    Waits: wait() for a post, at most timeout_s; the answer of a post for the journal.
    Invariant: a post for an ended rollout is accepted (200) only once it is durable.
        A repeated post is accepted too, also after a kill, and never counts twice.

    Example: rollout g3/r1 ends, and its reward 1 is posted an hour later.

        killed before the commit      the post breaks; its repetition is the first one
        killed after the commit       the post breaks; its repetition finds the reward
        another post of 0             refused (409): g3/r1 has the reward 1
    """

    def __init__(self, journal: Journal, *, timeout_s: float | None) -> None:
        """`timeout_s`: generator.outcome_timeout_s."""
        self._journal = journal
        self._timeout_s = timeout_s
        self._expected: dict[str, ExpectedReward] = {}
        self._digests: dict[str, str] = {}
        """Of each rollout's newest attempt."""
        self._num_posted = 0
        self.is_used = False
        """Set once a reward is expected, also by a killed run."""
        self.is_open = False
        """Set while the run knows all awaited rewards: not before a resume has read
        them.
        """

    def gauges(self) -> dict[str, float]:
        if not self.is_used:
            return {}
        return {"reward/awaited": self.num_awaited, "reward/posted": self._num_posted}

    @property
    def num_awaited(self) -> int:
        return sum(one.settled is not None for one in self._expected.values())

    # ---- rollouts

    def expect_nowait(self, rollout_id: str) -> tuple[str, str]:
        """Return a new key for an attempt of a rollout, and its digest. The key of an
        earlier attempt is withdrawn.
        """
        self.withdraw_nowait(rollout_id, "it failed, and was repeated with another key")
        key = secrets.token_hex(24)
        digest = _digest_of(key)
        self._add(rollout_id, digest)
        return key, digest

    def early_nowait(self, digest: str) -> Outcome | None:
        """Return the outcome that was posted while the rollout ran, if any. The caller
        journals it with the rollout's end.
        """
        expected = self._expected[digest]
        if expected.outcome is not None:
            self._note(expected, digest)
            self._forget(digest)
        return expected.outcome

    def note_end_nowait(self, digest: str, check: Callable[[Outcome], object]) -> None:
        """Note the completions of a rollout that has ended. Raises RolloutFailure if
        an earlier post does not fit them.
        """
        expected = self._expected[digest]
        expected.check = check
        if expected.outcome is not None:
            check(expected.outcome)

    def await_nowait(
        self, rollout_id: str, digest: str, check: Callable[[Outcome], object]
    ) -> None:
        """Note that a rollout is journaled, also by a killed run. From here its posts
        wait for the journal.
        """
        expected = self._expected.get(digest) or self._add(rollout_id, digest)
        expected.check = check
        expected.settled = asyncio.get_running_loop().create_future()

    async def wait(self, rollout_id: str, digest: str) -> Outcome:
        """Return the posted outcome, after await_nowait(). Raises RewardFailure at the
        limit, or once it is withdrawn. The caller journals it, and then calls settle().
        """
        expected = self._expected.get(digest)
        # Its group may have ended between await_nowait() and this task's first step.
        if expected is None:
            raise RewardFailure(f"{rollout_id} needs no reward any more")
        assert expected.settled is not None
        try:
            async with within(self._timeout_s, lambda: self._too_late(rollout_id)):
                with waiting(
                    "rewards to be posted",
                    on="programs that post them to /v1/outcome",
                    who="rollouts",
                ):
                    await expected.arrived.wait()
        except BaseException:
            expected.settled.cancel()
            raise
        if expected.outcome is None:
            raise RewardFailure(f"{rollout_id} needs no reward any more")
        # Before the caller journals the rollout with its reward. A kill between the two
        # leaves a rollout that still waits, and takes the repeated post. In the other
        # order its key would be unknown.
        self._note(expected, digest)
        return expected.outcome

    async def settle(self, digest: str) -> None:
        """Answer the posts of a reward once it is durable in the journal."""
        expected = self._expected[digest]
        assert expected.settled is not None
        try:
            await self._journal.flush()
        except BaseException:
            expected.settled.cancel()
            raise
        # Withdrawn while the journal wrote: the post is compared with the journal.
        if not expected.settled.done():
            self._forget(digest)
            expected.settled.set_result(None)

    def withdraw_nowait(self, rollout_id: str, why: str) -> None:
        """Refuse later posts for a rollout without a reward. Idempotent."""
        digest = self._digests.get(rollout_id)
        if digest is None:
            return
        expected = self._forget(digest)
        if expected.settled is not None:
            expected.settled.cancel()
        if not expected.is_written:
            record = {"rollout": rollout_id, "why": why}
            self._journal.note_nowait(_note_of(digest), record)
            expected.outcome = None
            expected.arrived.set()  # ends wait()

    def _note(self, expected: ExpectedReward, digest: str) -> None:
        assert expected.outcome is not None
        expected.is_written = True
        self._num_posted += 1
        record = {"rollout": expected.rollout_id, **_rewards_of(expected.outcome)}
        self._journal.note_nowait(_note_of(digest), record)

    def _add(self, rollout_id: str, digest: str) -> ExpectedReward:
        self.is_used = True
        self._digests[rollout_id] = digest
        expected = self._expected[digest] = ExpectedReward(rollout_id)
        return expected

    def _forget(self, digest: str) -> ExpectedReward:
        expected = self._expected.pop(digest)
        del self._digests[expected.rollout_id]
        return expected

    def _too_late(self, rollout_id: str) -> RewardFailure:
        return RewardFailure(
            f"{rollout_id} got no reward within generator.outcome_timeout_s={self._timeout_s:g} s of its "
            "end, or of the resume after it",
            rule="a rollout without its reward fails; it is never trained with 0",
            way_out="post rewards sooner, or raise it.",
            kind=FailureKind.REWARD_MISSING,
        )

    # ---- programs

    async def check(self, key: str) -> None:
        """Raise Refused for a key that no reward was ever expected for (404), or while
        the run starts or ends (503).
        """
        if not self.is_open:
            raise _unavailable()
        digest = _digest_of(key)
        if digest not in self._expected and await self._noted(digest) is None:
            raise _unknown()

    async def post(self, key: str, outcome: Outcome) -> None:
        """Take a rollout's outcome. Raises Refused: 409 for another reward than before,
        410 if none is needed any more, and like check(); RolloutFailure for
        turn_rewards that do not fit the rollout.
        """
        digest = _digest_of(key)
        expected = self._expected.get(digest)
        if expected is None:
            await self._compare(digest, outcome)
            return
        if expected.outcome is None:
            if expected.check is not None:
                expected.check(outcome)
            expected.outcome = outcome
            expected.arrived.set()
        elif _rewards_of(expected.outcome) != _rewards_of(outcome):
            raise _other(expected.rollout_id, _rewards_of(expected.outcome), outcome)
        if expected.settled is None:
            return  # its rollout still runs, and is journaled with it
        try:
            # Of several posts, a client that leaves must not cancel it for the others.
            await asyncio.shield(expected.settled)
        except asyncio.CancelledError:
            if not expected.settled.cancelled():
                raise
            # Its group was withdrawn, or the run ends.
            await self._compare(digest, outcome)

    async def _compare(self, digest: str, outcome: Outcome) -> None:
        """Compare with what was settled, or raise Refused."""
        await self._journal.flush()
        noted = await self._noted(digest)
        if noted is None:
            # The run ends while the rollout waits. Its resume takes the reward.
            is_awaited = digest in self._expected or not self.is_open
            raise _unavailable() if is_awaited else _unknown()
        if "why" in noted:
            raise Refused(
                410,
                f"{noted['rollout']} needs no reward any more: {noted['why']}",
                rule="a reward counts until generator.outcome_timeout_s, and while "
                "buffer.max_staleness lets a batch use its rollout",
                way_out="drop it; docs/rewards.md says how to wait longer.",
            )
        known = {name: value for name, value in noted.items() if name != "rollout"}
        if known != _rewards_of(outcome):
            raise _other(noted["rollout"], known, outcome)

    async def _noted(self, digest: str) -> dict[str, Any] | None:
        noted: dict[str, Any] | None = await self._journal.read_note(_note_of(digest))
        return noted


def awaited_of(rollouts: Mapping[int, Rollout]) -> dict[int, str]:
    """Return the digests of rewards that are posted later, by sample_index."""
    digests = {index: rollout[0].awaits for index, rollout in rollouts.items()}
    return {index: digest for index, digest in digests.items() if digest is not None}


def _unavailable() -> Refused:
    return Refused(
        503,
        "the run is starting or ending",
        rule="a reward is accepted once it is durable",
        way_out="post it again with the same key.",
    )


def _unknown() -> Refused:
    return Refused(
        404,
        "no rollout of this run has this key",
        rule="a key is of one attempt of a rollout; an attempt that a killed run repeats has another",
        way_out="post with the outcome_key of the task or session, to the run that gave it.",
    )


def _rewards_of(outcome: Outcome) -> dict[str, Any]:
    """Return what a repeated post must have again, as JSON."""
    rewards: dict[str, Any] = {"reward": outcome.reward}
    if outcome.turn_rewards:
        rewards["turn_rewards"] = outcome.turn_rewards
    found: dict[str, Any] = json.loads(json.dumps(rewards))
    return found


def _other(rollout_id: object, known: dict[str, Any], outcome: Outcome) -> Refused:
    before, now = (
        rewards.get("turn_rewards", rewards["reward"])
        for rewards in (known, _rewards_of(outcome))
    )
    return Refused(
        409,
        f"{rollout_id} has the reward {before!s:.200} already, and {now!s:.200} is another",
        rule=ONCE,
        way_out="drop it.",
    )


def _digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _note_of(digest: str) -> str:
    return f"{REWARD}{digest}"
