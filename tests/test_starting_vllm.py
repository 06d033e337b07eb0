"""How a vLLM server is told what to do, asked whether it is ready, and taken where somebody else started it.
Starts no vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError, EngineError, EngineLost, RoomError
from asyncrl.messages.base import EnginePart, Moved
from asyncrl.messages.engine_calls import EngineHealth
from asyncrl.placement.fork_server import KEY_ENV
from asyncrl.placement.processes import ForeignProcess
from asyncrl.run import start as startup
from asyncrl.run.colocate import SideBySide
from asyncrl.run.specs import canary_tokens, engine_spec, trainer_spec
from asyncrl.sync.publisher import Publisher
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.trainer.spec import TrainerSpec
from asyncrl_servers.vllm.arguments import VllmSpec

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
HEALTH = EngineHealth(
    name="engine-0",
    kind="vllm",
    policy_version=0,
    slots=4,
    max_length=64,
    num_running=0,
    num_queued=0,
    tokens_generated=0,
    device="cpu",
)


def load(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, ["rollout.engine=vllm", *overrides])


def spec(*overrides: str, device: str = "cpu", **knobs: Any) -> VllmSpec:
    return VllmSpec.model_validate_json(
        engine_spec(load(*overrides), Path("/model"), "engine-0", device=device, **knobs)
    )


# ---- what it is told


def test_the_server_takes_the_spec_that_it_is_given() -> None:
    told = spec("rollout.vllm={max-num-batched-tokens: 512}", "rollout.slots=3")
    assert (told.model_path, told.dtype, told.device, told.slots, told.max_length) == (
        "/model",
        "float32",
        "cpu",
        3,
        56,
    )
    assert (told.args, told.transport, told.has_adapters) == ({"max-num-batched-tokens": 512}, "shm", False)


def test_the_type_of_the_weights_is_that_of_the_run_whatever_the_device() -> None:
    assert spec("model.dtype=bfloat16").dtype == "bfloat16"
    assert spec("model.dtype=float32", device="cuda:0").dtype == "float32"


def test_adapters_bring_their_rank() -> None:
    told = spec("trainer.lora={rank: 24}", "weight_sync.transport=lora")
    assert (told.has_adapters, told.lora_rank, told.transport) == (True, 24, "lora")


def test_an_engine_that_takes_turns_can_sleep_unless_the_user_says_otherwise() -> None:
    assert spec(device="cuda:0", takes_turns=True).args == {"enable_sleep_mode": True}
    assert spec("rollout.vllm={enable-sleep-mode: false}", device="cuda:0", takes_turns=True).args == {
        "enable-sleep-mode": False
    }


def test_the_eval_engine_has_slots_of_its_own_and_is_not_split() -> None:
    told = spec("rollout.tensor_parallel=2", device="cuda:2", slots=7)
    assert (told.slots, told.tensor_parallel) == (7, 1)
    assert spec("rollout.tensor_parallel=2", device="cuda:2").tensor_parallel == 2


@pytest.mark.parametrize(
    ("overrides", "num"),
    [
        ([], 55),
        (["rollout.max_tokens=400"], 160),
        (["weight_sync.canary_limit=none"], 0),
        (["rollout.engine=embedded"], 0),
        (["rollout.max_tokens=1", "rollout.max_prompt_tokens=1"], 2),
    ],
)
def test_the_trainer_is_asked_for_a_canary_that_fits_and_only_where_somebody_compares_it(
    overrides: list[str], num: int
) -> None:
    config = load(*overrides)
    assert canary_tokens(config) == num
    told = TrainerSpec.model_validate_json(
        trainer_spec(config, Path("/model"), Path("/run"), Path("/staging"))
    )
    assert told.canary_tokens == num


def test_to_the_trainer_a_folder_on_disk_is_a_staging_folder_like_any_other() -> None:
    config = load("weight_sync.transport=disk", "weight_sync.disk_dir=/data")
    told = TrainerSpec.model_validate_json(
        trainer_spec(config, Path("/model"), Path("/run"), Path("/data/asyncrl-1"))
    )
    assert (told.transport, told.staging_dir) == ("disk", Path("/data/asyncrl-1"))


def test_its_process_runs_under_vllms_python_and_sees_our_two_packages_alone(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    config = load(f"rollout.vllm_python={python}", "rollout.num_engines=2")
    _, engines = startup.make_servers(config, tmp_path / "model", tmp_path, tmp_path / "staging", "s3cret")
    for engine in engines:
        child = engine.child
        assert isinstance(child, startup.ChildProcess)
        assert (child.module, child.python, child.renewed().python) == (
            "asyncrl_servers.vllm",
            python,
            python,
        )
        folder = Path(child.env["PYTHONPATH"])
        assert sorted(path.name for path in folder.iterdir()) == ["asyncrl", "asyncrl_servers"]
        assert json.loads(child.spec)["name"] == child.name


# ---- whether it is ready


class Child(ForeignProcess):
    """A process that ends when it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "http://127.0.0.1:1")
        self.ended = asyncio.Event()

    async def wait(self) -> None:
        await self.ended.wait()

    async def watch(self) -> None:
        await self.wait()
        raise self.death()

    def death(self) -> RoomError:
        return RoomError(self.name, "killed by SIGKILL")


