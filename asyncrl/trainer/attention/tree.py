"""Prefix-tree layout of a micro-batch, so that shared tokens are computed once.

A node is a run of tokens without a branch. Each node is followed by its largest child,
recursively: such a path is one stretch with causal attention. Smaller children begin
separate paths, which also attend to their parent path up to the branching point:

    [path 1 ..........................][path 2, branches from 1 at a][path 3, from 2 at b][path 4, from 1]
                                        keys 1[:a] .................................          keys 1[:c]

No token has more than log2(N) parent paths (Sleator and Tarjan 1983). Tokens of an
uneconomical branch are repeated per child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntN = npt.NDArray[np.int64]
BoolN = npt.NDArray[np.bool_]

MIN_SHARED_TOKENS, QUERIES_PER_TOKEN = 8, 24
"""Minimum tokens that a branch must save, plus one per QUERIES_PER_TOKEN tokens of its
pass.
"""


class TokenRange(NamedTuple):
    """Tokens [start, start + length) are read; token `length` is only predicted."""

    trajectory: int
    start: int
    length: int
    group: int
    first: int
    num_loss: int
    adapter: str = ""


class Piece(NamedTuple):
    query: int
    num_queries: int
    key: int
    num_keys: int

    @property
    def queries(self) -> IntN:
        return np.arange(self.query, self.query + self.num_queries)

    @property
    def keys(self) -> IntN:
        return np.arange(self.key, self.key + self.num_keys)


class KernelPass(NamedTuple):
    pieces: tuple[Piece, ...]
    is_causal: bool

    @property
    def num_pairs(self) -> int:
        sizes = ((one.num_queries, one.num_keys) for one in self.pieces)
        if self.is_causal:
            return sum(length * (length + 1) // 2 for length, _ in sizes)
        return sum(queries * keys for queries, keys in sizes)


Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Attention pattern of N tokens: each path to itself, then to its parent paths."""

    num_tokens: int
    rows: tuple[Runs, ...]
    passes: tuple[KernelPass, ...]

    @property
    def longest(self) -> int:
        return max(sum(length for _, length in runs) for runs in self.rows)


def places_of(runs: Runs) -> IntN:
    return np.concatenate([np.arange(start, start + length) for start, length in runs])


@dataclass(eq=False)
class TreeNode:
    """Tokens [first, end) of `sequence` and of every sequence below.

    `ends`: sequences whose last token is here. `behind`: tokens of all nodes below.
    `place`: where its tokens begin in the micro-batch. `path`: where its path begins.
    """

    sequence: TokenRange
    first: int
    end: int
    parent: TreeNode | None
    children: list[TreeNode] = field(default_factory=list)
    ends: list[TokenRange] = field(default_factory=list)
    behind: int = 0
    place: int = 0
    path: int = 0
    left: TreeNode | None = None
    """Node of the parent path that its path follows."""

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def is_worth_it(self) -> bool:
        # Without this branch each continuation would compute the node's tokens itself.
        saved = self.length * (len(self.children) + bool(self.ends) - 1)
        # All but the largest child need one more attention pass over their queries,
        # which costs about one token for each QUERIES_PER_TOKEN of them.
        num_queries = self.behind - max(
            child.length + child.behind for child in self.children
        )
        return saved >= MIN_SHARED_TOKENS + num_queries / QUERIES_PER_TOKEN


def in_tree_order(
    sequences: Sequence[TokenRange], readings: npt.NDArray[np.int32]
) -> list[tuple[TokenRange, int]]:
    """Sort sequences by their tokens; return each with the number that it shares with
    the one before.
    """

    def tokens_of(one: TokenRange) -> npt.NDArray[np.int32]:
        return readings[one.start : one.start + one.length]

    # Bytes of big-endian ids sort like the ids, and a text before its continuations.
    # Then sequences with a common prefix of any length are neighbors.
    ordered = sorted(sequences, key=lambda one: tokens_of(one).astype(">i4").tobytes())
    pairs = [(ordered[0], 0)]
    for one, other in pairwise(ordered):
        most = min(one.length, other.length)
        differs = tokens_of(one)[:most] != tokens_of(other)[:most]
        pairs.append((other, int(np.argmax(differs)) if differs.any() else most))
    return pairs


def lay_out(
    sequences: Sequence[TokenRange], readings: npt.NDArray[np.int32], max_tokens: int
) -> tuple[Layout, IntN, IntN]:
    """Return (layout, source_N, position_N): each token's place in the arrays, and in
    its sequences. Sequences of an adapter are consecutive, and so are their tokens.

    Example: two sequences of 12 tokens share the first 10, so 14 tokens are computed, not 24.
        >>> ids = np.array([*range(10), 20, 21, *range(10), 30, 31], np.int32)
        >>> one, other = (TokenRange(i, 12 * i, 12, group=0, first=10, num_loss=2) for i in range(2))
        >>> layout, source_N, position_N = lay_out([one, other], ids, max_tokens=64)
        >>> source_N.tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 22, 23, 10, 11]
        >>> position_N.tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11]
        >>> layout.rows  # the runs of packed tokens that make each sequence
        (((0, 10), (12, 2)), ((0, 12),))
        >>> layout.passes[1].pieces  # two queries also read the ten keys of the prompt
        (Piece(query=12, num_queries=2, key=0, num_keys=10),)
    """
    # packing.assign() counted every shared token once. Pruning repeats some, so a
    # micro-batch that was just full may exceed the limit: then share all.
    nodes = _pruned(_forest(sequences, readings))
    if sum(node.length for node in nodes) > max_tokens:
        nodes = _forest(sequences, readings)
    passes = _lay_paths(nodes)
    nodes.sort(key=lambda node: node.place)
    position_N = np.concatenate([np.arange(node.first, node.end) for node in nodes])
    starts, lengths = zip(
        *((node.sequence.start, node.length) for node in nodes), strict=True
    )
    source_N = position_N + np.repeat(starts, lengths)
    last = {one: node for node in nodes for one in node.ends}
    rows = tuple(_runs_to(last[one]) for one in sequences)
    made = tuple(
        KernelPass(tuple(part), is_causal=index == 0)
        for index, part in enumerate(passes)
    )
    return Layout(len(source_N), rows, made), source_N, position_N


