"""The ranks of a critic on its own devices (placement.critic)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.messages import trainer_api as api
from asyncrl.messages.tokens import Tokens
from asyncrl.models.devices import choose_device
from asyncrl.models.profiling import StepProfiler
from asyncrl.trainer import packing, step_metrics
from asyncrl.trainer.build_model import set_up_torch
from asyncrl.trainer.critic import Critic
from asyncrl.trainer.objective import BatchNumbers, Objective
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.state import CRITIC, Progress, TrainerState
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.trainer.tree import BoolN


class CriticRank:
    """A rank behind those of the policy (TrainerRank), with the critic only. Both kinds
    get the same calls, and work at the same time.

    Invariant: all ranks make the same collective calls of `everyone` in the same order.
        The policy's ranks check and refuse, and this rank follows with agree().

    Example, train() with one optimizer step, each line one collective call:

        policy's ranks                        critic's ranks
        check the call and the batch          -                  agree, agree
        send which tokens have a loss         get them           broadcast
        proximal and reference logprobs       values             broadcast
        gradient                              gradient           agree
        loss and norm of the gradient         the same           merge: both step, or none
        metrics                               metrics            merge
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks, everyone: Ranks) -> None:
        set_up_torch(spec)
        self.spec = spec
        self.ranks = ranks
        self.everyone = everyone
        self.policy_version = 0
        self.device, dtype = choose_device(spec.device, spec.dtype)
        cuda = torch.cuda if self.device.type == "cuda" else None
        dtype_name = str(dtype).removeprefix("torch.")
        self._meter = step_metrics.StepMeter(everyone, dtype_name, cuda)
        self._objective = Objective(spec)
        self.critic = Critic(spec, ranks, self._meter)
        models = {CRITIC: self.critic.trained}
        self._state = TrainerState(models, everyone, spec, self.device)
        self._profiler = StepProfiler(
            spec.record_path.parent / PROFILE_FOLDER,
            f"critic-{ranks.rank}",
            spec.trainer.profile_steps,
            self.device,
        )
        self._is_open = False
        """Whether a gradient waits for its step."""

    def train(self, header: api.BatchHeader, arrays: Tokens) -> None:
        """Train on a batch, as TrainerRank.train. Raises Refused."""
        self._follow()
        batch = self._begin(header, arrays)
        loop = self.spec.trainer
        parts = packing.mini_batches(header, batch.has_loss, loop.mini_batches)
        with self._dropped_on_error():
            for epoch in range(loop.epochs):
                for number, chosen in enumerate(parts):
                    self._add_gradient(batch, chosen)
                    self._take_step(epoch * loop.mini_batches + number)
            self._end_version()

    def forward_backward(self, header: api.BatchHeader, arrays: Tokens) -> None:
        batch = self._begin(header, arrays)
        with self._dropped_on_error():
            self._add_gradient(batch, batch.has_loss)

    def optimizer_step(self) -> None:
        self._follow()
        with self._dropped_on_error():
            self._take_step(0)
            self._end_version()

    def begin_save_state(self, path: Path) -> Future[None]:
        """Begin to write this rank's part of the state. Raises Refused."""
        self._follow()
        progress = Progress(policy_version=self.policy_version)
        return self._state.begin_save(progress, path, _unmoved)

    def load_state(self, path: Path) -> None:
        """Restore a saved state, and drop an open gradient. Raises Refused."""
        self._follow()
        self._before_change()
        self._drop_gradient()
        self.policy_version = self._state.load(path, _stay).policy_version

    def _follow(self) -> None:
        """Raise Refused if the policy's ranks do."""
        self.everyone.agree(lambda: None)

    def _begin(self, header: api.BatchHeader, arrays: Tokens) -> BatchNumbers:
        """Compute the values, send them, and return the batch with the returns."""
        self._follow()
        has_loss = np.zeros(len(arrays), np.bool_)
        self.everyone.broadcast(has_loss.view(np.uint8), 0)
        if not self._is_open:
            self._meter.start()
            self._profiler.enter(self.policy_version + 1)
        batch = BatchNumbers(header, arrays, has_loss)
        batch.value_N = self.critic.values(batch)
        first_of_critic = self.spec.trainer.world_size
        self.everyone.broadcast(batch.value_N, first_of_critic)
        batch.advantage_N = self._objective.advantages(batch)
        self.critic.begin_version(batch, is_first=not self._is_open)
        return batch

    def _add_gradient(self, batch: BatchNumbers, chosen: BoolN) -> None:
        self.everyone.agree(lambda: self.critic.add_gradient(batch, chosen))

    def _take_step(self, index: int) -> None:
        """Take the step `index` of the version if all numbers of both models are finite."""
        loop = self.spec.trainer
        number = self.policy_version * loop.epochs * loop.mini_batches + index
        needed = self.everyone.merge(self.critic.clip(number))
        if all(map(math.isfinite, needed.values())):
            self._before_change()
            self.critic.trained.step()
        else:
            # The policy's ranks may end the run now.
            self._follow()
        self.critic.drop_gradient()

    def _end_version(self) -> None:
        self._profiler.end()
        self.policy_version += 1
        self._is_open = False
        own_s = self._meter.numbers()["perf/critic_s"]
        own = self.critic.metrics() | {"perf/critic_s": own_s}
        self.everyone.merge(own if self.ranks.is_first else {})

    def _before_change(self) -> None:
        """Wait for the copy of a checkpoint, which reads the weights."""
        if self._state.copying is not None:
            wait([self._state.copying])

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        except BaseException:
            self._drop_gradient()
            raise

    def _drop_gradient(self) -> None:
        self._is_open = False
        self._profiler.drop()
        self.critic.drop_gradient()


def _stay(prefix: str) -> None:
    """Bring no model to the device, where this one always is."""


def _unmoved(tensor: Tensor) -> Tensor:
    """Return the tensor: a critic on its own devices is never offloaded."""
    return tensor
