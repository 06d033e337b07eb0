"""Recorded completions -> the branches of a rollout, with the reward that each token answers for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Rollout, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.capture import PromptText

Path = list["Node"]

LARGEST_NUMBER = 1e18
"""Of rewards and metrics: the mean, the square and the sum of many such are finite in float32."""
MAX_METRICS = 256
"""Of one rollout. Each name is a curve of the run: names that say something else each time are many
thousands.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One completion, after what its parent holds: `ids` are the A that were put behind the parent's, then
    the N that were sampled.

    ids int32 [A + N]; logprobs float32 [N] in nats; version_spans count from the first sampled token. `order`
    is (number of the call, choice). `asked` is the text that the prompt's ids spell, None where the template
    would write another.
    """

    completion_id: str
    order: tuple[int, int]
    parent: Node | None
    ids: npt.NDArray[np.int32]
    num_added: int
    logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    is_truncated: bool
    num_interruptions: int
    asked: PromptText | None

    @property
    def num_sampled(self) -> int:
        """N."""
        return len(self.logprobs)

    @property
    def sampled_ids(self) -> npt.NDArray[np.int32]:
        """The last N ids."""
        return self.ids[self.num_added :]

    @property
    def content(self) -> tuple[bytes, int, bytes, tuple[tuple[int, int, int], ...], bool, int]:
        """All that this node has but its name, its parent and its engines: what orders completions, whichever
        call came first.
        """
        spans = tuple((span.start, span.end, span.version) for span in self.version_spans)
        ids = self.ids.astype(">i4").tobytes()  # so that bytes are in the order of ids
        return ids, self.num_added, self.logprobs.tobytes(), spans, self.is_truncated, self.num_interruptions

    @property
    def engines(self) -> tuple[int, ...]:
        """Of each span. Which engine samples is a matter of its load: of two runs that are equal otherwise,
        it must order nothing.
        """
        return tuple(span.engine for span in self.version_spans)

    def path(self) -> Path:
        """From the root to this node."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return nodes

    @property
    def num_path_ids(self) -> int:
        """Length of all_ids()."""
        return sum(len(node.ids) for node in self.path())

    def all_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and completion, root to here."""
        return np.concatenate([node.ids for node in self.path()])


def make_rollout(nodes: Iterable[Node], sample_index: int, outcome: Outcome, reward: float) -> Rollout:
    """The branches, in the order of their ids; each sampled token has its loss in the first branch that holds
    it.

    The order, and the numbers of units with it, is that of the contents: calls of one harness that run at
    once arrive in any order. Raises RolloutFailure if nothing was sampled, or the outcome's numbers are too
    large, too many, or name the wrong completions.
    """
    _check_numbers(outcome, reward)
    nodes = _in_order(list(nodes), outcome)
    paths = _paths([node for node in nodes if node.num_sampled])
    if not paths:
        raise RolloutFailure(
            f"the harness ended with {len(nodes)} completions and not one sampled token",
            rule="what was sampled is what is trained on",
            way_out="let it call /v1/chat/completions with its session's key, and read the answers.",
        )
    owners: dict[Node, int] = {}
    """The first branch that holds a node."""
    for branch, path in enumerate(paths):
        for node in path:
            owners.setdefault(node, branch)
    credited = _credited(nodes, paths, owners, outcome)
    rollout = []
    for branch, path in enumerate(paths):
        own = {node for node in path if owners[node] == branch}
        rollout.append(_trajectory(path, own, credited, sample_index, branch, outcome.metrics, reward))
    return tuple(rollout)


def _in_order(nodes: Sequence[Node], outcome: Outcome) -> list[Node]:
    """By the contents from the root on. Of two that are equal in everything, the one that was gone on from is
    the later one.
    """
    parents = {node.parent for node in nodes}
    reward = {**outcome.branch_rewards, **outcome.turn_rewards}
    own = {
        node: (*node.content, reward.get(node.completion_id, 0.0), node in parents, node.engines)
        for node in nodes
    }
    return sorted(nodes, key=lambda node: [own[each] for each in node.path()])


def _paths(nodes: Sequence[Node]) -> list[Path]:
    """To each node that none of the others goes on from. Without those that sampled nothing, no path is a
    part of another.
    """
    inner: set[Node] = set()
    for node in nodes:
        ancestor = node.parent
        while ancestor is not None and ancestor not in inner:
            inner.add(ancestor)
            ancestor = ancestor.parent
    return [node.path() for node in nodes if node not in inner]


def _trajectory(
    path: Path,
    own: set[Node],
    credited: Mapping[Node, tuple[float, int]],
    sample_index: int,
    branch: int,
    metrics: Mapping[str, float],
    reward: float,
) -> Trajectory:
    token_ids = np.concatenate([node.ids for node in path])
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[VersionSpan] = []
    credits: list[Credit] = []
    end = 0
    for node in path:
        start, end = end + node.num_added, end + len(node.ids)
        if node in own and start < end:
            loss_mask[start:end] = True
            logprobs[start:end] = node.logprobs
            spans += [
                replace(span, start=start + span.start, end=start + span.end) for span in node.version_spans
            ]
            if node in credited:
                credits.append(Credit(start, end, *credited[node]))
    return Trajectory(
        sample_index=sample_index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(spans),
        reward=reward,
        is_truncated=path[-1].is_truncated,
        num_interruptions=sum(node.num_interruptions for node in own),
        metrics=dict(metrics),
        branch=branch,
        credits=tuple(credits),
    )


def _credited(
    nodes: Sequence[Node], paths: Sequence[Path], owners: Mapping[Node, int], outcome: Outcome
) -> dict[Node, tuple[float, int]]:
    """(reward, unit) of each node, if rewards were given by turn or by branch."""
    if outcome.turn_rewards and outcome.branch_rewards:
        raise RolloutFailure(
            f"the outcome has {len(outcome.turn_rewards)} turn_rewards and {len(outcome.branch_rewards)} "
            f"branch_rewards",
            rule="a token answers for one reward",
            way_out="give one of the two, or fold both into one.",
        )
    if outcome.turn_rewards:
        return _by_turn(nodes, outcome.turn_rewards)
    if outcome.branch_rewards:
        return _by_branch(nodes, paths, owners, outcome.branch_rewards)
    return {}


def _by_turn(nodes: Sequence[Node], rewards: Mapping[str, float]) -> dict[Node, tuple[float, int]]:
    _check_known(nodes, rewards, "turn_rewards")
    missing = [node.completion_id for node in nodes if node.num_sampled and node.completion_id not in rewards]
    if missing:
        raise RolloutFailure(
            f"turn_rewards names {len(rewards)} of {len(nodes)} completions; not {_listed(missing)}",
            rule="with turn_rewards each completion has its reward",
            way_out="name them all; 0.0 is a reward too.",
        )
    return {
        node: (rewards[node.completion_id], unit)
        for unit, node in enumerate(nodes)
        if node.completion_id in rewards
    }


def _by_branch(
    nodes: Sequence[Node], paths: Sequence[Path], owners: Mapping[Node, int], rewards: Mapping[str, float]
) -> dict[Node, tuple[float, int]]:
    _check_known(nodes, rewards, "branch_rewards")
    of_branch: dict[int, float] = {}
    branch_of = {node.completion_id: branch for branch, path in enumerate(paths) for node in path}
    num_branches = Counter(node.completion_id for path in paths for node in path)
    for completion_id, reward in rewards.items():
        if num_branches[completion_id] != 1:
            last = [path[-1].completion_id for path in paths]
            raise RolloutFailure(
                f"branch_rewards names {completion_id}, which lies in {num_branches[completion_id]} branches",
                rule="a branch is named by a completion that lies in it alone",
                way_out=f"name branches by their last completions: {_listed(last)}.",
            )
        branch = branch_of[completion_id]
        if of_branch.setdefault(branch, reward) != reward:
            raise RolloutFailure(
                f"branch_rewards gives branch {branch} two rewards, {of_branch[branch]} and {reward} (at "
                f"{completion_id})",
                rule="a branch has one reward",
                way_out="name each branch by one completion that lies in it alone, its last one say.",
            )
    missing = [path[-1].completion_id for branch, path in enumerate(paths) if branch not in of_branch]
    if missing:
        raise RolloutFailure(
            f"branch_rewards names {len(of_branch)} of {len(paths)} branches; not those that end with "
            f"{_listed(missing)}",
            rule="with branch_rewards each branch has its reward",
            way_out="name them all; 0.0 is a reward too.",
        )
    return {node: (of_branch[branch], branch) for node, branch in owners.items()}


def _check_known(nodes: Sequence[Node], rewards: Mapping[str, float], name: str) -> None:
    known = {node.completion_id for node in nodes}
    if unknown := [completion_id for completion_id in rewards if completion_id not in known]:
        raise RolloutFailure(
            f"{name} names {_listed(unknown)}; this rollout has {_listed(sorted(known))}",
            rule="a reward belongs to a completion that the harness got in this session",
            way_out="use the `id` of the answers, and only of this session's.",
        )


def _check_numbers(outcome: Outcome, reward: float) -> None:
    given = {"reward": reward, "outcome.reward": 0.0 if outcome.reward is None else outcome.reward}
    for name in ("turn_rewards", "branch_rewards", "metrics"):
        given |= {f"{name}[{key!r}]": value for key, value in getattr(outcome, name).items()}
    if bad := [f"{name}={value}" for name, value in given.items() if not abs(value) <= LARGEST_NUMBER]:
        raise RolloutFailure(
            f"the outcome has {_listed(bad)}",
            rule=f"rewards and metrics are finite numbers, {LARGEST_NUMBER:g} at most",
            way_out="let the harness give such ones, or fail the rollout by an exception.",
        )
    if len(outcome.metrics) > MAX_METRICS:
        raise RolloutFailure(
            f"the outcome has {len(outcome.metrics)} metrics: {_listed(list(outcome.metrics))}",
            rule=f"a rollout has {MAX_METRICS} metrics at most, and the same names as the others: each is a "
            f"curve of the run",
            way_out="give means instead of a metric for each turn or prompt.",
        )


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(name[:80] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
