"""What a trainer needs to go on as if it had never stopped: saved beside training, loaded exactly. Knows no
batch.

That is the float32 master weights and AdamW's moments by parameter name, the counts that stand in Progress,
and each rank's random generators of torch. The learning rate is a function of these counts, the initial
weights of a KL penalty are those of model.path; neither is saved. With adapters (trainer.lora) the weights
below them are not saved either.

DCP lays shards out anew: what N ranks have saved, M ranks load. The same bits come out of the same number of
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config import LoraConfig
from asyncrl.trainer.state_folder import (
    Manifest,
    SaveGroup,
    StateError,
    check_files,
    check_new,
    ignore_single_process_warning,
    read_manifest,
    read_tensors,
    write_folder,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


class Masters(Protocol):
    """precision.MasterWeights, or what stands in for it where weights are sharded."""

    named: dict[str, Tensor]

    def write_back(self) -> None:
        """Give the model the masters as they are now."""


@dataclass(frozen=True)
class Progress:
    """The counts of a TrainStep."""

    policy_version: int = 0
    num_optimizer_steps: int = 0
    num_skipped_in_a_row: int = 0


@dataclass
class PendingSave:
    """A save whose copy is made and whose files are being written. `held_s`: seconds for which training stood
    still.
    """

    path: Path
    held_s: float
    _written: Future[None]
    is_collected: bool = False

    @property
    def is_done(self) -> bool:
        """Whether wait() returns at once."""
        return self._written.done()

    def wait(self) -> None:
        """Return when the folder is complete. Raises StateError if it could not be written, and then it is
        not there.
        """
        self.is_collected = True
        self._written.result()


class TrainerState:
    """Saves and loads the weights and the optimizer that it is given. Made on all ranks at once, and called
    on all of them.

    Life:       begin_save -> PendingSave.wait -> begin_save ...: one at a time, since its copy lies in
    buffers that are
                used again. A save whose process dies leaves .NAME.unfinished behind and never a NAME.
    Invariant:  a load that is refused because of what the folder is or holds has changed nothing.
    """

    def __init__(
        self,
        masters: Masters,
        optimizer: torch.optim.Optimizer,
        *,
        model_path: str,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoraConfig | None = None,
    ) -> None:
        self._masters, self._optimizer, self._device = masters, optimizer, device
        self._model_path, self._dtype = model_path, str(dtype).removeprefix("torch.")
        self._lora = None if lora is None else lora.model_dump(mode="json")
        self._ranks = SaveGroup()
        self._host: dict[str, Tensor] = {}
        self._pending: PendingSave | None = None
        self._writer = ThreadPoolExecutor(1, "state")

    def __repr__(self) -> str:
        is_writing = self._pending is not None and not self._pending.is_done
        return f"<TrainerState of {len(self._masters.named)} weights, {self._ranks!r}{', writing' if is_writing else ''}>"

    def begin_save(
        self, progress: Progress, path: Path, content_of: Callable[[Tensor], Tensor] = lambda local: local
    ) -> PendingSave:
        """Copy everything to host memory, and have it written while training goes on. Raises StateError.

        `path` must be new, and is complete or not there. Refused until the save before has been waited for.
        `content_of` finds the values of a local tensor that are not in it (offload.py).
        """
        if self._pending is not None and not self._pending.is_collected:
            raise StateError(
                f"cannot save to {path}: the save to {self._pending.path} has not been waited for",
                rule="one save at a time",
                way_out="call wait() on it first.",
            )
        self._ranks.together(lambda: check_new(path))
        ignore_single_process_warning()
        started = time.perf_counter()
        live = self._live(self._stepped(), rng_of=self._own_rng())
        self._copy(live, content_of)
        manifest = self._manifest(progress)
        held_s = time.perf_counter() - started
        written = self._writer.submit(write_folder, path, live, self._host, manifest, self._ranks)
        self._pending = PendingSave(path, held_s, written)
        return self._pending

    def drop_copy(self) -> None:
        """Free the host buffers, unless they are being written; the next save makes new ones."""
        if self._pending is None or self._pending.is_done:
            self._host.clear()  # and not another dict: DCP may keep this one in a cycle

    def load(self, path: Path, *, is_checked: bool = False) -> Progress:
        """Overwrite weights, optimizer and random generators with those of a saved folder; returns its
        counts.

        `is_checked`: the caller has just compared every file with its manifest; it is not read for that a
        second time. Raises StateError if the folder is not complete and undamaged, or is of another model.
        `path` must lie in a run directory that the user named: see state_folder.py on what is and is not
        checked.
        """
        manifest = self._ranks.together(lambda: self._check_fits(read_manifest(path), path))[self._ranks.rank]
        if not is_checked:
            check_files(path, manifest, self._ranks)
        rng = self._own_rng() if self._ranks.rank < manifest.world_size else {}
        if not manifest.has_cuda_rng:
            rng.pop("cuda", None)
        moments = {
            name: self._moments(master)
            for name, master in self._masters.named.items()
            if name in manifest.optimizer_names
        }
        live = self._live(moments, rng_of=rng)
        read_tensors(path, live, manifest, self._ranks)
        self._set_moments(moments, live["adamw.step"].tolist(), manifest)
        self._masters.write_back()
        for kind in rng:
            generator_state = live[f"rng.{kind}.{self._ranks.rank}"]
            if kind == "cpu":
                torch.set_rng_state(generator_state)
            else:
                torch.cuda.set_rng_state(generator_state, self._device)
        return Progress(manifest.policy_version, manifest.num_optimizer_steps, manifest.num_skipped_in_a_row)

    def _stepped(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each weight that has been stepped on."""
        states = {name: self._optimizer.state.get(master) for name, master in self._masters.named.items()}
        return {name: state for name, state in states.items() if state}

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of one weight, to be overwritten; made as AdamW makes it if there is none."""
        if state := self._optimizer.state.get(master):
            return dict(state)
        group = self._optimizer.param_groups[0]
        step_device = master.device if group.get("fused") or group.get("capturable") else "cpu"
        return {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            **{
                moment: torch.zeros_like(master, memory_format=torch.preserve_format).detach()
                for moment in MOMENTS
            },
        }

    def _set_moments(
        self, moments: dict[str, dict[str, Tensor]], steps: list[float], manifest: Manifest
    ) -> None:
        for name, steps_taken in zip(sorted(moments), steps, strict=True):
            moments[name]["step"].fill_(steps_taken)
        for name, master in self._masters.named.items():
            if name in moments:
                self._optimizer.state[master] = moments[name]
            else:
                self._optimizer.state.pop(master, None)
        for group in self._optimizer.param_groups:
            group["lr"] = manifest.learning_rate

    def _own_rng(self) -> dict[str, Tensor]:
        """Random generators of this rank."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _live(self, moments: dict[str, dict[str, Tensor]], *, rng_of: dict[str, Tensor]) -> dict[str, Tensor]:
        """All that lies in the folder, by its name there."""
        steps = [moments[name]["step"] for name in sorted(moments)]
        return {
            **{f"weights.{name}": master.detach() for name, master in self._masters.named.items()},
            **{
                f"adamw.{moment}.{name}": state[moment]
                for name, state in moments.items()
                for moment in MOMENTS
            },
            "adamw.step": torch.stack(steps).float() if steps else torch.zeros(0),
            **{f"rng.{kind}.{self._ranks.rank}": state for kind, state in rng_of.items()},
        }

    @torch.no_grad()
    def _copy(self, live: dict[str, Tensor], content_of: Callable[[Tensor], Tensor]) -> None:
        """Copy this rank's shards into the host buffers, which are made the first time."""
        is_cuda = self._device.type == "cuda"
        for name, tensor in live.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._host.get(name)
            if buffer is None or buffer.shape != local.shape:
                buffer = self._host[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=is_cuda)
            buffer.copy_(content_of(local), non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.synchronize(self._device)

    def _manifest(self, progress: Progress) -> Manifest:
        return Manifest(
            model_path=self._model_path,
            dtype=self._dtype,
            lora=self._lora,
            world_size=self._ranks.size,
            shapes={name: list(master.shape) for name, master in self._masters.named.items()},
            optimizer_names=sorted(self._stepped()),
            has_cuda_rng=self._device.type == "cuda",
            policy_version=progress.policy_version,
            num_optimizer_steps=progress.num_optimizer_steps,
            num_skipped_in_a_row=progress.num_skipped_in_a_row,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            torch=torch.__version__,
        )

    def _check_fits(self, manifest: Manifest, path: Path) -> Manifest:
        """The manifest, if its tensors are those of this model. Raises StateError."""
        way_out = f"start with the configuration of the run that wrote it (model {manifest.model_path}), or give another state."
        if manifest.lora != self._lora:
            raise StateError(
                f"{path} holds {_trained(manifest.lora)}, and this run trains {_trained(self._lora)}",
                rule="adapters are saved without the weights below them",
                way_out=way_out,
                status=422,
            )
        shapes = {name: list(master.shape) for name, master in self._masters.named.items()}
        if shapes != manifest.shapes:
            differing = sorted(
                name for name in {*shapes, *manifest.shapes} if shapes.get(name) != manifest.shapes.get(name)
            )
            first = differing[0]
            raise StateError(
                f"{path} is of another model: {len(differing)} weights differ, e.g. {first} is "
                f"{manifest.shapes.get(first, 'missing')} "
                f"there and {shapes.get(first, 'missing')} here",
                rule="names and shapes are the same",
                way_out=way_out,
                status=422,
            )
        return manifest


def _trained(lora: dict[str, object] | None) -> str:
    return (
        "all weights"
        if lora is None
        else f"adapters (rank {lora['rank']}, alpha {lora['alpha']}, targets {lora['targets']})"
    )
