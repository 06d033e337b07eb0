"""Rows of each part, and the arguments of a measurement. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "@row "
"""Start of an output line with a result as JSON."""

BASE = (
    "torch transformers tokenizers safetensors numpy pydantic pydantic_core annotated_types "
    "typing_inspection typing_extensions yaml xxhash psutil aiohttp rich typer jinja2 matplotlib"
).split()
"""Packages of every row."""


def say(**told: Any) -> None:
    """Print a result on its own line."""
    print(f"\n{MARK}{json.dumps(told)}", flush=True)


class NotRunError(Exception):
    """The machine cannot run this measurement."""


@dataclass(frozen=True)
class Row:
    """A measurement: `function` is MODULE.NAME in this folder; `needs`: packages in addition to BASE."""

    part: int
    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the missing packages."""
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
    Row(5, "nccl", "jobs.with_vllm", {"case": "nccl"}),
    Row(5, "nccl-embedded", "jobs.with_vllm", {"case": "nccl-embedded"}),
    Row(5, "sleep", "jobs.with_vllm", {"case": "sleep"}),
    Row(5, "tensor-parallel", "jobs.with_vllm", {"case": "tensor-parallel"}),
    Row(5, "batch-invariance", "jobs.with_vllm", {"case": "batch-invariance"}),
    Row(5, "async-against-sync", "jobs.with_vllm", {"case": "async-against-sync"}),
)


@dataclass
class Bench:
    """Arguments of a measurement. `device`: cuda or cpu, where sizes are tiny.

    `label`: name of the device, for files; `folder`: of the row; `models`: shared by the rows of a part;
    `out`: for logs; `limit_s`: of the row.
    """

    device: str
    is_tiny: bool
    label: str
    folder: Path
    models: Path
    out: Path
    limit_s: float

    def tell(self, what: str, value: str, *, against: str = "", ok: bool | None = None) -> None:
        """Print a result. `against`: comparison; `ok`: None without a limit."""
        say(what=what, value=value, against=against, ok=ok)

    def check(self, what: str, value: float, limit: float, form: str = ".4f") -> None:
        """Print a result that may be at most `limit`."""
        self.tell(what, f"{value:{form}}", against=f"at most {limit:g}", ok=value <= limit)
