"""A meter around what TRL's trainers count in benchmarks/trainer.py and sft.py: forward,
backward, gradient clipping and optimizer.step.
"""

from __future__ import annotations

from typing import Any

import torch
from trainer_case import Meter
from transformers import TrainerCallback


class Metered:
    """Comes before a trainer of TRL in the bases of a class."""

    meter: Meter
    first_loss = 0.0
    first_grad_norm = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.meter.start()
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.meter.stop()
        if self.state.global_step == 0:  # type: ignore[attr-defined]
            self.first_loss += float(loss)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        self.meter.start()
        norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        self.meter.stop()
        if self.state.global_step == 0:  # type: ignore[attr-defined]
            self.first_grad_norm = float(norm)
        return norm


class AroundOptimizer(TrainerCallback):  # type: ignore[misc]
    """Times optimizer.step, and ends the run when the seconds are over."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Right before optimizer.step."""
        self.meter.start()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Right after it."""
        self.meter.stop()
        self.meter.end_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter.is_over():
            control.should_training_stop = True
