"""The worker extension in a real vLLM server: after a load it is the server that a fresh one on the new
weights would be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import make_qwen3, weights_of
from safetensors.torch import save_file
from vllm_process import VllmProcess, vllm_process

from asyncrl_servers.embedded.loaded_weights import digest_tensors

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Outputs = list[tuple[list[int], list[float]]]
PROMPTS = [[1, 2, 3], [(7 * i) % 49 + 1 for i in range(40)], [(11 * i + i // 5) % 50 for i in range(200)]]
_salts = itertools.count()


def outputs_of(server: VllmProcess) -> Outputs:
    """Greedy tokens and one sampled row, nothing of it from a prefix cache."""
    greedy = [server.generate(prompt, salt=f"s{next(_salts)}", max_tokens=24) for prompt in PROMPTS]
    return [
        *greedy,
        server.generate(PROMPTS[1], salt=f"s{next(_salts)}", max_tokens=24, temperature=1.0, seed=5),
    ]


@dataclass
class House:
    """One server that began with model A and may load A or B. `fresh` is what fresh servers on each
    answer.
    """

    server: VllmProcess
    folder: Path
    weights: dict[str, dict[str, torch.Tensor]]
    fresh: dict[str, Outputs]
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def write(self, tensors: dict[str, torch.Tensor], name: str = "weights") -> dict[str, Any]:
        """Write weights as the trainer does, and say what they are."""
        path = self.folder / f"{name}.safetensors"
        save_file({key: tensor.detach().clone() for key, tensor in tensors.items()}, f"{path}.partial")
        Path(f"{path}.partial").replace(path)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return {
            "path": str(path),
            "digest": digest_tensors(tensors),
            "num_tensors": len(tensors),
            "num_bytes": num_bytes,
        }

    def stage(self, version: int, **request: Any) -> dict[str, Any]:
        """Ask until it is staged, or refused."""
        end = time.monotonic() + 60
        while (answer := self.server.rpc("asyncrl_stage", version=version, kind="weights", **request)).get(
            "state"
        ) == "hashing":
            assert time.monotonic() < end, "it is hashed for ever"
            time.sleep(0.01)
        return answer

    def push(self, tensors: dict[str, torch.Tensor], chunk_bytes: int = 100_000) -> dict[str, Any]:
        """Stage and load; the answer of the load, or what was refused before."""
        version, request = next(self.versions), self.write(tensors)
        staged = self.stage(version, **request)
        if "error" in staged:
            return staged
        assert staged["digest"] == request["digest"]
        return self.server.rpc(
            "asyncrl_load", version=version, digest=request["digest"], chunk_bytes=chunk_bytes
        )

    def plant(self, fault: str) -> None:
        assert self.server.rpc("asyncrl_plant", fault=fault) == {"ok": True}

    def serve(self, model: str) -> None:
        """Whatever was before: these weights, loaded in order."""
        self.plant("")
        assert self.push(self.weights[model]).get("ok"), self.server.read_log()[-2000:]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {
        name: make_qwen3(folder / name, seed, tie_word_embeddings=request.param)
        for name, seed in (("A", 0), ("B", 1))
    }
    weights = {name: weights_of(path) for name, path in models.items()}
    (folder / "path").mkdir()
    (folder / "path" / "faulty_vllm_worker.py").symlink_to(Path(__file__).parent / "faulty_vllm_worker.py")
    spec = {"dtype": "float32", "device": "cpu", "max_length": 512, "slots": 16}
    with vllm_process({**spec, "name": "fresh", "model_path": str(models["B"])}, folder / "fresh") as server:
        fresh_b = outputs_of(server.wait_ready())
    faulty = {"worker_extension": "faulty_vllm_worker.FaultyWeightLoader"}
    spec = {**spec, **faulty, "name": "engine-0", "model_path": str(models["A"])}
    with vllm_process(spec, folder / "engine", path=(folder / "path",)) as server:
        fresh = {"A": outputs_of(server.wait_ready()), "B": fresh_b}
        yield House(server, folder, weights, fresh)


only_tied = pytest.mark.parametrize("house", [True], ids=["tied"], indirect=True)


@pytest.mark.parametrize("chunk_bytes", [1, 100_000, 10**9])
def test_loaded_weights_answer_bit_for_bit_as_a_fresh_server_does(house: House, chunk_bytes: int) -> None:
    house.serve("A")
    answer = house.push(house.weights["B"], chunk_bytes)
    num_tensors = len(house.weights["B"])
    assert answer["ok"], answer
    assert (answer["num_tensors"], answer["num_bytes"]) == (
        num_tensors,
        sum(tensor.nbytes for tensor in house.weights["B"].values()),
    )
    assert answer["num_chunks"] == {1: num_tensors, 10**9: 1}.get(chunk_bytes, answer["num_chunks"])
    assert outputs_of(house.server) == house.fresh["B"]
    assert house.fresh["B"] != house.fresh["A"]
    assert house.push(house.weights["A"], chunk_bytes)["ok"]
    assert outputs_of(house.server) == house.fresh["A"]


def test_weights_that_come_chunk_by_chunk_through_one_file_answer_as_a_fresh_server_does(
    house: House,
) -> None:
    house.serve("A")
    version, path = next(house.versions), house.folder / "one-file.safetensors"
    parts = [
        dict(itertools.islice(house.weights["B"].items(), start, start + 7))
        for start in range(0, len(house.weights["B"]), 7)
    ]
    for index, part in enumerate(parts):
        request = house.write(part, "chunk")
        path.write_bytes(
            Path(request["path"]).read_bytes()
        )  # in place: the same file on disk for every chunk
        chunk = {
            **request,
            "path": str(path),
            "version": version,
            "index": index,
            "is_last": index == len(parts) - 1,
        }
        assert house.server.rpc("asyncrl_load_chunk", **chunk) == {"ok": True, "digest": request["digest"]}
    digest = digest_tensors(house.weights["B"])
    answer = house.server.rpc("asyncrl_finish_chunks", version=version, digest=digest)
    assert answer == {"ok": True, "digest": digest}
    assert outputs_of(house.server) == house.fresh["B"]


@only_tied
def test_a_wrong_digest_is_refused_on_each_way_and_the_old_weights_serve_on(house: House) -> None:
    house.serve("A")
    request = house.write(house.weights["B"]) | {"digest": "0" * 32}
    version = next(house.versions)
    staged = house.stage(version, **request)
    assert "announced was 00000000" in staged["error"]
    assert "prepare again" in staged["way_out"]
    assert (
        "staged is nothing"
        in house.server.rpc("asyncrl_load", version=version, digest="0" * 32, chunk_bytes=10**9)["error"]
    )
    chunk = house.server.rpc("asyncrl_load_chunk", version=version, index=0, is_last=True, **request)
    assert "announced was 00000000" in chunk["error"]
    assert outputs_of(house.server) == house.fresh["A"]


@only_tied
def test_a_file_that_takes_long_to_hash_is_hashed_once_and_refused_if_it_is_not_what_was_announced(
    house: House,
) -> None:
    request = house.write({"large": torch.zeros(2**26)}, "large") | {"digest": "0" * 32}
    version = next(house.versions)
    first = house.server.rpc("asyncrl_stage", version=version, kind="weights", **request)
    assert first["state"] == "hashing", "this test needs a file that is not hashed at once"
    assert "announced was 00000000" in house.stage(version, **request)["error"]


@only_tied
def test_staged_weights_are_loaded_under_their_own_digest_alone(house: House) -> None:
    house.serve("A")
    version, request = next(house.versions), house.write(house.weights["B"])
    assert house.stage(version, **request)["state"] == "staged"
    other = house.server.rpc("asyncrl_load", version=version, digest="1" * 32, chunk_bytes=10**9)["error"]
    assert "digest 11111" in other
    assert f"with digest {request['digest']}" in other
    assert (
        "staged is version"
        in house.server.rpc("asyncrl_load", version=version + 1000, digest=request["digest"], chunk_bytes=1)[
            "error"
        ]
    )
    assert house.server.rpc("asyncrl_drop") == {"ok": True}
    assert (
        "staged is nothing"
        in house.server.rpc("asyncrl_load", version=version, digest=request["digest"], chunk_bytes=1)["error"]
    )
    assert outputs_of(house.server) == house.fresh["A"]


@only_tied
def test_a_torn_file_a_missing_one_and_another_count_are_refused_and_the_old_weights_serve_on(
    house: House,
) -> None:
    house.serve("A")
    request = house.write(house.weights["B"])
    torn = house.folder / "torn.safetensors"
    torn.write_bytes(Path(request["path"]).read_bytes()[:-1000])
    version = next(house.versions)
    assert "cannot read the weights file" in house.stage(version, **(request | {"path": str(torn)}))["error"]
    assert (
        "cannot read the weights file"
        in house.stage(version, **(request | {"path": str(house.folder / "nothing")}))["error"]
    )
    assert "announced were 99" in house.stage(version, **(request | {"num_tensors": 99}))["error"]
    assert outputs_of(house.server) == house.fresh["A"]


@only_tied
def test_names_that_changed_places_are_a_wrong_digest(house: House) -> None:
    house.serve("A")
    right = house.weights["B"]
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    swapped = {**right, first: right[second], second: right[first]}
    request = house.write(swapped) | {"digest": digest_tensors(right)}
    assert "announced was" in house.stage(next(house.versions), **request)["error"]
    assert outputs_of(house.server) == house.fresh["A"]


@only_tied
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_set_without_one_tensor_is_refused_and_the_server_says_that_it_is_of_no_version_until_a_whole_set_is_loaded(  # noqa: E501
    house: House, name: str
) -> None:
    house.serve("A")
    answer = house.push({key: tensor for key, tensor in house.weights["B"].items() if key != name})
    layer = name.removesuffix(".weight").replace("k_proj", "qkv_proj")
    assert layer in answer["error"]
    assert "until a load succeeds" in answer["way_out"]
    assert "came in part" in house.server.rpc("asyncrl_facts")["broken"]
    assert len(outputs_of(house.server)) == len(PROMPTS) + 1  # it lives
    assert house.push(house.weights["B"])["ok"]
    assert house.server.rpc("asyncrl_facts")["broken"] is None
    assert outputs_of(house.server) == house.fresh["B"]


@only_tied
def test_a_tensor_that_the_model_does_not_know_is_refused_and_a_whole_set_heals_the_server(
    house: House,
) -> None:
    house.serve("A")
    known = "model.layers.2.mlp.down_proj.weight"
    renamed = {
        key.replace(known, "model.layers.2.mlp.elsewhere.weight"): tensor
        for key, tensor in house.weights["B"].items()
    }
    assert "error" in house.push(renamed)
    house.serve("B")
    assert outputs_of(house.server) == house.fresh["B"]


@only_tied
def test_chunks_out_of_order_are_refused_and_an_update_that_is_dropped_says_so(house: House) -> None:
    house.serve("A")
    version = next(house.versions)
    request = house.write(dict(itertools.islice(house.weights["B"].items(), 5)), "chunk") | {
        "version": version,
        "is_last": False,
    }
    assert "loaded is nothing" in house.server.rpc("asyncrl_load_chunk", index=3, **request)["error"]
    assert (
        "no update of version"
        in house.server.rpc("asyncrl_finish_chunks", version=version, digest="")["error"]
    )
    assert outputs_of(house.server) == house.fresh["A"]
    assert house.server.rpc("asyncrl_load_chunk", index=0, **request)["ok"]
    assert "loaded is chunks 0..0" in house.server.rpc("asyncrl_load_chunk", index=2, **request)["error"]
    assert house.server.rpc("asyncrl_drop")["ok"]
    assert "dropped" in house.server.rpc("asyncrl_facts")["broken"]
    house.serve("B")
    assert outputs_of(house.server) == house.fresh["B"]


@only_tied
def test_a_chunk_that_was_skipped_on_the_way_into_the_model_is_noticed(house: House) -> None:
    house.serve("A")
    house.plant("skip_chunk")
    assert "lack" in house.push(house.weights["B"])["error"]


@only_tied
@pytest.mark.parametrize("fault", ["stale_head", "skip_chunk_unseen", "swap_names"])
def test_a_silent_fault_answers_well_and_its_logprobs_are_others(house: House, fault: str) -> None:
    """What the canary is for: the digest was right, the answer is ok, and the model is neither the old nor
    the new one.
    """
    house.serve("A")
    house.plant(fault)
    assert house.push(house.weights["B"])["ok"]
    found = outputs_of(house.server)
    assert found not in (house.fresh["A"], house.fresh["B"])
    first = [(abs(got[1][0] - right[1][0])) for got, right in zip(found, house.fresh["B"], strict=True)]
    assert max(first) > 0.01
    house.serve("B")
    assert outputs_of(house.server) == house.fresh["B"]


@only_tied
def test_a_prefix_cache_outlives_a_load_unless_the_salt_changes_or_it_is_cleared(house: House) -> None:
    """A fact about vLLM that its client has to answer for."""
    house.serve("A")
    prompt = [(13 * i + i // 7) % 50 for i in range(300)]
    before = house.server.generate(prompt, salt="same")
    house.serve("B")
    stale = house.server.generate(prompt, salt="same")
    right = house.server.generate(prompt, salt="another")
    assert stale != right
    assert before != right
    house.server.post("/reset_prefix_cache")
    assert house.server.generate(prompt, salt="same") == right


@only_tied
def test_weights_are_staged_while_tokens_are_generated(house: House) -> None:
    """Interleaved by hand: the worker answers requests between two questions about one staging."""
    house.serve("A")
    version, request = next(house.versions), house.write(house.weights["B"])
    house.server.rpc("asyncrl_stage", version=version, kind="weights", **request)
    assert outputs_of(house.server) == house.fresh["A"]
    assert house.stage(version, **request)["state"] == "staged"
    assert outputs_of(house.server) == house.fresh["A"]


@only_tied
def test_an_extension_method_answers_nonsense_with_an_error_and_never_raises(house: House) -> None:
    for method in ("asyncrl_stage", "asyncrl_load", "asyncrl_load_chunk", "asyncrl_finish_chunks"):
        assert "error" in house.server.rpc(method, nonsense=1)
    facts = house.server.rpc("asyncrl_facts")
    assert (
        facts["extension"],
        facts["device"],
        facts["dtype"],
        facts["num_workers"],
        facts["vocab_size"],
    ) == (1, "cpu", "float32", 1, 50)
