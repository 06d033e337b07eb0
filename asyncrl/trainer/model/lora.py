"""The trainer's low-rank adapters: weights, gradient, AdamW state and version of each.
scale = alpha / rank, and B is zero at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.base.http import Refused
from asyncrl.config.trainer_config import LoraConfig, TrainerConfig
from asyncrl.models.low_rank import find_targets, noted_calls, with_ends
from asyncrl.trainer.attention.forward_plan import probe_model
from asyncrl.trainer.loss.packing import AdapterStretch
from asyncrl.trainer.model.added_linear import AddedLinear, Pair, Used
from asyncrl.trainer.ranks.optimizer import MasterWeights, Trained
from asyncrl.trainer.ranks.ranks import ONE_RANK, Ranks
from asyncrl.trainer.ranks.state import refuse_foreign
from asyncrl.weights.aside import Aside
from asyncrl.weights.export import local_if_whole, merge
from asyncrl.weights.tensor_files import SUFFIXES, float32_names, of_role

POLICY_ADAPTER = ""
"""The adapter that an ordinary run trains."""


@torch.no_grad()
def targets_of(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the full names of the layers to adapt. Raises ConfigError."""
    small = probe_model(model.config, torch.device("cpu"))
    with noted_calls(small) as called:
        small(input_ids=torch.arange(2)[None], use_cache=False)
    return find_targets(model, config.targets, called)


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise Refused if `names` has an adapter that is not open."""
    if unknown := sorted({*names} - {*known}):
        raise Refused(
            404,
            f"the trainer has no adapter {unknown[0]!r}; it has {[*known]}",
            rule="a batch names open adapters",
            way_out="open the adapter first.",
        )


def _kept(state: dict[str, Tensor], with_optimizer: bool) -> dict[str, Tensor]:
    """Return the tensors of Trained.state() that a file has, or is read for."""
    return {
        key: one
        for key, one in state.items()
        if with_optimizer or key.startswith("weights.")
    }


@dataclass(eq=False)
class TrainedAdapter:
    """An adapter of the table. `pairs`: by the name of their layer."""

    pairs: Mapping[str, Pair]
    settings: TrainerConfig
    aside: Aside
    last_use: int = 0

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Return A and B of each layer by the names that engines know, sharded like the
        model.
        """
        return {
            f"{name}{end}": weight
            for name, pair in self.pairs.items()
            for end, weight in zip(SUFFIXES, pair.parameters(), strict=True)
        }

    @cached_property
    def trained(self) -> Trained:
        # Made at its first use, because sharding replaces the weights.
        return Trained(MasterWeights(self.weights), self.settings)


