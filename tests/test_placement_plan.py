"""What a run settles before it starts: its plan, from files alone, the type of its weights, vLLM's Python;
and what is refused because it cannot fit.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from placement_cases import EVAL, OWN, TURNS, URLS, VLLM, load, machine, make_python, placed

from asyncrl.config import RolloutConfig
from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS
from asyncrl.errors import ConfigError
from asyncrl.placement import fit
from asyncrl.placement import machine as machine_module
from asyncrl.placement.devices import place
from asyncrl.placement.fit import (
    find_python,
    find_version,
    import_folder,
    needed_python,
    refuse_too_many_connections,
    refuse_what_cannot_fit,
    settle,
    settle_share,
    start_words,
)
from asyncrl.placement.plan import OWN_BYTES, Plan, engine_threads, make_plan, trainer_threads
from asyncrl.placement.plan_text import plan_text, transport_text
from asyncrl.placement.process_memory import PHASES, Memory

ON_CPU = ["placement.trainer=cpu", "placement.rollout=cpu"]
ZERO = "buffer.max_staleness=0"


def planned(num_cuda: int, *overrides: str) -> Plan:
    return make_plan(load(*overrides), machine(num_cuda))


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
    plan = make_plan(config, machine(0))
    assert "model: not on disk yet" in (text := plan_text(plan, config))
    assert "; `hf download org/name config.json` is enough for that" in text
    at_v1 = plan_text(plan, load("model.scratch=none", "model.path=org/name", "model.revision=v1"))
    assert "`hf download org/name config.json --revision v1`" in at_v1
    assert "memory of cpu: what is needed is not known" in text
    refuse_what_cannot_fit(plan, config)


def test_threads_do_not_depend_on_the_number_of_engines_nor_on_turns() -> None:
    one, two = load("rollout.num_engines=1"), load("rollout.num_engines=2")
    assert engine_threads(one) == engine_threads(two)
    assert trainer_threads(one) >= trainer_threads(two) >= 1
    scaled = load("rollout.num_engines={min: 1, max: 2}")
    assert trainer_threads(scaled) == trainer_threads(two), "threads are given at the start, for the most"
    turns, apart = load(*TURNS), load(*ON_CPU, ZERO)
    assert (trainer_threads(turns), engine_threads(turns)) == (trainer_threads(apart), engine_threads(apart))


def test_a_range_of_engines_has_places_and_memory_for_the_most_and_says_which_are_parked() -> None:
    plan, most = (
        planned(3, "rollout.num_engines={min: 1, max: 3, start: 2}"),
        planned(3, "rollout.num_engines=3"),
    )
    assert plan.placement == most.placement
    notes = {one.name: "parked at first" in one.note for one in plan.processes if one.side == "engine"}
    assert notes == {"engine-0": False, "engine-1": False, "engine-2": True}
    assert [one.memory for one in plan.processes] == [one.memory for one in most.processes]


def test_what_a_trainer_holds_depends_on_its_ranks_its_type_and_its_adapters() -> None:
    whole, third = (memory(planned(0, *more), "trainer-0") for more in ([], ["trainer.world_size=3"]))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(third, name) == pytest.approx(getattr(whole, name) / 3, rel=0.01)
    shape = planned(0).shape
    gathered = shape.gathered_bytes(4, 3, is_trained=True)
    step = {
        is_trained: shape.step_bytes(
            CPU_MICRO_BATCH_TOKENS, 4, "cpu", is_checkpointed=False, is_trained=is_trained
        )
        for is_trained in (True, False)  # FSDP has the head's gradient in what is gathered
    }
    assert whole.activations == step[True]
    assert third.activations == step[False] + gathered
    adapted, merged, asked = (
        memory(planned(0, f"trainer.lora={{rank: 2, merge: {when}}}"), "trainer-0")
        for when in ("pass", "auto", "step")
    )
    assert adapted.optimizer < whole.optimizer
    assert merged == asked == replace(adapted, copies=4 * planned(0).shape.num_linear)
    plan = planned(1, "placement.rollout=cpu", "model.dtype=bfloat16")
    trainer, num = memory(plan, "trainer-0"), plan.shape.num_parameters
    assert (trainer.weights, trainer.optimizer) == (4 * num, 8 * num), "float32 shards of a mesh of one rank"
    trainer = memory(planned(0, *ON_CPU, "model.dtype=bfloat16"), "trainer-0")
    assert (trainer.weights, trainer.optimizer) == (2 * num, (4 + 8) * num), "masters are float32"


@pytest.mark.parametrize("more", [[], ["trainer.lora={rank: 2}"], ["algorithm.kl_coefficient=0.1"]])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_offloaded_trainer_has_its_state_on_the_host_and_a_step_on_its_device(
    world_size: int, more: list[str]
) -> None:
    more = [*more, ZERO, f"trainer.world_size={world_size}", "model.dtype=bfloat16"]
    more += ["placement.trainer=all", "placement.rollout=trainer", f"rollout.num_engines={world_size}"]
    here, away = (planned(world_size, *more, *also) for also in ([], ["trainer.cpu_offload=true"]))
    whole, step, state = memory(here, "trainer-0"), memory(away, "trainer-0"), memory(away, "trainer-0/host")
    assert step == Memory(activations=step.activations)
    pinned = replace(whole, weights=2 * whole.weights, copies=2 * whole.copies, gradients=2 * whole.gradients)
    assert replace(state, activations=step.activations) == pinned or "lora" in more[0]
    assert (state.weights, state.optimizer) == (2 * whole.weights, whole.optimizer)
    assert "offloaded" not in {process.name for process in away.processes}, "turns have nothing to move"
    host = next(process for process in away.processes if process.name == "trainer-0/host")
    held = {phase: host.held_bytes(phase, "colocated") for phase in PHASES}
    assert held == dict.fromkeys(PHASES, state.total) | {"start": state.weights + state.copies}


def test_a_run_with_checkpoints_has_a_copy_of_the_state_on_the_host_at_any_time() -> None:
    ranks = ["trainer.world_size=2", "placement.trainer=all", "rollout.num_engines=2"]
    for overrides in ([ZERO], [*TURNS, *ranks, SHARE], ["placement.rollout=cpu"]):
        plan = planned(2, *overrides)
        saved = next(process for process in plan.processes if process.name == "checkpoint")
        assert (saved.device, saved.memory.total) == ("cpu", 12 * plan.shape.num_parameters)
        after = [phase for phase in PHASES if phase != "start"]
        assert {saved.held_bytes(phase, plan.placement.mode) for phase in after} == {saved.memory.total}
        without = planned(2, *overrides, "checkpoint.every=none")
        assert "checkpoint" not in {process.name for process in without.processes}
    assert memory(planned(2, ZERO, "trainer.lora={rank: 2}"), "checkpoint").total < saved.memory.total / 2
    moving = planned(2, *TURNS, *ranks)
    names = {process.name for process in moving.processes}
    assert "checkpoint" not in names, "it can be written from where turns have the state"
    assert "offloaded" in names


def test_in_turns_a_device_needs_the_largest_of_its_phases_and_not_their_sum() -> None:
    apart, turns = planned(0, *ON_CPU, ZERO), planned(0, "placement.trainer=cpu", *TURNS)
    trainer, engine = memory(turns, "trainer-0"), memory(turns, "engine-0")
    saved = memory(turns, "checkpoint").total
    assert engine.copies == 0, "no second set of weights: chunks go into the one that is awake"
    assert turns.peak_bytes("cpu") == {
        "start": trainer.weights,
        "generation": engine.total + saved,
        "training": trainer.total + saved,
        "publish": trainer.weights + engine.weights + memory(turns, "staging").total + saved,
    }
    both = saved + trainer.total + engine.total + engine.weights + memory(apart, "staging").total
    assert {apart.peak_bytes("cpu")[phase] for phase in ("generation", "training", "publish")} == {both}
    assert apart.peak_bytes("cpu")["start"] == trainer.weights + engine.total + engine.weights
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


# ---- both sides in the memory of one device

SHARE, SIZED = "placement.share=0.4", "rollout.vllm={gpu_memory_utilization: 0.9}"


@pytest.mark.parametrize(
    ("num_cuda", "free", "overrides", "stays", "words"),
    [
        (0, None, TURNS, True, "auto: both sides stay on cpu: they fit"),
        (0, 2**30, TURNS, False, "auto: each side moves out .*: beside each other they do not fit cpu"),
        (0, None, [*TURNS, "placement.share=none"], False, "share=none: each side moves out"),
        (1, 2**34, [ZERO], True, r"auto: both sides stay on cuda:0, the engines with 0\.\d+ of it: they fit"),
        (1, 2**30, [ZERO], False, "beside each other they do not fit cuda:0"),
        (1, None, [ZERO], False, "what cuda:0 has is not known"),
        (1, 2**34, [ZERO, VLLM, SIZED], False, "rollout.vllm.gpu_memory_utilization says what the engines"),
        (
            1,
            2**34,
            [ZERO, "model.scratch=none", "model.path=org/name"],
            False,
            "the size of the model is not",
        ),
        (1, 2**34, [ZERO, SHARE], True, r"share=0\.4: both sides stay on cuda:0, in turns"),
        (1, 2**34, [SHARE], False, r"share=0\.4: both sides stay on cuda:0, and work at once"),
        (2, 2**34, [ZERO], False, "^$"),
    ],
)
def test_both_sides_stay_in_turns_where_they_fit_beside_each_other_and_why_is_said(
    num_cuda: int, free: int | None, overrides: list[str], stays: bool, words: str
) -> None:
    here = machine(num_cuda, free) if num_cuda else replace(machine(0), memory=free or 2**36)
    config = load(*overrides)
    plan, told = settle_share(make_plan(config, here), config)
    assert plan.placement.stays == stays
    assert re.search(words, told), told
    is_moving = plan.placement.mode == "colocated" and not stays
    assert ("offloaded" in {one.name for one in plan.processes}) == (is_moving and num_cuda > 0)
    if stays:
        assert plan.peak_bytes(plan.placement.trainer[0])["generation"] > memory(plan, "trainer-0").total
        refuse_what_cannot_fit(plan, config)


@pytest.mark.parametrize("share", [0.01, 0.99])
@pytest.mark.parametrize("overrides", [[], [ZERO]])
def test_a_share_in_which_a_side_does_not_fit_is_refused_with_one_in_which_both_do(
    share: float, overrides: list[str]
) -> None:
    def check(*more: str) -> None:
        config = load(*overrides, *more)
        plan, _ = settle_share(make_plan(config, machine(1)), config)
        refuse_what_cannot_fit(plan, config)

    with pytest.raises(
        ConfigError, match=rf"share={share} of cuda:0: the engines need .*the trainer leaves"
    ) as caught:
        check(f"placement.share={share}")
    check(caught.value.way_out.removeprefix("set ").removesuffix("."))


def test_a_share_that_cannot_be_on_a_device_is_refused_with_turns_that_can() -> None:
    def check(*more: str) -> None:
        config = load(*more)
        plan, _ = settle_share(make_plan(config, machine(1, 2**30)), config)
        refuse_what_cannot_fit(plan, config)

    with pytest.raises(ConfigError, match=r"placement.share=0\.4 of cuda:0|on cuda:0") as caught:
        check(SHARE)
    assert "share=auto" in caught.value.way_out
    check(SHARE, *caught.value.way_out.removesuffix(" fits.").split(" with "))


EXPERTS = "model.scratch.architecture.num_experts=4"


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "num_models", "num_tensors"),
    [
        (0, [], 0, 0),
        (3, ["model.dtype=float32"], 1, 0),
        (3, ["model.dtype=bfloat16"], 0, 1),
        (3, ["model.dtype=bfloat16", "trainer.lora={rank: 2}"], 0.5, 0),
        (3, ["trainer.world_size=2"], 0, 2),
        (3, ["trainer.world_size=2", EXPERTS], 0, 2),
        (3, ["trainer.world_size=2", EXPERTS, "algorithm.kl_coefficient=0.1"], 0, 2),
    ],
)
def test_the_start_counts_what_ranks_load_into_host_memory_before_it_is_on_their_device(
    num_cuda: int, overrides: list[str], num_models: float, num_tensors: int
) -> None:
    plan = planned(num_cuda, *overrides)
    loaded = 4 * (num_models * plan.shape.num_parameters + num_tensors * plan.shape.largest_tensor)
    held = [process.memory.total for process in plan.processes if process.side == "start"]
    assert sum(held) == loaded
    peak = plan.peak_bytes("cpu")
    assert num_cuda == 0 or peak["start"] == loaded
    if loaded > peak["generation"]:
        config, free = load(*overrides), {**plan.free_bytes, "cpu": loaded - 1}
        with pytest.raises(ConfigError, match="start needs .* of memory on cpu"):
            refuse_what_cannot_fit(replace(plan, free_bytes=free), config)


TWO_IN_TURNS = [*TURNS, "placement.trainer=all", "trainer.world_size=2", "rollout.num_engines=2"]


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "words"),
    [
        (0, TURNS, "colocated on cpu, in turns: weights go through shared memory in chunks of 256.0 MiB"),
        (1, [*TURNS, "rollout.num_engines=2"], "weights go by CUDA IPC on cuda:0 in chunks"),
        (1, [VLLM, "weight_sync.transport=ipc", *TURNS], "weights go by CUDA IPC on cuda:0 in chunks"),
        (1, [VLLM, "weight_sync.transport=shm", *TURNS], "weights go as files in shared memory"),
        (2, TWO_IN_TURNS, "cuda:0, cuda:1, in turns: weights go by CUDA IPC on cuda:0, cuda:1 in chunks"),
        (2, [*TWO_IN_TURNS, VLLM, "weight_sync.transport=ipc"], "weights go by CUDA IPC on cuda:0, cuda:1"),
        (3, [], "apart (trainer on cuda:0, engines on cuda:1): all weights go as one file in shared"),
        (3, [VLLM, "weight_sync.transport=nccl"], "go by NCCL, in one broadcast to all engines"),
        (0, ["trainer.lora={rank: 2}", "weight_sync.transport=lora"], "the adapters alone go as one file"),
    ],
)
def test_weights_travel_through_memory_that_both_sides_open_where_there_is_some(
    num_cuda: int, overrides: list[str], words: str
) -> None:
    config = load(*overrides)
    assert words in transport_text(config, place(config, num_cuda))


def test_each_device_that_both_sides_use_holds_a_chunk() -> None:
    held = [process.device for process in planned(2, *TWO_IN_TURNS).processes if process.name == "staging"]
    assert held == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "words"),
    [
        (3, [], "not used: cuda:2"),
        (1, TURNS, "training [\\d.]+ MiB, publish .*; 16.00 GiB free"),
        (0, ["rollout.engine=simulated"], "simulated, 64 sequences at once"),
        (0, URLS, "not started by the run, 64 sequences at once"),
        (0, [EVAL], "evaluation: engine-eval samples .eval.engine=auto."),
        (
            1,
            [*TURNS, EVAL],
            "evaluation: the rollout engines sample.*eval.engine=auto: no CUDA device is free",
        ),
    ],
)
def test_the_plan_says_what_each_device_needs(num_cuda: int, overrides: list[str], words: str) -> None:
    text = plan_text(planned(num_cuda, *overrides), load(*overrides))
    assert re.search(words, text), text


def test_a_version_that_is_evaluated_lies_in_host_memory_beside_the_turns() -> None:
    evaluated = next(one for one in planned(1, *TURNS, EVAL, "placement.eval=cpu").processes[::-1])
    assert (evaluated.name, evaluated.device) == ("evaluated", "cpu")
    assert [evaluated.held_bytes(phase, "colocated") for phase in PHASES] == [evaluated.memory.weights] * len(
        PHASES
    )


# ---- a model of 7 billion parameters, on described machines

H200 = 139 * 2**30
ARCHITECTURE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}
ARCHITECTURE |= {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
SEVEN = ["model.dtype=bfloat16"]
SEVEN += [f"model.scratch.architecture.{name}={value}" for name, value in ARCHITECTURE.items()]
LONG = ["rollout.slots=256", "rollout.max_tokens=32768", "rollout.max_prompt_tokens=1024"]
CHECKPOINTING = "trainer.gradient_checkpointing=true"


def on_h200(*overrides: str, free_bytes: int | None = H200) -> Plan:
    """The trainer has all that it wants on the first of two devices."""
    plan = make_plan(load(*SEVEN, *overrides), machine(2, free_bytes=free_bytes))
    return replace(plan, free_bytes={**plan.free_bytes, "cpu": 2**40, "cuda:0": 2**40})


def test_a_7b_in_turns_fits_on_one_device_with_a_host_that_has_its_state_once() -> None:
    values = [*SEVEN, *TURNS, CHECKPOINTING, "placement.share=none", "checkpoint.every=10"]
    here = replace(machine(1, free_bytes=H200), memory=128 * 2**30)
    plan = make_plan(load(*values), here)
    state = 12 * plan.shape.num_parameters
    assert 75 * 2**30 < state < 128 * 2**30 < 2 * state
    refuse_what_cannot_fit(replace(plan, free_bytes={**plan.free_bytes, "cpu": 126 * 2**30}), load(*values))


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_vllm_caches_the_latents_of_latent_attention_on_each_device(num_devices: int) -> None:
    """The embedded engine, keys and values of all heads."""
    latent = [f"model.scratch.architecture.{name}={value}" for name, value in LATENT.items()]
    values = [*SEVEN, *latent, "rollout.max_tokens=1000", "rollout.max_prompt_tokens=24", "rollout.slots=1"]
    split = [f"rollout.tensor_parallel={num_devices}"]
    layers, token = 28, 2
    paged = memory(make_plan(load(*values, VLLM, *split), machine(3)), "engine-0")
    assert paged.kv == 1024 * layers * (512 + 64) * token
    if num_devices == 1:
        slots = memory(make_plan(load(*values), machine(3)), "engine-0")
        assert slots.kv == 1024 * layers * 28 * 2 * (64 + 128) * token


def test_what_a_trainer_works_in_has_the_recomputed_layer_and_the_slices_of_the_head() -> None:
    token, layers, hidden = 2, 28, 3584
    layer = (4 * hidden + 3 * 128 * (28 + 4) + 3 * 18944) * 16384 * token
    work = 18944 * 16384 * token
    head = 2**26 * (4 + token) + 16384 * hidden * (2 * token + 4) + 16384 * hidden * 8
    adapters = "trainer.lora={rank: 16}"
    found = (memory(on_h200(adapters, *more), "trainer-0").activations for more in ([CHECKPOINTING], []))
    kept, all_kept = found
    assert kept == layers * hidden * 16384 * token + max(layer + work, head)
    assert all_kept == layers * layer + max(work, head)
    without = on_h200(adapters, "trainer.compile=false")
    eager = (8 * hidden + 5 * 128 * (28 + 4) + 4 * 18944) * 16384 * token
    assert memory(without, "trainer-0").activations == layers * (eager - layer) + all_kept + (
        max((2 * 18944 + hidden) * 16384 * token, head) - max(work, head)
    )


def test_a_trainer_on_cuda_holds_what_is_gathered_beside_what_it_works_in() -> None:
    plan = on_h200(CHECKPOINTING)
    outside = 152064 * 3584
    layer = 3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944
    assert (plan.shape.outside, plan.shape.largest_layer) == (outside, layer)
    gathered = (outside + layer) * 2 + 152064 * 3584 * 2 + layer * (2 + 4 + 4)
    adapted = memory(on_h200(CHECKPOINTING, "trainer.lora={rank: 16}"), "trainer-0").activations
    assert memory(plan, "trainer-0").activations == adapted + gathered
    two = replace(plan.shape, vocab=0).gathered_bytes(2, 2, is_trained=True)
    assert two == (outside + 2 * layer) * 2 + layer * (2 + 4 + 2), "and the next layer, on its way"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_sequence_that_is_longer_than_a_micro_batch_is_counted_as_one_of_its_own(device: str) -> None:
    where = ON_CPU if device == "cpu" else []
    counted = [
        memory(planned(2, *where, *more), "trainer-0").activations
        for more in (
            ["trainer.micro_batch_tokens=3000", "rollout.max_tokens=9992"],
            ["trainer.micro_batch_tokens=3000", "rollout.max_tokens=2992"],
        )
    ]
    assert counted[0] > 3 * counted[1]
    if device == "cuda":
        assert counted[0] == memory(planned(2, "trainer.micro_batch_tokens=10000"), "trainer-0").activations


# ---- vLLM


@pytest.fixture
def vllm(tmp_path: Path) -> list[str]:
    return [VLLM, f"rollout.vllm_python={make_python(tmp_path / 'python')}"]


def test_the_plan_of_a_vllm_counts_a_second_set_of_weights_on_the_cpu_alone_and_a_line_a_device(
    vllm: list[str],
) -> None:
    engine = memory(planned(0, *vllm), "engine-0")
    assert engine.copies == engine.weights > 0
    assert memory(planned(2, *vllm), "engine-0").copies == 0, "it reads what is staged where it lies"
    split = planned(3, *vllm, "rollout.tensor_parallel=2")
    parts = [(process.name, process.device) for process in split.processes if process.side == "engine"]
    assert parts == [("engine-0", "cuda:1"), ("engine-0/1", "cuda:2")]
    text = plan_text(split, load(*vllm, "rollout.tensor_parallel=2"))
    assert "1 / 2 of vllm: weights, KV cache of 56 tokens at least" in text
    assert f"vllm's is {vllm[1].partition('=')[2]}" in text


def test_the_kv_cache_of_vllm_on_the_cpu_has_whole_blocks(vllm: list[str]) -> None:
    token_bytes = 2 * 4 * 2 * 32 * 4
    many = [*vllm, "rollout.slots=1000", "rollout.max_tokens=140"]
    assert memory(planned(0, *many), "engine-0").kv == 2 * 1000 * 128 * token_bytes
    given = planned(0, *many, "rollout.vllm={kv-cache-memory-bytes: 123456}")
    assert memory(given, "engine-0").kv == 123456, "it takes what it is told to take"


def test_a_paged_kv_cache_must_hold_one_sequence_and_what_more_has_room_is_told(vllm: list[str]) -> None:
    plan, config = on_h200(*vllm, *LONG), load(*SEVEN, *vllm, *LONG)
    one_kv, engine = 2 * 28 * 4 * 128 * 2 * 33792, memory(plan, "engine-0")
    assert engine.kv == one_kv
    refuse_what_cannot_fit(plan, config)
    fitting = 1 + (int(0.92 * H200) - engine.total - OWN_BYTES) // one_kv
    assert 1 < fitting < 256
    words = f"about {fitting} of 256 sequences of 33792 tokens have room at once in what is left of cuda:1"
    assert words in plan_text(plan, config)
    assert words in start_words(plan, config)[1]
    few = ["rollout.slots=8", *vllm, *LONG[1:]]
    for paged, settings in ((on_h200(*few), few), (on_h200(*vllm, *LONG, free_bytes=None), [*vllm, *LONG])):
        assert len(start_words(paged, load(*SEVEN, *settings))) == 1, "all have room, or it is not known"
    too_small = replace(plan, free_bytes={**plan.free_bytes, "cuda:1": engine.total - 1})
    with pytest.raises(ConfigError, match="on cuda:1"):
        refuse_what_cannot_fit(too_small, config)
    with pytest.raises(ConfigError, match="on cuda:1"):  # the embedded one takes it at its start
        refuse_what_cannot_fit(on_h200(*LONG), load(*SEVEN, *LONG))


@pytest.mark.parametrize(
    ("overrides", "problem", "way_out"),
    [
        (["rollout.num_engines=2"], "engine-0 and engine-1 would take 1.84 of cuda:1", "utilization: 0.5}"),
        (
            [EVAL, OWN],
            "engine-0 and engine-eval would take 1.84 of cuda:1, and 1.00 of it",
            "utilization: 0.5}",
        ),
        ([EVAL], "", ""),
        (["rollout.num_engines=2", "rollout.vllm={gpu-memory-utilization: 0.5}"], "", ""),
        (
            ["rollout.vllm={gpu_memory_utilization: 0.1}"],
            "engine-0 would have 13.* of cuda:1",
            "up to 1 of it",
        ),
        ([], "", ""),
    ],
)
def test_vllms_that_together_ask_for_more_than_a_device_or_get_less_than_they_need_are_refused(
    vllm: list[str], overrides: list[str], problem: str, way_out: str
) -> None:
    settings = [*vllm, *overrides]
    plan, config = on_h200(*settings), load(*SEVEN, *settings)
    if not problem:
        refuse_what_cannot_fit(plan, config)
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        refuse_what_cannot_fit(plan, config)
    assert way_out in caught.value.way_out


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_auto_leaves_engines_that_page_what_the_trainer_has_no_use_for(engine: str, vllm: list[str]) -> None:
    config = load(ZERO, *(vllm if engine == "vllm" else ["rollout.engine=embedded"]))
    plan, _ = settle_share(make_plan(config, machine(1, 2**34)), config)
    share, total = plan.placement.share, plan.total_bytes("cuda:0")
    bounds = plan.share_bounds(1.1)
    assert bounds is not None
    assert share is not None
    assert total is not None
    if config.rollout.engine == "embedded":
        assert share == pytest.approx(sum(bounds) / 2, abs=1e-3)
    else:
        here = [one for one in plan.processes if one.device == "cuda:0"]
        others = [one for one in here if one.side not in ("engine", "start")]
        needed = sum(one.memory.total * 1.25 + OWN_BYTES * bool(one.threads) for one in others)
        assert share == pytest.approx(1 - needed / total, abs=1e-3)
    refuse_what_cannot_fit(plan, config)


def test_what_a_vllm_needs_to_load_new_weights_is_counted(vllm: list[str]) -> None:
    small = [*vllm, "rollout.vllm={enforce-eager: true, max-num-batched-tokens: 1}", "rollout.slots=1"]
    embedding = 152064 * 3584 * 2
    for chunk in (2**28, 2**30):
        work = memory(on_h200(*small, f"weight_sync.chunk_bytes={chunk}"), "engine-0").activations
        assert work == 2 * (embedding + chunk)


def test_graphs_of_a_vllm_that_compiles_are_counted(vllm: list[str]) -> None:
    eager = on_h200(*vllm, "rollout.vllm={enforce-eager: true}")
    more = memory(on_h200(*vllm), "engine-0").activations - memory(eager, "engine-0").activations
    assert more == 2**30


def test_engines_on_one_device_share_what_is_left_of_it(vllm: list[str]) -> None:
    one, two = ([*vllm, *LONG, f"rollout.num_engines={num}"] for num in (1, 2))
    first, second = (
        int(re.findall(r"about (\d+) of", start_words(on_h200(*more), load(*SEVEN, *more))[1])[0])
        for more in (one, two)
    )
    assert 2 * second <= first


def test_servers_that_the_run_did_not_start_need_no_vllm_here_but_for_the_evaluation(vllm: list[str]) -> None:
    lacking = [*URLS, "rollout.vllm_python=/no/such"]
    assert needed_python(placed(0, *lacking), load(*lacking)) is None
    with pytest.raises(ConfigError, match="/no/such cannot import vllm"):
        refuse_what_cannot_fit(planned(0, *lacking, EVAL), load(*lacking, EVAL))
    assert needed_python(placed(0, *URLS, *vllm, EVAL), load(*URLS, *vllm, EVAL)) is not None
    on_rollout = [*lacking, EVAL, "eval.engine=rollout"]
    assert needed_python(placed(0, *on_rollout), load(*on_rollout)) is None


# ---- what cannot fit

HIDDEN, SLOT = "model.scratch.architecture.hidden_size", "rollout.slots=1"
SMALL = [SLOT, f"{HIDDEN}=256", "trainer.gradient_checkpointing=true"]
WIDE = [*SMALL, f"{HIDDEN}=1024", "trainer.micro_batch_tokens=56"]


@pytest.mark.parametrize(
    ("device", "gib", "overrides", "setting"),
    [
        ("cpu", 1.0, ["rollout.slots=4000000"], r"rollout.slots=\d+"),
        ("cpu", 0.1, ON_CPU, "trainer.gradient_checkpointing=true"),
        ("cpu", 0.063, [*ON_CPU, *SMALL], r"trainer.micro_batch_tokens=\d+"),
        ("cpu", 0.19, [*ON_CPU, *WIDE], "placement.rollout=trainer with buffer.max_staleness=0"),
        ("cpu", 0.12, [*ON_CPU, *TURNS, *WIDE], "checkpoint.every=none"),
        ("cpu", 0.085, [*ON_CPU, *TURNS, *WIDE], "trainer.lora={rank: 16, merge: pass}"),
        ("cpu", 0.1, [*ON_CPU, *TURNS, *WIDE, "trainer.lora={rank: 16}"], "trainer.lora.merge=pass"),
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
    plan = make_plan(config, machine(1, free_bytes=None))
    refuse_what_cannot_fit(plan, config)
    assert "free is not known (no nvidia-smi)" in plan_text(plan, config)


# ---- what a run promises of its tokens

FOUR = "buffer.max_staleness=4"
ALONE, CHANGE = "depend on its prompt, seed and weights alone", "may change with what runs beside it"


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "is_on", "words"),
    [
        (0, [FOUR], True, f"auto is true: a request's tokens {ALONE}, as the engine checks"),
        (0, [FOUR, "rollout.deterministic=true"], True, f": true: a request's tokens {ALONE}"),
        (0, [ZERO, "rollout.deterministic=false"], False, f": false: a request's tokens {CHANGE}"),
        (1, [ZERO], False, f"auto is false: a request's tokens {CHANGE}"),
        (2, [FOUR], False, f"auto is false: a request's tokens {CHANGE}"),
        (0, [ZERO, VLLM], False, f"auto is false: a request's tokens {CHANGE}"),
        (
            2,
            [ZERO, VLLM, "placement.rollout=1"],
            True,
            f"auto is true: a request's tokens {ALONE}, by vLLM's",
        ),
        (2, [FOUR, VLLM], False, f"auto is false: a request's tokens {CHANGE}"),
        (2, [FOUR, VLLM, "rollout.deterministic=true"], True, ": true: .* by vLLM's batch-invariant kernels"),
        (0, URLS, False, "how rollout.urls were started says"),
    ],
)
def test_tokens_depend_on_nothing_beside_them_where_that_costs_nothing_or_can_be_made_use_of(
    num_cuda: int, overrides: list[str], is_on: bool, words: str
) -> None:
    config = load(*overrides)
    plan = make_plan(config, machine(num_cuda))
    assert config.is_deterministic(plan.placement.rollout[0]) == is_on
    assert re.search(words, start_words(plan, config)[0])


@pytest.mark.parametrize(
    ("num_cuda", "overrides"), [(2, []), (0, [VLLM]), (0, URLS), (0, ["rollout.engine=simulated"])]
)
def test_a_promise_that_this_engine_cannot_keep_is_refused(num_cuda: int, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"rollout.deterministic=true, and .* cannot be asked") as caught:
        planned(num_cuda, *overrides, "rollout.deterministic=true")
    assert caught.value.way_out == "set rollout.deterministic=auto."
    planned(num_cuda, *overrides)


# ---- connections


TWO_ENGINES = ["rollout.num_engines=2", "rollout.slots=300"]


@pytest.mark.parametrize(
    ("limit", "name", "overrides", "what", "setting"),
    [
        (855, "quickstart", TWO_ENGINES, "needs 856 descriptors", "rollout.slots=299"),
        (4096, "agent", [], "8192 for the gateway", "gateway.max_connections=3776"),
        (8452, "agent", ["generator.concurrency=9999"], "9999 for rollouts", "generator.concurrency=4"),
    ],
)
def test_a_run_that_needs_more_descriptors_than_there_are_is_refused_with_a_setting_that_does_not(
    monkeypatch: pytest.MonkeyPatch, limit: int, name: str, overrides: list[str], what: str, setting: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, limit))
    with pytest.raises(ConfigError, match=what) as caught:
        refuse_too_many_connections(load(*overrides, name=name))
    assert caught.value.way_out.endswith(f"write {setting}.")
    refuse_too_many_connections(load(*overrides, setting, name=name))


# ---- the type of the weights


@pytest.mark.parametrize(
    ("setting", "num_cuda", "has_bf16", "dtype", "words"),
    [
        ("model.dtype=auto", 0, False, "float32", "auto is float32: this CPU has no bfloat16 instructions"),
        ("model.dtype=auto", 0, True, "bfloat16", "auto is bfloat16: this CPU has instructions for it"),
        ("model.dtype=auto", 2, False, "bfloat16", "auto is bfloat16: trainer and engines are on CUDA"),
        ("placement.rollout=cpu", 1, False, "float32", "no bfloat16 instructions"),
        ("rollout.engine=simulated", 1, False, "bfloat16", "on CUDA"),
        ("model.dtype=bfloat16", 2, False, "bfloat16", ""),
        ("model.dtype=bfloat16", 0, False, "bfloat16", "model.dtype=float32 (or auto) is faster here"),
        ("model.dtype=float32", 0, False, "float32", ""),
    ],
)
def test_auto_is_what_every_device_computes_fast_in_and_what_is_written_stays(
    setting: str, num_cuda: int, has_bf16: bool, dtype: str, words: str
) -> None:
    written = load("model.dtype=auto", "weight_sync.transport=shm", setting)
    config, told = settle(written, machine(num_cuda, has_bfloat16=has_bf16))
    assert config.model.dtype == dtype
    assert words in "".join(told)
    assert bool(words) == bool(told)


def test_a_run_that_goes_on_keeps_the_type_that_it_began_with() -> None:
    config, told = settle(load("model.dtype=auto"), begun="float32")
    assert (config.model.dtype, told[0]) == ("float32", "model.dtype: auto is float32: as the run began")


SERVED = ["rollout.urls=['http://127.0.0.1:1']", "model.scratch=none", "model.path=org/name"]
EIGHT = [VLLM, "trainer.world_size=4", "rollout.num_engines=2", "rollout.tensor_parallel=2"]


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "transport", "why"),
    [
        (0, [VLLM], "shm", "a side is on the CPU"),
        (0, TURNS, "shm", "a side is on the CPU"),
        (1, TURNS, "ipc", "trainer and engines take turns on CUDA"),
        (2, [], "nccl", "trainer and engines are on CUDA devices of their own"),
        (2, ["rollout.num_engines=2"], "shm", "several engines are on cuda:1"),
        (3, ["rollout.num_engines=2"], "nccl", "trainer and engines are on CUDA devices of their own"),
        (2, ["rollout.engine=simulated"], "shm", "rollout.engine=simulated takes part in no transfer"),
        (2, [VLLM], "nccl", "trainer and engines are on CUDA devices of their own"),
        (8, EIGHT, "nccl", "trainer and engines are on CUDA devices of their own"),
        (2, [VLLM, "trainer.lora={rank: 4}"], "nccl", "trainer and engines are on CUDA devices of their own"),
        (2, [VLLM, "weight_sync.rolling=true"], "shm", "weight_sync.rolling=true, and a broadcast"),
        (2, [VLLM, "placement.rollout=cpu"], "shm", "a side is on the CPU"),
        (2, [VLLM, *SERVED], "shm", "the run does not start the servers"),
        (2, [VLLM, "weight_sync.disk_dir=/shared"], "disk", "weight_sync.disk_dir is given"),
        (1, [VLLM, *TURNS], "ipc", "trainer and engines take turns on CUDA"),
        (1, [VLLM, *TURNS, "rollout.num_engines=2"], "ipc", "trainer and engines take turns on CUDA"),
        (2, [*TWO_IN_TURNS, VLLM], "ipc", "trainer and engines take turns on CUDA"),
    ],
)
def test_an_auto_transport_is_what_is_best_between_the_devices_of_both_sides(
    num_cuda: int, overrides: list[str], transport: str, why: str
) -> None:
    asked = load(*overrides)
    config, told = settle(asked, machine(num_cuda))
    assert config.weight_sync.settled == transport
    assert told[-1].startswith(f"weight_sync.transport: auto is {transport}: {why}")
    place(config, num_cuda)  # which auto chose is not refused
    written = asked.weight_sync.model_copy(update={"transport": transport})
    again = settle(asked.model_copy(update={"weight_sync": written}), machine(num_cuda))
    assert again[1] == told[:-1], "and may be written"
    with pytest.raises(AssertionError, match="settle"):
        _ = asked.weight_sync.settled


def test_a_copy_for_a_broadcast_that_has_no_room_is_refused_with_the_transport_that_makes_none(
    vllm: list[str],
) -> None:
    config = load(*vllm, "weight_sync.transport=nccl")
    plan = make_plan(config, machine(2))
    free = {**plan.free_bytes, "cuda:0": max(plan.peak_bytes("cuda:0").values()) - 1}
    with pytest.raises(ConfigError, match="weight_sync.transport=shm fits"):
        refuse_what_cannot_fit(replace(plan, free_bytes=free), config)


def test_the_cpu_is_asked_for_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "CPUINFO", tmp_path / "cpuinfo")
    assert not machine_module.cpu_has_bfloat16(), "it is not known"
    (tmp_path / "cpuinfo").write_text("model name\t: bf16\nflags\t\t: fpu avx2\n")
    assert not machine_module.cpu_has_bfloat16()
    for line in ("flags\t\t: fpu avx512f avx512_bf16\n", "Features\t: fp asimd bf16\n"):
        (tmp_path / "cpuinfo").write_text(line)
        assert machine_module.cpu_has_bfloat16(), line


# ---- vLLM's Python


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_python(tmp_path / "vllm" / "bin" / "python")


def test_a_python_that_is_named_must_be_there_and_have_vllm(python: Path) -> None:
    assert find_python(RolloutConfig(engine="vllm", vllm_python=str(python))) == python
    without = make_python(python.with_name("without"), exit_code=1)
    for wrong in (python.parent, without, python.with_name("nowhere")):
        with pytest.raises(ConfigError, match="cannot import vllm") as caught:
            find_python(RolloutConfig(engine="vllm", vllm_python=str(wrong)))
        assert "make setup-vllm" in caught.value.way_out


@pytest.mark.parametrize("version", ["0.32.0+cpu", ""])
def test_its_version_is_what_its_distribution_says_and_nothing_is_imported(
    tmp_path: Path, version: str
) -> None:
    packages, named = tmp_path / "packages", make_python(tmp_path / "python")
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    if version:  # else a checkout that was not installed
        (packages / "vllm-0.dist-info").mkdir()
        (packages / "vllm-0.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    named.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    assert find_version(RolloutConfig(engine="vllm", vllm_python=str(named))) == {"vllm": version}


def test_auto_takes_the_one_beside_the_checkout_or_the_folder_of_the_setup(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(make_python(tmp_path / "without", exit_code=1)))
    monkeypatch.setattr(fit, "CHECKOUT", tmp_path)
    monkeypatch.delenv("VENV_VLLM", raising=False)
    auto = RolloutConfig(engine="vllm")
    with pytest.raises(ConfigError, match="without and .* cannot import vllm"):
        find_python(auto)
    fit.version_in.cache_clear()
    (tmp_path / ".venv-vllm").symlink_to(python.parent.parent)
    assert find_python(auto) == tmp_path / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv("VENV_VLLM", str(python.parent.parent))
    assert find_python(auto) == python


def test_another_python_finds_our_two_packages_and_nothing_else_of_ours(tmp_path: Path) -> None:
    for _ in range(2):  # again, as in a run that goes on
        folder = import_folder(tmp_path / "imports")
    ask = "import asyncrl, asyncrl_servers; print(asyncrl.__file__)"
    bare = [getattr(sys, "_base_executable", sys.executable), "-S", "-c", ask]
    environ = os.environ | {"PYTHONPATH": str(folder)}
    told = subprocess.run(bare, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert Path(told.stdout.strip()).is_relative_to(folder)
