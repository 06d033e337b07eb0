"""Print the memory that a trainer's process has for each part of its models, as JSON by
model and part: planned, and measured with the part on the device and away.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer_cases import gradient_of, make_batch, make_spec

from asyncrl.config import RunConfig
from asyncrl.launch.memory import rank_memory
from asyncrl.launch.model_sizes import model_shape
from asyncrl.trainer.ranks.rank import TrainerRank

PARTS = dict.fromkeys(("weights", "gradients", "optimizer"), "always")


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def main(model_dir: Path, folder: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": sys.argv[3]},
            "task": {"python": "asyncrl.tasks.toy:Letters"},
            "rollout": {"group_size": 1},
            "trainer": {
                "offload": PARTS | {"reference": "always"},
                "optimizer": sys.argv[4],
            },
            "algorithm": {"advantage": "gae", "kl_coefficient": 0.1},
            "critic": {},
        }
    )
    spec = make_spec(
        model_dir,
        folder,
        trainer=config.trainer.model_dump(),
        algorithm=config.algorithm.model_dump(),
        critic=config.critic,
        dtype=config.model.dtype,
    )
    rank = TrainerRank(spec)
    rank.train(*make_batch(group_size=1))
    gradient_of(rank, *make_batch(version=1, group_size=1))
    plan = rank_memory(config, model_shape(config.model), "cpu").parts
    found = dict[str, tuple[int, int]]()
    for one, planned in plan.items():
        rank._use("hold nothing")
        without = resident_bytes()
        rank._use("hold a part", one)
        found[f"{one.model} {one.part}"] = (planned, resident_bytes() - without)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
