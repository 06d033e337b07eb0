"""Several adapters of one trainer: each trains as it would without the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from trainer_cases import MakeStep, gradient_of, make_batch, make_spec, mesh_of_one
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.config.trainer_config import LoraConfig
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.loss import packing
from asyncrl.trainer.model.lora import AdapterTable
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights.tensor_files import SUFFIXES

Batch = tuple[BatchHeader, Tokens]
TARGETS = ["q_proj", "down_proj", "lm_head"]
SMALL = LoraConfig(rank=2, alpha=4.0, targets=["down_proj", "lm_head"])
LARGE = LoraConfig(rank=4, alpha=8.0, targets=TARGETS)
BOTH = {"a": (SMALL, 1), "b": (LARGE, 2)}


@pytest.fixture
def make_table(make_step: MakeStep) -> Any:
    """Makes a trainer with these adapters open."""

    def make(*names: str, **values: Any) -> tuple[TrainerRank, AdapterTable]:
        lora = {"rank": 4, "targets": TARGETS}
        step = make_step(trainer={"lora": lora}, **values)
        assert step.adapters is not None
        for name in names:
            step.adapters.open(name, *BOTH[name])
        return step, step.adapters

    return make


def batch_of(seed: int) -> Batch:
    """Return two groups of `a`, then two of `b`. Group 0 has the prompt of group 2, as
    group 1 has that of group 3.
    """
    header, arrays = make_batch(num_groups=4, seed=seed)
    entries = header.trajectories
    ids = arrays.ids.copy()
    for entry in entries:
        prompt = entries[3 * (entry.group_index % 2)].start
        ids[entry.start : entry.start + 5] = arrays.ids[prompt : prompt + 5]
    changed = [
        entry.model_copy(update={"adapter": "a" if entry.group_index < 2 else "b"})
        for entry in entries
    ]
    tokens = Tokens(ids, arrays.spans, arrays.columns, arrays.calls)
    return header.model_copy(update={"trajectories": changed}), tokens


def of_adapter(name: str, batch: Batch) -> Batch:
    parts = packing.cut_where(*batch, lambda one: one.adapter)
    return dict(zip("ab", parts, strict=True))[name]


def state_of(table: AdapterTable, name: str) -> dict[str, Tensor]:
    return {key: one.clone() for key, one in table.trained(name).state().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def train(
    trained: tuple[TrainerRank, AdapterTable], names: str, seeds: range, each: int = 1
) -> None:
    """Take a step for each of `names` after the gradients of `each` batches."""
    step, table = trained
    for seed in seeds:
        for number in range(each):
            batch = batch_of(10 * seed + number)
            step.add_gradients(*(batch if len(names) > 1 else of_adapter(names, batch)))
        for name in names:
            assert np.isfinite(table.step(name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_in_one_batch_train_as_if_alone(make_table: Any, dtype: str) -> None:
    together = make_table("a", "b", dtype=dtype)
    policy = state_of(together[1], "")
    train(together, "ab", range(3), each=2)
    for name in "ab":
        alone = make_table(name, dtype=dtype)
        begun = state_of(alone[1], name)
        train(alone, name, range(3), each=2)
        trained = state_of(alone[1], name)
        assert_same(state_of(together[1], name), trained)
        assert together[1].version(name) == 3
        assert trained["optimizer.step." + min(alone[1].tensors(name))] == 3
        for key, tensor in begun.items():
            assert not torch.equal(tensor, trained[key]), f"{key} has not been trained"
    assert_same(state_of(together[1], ""), policy)


def test_step_of_one_adapter_leaves_the_other(make_table: Any) -> None:
    step, table = make_table("a", "b")
    step.add_gradients(*batch_of(0))
    before = state_of(table, "b")
    table.step("a")
    assert (table.version("a"), table.version("b")) == (1, 0)
    assert_same(state_of(table, "b"), before)
    assert table.step("a") == 0.0, "its gradient is used up"
    assert table.version("a") == 1
    assert table.step("b") > 0
    assert table.version("b") == 1


def test_gradients_that_are_not_finite_change_nothing(make_table: Any) -> None:
    step, table = make_table("a", "b")
    train((step, table), "ab", range(1))
    step.add_gradients(*batch_of(1))
    next(iter(table.trained("a").masters.named.values())).grad[0, 0] = torch.nan
    before = state_of(table, "a")
    assert not np.isfinite(table.step("a"))
    assert_same(state_of(table, "a"), before)
    assert table.step("b") > 0


def test_stretches_act_as_merged_weights(make_table: Any, tiny_model_dir: Path) -> None:
    """W + s B A for the tokens of each adapter, also in gradients."""
    step, table = make_table("a", "b")
    pairs = dict[str, dict[str, Tensor]]()
    for name in "ab":
        named = table.trained(name).masters.named
        for key, weight in named.items():
            if key.endswith(SUFFIXES[1]):
                torch.nn.init.normal_(weight, std=0.1)
        pairs[name] = {
            key: one.detach().double().requires_grad_() for key, one in named.items()
        }
    header, arrays = batch_of(3)
    weight_N = np.random.default_rng(0).normal(size=len(arrays)).astype(np.float32)
    has_loss = arrays.is_sampled
    rules = packing.PackRules(10_000, mixes_adapters=True)
    ((micro, _),) = packing.micro_batches(
        header, arrays, has_loss, rules, step.device, step.ranks, step.policy.costs
    )
    (_, middle, first), (start, end, last) = micro.stretches
    assert (first, last) == ("a", "b")
    assert 0 < middle == start < end == micro.layout.num_tokens
    scores = step.policy(micro)
    found_M = scores.logprob_M
    weight_M = torch.from_numpy(weight_N[micro.source_M])
    (found_M * weight_M).sum().backward()

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    wanted_M = torch.zeros(len(arrays), dtype=torch.float64)
    for entry in header.trajectories:
        scale = BOTH[entry.adapter][0].scale
        merged = dict(model.named_parameters(remove_duplicate=False))
        for layer in table.layers:
            lora_A, lora_B = (pairs[entry.adapter].get(layer + end) for end in SUFFIXES)
            if lora_A is not None and lora_B is not None:
                base = merged[f"{layer}.weight"].detach()
                merged[f"{layer}.weight"] = base + scale * lora_B @ lora_A
        ids = torch.from_numpy(arrays.ids[entry.start : entry.end]).long()
        inputs = {"input_ids": ids[None]}
        logits = functional_call(model, merged, (), inputs, tie_weights=False).logits
        logprob_TV = torch.log_softmax(logits[0, :-1], dim=-1)
        own_M = logprob_TV.gather(-1, ids[1:, None])[:, 0]
        wanted_M[entry.start + 1 : entry.end] = own_M
    wanted_M = wanted_M[torch.from_numpy(micro.source_M)]
    (wanted_M * weight_M).sum().backward()
    assert float((found_M - wanted_M).detach().abs().max()) < 5e-6
    for name, own in pairs.items():
        for key, weight in table.trained(name).masters.named.items():
            wanted = own[key].grad
            assert wanted is not None
            assert weight.grad is not None
            distance = float((weight.grad - wanted).norm() / wanted.norm())
            # Rounding of float32.
            assert distance < 2e-6, (name, key)


def test_adapters_beyond_the_limit_leave_and_come_back(make_table: Any) -> None:
    everything, limited = make_table("a", "b"), make_table("a", "b")
    limited[1].max_adapters_resident = 1
    for trained in (everything, limited):
        train(trained, "ab", range(2), each=2)
    (a, b) = limited[1].need("ab")
    assert (a.aside.is_away, b.aside.is_away) == (True, False)
    for tensor in a.trained.state().values():
        assert not tensor.untyped_storage().nbytes() or not tensor.ndim
    assert limited[1].version("a") == 2
    for name in "ab":
        assert_same(state_of(limited[1], name), state_of(everything[1], name))
    limited[1].open("c", SMALL, 3)
    limited[1].drop("c")


def test_weights_leave_after_their_readers(make_table: Any) -> None:
    _, table = make_table("a", "b")
    policy, a = table.need(["", "a"])
    read = list[bool]()
    table.before_change = lambda: read.append(a.aside.is_away)
    table.max_adapters_resident = 1
    table.tensors("b")
    assert read == [False]
    assert a.aside.is_away
    table.tensors("a")
    assert read == [False, True]
    assert not policy.aside.is_away
    assert not a.aside.is_away


def test_saved_adapter_goes_on_bit_for_bit(make_table: Any, tmp_path: Path) -> None:
    step, table = make_table("a", "b")
    train((step, table), "ab", range(2))
    table.save("b", tmp_path / "b.safetensors")
    train((step, table), "ab", range(2, 4))
    other, loaded = make_table()
    loaded.open("b", LARGE, seed=9)
    train((other, loaded), "b", range(7, 8))
    other.add_gradients(*of_adapter("b", batch_of(0)))  # dropped by the load
    loaded.load("b", tmp_path / "b.safetensors")
    assert loaded.version("b") == 2
    train((other, loaded), "b", range(2, 4))
    assert_same(state_of(loaded, "b"), state_of(table, "b"))
    before = state_of(table, "a")
    with pytest.raises(Refused, match="weights differ"):
        table.load("a", tmp_path / "b.safetensors")
    assert_same(state_of(table, "a"), before)


def test_dropped_adapter_is_forgotten(make_table: Any) -> None:
    step, table = make_table("a", "b")
    begun = state_of(table, "a")
    train((step, table), "ab", range(1))
    exported = table.tensors("a")
    copies = {key: tensor.clone() for key, tensor in exported.items()}
    table.drop("a")
    assert table.names == ["", "b"]
    assert_same(exported, copies)
    table.open("a", *BOTH["a"])
    assert table.version("a") == 0
    assert_same(state_of(table, "a"), begun)
    train((step, table), "b", range(1, 2))


def test_unknown_adapter_is_refused_before_any_gradient(make_table: Any) -> None:
    step, table = make_table("a")
    header, arrays = batch_of(0)
    for call in (step.add_gradients, step.train, step.evaluate):
        with pytest.raises(Refused, match="no adapter 'b'"):
            call(header, arrays)
    assert table.step("a") == 0.0
    for call in (table.step, table.drop, table.tensors, table.version):
        with pytest.raises(Refused, match="no adapter 'b'"):
            call("b")
    with pytest.raises(Refused, match="is open"):
        table.open("a", SMALL, 0)
    with pytest.raises(ConfigError, match="no layer v_proj"):
        table.open("b", LoraConfig(targets=["v_proj"]), 0)
    with pytest.raises(Refused, match="'b' has no layer"):
        table.open("b", LoraConfig(targets=[]), 0)
    table.open("b", LoraConfig(targets="all"), 0)
    assert table.tensors("b").keys() == table.tensors("").keys()


def test_refused_batch_leaves_no_gradient(
    make_table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, table = make_table("a", "b")
    begun = {name: state_of(table, name) for name in "ab"}
    gradient = step._policys_gradient
    calls = list[None]()

    def fail_once(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise Refused(422, "no")
        return gradient(*arguments)

    monkeypatch.setattr(step, "_policys_gradient", fail_once)
    with pytest.raises(Refused):
        step.add_gradients(*batch_of(0))
    for name in "ab":
        assert table.step(name) == 0.0
        assert_same(state_of(table, name), begun[name])


def test_run_trains_as_without_other_adapters(make_table: Any) -> None:
    states = []
    for names in ("", "ab"):
        step, table = make_table(*names)
        if names:
            step.add_gradients(*batch_of(0))
        gradient_of(step, *make_batch())
        step.train(*make_batch())
        states.append(state_of(table, ""))
        assert table.version("") == 1
        assert len(step.exports.pushed()) == 2 * 5
    assert_same(*states)


def test_sharded_trainer_has_one_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    spec = make_spec(tiny_model_dir, tmp_path, trainer={"lora": {"rank": 2}})
    with mesh_of_one(tmp_path) as ranks:
        table = TrainerRank(spec, ranks).adapters
        assert table is not None
        for call in (
            lambda: table.open("a", SMALL, 0),
            lambda: table.save("", tmp_path / "state"),
            lambda: table.drop(""),
        ):
            with pytest.raises(Refused, match="the weights are shards"):
                call()
