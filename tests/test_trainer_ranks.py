"""Several trainer processes do what one does: the same losses and weights, and they end
together.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import job_runs
import numpy as np
import pytest
import torch
from model_zoo import make_config, random_model
from rank_processes import TIMEOUT_S, Group, running, save_state
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from trainer_cases import (
    changed,
    learned,
    make_batch,
    make_spec,
    mesh_of_one,
    weights_digest,
)
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError, find_fatal
from asyncrl.base.http import Caller, CallRefused, Refused
from asyncrl.base.waits import Signal
from asyncrl.config.offload_config import POLICY_STEP
from asyncrl.messages.trainer_api import (
    BatchHeader,
    BeginExportRequest,
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    StateRequest,
    Tokens,
    TrainerHealth,
    TrainResponse,
    pack_batch,
    unpack_batch,
)
from asyncrl.trainer.ranks.offload import local_of
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.rank_process import TrainerService
from asyncrl.trainer.ranks.ranks import meet
from asyncrl.trainer.trainer_client import LOST_STATUS
from asyncrl.weights.ipc import open_memory, views
from asyncrl.weights.tensor_files import digest_tensors


def aged(header: BatchHeader, arrays: Tokens) -> tuple[BatchHeader, Tokens]:
    """Mark every third sequence as sampled by the version before."""
    versions = arrays.versions.copy()
    for entry in header.trajectories[::3]:
        versions[entry.start : entry.end] = np.where(
            arrays.is_sampled[entry.start : entry.end], max(header.version - 1, 0), -1
        )
    return header.model_copy(
        update={"min_version": max(header.version - 1, 0)}
    ), changed(arrays, versions=versions)


def compare(
    model_dir: Path,
    folder: Path,
    *,
    world_size: int = 2,
    trainer: dict[str, Any],
    only_ranks: dict[str, Any] | None = None,
    rounding: float = 1e-5,
    **values: Any,
) -> None:
    """Train one process and several on the same batches: metrics and exported weights
    agree, these by `rounding`, and logprobs of the canary by ten times as much.
    """
    values |= {"canary_tokens": 20, "chunk_bytes": 10_000}
    alone = TrainerRank(
        make_spec(model_dir, folder / "alone", trainer=trainer, **values)
    )
    of_ranks = trainer | (only_ranks or {})
    values |= {"chunks": "memories"}
    with running(
        model_dir, folder / "ranks", world_size, trainer=of_ranks, **values
    ) as group:
        for version in range(3):
            header, arrays = aged(
                *make_batch(version=version, seed=version, num_groups=4)
            )
            expected, actual = (
                alone.train(header, arrays),
                group.train(header, arrays).metrics,
            )
            assert learned(actual) == pytest.approx(
                learned(expected), rel=1e-4, abs=1e-4
            )
        begun = group.begin_export()
        export, expected_export = (
            group.export(),
            alone.begin_export(folder / "alone.safetensors")(),
        )
        assert export.digest == digest_tensors(load_file(export.path))
        assert export.version == begun == 3
        assert_close(export.path, expected_export.path, rounding)
        assert export.canary is not None
        assert export.canary.logprobs == pytest.approx(
            expected_export.canary.logprobs, abs=10 * rounding
        )
        read: list[ExportChunkResponse] = []
        while not read or not read[-1].is_last:
            read.append(read_chunk(group, 3, len(read)))
        assert (read[-1].whole_digest, read[-1].canary) == (
            export.digest,
            export.canary,
        )
        group.save(folder / "saved")
        saved = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
        wanted = dict(AutoModelForCausalLM.from_pretrained(model_dir).state_dict())
        pushed = load_file(export.path)
        if "lora" in trainer:
            adapters = {name.rpartition(".lora_")[0] for name in pushed}
            assert len(adapters) == 14
            for name in adapters:
                lora_A, lora_B = (pushed[f"{name}.lora_{kind}.weight"] for kind in "AB")
                wanted[f"{name}.weight"] += 32.0 * lora_B @ lora_A
        else:
            wanted = pushed
        torch.testing.assert_close(
            {name: saved[name] for name in wanted}, wanted, rtol=0, atol=1e-6
        )
        assert len(job_runs.read_lines(group.folder / "trained.jsonl")) == 3, (
            "one line a batch, not a rank"
        )
        # One process loads a state of several, and several load a state of one.
        save_state(group, folder / "several")
        alone.load_state(folder / "several")
        assert_close(
            alone.begin_export(folder / "loaded.safetensors")().path, export.path, 1e-7
        )
        alone.train(*make_batch(version=3))
        alone.begin_save_state(folder / "one").result()
        group.post("/load_state", StateRequest(path=folder / "one"), TrainerHealth)
        last = read_chunk(group, 4, len(read) - 1)  # those before it were another's
        assert last.whole_digest == digest_tensors(load_file(group.export().path))


def read_chunk(group: Group, version: int, index: int) -> ExportChunkResponse:
    """Check the chunk in the memory of each rank, if there is one."""
    message = ExportChunkRequest(version=version, index=index)
    chunk = group.post("/export_chunk", message, ExportChunkResponse)
    if chunk.memory is not None:
        assert len({handle.name for handle in chunk.memory.handles}) == len(
            group.processes
        )
        for handle in chunk.memory.handles:
            data = open_memory(handle, torch.device("cpu")).data
            assert digest_tensors(views(chunk.memory.tensors, data)) == chunk.digest
    return chunk


def assert_close(actual: Path | str, expected: Path | str, atol: float) -> None:
    """Compare all tensors in two files."""
    found, wanted = load_file(actual), load_file(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def held_bytes(step: TrainerRank) -> int:
    tensors = [tensor for part in POLICY_STEP for tensor in step._tensors_of(part)]
    storages = (local_of(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    "lora", [None, {"rank": 2, "alpha": 4}], ids=["all weights", "adapters"]
)
def test_mesh_of_one_rank_learns_what_masters_do(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    trainer = {
        "lora": lora,
        "gradient_checkpointing": lora is None,
        "learning_rate": 1e-3,
    }
    values = {"trainer": trainer, "dtype": "bfloat16"}
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    with mesh_of_one(tmp_path) as ranks:
        step = TrainerRank(
            make_spec(tiny_model_dir, tmp_path / "mesh", **values), ranks
        )
        for version in range(2):
            batch = aged(*make_batch(version=version, seed=version))
            wanted, found = (learned(one.train(*batch)) for one in (alone, step))
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        if lora is None:
            num = sum(one.numel() for one in step.policy.parameters())
            assert 12 * num <= held_bytes(step) < 12.5 * num, (
                "only float32 weights and moments"
            )
        exports = [
            one.begin_export(tmp_path / f"{name}.safetensors")()
            for name, one in (("a", alone), ("m", step))
        ]
        for name, tensor in load_file(exports[0].path).items():
            torch.testing.assert_close(
                load_file(exports[1].path)[name], tensor, rtol=1e-2, atol=1e-5
            )
        digest = weights_digest(step)
        step.begin_save_state(tmp_path / "state").result()
        step.offload(["weights", "optimizer"])
        step.onload(["weights", "optimizer"])
        step.train(*make_batch(version=2))
        assert weights_digest(step) != digest
        for one in (step, alone):
            one.load_state(tmp_path / "state")
            assert weights_digest(one) == digest


LIKE_ONE: dict[str, dict[str, Any]] = {
    "three ranks, many steps, checkpointing, uneven micro-batches": {
        "world_size": 3,
        "trainer": {"mini_batches": 2, "epochs": 2, "learning_rate": 1e-3},
        "only_ranks": {"gradient_checkpointing": True, "micro_batch_tokens": 30},
        "algorithm": {"loss": "decoupled_ppo", "kl_coefficient": 0.1},
    },
    "muon": {
        "world_size": 3,
        "trainer": {"optimizer": "muon", "learning_rate": 1e-3},
        # Newton-Schulz enlarges what rounding leaves of small singular values. 1.7e-5
        # was measured on a CPU without AVX-512.
        "rounding": 5e-5,
    },
    # of rank 1, so that one of the processes has no share of an A
    "adapters": {
        "trainer": {"lora": {"rank": 1}},
        "algorithm": {"kl_coefficient": 0.1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKE_ONE)
def test_several_ranks_do_what_one_does(
    tiny_model_dir: Path, tmp_path: Path, name: str
) -> None:
    compare(tiny_model_dir, tmp_path, **LIKE_ONE[name])


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "opt", "cohere2"])
def test_ranks_keep_head_and_embedding_tied_or_apart(
    tmp_path: Path, name: str, *, is_tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = make_config(name)
    config.tie_word_embeddings = is_tied
    random_model(config).save_pretrained(folder)
    trainer = {"learning_rate": 1e-3}
    batch = make_batch(num_groups=4)
    alone = TrainerRank(make_spec(folder, tmp_path / "alone", trainer=trainer))
    alone.train(*batch)
    alone.save(tmp_path / "of one")
    with running(folder, tmp_path / "ranks", trainer=trainer) as group:
        group.train(*batch)
        group.begin_export()
        export = group.export()
        group.save(tmp_path / "of two")
    of_one, of_two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"of {number}").eval()
        for number in ("one", "two")
    )
    head, embedding = of_two.get_output_embeddings(), of_two.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied
    pushed = load_file(export.path)
    assert pushed.keys() == dict(of_two.named_parameters()).keys()
    assert all(
        torch.equal(pushed[name], one) for name, one in of_two.named_parameters()
    )
    ids_1T = torch.arange(6, 40)[None]
    torch.testing.assert_close(
        of_two(input_ids=ids_1T).logits,
        of_one(input_ids=ids_1T).logits,
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.slow
def test_ranks_survive_a_refusal_and_end_with_the_parent(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with running(tiny_model_dir, tmp_path / "w", trainer={"timeout_s": 30}) as group:
        with pytest.raises(
            CallRefused, match="batch 7 came while the trainer is at policy_version 0"
        ):
            group.train(*make_batch(version=7))
        assert group.train(*make_batch(num_groups=1, group_size=2)).policy_version == 1
        ready = TrainerHealth(policy_version=1, device="cpu")
        assert [group.health(rank) for rank in range(2)] == [ready] * 2
        with pytest.raises(CallRefused, match="answered 404"):
            group.ask(
                lambda caller: caller.post(
                    "/export", b"", ExportResponse, timeout_s=TIMEOUT_S
                ),
                rank=1,
            )
        group.processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(CallRefused, match="Timed out"):
            group.train(*make_batch(version=1))
        group.processes[1].send_signal(signal.SIGCONT)
        for process in group.processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(TIMEOUT_S) for process in group.processes] == [3, 3]
        assert not (group.folder / "staging").exists()


@pytest.mark.slow
def test_ranks_train_batches_that_are_sent_ahead(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A refused batch, and a body that is none, change nothing on any rank."""
    batches = [make_batch(version=version, seed=version) for version in range(4)]

    async def steps(caller: Caller, *bodies: bytes) -> str:
        paths = ("/train", "/train_next", "/train_next")
        asked = [
            caller.post(path, body, TrainResponse, timeout_s=TIMEOUT_S)
            for path, body in zip(paths, bodies, strict=False)
        ]
        return str(await asyncio.gather(*asked, return_exceptions=True))

    async def story(caller: Caller) -> None:
        bodies = [pack_batch(*batch) for batch in batches]
        assert "policy_version=3" in await steps(caller, *bodies[:3])
        late = pack_batch(*make_batch(version=6))
        assert "at policy_version 3" in await steps(caller, late)
        assert "CallRefused" in await steps(caller, bodies[3][:-9])
        assert "policy_version=4" in await steps(caller, bodies[3])

    with running(tiny_model_dir, tmp_path / "ahead") as ahead:
        ahead.ask(story)
        digest = ahead.export().digest
    with running(tiny_model_dir, tmp_path / "in_turn") as in_turn:
        for batch in batches:
            in_turn.train(*batch)
        assert in_turn.export().digest == digest


