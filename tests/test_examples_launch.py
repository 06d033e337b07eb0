"""Each launch file starts the run of its config, on nodes of its size."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from printed_texts import parse

from asyncrl.config import load_config
from asyncrl.launch.cluster_file import FILES, cluster_file

pytestmark = pytest.mark.extension("ray")  # the files start Ray
ROOT = Path(__file__).parent.parent
RAY_JOB = Draft202012Validator(
    yaml.safe_load((ROOT / "tests/rayjob_schema.yaml").read_text())
)
SIZES = {
    "gsm8k-qwen2.5-7b-2x8gpu": (2, 8),
    "gsm8k-qwen2.5-7b-8gpu": (1, 8),
    "gsm8k-qwen2.5-1.5b-2gpu": (1, 2),
    "gsm8k-qwen3-0.6b-1gpu": (1, 1),
    "quickstart": (1, 0),
}
OVERRIDES = ["trainer.num_steps=3", "model.chat_template_kwargs={a: it's}"]


def script_and_size(kind: str, text: str) -> tuple[str, int, int]:
    """Return the shell script, and the numbers of nodes and of GPUs of each."""
    if kind == "slurm":
        asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", text))
        return text, int(asked["nodes"]), int(asked.get("gpus-per-node", 0))
    found: Any = yaml.safe_load(text)
    if kind == "skypilot":
        cards = found["resources"].get("accelerators", "none:0")
        return found["run"], found["num_nodes"], int(cards.split(":")[1])
    RAY_JOB.validate(found)
    cluster = found["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    gpus = set[int]()
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        gpus.add(int(container["resources"]["limits"].get("nvidia.com/gpu", 0)))
        assert pod["securityContext"]["runAsNonRoot"]
        check_pod(group["template"])
    return found["spec"]["entrypoint"], 1 + workers["replicas"], *gpus


def check_pod(template: dict[str, Any]) -> None:
    """Compare a pod with the schema of Kubernetes, if its validator is installed."""
    try:
        import kubernetes_validate
    except ModuleNotFoundError:
        return
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template}
    kubernetes_validate.validate(pod, "1.34", strict=True)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", FILES)
def test_launch_file_starts_the_run_on_nodes_of_its_size(kind: str, name: str) -> None:
    config = ROOT / f"configs/{name}.yaml"
    text = cluster_file(kind, config, OVERRIDES)
    script, *size = script_and_size(kind, text)
    assert tuple(size) == SIZES[name]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (command,) = re.findall(r"asyncrl (run .*)", script)
    command = re.sub(r"\$\w+", "1", command)
    found = parse([word for word in shlex.split(command) if word not in ("$@", "&")])
    assert found["config"] == config
    started = load_config(config, found["overrides"])
    assert started.launcher.startswith("ray")
    launcher = f"launcher={started.launcher}"
    assert started == load_config(config, [*OVERRIDES, launcher])


def test_job_of_a_running_cluster_starts_its_config() -> None:
    script = (ROOT / "examples/launch/ray_job.sh").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (default,) = re.findall(r"config=\$\{CONFIG:-(.*)\}", script)
    assert load_config(ROOT / default).launcher == "ray"
    assert "placement" not in script.partition("ray job submit")[2]