class AdapterTable:
    """The adapters of a model. A run has one, POLICY_ADAPTER, or one for each role. A
    sharded model can have no other than POLICY_ADAPTER.

    Each adapter owns its gradient, and adapters that are opened later their optimizer. Life of an adapter:
        open() -> select(), a forward and a backward pass, any number of times -> step() ->
        ... -> drop(). Between the two passes no other adapter may be used.

    Example: max_adapters_resident=2.
        open a, open b, select a      both are on the device
        open c                        b, the longest idle, moves to host memory
        select b                      b comes back bit for bit, a moves

    Invariant: an adapter's weights depend only on its own gradients and steps.
    Invariant: weights change and leave the device only after before_change(). drop() does
        not wait: an export that still reads the tensors keeps them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerConfig,
        dtype: torch.dtype,
        folder: Path,
        seed: int = 0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Replace the layers that settings.adapters target, cast all weights to `dtype`,
        freeze them, open these adapters, and select the first. `folder`: for files with
        what leaves a CPU. Raises ConfigError.
        """
        self.max_adapters_resident = 2**31
        self.of_run: Sequence[str] = ()
        """Names of the run's own adapters, which share an optimizer."""
        self.before_change: Callable[[], None] = lambda: None
        """Wait for exports that read the weights."""
        self.layers = dict[str, AddedLinear]()
        self._settings = settings
        self._dtype = dtype
        self._folder = folder
        self._ranks = ranks
        self._adapters = dict[str, TrainedAdapter]()
        self._selected: Sequence[AdapterStretch] = ()
        self._is_off = False
        self._clock = count(1)
        of_run = settings.adapters
        targets = {
            *chain.from_iterable(targets_of(model, one) for one in of_run.values())
        }
        head = model.get_output_embeddings()
        self._head_name = ""
        # In the model's order, in which each adapter draws its numbers: they do not depend
        # on other roles.
        for name in [name for name, _ in model.named_modules() if name in targets]:
            base = model.get_submodule(name)
            if base is head:
                self._head_name = name
            assert isinstance(base, nn.Linear)
            self.layers[name] = AddedLinear(base)
            model.set_submodule(name, self.layers[name])
        kept = float32_names(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(requires_grad=False)
            parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
        for place, (name, config) in enumerate(of_run.items()):
            self.open(name, config, seed + place)
        self.of_run = self.names
        self.select([AdapterStretch(0, 0, self.of_run[0])])

    @cached_property
    def policy(self) -> Trained:
        """The run's own adapters. A step changes those that have a gradient."""
        # Made at its first use, because sharding replaces the weights.
        weights = dict[str, nn.Parameter]()
        for name in self.of_run:
            weights |= of_role(name, self._adapters[name].weights)
        return Trained(MasterWeights(weights), self._settings)

    @property
    def names(self) -> list[str]:
        return [*self._adapters]

    def open(self, name: str, config: LoraConfig, seed: int) -> None:
        """Add an adapter, whose A is drawn from `seed`. Its layers are among the table's;
        "all" are all of these, "all-linear" all but the head. Raises ConfigError and
        Refused.
        """
        if name in self._adapters:
            raise Refused(
                409, f"the adapter {name!r} is open", way_out="choose another name."
            )
        if self._adapters:
            self._refuse_sharded("another adapter cannot be opened")
        chosen = [*self.layers]
        if config.targets == "all-linear":
            chosen = [one for one in chosen if one != self._head_name]
        elif config.targets != "all":
            chosen = with_ends(chosen, config.targets)
        if not chosen:
            raise Refused(
                422,
                f"the adapter {name!r} has no layer: the table has {[*self.layers]}",
                rule="an adapter changes at least one layer of the table",
                way_out="name one of these layers.",
            )
        pairs = dict[str, Pair]()
        # Drawn on the CPU: the same numbers on any device and rank, as peft draws them.
        generator = torch.Generator().manual_seed(seed)
        for key in chosen:
            layer = self.layers[key]
            device = layer.weight.device
            bound = layer.in_features**-0.5
            down = torch.empty(config.rank, layer.in_features)
            down.uniform_(-bound, bound, generator=generator)
            up = torch.zeros(layer.out_features, config.rank, device=device)
            pairs[key] = Pair(down.to(device), up, config.scale)
            # FSDP2 shards parts of the model, and an offload moves them.
            if name in self._settings.adapters:
                layer.add_module(f"pair{name}", pairs[key])
        aside = Aside(device, self._folder)
        adapter = TrainedAdapter(pairs, self._settings, aside)
        self._bring([adapter])
        self._adapters[name] = adapter

    def drop(self, name: str) -> None:
        """Remove an adapter and its gradient. Raises Refused."""
        self._refuse_sharded(f"the adapter {name!r} cannot be dropped")
        self.need([name])
        if any(one.adapter == name for one in self._selected):
            self.select(())
        for layer in self.layers.values():
            layer._modules.pop(f"pair{name}", None)
        del self._adapters[name]

    def need(self, names: Iterable[str]) -> list[TrainedAdapter]:
        """Return adapters by name. Raises Refused for an unknown name."""
        wanted = dict.fromkeys(names)
        refuse_unknown(wanted, self.names)
        return [self._adapters[name] for name in wanted]

    def select(self, stretches: Sequence[AdapterStretch]) -> None:
        """Choose the adapters of the next forward and backward pass, and bring them to
        the device. Raises Refused, and then chooses nothing.
        """
        self._bring(self.need(one.adapter for one in stretches))
        self._selected = stretches
        for name, layer in self.layers.items():
            layer.used = list[Used]()
            for start, end, adapter in () if self._is_off else stretches:
                rows = slice(start, end) if len(stretches) > 1 else None
                layer.used.append((rows, self._adapters[adapter].pairs.get(name)))

    def trained(self, name: str = POLICY_ADAPTER) -> Trained:
        """Return an adapter's weights and optimizer, on the device until another adapter
        is used. Raises Refused.
        """
        return self.policy if name in self.of_run else self._here(name).trained

    def version(self, name: str) -> int:
        """Return the number of an adapter's optimizer steps. Raises Refused."""
        self.need([name])
        return self.trained(name).num_steps

    def step(self, name: str) -> float:
        """Take an optimizer step of one adapter, drop its gradient, and return the norm
        of the gradient. Without a gradient, and with a norm that is not finite, weights
        and version stay. Raises Refused.
        """
        trained = self.trained(name)
        try:
            norm = trained.prepare_step(trained.num_steps, self._ranks)
            if math.isfinite(norm):
                self.before_change()
                trained.step()
        finally:
            trained.drop_gradient()
        return norm

    def save(self, name: str, path: Path, *, with_optimizer: bool = True) -> None:
        """Write weights and AdamW state to the safetensors file `path`, without the
        gradient. Raises Refused, OSError, SafetensorError.
        """
        self._refuse_sharded(f"the adapter {name!r} cannot be saved by itself")
        save_file(_kept(self.trained(name).state(), with_optimizer), path)

    def load(self, name: str, path: Path, *, with_optimizer: bool = True) -> None:
        """Restore a saved state, also of another name, and drop the gradient. Without
        the optimizer's state, AdamW begins again. Raises Refused for other layers or
        ranks, OSError, SafetensorError; then nothing has changed.
        """
        self._refuse_sharded(f"the adapter {name!r} cannot be loaded by itself")
        trained = self.trained(name)
        saved = _kept(load_file(path), with_optimizer)
        sizes = {key: tuple(tensor.shape) for key, tensor in saved.items()}
        here = {key: tuple(one.shape) for key, one in trained.state().items()}
        refuse_foreign(path, sizes, here, ["weights."])
        self.before_change()
        trained.drop_gradient()
        trained.make_state(sizes)
        for key, tensor in trained.state().items():
            tensor.copy_(saved[key])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the initial model."""
        selected = self._selected
        self._is_off = True
        try:
            self.select(selected)
            yield
        finally:
            self._is_off = False
            self.select(selected)

    def tensors(self, name: str = POLICY_ADAPTER) -> dict[str, Tensor]:
        """Return A and B of each layer, sharded like the model. Raises Refused."""
        return {
            key: local_if_whole(weight.detach())
            for key, weight in self._here(name).weights.items()
        }

    def merging(
        self, weights: Mapping[str, Tensor], name: str = POLICY_ADAPTER
    ) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
        """Return all weights, and merge functions of the weights that an adapter changes.
        `weights`: of the model with its adapters.
        """
        plain = {
            name: tensor for name, tensor in weights.items() if ".lora_" not in name
        }
        merges = dict[str, Callable[[], Tensor]]()
        (adapter,) = self.need([name])
        for name, pair in adapter.pairs.items():
            # A tied head is listed as the embedding, which has no adapter.
            base = local_if_whole(self.layers[name].weight.detach())
            plain[f"{name}.weight"] = base
            merges[f"{name}.weight"] = partial(self._merge, pair, base)
        return plain, merges

    def _merge(self, pair: Pair, base: Tensor) -> Tensor:
        # Rounded as the exported adapters are, so that an export that merges them later
        # has the same bits.
        lora_A, lora_B = (
            local_if_whole(one.detach()).to(self._dtype) for one in pair.parameters()
        )
        return merge(base, lora_A, lora_B, pair.scale)

    def _refuse_sharded(self, error: str) -> None:
        if self._ranks.mesh is not None:
            raise Refused(
                422,
                f"{error}: the weights are shards",
                rule="a sharded trainer has one adapter, which it saves with its state",
                way_out="set trainer.world_size=1 and trainer.offload.by_layer=false.",
            )

    def _here(self, name: str) -> TrainedAdapter:
        (adapter,) = self.need([name])
        self._bring([adapter])
        return adapter

    def _bring(self, used: Sequence[TrainedAdapter]) -> None:
        """Bring adapters to the device, and move the longest idle ones beyond the limit
        to host memory. The adapters of one micro-batch may exceed the limit, and the run's
        own stay, since it holds their tensors. Raises Refused.
        """
        for adapter in used:
            adapter.last_use = next(self._clock)
        idle = [
            adapter
            for name, adapter in self._adapters.items()
            if name not in self.of_run
            and adapter not in used
            and not adapter.aside.is_away
        ]
        idle.sort(key=lambda adapter: adapter.last_use)
        num_leaving = max(len(idle) + len(used) - self.max_adapters_resident, 0)
        for adapter in idle[:num_leaving]:
            self.before_change()
            adapter.aside.send_away(adapter.trained.tensors())
        for adapter in used:
            if adapter.aside.is_away:
                adapter.aside.bring_back()
