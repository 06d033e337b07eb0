"""Trainer process: one base model and a table of adapters, each trained by a client.

One thread owns torch and executes calls one after the other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from aiohttp import web
from safetensors import SafetensorError
from torch import Tensor

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import sync
from asyncrl.base.http import Refused, add_route, make_app, read_message
from asyncrl.config.trainer_config import LoraConfig
from asyncrl.extensions.tinker import trainer_calls as api
from asyncrl.extensions.tinker.datums import (
    Array,
    Datums,
    Limits,
    answer_of,
    config_of,
    pack,
    read_datums,
    read_request,
)
from asyncrl.extensions.tinker.tinker_losses import Loss, ScoredTargets, loss_of
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.trainer.model.build_model import TrainedModel, set_up_torch
from asyncrl.trainer.ranks.optimizer import Trained
from asyncrl.trainer.ranks.rank_process import serve_trainer
from asyncrl.trainer.ranks.ranks import ONE_RANK
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.export import LazyWeights, export_weights, named_weights
from asyncrl.weights.tensor_files import rename_adapters, stored_names, stored_pieces

T = TypeVar("T")
ATTENTION_PARTS = ("attn", "attention", "mixer")
"""Words in the names of attention layers and recurrences, e.g. linear_attn."""


class TinkerRank:
    """The base model and its adapters, on the torch thread.

    Invariant: after a refusal nothing has changed, gradients included.
    Invariant: on a CPU the bits of an adapter depend on its own calls only.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Raises ConfigError."""
        if spec.trainer.world_size > 1 or spec.trainer.lora is None:
            raise ConfigError(
                "the trainer of Tinker clients has one rank, and adapters only",
                way_out="set trainer.world_size=1 and trainer.lora.targets=all.",
            )
        set_up_torch(spec)
        self._max_tokens = spec.trainer.micro_batch_tokens
        self._model = TrainedModel(spec, ONE_RANK, needs_reference=False)
        assert self._model.adapters is not None
        self._table = self._model.adapters
        model = self._model.policy.model
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", math.inf)
        self._limits = Limits(self._model.vocab_size, context)
        weights, _ = self._table.merging(named_weights(model))
        self._stored = stored_names(stored_pieces(model, weights))

    def state(self) -> api.TinkerState:
        """Return the open adapters. Any thread may call it."""
        names = [one for one in self._table.names if one not in self._table.of_run]
        return api.TinkerState(device=self._model.device.type, adapters=names)

    def open(self, call: api.OpenCall) -> api.OpenedAdapter:
        """Add an adapter. Raises Refused."""
        head = self._model.policy.model.get_output_embeddings()
        targets = [
            name
            for name, layer in self._table.layers.items()
            if part_of(name, is_head=layer is head) in call.parts
        ]
        config = LoraConfig(rank=call.rank, alpha=api.ALPHA, targets=targets)
        self._table.open(call.adapter, config, call.seed)
        return api.OpenedAdapter(targets=targets, scale=config.scale)

    def drop(self, call: api.AdapterCall) -> api.TinkerState:
        self._table.drop(call.adapter)
        return self.state()

    def forward_backward(self, call: api.GradientCall, body: bytes) -> bytes:
        """Add the gradient of a serialized ForwardBackwardRequest, and return its
        ForwardBackwardOutput. Raises Refused.
        """
        trained = self._table.trained(call.adapter)
        request = read_request(body)
        loss, config = loss_of(request.loss_fn, config_of(request))
        datums = read_datums(request, loss, call.masked, self._limits)
        logprobs = np.zeros(sum(one.size for one in datums.targets), np.float32)
        total = 0.0
        with own_gradient(trained) as weights:
            packed = pack(datums, call.adapter, self._model.policy, self._max_tokens)
            for one in packed:
                with torch.set_grad_enabled(not request.forward_only):
                    entry_E = self._model.policy(one.micro).entry_E
                    lp_M = entry_E[one.entry_M].double()
                    tokens = ScoredTargets(lp_M, one.inputs, one.datum_M)
                    value = loss.function(tokens, config).sum()
                if not request.forward_only:
                    value.backward()  # type: ignore[no-untyped-call]
                logprobs[one.place_M] = lp_M.detach().cpu().numpy()
                total += float(value.detach())
            _refuse_infinite(total, logprobs, weights)
        metrics = {"loss:sum": total, **metrics_of(datums, logprobs, loss)}
        return answer_of(datums.targets, logprobs, metrics)

    def optim_step(self, call: api.StepCall) -> api.StepMetrics:
        """Take a step of AdamW. Raises Refused."""
        trained = self._table.trained(call.adapter)
        params = call.params
        weights = [*trained.masters.named.values()]
        if all(weight.grad is None for weight in weights):
            raise Refused(
                400,
                f"the adapter {call.adapter!r} has no gradient",
                rule="a step follows at least one forward_backward",
                way_out="call forward_backward first; a load drops the gradient.",
            )
        norm = float(
            torch.nn.utils.clip_grad_norm_(weights, params.grad_clip_norm or math.inf)
        )
        if not math.isfinite(norm):
            trained.drop_gradient()
            raise Refused(
                400,
                f"the norm of the gradient is {norm}",
                rule="a step needs a finite gradient; this one is dropped, and the weights stay",
                way_out="call forward_backward again, with smaller advantages or weights.",
            )
        for group in trained.optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        trained.step()
        trained.drop_gradient()
        metrics = {
            "grad_norm:mean": norm,
            "learning_rate:mean": params.learning_rate,
            "num_steps:max": float(trained.num_steps),
        }
        return api.StepMetrics(metrics=metrics)

    def drop_gradient(self, call: api.AdapterCall) -> api.TinkerState:
        self._table.trained(call.adapter).drop_gradient()
        return self.state()

    def save(self, call: api.FileCall) -> api.TinkerState:
        """Write a whole, durable safetensors file. Raises Refused."""
        unfinished = call.path.with_name(f".{call.path.name}.new")
        with _files(call.path):
            try:
                self._table.save(
                    call.adapter, unfinished, with_optimizer=call.with_optimizer
                )
                sync(unfinished)
                unfinished.replace(call.path)
                sync(call.path.parent)
            finally:
                unfinished.unlink(missing_ok=True)
        return self.state()

    def load(self, call: api.FileCall) -> api.TinkerState:
        """Read a saved file. Raises Refused."""
        with _files(call.path):
            self._table.load(
                call.adapter, call.path, with_optimizer=call.with_optimizer
            )
        return self.state()

    def export(self, call: api.FileCall) -> api.ExportedAdapter:
        """Write what engines read. Raises Refused."""
        tensors = rename_adapters(self._table.tensors(call.adapter), self._stored)
        with _files(call.path):
            made = export_weights(LazyWeights(tensors), call.path, 0, self._model.dtype)
        return api.ExportedAdapter(
            digest=made.digest, num_tensors=made.num_tensors, num_bytes=made.num_bytes
        )


def part_of(name: str, *, is_head: bool) -> api.Part:
    """Return the part of a model that a linear layer belongs to."""
    if is_head:
        return "unembed"
    is_attention = any(word in name for word in ATTENTION_PARTS)
    return "attn" if is_attention else "mlp"


@contextmanager
def own_gradient(trained: Trained) -> Iterator[Sequence[Tensor]]:
    """Yield weights without a gradient. Their new gradient is added to the old one at the
    end; after an error only the old one remains.
    """
    weights = [*trained.masters.named.values()]
    kept = [weight.grad for weight in weights]
    trained.drop_gradient()
    try:
        yield weights
    except BaseException:
        for weight, old in zip(weights, kept, strict=True):
            weight.grad = old
        raise
    for weight, old in zip(weights, kept, strict=True):
        if old is not None:
            weight.grad = old if weight.grad is None else old.add_(weight.grad)


def _refuse_infinite(total: float, logprobs: Array, weights: Sequence[Tensor]) -> None:
    """Raise Refused unless loss, logprobs and gradient are finite."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    are_finite = [bool(one.isfinite().all()) for one in gradients]
    if math.isfinite(total) and np.isfinite(logprobs).all() and all(are_finite):
        return
    raise Refused(
        400,
        f"loss:sum is {total}, or the gradient is not finite",
        rule="loss, logprobs and gradient are finite numbers",
        way_out="send smaller advantages or weights, or load an earlier checkpoint.",
    )


