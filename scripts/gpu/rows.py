"""Rows of each part, and the arguments of a measurement. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WITHIN = 0.25
"""Allowed difference from the planned memory."""
MARK = "@row "
"""Start of an output line with a result as JSON."""

BASE = (
    "torch transformers tokenizers safetensors numpy pydantic pydantic_core annotated_types "
    "typing_inspection typing_extensions yaml xxhash psutil aiohttp rich typer jinja2 matplotlib "
    "accelerate peft"
).split()
"""Packages of every row."""
GATEWAY = (
    "fastapi",
    "opentelemetry",
    "starlette",
    "uvicorn",
    "httptools",
    "llguidance",
)


def say(**told: Any) -> None:
    """Print a result on its own line."""
    print(f"\n{MARK}{json.dumps(told)}", flush=True)


class NotRunError(Exception):
    """The machine cannot run this measurement."""


@dataclass(frozen=True)
class Row:
    """A measurement: `function` is MODULE.NAME in this folder; `needs`: packages in
    addition to BASE.
    """

    part: int
    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the missing packages. vLLM may be in .venv-vllm or $VENV_VLLM."""
        missing = [
            name
            for name in (*BASE, *self.needs)
            if importlib.util.find_spec(name) is None
        ]
        folder = os.environ.get("VENV_VLLM") or Path(__file__).parents[2] / ".venv-vllm"
        has_vllm = Path(folder).is_dir()
        return [name for name in missing if name != "vllm" or not has_vllm]


def _speed(
    part: int,
    shape: str,
    tokens: int,
    anchor: tuple[float, float],
    peer: str,
    *,
    checkpointing: bool = False,
) -> Row:
    """`anchor`: estimated tokens/s and MFU on one H100 with compiled layers and
    FlashAttention 3.
    """
    name = f"{shape}-{tokens // 1000}k{'-checkpointing' if checkpointing and shape == '0.6B' else ''}"
    arguments = {"shape": shape, "tokens": tokens, "anchor": anchor, "peer": peer}
    arguments |= {
        "num_sequences": 4 if tokens < 20_000 else 2,
        "checkpointing": checkpointing,
    }
    return Row(part, name, "training.speed", arguments)


PRIME_RL = "prime-rl on one H100, recomputing all:"
ROWS = (
    Row(1, "attention", "kernels.attention"),
    _speed(1, "0.6B", 16_384, (43_700, 0.41), f"{PRIME_RL} 11,900 tok/s, 11.1 %"),
    _speed(
        1,
        "4B",
        16_384,
        (10_000, 0.39),
        "prime-rl on 8 H200: 14.7 %",
        checkpointing=True,
    ),
    Row(1, "0.6B-ipc", "pushes.by_chunks", {"shape": "0.6B"}),
    Row(1, "colocated-ipc", "colocated.handover", {"way": "ipc"}),
    Row(1, "quickstart", "jobs.learns", {"config": "quickstart"}),
    Row(2, "tests", "correct.marked_tests", needs=("pytest", "hypothesis")),
    Row(2, "losses", "correct.all_losses"),
    Row(2, "head", "correct.head"),
    Row(2, "weights", "correct.against_cpu", {"trainer": {}}),
    Row(2, "lora", "correct.against_cpu", {"trainer": {"lora": {"rank": 16}}}),
    _speed(3, "0.6B", 65_536, (10_100, 0.27), f"{PRIME_RL} 10,100 tok/s, 26.8 %"),
    Row(3, "deterministic", "training.repeats", {"shape": "0.6B"}),
    Row(3, "trl", "training.beside_trl", needs=("trl", "datasets")),
    _speed(
        3,
        "0.6B",
        65_536,
        (8_100, 0.21),
        f"{PRIME_RL} 10,100 tok/s, 26.8 %",
        checkpointing=True,
    ),
    Row(4, "colocated-shm", "colocated.handover", {"way": "shm"}),
    Row(4, "agent", "jobs.learns", {"config": "agent"}, needs=("openai", *GATEWAY)),
    Row(4, "4B-ipc", "pushes.by_chunks", {"shape": "4B"}),
    Row(5, "fused", "fused.fused_step"),
    Row(5, "one-device", "jobs.in_cases", {"case": "one-device"}),
    Row(5, "one-device-kill", "shared.survives_a_kill"),
    Row(5, "nccl", "jobs.in_cases", {"case": "nccl"}, needs=("vllm",)),
    Row(5, "nccl-embedded", "jobs.in_cases", {"case": "nccl-embedded"}),
    Row(5, "vllm", "engines.vllm", needs=("vllm",)),
    Row(
        5,
        "vllm-colocated",
        "jobs.in_cases",
        {"case": "vllm-colocated"},
        needs=("vllm",),
    ),
    Row(5, "vllm-async", "jobs.in_cases", {"case": "vllm-async"}, needs=("vllm",)),
    Row(
        5,
        "vllm-agent",
        "jobs.learns",
        {"config": "agent", "engine": "vllm"},
        needs=("vllm", "openai", *GATEWAY),
    ),
    Row(5, "decode", "engines.decode"),
    Row(
        5,
        "tensor-parallel",
        "jobs.in_cases",
        {"case": "tensor-parallel"},
        needs=("vllm",),
    ),
    Row(
        5,
        "batch-invariance",
        "jobs.in_cases",
        {"case": "batch-invariance"},
        needs=("vllm",),
    ),
)


