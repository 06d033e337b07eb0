"""A batch that is trained in parts: the same bits in any order of the parts, and the
gradient of the whole batch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job_runs
import journal_cases
import numpy as np
import pytest
import torch
from costly_cases import every_third_is_quick
from launch_cases import single_node
from rank_processes import running
from safetensors.torch import load_file
from tiny_model import make_tiny_moe
from trainer_cases import (
    MakeStep,
    batch_of,
    changed,
    learned,
    make_batch,
    make_spec,
    mesh_of_one,
    random_groups,
    weights_digest,
)

from asyncrl.algorithms.registry import BUILT_IN_ADVANTAGES, RECIPES
from asyncrl.base.http import Refused
from asyncrl.config import RunConfig
from asyncrl.config.load import checked
from asyncrl.launch.parts import why_whole
from asyncrl.launch.placement import place
from asyncrl.messages.records import Batch
from asyncrl.messages.tokens import ROUTING, Tokens
from asyncrl.messages.trainer_api import (
    BatchHeader,
    TrainerHealth,
    pack_batch,
    unpack_batch,
)
from asyncrl.trainer.loss import step_metrics
from asyncrl.trainer.loss.packing import cut_parts
from asyncrl.trainer.ranks.optimizer import PART_BITS, Trained
from asyncrl.trainer.ranks.rank import TrainerRank, _part_key
from asyncrl.trainer.ranks.ranks import ONE_RANK
from asyncrl.trainer.trainer_client import pack_groups

Part = tuple[BatchHeader, Tokens]

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "micro-batches of a few tokens": {"trainer": {"micro_batch_tokens": 40}},
    "adapters and a KL to the initial weights": {
        "trainer": {"lora": {"rank": 2}},
        "algorithm": {"kl_coefficient": 0.1},
    },
    "sequence ratios": {"algorithm": {"loss": "gspo"}},
    "a clip by age": {"algorithm": {"loss": "age_clip", "kl_coefficient": 0.1}},
    "a constant divisor": {
        "algorithm": {"advantage": "dr_grpo", "aggregate": "constant"}
    },
    "a KL in the reward": {
        "algorithm": {
            "loss": "icepop",
            "kl_coefficient": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
        }
    },
    "a critic": {
        "algorithm": {"advantage": "gae", "whiten_advantages": False},
        "critic": {"learning_rate": 1e-2},
    },
    "bfloat16": {"dtype": "bfloat16"},
}


def parts_batch(version: int = 0, part_groups: int = 2) -> Part:
    """8 groups with ids from 10; group 13 has failed."""
    header, arrays = make_batch(
        version=version, seed=version, num_groups=7, part_groups=part_groups
    )
    entries = [
        entry.model_copy(update={"group_id": entry.group_id + (entry.group_id > 12)})
        for entry in header.trajectories
    ]
    return header.model_copy(update={"trajectories": entries}), arrays


def train_in_order(step: TrainerRank, order: tuple[int, ...]) -> list[dict[str, float]]:
    """Train two versions. Of each, these parts come early, in this order."""
    metrics = []
    for version in range(2):
        header, arrays = parts_batch(version)
        parts = cut_parts(header, arrays)
        for number in order:
            step.add_part(*parts[number])
        metrics.append(learned(step.train(header, arrays)))
    return metrics


def all_trained(step: TrainerRank) -> list[Trained]:
    return [step.trained] + ([step.critic.trained] if step.critic else [])


def all_digests(step: TrainerRank) -> list[str]:
    return [
        str({name: weight.tolist() for name, weight in one.masters.named.items()})
        for one in all_trained(step)
    ]


def test_parts_follow_from_ids_alone() -> None:
    header, arrays = parts_batch(part_groups=4)
    ids = [
        list(dict.fromkeys(entry.group_id for entry in part.trajectories))
        for part, _ in cut_parts(header, arrays)
    ]
    assert ids == [[10, 11], [12, 14, 15], [16, 17]]
    texts = [tokens.ids for _, tokens in cut_parts(header, arrays)]
    assert np.array_equal(np.concatenate(texts), arrays.ids)
    for part, tokens in cut_parts(header, arrays):
        assert part.trajectories[0].start == part.trajectories[0].group_index == 0
        assert part.trajectories[-1].end == len(tokens)


def test_part_that_is_sent_alone_is_the_part_of_the_batch() -> None:
    """Otherwise all parts would be trained twice, with the same bits."""
    groups = tuple(journal_cases.make_group(group_id) for group_id in (2, 3, 4, 6))
    batch = Batch(version=3, groups=groups, min_version=3, part_groups=2)
    sent = [
        unpack_batch(pack_batch(*pack_groups(part))) for part in batch.parts().values()
    ]
    whole = unpack_batch(pack_batch(*pack_groups(batch)))
    assert [_part_key(*part) for part in sent] == [
        _part_key(*part) for part in cut_parts(*whole)
    ]
    assert len(sent) == 3


@pytest.mark.parametrize("name", every_third_is_quick((name,) for name in RUNS))
def test_bits_do_not_depend_on_the_order_of_parts(
    make_step: MakeStep, name: str
) -> None:
    orders = [(), (3, 1, 2, 0), (1, 3)]
    found = []
    for order in orders:
        step = make_step(**RUNS[name])
        metrics = train_in_order(step, order)
        found.append((json.dumps(metrics), all_digests(step)))
        assert step.policy_version == 2
    assert all(one == found[0] for one in found)
    records = Path(step.spec.record_path).read_text().splitlines()
    assert len([line for line in records if "restored" not in line]) == 2 * len(orders)


def test_prefix_trees_stay_whole_in_any_order(make_step: MakeStep) -> None:
    """Groups share a prompt, which a part computes once."""
    header, arrays = batch_of(
        random_groups([[3, 9, 4], [12, 2], [7, 7, 1], [5], [8, 6]])
    )
    entries = [
        entry.model_copy(update={"reward": float(entry.sample_index % 2)})
        for entry in header.trajectories
    ]
    update = {"trajectories": entries, "part_groups": 2}
    header = header.model_copy(update=update)
    parts = cut_parts(header, arrays)
    digests = []
    for order in itertools.permutations(range(len(parts))):
        step = make_step()
        for number in order:
            step.add_part(*parts[number])
        step.train(header, arrays)
        digests.append(all_digests(step))
    assert len(digests) == 6
    assert all(one == digests[0] for one in digests)


@pytest.mark.gpu
def test_order_of_parts_changes_no_bit_on_cuda(make_step: MakeStep) -> None:
    values: dict[str, Any] = {"device": "cuda", "trainer": {"deterministic": True}}
    digests = []
    for order in ((), (3, 1, 2, 0), (2,)):
        step = make_step(**values)
        train_in_order(step, order)
        digests.append(weights_digest(step))
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("name", every_third_is_quick((name,) for name in RUNS))
def test_sum_of_parts_is_the_gradient_of_the_batch(
    make_step: MakeStep, name: str
) -> None:
    """The oracle is a step without parts. AdamW divides by its moments, so its first
    step multiplies the smallest differences: the gradients are compared, too.
    """
    whole_header, arrays = parts_batch(part_groups=0)
    whole, parted = make_step(**RUNS[name]), make_step(**RUNS[name])
    gradients = []
    for step, part_groups in ((whole, 0), (parted, 2)):
        header = whole_header.model_copy(update={"part_groups": part_groups})
        kept: dict[str, torch.Tensor] = {}
        for number, one in enumerate(all_trained(step)):
            keep_gradients(one, f"{number}/", kept)
        metrics = learned(step.train(header, arrays))
        gradients.append((kept, metrics))
    (expected, wanted), (found, metrics) = gradients
    assert expected.keys() == found.keys()
    limit = 2e-2 if RUNS[name].get("dtype") else 1e-5
    for key, gradient in expected.items():
        distance = float((found[key] - gradient).norm())
        assert distance <= limit * float(gradient.norm()) + 1e-9, key
    assert metrics == pytest.approx(
        wanted, rel=1e-4 if limit < 1e-3 else 5e-2, abs=1e-5
    )


def keep_gradients(one: Trained, prefix: str, kept: dict[str, torch.Tensor]) -> None:
    """Copy gradients when the optimizer gets them."""

    def keep(*_: object) -> None:
        for name, weight in one.masters.named.items():
            if weight.grad is not None:
                kept[prefix + name] = weight.grad.detach().clone()

    one.optimizer.register_step_pre_hook(keep)


def test_integers_are_those_of_exact_arithmetic(make_step: MakeStep) -> None:
    """Python's integers are the oracle."""
    step = make_step()
    name, weight = next(iter(step.trained.masters.named.items()))
    rng = np.random.default_rng(0)
    sizes = [1, 7, 4096]
    grads = [
        (rng.normal(size=weight.shape) * 10.0**-exponent).astype(np.float32)
        for exponent in (0, 4, 9)
    ]
    for order in itertools.permutations(range(3)):
        for number in order:
            weight.grad = torch.from_numpy(grads[number].copy())
            step.trained.add_part(sizes[number])
            assert weight.grad is None
        step.trained.join_parts(sum(sizes))
        assert weight.grad is not None
        for index in [(0, 0), (3, 2), (-1, -1)]:
            whole = sum(
                round(float(grad[index]) * size * 2**PART_BITS)
                for grad, size in zip(grads, sizes, strict=True)
            )
            exact = whole / 2**PART_BITS / sum(sizes)
            assert float(weight.grad[index]) == np.float32(exact), name
        step.trained.drop_gradient()


