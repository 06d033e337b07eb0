"""Fixtures that several parts share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("whatever the machine does", deadline=None)
settings.load_profile("whatever the machine does")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where torch sees no CUDA device. Those marked vllm see to it themselves:
    vllm_process.vllm_python.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny Qwen3 (tests/tiny_model.py), seed 0. Read only: tests that write make
    their own.
    """
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
