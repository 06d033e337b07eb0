"""Ratios and step times with and without the supports of sampled tokens.

    python benchmarks/sampling_replay.py [MODEL] [--seconds S] [--write]

The embedded engine samples answers of 64 tokens with MODEL, a folder (without it, a
random model of 6M parameters and 16,384 tokens). The trainer then computes the ratio of
each token under the same weights: over its support, and over the whole vocabulary. Over
its support each ratio is 1.

Then it trains these answers, with their supports and without: the last line is the
ratio of the median times of a step at top_p 0.95.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import options, random_qwen3, reported, trainer_spec
from engine_replies import ask

from asyncrl.config import TrainerConfig
from asyncrl.engines.pool import SegmentJoin
from asyncrl.journal.schema import encode_trajectory
from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Prompt,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Tokens, in_journal
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.rollouts.rollout import make_trajectory
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.trainer_client import pack_groups
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

PROMPTS = (
    "The capital of France is",
    "In the beginning of the twentieth century, physicists believed that",
    "def fibonacci(n):\n",
    "Dear Ms. Miller,\nthank you for your letter of",
    "The three most important things about cooking rice are",
    "Once upon a time, in a village by the sea, there lived",
    "Question: What is 17 times 23? Answer:",
    "The meeting was moved to Thursday because",
)
NUM_NEW = 64
CUTS = ({"top_p": 0.8, "top_k": 1024}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.05})


def main() -> None:
    parser = options(__doc__, seconds=20)
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        reported("sampling_replay", is_kept=arguments.write),
    ):
        scratch = Path(folder)
        model = arguments.model
        if model is None:
            model = scratch / "model"
            random_qwen3(
                model,
                vocab_size=16384,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                # top_p 0.95 keeps 80 ids a token. At 0.15 it would keep 3,700, and a
                # step with supports would take twice the time of one without.
                initializer_range=0.3,
            )
        measure(model, scratch, arguments.seconds)


def measure(model: Path, scratch: Path, seconds: float) -> None:
    spec = EmbeddedSpec(
        name="engine",
        model_path=str(model),
        dtype="float32",
        device="cpu",
        slots=16,
        max_length=160,
        deterministic=False,
    )
    engine = build_engine(spec)
    engine.start()
    batches = {str(cut): sampled(engine, **cut) for cut in CUTS}
    engine.stop()
    # At this rate a step changes no weight.
    trainer = TrainerConfig(learning_rate=1e-30, micro_batch_tokens=2048)
    rank = TrainerRank(trainer_spec(model, scratch, trainer=trainer, measures_gap=True))
    print(f"{'call':54} replay    mean ratio  outside 0.9..1.1   s/step")
    for name, (header, arrays) in batches.items():
        bare = arrays.kept(lambda column: column.name != SUPPORT)
        times = {}
        for label, tokens in (("with", arrays), ("without", bare)):
            ratio = np.exp(log_ratios(rank, header, tokens))
            outside = float(((ratio < 0.9) | (ratio > 1.1)).mean())
            times[label] = step_s(rank, header, tokens, seconds / 8)
            print(
                f"{name:54} {label:8} {ratio.mean():11.4f} {outside:16.1%} {times[label]:9.3f}"
            )
        if SUPPORT in arrays.columns:
            sizes = arrays.column(SUPPORT).sizes[arrays.is_sampled]
            print(
                f"{'':54} {sizes.mean():.0f} ids a token, {journal_bytes(arrays, bare):.0f} bytes "
                "a token in the journal"
            )
        if name == str(CUTS[2]):
            ratio_of_times = times["with"] / times["without"]
    print(f"ratio: {ratio_of_times:.2f}")


def sampled(engine: Engine, **given: Any) -> tuple[BatchHeader, Tokens]:
    """One group for each prompt, with two answers."""
    tokenizer = engine.runner.loaded.tokenizer
    requests = []
    for number, text in enumerate(PROMPTS):
        # Without a tokenizer any ids are as good.
        ids = (
            [ord(one) for one in text] if tokenizer is None else tokenizer.encode(text)
        )
        for sample in range(2):
            request = SamplingRequest(
                request_id=f"{number}/{sample}",
                prompt_ids=ids,
                max_tokens=NUM_NEW,
                seed=2 * number + sample,
                **given,
            )
            requests.append(request)
    groups = list[list[object]]([] for _ in PROMPTS)
    for request, reply in zip(requests, ask(engine, requests), strict=True):
        join = SegmentJoin(request)
        join.add(reply.result(timeout=600))
        answer = join.completion()
        group = groups[request.seed // 2]
        group.append(make_trajectory(len(group), answer, float(len(group))))
    batch = Batch(
        0,
        tuple(
            Group(GroupId(number), Prompt(f"0/{number}", ()), tuple(group))
            for number, group in enumerate(groups)
        ),
        0,
    )
    return pack_groups(batch)


def log_ratios(rank: TrainerRank, header: BatchHeader, arrays: Tokens) -> np.ndarray:
    """Return current - behaviour logprob of each sampled token."""
    from asyncrl.trainer.loss.objective import loss_tokens
    from asyncrl.trainer.loss.packing import LogitSets, micro_batches
    from asyncrl.trainer.loss.supports import find_supports

    has_loss = loss_tokens(header, arrays)
    found = np.zeros(len(has_loss), np.float32)
    policy = rank.policy
    for micro, _ in micro_batches(
        header,
        arrays,
        has_loss,
        policy.plan.rules(2048),
        torch.device("cpu"),
        rank.ranks,
        policy.costs,
        LogitSets(supports=find_supports(arrays, has_loss)),
    ):
        with torch.no_grad():
            found[micro.source_M] = policy(micro).logprob_M.numpy()
    return (found - arrays.behaviour_logprobs)[has_loss]


def step_s(
    rank: TrainerRank, header: BatchHeader, arrays: Tokens, seconds: float
) -> float:
    """Return the median CPU time of a gradient and an optimizer step, on one thread."""
    times = list[float]()
    while sum(times) < seconds or len(times) < 3:
        given = header.model_copy(update={"version": rank.policy_version})
        started_s = time.process_time()
        rank.train(given, arrays)
        times.append(time.process_time() - started_s)
    return statistics.median(times)


def journal_bytes(arrays: Tokens, bare: Tokens) -> float:
    """Return what the supports add, for each token."""
    sizes = [
        len(
            encode_trajectory(
                0, make_trajectory(0, Completion(one, 0, "length", 0), 0.0)
            )
        )
        for one in (arrays.kept(in_journal), bare)
    ]
    return (sizes[0] - sizes[1]) / arrays.num_sampled


if __name__ == "__main__":
    main()
