"""The worker extension in a real vLLM server: after a load it is the server that a fresh one on the new
weights would be. It began with weights A, and answers as it did then, bit for bit, when they come again.
"""

from __future__ import annotations

import itertools
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_house import PROMPTS, House, VllmServer

from asyncrl_servers.embedded.loaded_weights import digest_tensors

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]


class Loads:
    """Loads into the shared server without a client. Weights A are those that it began with."""

    def __init__(self, house: House) -> None:
        self.house, self.server, self.versions = house, house.process, itertools.count(10_000)
        self.A, self.B = house.base, house.weights(1)

    def write(self, tensors: Weights, name: str = "weights") -> dict[str, Any]:
        """Write weights as the trainer does, and say what they are."""
        path = self.house.scratch / f"{name}.safetensors"
        save_file({key: tensor.detach().clone() for key, tensor in tensors.items()}, f"{path}.partial")
        Path(f"{path}.partial").replace(path)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        sums = {"digest": digest_tensors(tensors), "num_tensors": len(tensors), "num_bytes": num_bytes}
        return {"path": str(path), **sums}

    def stage(self, version: int, **request: Any) -> dict[str, Any]:
        """Ask until it is staged, or refused. The test's own limit ends it otherwise."""
        while True:
            answer = self.server.rpc("asyncrl_stage", version=version, kind="weights", **request)
            if answer.get("state") != "hashing":
                return answer
            time.sleep(0.01)

    def push(self, tensors: Weights, chunk_bytes: int = 100_000) -> dict[str, Any]:
        """Stage and load; the answer of the load, or what was refused before."""
        version, request = next(self.versions), self.write(tensors)
        staged = self.stage(version, **request)
        if "error" in staged:
            return staged
        assert staged["digest"] == request["digest"]
        sent = {"version": version, "digest": request["digest"], "chunk_bytes": chunk_bytes}
        return self.server.rpc("asyncrl_load", **sent)

    def plant(self, fault: str) -> None:
        assert self.server.rpc("asyncrl_plant", fault=fault) == {"ok": True}

    def serve(self, weights: Weights) -> None:
        """Whatever was before: these weights, loaded in order."""
        self.plant("")
        assert self.push(weights).get("ok"), self.server.read_log()[-2000:]

    def serves(self, weights: Weights) -> bool:
        """Whether it answers as these weights do: bit for bit as at its start, or as transformers says."""
        outputs = self.house.outputs()
        if weights is self.A:
            return outputs == self.house.fresh
        gaps = [
            self.house.gap(weights, prompt, *output)
            for prompt, output in zip(PROMPTS, outputs[:-1], strict=True)
        ]
        return max(gaps) <= 1e-4


@pytest.fixture(scope="module")
def loads(house: House) -> Iterator[Loads]:
    """At its end the server has weights that its clients know."""
    loads = Loads(house)
    yield loads
    loads.plant("")
    loads.server.post("/update_weight_version", {"new_version": str(house.version)})

    async def mend(client: VllmServer) -> None:
        manifest = house.stage(client.policy_version + 1, house.weights(2))
        await client.prepare(manifest)
        await client.commit(manifest.version, manifest.digest, "abort")

    house.run(mend)


@pytest.mark.parametrize("chunk_bytes", [1, 100_000, 10**9])
def test_loaded_weights_answer_bit_for_bit_as_a_fresh_server_does(loads: Loads, chunk_bytes: int) -> None:
    loads.serve(loads.A)
    answer = loads.push(loads.B, chunk_bytes)
    num_tensors = len(loads.B)
    assert answer["ok"], answer
    assert (answer["num_tensors"], answer["num_bytes"]) == (
        num_tensors,
        sum(tensor.nbytes for tensor in loads.B.values()),
    )
    assert answer["num_chunks"] == {1: num_tensors, 10**9: 1}.get(chunk_bytes, answer["num_chunks"])
    assert loads.serves(loads.B)
    assert not loads.serves(loads.A)
    assert loads.push(loads.A, chunk_bytes)["ok"]
    assert loads.serves(loads.A)


def test_weights_that_come_chunk_by_chunk_through_one_file_answer_as_a_fresh_server_does(
    loads: Loads,
) -> None:
    loads.serve(loads.A)
    version, path = next(loads.versions), loads.house.scratch / "one-file.safetensors"
    parts = [dict(itertools.islice(loads.B.items(), start, start + 7)) for start in range(0, len(loads.B), 7)]
    for index, part in enumerate(parts):
        request = loads.write(part, "chunk")
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
        assert loads.server.rpc("asyncrl_load_chunk", **chunk) == {"ok": True, "digest": request["digest"]}
    answer = loads.server.rpc("asyncrl_finish_chunks", version=version)
    assert answer == {"ok": True, "digest": digest_tensors(loads.B)}
    assert loads.serves(loads.B)