ONE_BREAKS = """
import torch
def loss(tokens, settings):
    if torch.distributed.get_rank() == 1:
        raise ArithmeticError("planted")
    return tokens.current_M, {}
"""


@pytest.mark.slow
def test_error_on_one_rank_ends_it_with_its_reason(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "planted_loss.py").write_text(ONE_BREAKS)
    with running(
        tiny_model_dir, folder, algorithm={"loss": "planted_loss:loss"}
    ) as group:
        with pytest.raises(CallRefused) as caught:
            group.train(*make_batch())
        assert caught.value.status == LOST_STATUS
        assert group.processes[1].wait(TIMEOUT_S) == 1
        fatal = find_fatal(group.log(1))
        assert fatal is not None
        assert fatal.error == "ArithmeticError: planted"
        for ask in (group.health, lambda: group.train(*make_batch())):
            with pytest.raises(
                CallRefused, match=r"rank 0 \(127.0.0.1\) has lost the other ranks"
            ):
                ask()


@pytest.mark.parametrize(("rank", "missing"), [(0, "keys: /rank 1"), (1, "no answer")])
def test_ranks_that_do_not_meet_say_who_is_missing(
    tiny_model_dir: Path, tmp_path: Path, rank: int, missing: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = f"127.0.0.1:{mute.getsockname()[1]}"
        if rank == 0:
            mute.close()
        values = {
            "rank": rank,
            "store": store,
            "meet_s": 3.0,
            "trainer": {"world_size": 2},
        }
        with pytest.raises(
            ConfigError, match=f"{store} within 3 s: .*{missing}"
        ) as caught:
            meet(make_spec(tiny_model_dir, tmp_path, **values), lambda _: None)
    assert "every TCP port" in caught.value.way_out


# ---- one rank


@pytest.mark.slow
def test_worker_is_bit_for_bit_a_step_in_process(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    here, state = (
        TrainerRank(make_spec(tiny_model_dir, tmp_path)),
        StateRequest(path=str(tmp_path / "state")),
    )
    expected = []
    with running(tiny_model_dir, tmp_path / "w", 1) as worker:
        for version in range(4):
            header, arrays = make_batch(version=version, seed=version)
            there, metrics = worker.train(header, arrays), here.train(header, arrays)
            assert learned(there.metrics) == learned(metrics)
            export = worker.export()
            assert (
                export.digest
                == weights_digest(here)
                == digest_tensors(load_file(export.path))
            )
            expected.append(export.digest)
            if version == 1:
                assert (
                    worker.post(
                        "/begin_save_state", state, TrainerHealth
                    ).policy_version
                    == 2
                )
        worker.post("/wait_save_state", b"", TrainerHealth)
        assert stat.S_IMODE((worker.folder / "staging").stat().st_mode) == 0o700
    with running(tiny_model_dir, tmp_path / "w", 1) as second:
        with pytest.raises(CallRefused, match="/no/such/state"):
            second.post(
                "/load_state", StateRequest(path="/no/such/state"), TrainerHealth
            )
        assert second.post("/load_state", state, TrainerHealth).policy_version == 2
        second.train(*make_batch(version=2, seed=2))
        assert second.export().digest == expected[2]
        lines = job_runs.read_lines(second.folder / "trained.jsonl")
        assert [line.get("restored", line.get("version")) for line in lines] == [
            0,
            1,
            2,
            3,
            2,
            2,
        ]


def service_of_ranks(**ranks: Any) -> TrainerService:
    service = object.__new__(TrainerService)
    service._failure = None
    service._spec = SimpleNamespace(trainer=SimpleNamespace(timeout_s=0.01))  # type: ignore[assignment]
    service.rank = Mock(ranks=Mock(size=2, **ranks))
    return service


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("another")])
def test_failure_of_rank_0_alone_is_told_by_the_health(error: Exception) -> None:
    """The other ranks would run into their timeout: without a beat, or in a call that
    rank 0 has left.
    """
    service = service_of_ranks(send=Mock(side_effect=error))
    with ThreadPoolExecutor(1) as service._torch_thread:
        service._beat()
    with pytest.raises(Refused, match=f"failed in /beat.*{error}"):
        service.health()
    service = service_of_ranks()
    service.rank.begin_save_state.side_effect = error  # type: ignore[attr-defined]
    state = StateRequest(path=Path("state"))
    for ask in (
        lambda: service._together("begin_save_state", b"", state),
        service.health,
    ):
        with pytest.raises(
            Refused, match=f"failed in /begin_save_state.*{error}"
        ) as lost:
            ask()
        assert lost.value.status == LOST_STATUS


