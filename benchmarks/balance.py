"""How evenly the micro-batches of 8 ranks are dealt: simulated lockstep efficiency, and contiguous shares
beside it.

    python benchmarks/balance.py [--seconds S] [--write]

Under FSDP all ranks wait for the slowest in every micro-step, so a batch takes the sum of the costliest
micro-batches. Efficiency is the cost of all micro-batches / (ranks x that sum). `useful` divides the cost of
the batch's prefix trees instead, each token once, so that what several micro-batches compute again counts as
lost. The cost of a micro-batch is that of its packed tokens, attention pairs and loss tokens, in the floating
point operations of Qwen3-4B's shape; nothing is measured in time.

Batches: groups of 8, a prompt of 200 tokens, completions of a lognormal length (median 512, at most 8,192) or
all of 512, micro-batches of 16,384 tokens; and agents whose template drops earlier thoughts. Contiguous: each
rank gets its share of the tokens in the batch's order and fills its micro-batches in that order, as this
trainer did before. Each row is the least of 5 random batches. --seconds is not used: nothing is timed but the
planning, in CPU ms a batch on one rank.

A group for each rank is too little to be dealt: at 8 x 8 the longest sequence alone may be more than a rank's
share.

The last line is the least `efficiency` of all rows, dealt by cost. Target: 0.94.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from report import options, reported

from asyncrl.trainer.model.dealing import Costs, deal
from asyncrl.trainer.model.tree import TokenRange, in_tree_order

RANKS, MAX_TOKENS, GROUP_SIZE, PROMPT, LONGEST, SEEDS = 8, 16384, 8, 200, 8192, 5
QWEN3_4B = {
    "layers": 36,
    "hidden": 2560,
    "heads": 32,
    "head_dim": 128,
    "linear": 3.63e9,
    "vocabulary": 151936,
}
COSTS = Costs(
    key=2 * QWEN3_4B["layers"] * QWEN3_4B["heads"] * QWEN3_4B["head_dim"] / QWEN3_4B["linear"],
    loss_token=QWEN3_4B["hidden"] * QWEN3_4B["vocabulary"] / QWEN3_4B["linear"],
)
Steps = Sequence[Sequence[Sequence[TokenRange]]]


@dataclass(frozen=True)
class Batch:
    """Groups of sequences, and the tokens that they are ranges of."""

    groups: list[list[TokenRange]]
    token_ids: np.ndarray

    def cost(self, sequences: Sequence[TokenRange]) -> float:
        """Of a micro-batch, each shared token once."""
        ordered = in_tree_order(sequences, self.token_ids)
        return sum(COSTS.of(one.length, shared, one.num_loss) for one, shared in ordered)

    def efficiency(self, steps: Steps) -> tuple[float, float]:
        """(of all micro-batches, of the prefix trees alone)."""
        costs = [[self.cost(share) if share else 0.0 for share in step] for step in steps]
        time_taken = RANKS * sum(max(step) for step in costs)
        return sum(map(sum, costs)) / time_taken, sum(map(self.cost, self.groups)) / time_taken


def batch_of(rows: list[tuple[int, np.ndarray, int]]) -> Batch:
    """Of (group, token ids, loss tokens at the end)."""
    groups: dict[int, list[TokenRange]] = {}
    start = 0
    for number, (group, ids, num_loss) in enumerate(rows):
        last = len(ids) - 1
        one = TokenRange(number, start, last, group, len(ids) - num_loss, num_loss)
        groups.setdefault(group, []).append(one)
        start += len(ids)
    return Batch([*groups.values()], np.concatenate([ids for _, ids, _ in rows]).astype(np.int32))


def completions(rng: np.random.Generator, num_groups: int, sigma: float) -> Batch:
    """Groups of completions with lengths of this spread."""
    rows = []
    for group in range(num_groups):
        prompt = rng.integers(0, 2**31 - 1, PROMPT)
        for draw in rng.lognormal(np.log(512), sigma, GROUP_SIZE):
            length = int(np.clip(np.rint(draw), 1, LONGEST))
            rows.append((group, np.concatenate([prompt, rng.integers(0, 2**31 - 1, length)]), length))
    return batch_of(rows)


def agents(rng: np.random.Generator, num_groups: int, num_turns: int) -> Batch:
    """Rollouts of up to so many turns, a branch each; thoughts of a lognormal length (median 200)."""
    rows = []
    for group in range(num_groups):
        prompt = rng.integers(0, 2**31 - 1, PROMPT)
        for _ in range(GROUP_SIZE):
            history = prompt
            for _ in range(int(rng.integers(num_turns // 2, num_turns + 1))):
                thought = rng.integers(0, 2**31 - 1, int(rng.lognormal(np.log(200), 1.0)) + 1)
                answer, tool = rng.integers(0, 2**31 - 1, (2, 60))
                rows.append((group, np.concatenate([history, thought, answer]), len(thought) + len(answer)))
                history = np.concatenate([history, answer, tool])
    return batch_of(rows)


def contiguous(batch: Batch) -> Steps:
    """Shares of the tokens in order, cut into micro-batches in order; one prefix a group is shared."""
    sequences = [one for group in batch.groups for one in group]
    costs = np.array([one.length + 1 for one in sequences])
    owners = np.minimum((np.cumsum(costs) - costs / 2) * RANKS / costs.sum(), RANKS - 1).astype(int)
    ranks = []
    for rank in range(RANKS):
        mine, num_tokens = list[list[TokenRange]](), 0
        for one, owner in zip(sequences, owners, strict=True):
            if owner != rank:
                continue
            is_next = bool(mine) and mine[-1][-1].group == one.group
            added = one.length - (PROMPT if is_next else 0)
            if not mine or num_tokens + added > MAX_TOKENS:
                mine.append([])
                num_tokens, added = 0, one.length
            mine[-1].append(one)
            num_tokens += added
        ranks.append(mine)
    most = max(map(len, ranks))
    return [[mine[step] if step < len(mine) else [] for mine in ranks] for step in range(most)]


def main() -> None:
    """Read the options and run."""
    arguments = options(__doc__, seconds=60.0).parse_args()
    makers: dict[str, Callable[[np.random.Generator], Batch]] = {}
    for num_groups in (16, 32, 128):
        for sigma in (0.0, 0.5, 1.0, 1.5):
            name = "equal" if sigma == 0 else f"lognormal {sigma}"
            makers[f"{num_groups} x {GROUP_SIZE}, {name}"] = partial(
                completions, num_groups=num_groups, sigma=sigma
            )
    makers[f"32 x {GROUP_SIZE}, agent, 4 to 8 turns"] = partial(agents, num_groups=32, num_turns=8)
    makers[f"16 x {GROUP_SIZE}, agent, 10 to 20 turns"] = partial(agents, num_groups=16, num_turns=20)
    with reported("balance", is_kept=arguments.write):
        print(f"{'':<34}{'efficiency':>24}{'useful':>24}{'micro-steps':>24}{'plan':>8}")
        head = "".join(f"{name:>12}" for name in ("contiguous", "by cost") * 3)
        print(f"{'batch':<34}{head}{'ms':>8}")
        least = 1.0
        for name, make in makers.items():
            found = []
            for seed in range(SEEDS):
                batch = make(np.random.default_rng(seed))
                started = time.process_time()
                dealt = deal(batch.groups, batch.token_ids, COSTS, MAX_TOKENS, RANKS)
                plan_ms = 1000 * (time.process_time() - started)
                old = contiguous(batch)
                pairs = zip(batch.efficiency(old), batch.efficiency(dealt), strict=True)
                found.append([*(one for pair in pairs for one in pair), len(old), len(dealt), plan_ms])
            worst, mean = np.min(found, axis=0), np.mean(found, axis=0)
            shown = "".join(f"{one:>12.2f}" for one in worst[:4]) + "".join(
                f"{one:>12.1f}" for one in mean[4:6]
            )
            print(f"{name:<34}{shown}{mean[6]:>8.0f}")
            least = min(least, float(worst[1]))
        print(f"ratio: {least:.3f}")


if __name__ == "__main__":
    main()
