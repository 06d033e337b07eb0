"""What computing a group's shared prompt once is worth to the trainer: forward and backward with and without
it, the same batch.

    python benchmarks/shared_prompt.py [--seconds S] [--write]

The batch of benchmarks/trainer.py on the tiny model: 8 groups of 8, prompts of 64 tokens, completions
long-tailed or of equal length, float32, 2 threads. Both ways in turns in one process; medians of CPU seconds.
The last line is without / with, long-tailed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported: waiting must not count as work

import torch
from report import options, reported
from trainer_case import EQUAL_LENGTH, completions, long_tailed_lengths, make_batch, make_tiny
from trainer_ours import nothing_shared
from transformers import AutoModelForCausalLM

from asyncrl.messages.calls import unpack_batch
from asyncrl.trainer.model import packing, tree
from asyncrl.trainer.model.policy import Policy

SHARED, EACH = "once", "each sequence"


def run_once(policy: Policy, blob: bytes, way: str) -> tuple[float, int]:
    """(CPU seconds of forward and backward, packed tokens)."""
    header, arrays = unpack_batch(blob)
    start, num_tokens = time.process_time(), 0
    with mock.patch.object(tree, "_trie", nothing_shared if way == EACH else tree._trie):
        for micro in packing.pack(header, arrays, arrays.loss_mask, 16384, torch.device("cpu")):
            policy(micro).logprob_M.sum().backward()
            num_tokens += len(micro.token_ids_N)
    policy.zero_grad()
    return time.process_time() - start, num_tokens


def main() -> None:
    """Read the options and run."""
    arguments = options(__doc__, seconds=20.0).parse_args()
    torch.set_num_threads(2)
    with reported("shared_prompt", is_kept=arguments.write), tempfile.TemporaryDirectory() as folder:
        path = make_tiny(Path(folder) / "tiny")
        policy = Policy(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        print(f"{'lengths':<14}{'shared prompt':<16}{'packed tokens':>14}{'CPU s':>8}")
        ratios = []
        for name, lengths in (("long-tailed", long_tailed_lengths(8)), ("equal", [EQUAL_LENGTH] * 64)):
            blob, _ = make_batch(str(path), partial(completions, lengths=lengths))
            found: dict[str, list[tuple[float, int]]] = {SHARED: [], EACH: []}
            until = time.monotonic() + arguments.seconds / 2
            while time.monotonic() < until or not found[EACH]:
                for way, results in found.items():
                    results.append(run_once(policy, blob, way))
            once, each = (statistics.median(cpu_s for cpu_s, _ in results) for results in found.values())
            for way, cpu_s in ((SHARED, once), (EACH, each)):
                print(f"{name:<14}{way:<16}{found[way][0][1]:>14}{cpu_s:>8.2f}")
            ratios.append(each / once)
        print(f"ratio: {ratios[0]:.2f}")


if __name__ == "__main__":
    main()