class Asked:
    """Who asks the server."""

    def __init__(self, error: Exception | None = None, *, ready_s: float = 30.0) -> None:
        self.error, self.ready_s = error, ready_s
        self.slept: list[Sequence[EnginePart]] = []

    async def ready(self, timeout_s: float) -> EngineHealth:
        await asyncio.sleep(self.ready_s)
        return self._answer()

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        return self._answer()

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        self.slept.append(parts)
        return Moved(num_bytes=0, seconds=0.0)

    def _answer(self) -> EngineHealth:
        if self.error is not None:
            raise self.error
        return HEALTH


def server(asked: Asked) -> startup.Server:
    return startup.Server(Child("engine-0"), startup.Caller("engine-0", "", ""), asked=asked)  # type: ignore[arg-type]


def test_it_is_ready_when_its_client_says_so() -> None:
    async def story() -> None:
        assert await startup.wait_ready(server(Asked())) == HEALTH
        assert asyncio.get_running_loop().time() == 30.0

    run_virtual(story())


def test_one_that_dies_before_it_is_ready_is_named_with_how_it_died() -> None:
    async def story() -> None:
        starting = server(Asked(EngineLost("engine-0", "no answer"), ready_s=1.0))
        asyncio.get_running_loop().call_later(1.5, starting.child.ended.set)  # type: ignore[union-attr]
        with pytest.raises(RoomError, match="engine-0: killed by SIGKILL"):
            await startup.wait_ready(starting)

    run_virtual(story())


def test_one_that_never_gets_ready_is_named_with_its_log_the_rule_and_the_way_out() -> None:
    async def story() -> None:
        error = EngineError(
            "engine-0",
            "is not ready after 900 s",
            rule="a start has so long",
            way_out="take a smaller model.",
        )
        with pytest.raises(
            RoomError, match="engine-0: did not come up: is not ready after 900 s; the end of its log"
        ) as caught:
            await startup.wait_ready(server(Asked(error)))
        assert (caught.value.rule, caught.value.way_out) == (error.rule, error.way_out)

    run_virtual(story())


def test_one_with_wrong_flags_is_a_wrong_setting_and_is_not_waited_for() -> None:
    async def story() -> None:
        with pytest.raises(ConfigError, match="--logprobs-mode"):
            await startup.wait_ready(
                server(Asked(ConfigError("engine-0 lacks --logprobs-mode processed_logprobs")))
            )

    run_virtual(story())


def test_its_heartbeat_goes_through_its_client() -> None:
    async def story() -> None:
        well = server(Asked())
        await well.check_alive(3.0)
        assert well.health == HEALTH
        with pytest.raises(
            RoomError,
            match=r"the server at http://127.0.0.1:1 does not answer: hangs; observe.heartbeat_s=3.0 is the "
            r"limit",
        ):
            await server(Asked(EngineLost("engine-0", "hangs"))).check_alive(3.0)

    run_virtual(story())


# ---- servers of somebody else


def test_servers_of_somebody_else_get_the_key_of_the_environment_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "their key")
    config = load("model.scratch=none", "model.path=some/model", "rollout.urls=['http://127.0.0.1:8000/']")
    (trainer,), (engine,) = startup.make_servers(
        config, tmp_path / "model", tmp_path, tmp_path / "staging", "s3cret"
    )
    assert isinstance(engine.child, ForeignProcess)
    assert (engine.caller._secret, trainer.caller._secret) == ("their key", "s3cret")

    async def story() -> None:
        await startup.start(engine)
        assert engine.caller.url == "http://127.0.0.1:8000"
        await engine.end()
        await startup.start(engine)
        assert engine.caller.url == "http://127.0.0.1:8000"

    run_virtual(story())


def side_by_side(
    tasks: asyncio.TaskGroup, fake: FakeEngineServer, *, are_engines_ours: bool
) -> tuple[SideBySide, FakeTrainer, list[int]]:
    from asyncrl.engines.own_server import EngineServer

    served: list[int] = []
    trainer = FakeTrainer()
    publisher = Publisher(
        trainer, [EngineServer(fake)], interrupt="abort", timeout_s=60, on_served=served.append
    )
    return (
        SideBySide(publisher, num_steps=3, spawn=tasks.create_task, are_engines_ours=are_engines_ours),
        trainer,
        served,
    )


@pytest.mark.parametrize("are_engines_ours", [True, False])
def test_weights_that_are_not_known_are_replaced_before_anything_is_sampled(are_engines_ours: bool) -> None:
    async def story() -> None:
        fake = FakeEngineServer(weights="nobody knows", prepare_s=2.0, swap_s=1.0)
        async with asyncio.TaskGroup() as tasks:
            turns, trainer, served = side_by_side(tasks, fake, are_engines_ours=are_engines_ours)
            await turns.start(0)
            assert fake.weights == ("nobody knows" if are_engines_ours else "w0")
            assert served == ([] if are_engines_ours else [0])
            assert asyncio.get_running_loop().time() == (0.0 if are_engines_ours else 3.0)
            trainer.step()
            await asyncio.sleep(10.0)
            assert served[-1] == 1
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(story())