@pytest.mark.parametrize("broken", [1e30, float("nan"), float("inf"), -float("inf")])
def test_overflow_and_nan_skip_the_step(make_step: MakeStep, broken: float) -> None:
    """An int64 wraps around silently, and NaN has no integer."""
    step = make_step()
    header, arrays = parts_batch()
    first, *others = cut_parts(header, arrays)
    before = weights_digest(step)
    hook = next(iter(step.policy.model.parameters())).register_hook(
        lambda gradient: torch.full_like(gradient, broken)
    )
    step.add_part(*first)
    hook.remove()
    for part in others:
        step.add_part(*part)
    metrics = step.train(header, arrays)
    assert metrics["trainer/skipped_steps"] == 1
    assert weights_digest(step) == before
    # The next step is as if nothing had happened.
    assert step.train(*parts_batch(1))["trainer/skipped_steps"] == 0
    assert weights_digest(step) != before


def test_parts_that_do_not_belong_change_nothing(make_step: MakeStep) -> None:
    """A part comes twice, of other tokens, of an older version, or of a group that is
    not in the batch; the state is loaded, or leaves the device, in between.
    """
    clean = make_step()
    train_in_order(clean, ())
    step = make_step()
    header, arrays = parts_batch(0)
    parts = cut_parts(header, arrays)
    others = changed(parts[1][1], ids=(parts[1][1].ids + 1) % 50)
    step.add_part(*parts[0])
    step.add_part(*parts[0])
    step.add_part(parts[1][0], others)
    step.train(header, arrays)
    with pytest.raises(Refused, match="batch 0 came while the trainer is at"):
        step.add_part(*parts[2])
    header, arrays = parts_batch(1)
    parts = cut_parts(header, arrays)
    step.add_part(*parts[0])
    with pytest.raises(Refused, match="batch 0 came while"):
        step.add_part(*cut_parts(*parts_batch(0))[2])
    assert len(step._parts) == 1, "a late part of the last batch costs nothing"
    step.offload(["weights", "optimizer"])
    step.onload(["weights", "optimizer"])
    step.add_part(*parts[3])
    step.train(header, arrays)
    assert all_digests(step) == all_digests(clean)