def test_steps_that_are_sent_ahead_run_in_order_with_exports_between() -> None:
    """The request of version 2 arrives before that of version 1; an export of the first
    version above 1 is wanted from the beginning. The other ranks get the batch of
    version 1 during step 0, and each batch before its step.
    """
    done, got_second = list[str](), Event()
    sent, batches = list[tuple[str, int]](), list[tuple[int, int]]()

    def send(name: str, body: bytes) -> None:
        if name != "export_together":
            sent.append((name, int(body)))

    def send_batch(number: str, body: bytes) -> None:
        batches.append((int(number), unpack_batch(body)[0].version))
        if len(batches) == 2:
            got_second.set()

    class Rank:
        policy_version, offloaded, ranks = 0, (), Mock(size=2, send=send)
        device = SimpleNamespace(type="cpu")
        rollout_gaps = rollout_advantages = ()
        meter = Mock()

        def train(self, header: BatchHeader, _: Tokens) -> dict[str, float]:
            assert got_second.wait(TIMEOUT_S)
            if header.version != self.policy_version:
                raise Refused(409, f"batch {header.version} at {self.policy_version}")
            self.policy_version += 1
            done.append(f"step {header.version}")
            return {"policy/loss": 0.0}

        def begin_export(self, path: Path) -> Callable[[], None]:
            done.append(f"export {path.stem}")
            return lambda: None

    async def story() -> None:
        service._turn = Signal()
        bodies = [pack_batch(*make_batch(version=version)) for version in range(6)]
        exporting = asyncio.ensure_future(
            service.begin_export(BeginExportRequest(above=1))
        )
        last = asyncio.ensure_future(service.train_next(bodies[2]))
        await asyncio.sleep(0.05)
        assert done == [], "it waits for its turn"
        first = asyncio.ensure_future(service.train(bodies[0]))
        second = asyncio.ensure_future(service.train_next(bodies[1]))
        versions = [
            (await answer).policy_version for answer in (first, second, last, exporting)
        ]
        assert versions == [1, 2, 3, 2]
        assert done == ["step 0", "step 1", "export v2", "step 2"]
        # A refused step takes the one after it along, which would wait forever.
        after = asyncio.ensure_future(service.train_next(bodies[5]))
        await asyncio.sleep(0.05)
        for ahead in (service.train(bodies[4]), after):
            with pytest.raises(Refused, match="at 3"):
                await ahead
        assert batches == [*enumerate((0, 1, 2, 4, 5), 1)]
        assert sent == [("train_together", number) for number, _ in batches]
        assert service._batches == {}
        # It waits for nothing while a step is under way.
        service._made_soon += 1
        asked = asyncio.ensure_future(service.begin_export(BeginExportRequest(above=3)))
        await asyncio.sleep(0)
        assert service._torch_thread._work_queue.empty()
        asked.cancel()

    service = service_of_ranks()
    service.rank = Rank()  # type: ignore[assignment]
    service._wanted, service._made_soon, service._num_broken = None, 0, 0
    service._batches, service._num_batches = {}, 0
    service._bodies = Mock(send=send_batch)
    service._spec.staging_dir = Path("staging")
    with (
        ThreadPoolExecutor(1) as service._torch_thread,
        ThreadPoolExecutor(1) as service._bodies_thread,
    ):
        asyncio.run(story())
