"""Random models in known shapes, and batches and trainer specs for them."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from common import trainer_spec
from trainer_case import Row, batch_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.messages.tokens import Tokens, spans_of
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.model.random_init import make_character_tokenizer
from asyncrl.trainer.ranks.rank_process import TrainerService
from asyncrl.trainer.trainer_client import TrainerSpec
from gpu.rows import Bench

T = TypeVar("T")

MAX_LENGTH = 131_072
QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128}


QWEN2: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151_936}
SIZES = {
    "0.5B": (QWEN2, 896, 24, 14, 2, 4864),
    "0.6B": (QWEN3, 1024, 28, 16, 8, 3072),
    "1.5B": (QWEN2, 1536, 28, 12, 2, 8960),
    "4B": (QWEN3, 2560, 36, 32, 8, 9728),
    "7B": (
        QWEN2 | {"vocab_size": 152_064, "tie_word_embeddings": False},
        3584,
        28,
        28,
        4,
        18_944,
    ),
}
"""Shapes of Qwen2.5 and Qwen3: family, and values of NAMES."""
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
TINY = dict(zip(NAMES, (64, 2, 4, 2, 128), strict=True))


def architecture(bench: Bench, shape: str) -> dict[str, Any]:
    """Return the shape, or a tiny one of the same type."""
    family, *sizes = SIZES[shape]
    chosen = {
        "tie_word_embeddings": True,
        **family,
        **dict(zip(NAMES, sizes, strict=True)),
    }
    # vLLM has no smaller heads on a CPU
    tiny = TINY | {"head_dim": 32, "vocab_size": 512}
    return {
        **chosen,
        **(tiny if bench.is_tiny else {}),
        "max_position_embeddings": MAX_LENGTH,
    }


def make_model(bench: Bench, shape: str) -> Any:
    """Make a bfloat16 model on the device, without an end token."""
    given = architecture(bench, shape)
    config = AutoConfig.for_model(
        given.pop("model_type"),
        **given,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(bench.device):
        return (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            .eval()
            .requires_grad_(False)
        )


def make_folder(bench: Bench, shape: str) -> Path:
    """Return the model's Hugging Face folder, shared by the rows of a part."""
    disable_progress_bar()
    folder = bench.models / shape
    unfinished = bench.folder / "unfinished"
    if not folder.is_dir():
        make_model(bench, shape).save_pretrained(unfinished)
        make_character_tokenizer(
            "abcdefghijklmnopqrstuvwxyz 0123456789"
        ).save_pretrained(unfinished)
        bench.models.mkdir(exist_ok=True)
        shutil.move(unfinished, folder)
        gc.collect()  # before memory is measured
        if bench.device == "cuda":
            torch.cuda.empty_cache()
    return folder


def make_spec(
    bench: Bench,
    model: Path,
    *,
    trainer: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **values: Any,
) -> TrainerSpec:
    """Return the spec of a trainer in this process."""
    given = {"dtype": "bfloat16", "device": bench.device} | values
    return trainer_spec(
        model,
        bench.folder,
        trainer=TrainerConfig(**(trainer or {})),
        algorithm=AlgorithmConfig(**(algorithm or {})),
        measures_gap=False,  # a random batch has no engine logprobs
        **given,
    )


class Trainer:
    """A trainer in this process, with one rank."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._service = TrainerService(spec)
        self.step = self._service.rank

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the trainer's thread."""
        return self._service._torch_thread.submit(work).result()


def make_batch(
    vocab_size: int, lengths: list[int], *, prompt: int, group_size: int
) -> tuple[BatchHeader, Tokens]:
    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        group, sample = divmod(index, group_size)
        if sample == 0:
            head = rng.integers(0, vocab_size, prompt)
        ids = np.concatenate([head, rng.integers(0, vocab_size, length)])
        noise = rng.normal(-np.log(vocab_size), 0.05, len(ids))
        is_sampled = np.arange(len(ids)) >= prompt
        reward = float(rng.random())
        rows.append(Row(group, sample, 0, ids, is_sampled, noise, reward))
    return batch_of(rows)


def at_version(
    version: int, header: BatchHeader, arrays: Tokens
) -> tuple[BatchHeader, Tokens]:
    """Return the batch as if sampled at `version`."""
    versions = np.where(arrays.is_sampled, version, -1)
    header = header.model_copy(update={"version": version, "min_version": version})
    return header, replace(arrays, spans=spans_of(versions))
