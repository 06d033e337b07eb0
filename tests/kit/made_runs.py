"""Run folders made by hand, and colocated configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import job_runs
import yaml
from job_runs import write_config
from scoring_cases import make_decoder

from asyncrl.config import load_config, run_config_yaml
from asyncrl.config.model_config import ScratchConfig
from asyncrl.job.run_export import export_run
from asyncrl.journal.checkpoint_folders import write_manifest
from asyncrl.trainer.model.model_folder import ModelPin
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model
from asyncrl.trainer.ranks.rank import TrainerRank


def no_words(_: str) -> None:
    pass


class MadeRun:
    """A run directory with checkpoints of a trainer in this process."""

    def __init__(self, folder: Path, model_dir: Path, **sections: Any) -> None:
        self.path = folder / "run"
        self.path.mkdir(parents=True)
        sections["model"] = {
            "path": str(model_dir),
            "scratch": None,
            **sections.get("model", {}),
        }
        self.config = load_config(write_config(folder, **sections))
        (self.path / "config.yaml").write_text(run_config_yaml(self.config))
        pin = ModelPin(self.path, self.config.model.path)
        pin.read(model_dir)
        pin.write()

    def checkpoint(self, step: TrainerRank) -> Path:
        """Save the trainer's present state, as complete as finish() makes it."""
        folder = self.path / "checkpoints" / f"step_{step.policy_version}"
        folder.mkdir(parents=True)
        step.begin_save_state(folder / "trainer").result()
        (folder / "controller.json").write_text("{}")
        write_manifest(folder, step.policy_version)
        return folder

    def end(self, step: TrainerRank) -> None:
        """A run directory after the end of a run."""
        step.save(self.path / "final")
        summary = {"state": "done", "policy_version": step.policy_version}
        (self.path / "summary.json").write_text(json.dumps(summary))

    def export(self, out: Path, **wanted: Any) -> Path:
        before = contents(self.path)
        facts = export_run(self.path, out, **{"tell": no_words, **wanted})
        assert facts["num_bytes"] == sum(file.stat().st_size for file in out.iterdir())
        assert contents(self.path) == before
        return out


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def write_colocated(folder: Path, kind: str, rollout: str = "trainer") -> Path:
    """Write a config whose trainer, engine and server time-share one CPU, or work at
    once with `rollout` on the CPU.
    """
    model = folder / "model"
    sections: dict[str, Any] = {
        "placement": {"trainer": "cpu", "rollout": rollout, "share": None},
        "trainer": {"num_steps": 6},
        "algorithm": {"advantage": "held_task:held_rloo"},
        "supervision": {"backoff_s": 0.1},
    }
    served = {"path": str(model)}
    if kind == "teacher":
        # The same vocabulary as the policy's.
        make_scratch_model(
            ScratchSpec(
                out=model,
                seed=5,
                scratch=ScratchConfig.model_validate(
                    job_runs.CONFIG["model"]["scratch"]
                ),
            )
        )
        sections["teacher"] = served
        sections["algorithm"] |= {"distill_weight": 0.5}
    else:
        make_decoder(model, None)
        rows = folder / "rows.jsonl"
        rows.write_text("\n".join(json.dumps({"prompt": f"{a} 2"}) for a in "abcdefgh"))
    path = job_runs.write_config(folder, **sections)
    if kind == "reward":
        config = yaml.safe_load(path.read_text())
        config["task"] = {
            "files": [str(rows)],
            "answer_column": "none",
            "reward": {"model": served},
        }
        path.write_text(yaml.safe_dump(config))
    return path
