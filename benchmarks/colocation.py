"""Cost of colocation: handovers against a memory copy of the moved bytes, and peak
memory against separate processes.

    python benchmarks/colocation.py [--seconds 60] [--device cpu]
    [--write]

Two runs of a random model with 134.5 million parameters in float32, max_staleness 0,
one group of 4 completions per step: trainer and embedded engine colocated, then
separate. `moved`: bytes that the handovers around a step copy: weights and optimizer
onto the device and back, and the push. `copy`: a copy of that size between warm
buffers; `new pages`: onto newly allocated memory. Memory is the sum of the processes'
proportional set sizes (CUDA: used device memory). The first step warms up and is not in
the medians.

Last line: `ratio: X` = median seconds of both handovers over the memory copy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import torch
from common import ASYNCRL, copy_costs, options, read_steps, reported, watched
from shape_task import make_shape

STEP_S = 4.0
MIN_STEPS = 4
COPY_BYTES = 2**29
NUM_PARAMETERS = 134_515_008
BYTES_PER_PARAMETER = 2 * 12 + 4
"""float32 weights and AdamW's two moments in both directions, and the pushed weights.
"""
CONFIG = """
model: {{path: {model}, dtype: float32}}
task: {{python: "shape_task:ShapeTask", size: 1000, reward_pool: inline}}
rollout: {{group_size: 4, slots: 80, max_tokens: 16, max_prompt_tokens: 80, threads: 1}}
buffer: {{max_staleness: 0}}
trainer: {{num_groups: 1, num_steps: {num_steps}, threads: 1}}
weight_sync: {{transport: shm}}
placement: {{trainer: {device}, rollout: {rollout}, share: null}}
checkpoint: {{every: null}}
observe: {{console: none, trackers: []}}
"""


def main() -> None:
    """Parse, measure, print."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    num_steps = max(MIN_STEPS, int(arguments.seconds / 2 / STEP_S))
    peaks: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-colocation-") as name:
        folder = Path(name)
        model = make_shape(folder / "model")
        config = folder / "config.yaml"
        for side, rollout in (("colocated", "trainer"), ("separate", device)):
            text = CONFIG.format(
                model=model,
                num_steps=num_steps,
                device=device,
                rollout=rollout,
            )
            config.write_text(text)
            processes = watched(
                [*ASYNCRL, str(config)], folder / side, memory_of=device
            )
            peaks[side] = processes.peak_bytes(num_steps)
        steps = read_steps(folder / "colocated")
    moved = NUM_PARAMETERS * BYTES_PER_PARAMETER
    warm, new = copy_costs(COPY_BYTES, torch.device(device))
    copy_s = warm[0] * moved / COPY_BYTES
    counted = steps[1:-1]  # after the last step the engines get nothing
    handover_s = median(step["perf/handover_s"] for step in counted)
    rows = {
        "to the trainer": median(step["perf/to_trainer_s"] for step in counted),
        "to the engine, with the push": median(
            step["perf/to_engines_s"] for step in counted
        ),
        "both handovers": handover_s,
        "both handovers, first step": steps[0]["perf/handover_s"],
        f"memory copy of {moved / 1e6:.0f} MB": copy_s,
        "the same onto new pages": new[0] * moved / COPY_BYTES,
    }
    with reported("colocation", is_kept=arguments.write):
        print(f"{num_steps} steps; seconds, medians")
        for title, seconds in rows.items():
            print(f"{title:<40}{seconds:>8.3f}")
        print(f"\n{'peak memory, MB':<20}{'total':>8}  of each process")
        for side, peak in peaks.items():
            each = ", ".join(
                f"{key} {value / 1e6:.0f}"
                for key, value in peak.items()
                if key != "all"
            )
            print(f"{side:<20}{peak['all'] / 1e6:>8.0f}  {each}")
        print(f"ratio: {handover_s / copy_s:.2f}")


if __name__ == "__main__":
    main()
