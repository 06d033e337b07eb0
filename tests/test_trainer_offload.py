"""Offloaded parts return bit for bit, and calls that need them are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from costly_cases import every_third_is_quick, slow
from tiny_model import make_tiny_model
from torch import Tensor, nn
from trainer_cases import (
    MakeStep,
    learned,
    make_batch,
    make_spec,
    mesh_of_one,
    weights_digest,
)

from asyncrl.base.http import Refused
from asyncrl.config.offload_config import (
    CRITIC_STEP,
    POLICY_STEP,
    POLICY_WEIGHTS,
    REFERENCE_WEIGHTS,
    ModelPart,
)
from asyncrl.messages.engine_api import TrainerPart
from asyncrl.trainer.ranks.offload import local_of
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import ONE_RANK, BrokenStepError, Ranks, loss_behind

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")
POLICY_OPTIMIZER = ModelPart("policy", "optimizer")
PPO: dict[str, Any] = {
    "algorithm": {"advantage": "gae", "kl_coefficient": 0.1},
    "critic": {"learning_rate": 1e-2},
}
GONE = "always"
TRAINED = {"weights": GONE, "gradients": GONE, "optimizer": GONE}
ALWAYS: dict[tuple[str, ...], dict[str, str]] = {
    ("policy", "critic"): TRAINED,
    ("reference",): {"reference": GONE},
    ("policy", "critic", "reference"): TRAINED | {"reference": GONE},
}
"""Rules by whose parts leave while the others work."""
PAGED = {"hidden_size": 64, "intermediate_size": 256}
"""Weights of several pages."""


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", **PAGED)


@pytest.fixture
def make_step(make_step: MakeStep, paged_model_dir: Path) -> MakeStep:
    return lambda model_dir=paged_model_dir, **values: make_step(model_dir, **values)


def are_gone(tensors: Sequence[Tensor]) -> bool:
    return not any(
        tensor.untyped_storage().nbytes() for tensor in tensors if tensor.ndim
    )


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"lora": {"rank": 4}}, "dtype": "bfloat16"},
        {"trainer": {"mini_batches": 2}, "algorithm": {"kl_coefficient": 0.1}},
        {"trainer": {"optimizer": "muon"}, "dtype": "bfloat16"},
    ],
    ids=["lora in bfloat16", "reference", "muon in bfloat16"],
)
def test_offloaded_trainer_takes_the_same_steps(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any]
) -> None:
    plain, step = make_step(**values), make_step(**values)
    weights, optimizer = ("weights",), ("optimizer",)
    between: list[list[tuple[str, tuple[str, ...]]]] = [
        [("offload", ALL), ("onload", ALL)],  # before there is any optimizer state
        [
            ("offload", ("gradients", "optimizer")),
            ("offload", weights),
            ("onload", ALL),
        ],
        [
            ("offload", optimizer),
            ("offload", ALL),
            ("offload", ALL),
            ("onload", optimizer),
            ("onload", ALL),
        ],
    ]
    for version, moves in enumerate(between):
        for move, parts in moves:
            getattr(step, move)(parts)
        batch = make_batch(version=version, seed=version)
        expected, actual = plain.train(*batch), step.train(*batch)
        assert learned(actual) == learned(expected)
    assert (
        step.begin_export(tmp_path / "one")().digest
        == plain.begin_export(tmp_path / "other")().digest
    )
    step.offload(ALL)
    step.begin_save_state(tmp_path / "state").result()
    step.onload(ALL)
    assert (step.offloaded, weights_digest(step)) == ([], weights_digest(plain))
    plain.train(*make_batch(version=3))
    plain.load_state(tmp_path / "state")
    assert weights_digest(plain) == weights_digest(step), "saved while it was away"


def train_once(step: TrainerRank, version: int) -> dict[str, float]:
    return step.train(*make_batch(version=version, seed=version))


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("leaving", every_third_is_quick(zip(ALWAYS, strict=True)))
def test_models_that_share_by_time_take_the_same_steps(
    make_step: MakeStep, tmp_path: Path, leaving: tuple[str, ...], dtype: str
) -> None:
    trainer = {"mini_batches": 2, "offload": ALWAYS[leaving]}
    plain = make_step(**PPO, dtype=dtype, trainer={"mini_batches": 2})
    step = make_step(**PPO, dtype=dtype, trainer=trainer)
    assert step.critic is not None
    seen = dict[str, set[bool]]()
    watch(step, step.policy, ("critic", CRITIC_STEP), seen)
    watch(step, step.critic.model, ("policy", POLICY_STEP), seen)
    watch(step, step.critic.model, ("reference", (REFERENCE_WEIGHTS,)), seen)
    for version in range(3):
        assert learned(train_once(step, version)) == learned(train_once(plain, version))
    assert (
        step.begin_export(tmp_path / "a")().digest
        == plain.begin_export(tmp_path / "b")().digest
    )
    step.begin_save_state(tmp_path / "state").result()
    step.load_state(tmp_path / "state")
    assert learned(train_once(step, 3)) == learned(train_once(plain, 3))
    assert weights_digest(step) == weights_digest(plain)
    models = ("policy", "critic", "reference")
    assert seen == {model: {model in leaving} for model in models}


@pytest.mark.slow
def test_shards_that_share_by_time_take_the_same_steps(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    """As on CUDA, where weights are shards also on a single device."""
    trainer = {"mini_batches": 2, "offload": TRAINED | {"reference": GONE}}
    values = {**PPO, "dtype": "bfloat16"}
    with mesh_of_one(tmp_path) as ranks:
        specs = [
            make_spec(paged_model_dir, tmp_path, **values, trainer={"mini_batches": 2}),
            make_spec(paged_model_dir, tmp_path, **values, trainer=trainer),
        ]
        plain, step = (TrainerRank(spec, ranks) for spec in specs)
        for version in range(3):
            found = learned(train_once(step, version))
            assert found == learned(train_once(plain, version))
        step.begin_save_state(tmp_path / "state").result()
        step.load_state(tmp_path / "state")
        assert learned(train_once(step, 3)) == learned(train_once(plain, 3))
        assert weights_digest(step) == weights_digest(plain)
        step._use("hold nothing")
        for part in (*POLICY_STEP, *CRITIC_STEP, REFERENCE_WEIGHTS):
            held = [local_of(tensor) for tensor in step._tensors_of(part)]
            assert are_gone(held)


def watch(
    step: TrainerRank,
    working: nn.Module,
    other: tuple[str, Sequence[ModelPart]],
    seen: dict[str, set[bool]],
) -> None:
    """Note at each pass of a model whether the parts of another are off the device."""
    name, parts = other

    def note(*_: object) -> None:
        tensors = [tensor for part in parts for tensor in step._tensors_of(part)]
        seen.setdefault(name, set()).add(are_gone(tensors))

    working.register_forward_pre_hook(note)


def test_engines_slice_leaves_parts_that_never_leave(
    make_step: MakeStep, tmp_path: Path
) -> None:
    rules = {"optimizer": "never", "weights": "always"}
    plain, step = make_step(), make_step(trainer={"offload": rules})
    for version in range(3):
        assert learned(train_once(step, version)) == learned(train_once(plain, version))
        # As a handover to the engines and back, with the push between.
        step.offload(("gradients", "optimizer"))
        path = tmp_path / f"v{version}"
        assert step.begin_export(path)().digest == plain.begin_export(path)().digest
        step.offload(("weights",))
        assert are_gone(step._tensors_of(POLICY_WEIGHTS))
        assert not are_gone(step._tensors_of(POLICY_OPTIMIZER))
        with pytest.raises(Refused, match="cannot train: weights and optimizer"):
            step.train(*make_batch(version=version + 1))
        step.onload(("weights", "optimizer"))
        assert are_gone(step._tensors_of(POLICY_WEIGHTS)), "not before it is used"
    assert weights_digest(step) == weights_digest(plain)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_part_has_its_planned_memory(tmp_path: Path, optimizer: str) -> None:
    """Measured in another process: the allocator of this one has free pages."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    model_dir = make_tiny_model(tmp_path / "model", **sizes)
    script = Path(__file__).parent / "kit" / "offload_bytes.py"
    command = [sys.executable, script, model_dir, tmp_path, "bfloat16", optimizer]
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    found = json.loads(printed)
    assert len(found) == 7
    for planned, measured in found.values():
        assert measured == pytest.approx(planned, rel=0.1)


