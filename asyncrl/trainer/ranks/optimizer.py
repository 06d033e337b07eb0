"""Optimizer, learning rate schedule, gradient clipping and master weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalise

from asyncrl.config import TrainerConfig
from asyncrl.trainer.ranks.offload import local_of
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.weights.export import gathered_tensor
from asyncrl.weights.tensor_files import float32_names

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's authors, and of torch.optim.Muon."""


def make_optimizer(
    masters: MasterWeights, config: TrainerConfig
) -> torch.optim.Optimizer:
    """Return fused AdamW, or Muon, with weight decay on matrices only."""
    # Decay pulls toward zero, which is wrong for the weight of a norm.
    matrices = list[Tensor]()
    others = list[Tensor]()
    for weight in masters.named.values():
        (matrices if weight.ndim >= 2 else others).append(weight)
    groups = [
        {
            "params": matrices,
            "weight_decay": config.weight_decay,
            "hidden": [masters.named[name] for name in masters.hidden],
        },
        {"params": others, "weight_decay": 0.0, "hidden": []},
    ]
    kind = {"adamw": torch.optim.AdamW, "muon": Muon}[config.optimizer]
    return kind(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of a language model's weights that Muon trains: the matrices of
    linear layers and routers, and stacks of experts' matrices.

    Not embeddings and head, whose rows are tokens (section 2 of
    https://arxiv.org/abs/2502.16982), nor numbers that are not a matrix from one hidden
    state to another: vectors, convolutions, biases of positions.
    """
    modules = dict(model.named_modules())
    get_head: Any = model.get_output_embeddings
    head = get_head().weight
    found = list[str]()
    for name, weight in model.named_parameters():
        module = modules[name.rpartition(".")[0]]
        is_hidden = type(module).__name__.endswith("Experts") and weight.ndim == 3
        if weight.ndim == 2 and name.endswith(".weight"):
            is_hidden = weight is not head and not isinstance(module, nn.Embedding)
        if is_hidden and weight.requires_grad:
            found.append(name)
    return found


class Muon(torch.optim.AdamW):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the `hidden` matrices of a
    group, AdamW for its other weights.

    Muon replaces the momentum of a matrix's gradient by a nearly orthogonal matrix, times
    0.2 * sqrt(max(rows, columns)): the RMS of AdamW's updates, so that both share learning
    rate and weight decay (eq. 4 of https://arxiv.org/abs/2502.16982).

    A matrix whose gradient is zero keeps its weights, but for their decay.

    Each rank orthogonalises whole matrices, for the same bits with any number of ranks:
    Newton-Schulz of a shard is another update.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, and drop the gradients of hidden matrices. Collective."""
        for group in self.param_groups:
            for weight in group["hidden"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                tensors = (weight, weight.grad, state["momentum_buffer"])
                for matrices in zip(*map(_matrices, tensors), strict=True):
                    _update(*matrices, rate=group["lr"], decay=group["weight_decay"])
                # AdamW skips a weight without a gradient.
                weight.grad = None
        super().step()


def _matrices(tensor: Tensor) -> list[Tensor]:
    """Return a matrix, or this rank's matrices of a stack [E, rows, columns]. FSDP2 shards
    the first dimension: an expert is whole on its rank.
    """
    return list(local_of(tensor)) if tensor.ndim == 3 else [tensor]


def _update(
    weight: Tensor, gradient: Tensor, momentum: Tensor, *, rate: float, decay: float
) -> None:
    """Update a matrix, whole or sharded, and its momentum in place."""
    momentum.lerp_(gradient, 1 - MOMENTUM)
    # Nesterov's. Newton-Schulz computes in bfloat16, so ranks gather half the bytes.
    update: Any = gradient.lerp(momentum, MOMENTUM).bfloat16()
    whole = orthogonalise(gathered_tensor(update), NEWTON_SCHULZ, ns_steps=5, eps=1e-7)
    # An expert without tokens, or a batch of equal rewards. The momentum of old gradients
    # would move the matrix by full updates for some 300 steps more.
    whole.mul_(gathered_tensor(torch.linalg.vector_norm(gradient)) > 0)
    if isinstance(update, DTensor):
        mesh, placements = update.device_mesh, update.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    weight.mul_(1 - rate * decay)
    weight.add_(whole, alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))


def learning_rate_at(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Warm-up reaches the peak at step warmup_steps - 1; decay reaches 0 one step after
    the last.
    """
    peak = config.learning_rate
    past_warmup = step - config.warmup_steps
    if past_warmup < 0:
        return peak * (step + 1) / config.warmup_steps
    length = max(
        config.num_steps * config.mini_batches * config.epochs - config.warmup_steps, 1
    )
    progress = min(past_warmup / length, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return (
        peak
        * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.schedule]
    )


class MasterWeights:
    """Float32 weights for the optimizer, under a bfloat16 model.

    Invariant: outside of a step the model's weights are the rounded masters.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], hidden: Sequence[str] = ()
    ) -> None:
        """`named`: float32 weights, which are their own masters. `hidden`: the names
        that Muon trains.
        """
        self.named: dict[str, Tensor] = dict(named)
        self.hidden = hidden
        self._working: dict[str, nn.Parameter] = {}

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> MasterWeights:
        """Return the masters of a float32 model, which is cast to `dtype`."""
        named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        masters = cls(named, hidden_matrices(model))
        if dtype == torch.float32:
            return masters
        for name, parameter in named.items():
            master = parameter.detach().clone()
            masters.named[name] = master
            # Gradients of micro-batches are summed in the float32 master. Summed in
            # bfloat16, later ones would be rounded away.
            parameter.register_post_accumulate_grad_hook(partial(_collect, master))  # type: ignore[no-untyped-call]
        cast_model(model, dtype)
        masters._working = named
        return masters

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self._working.items():
            parameter.copy_(self.named[name])


def _collect(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    # Or the next micro-batch would add to it in bfloat16, and be collected twice.
    parameter.grad = None


PART_BITS = 36
"""Gradients of parts are multiples of 2**-36, for a loss that is a sum over tokens or
sequences.
"""
MOST_PART_SUM = 2.0**62
"""Limit of the sum of parts as integers, below the 2**63 of int64."""
CONVERTED_AT_ONCE = 2**24
"""Numbers of a gradient that are converted at once, which bounds the copies."""


class Trained:
    """Weights, their optimizer, and the sum of the gradients of parts.

    The sum has the same bits in any order of the parts: integers are added exactly, unlike
    floats. Example: a mean gradient of 1e-6 over 4,000 tokens is 274,877,907 times 2**-36.

    Life: a gradient, or add_part() for each part -> join_parts() -> prepare_step() -> step(),
        or drop_gradient() at any time.
    """

    def __init__(self, masters: MasterWeights, config: TrainerConfig) -> None:
        self.masters = masters
        self.optimizer = make_optimizer(masters, config)
        self._config = config
        self._sums = dict[str, Tensor]()
        self._bound = 0.0
        """Above each number of the sums; infinite or NaN after such a gradient."""

    @property
    def num_steps(self) -> int:
        """Return the number of AdamW's steps."""
        for state in self.optimizer.state.values():
            return int(state["step"])
        return 0

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Return weights and the optimizer's state, by their names in a checkpoint."""
        state = dict[str, Tensor]()
        for name, master in self.masters.named.items():
            state[f"{prefix}weights.{name}"] = master.detach()
            # Before the first step AdamW has no state.
            for kind, tensor in self.optimizer.state.get(master, {}).items():
                state[f"{prefix}optimizer.{kind}.{name}"] = tensor
        return state

    def make_state(
        self, sizes: Mapping[str, tuple[int, ...]], prefix: str = ""
    ) -> None:
        """Make the optimizer's state of a checkpoint with these sizes, without content.
        A new optimizer has none, and a checkpoint is read into tensors that exist.
        """
        self.optimizer.state.clear()
        start = f"{prefix}optimizer."
        for key, size in sizes.items():
            if not key.startswith(start):
                continue
            kind, name = key.removeprefix(start).split(".", 1)
            master = self.masters.named[name]
            # AdamW's count of steps has no dimensions, so it is not sharded like its
            # weight.
            scalar = torch.zeros((), device=master.device)
            made = torch.zeros_like(master) if size else scalar
            self.optimizer.state[master][kind] = made

    def tensors(self) -> list[Tensor]:
        """Return weights, the optimizer's state and the gradient."""
        gradients = [master.grad for master in self.masters.named.values()]
        own = [*self.state().values(), *gradients, *self._sums.values()]
        return [tensor for tensor in own if tensor is not None]

    @torch.no_grad()
    def add_part(self, size: int) -> None:
        """Add the gradient of a mean over `size` tokens or sequences, and drop it."""
        factor = size * 2.0**PART_BITS
        bounds = list[Tensor]()
        for name, master in self.masters.named.items():
            if master.grad is None:
                continue
            part = local_of(master.grad).reshape(-1)
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(part, dtype=torch.int64)
            if part.numel():
                bounds.append(torch.linalg.vector_norm(part, math.inf))
            for own, whole in _slices(part, self._sums[name]):
                # In double: float32 would round the integers to 24 bits.
                whole.add_(own.double().mul_(factor).round_().long())
            master.grad = None
        if bounds:
            self._bound += float(torch.stack(bounds).amax()) * factor

    @torch.no_grad()
    def join_parts(self, size: int) -> None:
        """Set the gradient of the mean over all `size` tokens or sequences. After an
        overflow it is not finite, as it would be in floats.
        """
        factor = math.inf
        if self._bound < MOST_PART_SUM:
            factor = 2.0**-PART_BITS / size
        for name, whole in self._sums.items():
            master = self.masters.named[name]
            gradient = torch.empty_like(master)
            target = local_of(gradient).view(-1)
            for own, part in _slices(target, whole):
                own.copy_(part.double().mul_(factor))
            master.grad = gradient
        self._drop_parts()

    def prepare_step(self, number: int, ranks: Ranks) -> float:
        """Set the learning rate of optimizer step `number` of the run, and clip the
        gradient to trainer.max_grad_norm; return its norm before. Collective.
        """
        config = self._config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(config, number)
        weights = list(self.masters.named.values())
        max_norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(weights, max_norm)
        # One rank's norm for all: a single rank that skips a step would have other
        # weights.
        return ranks.gather(float(gathered_tensor(norm)))[0]

    def step(self) -> None:
        self.optimizer.step()
        self.masters.write_back()

    def drop_gradient(self) -> None:
        # None, not zeros: a weight without a gradient is skipped by AdamW, and the
        # memory is free while engines use the device.
        self.optimizer.zero_grad(set_to_none=True)
        self._drop_parts()

    def _drop_parts(self) -> None:
        self._sums.clear()
        self._bound = 0.0


def _slices(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(one, CONVERTED_AT_ONCE),
        torch.split(other, CONVERTED_AT_ONCE),
        strict=True,
    )


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, not buffers: rotary embeddings must not be rounded."""
    kept = float32_names(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
