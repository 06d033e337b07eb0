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
from engine_in_process import make_qwen3, stage_file, weights_of
from vllm_process import VllmProcess, vllm_process

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Outputs = list[tuple[list[int], list[float]]]
PROMPTS = [[1, 2, 3], [(7 * i) % 49 + 1 for i in range(40)], [(11 * i + i // 5) % 50 for i in range(200)]]
_salts = itertools.count()


def outputs_of(server: VllmProcess) -> Outputs:
    """Greedy tokens and one sampled row, nothing of it from a prefix cache."""
    greedy = [server.generate(prompt, salt=f"s{next(_salts)}", max_tokens=24) for prompt in PROMPTS]
    sampled = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
    return [*greedy, server.generate(PROMPTS[1], salt=f"s{next(_salts)}", **sampled)]


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

    def write(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Write weights as the trainer does, and say what they are."""
        folder = self.folder / str(next(self.versions))
        folder.mkdir()
        return stage_file(tensors, 0, folder).model_dump(exclude={"version"}, exclude_defaults=True)

    def stage(self, version: int, **request: Any) -> dict[str, Any]:
        """Ask until it is staged, or refused."""
        asked = request | {"version": version}
        while (answer := self.server.rpc("asyncrl_stage", **asked)).get("state") == "staging":
            time.sleep(0.01)
        return answer

    def push(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Stage and load; the answer of the load, or a refusal before it."""
        version = next(self.versions)
        request = self.write(tensors)
        if "error" in (staged := self.stage(version, **request)):
            return staged
        return self.server.rpc("asyncrl_load", version=version, digest=request["digest"])

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


def test_loaded_weights_answer_bit_for_bit_as_a_fresh_server(house: House) -> None:
    assert house.fresh["B"] != house.fresh["A"]
    for model in ("B", "A", "B"):
        weights = house.weights[model]
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        assert house.push(weights) == {"ok": True, "num_tensors": len(weights), "num_bytes": num_bytes}
        assert outputs_of(house.server) == house.fresh[model]


@only_tied
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_incomplete_weights_leave_a_server_without_a_version(house: House, name: str) -> None:
    house.serve("A")
    house.plant("poison")
    answer = house.push({key: tensor for key, tensor in house.weights["B"].items() if key != name})
    layer = name.removesuffix(".weight").replace("k_proj", "qkv_proj")
    assert layer in answer["error"]
    assert "until a load succeeds" in answer["rule"]
    assert "came in part" in house.server.rpc("asyncrl_facts")["broken"]
    assert len(outputs_of(house.server)) == len(PROMPTS) + 1, "it lives"
    assert "error" in house.push(house.weights["B"] | {"model.layers.2.elsewhere.weight": torch.zeros(2)})
    part = house.write(dict(itertools.islice(house.weights["B"].items(), 5)))
    chunk = {"version": next(house.versions), "index": 0, "is_last": False, **part}
    assert house.server.rpc("asyncrl_load_chunk", **chunk)["ok"]
    assert house.server.rpc("asyncrl_drop")["ok"]
    assert "dropped" in house.server.rpc("asyncrl_facts")["broken"]
    assert house.push(house.weights["B"])["ok"]
    assert house.server.rpc("asyncrl_facts") == {"ok": True, "extension": 1, "vocab_size": 50, "broken": None}
    assert outputs_of(house.server) == house.fresh["B"]
