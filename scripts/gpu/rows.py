"""The rows of each part, what each needs, and what a measurement is given. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "@row "
"""Begins each line of a measurement's output that is a result, as JSON."""

BASE = (
    "torch transformers tokenizers safetensors numpy pydantic pydantic_core annotated_types "
    "typing_inspection typing_extensions yaml xxhash psutil aiohttp rich typer jinja2 matplotlib"
).split()
"""What every part imports. A wheel may have another name: yaml is PyYAML's."""


def say(**told: Any) -> None:
    """One result, on a line of its own, whatever was written before it."""
    print(f"\n{MARK}{json.dumps(told)}", flush=True)


class NotRunError(Exception):
    """Why a measurement cannot be made here: no fault of the code."""


@dataclass(frozen=True)
class Row:
    """One measurement: a function of a module in this folder, called with `arguments`. `needs`: packages
    beside BASE.
    """

    part: int
    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Packages that it needs and this Python does not have."""
        importlib.invalidate_caches()
        return [name for name in (*BASE, *self.needs) if importlib.util.find_spec(name) is None]


def _speed(name: str, shape: str, tokens: int, peer: str, num: int, *, checkpointing: bool = False) -> Row:
    arguments = {"shape": shape, "tokens": tokens, "peer": peer, "num_sequences": num}
    return Row(2, name, "training.speed", arguments | {"checkpointing": checkpointing})


ROWS = (
    Row(1, "tests", "correct.marked_tests", needs=("pytest", "hypothesis")),
    Row(1, "losses", "correct.all_losses"),
    Row(1, "head", "correct.head"),
    Row(1, "weights", "correct.against_cpu", {"trainer": {}}),
    Row(1, "lora", "correct.against_cpu", {"trainer": {"lora": {"rank": 16}}}, needs=("peft",)),
    Row(1, "distances-0.5B", "correct.distances", {"shape": "0.5B"}),
    Row(1, "distances-7B", "correct.distances", {"shape": "7B"}),
    _speed("0.6B-16k", "0.6B", 16_384, "11,900 tok/s and 11.1 % MFU on one H100", 4),
    _speed("0.6B-65k", "0.6B", 65_536, "26.8 % MFU on one H100", 2),
    _speed("4B-16k", "4B", 16_384, "14.7 % and 36.1 % MFU on 8 H200", 4, checkpointing=True),
    Row(2, "trl", "training.beside_trl", needs=("trl", "datasets")),
    _speed("0.6B-65k-checkpointing", "0.6B", 65_536, "26.8 % MFU on one H100", 2, checkpointing=True),
    Row(3, "turns-ipc", "turns.handover", {"way": "ipc"}),
    Row(3, "turns-shm", "turns.handover", {"way": "shm"}),
    Row(3, "quickstart", "jobs.learns", {"config": "quickstart"}),
    Row(3, "agent", "jobs.learns", {"config": "agent"}, needs=("openai",)),
    Row(4, "0.6B-shm", "pushes.by_file", {"shape": "0.6B"}),
    Row(4, "0.6B-ipc", "pushes.by_chunks", {"shape": "0.6B"}),
    Row(4, "4B-shm", "pushes.by_file", {"shape": "4B"}),
    Row(4, "4B-ipc", "pushes.by_chunks", {"shape": "4B"}),
    *(
        Row(5, name, "jobs.with_vllm", {"case": name})
        for name in (
            "nccl",
            "nccl-embedded",
            "sleep",
            "tensor-parallel",
            "batch-invariance",
            "async-against-sync",
        )
    ),
)


@dataclass
class Bench:
    """What a measurement is given. `device` is cuda or cpu; on the CPU sizes are tiny.

    `label`: the device's name, for files. `folder` is the row's own; models lie in `models`, which the rows
    of a part share; plots go to `out`. `limit_s`: when the row is ended.
    """

    device: str
    is_tiny: bool
    label: str
    folder: Path
    models: Path
    out: Path
    limit_s: float

    def tell(self, what: str, value: str, *, against: str = "", ok: bool | None = None) -> None:
        """One result, printed at once. `against`: what it is compared with; `ok`: whether it passes (None:
        there is no limit).
        """
        say(what=what, value=value, against=against, ok=ok)

    def need_cuda(self, what: str) -> bool:
        """Whether there is a CUDA device; if not, say that `what` was not run."""
        if self.device != "cuda":
            self.tell(what, "not run: no CUDA device")
        return self.device == "cuda"
