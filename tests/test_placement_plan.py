"""The plan of a run, from files alone, and what is refused because it cannot fit."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from placement_cases import EVAL, TURNS, URLS, VLLM, cuda_devices, load, make_python

from asyncrl.errors import ConfigError
from asyncrl.placement import fit
from asyncrl.placement.fit import refuse_too_many_connections, refuse_what_cannot_fit
from asyncrl.placement.plan import Memory, Plan, engine_threads, make_plan, plan_text, trainer_threads

ON_CPU = ["placement.trainer=cpu", "placement.rollout=cpu"]
ZERO = "buffer.max_staleness=0"


def planned(num_cuda: int, *overrides: str) -> Plan:
    return make_plan(load(*overrides), cuda_devices(num_cuda))


def memory(plan: Plan, name: str) -> Memory:
    return next(process.memory for process in plan.processes if process.name == name)


def test_the_plan_counts_the_weights_of_a_folder_from_its_headers(tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plan = planned(0, "model.scratch=none", f"model.path={tiny_model_dir}")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert plan.shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    engine = memory(plan, "engine-0")
    assert engine.weights == engine.copies == 4 * plan.shape.num_parameters
    assert memory(plan, "trainer-0").optimizer == 8 * plan.shape.num_parameters


def test_a_model_that_is_not_there_yet_is_told_as_unknown() -> None:
    config = load("model.scratch=none", "model.path=org/name")
    plan = make_plan(config, [])
    assert "model: not on disk yet" in plan_text(plan, config)
    refuse_what_cannot_fit(plan, config)


def test_threads_do_not_depend_on_the_number_of_engines_nor_on_turns() -> None:
    one, two = load("rollout.num_engines=1"), load("rollout.num_engines=2")
    assert engine_threads(one) == engine_threads(two)
    assert trainer_threads(one) >= trainer_threads(two) >= 1
    turns, apart = load(*TURNS), load(*ON_CPU, ZERO)
    assert (trainer_threads(turns), engine_threads(turns)) == (trainer_threads(apart), engine_threads(apart))


def test_what_a_trainer_holds_depends_on_its_ranks_its_type_and_its_adapters() -> None:
    whole, third = (memory(planned(0, *more), "trainer-0") for more in ([], ["trainer.world_size=3"]))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(third, name) == pytest.approx(getattr(whole, name) / 3, rel=0.01)
    assert third.activations == whole.activations
    assert memory(planned(0, "trainer.lora={rank: 2}"), "trainer-0").optimizer < whole.optimizer
    plan = planned(1, "placement.rollout=cpu", "model.dtype=bfloat16")
    trainer, num = memory(plan, "trainer-0"), plan.shape.num_parameters
    assert (trainer.weights, trainer.optimizer) == (2 * num, (4 + 8) * num), "masters are float32"


def test_in_turns_a_device_needs_the_largest_of_its_phases_and_not_their_sum() -> None:
    apart, turns = planned(0, *ON_CPU, ZERO), planned(0, "placement.trainer=cpu", *TURNS)
    trainer, engine = memory(turns, "trainer-0"), memory(turns, "engine-0")
    assert engine.copies == 0, "no second set of weights: chunks go into the one that is awake"
    assert turns.peak_bytes("cpu") == {
        "generation": engine.weights + engine.kv,
        "training": trainer.total,
        "publish": trainer.weights + engine.weights + memory(turns, "staging").total,
    }
    both = trainer.total + engine.total + engine.weights + memory(apart, "staging").total
    assert set(apart.peak_bytes("cpu").values()) == {both}
    assert memory(turns, "staging").total == engine.weights, "the model is smaller than a chunk"
    assert memory(planned(0, *TURNS, "weight_sync.chunk_bytes=1048576"), "staging").total == 2**20


def test_turns_on_a_cuda_device_keep_the_trainers_state_on_the_host_meanwhile() -> None:
    plan = planned(1, ZERO)
    by_name = {process.name: process for process in plan.processes}
    trainer, host = memory(plan, "trainer-0"), by_name["offloaded"]
    places = [by_name[name].device for name in ("trainer-0", "engine-0", "staging", "offloaded")]
    assert places == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert host.held_bytes("generation", "colocated") == trainer.weights + trainer.optimizer
    assert host.held_bytes("publish", "colocated") == trainer.optimizer
    assert host.held_bytes("training", "colocated") == 0


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "words"),
    [
        (0, TURNS, "colocated on cpu, in turns: weights go through shared memory in chunks of 256.0 MiB"),
        (1, TURNS, "colocated on cuda:0, in turns: weights go by CUDA IPC on cuda:0 in chunks"),
        (3, [], "apart (trainer on cuda:0, engines on cuda:1): all weights go as one file in shared"),
        (3, [], "not used: cuda:2"),
        (0, ["trainer.lora={rank: 2}", "weight_sync.transport=lora"], "the adapters alone go as one file"),
        (1, TURNS, "training [\\d.]+ MiB, publish .*; 16.00 GiB free"),
        (0, ["rollout.engine=simulated"], "simulated, 64 sequences at once"),
        (0, URLS, "not started by the run, 64 sequences at once"),
    ],
)
def test_the_plan_says_how_weights_travel_and_what_each_device_needs(
    num_cuda: int, overrides: list[str], words: str
) -> None:
    text = plan_text(planned(num_cuda, *overrides), load(*overrides))
    assert words in text or re.search(words, text), text


# ---- vLLM


@pytest.fixture
def vllm(tmp_path: Path) -> list[str]:
    return [VLLM, f"rollout.vllm_python={make_python(tmp_path / 'python')}"]


def test_the_plan_of_a_vllm_counts_no_second_set_of_weights_and_a_line_a_device(vllm: list[str]) -> None:
    assert memory(planned(0, *vllm), "engine-0").copies == 0, "it reads what is staged where it lies"
    split = planned(3, *vllm, "rollout.tensor_parallel=2")
    parts = [(process.name, process.device) for process in split.processes if process.side == "engine"]
    assert parts == [("engine-0", "cuda:1"), ("engine-0/1", "cuda:2")]
    text = plan_text(split, load(*vllm, "rollout.tensor_parallel=2"))
    assert "1 / 2 of vLLM, weights, KV cache of 64 x 56 tokens" in text
    assert f"vLLM's is {split.vllm_python}" in text


def test_the_kv_cache_of_vllm_on_the_cpu_has_whole_blocks_and_a_floor(vllm: list[str]) -> None:
    token_bytes = 2 * 4 * 2 * 32 * 4
    many = planned(0, *vllm, "rollout.slots=1000", "rollout.max_tokens=140")
    assert memory(planned(0, *vllm, "rollout.slots=1"), "engine-0").kv == 2**26
    assert memory(many, "engine-0").kv == (2 * 1000 + 1) * 128 * token_bytes


def test_servers_that_the_run_did_not_start_need_no_vllm_here_but_for_the_evaluation(vllm: list[str]) -> None:
    assert planned(0, *URLS, "rollout.vllm_python=/no/such").vllm_python is None
    with pytest.raises(ConfigError, match="is no program"):
        planned(0, *URLS, "rollout.vllm_python=/no/such", EVAL)
    assert planned(0, *URLS, *vllm, EVAL).vllm_python is not None


# ---- what cannot fit

HIDDEN, SLOT = "model.scratch.architecture.hidden_size", "rollout.slots=1"
SMALL = [SLOT, f"{HIDDEN}=256", "trainer.gradient_checkpointing=true"]
WIDE = [*SMALL, f"{HIDDEN}=1024", "trainer.micro_batch_tokens=56"]


@pytest.mark.parametrize(
    ("device", "gib", "overrides", "setting"),
    [
        ("cpu", 1.0, ["rollout.slots=4000000"], r"rollout.slots=\d+"),
        ("cpu", 0.06, ON_CPU, "trainer.gradient_checkpointing=true"),
        ("cpu", 0.045, [*ON_CPU, *SMALL], r"trainer.micro_batch_tokens=\d+"),
        ("cpu", 0.12, [*ON_CPU, *WIDE], "placement.rollout=trainer with buffer.max_staleness=0"),
        ("cpu", 0.08, [*ON_CPU, *TURNS, *WIDE], "trainer.lora={rank: 16}"),
        ("cuda:0", 1.0, [ZERO, "rollout.slots=100000"], r"rollout.slots=\d+"),
        ("cuda:0", 0.25, [ZERO], r"trainer\.\S+"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_a_setting_that_does(
    device: str, gib: float, overrides: list[str], setting: str
) -> None:
    def check(*values: str) -> None:
        plan = planned(0 if device == "cpu" else 1, *values)
        free = {**plan.free_bytes, "cpu": 2**40, device: int(gib * 2**30)}
        refuse_what_cannot_fit(replace(plan, free_bytes=free), load(*values))

    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    numbers = rf"needs [\d.]+ [GM]iB of memory on {device} \(.* [GM]iB\), and [\d.]+ [GM]iB are free"
    assert re.search(numbers, caught.value.what)
    assert re.fullmatch(f"({setting}) fits.", caught.value.way_out)
    check(*overrides, *caught.value.way_out.removesuffix(" fits.").split(" with "))


def test_what_no_setting_makes_fit_is_refused_and_what_is_not_known_is_not() -> None:
    huge = [*ON_CPU, f"{HIDDEN}=32768", "model.scratch.architecture.num_hidden_layers=80"]
    with pytest.raises(ConfigError, match="take a smaller model"):
        refuse_what_cannot_fit(planned(0, *huge), load(*huge))
    config = load(ZERO, "rollout.slots=1000", "rollout.max_tokens=100000000")
    plan = make_plan(config, cuda_devices(1, free_bytes=None))
    refuse_what_cannot_fit(plan, config)
    assert "free is not known (no nvidia-smi)" in plan_text(plan, config)


# ---- connections


SetLimits = Callable[[int, int], None]
CONCURRENT = [EVAL, "generator.concurrency=28230"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SetLimits:
    """Set the hard limit of descriptors and the number of ports."""

    def set_limits(descriptors: int, ports: int) -> None:
        (tmp_path / "range").write_text(f"1024\t{1023 + ports}\n")
        monkeypatch.setattr(fit, "PORT_RANGE", tmp_path / "range")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, descriptors))

    return set_limits


@pytest.mark.parametrize(
    ("descriptors", "ports", "name", "overrides", "what", "setting"),
    [
        (855, 28232, "quickstart", ["rollout.slots=300"], "needs 856 descriptors", "rollout.slots=299"),
        (4096, 28232, "agent", [], "8192 for the gateway", "gateway.max_connections=3776"),
        (-1, 28232, "quickstart", ["rollout.slots=28500"], "28500 to each engine", "rollout.slots=28232"),
        (-1, 28232, "agent", CONCURRENT, "28240 connections to the g", "generator.concurrency=28222"),
    ],
)
def test_a_run_that_needs_more_connections_than_there_are_is_refused_with_a_setting_that_does_not(
    machine: SetLimits, descriptors: int, ports: int, name: str, overrides: list[str], what: str, setting: str
) -> None:
    machine(descriptors, ports)
    engines = ["rollout.num_engines=2"] if name == "quickstart" else []
    with pytest.raises(ConfigError, match=what) as caught:
        refuse_too_many_connections(load(*engines, *overrides, name=name))
    assert caught.value.way_out.endswith(f"write {setting}.")
    refuse_too_many_connections(load(*engines, *overrides, setting, name=name))


def test_the_shipped_configs_fit_where_the_hard_limit_is_large(machine: SetLimits) -> None:
    machine(65536, 28232)
    for name in ("agent", "quickstart", "smollm2"):
        refuse_too_many_connections(load(name=name))