def test_whole_batch_after_parts_drops_them(make_step: MakeStep) -> None:
    clean, step = make_step(), make_step()
    header, arrays = parts_batch(0)
    whole = header.model_copy(update={"part_groups": 0})
    step.add_part(*cut_parts(header, arrays)[1])
    assert learned(step.train(whole, arrays)) == learned(clean.train(whole, arrays))
    assert all_digests(step) == all_digests(clean)


def test_loaded_state_forgets_parts(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step()
    step.begin_save_state(tmp_path / "state").result()
    step.add_part(*cut_parts(*parts_batch(0))[1])
    step.load_state(tmp_path / "state")
    clean = make_step()
    assert learned(step.train(*parts_batch(0))) == learned(clean.train(*parts_batch(0)))
    assert all_digests(step) == all_digests(clean)


def test_part_without_loss_tokens_adds_nothing(make_step: MakeStep) -> None:
    """All tokens of a part are too old, and masked."""
    header, arrays = parts_batch(1)
    entries = [entry for entry in header.trajectories if entry.group_id in (10, 11)]
    versions = arrays.versions.copy()
    part = slice(entries[0].start, entries[-1].end)
    versions[part] = np.where(arrays.is_sampled[part], 0, -1)
    arrays = changed(arrays, versions=versions)
    header = header.model_copy(update={"mask_older": True})
    digests = []
    for order in ((), (0, 1), (1, 0)):
        step = make_step()
        step.train(*parts_batch(0))
        for number in order:
            step.add_part(*cut_parts(header, arrays)[number])
        metrics = step.train(header, arrays)
        assert metrics["sample/masked_fraction"] > 0.1
        digests.append(all_digests(step))
    assert digests[0] == digests[1] == digests[2]
    nothing = changed(arrays, versions=np.where(arrays.is_sampled, 0, -1))
    step = make_step()
    step.train(*parts_batch(0))
    with pytest.raises(Refused, match="no token that carries loss"):
        step.train(header, nothing)
    assert step.policy_version == 1


def test_gap_limit_is_of_the_whole_batch(make_step: MakeStep) -> None:
    """One part alone is above the limit, and the batch is not."""
    header, arrays = parts_batch()
    parts = cut_parts(header, arrays)
    gap, *of_parts = (
        make_step().train(*batch)["policy/logprob_gap_mean"]
        for batch in [(header, arrays), *parts]
    )
    limit = (max(of_parts) + gap) / 2
    assert gap < limit < max(of_parts)
    between = make_step(trainer={"logprob_gap_limit": limit})
    between.add_part(*parts[int(np.argmax(of_parts))])
    assert between.train(header, arrays)["policy/logprob_gap_mean"] == gap
    low = make_step(trainer={"logprob_gap_limit": gap / 2})
    with pytest.raises(Refused, match="engines and trainer disagree"):
        low.train(header, arrays)
    assert low.policy_version == 0


def test_replayed_experts_in_any_order(make_step: MakeStep, tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    values: dict[str, Any] = {"algorithm": {"router_replay": True}}
    digests = []
    for weight, order in ((0, ()), (0, (3, 0, 2, 1)), (0.01, ()), (0.01, (1, 2))):
        step = make_step(folder, trainer={"router_aux_loss": weight}, **values)
        header, arrays = parts_batch()
        config = step.policy.model.config
        width = config.num_hidden_layers * config.num_experts_per_tok
        experts = np.tile(np.arange(width, dtype=np.uint16) % 4, (len(arrays), 1))
        arrays = arrays.with_columns({ROUTING: experts})
        for number in order:
            step.add_part(*cut_parts(header, arrays)[number])
        step.train(header, arrays)
        digests.append(all_digests(step))
    assert digests[0] == digests[1]
    # With a balance loss the batch is trained whole.
    assert digests[2] == digests[3]


@pytest.mark.slow
def test_two_ranks_add_parts_in_any_order(tiny_model_dir: Path, tmp_path: Path) -> None:
    exports = []
    for order in ((), (3, 1, 0, 2), (2, 0)):
        folder = tmp_path / f"ranks-{len(exports)}"
        with running(
            tiny_model_dir, folder, 2, trainer={"learning_rate": 1e-3}
        ) as group:
            for version in range(2):
                header, arrays = parts_batch(version)
                for number in order:
                    body = pack_batch(*cut_parts(header, arrays)[number])
                    group.post("/add_part", body, TrainerHealth)
                group.train(header, arrays)
            exports.append(group.export().digest)
    assert exports[0] == exports[1] == exports[2]
    with mesh_of_one(tmp_path) as ranks:
        spec = make_spec(
            tiny_model_dir, tmp_path / "one", trainer={"learning_rate": 1e-3}
        )
        alone = TrainerRank(spec, ranks)
        for version in range(2):
            alone.train(*parts_batch(version))
        path = alone.begin_export(tmp_path / "alone.safetensors")().path
    found = load_file(path)
    assert found


# ---- which algorithms may be cut

MIXED = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e-2}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": {"loss": name}} for name in RECIPES},
    **{
        f"advantage {name}": {"algorithm": {"advantage": name}}
        for name in BUILT_IN_ADVANTAGES
        if name not in ("gae", "gigpo")
    },
    "advantage of the user": {"algorithm": {"advantage": "compared:over_all"}},
    "top entropy": {"algorithm": {"top_entropy": 0.5}},
    "off-policy mask": {"algorithm": {"off_policy_mask": 0.1}},
    "whitened": MIXED,
    "not whitened": {
        **MIXED,
        "algorithm": {"advantage": "gae", "whiten_advantages": False},
    },
    **{
        f"aggregate {name}": {"algorithm": {"aggregate": name}}
        for name in ("token", "sequence", "sequence_sum", "constant")
    },
    "GDPO": {"algorithm": {"rewards": "normalize_then_sum"}},
}


