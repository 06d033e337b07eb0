"""The plan of a run, from files alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import CudaDevice
from asyncrl.placement.fit import refuse_what_cannot_fit
from asyncrl.placement.memory_plan import Memory, ProcessPlan, peak_bytes
from asyncrl.placement.plan import Plan, engine_threads, make_plan, plan_text, trainer_threads

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def quickstart(overrides: Sequence[str] = ()) -> RunConfig:
    """Wherever there is room, and not where the file says."""
    return load_config(QUICKSTART, ["placement.trainer=auto", "placement.rollout=auto", *overrides])


ON_CPU = ["placement.trainer=cpu", "placement.rollout=cpu"]
IN_TURNS = ["placement.rollout=trainer", "buffer.max_staleness=0"]


def memory(process: ProcessPlan) -> Memory:
    assert process.memory is not None
    return process.memory


def process(plan: Plan, name: str) -> ProcessPlan:
    return next(process for process in plan.processes if process.name == name)


def test_the_plan_counts_the_weights_of_a_folder_from_its_headers(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config_path = tmp_path / "c.yaml"
    config_path.write_text(
        f"model: {{path: {tiny_model_dir}}}\ntask: {{files: [d.jsonl], reward: 'a:b'}}\nrollout: {{slots: "
        f"4}}\n"
    )
    plan = make_plan(load_config(config_path))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    engine = memory(process(plan, "engine-0"))
    assert engine.weights == engine.copies == 4 * plan.num_parameters
    assert memory(process(plan, "trainer-0")).optimizer == 8 * plan.num_parameters


def test_a_scratch_model_is_estimated_within_a_few_percent() -> None:
    config = quickstart()
    plan = make_plan(config, [])
    assert plan.num_parameters == pytest.approx(0.8e6, rel=0.5)
    assert "engine-0" in plan_text(plan, config)


def test_a_model_that_is_not_there_yet_is_told_as_unknown(tmp_path: Path) -> None:
    config_path = tmp_path / "c.yaml"
    config_path.write_text("model: {path: org/name}\ntask: {files: [d.jsonl], reward: 'a:b'}\n")
    config = load_config(config_path)
    plan = make_plan(config, [])
    assert plan.num_parameters is None
    assert "not on disk yet" in plan_text(plan, config)
    assert "cannot be added up before the model is there" in plan_text(plan, config)
    refuse_what_cannot_fit(plan, config)


def test_threads_of_an_engine_do_not_depend_on_the_number_of_engines() -> None:
    one = load_config(ROOT / "configs" / "quickstart.yaml", ["rollout.num_engines=1"])
    two = load_config(ROOT / "configs" / "quickstart.yaml", ["rollout.num_engines=2"])
    assert engine_threads(one) == engine_threads(two)
    assert trainer_threads(one) >= trainer_threads(two) >= 1


def test_the_ranks_of_a_trainer_share_its_state_and_its_threads() -> None:
    one = make_plan(load_config(ROOT / "configs" / "quickstart.yaml", ["trainer.threads=auto"]))
    three = make_plan(
        load_config(ROOT / "configs" / "quickstart.yaml", ["trainer.threads=auto", "trainer.world_size=3"])
    )
    whole = process(one, "trainer-0")
    ranks = [process for process in three.processes if process.side == "trainer"]
    assert [rank.name for rank in ranks] == ["trainer-0", "trainer-1", "trainer-2"]
    for rank in ranks:
        assert memory(rank).weights == pytest.approx(memory(whole).weights / 3, rel=0.01)
        assert memory(rank).gradients == pytest.approx(memory(whole).gradients / 3, rel=0.01)
        assert memory(rank).optimizer == pytest.approx(memory(whole).optimizer / 3, rel=0.01)
        assert memory(rank).activations == memory(whole).activations
        assert rank.threads == max(1, whole.threads // 3)


def test_a_run_that_cannot_fit_is_refused_with_the_numbers_and_the_nearest_setting() -> None:
    config = quickstart(["rollout.slots=4000000", *ON_CPU])
    with pytest.raises(
        ConfigError,
        match=r"needs [\d.]+ GiB of memory \(trainer-0 .*, engine-0 .*\), and [\d.]+ GiB are free",
    ) as caught:
        refuse_what_cannot_fit(make_plan(config), config)
    (slots,) = re.findall(r"rollout.slots=(\d+) fits", caught.value.way_out)
    assert int(slots) > 1000
    refuse(
        gib=1.0,
        overrides=["rollout.slots=4000000"],
        fits=lambda way_out: [find(r"rollout.slots=\d+ fits", way_out)],
    )


def find(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    return str(found).removesuffix(" fits")


def refuse(
    gib: float, overrides: list[str], fits: Callable[[str], list[str]], device: str = "cpu"
) -> ConfigError:
    """The refusal of a machine with so much free memory on `device`; the setting that it names must really
    fit.
    """
    cuda = [CudaDevice("0", 2**40)] if device != "cpu" else []

    def checked(values: list[str]) -> None:
        config = quickstart(values)
        plan = make_plan(config, cuda)
        free = {**plan.free_bytes, "cpu": 2**40, device: int(gib * 2**30)}
        refuse_what_cannot_fit(replace(plan, free_bytes=free), config)

    with pytest.raises(ConfigError) as caught:
        checked(overrides)
    checked([*overrides, *fits(caught.value.way_out)])
    return caught.value


def test_activations_that_do_not_fit_are_made_smaller_first_by_checkpointing_then_by_smaller_micro_batches() -> (  # noqa: E501
    None
):
    fits = lambda way_out: [find(r"trainer\.\S+ fits", way_out)]  # noqa: E731
    error = refuse(gib=0.06, overrides=ON_CPU, fits=fits)
    assert error.way_out.startswith("trainer.gradient_checkpointing=true fits")
    smaller = [
        "trainer.gradient_checkpointing=true",
        "model.scratch.architecture.hidden_size=256",
        "rollout.slots=1",
    ]
    error = refuse(gib=0.045, overrides=[*ON_CPU, *smaller], fits=fits)
    assert re.match(r"trainer.micro_batch_tokens=\d+ fits, and changes no result", error.way_out)


def test_turns_are_offered_where_both_sides_fit_alone_and_not_together() -> None:
    wide = [
        "model.scratch.architecture.hidden_size=1024",
        "trainer.gradient_checkpointing=true",
        "trainer.micro_batch_tokens=56",
    ]
    error = refuse(
        gib=0.12,
        overrides=[*ON_CPU, *wide, "rollout.slots=1"],
        fits=lambda way_out: re.findall(r"(?:placement|buffer)\.\S+=\w+", way_out),
    )
    assert error.way_out.startswith(
        "placement.rollout=trainer with buffer.max_staleness=0 fits: trainer and engines take turns"
    )


def test_a_model_too_large_to_train_may_still_have_adapters() -> None:
    wide = [
        "model.scratch.architecture.hidden_size=1024",
        "trainer.gradient_checkpointing=true",
        "trainer.micro_batch_tokens=56",
    ]
    fits = lambda way_out: [find(r"trainer.lora={.*} fits", way_out)]  # noqa: E731
    error = refuse(gib=0.08, overrides=[*ON_CPU, *IN_TURNS, *wide, "rollout.slots=1"], fits=fits)
    assert error.way_out.startswith("trainer.lora={rank: 16} fits")


def test_a_model_too_large_for_adapters_too_is_refused() -> None:
    wide = [
        "model.scratch.architecture.hidden_size=32768",
        "model.scratch.architecture.intermediate_size=131072",
    ]
    config = quickstart([*wide, "model.scratch.architecture.num_hidden_layers=80", *ON_CPU])
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(make_plan(config), config)
    assert caught.value.way_out == (
        "even trainer.lora={rank: 16}, which trains adapters alone, does not fit: take a smaller model, or "
        "more memory."
    )


def test_adapters_need_no_optimizer_state_of_the_model() -> None:
    full = make_plan(quickstart(), [])
    lora = make_plan(quickstart(["trainer.lora={rank: 2}"]), [])
    assert memory(process(lora, "trainer-0")).optimizer < memory(process(full, "trainer-0")).optimizer


def test_float32_masters_move_with_the_optimizer_where_the_model_is_bfloat16() -> None:
    plan = make_plan(quickstart(["placement.rollout=cpu", "model.dtype=bfloat16"]), [CudaDevice("0", 2**34)])
    assert plan.num_parameters is not None
    trainer = memory(process(plan, "trainer-0"))
    assert trainer.weights == 2 * plan.num_parameters
    assert trainer.optimizer == (4 + 8) * plan.num_parameters


def test_in_turns_a_device_needs_the_largest_of_its_phases_and_not_their_sum() -> None:
    apart = make_plan(quickstart([*ON_CPU, "buffer.max_staleness=0"]), [])
    turns = make_plan(quickstart(["placement.trainer=cpu", *IN_TURNS]), [])
    trainer, engine = memory(process(turns, "trainer-0")), memory(process(turns, "engine-0"))
    assert engine.copies == 0, "no second set of weights: chunks go into the one that is awake"
    needs = peak_bytes(turns.processes, "cpu", "colocated")
    assert needs["generation"] == engine.weights + engine.kv
    assert needs["training"] == trainer.total
    assert needs["publish"] == trainer.weights + engine.weights + memory(process(turns, "staging")).total
    assert set(peak_bytes(apart.processes, "cpu", "apart").values()) == {
        trainer.total + engine.total + engine.weights + memory(process(apart, "staging")).total
    }


def test_a_chunk_is_all_that_publishing_adds_in_turns() -> None:
    small = make_plan(quickstart([*IN_TURNS, "weight_sync.chunk_bytes=1048576"]), [])
    assert memory(process(small, "staging")).total == 2**20
    whole = make_plan(quickstart(IN_TURNS), [])
    assert memory(process(whole, "staging")).total == memory(process(whole, "engine-0")).weights, (
        "the model is smaller than a chunk"
    )


def test_turns_on_a_cuda_device_keep_the_trainers_state_on_the_host_meanwhile() -> None:
    config = quickstart(["buffer.max_staleness=0"])
    plan = make_plan(config, [CudaDevice("0", 2**30)])
    trainer, host = memory(process(plan, "trainer-0")), process(plan, "offloaded")
    assert process(plan, "engine-0").device == process(plan, "trainer-0").device == "cuda:0"
    assert (host.device, process(plan, "staging").device) == ("cpu", "cuda:0"), (
        "a chunk is in memory that both sides open"
    )
    assert host.held_bytes("generation", "colocated") == trainer.weights + trainer.optimizer, (
        "gradients are dropped"
    )
    assert host.held_bytes("publish", "colocated") == trainer.optimizer
    assert host.held_bytes("training", "colocated") == 0


def test_a_phase_that_does_not_fit_on_a_cuda_device_is_named() -> None:
    fits = lambda way_out: [find(r"rollout.slots=\d+ fits", way_out)]  # noqa: E731
    error = refuse(
        gib=1.0, overrides=["buffer.max_staleness=0", "rollout.slots=100000"], fits=fits, device="cuda:0"
    )
    assert re.match(
        r"generation needs [\d.]+ GiB of memory on cuda:0 \(engine-0 [\d.]+ GiB, staging [\d.]+ MiB\), and "
        r"1.00 GiB are free",
        error.what,
    )
    fits = lambda way_out: [find(r"trainer\.\S+ fits", way_out)]  # noqa: E731
    error = refuse(gib=0.25, overrides=["buffer.max_staleness=0"], fits=fits, device="cuda:0")
    assert re.match(
        r"training needs [\d.]+ MiB of memory on cuda:0 \(trainer-0 [\d.]+ MiB, staging [\d.]+ MiB\), and "
        r"256.0 MiB are free",
        error.what,
    )


def test_a_device_whose_memory_is_not_known_is_told_and_not_refused() -> None:
    config = quickstart(["buffer.max_staleness=0", "rollout.slots=1000", "rollout.max_tokens=100000000"])
    plan = make_plan(config, [CudaDevice("0", None)])
    refuse_what_cannot_fit(plan, config)
    assert "free is not known (no nvidia-smi)" in plan_text(plan, config)


def test_the_plan_says_how_weights_travel_and_why() -> None:
    def told(overrides: list[str], num_cuda: int) -> str:
        config = quickstart(overrides)
        return plan_text(
            make_plan(config, [CudaDevice(str(number), 2**34) for number in range(num_cuda)]), config
        )

    loads = (
        "an engine that has just woken has room for one set of weights, and chunks are loaded straight "
        "into it"
    )
    assert (
        "mode: colocated on cpu, in turns: weights go through shared memory in chunks of 256.0 MiB, because "
        "both sides have it mapped, and "
        f"{loads}\n" in told(IN_TURNS, 0)
    )
    assert (
        "mode: colocated on cuda:0, in turns: weights go by CUDA IPC in chunks of 256.0 MiB, because both "
        "sides are on cuda:0 (NCCL cannot "
        f"connect two processes on one device), and {loads}\n" in told(IN_TURNS, 1)
    )
    apart = told([], 3)
    assert (
        "mode: apart (trainer on cuda:0, engines on cuda:1): all weights go as one file in shared memory"
        in apart
    )
    assert "not used: cuda:2" in apart
    assert "the adapters alone go as one file" in told(
        ["trainer.lora={rank: 2}", "weight_sync.transport=lora"], 0
    )


def test_the_table_has_a_line_a_device_with_the_phases_where_they_differ() -> None:
    config = quickstart(IN_TURNS)
    lines = plan_text(make_plan(config, [CudaDevice("0", 2**34)]), config).splitlines()
    (device,) = [line for line in lines if line.startswith("memory of cuda:0")]
    assert re.fullmatch(
        r"memory of cuda:0: (.+), the most of generation .+, training \1, publish .+; 16.00 GiB free", device
    )
    header = next(line for line in lines if line.startswith("process"))
    assert header.split() == [
        "process",
        "device",
        "threads",
        "weights",
        "copies",
        "gradients",
        "optimizer",
        "activations",
        "kv",
        "what",
    ]


def test_the_numbers_of_threads_do_not_depend_on_turns() -> None:
    turns, apart = quickstart(IN_TURNS), quickstart([*ON_CPU, "buffer.max_staleness=0"])
    assert trainer_threads(turns) == trainer_threads(apart)
    assert engine_threads(turns) == engine_threads(apart)