class OtherRankFails(Ranks):
    def agree(self, work: Callable[[], Any]) -> Any:
        work()
        raise Refused(507, "no memory on rank 1")


def test_move_that_fails_on_another_rank_moves_nothing(make_step: MakeStep) -> None:
    step = make_step()
    step.train(*make_batch())
    step._offload._ranks = OtherRankFails()
    with pytest.raises(Refused, match="on rank 1"):
        step.offload(ALL)
    assert (step.offloaded, are_gone(step._tensors_of(POLICY_WEIGHTS))) == ([], False)
    step._offload._ranks = ONE_RANK
    step.offload(ALL)
    step._offload._ranks = OtherRankFails()
    with pytest.raises(Refused, match="on rank 1"):
        step.onload(ALL)
    assert len(step.offloaded) == 3
    assert are_gone(step._tensors_of(POLICY_WEIGHTS))


def test_move_that_fails_within_a_step_ends_the_process(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic has taken its step and the policy has not."""
    trainer = {"offload": {"optimizer": "always"}}
    spec = make_spec(tiny_model_dir, tmp_path, **PPO, trainer=trainer)
    step = TrainerRank(spec)
    assert step.critic is not None
    move = step._offload._together
    has_stepped = list[bool]()

    def fails(what: str, *rest: Any) -> Any:
        if has_stepped:
            raise Refused(507, f"cannot {what}")
        return move(what, *rest)

    optimizer = step.critic.trained.optimizer
    optimizer.register_step_post_hook(lambda *_: has_stepped.append(True))
    monkeypatch.setattr(step._offload, "_together", fails)
    with pytest.raises(
        BrokenStepError, match="cannot offload critic optimizer"
    ) as error:
        step.train(*make_batch())
    lost = loss_behind(error.value, spec)
    assert lost is not None
    assert lost.status == 503, "the supervisor restarts the trainer"


def test_offloaded_parts_have_no_memory(make_step: MakeStep) -> None:
    step = make_step(dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    step.train(*make_batch())
    weights = [
        *step._tensors_of(POLICY_WEIGHTS),
        *step._tensors_of(REFERENCE_WEIGHTS),
    ]
    optimizer = step._tensors_of(POLICY_OPTIMIZER)
    num_parameters = sum(parameter.numel() for parameter in step.policy.parameters())
    moved = step.offload(("optimizer",))
    assert moved.num_bytes / (num_parameters * 12) >= 0.8, (
        "float32 masters and two moments"
    )
    assert are_gone(optimizer)
    assert not are_gone(weights), "an export needs no more than these"
    step.offload(ALL)
    assert are_gone(weights)
    assert step.offload(ALL).num_bytes == 0
    assert step.offloaded == ["gradients", "optimizer", "weights"]
    assert step.onload(("optimizer",)).num_bytes == moved.num_bytes


def test_call_that_needs_an_offloaded_part_is_refused(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    step.offload(("optimizer",))
    with pytest.raises(Refused, match="cannot train: optimizer offloaded") as refused:
        step.train(*make_batch())
    assert refused.value.body.way_out == "POST /onload with parts ['optimizer'] first."
    step.begin_export(tmp_path / "v0.safetensors")()
    step.offload(("weights",))
    for call in (
        lambda: step.begin_export(tmp_path / "v1.safetensors")(),
        lambda: step.export_chunk(0, 0),
        lambda: step.save(tmp_path / "again"),
        lambda: step.load_state(tmp_path / "state"),
    ):
        with pytest.raises(Refused, match="weights.* offloaded"):
            call()


@pytest.mark.gpu
def test_device_parts_come_back_to_the_bit(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step(device="cuda", dtype="bfloat16")
    step.train(*make_batch())
    digest, before = weights_digest(step), torch.cuda.memory_allocated()
    moved = step.offload(ALL)
    assert torch.cuda.memory_allocated() <= before - moved.num_bytes
    step.begin_save_state(tmp_path / "state")
    step.wait_save_state()
    step.onload(ALL)
    assert weights_digest(step) == digest
    step.train(*make_batch(version=1))
    step.load_state(tmp_path / "state")
    assert weights_digest(step) == digest
