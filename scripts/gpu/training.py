"""Parts 1 and 3: speed of optimizer steps, and their memory against the plan."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from asyncrl.config import RunConfig
from asyncrl.launch.memory import rank_memory
from asyncrl.launch.model_sizes import model_shape
from asyncrl.launch.plan import size_text
from asyncrl.messages.trainer_api import pack_batch
from asyncrl.trainer.model.build_model import use_deterministic
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights.export import whole_tensors
from asyncrl.weights.tensor_files import digest_tensors
from gpu.models import (
    Trainer,
    architecture,
    at_version,
    make_batch,
    make_folder,
    make_spec,
)
from gpu.rows import Bench

PROMPT, GROUP_SIZE = 64, 2
STEPS = 3


def digest_of(step: TrainerRank) -> str:
    return digest_tensors(dict(whole_tensors(step.masters.named)))


def speed(
    bench: Bench,
    *,
    shape: str,
    tokens: int,
    num_sequences: int,
    checkpointing: bool,
    anchor: tuple[float, float],
    peer: str,
) -> None:
    """Measure steps over sequences of `tokens` tokens, one per micro-batch, with
    float32 AdamW.
    """
    model = make_folder(bench, shape)
    tokens = 256 if bench.is_tiny else tokens
    config = _config(str(model), tokens, checkpointing=checkpointing)
    planned = _planned(config)
    if bench.device == "cuda" and planned > (free := torch.cuda.mem_get_info()[0]):
        bench.tell(
            "gradient checkpointing",
            f"{size_text(planned)} without, {size_text(free)} are free",
        )
        config = _config(str(model), tokens, checkpointing=True)
        planned = _planned(config)
    trainer = config.trainer.model_dump()
    made = Trainer(
        make_spec(bench, model, trainer=trainer, algorithm={"loss": "ppo_clip"})
    )
    vocab_size = architecture(bench, shape)["vocab_size"]
    batch = make_batch(
        vocab_size,
        [tokens - PROMPT] * num_sequences,
        prompt=PROMPT,
        group_size=GROUP_SIZE,
    )
    metrics = list[dict[str, float]]()
    for version in range(1 + STEPS):
        one = at_version(version, *batch)
        metrics.append(made.call(lambda one=one: made.step.train(*one)))
        if version > 0 and bench.left_s < 2 * metrics[-1]["perf/train_s"]:
            break  # fewer steps say more than a row that is ended
    del metrics[0]
    _tell(bench, metrics, f"{num_sequences} sequences of {tokens}", anchor, peer)
    if bench.device != "cuda":
        bench.tell("peak memory against the plan", "not run: no CUDA device")
    else:
        bench.memory(planned, max(one["perf/device_memory_bytes"] for one in metrics))


def repeats(bench: Bench, shape: str) -> None:
    """Train the same batches twice from the same state, with deterministic kernels and
    without. Prompts are shared, so that gradients of attention are summed over the
    branches of a tree.
    """
    model = make_folder(bench, shape)
    vocab_size = architecture(bench, shape)["vocab_size"]
    prompt = 16 if bench.is_tiny else 1024
    lengths = [prompt * (1 + number % 3) for number in range(8)]
    batch = make_batch(vocab_size, lengths, prompt=prompt, group_size=4)
    batches = [at_version(version, *batch) for version in range(1 + STEPS)]
    seconds = dict[bool, float]()
    for is_on in (False, True):
        results = list[tuple[list[float], str]]()
        for _ in range(2):
            # as a restarted process, it chooses its kernels again
            torch._dynamo.reset()
            trainer = {"deterministic": is_on, "learning_rate": 1e-4}
            made = Trainer(make_spec(bench, model, trainer=trainer))
            metrics = [
                made.call(lambda one=one, made=made: made.step.train(*one))
                for one in batches
            ]
            numbers = [
                one[name]
                for one in metrics
                for name in ("policy/loss", "policy/grad_norm")
            ]
            results.append((numbers, made.call(lambda made=made: digest_of(made.step))))
            seconds[is_on] = median(one["perf/train_s"] for one in metrics[1:])
            del made  # its memory, before the next
            gc.collect()
        (first, first_digest), (second, second_digest) = results
        num_same = sum(one == other for one, other in zip(first, second, strict=True))
        is_same = num_same == len(first) and first_digest == second_digest
        what = f"deterministic={str(is_on).lower()}: same losses and norms"
        weights = "the same" if first_digest == second_digest else "different"
        ok = is_same if is_on else None
        bench.tell(
            what,
            f"{num_same} of {len(first)}",
            against=f"weights: {weights} bits",
            ok=ok,
        )
    use_deterministic(is_on=False)
    against = f"{seconds[False]:.3f} without, {seconds[True] / seconds[False] - 1:+.1%}"
    bench.tell(
        "seconds of a deterministic step", f"{seconds[True]:.3f}", against=against
    )


def _planned(config: RunConfig) -> int:
    """Return the bytes that the plan of a run counts for the trainer."""
    parts = rank_memory(config, model_shape(config.model), "cuda:0")
    return parts.peak(config.offload_rules).total


def _tell(
    bench: Bench,
    metrics: list[dict[str, float]],
    what: str,
    anchor: tuple[float, float],
    peer: str,
) -> None:
    numbers = {
        name: median(one[name] for one in metrics)
        for name in metrics[0]
        if name.startswith("perf/")
    }
    tokens_per_s = numbers["perf/device_tokens_per_s"]
    bench.against_anchor(
        f"tokens/s, {what}", tokens_per_s, anchor[0], ",.0f", against=peer
    )
    if "perf/mfu" in numbers:
        bench.against_anchor("MFU", numbers["perf/mfu"], anchor[1], ".1%", against=peer)
    phases = ("pack", "forward", "backward", "optimizer")
    parts = ", ".join(f"{phase} {numbers[f'perf/{phase}_s']:.2f}" for phase in phases)
    bench.tell("seconds of a step", f"{numbers['perf/train_s']:.2f}", against=parts)


def _config(model: str, tokens: int, *, checkpointing: bool) -> RunConfig:
    """Return a config on the CPU with sequences of `tokens` tokens."""
    trainer = {
        "micro_batch_tokens": tokens,
        "gradient_checkpointing": checkpointing,
        "threads": 2,
    }
    return RunConfig.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "task": {"python": "asyncrl.tasks.toy:Letters"},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_prompt_tokens": PROMPT,
                "max_tokens": tokens - PROMPT,
            },
            "trainer": trainer | {"num_groups": 1},
        }
    )


def beside_trl(bench: Bench) -> None:
    """Compare steps of asyncrl and TRL on the same batch of 32 sequences of 512 tokens."""
    import trainer as benchmark
    from trainer_case import GROUP_SIZE as OF_GROUP
    from trainer_case import Case

    model = make_folder(bench, "0.6B")
    num = OF_GROUP if bench.is_tiny else 32
    length = 16 if bench.is_tiny else 448
    vocab_size = architecture(bench, "0.6B")["vocab_size"]
    batch = make_batch(vocab_size, [length] * num, prompt=PROMPT, group_size=OF_GROUP)
    path = bench.folder / "batch"
    path.write_bytes(pack_batch(*batch))
    case = Case(
        model_path=str(model),
        batch_path=str(path),
        dtype="bfloat16",
        device=bench.device,
        threads=benchmark.THREADS,
        seconds=0.0 if bench.is_tiny else 5.0,
        warm_up=0 if bench.is_tiny else 2,
    )
    sides = dict[str, Any]()
    children = [("ours", "ours", case)]
    for size in (OF_GROUP,) if bench.is_tiny else (4, 16):
        children.append(
            (f"TRL, {size} a forward", "trl", replace(case, micro_batch=size))
        )
    spent_s = 0.0
    for name, side_name, one in children:
        if len(sides) > 1 and bench.left_s < spent_s:
            break  # the comparison with the first size stays
        spent_s = bench.left_s
        side = benchmark.summary([benchmark.run_child(side_name, one, bench.folder)])
        sides[name] = side
        rate = num * (PROMPT + length) / side.wall_s
        against = f"{side.wall_s:.3f} s a step, {side.peak_bytes / 2**30:.2f} GiB above the loaded model"
        # at once: a later side may reach the row's limit
        bench.tell(f"{name}: tokens/s", f"{rate:.0f}", against=against)
        spent_s -= bench.left_s
    (_, ours), *others = sides.items()
    fastest = min((side for _, side in others), key=lambda side: side.wall_s)
    bench.tell("TRL / ours, wall seconds", f"{fastest.wall_s / ours.wall_s:.2f}")
    benchmark.check_agreement(ours, fastest, "bfloat16")
    bench.tell("loss and gradient norm of both", "the same step", ok=True)
