"""One optimizer step on one mini-batch, in this process. Knows tensors; knows no HTTP, and which loss only by name.

Precision: master weights, gradients and optimizer state are float32. With dtype bfloat16 the forward pass runs under
autocast (the head in float32) and exported weights are cast to bfloat16, the engine's dtype.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.serving import Refused
from asyncrl.trainer.loading import load_model, load_tokenizer, make_optimizer, resolve_device, resolve_function
from asyncrl.trainer.logprobs import TokenPlaces, has_plain_head, token_logprobs
from asyncrl.trainer.metrics import gap_metrics, policy_metrics
from asyncrl.trainer.packing import check_batch, cut_micro_batches, loss_tokens
from asyncrl.trainer.record import append_line, trained_line
from asyncrl.trainer.schedule import learning_rate_at
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.weights import digest_of, export_weights, in_export_dtype, named_weights, save_folder
from asyncrl.wire import BatchArrays, BatchHeader, ExportResponse, pack_batch

log = logging.getLogger("asyncrl.trainer")

GAP_WARNING = 0.05
"""Nats of mean logprob gap on fresh tokens from which the log warns."""
SPLIT_COST_TOKENS = {"cpu": 64, "cuda": 4096}
"""Padding tokens that cost as much as one more micro-batch (64 measured with 0.8 M parameters on one core)."""


@dataclass
class _Sums:
    """What the micro-batches of one mini-batch add up to; logprobs and entropies [N] are set where a token carries loss."""

    logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    loss: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


class TrainStep:
    """Weights, optimizer and the number of steps taken. Not thread-safe: one thread owns it.

    Life:       policy_version 0 -> train -> 1 -> train -> 2 ...; a refused batch changes nothing.
    Invariant:  weights change only together with policy_version, in train(), after every check has passed. On the CPU the
                same batches with the same number of threads give the same bits.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        """Load everything. Raises ConfigError if the model or a function cannot be had, or memory is short."""
        torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        self.spec, self.policy_version = spec, 0
        self._loss = resolve_function(spec.loss, "algorithm.loss")
        self._advantage = resolve_function(spec.advantage, "algorithm.advantage")
        self.device, self.dtype = resolve_device(spec)
        if self.device.type == "cuda" and self.dtype == torch.bfloat16:
            torch.set_float32_matmul_precision("high")
        self.model = load_model(spec, self.device)
        self._has_plain_head = has_plain_head(self.model)
        self._optimizer = make_optimizer(self.model, spec.trainer)

    def __repr__(self) -> str:
        return f"<TrainStep {self.spec.model_path} v{self.policy_version} on {self.device.type}>"

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        """Take one optimizer step; returns its metrics by full name. Raises Refused, with weights as they were."""
        started = time.perf_counter()
        check_batch(header, arrays, self.policy_version, self.model.get_input_embeddings().num_embeddings)
        has_loss = loss_tokens(header, arrays)
        num_loss_tokens = int(has_loss.sum())
        try:
            sums = self._accumulate(header, arrays, has_loss)
            gap = self._check_gap(header, arrays, has_loss, sums)
            grad_norm = self._clip_gradient()
            if not (math.isfinite(sums.loss) and math.isfinite(grad_norm)):
                self._refuse_saved(header, arrays, f"loss {sums.loss} and gradient norm {grad_norm}", "a step needs finite numbers")
            metrics = {
                "policy/loss": sums.loss,
                "policy/grad_norm": grad_norm,
                **policy_metrics(sums.logprobs[has_loss], arrays.behaviour_logprobs[has_loss], sums.entropies[has_loss]),
                **{f"policy/{name}": value / num_loss_tokens for name, value in sums.stats.items()},
                **gap,
            }
            if unfit := {name: value for name, value in metrics.items() if not math.isfinite(value)}:
                self._refuse_saved(header, arrays, f"metrics {unfit}", "metrics are finite numbers, those of algorithm.loss included")
            learning_rate = learning_rate_at(self.spec.trainer, self.policy_version)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        self._record(header, arrays, has_loss, sums.loss)
        return {
            **metrics,
            "sample/masked_fraction": 1.0 - num_loss_tokens / int(arrays.loss_mask.sum()),
            "tokens/trained": float(num_loss_tokens),
            "trainer/learning_rate": learning_rate,
            "perf/train_s": time.perf_counter() - started,
        }

    def export(self, path: Path) -> ExportResponse:
        """Write the current weights, in the engine's dtype, as a safetensors file. Raises OSError."""
        return export_weights(in_export_dtype(named_weights(self.model), self.dtype), path, self.policy_version)

    def save(self, path: Path) -> None:
        """Write the current weights and the tokenizer as a Hugging Face folder. Raises FileExistsError or OSError."""
        save_folder(self.model, load_tokenizer(self.spec), self.dtype, path)

    def weights_digest(self) -> str:
        """Digest of the float32 master weights."""
        return digest_of(in_export_dtype(named_weights(self.model), torch.float32))

    def _accumulate(self, header: BatchHeader, arrays: BatchArrays, has_loss: npt.NDArray[np.bool_]) -> _Sums:
        """Forward and backward over all micro-batches; gradients are those of the mean over the mini-batch's loss tokens."""
        advantage_B = self._advantages(header)
        config = self.spec.trainer
        # A sequence is read up to its last loss token: what comes after it can change nothing.
        lengths = [
            int(positions[-1]) if len(positions := np.flatnonzero(has_loss[entry.start : entry.end])) else 0
            for entry in header.trajectories
        ]
        sums = _Sums(np.zeros(len(has_loss), np.float32), np.zeros(len(has_loss), np.float32))
        num_loss_tokens = int(has_loss.sum())
        for indices in cut_micro_batches(lengths, config.micro_batch_tokens, SPLIT_COST_TOKENS[self.device.type]):
            source_BT = _gather_index([(header.trajectories[index].start, lengths[index]) for index in indices])
            self._micro_batch(arrays, has_loss, source_BT, advantage_B[indices], num_loss_tokens, sums)
        return sums

    def _micro_batch(
        self,
        arrays: BatchArrays,
        has_loss: npt.NDArray[np.bool_],
        source_BT: npt.NDArray[np.int64],
        advantage_B: Tensor,
        num_loss_tokens: int,
        sums: _Sums,
    ) -> None:
        """One forward-backward. source_BT [B, T+1]: where in the packed arrays each token stands, -1 for padding."""
        is_real_BT = source_BT[:, 1:] >= 0
        mask_BT = is_real_BT & has_loss[source_BT[:, 1:]]
        ids_BT = self._tensor(np.where(source_BT >= 0, arrays.token_ids[source_BT], 0).astype(np.int64))
        mask = self._tensor(mask_BT)
        row_M, column_M = mask.nonzero(as_tuple=True)
        places = TokenPlaces(row_M, column_M, ids_BT[row_M, column_M + 1])
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logprob_M, entropy_M = token_logprobs(
                self.model, ids_BT[:, :-1], places, self.spec.temperature, has_plain_head=self._has_plain_head
            )
        current_BT = torch.zeros(mask.shape, device=self.device).index_put((row_M, column_M), logprob_M)
        behaviour_BT = self._tensor(np.where(mask_BT, arrays.behaviour_logprobs[source_BT[:, 1:]], np.float32(0)))
        advantages_BT = advantage_B.to(self.device)[:, None].expand(mask.shape)
        loss_sum, stats = self._call_loss(current_BT, behaviour_BT, advantages_BT, mask)
        (loss_sum / num_loss_tokens).backward()  # type: ignore[no-untyped-call]
        sums.loss += float(loss_sum.detach()) / num_loss_tokens
        for name, value in stats.items():
            sums.stats[name] = sums.stats.get(name, 0.0) + float(value)
        sums.logprobs[source_BT[:, 1:][mask_BT]] = logprob_M.detach().cpu().numpy()
        sums.entropies[source_BT[:, 1:][mask_BT]] = entropy_M.cpu().numpy()

    def _call_loss(
        self, current_BT: Tensor, behaviour_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the loss over the micro-batch and its statistics, checked: the function may be the user's."""
        answer = self._loss(
            current_BT,
            current_BT.detach(),  # the proximal policy is that before the step, and the mini-batch has one step
            behaviour_BT,
            advantages_BT,
            mask_BT,
            clip_low=self.spec.clip_low,
            clip_high=self.spec.clip_high,
            importance_cap=self.spec.importance_cap,
        )
        match answer:
            case (Tensor(ndim=0, requires_grad=True) as loss_sum, dict() as stats):
                return loss_sum, stats
        raise Refused(
            422,
            f"algorithm.loss={self.spec.loss} returned {answer!r}"[:500],
            rule="it returns (sum of the loss: a scalar tensor with gradient, dict of summed statistics)",
            way_out="correct the function; asyncrl/algorithms/losses.py has three that fit.",
        )

    def _advantages(self, header: BatchHeader) -> Tensor:
        reward_B = torch.tensor([entry.reward for entry in header.trajectories], dtype=torch.float32)
        group_B = torch.tensor([entry.group_index for entry in header.trajectories], dtype=torch.int64)
        advantage_B = self._advantage(reward_B, group_B)
        if not isinstance(advantage_B, Tensor) or advantage_B.shape != reward_B.shape or not bool(torch.isfinite(advantage_B).all()):
            raise Refused(
                422,
                f"algorithm.advantage={self.spec.advantage} returned {advantage_B} for rewards {reward_B.tolist()}",
                rule="it returns a finite float32 tensor [B]",
                way_out="correct the function, or set algorithm.advantage=grpo.",
            )
        return advantage_B.float()

    def _check_gap(self, header: BatchHeader, arrays: BatchArrays, has_loss: npt.NDArray[np.bool_], sums: _Sums) -> dict[str, float]:
        """Metrics of |current - behaviour| on fresh tokens, where both come from the same weights. Refuses past the limit."""
        is_fresh = has_loss & (arrays.versions == header.version)
        gap = gap_metrics(sums.logprobs[is_fresh], arrays.behaviour_logprobs[is_fresh])
        mean, limit = gap.get("policy/logprob_gap_mean", 0.0), self.spec.trainer.logprob_gap_limit
        if limit is not None and mean > limit:
            self._refuse_saved(
                header,
                arrays,
                f"engine and trainer disagree by {mean:.4g} nats on average on {int(is_fresh.sum())} fresh tokens",
                f"trainer.logprob_gap_limit={limit}",
                "check that engine and trainer use the same model.dtype, temperature and weights; "
                "publisher.interrupt=keep_kv raises the gap; or raise trainer.logprob_gap_limit.",
            )
        if mean > GAP_WARNING:
            log.warning("batch %d: engine and trainer disagree by %.3f nats on average on fresh tokens", header.version, mean)
        return gap

    def _clip_gradient(self) -> float:
        """Clip to trainer.max_grad_norm; returns the norm before."""
        limit = self.spec.trainer.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit))

    def _refuse_saved(self, header: BatchHeader, arrays: BatchArrays, error: str, rule: str, way_out: str = "") -> None:
        self.spec.failed_dir.mkdir(parents=True, exist_ok=True)
        path = self.spec.failed_dir / f"step_{header.version}.safetensors"
        path.write_bytes(pack_batch(header, arrays))
        raise Refused(
            422,
            f"batch {header.version} gave {error}; weights stay at policy_version {self.policy_version}, the batch is saved in {path}",
            rule=rule,
            way_out=way_out or "look at the batch with asyncrl.wire.unpack_batch; lower trainer.learning_rate or trainer.max_grad_norm.",
        )

    def _record(self, header: BatchHeader, arrays: BatchArrays, has_loss: npt.NDArray[np.bool_], loss: float) -> None:
        digest = self.weights_digest() if self.spec.record_digest else None
        append_line(self.spec.record_path, trained_line(header, arrays, has_loss, loss, digest))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _gather_index(parts: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """[B, T+1] positions in the packed arrays: row b counts from start_b over length_b + 1 tokens, then -1."""
    width = max(length for _, length in parts) + 1
    offset = np.arange(width)
    start = np.array([start for start, _ in parts])[:, None]
    length = np.array([length for _, length in parts])[:, None]
    return np.where(offset <= length, start + offset, -1)
