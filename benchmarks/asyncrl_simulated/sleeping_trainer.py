"""The launcher `sleeping`: its trainers sleep instead of computing, like a device
elsewhere. Every token gets the logprob 0, and the weights stay.

The environment variable ASYNCRL_SLEEP_US has the microseconds per token. With
ASYNCRL_COMPUTES set, the trainers also compute: they are slow, and learn as usual.
`python -m asyncrl_simulated.sleeping_trainer --spec FILE --fd N`: rank of such a trainer.
"""

from __future__ import annotations

import dataclasses
import os
import time

import torch

from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.processes import ChildProcess, ProcessSpec

MODULE = "asyncrl.trainer.ranks.rank_process"


class SleepingLauncher(LocalLauncher):
    def __init__(self, address: str) -> None:
        super().__init__()

    def process(self, node: int, spec: ProcessSpec) -> ChildProcess:
        if spec.module == MODULE:
            spec = dataclasses.replace(spec, module=__name__)
        return super().process(node, spec)


def main() -> None:
    # Not above: the launcher's process needs no model.
    from asyncrl.trainer.loss.packing import MicroBatch
    from asyncrl.trainer.model.policy import Policy, Scores
    from asyncrl.trainer.ranks import rank_process

    seconds = float(os.environ["ASYNCRL_SLEEP_US"]) / 1e6
    compute = Policy.forward

    def sleep_and_compute(
        self: Policy, micro: MicroBatch, temperature: float = 1.0
    ) -> Scores:
        time.sleep(len(micro.pair_M) * seconds)
        return compute(self, micro, temperature)

    def forward(self: Policy, micro: MicroBatch, temperature: float = 1.0) -> Scores:
        num_tokens = len(micro.pair_M)
        time.sleep(num_tokens * seconds)
        # Each weight has a gradient, of 0.
        nothing = sum(weight.sum() for weight in self.parameters()) * 0.0
        zeros = torch.zeros(num_tokens, device=micro.pair_M.device)
        return Scores(zeros + nothing, zeros, zeros)

    computes = "ASYNCRL_COMPUTES" in os.environ
    Policy.forward = sleep_and_compute if computes else forward  # type: ignore[method-assign]
    rank_process.main()


if __name__ == "__main__":
    main()
