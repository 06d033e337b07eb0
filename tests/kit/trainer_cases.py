"""Mini-batches and specs for the trainer's tests, and one plain forward a sequence to
compare with.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from token_cases import masked_tokens
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.offload_config import POLICY_STEP
from asyncrl.messages.records import Credit
from asyncrl.messages.tokens import COLUMNS, Tokens, spans_of
from asyncrl.messages.trainer_api import BatchHeader, TrajectoryHeader
from asyncrl.trainer.attention.packed_attention import ATTENTION
from asyncrl.trainer.loss.sums import StepSums
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.export import whole_tensors
from asyncrl.weights.tensor_files import digest_tensors

MakeStep = Callable[..., TrainerRank]
"""The fixture make_step: of the tiny model, unless another folder is given first."""


def weights_digest(step: TrainerRank) -> str:
    step._use("compare weights", *POLICY_STEP)
    return digest_tensors(dict(whole_tensors(step.masters.named)))


def make_spec(
    model_dir: Path,
    folder: Path,
    *,
    trainer: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **values: Any,
) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model_path": str(model_dir),
            "device": "cpu",
            "trainer": TrainerConfig(
                **{"learning_rate": 1e-2, **(trainer or {})}
            ).model_dump(),
            "algorithm": AlgorithmConfig(**(algorithm or {})).model_dump(),
            "staging_dir": str(folder / "staging"),
            "record_path": str(folder / "trained.jsonl"),
            **values,
        }
    )


def make_batch(
    *,
    version: int = 0,
    num_groups: int = 2,
    group_size: int = 3,
    seed: int = 0,
    **header: Any,
) -> tuple[BatchHeader, Tokens]:
    """Random prompts of 5 tokens and completions of 1 to 20, all sampled at `version`."""
    rng = np.random.default_rng(seed)
    drawn = [
        (int(rng.integers(1, 21)), float(rng.random()))
        for _ in range(num_groups * group_size)
    ]
    rows = [([0] * (5 + length), [False] * 5 + [True] * length) for length, _ in drawn]
    groups = [
        rows[start : start + group_size] for start in range(0, len(rows), group_size)
    ]
    made, arrays = batch_of(groups)
    entries = [
        entry.model_copy(update={"reward": entry.sample_index + 0.25 * extra})
        for entry, (_, extra) in zip(made.trajectories, drawn, strict=True)
    ]
    mask = arrays.is_sampled
    fields = {
        "version": version,
        "min_version": version,
        "trajectories": entries,
        **header,
    }
    return made.model_copy(update=fields), changed(
        arrays,
        ids=rng.integers(6, 52, len(mask)).astype(np.int32),
        behaviour_logprobs=np.where(mask, rng.normal(-4.0, 0.3, len(mask)), 0).astype(
            np.float32
        ),
        versions=np.where(mask, version, -1).astype(np.int32),
    )


def train_versions(step: TrainerRank, first: int, last: int) -> None:
    """Train on the batches of these versions."""
    for version in range(first, last):
        step.train(*make_batch(version=version, seed=version))


def gradient_of(step: TrainerRank, header: BatchHeader, arrays: Tokens) -> StepSums:
    """Leave the gradient of a batch in the rank's masters, without a step."""
    batch = step.begin(header, arrays)
    return step.forward_backward(batch, batch.has_loss)


@contextlib.contextmanager
def mesh_of_one(folder: Path) -> Iterator[Ranks]:
    """Give the place of a lone rank whose weights are shards, as on CUDA."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield Ranks(mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Let no file of this process grow past `limit` bytes, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_all_close(
    found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], limit: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Drop times, speeds and memory, which differ each time."""
    return {
        name: value for name, value in metrics.items() if not name.startswith("perf/")
    }


def changed(arrays: Tokens, **values: Any) -> Tokens:
    """Replace ids, columns, or for each token its version or engine (-1: context,
    unknown).
    """
    ids = values.pop("ids", arrays.ids)
    versions, engines = (
        values.pop("versions", arrays.versions),
        values.pop("engines", arrays.engines),
    )
    assert values.keys() <= COLUMNS.keys(), values.keys()
    spans = []
    for engine in np.unique(engines):
        for span in spans_of(np.where(engines == engine, versions, -1)):
            spans.append(span._replace(engine=int(engine)))
    spans.sort(key=lambda span: span.start)
    return Tokens(ids, tuple(spans), {**arrays.columns, **values}, arrays.calls)


