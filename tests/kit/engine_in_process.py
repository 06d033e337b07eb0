"""Engines of the embedded server inside the test's own process, and models of any size
for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_replies import ask
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.messages.engine_api import CommitRequest, PrepareRequest
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

QWEN3: dict[str, Any] = {"vocab_size": 50, "hidden_size": 128, "intermediate_size": 256}
QWEN3 |= {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
QWEN3 |= {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
QWEN3 |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def make_qwen3(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Qwen3 with random weights and no end-of-sequence token; weights large enough
    for varied tokens.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**QWEN3, **overrides}))
    model.save_pretrained(folder)
    return folder


def make_spec(folder: Path, **overrides: Any) -> EmbeddedSpec:
    fields = {
        "name": "engine-0",
        "model_path": str(folder),
        "slots": 4,
        "max_length": 256,
        "device": "cpu",
    }
    return EmbeddedSpec(**{**fields, **overrides})


@contextmanager
def running_engine(folder: Path, **overrides: Any) -> Iterator[Engine]:
    engine = build_engine(make_spec(folder, **overrides))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def make_request(
    request_id: str = "r", prompt_ids: tuple[int, ...] = (1, 2, 3), **fields: Any
) -> SamplingRequest:
    given = {"max_tokens": 20, "seed": 7, **fields}
    return SamplingRequest(request_id, prompt_ids, **given)


def answered(engine: Engine, **fields: Any) -> SegmentPart:
    return ask(engine, [make_request(**fields)])[0].result(timeout=60)


def drawn(answer: SegmentPart) -> tuple[list[int], list[float]]:
    return answer.token_ids, answer.logprobs


def publish(engine: Engine, request: PrepareRequest, interrupt: str = "abort") -> None:
    assert engine.weights.prepare(request).digest == request.digest
    commit = {
        "version": request.version,
        "digest": request.digest,
        "interrupt": interrupt,
    }
    assert (
        engine.commit(CommitRequest.model_validate(commit)).result(timeout=60).version
        == request.version
    )


def stage_file(
    source: Path | dict[str, torch.Tensor], version: int, folder: Path
) -> PrepareRequest:
    """Write weights, or a model's weights, as the trainer does, and return their
    manifest.
    """
    from safetensors.torch import save_file

    weights = weights_of(source) if isinstance(source, Path) else source
    path = folder / f"weights-{version}.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in weights.items()}, path)
    return PrepareRequest(
        version=version,
        path=str(path),
        digest=digest_tensors(weights),
        num_tensors=len(weights),
        num_bytes=sum(tensor.nbytes for tensor in weights.values()),
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(
        Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