def _forest(
    sequences: Sequence[TokenRange], readings: npt.NDArray[np.int32]
) -> list[TreeNode]:
    nodes = list[TreeNode]()
    # The states of a prompt differ between adapters, so adapters share no token.
    for _, own in groupby(sequences, key=lambda one: one.adapter):
        nodes += _trie([*own], readings)
    return nodes


def _trie(
    sequences: Sequence[TokenRange], readings: npt.NDArray[np.int32]
) -> list[TreeNode]:
    pairs = in_tree_order(sequences, readings)
    ordered = [one for one, _ in pairs]
    shared = np.array([num_shared for _, num_shared in pairs])
    nodes = list[TreeNode]()
    # Entries: sequences [low, high) share their first `depth` tokens, which `parent`
    # ends. A list and no recursion: a rollout with many turns nests a level per turn.
    todo: list[tuple[int, int, int, TreeNode | None]] = [(0, len(ordered), 0, None)]
    while todo:
        low, high, depth, parent = todo.pop()
        end = (
            int(shared[low + 1 : high].min()) if high - low > 1 else ordered[low].length
        )
        if end > depth:
            node = TreeNode(ordered[low], depth, end, parent)
            nodes.append(node)
            if parent is not None:
                parent.children.append(node)
            depth = end
            parent = node
        # A sequence that ends here is a prefix of the others, so it sorts first.
        while low < high and ordered[low].length == end:
            assert parent is not None, "a sequence has tokens"
            parent.ends.append(ordered[low])
            low += 1
        if low < high:
            cuts = [
                low,
                *(np.flatnonzero(shared[low + 1 : high] == end) + low + 1).tolist(),
                high,
            ]
            todo += [
                (*pair, depth, parent) for pair in zip(cuts, cuts[1:], strict=False)
            ]
    return nodes


def _pruned(nodes: list[TreeNode]) -> list[TreeNode]:
    """Return the nodes without branches that cost more than they save.

    Example: two sequences share 4 of 9 tokens. The branch would save 4, less than
    MIN_SHARED_TOKENS, so each sequence becomes a node of 9 tokens.
    """
    kept = list[TreeNode]()
    # Parents come before their children in `nodes`. Reversed, a node is judged after
    # all that is behind it has been pruned.
    for node in reversed(nodes):
        node.behind = sum(child.length + child.behind for child in node.children)
        if node.children and not node.is_worth_it:
            for child in node.children:
                # The child repeats the node's tokens, which it reads from its own
                # sequence.
                child.first = node.first
                child.parent = node.parent
            if node.parent is not None:
                node.parent.children += node.children
                if not node.ends:
                    node.parent.children.remove(node)
            node.children = []
            node.behind = 0
            # A sequence that ends in the node still needs the node's tokens, as a leaf.
            if not node.ends:
                continue
        kept.append(node)
    return kept[::-1]


def _lay_paths(nodes: list[TreeNode]) -> list[list[Piece]]:
    """Give every node its place, and return the pieces of each pass, causal ones first.

    Example: a prompt of 10 tokens continues with A (20 tokens), or with B (15). After B
    come B1 (5) or B2 (4). B and its continuations have 24 tokens, A has 20, so the first
    path is prompt, B, B1:

        place   0         10          25      30         50      54
                [ prompt ][ B        ][ B1   ][ A       ][ B2   ]
        pass 0  30 queries to 30 keys          20 to 20   4 to 4      causal
        pass 1                                 to 0..9    to 0..24    all keys
    """
    for node in reversed(nodes):
        node.behind = sum(child.length + child.behind for child in node.children)
        node.children.sort(key=lambda child: -child.length - child.behind)
    passes: list[list[Piece]] = [[]]
    todo = [(node, 0) for node in reversed(nodes) if node.parent is None]
    end = 0
    # Depth first: all that branches from one place is laid out before the next begins.
    # So its tokens are consecutive, and one piece per branch covers them.
    while todo:
        head, num_left = todo.pop()
        path = [head]
        start = end
        while path[-1].children:
            path.append(path[-1].children[0])
        for node in path:
            node.place = end
            node.path = start
            node.left = head.parent
            end += node.length
        passes[0].append(Piece(start, end - start, start, end - start))
        branches = [node for node in path if len(node.children) > 1]
        if branches and len(passes) == num_left + 1:
            passes.append([])
        query = end
        for node in branches:
            # These queries attend to the parent path up to the branch, and not beyond.
            behind = sum(child.length + child.behind for child in node.children[1:])
            passes[num_left + 1].append(
                Piece(query, behind, start, node.place + node.length - start)
            )
            query += behind
        leaving = [child for node in branches for child in node.children[1:]]
        todo += [(child, num_left + 1) for child in reversed(leaving)]
    return passes


def _runs_to(last: TreeNode) -> Runs:
    """Return the runs of packed tokens up to the end of a node. A path has at most
    log2(N) parents.
    """
    own = (last.path, last.place + last.length - last.path)
    return (own,) if last.left is None else (*_runs_to(last.left), own)
