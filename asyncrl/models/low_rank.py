"""Low-rank adapters that are added (https://arxiv.org/abs/2106.09685): y = W x + scale *
B (A x), in trainer and engines by one function.

Merged weights are another policy in bfloat16: a change below half a step of W is lost in
W + scale * B A. So all sides of a run add. Only exported models are merged.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from asyncrl.base.errors import ConfigError
from asyncrl.models.structure import hooked

Targets = Sequence[str] | Literal["all-linear", "all"]


class LowRank(NamedTuple):
    """An adapter of a linear layer: `down` is A [rank, in], `up` is B [out, rank]."""

    down: Tensor
    up: Tensor
    scale: float

    def narrow(self, x: Tensor) -> Tensor:
        """Return scale * A x, [..., rank], in the dtype of x."""
        return functional.linear(x, self.down.to(x.dtype)) * self.scale

    def add(self, product: Tensor, x: Tensor) -> Tensor:
        """Return product + scale * B (A x). `product`: W x, [..., out]."""
        return product + functional.linear(self.narrow(x), self.up.to(x.dtype))


@contextmanager
def noted_calls(model: PreTrainedModel) -> Iterator[dict[str, set[int]]]:
    """Note the kinds of linear layers that a forward pass calls, as names without the
    numbers of layers, and the numbers of tokens that they get.
    """
    linear: dict[nn.Module, str] = {
        one: kind_of(name) for name, one in model.named_modules() if _is_plain(one)
    }
    called = defaultdict[str, set[int]](set)

    def note(kind: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        called[kind].add(output.shape[:-1].numel())

    with hooked(linear, note):
        yield called


def _is_plain(module: nn.Module) -> bool:
    """Return whether the module computes W x. A subclass with another forward, such as a
    router or Dory's head, may read its weight in another way.
    """
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def kind_of(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def find_targets(
    model: PreTrainedModel,
    targets: Targets,
    called: Collection[str],
) -> list[str]:
    """Return the full names of the layers to adapt. Raises ConfigError.

    `called`: of noted_calls(). Other layers only hold a weight that the model reads,
    such as Mamba's dt_proj, which would pass by an adapter. The output head may be
    named, also if it is tied to the embedding, which has no adapter. "all-linear" leaves
    the head out, "all" includes it.
    """
    # Tied weights are the same object under two names. The exported model would need
    # another weight for each.
    named = model.named_parameters(remove_duplicate=False)
    times = Counter(id(parameter) for _, parameter in named)
    head = model.get_output_embeddings()
    linear = list[str]()
    head_name = ""
    for name, one in model.named_modules():
        if one is head:
            head_name = name if _is_plain(one) else ""
        elif (
            isinstance(one, nn.Linear)
            and times[id(one.weight)] == 1
            and kind_of(name) in called
        ):
            linear.append(name)
    known = [*linear]
    if head_name and targets != "all-linear":
        known.append(head_name)
    if not known:
        what = f"trainer.lora: {type(model).__name__} has no linear layers that adapters fit"
        raise ConfigError(what, way_out="remove trainer.lora, to train all weights.")
    return known if isinstance(targets, str) else with_ends(known, targets)


def with_ends(known: Collection[str], ends: Sequence[str]) -> list[str]:
    """Return the layers among `known` with these ends of names. Raises ConfigError."""
    chosen = {
        end: [name for name in known if f".{name}".endswith(f".{end}")] for end in ends
    }
    if missing := [end for end, names in chosen.items() if not names]:
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in known))
        raise ConfigError(
            f"trainer.lora.targets: the model has no layer {', '.join(missing)}",
            rule="adapters need a called torch.nn.Linear with an unshared weight, or the output head",
            way_out=f"name modules or the ends of their names; the linear layers are {kinds}.",
        )
    return [name for name in known if any(name in names for names in chosen.values())]
