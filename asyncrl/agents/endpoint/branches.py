from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Credit, GrammarSpan, Outcome, Rollout, Trajectory, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.prefix_match import TextHash

Path = list["ChatNode"]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChat:
    """`key`: in a Chain; `text`: of all ids, or None."""

    num_messages: int
    key: bytes
    text: TextHash | None


@dataclass(frozen=True, slots=True, eq=False)
class ChatNode:
    """A recorded completion. `ids` follow the parent's: A prompt ids, then N sampled ids.

    ids int32 [A + N]; logprobs float32 [N] in nats; version_spans count from the first sampled token.
    `order`: (number of the call, choice). `path_hash`: of all_ids(). A prompt of ids has no `chat`. Not
    `is_trained`: context.
    """

    name: str
    order: tuple[int, int]
    parent: ChatNode | None
    ids: npt.NDArray[np.int32]
    num_added: int
    logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    is_truncated: bool
    num_interruptions: int
    chat: RecordedChat | None
    num_path_ids: int
    path_hash: blake2b
    is_trained: bool = True
    grammar: str | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def sampled_ids(self) -> npt.NDArray[np.int32]:
        return self.ids[self.num_added :]

    @property
    def num_trained(self) -> int:
        return self.num_sampled if self.is_trained else 0

    @property
    def num_messages(self) -> int:
        return self.chat.num_messages if self.chat else 0

    @property
    def text(self) -> TextHash | None:
        return self.chat.text if self.chat else None

    @property
    def content(self) -> tuple[bytes, int, bytes, tuple[tuple[int, int, int], ...], bool, int]:
        """Return a sort key independent of arrival and engine."""
        spans = tuple((span.start, span.end, span.version) for span in self.version_spans)
        ids = self.ids.astype(">i4").tobytes()  # big-endian, so that bytes sort like ids
        return ids, self.num_added, self.logprobs.tobytes(), spans, self.is_truncated, self.num_interruptions

    def path(self) -> Path:
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return nodes

    def all_ids(self) -> npt.NDArray[np.int32]:
        return np.concatenate([node.ids for node in self.path()])


def make_rollout(nodes: Iterable[ChatNode], sample_index: int, outcome: Outcome, reward: float) -> Rollout:
    """Return the branches, ordered by ids. A sampled token has its loss in the first branch that contains it.

    Concurrent calls arrive in any order, so results depend only on contents. Raises RolloutFailure.
    """
    nodes = _in_order(list(nodes), outcome)
    paths = _paths([node for node in nodes if node.num_trained])
    if not paths and (num_sampled := sum(node.num_sampled for node in nodes)):
        what = f"none of the {num_sampled} tokens that the harness sampled is trained"
        rule = "only calls sampled from the run's distribution are trained"
        way_out = "make a call with the run's temperature and top_p."
        raise RolloutFailure(what, rule=rule, way_out=way_out)
    if not paths:
        what = f"the harness ended with {len(nodes)} completions and not one sampled token"
        raise RolloutFailure(what, way_out="let it call the model with its session's key.")
    owners: dict[ChatNode, int] = {}
    for branch, path in enumerate(paths):
        for node in path:
            owners.setdefault(node, branch)
    credited = _credited(nodes, paths, owners, outcome)
    rollout = []
    for branch, path in enumerate(paths):
        own = {node for node in path if owners[node] == branch}
        head = {"sample_index": sample_index, "branch": branch, "reward": reward}
        rollout.append(_trajectory(path, own, credited, metrics=dict(outcome.metrics), **head))
    return tuple(rollout)


def _in_order(nodes: Sequence[ChatNode], outcome: Outcome) -> list[ChatNode]:
    parents = {node.parent for node in nodes}
    reward = {**outcome.branch_rewards, **outcome.turn_rewards}
    own = {}
    for node in nodes:
        engines = tuple(span.engine for span in node.version_spans)
        own[node] = (*node.content, reward.get(node.name, 0.0), node in parents, engines)
    return sorted(nodes, key=lambda node: [own[each] for each in node.path()])


def _paths(nodes: Sequence[ChatNode]) -> list[Path]:
    inner: set[ChatNode] = set()
    for node in nodes:
        inner.update(node.path()[:-1])
    return [node.path() for node in nodes if node not in inner]


def _trajectory(
    path: Path, own: set[ChatNode], credited: Mapping[ChatNode, tuple[float, int]], **fields: Any
) -> Trajectory:
    token_ids = np.concatenate([node.ids for node in path])
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[VersionSpan] = []
    credits: list[Credit] = []
    grammars: list[GrammarSpan] = []
    end = 0
    for node in path:
        start, end = end + node.num_added, end + len(node.ids)
        if node in own and node.is_trained and start < end:
            loss_mask[start:end] = True
            logprobs[start:end] = node.logprobs
            for span in node.version_spans:
                spans.append(replace(span, start=start + span.start, end=start + span.end))
            if node.grammar is not None:
                grammars.append(GrammarSpan(start, end, node.grammar))
            if node in credited:
                credits.append(Credit(start, end, *credited[node]))
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(spans),
        is_truncated=path[-1].is_truncated,
        num_interruptions=sum(node.num_interruptions for node in own),
        credits=tuple(credits),
        grammars=tuple(grammars),
        **fields,
    )


def _credited(
    nodes: Sequence[ChatNode], paths: Sequence[Path], owners: Mapping[ChatNode, int], outcome: Outcome
) -> dict[ChatNode, tuple[float, int]]:
    by_turn, by_branch = outcome.turn_rewards, outcome.branch_rewards
    which, rewards = ("turn_rewards", by_turn) if by_turn else ("branch_rewards", by_branch)
    known = sorted(node.name for node in nodes)
    if unknown := sorted(set(rewards).difference(known)):
        raise _wrong_rewards(f"{which} names {_listed(unknown)}; this rollout has {_listed(known)}")
    if by_turn:
        if missing := [node.name for node in nodes if node.num_trained and node.name not in by_turn]:
            raise _wrong_rewards(f"{which} does not name {_listed(missing)}")
        units = enumerate(nodes)
        return {node: (by_turn[node.name], unit) for unit, node in units if node.name in by_turn}
    if not by_branch:
        return {}
    of_branch = _of_branch(paths, by_branch)
    return {node: (of_branch[branch], branch) for node, branch in owners.items()}


def _of_branch(paths: Sequence[Path], rewards: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    last = [path[-1].name for path in paths]
    branches_of: dict[str, list[int]] = {}
    for branch, path in enumerate(paths):
        for node in path:
            branches_of.setdefault(node.name, []).append(branch)
    for name, reward in rewards.items():
        branches = branches_of.get(name, [])
        if len(branches) != 1:
            where = f"which is in {len(branches)} of the branches that end with {_listed(last)}"
            raise _wrong_rewards(f"branch_rewards names {name}, {where}")
        if (before := found.setdefault(branches[0], reward)) != reward:
            raise _wrong_rewards(f"branch_rewards gives one branch {before} and {reward} (at {name})")
    if missing := [name for branch, name in enumerate(last) if branch not in found]:
        raise _wrong_rewards(f"branch_rewards names no completion of the branches to {_listed(missing)}")
    return found


def _wrong_rewards(what: str) -> RolloutFailure:
    rule = "turn_rewards names every completion, branch_rewards a completion of only one branch"
    way_out = "name every answer by its `id`; 0.0 is a reward too."
    return RolloutFailure(what, rule=rule, way_out=way_out)


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(name[:80] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