def test_weights_through_vllms_own_transfer_routes_answer_as_a_fresh_server_does(loads: Loads) -> None:
    loads.serve(loads.A)
    server = loads.server
    server.post("/init_weight_transfer_engine", {"init_info": {}})
    server.post("/start_weight_update")
    for start in range(0, len(loads.B), 13):
        request = loads.write(dict(itertools.islice(loads.B.items(), start, start + 13)), "native")
        server.post(
            "/update_weights", {"update_info": {"path": request["path"], "digest": request["digest"]}}
        )
    server.post("/finish_weight_update", {"weight_version": "41"})
    assert loads.serves(loads.B)
    choice = server.post(
        "/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
    )["choices"][0]
    assert choice["weight_versions"] == [{"version": "41", "start": 0, "end": 2}]


def test_a_wrong_digest_is_refused_on_each_way_and_the_old_weights_serve_on(loads: Loads) -> None:
    loads.serve(loads.A)
    request = loads.write(loads.B) | {"digest": "0" * 32}
    version = next(loads.versions)
    staged = loads.stage(version, **request)
    assert "announced was 00000000" in staged["error"]
    assert "prepare again" in staged["way_out"]
    assert (
        "staged is nothing"
        in loads.server.rpc("asyncrl_load", version=version, digest="0" * 32, chunk_bytes=10**9)["error"]
    )
    chunk = loads.server.rpc("asyncrl_load_chunk", version=version, index=0, is_last=True, **request)
    assert "announced was 00000000" in chunk["error"]
    assert loads.serves(loads.A)


def test_a_file_that_takes_long_to_hash_is_hashed_once_and_refused_if_it_is_not_what_was_announced(
    loads: Loads,
) -> None:
    request = loads.write({"large": torch.zeros(2**26)}, "large") | {"digest": "0" * 32}
    version = next(loads.versions)
    first = loads.server.rpc("asyncrl_stage", version=version, kind="weights", **request)
    assert first["state"] == "hashing", "this test needs a file that is not hashed at once"
    assert "announced was 00000000" in loads.stage(version, **request)["error"]


def test_vllms_own_routes_refuse_a_wrong_digest_and_the_server_lives_and_says_what_to_do(
    loads: Loads,
) -> None:
    loads.serve(loads.A)
    request = loads.write(loads.B)
    loads.server.post("/start_weight_update")
    with pytest.raises(urllib.error.HTTPError):
        loads.server.post("/update_weights", {"update_info": {"path": request["path"], "digest": "0" * 32}})
    assert len(loads.house.outputs()) == len(PROMPTS) + 1
    loads.serve(loads.B)
    assert loads.serves(loads.B)


def test_staged_weights_are_loaded_under_their_own_digest_alone(loads: Loads) -> None:
    loads.serve(loads.A)
    version, request = next(loads.versions), loads.write(loads.B)
    assert loads.stage(version, **request)["state"] == "staged"
    other = loads.server.rpc("asyncrl_load", version=version, digest="1" * 32, chunk_bytes=10**9)["error"]
    assert "digest 11111" in other
    assert f"with digest {request['digest']}" in other
    assert (
        "staged is version"
        in loads.server.rpc("asyncrl_load", version=version + 1000, digest=request["digest"], chunk_bytes=1)[
            "error"
        ]
    )
    assert loads.server.rpc("asyncrl_drop") == {"ok": True}
    assert (
        "staged is nothing"
        in loads.server.rpc("asyncrl_load", version=version, digest=request["digest"], chunk_bytes=1)["error"]
    )
    assert loads.serves(loads.A)


def test_a_torn_file_a_missing_one_and_another_count_are_refused_and_the_old_weights_serve_on(
    loads: Loads,
) -> None:
    loads.serve(loads.A)
    request = loads.write(loads.B)
    torn = loads.house.scratch / "torn.safetensors"
    torn.write_bytes(Path(request["path"]).read_bytes()[:-1000])
    version = next(loads.versions)
    assert "cannot read the weights file" in loads.stage(version, **(request | {"path": str(torn)}))["error"]
    assert (
        "no weights file"
        in loads.stage(version, **(request | {"path": str(loads.house.scratch / "nothing")}))["error"]
    )
    assert "announced were 99" in loads.stage(version, **(request | {"num_tensors": 99}))["error"]
    assert loads.serves(loads.A)