@pytest.mark.parametrize("name", every_third_is_quick((name,) for name in ALGORITHMS))
def test_only_algorithms_that_compare_groups_are_trained_whole(
    make_step: MakeStep, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts give the gradient of the whole batch exactly where the table allows them.
    The step without parts is the oracle, in both directions.
    """
    (tmp_path / "compared.py").write_text(
        "def over_all(reward, group):\n    return reward - reward.mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = ALGORITHMS[name]
    distances = []
    whole_header, arrays = parts_batch(part_groups=0)
    kept: list[dict[str, torch.Tensor]] = [{}, {}]
    for gradients, part_groups in zip(kept, (0, 2), strict=True):
        step = make_step(**values)
        keep_gradients(step.trained, "", gradients)
        header = whole_header.model_copy(update={"part_groups": part_groups})
        step.train(header, arrays)
    for key, gradient in kept[0].items():
        distance = float((kept[1][key] - gradient).norm() / gradient.norm())
        distances.append(distance)
    sections = {**job_runs.CONFIG, "buffer": {"max_staleness": 0}, **values}
    config = checked(RunConfig, sections)
    why = why_whole(config, place(config, single_node()))
    if why:
        assert max(distances) > 1e-3, why
    else:
        assert max(distances) < 1e-4


def test_meter_tells_early_work_from_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends at 10 s. Its parts run at 12 to 15, 20 to 24 and 24 to 27 s; the batch
    is whole at 22 s, and the step ends at 28 s.
    """
    now_s = 0.0
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: now_s)
    meter = step_metrics.StepMeter(ONE_RANK, "float32")

    def at(time_s: float, event: Callable[[], Any]) -> Any:
        nonlocal now_s
        now_s = time_s
        return event()

    at(10, meter.end)
    for time_s, event in (
        (12, meter.start),
        (15, meter.pause),
        (20, meter.resume),
        (22, meter.note_whole),
        (24, meter.pause),
        (24, meter.resume),
        (27, meter.pause),
        (27, meter.resume),
    ):
        at(time_s, event)
    found = at(28, meter.numbers)
    assert found["perf/train_s"] == 3 + 4 + 3 + 1
    assert found["perf/early_s"] == 3 + 2
    assert found["perf/idle_s"] == 2 + 5
    at(28, meter.end)
    at(30, meter.start)
    found = at(33, meter.numbers)
    assert (found["perf/train_s"], found["perf/idle_s"]) == (3, 2)
    assert "perf/early_s" not in found