def naive_logprobs(
    model: Any, header: BatchHeader, arrays: Tokens, temperature: float
) -> np.ndarray:
    """float32 [N] by naive(), 0 where no loss is carried."""
    logprobs = np.zeros(len(arrays.ids), np.float32)
    with torch.no_grad():
        logprobs[arrays.is_sampled] = naive(model, header, arrays, temperature).numpy()
    return logprobs


# ---- groups that share prefixes

Rows = list[list[tuple[list[int], list[bool]]]]
"""Groups of sequences: (token ids, which of them carry loss). No first token does."""


def batch_of(groups: Rows) -> tuple[BatchHeader, Tokens]:
    trajectories, ids, mask = [], list[int](), list[bool]()
    for group, rows in enumerate(groups):
        for sample, (token_ids, has_loss) in enumerate(rows):
            start = len(ids)
            ids += token_ids
            mask += has_loss
            place = {
                "group_index": group,
                "group_id": 10 + group,
                "start": start,
                "end": len(ids),
            }
            trajectories.append(
                TrajectoryHeader(
                    sample_index=sample, prompt_id=f"p{group}", reward=0.0, **place
                )
            )
    loss_mask = np.array(mask)
    header = BatchHeader(
        version=0, min_version=0, mask_older=False, trajectories=trajectories
    )
    return header, masked_tokens(ids, loss_mask, np.zeros(len(ids)))


def random_groups(
    sizes: list[list[int]], *, prompt: int = 20, vocab: int = 52, seed: int = 0
) -> Rows:
    """One group an entry: a shared prompt, and completions of these lengths that carry
    loss.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for lengths in sizes:
        head = rng.integers(0, vocab, prompt).tolist()
        groups.append(
            [
                (
                    head + rng.integers(0, vocab, n).tolist(),
                    [False] * prompt + [True] * n,
                )
                for n in lengths
            ]
        )
    return groups


def naive(
    model: Any, header: BatchHeader, arrays: Tokens, temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs of all loss tokens with gradient, by one forward a sequence and the
    whole softmax.
    """
    parts = []
    with plain_attention(model):
        for entry in header.trajectories:
            ids = torch.from_numpy(arrays.ids[entry.start : entry.end].astype(np.int64))
            mask = torch.from_numpy(arrays.is_sampled[entry.start + 1 : entry.end])
            logits = model(input_ids=ids[None]).logits[0, :-1].float() / temperature
            parts.append(
                torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][mask]
            )
    return torch.cat(parts)


@contextlib.contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let a trainer's model read texts without a layout."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if before == ATTENTION else before)
    yield
    model.set_attn_implementation(before)


@st.composite
def trees(draw: st.DrawFn, vocab: int = 52) -> Rows:
    """Random groups whose sequences fork anywhere, with loss on any tokens but the
    first.
    """
    groups: Rows = []
    for _ in range(draw(st.integers(1, 3))):
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        trunk = rng.integers(0, vocab, 40).tolist()
        rows = list[tuple[list[int], list[bool]]]()
        for _ in range(draw(st.integers(1, 5))):
            before = draw(st.sampled_from([trunk, trunk, *(ids for ids, _ in rows)]))
            stem, own = draw(st.integers(1, len(before))), draw(st.integers(0, 30))
            ids = before[:stem] + rng.integers(0, vocab, own).tolist()
            start = draw(st.integers(1, len(ids)))
            is_drawn = rng.random(len(ids)) < draw(st.sampled_from([0.3, 1.0]))
            rows.append((ids, ((np.arange(len(ids)) >= start) & is_drawn).tolist()))
        # a policy that has learnt its task says the same again
        groups.append([rows[0]] * len(rows) if draw(st.booleans()) else rows)
    return groups


# ---- rollouts with several turns and branches, and their loss in plain words

VOCAB = range(6, 52)


Branch = tuple[list[int], list[bool]]
"""Tokens, and which of them were sampled."""