def test_names_that_changed_places_are_a_wrong_digest(loads: Loads) -> None:
    loads.serve(loads.A)
    right = loads.B
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    swapped = {**right, first: right[second], second: right[first]}
    request = loads.write(swapped) | {"digest": digest_tensors(right)}
    assert "announced was" in loads.stage(next(loads.versions), **request)["error"]
    assert loads.serves(loads.A)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_after_a_set_without_one_tensor_the_server_is_of_no_version_until_a_whole_set_is_loaded(
    loads: Loads, name: str
) -> None:
    loads.serve(loads.A)
    answer = loads.push({key: tensor for key, tensor in loads.B.items() if key != name})
    layer = name.removesuffix(".weight").replace("k_proj", "qkv_proj")
    assert layer in answer["error"]
    assert "until a load succeeds" in answer["way_out"]
    assert "came in part" in loads.server.rpc("asyncrl_facts")["broken"]
    assert len(loads.house.outputs()) == len(PROMPTS) + 1  # it lives
    assert loads.push(loads.B)["ok"]
    assert loads.server.rpc("asyncrl_facts")["broken"] is None
    assert loads.serves(loads.B)


def test_a_tensor_that_the_model_does_not_know_is_refused_and_a_whole_set_heals_the_server(
    loads: Loads,
) -> None:
    loads.serve(loads.A)
    known = "model.layers.2.mlp.down_proj.weight"
    renamed = {
        key.replace(known, "model.layers.2.mlp.elsewhere.weight"): tensor for key, tensor in loads.B.items()
    }
    assert "error" in loads.push(renamed)
    loads.serve(loads.B)
    assert loads.serves(loads.B)


def test_chunks_out_of_order_are_refused_and_an_update_that_is_dropped_says_so(loads: Loads) -> None:
    loads.serve(loads.A)
    version = next(loads.versions)
    request = loads.write(dict(itertools.islice(loads.B.items(), 5)), "chunk") | {
        "version": version,
        "is_last": False,
    }
    assert "expected chunk 0" in loads.server.rpc("asyncrl_load_chunk", index=3, **request)["error"]
    assert "no update of version" in loads.server.rpc("asyncrl_finish_chunks", version=version)["error"]
    assert loads.serves(loads.A)
    assert loads.server.rpc("asyncrl_load_chunk", index=0, **request)["ok"]
    assert "expected chunk 1" in loads.server.rpc("asyncrl_load_chunk", index=2, **request)["error"]
    assert loads.server.rpc("asyncrl_drop")["ok"]
    assert "dropped" in loads.server.rpc("asyncrl_facts")["broken"]
    loads.serve(loads.B)
    assert loads.serves(loads.B)


def test_a_chunk_that_was_skipped_on_the_way_into_the_model_is_noticed(loads: Loads) -> None:
    loads.serve(loads.A)
    loads.plant("skip_chunk")
    assert "lack" in loads.push(loads.B)["error"]


@pytest.mark.parametrize("fault", ["stale_head", "skip_chunk_unseen", "swap_names"])
def test_a_silent_fault_answers_well_and_its_logprobs_are_others(loads: Loads, fault: str) -> None:
    """What the canary is for: the digest was right, the answer is ok, and the model is neither the old nor
    the new one.
    """
    loads.serve(loads.A)
    loads.plant(fault)
    assert loads.push(loads.B)["ok"]
    assert not loads.serves(loads.A)
    assert not loads.serves(loads.B)
    loads.serve(loads.B)
    assert loads.serves(loads.B)


def test_a_prefix_cache_outlives_a_load_unless_the_salt_changes_or_it_is_cleared(loads: Loads) -> None:
    """A fact about vLLM that its client has to answer for."""
    loads.serve(loads.A)
    prompt = [(13 * i + i // 7) % 40 for i in range(300)]
    before = loads.server.generate(prompt, salt="same")
    loads.serve(loads.B)
    stale = loads.server.generate(prompt, salt="same")
    right = loads.server.generate(prompt, salt="another")
    assert stale != right
    assert before != right
    loads.server.post("/reset_prefix_cache")
    assert loads.server.generate(prompt, salt="same") == right


def test_weights_are_staged_while_tokens_are_generated(loads: Loads) -> None:
    """Interleaved by hand: the worker answers requests between two questions about one staging."""
    loads.serve(loads.A)
    version, request = next(loads.versions), loads.write(loads.B)
    loads.server.rpc("asyncrl_stage", version=version, kind="weights", **request)
    assert loads.serves(loads.A)
    assert loads.stage(version, **request)["state"] == "staged"
    assert loads.serves(loads.A)


def test_an_extension_method_answers_nonsense_with_an_error_and_never_raises(loads: Loads) -> None:
    for method in ("asyncrl_stage", "asyncrl_load", "asyncrl_load_chunk", "asyncrl_finish_chunks"):
        assert "error" in loads.server.rpc(method, nonsense=1)
    facts = loads.server.rpc("asyncrl_facts")
    assert (
        facts["extension"],
        facts["device"],
        facts["dtype"],
        facts["num_workers"],
        facts["vocab_size"],
    ) == (1, "cpu", "float32", 1, len(loads.house.tokenizer))
