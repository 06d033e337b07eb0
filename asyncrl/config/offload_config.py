"""Section `trainer.offload`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from asyncrl.config.fields import FrozenConfig, NotWith
from asyncrl.messages.engine_api import TrainerPart

Rule = Literal["auto", "always", "never"]
"""always: on the device only while it is used. never: it stays when the engines take
the device. auto: it leaves for the engines if both sides do not fit, and not within a
step.
"""
RuleOfPart = Annotated[Rule, NotWith("by_layer")]
Trained = Literal["policy", "critic", "reference"]


class ModelPart(NamedTuple):
    """A part of one of the models on the trainer's ranks."""

    model: Trained
    part: TrainerPart

    @property
    def key(self) -> str:
        """Return the setting of its rule."""
        part = "reference" if self.model == "reference" else self.part
        return f"trainer.offload.{part}"


POLICY_WEIGHTS = ModelPart("policy", "weights")
REFERENCE_WEIGHTS = ModelPart("reference", "weights")
CRITIC_WEIGHTS = ModelPart("critic", "weights")
POLICY_GRADIENTS = ModelPart("policy", "gradients")
CRITIC_GRADIENTS = ModelPart("critic", "gradients")
POLICY_PASS = (POLICY_WEIGHTS, POLICY_GRADIENTS)
CRITIC_PASS = (CRITIC_WEIGHTS, CRITIC_GRADIENTS)
POLICY_STEP = (*POLICY_PASS, ModelPart("policy", "optimizer"))
CRITIC_STEP = (*CRITIC_PASS, ModelPart("critic", "optimizer"))


class OffloadConfig(FrozenConfig):
    """Where the parts of policy and critic are while they are not used: auto, always or
    never in host memory (docs/colocation.md).
    """

    weights: RuleOfPart = "auto"
    """Weights that a model computes with; float32 weights are also the optimizer's."""
    gradients: RuleOfPart = "auto"
    """The gradient, from the backward pass to its optimizer step."""
    optimizer: RuleOfPart = "auto"
    """AdamW's moments, and the float32 weights of a model with other weights."""
    reference: RuleOfPart = "auto"
    """Weights of the reference model, with algorithm.kl_coefficient above 0."""
    by_layer: bool = False
    """Keep all parts of policy and critic in host memory also within a step: FSDP2
    takes one layer after the other to the device, and AdamW runs on the CPU (CUDA
    only).
    """


def offload_rules(config: OffloadConfig, *, has_critic: bool) -> dict[ModelPart, Rule]:
    """Return the rule of each part of the models on the trainer's ranks."""
    parts = (*POLICY_STEP, *CRITIC_STEP) if has_critic else POLICY_STEP
    rules: dict[ModelPart, Rule] = {REFERENCE_WEIGHTS: config.reference}
    return rules | {one: getattr(config, one.part) for one in parts}