@dataclass
class Bench:
    """Arguments of a measurement. `device`: cuda or cpu, where sizes are tiny.

    `label`: name of the device, for files; `folder`: of the row; `models`: shared by
    the rows of a part; `out`: for logs; `limit_s`: of the row.
    """

    device: str
    is_tiny: bool
    label: str
    folder: Path
    models: Path
    out: Path
    limit_s: float
    _made_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds left for the row."""
        return self.limit_s + self._made_s - time.monotonic()

    @property
    def place(self) -> str:
        """Placement of a run on the device."""
        return "0" if self.device == "cuda" else "cpu"

    def timed(
        self, call: Callable[[], object], num_warm_up: int, num_calls: int
    ) -> float:
        """Return the mean seconds of a call, after the first `num_warm_up`."""
        for _ in range(num_warm_up):
            call()
        self._wait_device()
        started_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        self._wait_device()
        return (time.perf_counter() - started_s) / num_calls

    def _wait_device(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def tell(
        self, what: str, value: str, *, against: str = "", ok: bool | None = None
    ) -> None:
        """Print a result. `against`: comparison; `ok`: None without a limit."""
        say(what=what, value=value, against=against, ok=ok)

    def against_anchor(
        self, what: str, value: float, anchor: float, form: str, *, against: str = ""
    ) -> None:
        """Print a figure beside its estimate. Below it, the row is marked and does not
        fail.
        """
        estimated = f"estimated {anchor:{form}} on an H100"
        is_below = value < anchor and not self.is_tiny
        say(
            what=what,
            value=f"{value:{form}}",
            against=f"{estimated}; {against}",
            ok=None,
            below=is_below,
        )

    def memory(
        self, planned: float | None, measured: float, *, is_limit: bool = True
    ) -> None:
        """Print the peak memory in bytes beside what asyncrl.launch.plan counts, within
        a limit or not.
        """
        if planned is None:
            self.tell("peak memory", f"{measured / 2**30:.2f} GiB", against="no plan")
            return
        against = f"planned {planned / 2**30:.2f} GiB, {measured / planned - 1:+.1%}"
        ok = abs(measured / planned - 1) <= WITHIN if is_limit else None
        self.tell("peak memory", f"{measured / 2**30:.2f} GiB", against=against, ok=ok)

    def check(self, what: str, value: float, limit: float, form: str = ".4f") -> None:
        """Print a result that may be at most `limit`."""
        self.tell(
            what, f"{value:{form}}", against=f"at most {limit:g}", ok=value <= limit
        )
