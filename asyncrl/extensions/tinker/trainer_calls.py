"""Calls of the trainer process. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt

from asyncrl.base.errors import Message
from asyncrl.base.http import Caller
from asyncrl.config.trainer_config import Beta

Part = Literal["attn", "mlp", "unembed"]
Answer = TypeVar("Answer", bound=BaseModel)
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ALPHA = 32.0
"""Adapters are scaled by ALPHA / rank, as the clients' cookbook expects."""


class AdapterCall(Message):
    adapter: str = Field(min_length=1)


class OpenCall(AdapterCall):
    """Add an adapter to the layers of `parts`, with A drawn from `seed` and B zero."""

    rank: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**63)
    parts: list[Part] = Field(min_length=1)


class OpenedAdapter(Message):
    """`targets`: full names of the layers, for engines. `scale`: of B A."""

    targets: list[str]
    scale: float


class AdamParams(Message):
    """AdamW of one step. `grad_clip_norm`: bound of the adapter's gradient norm (0 = no
    bound).
    """

    learning_rate: AtLeast0 = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: AtLeast0 = 1e-12
    weight_decay: AtLeast0 = 0.0
    grad_clip_norm: AtLeast0 = 0.0


class StepCall(AdapterCall):
    params: AdamParams


class StepMetrics(Message):
    metrics: dict[str, float]


class GradientCall(AdapterCall):
    """The head of a /forward_backward body: this message in a line, and behind it a
    serialized ForwardBackwardRequest.

    `masked`: positions without a loss, by the number of their datum.
    """

    masked: dict[int, list[NonNegativeInt]] = {}


class FileCall(AdapterCall):
    path: Path
    with_optimizer: bool = False


class ExportedAdapter(Message):
    """What PrepareRequest says of the file."""

    digest: str
    num_tensors: int
    num_bytes: int


class TinkerState(Message):
    """`adapters`: names of the open ones."""

    device: str
    adapters: list[str]


class TinkerTrainer:
    """Calls the trainer process, which executes calls one after the other. After a
    refusal nothing has changed.

    Waits: a call waits at most `timeout_s`. Errors: CallRefused, with status 4xx if the
    request was wrong; CallLost if the trainer is gone.
    """

    def __init__(self, caller: Caller, timeout_s: float | None = None) -> None:
        self._caller = caller
        self._timeout_s = timeout_s

    async def open(
        self, adapter: str, rank: int, seed: int, parts: Collection[Part]
    ) -> OpenedAdapter:
        """Add an adapter. Its name must be new."""
        call = OpenCall(adapter=adapter, rank=rank, seed=seed, parts=sorted(parts))
        return await self._post("/open", call, OpenedAdapter)

    async def drop(self, adapter: str) -> None:
        await self._post("/drop", AdapterCall(adapter=adapter), TinkerState)

    async def drop_gradient(self, adapter: str) -> None:
        await self._post("/drop_gradient", AdapterCall(adapter=adapter), TinkerState)

    async def forward_backward(
        self, adapter: str, body: bytes, masked: Mapping[int, Sequence[int]] = {}
    ) -> bytes:
        """Add a request's gradient to the adapter's. `body`: a serialized
        ForwardBackwardRequest; the answer is a ForwardBackwardOutput. `masked`: positions
        whose weight or advantage counts as 0, by the number of their datum.
        """
        places = {index: [*own] for index, own in masked.items()}
        head = GradientCall(adapter=adapter, masked=places)
        content = head.model_dump_json().encode() + b"\n" + body
        return await self._caller.read(
            "POST", "/forward_backward", content, self._timeout_s
        )

    async def optim_step(self, adapter: str, params: AdamParams) -> dict[str, float]:
        """Take an AdamW step with the gradient that was added up, and drop it. Refused
        without a gradient. A gradient that is not finite is dropped, too.
        """
        call = StepCall(adapter=adapter, params=params)
        return (await self._post("/optim_step", call, StepMetrics)).metrics

    async def save(self, adapter: str, path: Path, with_optimizer: bool) -> None:
        """Write a safetensors file, which is whole and durable under its name."""
        call = FileCall(adapter=adapter, path=path, with_optimizer=with_optimizer)
        await self._post("/save", call, TinkerState)

    async def load(self, adapter: str, path: Path, with_optimizer: bool) -> None:
        """Read a saved file into an adapter of the same layers and rank, and drop the
        gradient. Without the optimizer's state, AdamW begins again.
        """
        call = FileCall(adapter=adapter, path=path, with_optimizer=with_optimizer)
        await self._post("/load", call, TinkerState)

    async def export(self, adapter: str, path: Path) -> ExportedAdapter:
        """Write the file that an engine's /prepare reads. It is whole under its name, and
        not synced to the disk.
        """
        call = FileCall(adapter=adapter, path=path)
        return await self._post("/export", call, ExportedAdapter)

    async def aclose(self) -> None:
        await self._caller.aclose()

    async def _post(self, path: str, call: BaseModel, answer: type[Answer]) -> Answer:
        return await self._caller.post(path, call, answer, timeout_s=self._timeout_s)
