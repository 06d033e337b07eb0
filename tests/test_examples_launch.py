"""Each file of examples/launch starts a valid run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from test_docs import parse

from asyncrl.config import load_config

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "examples/launch"
VALUES = {
    "config": "configs/gsm8k-qwen2.5-7b-8gpu.yaml",
    "model": "/shared/model",
    "run_dir": "/shared/runs/a",
}
VALUES |= {"address": "10.0.0.7", "head": "10.0.0.7", "port": "6379"}


def scripts() -> dict[str, str]:
    """Return the shell script of each file."""
    kuberay = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]
    (group,) = kuberay["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"][
        "nvidia.com/gpu"
    ]
    assert (group["replicas"], gpus) == (4, "8")
    return {
        "kuberay": kuberay["entrypoint"],
        "skypilot": yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"],
        "ray_job": (LAUNCH / "ray_job.sh").read_text(),
        "slurm": (LAUNCH / "slurm.sbatch").read_text(),
    }


@pytest.mark.parametrize("name", ["kuberay", "skypilot", "ray_job", "slurm"])
def test_launch_file_starts_a_valid_run(name: str) -> None:
    script = scripts()[name]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (command,) = re.findall(r"asyncrl (run (?:.*\\\n)*.*)", script)
    command = re.sub(
        r"\$(\w+)", lambda found: VALUES[found[1].lower()], command.replace("\\\n", " ")
    )
    found = parse([word for word in shlex.split(command) if word not in ("$@", "&")])
    assert found["run_dir"].is_relative_to("/shared")
    config = load_config(ROOT / found["config"], found["overrides"])
    is_inside = name in ("kuberay", "ray_job")
    assert config.launcher == ("ray" if is_inside else "ray:10.0.0.7:6379")
    sides = (config.placement.trainer, config.placement.rollout)
    assert [(side.nodes, side.gpus) for side in sides] == [(2, 8), (2, 8)]  # type: ignore[union-attr]
    assert (config.trainer.world_size, config.rollout.num_engines) == (16, 16)