def metrics_of(datums: Datums, logprobs: Array, loss: Loss) -> dict[str, float]:
    """Return metrics. A name ends in how clients join the metrics of several requests."""
    used = datums.inputs[loss.inputs[0]] != 0
    metrics = {"tokens:sum": float(used.sum())}
    if "logprobs" in datums.inputs and used.any():
        changes = logprobs[used] - datums.inputs["logprobs"][used]
        metrics["ratio:mean"] = float(np.exp(changes, dtype=np.float64).mean())
    return metrics


@contextmanager
def _files(path: Path) -> Iterator[None]:
    """Raise Refused for errors of files."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Refused(
            507,
            f"cannot write or read {path}: {error}",
            way_out="check the path, its permissions and the space on its disk.",
        ) from error


def make_service(spec: TrainerSpec, secret: str) -> web.Application:
    """Return the app of a TinkerRank on its own thread. Raises like TinkerRank."""
    torch_thread = ThreadPoolExecutor(1, "torch")
    # torch's number of CPU threads belongs to the calling thread.
    rank = torch_thread.submit(TinkerRank, spec).result()
    app = make_app(secret)

    def on_torch_thread(function: Callable[..., T]) -> Callable[..., Awaitable[T]]:
        @wraps(function)
        async def act(*arguments: object) -> T:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(torch_thread, function, *arguments)

        return act

    async def forward_backward(request: web.Request) -> web.Response:
        head, _, body = (await request.read()).partition(b"\n")
        call = read_message(api.GradientCall, head)
        answer = await on_torch_thread(rank.forward_backward)(call, body)
        return web.Response(body=answer)

    async def health() -> TrainerHealth:
        # Not on the torch thread, which may compute for minutes.
        return TrainerHealth(policy_version=0, device=rank.state().device)

    add_route(app, "GET", "/health", health)
    app.router.add_post("/forward_backward", forward_backward)
    calls = (
        rank.open,
        rank.drop,
        rank.drop_gradient,
        rank.optim_step,
        rank.save,
        rank.load,
        rank.export,
    )
    for function in calls:
        add_route(app, "POST", f"/{function.__name__}", on_torch_thread(function))
    return app


if __name__ == "__main__":
    serve_trainer(make_service)