def make_rollout(rng: np.random.Generator, prompt: list[int]) -> list[Branch]:
    """Return one to three branches of one to three turns: tokens of the harness, then
    sampled ones.
    """

    def add_turns(branch: Branch, most: int) -> Branch:
        for _ in range(rng.integers(1, most + 1)):
            num_others, num_sampled = rng.integers(1, 6, 2).tolist()
            branch[0].extend(rng.choice(VOCAB, num_others + num_sampled).tolist())
            branch[1].extend([False] * num_others + [True] * num_sampled)
        return branch

    main = add_turns(([*prompt], [False] * len(prompt)), 3)
    stems = rng.integers(2, len(main[0]), rng.integers(0, 3)).tolist()
    return [main, *(add_turns((main[0][:stem], [False] * stem), 2) for stem in stems)]


def make_branch_batch(
    seed: int,
    *,
    credits: tuple[str, ...] = ("none", "turn", "branch"),
    num_groups: int = 3,
    group_size: int = 3,
    version: int = 0,
) -> tuple[BatchHeader, Tokens]:
    """Make groups of such rollouts and draw how each earns credit."""
    rng = np.random.default_rng(seed)
    groups: Rows = []
    places = []
    for _ in range(num_groups):
        prompt = rng.choice(VOCAB, 12).tolist()
        groups.append([])
        for sample in range(group_size):
            kind = str(rng.choice(credits))
            reward = float(sample == 0) + round(float(rng.random()), 3)
            units = itertools.count(99, -1)
            for number, (ids, mask) in enumerate(make_rollout(rng, prompt)):
                groups[-1].append((ids, mask))
                earned = []
                unit = next(units)
                for start, end in (
                    np.flatnonzero(np.diff([False, *mask, False]))
                    .reshape(-1, 2)
                    .tolist()
                ):
                    unit = next(units) if kind == "turn" else unit
                    earned.append(Credit(start, end, unit / 7, unit))
                given = [] if kind == "none" else earned
                places.append(
                    {
                        "sample_index": sample,
                        "branch": number,
                        "reward": reward,
                        "credits": given,
                    }
                )
    header, arrays = batch_of(groups)
    pairs = zip(header.trajectories, places, strict=True)
    fields = {"version": version, "min_version": version}
    fields |= {
        "trajectories": [entry.model_copy(update=place) for entry, place in pairs]
    }
    sampled = arrays.is_sampled
    return header.model_copy(update=fields), changed(
        arrays,
        behaviour_logprobs=np.where(
            sampled, rng.normal(-4.0, 0.3, len(sampled)), 0
        ).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
    )


Key = tuple[int, int, int | None]


def plain_units(header: BatchHeader) -> dict[Key, tuple[float, list[int]]]:
    """(group, sample, unit) -> its reward, and the places of all its tokens."""
    units: dict[Key, tuple[float, list[int]]] = {}
    for entry in header.trajectories:
        sample = entry.group_id, entry.sample_index
        for credit in entry.credits:
            unit = units.setdefault((*sample, credit.unit), (credit.reward, []))
            unit[1].extend(range(entry.start + credit.start, entry.start + credit.end))
        if not entry.credits:
            units.setdefault((*sample, None), (entry.reward, []))[1].extend(
                range(entry.start, entry.end)
            )
    return units


def plain_advantages(
    header: BatchHeader,
    num_tokens: int,
    penalty: Callable[[list[int]], float] = lambda places: 0.0,
) -> np.ndarray:
    """GRPO over the units of each group; `penalty` of a unit's places lowers its
    reward.
    """
    units = {
        key: (reward - penalty(places), places)
        for key, (reward, places) in plain_units(header).items()
    }
    advantages = np.zeros(num_tokens)
    for group_id in {key[0] for key in units}:
        rewards = np.array(
            [reward for key, (reward, _) in units.items() if key[0] == group_id]
        )
        for key, (reward, places) in units.items():
            if key[0] == group_id:
                advantages[places] = (reward - rewards.mean()) / (rewards.std() + 1e-4)
    return advantages


def plain_loss(
    model: Any,
    header: BatchHeader,
    arrays: Tokens,
    advantages: np.ndarray,
    *,
    aggregate: str,
) -> torch.Tensor:
    """PPO's clipped loss, clip range 0.2, over one plain forward a branch."""
    mask = arrays.is_sampled
    ratio = (
        naive(model, header, arrays) - torch.from_numpy(arrays.behaviour_logprobs[mask])
    ).exp()
    advantage = torch.from_numpy(advantages[mask]).float()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if aggregate == "token":
        return losses.mean()
    lengths = [
        int(mask[entry.start : entry.end].sum()) for entry in header.trajectories
    ]
    return torch.stack([part.mean() for part in losses.split(lengths)]).mean()
