"""README.md of an export, without machine paths and settings of tasks or agents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from asyncrl import __version__
from asyncrl.config import RunConfig
from asyncrl.observe.run_dir import read_evaluations, read_metrics
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.verdict import PLOT_FILE, write_reward_plot
from asyncrl.trainer.model_folder import hub_source

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Initial model of a run. `name` is a hub id or local path, `shown` the name in the card, never a
    path, `commit` the hub's.
    """

    name: str
    shown: str
    commit: str | None = None

    @property
    def is_hub_id(self) -> bool:
        return self.name == self.shown


@dataclass(frozen=True, slots=True)
class WeightsOut:
    run_dir: Path
    config: RunConfig
    version: int
    dtype: str
    origin: ModelOrigin
    is_adapter: bool = False


def origin_of(config: RunConfig, commit: str | None, run_dir: Path, base: str | None = None) -> ModelOrigin:
    """Return the initial model. `commit`: the fetched commit (none for a local model). `base`: the user's
    name for it.
    """
    path = config.model.path
    if base is not None:
        return ModelOrigin(base, base) if HUB_ID.fullmatch(base) else ModelOrigin(base, Path(base).name)
    if config.model.scratch is not None or path is None:
        kind = (config.model.scratch and config.model.scratch.architecture.get("model_type")) or "model"
        return ModelOrigin(str((run_dir / "model").resolve()), f"{kind} from random weights")
    if (cached := hub_source(Path(path).expanduser())) is not None:
        return ModelOrigin(cached[0], *cached)
    if commit is not None:
        return ModelOrigin(path, path, commit)
    return ModelOrigin(str(Path(path).expanduser().resolve()), Path(path).name)


def write_card(weights: WeightsOut, folder: Path, *, repo: str | None = None) -> None:
    """Write README.md and, after the first step, the reward curve up to these weights."""
    from huggingface_hub import ModelCard, ModelCardData

    config, origin = weights.config, weights.origin
    steps = Steps()
    oldest = 0.0
    for line in read_metrics(weights.run_dir, []):
        if line["step"] <= weights.version:
            steps.add(line)
            oldest = max(oldest, line.get("sample/staleness_max", 0.0))
    evaluations = [
        line
        for line in read_evaluations(weights.run_dir, [])
        if line["policy_version"] <= weights.version and "eval/reward_mean" in line
    ]
    datasets = [task.dataset or "" for task in config.tasks.values()]
    card_data = ModelCardData(
        base_model=origin.name if origin.is_hub_id else None,
        library_name="peft" if weights.is_adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=[name for name in datasets if HUB_ID.fullmatch(name)] or None,
        tags=["asyncrl", "reinforcement-learning", *(["lora"] if config.trainer.lora else [])],
    )
    kind = "Adapters" if weights.is_adapter else "Weights"
    lines = [
        f"# {origin.shown}, {weights.version} steps of reinforcement learning",
        f"{kind} of policy_version {weights.version}, trained with asyncrl {__version__} in {weights.dtype}.",
        f"- Loss {config.algorithm.loss}, advantage {config.algorithm.advantage}, "
        f"{steps.total('tokens/trained'):,.0f} trained tokens.",
        f"- Staleness: at most {config.buffer.max_staleness} versions allowed, {oldest:.0f} observed.",
    ]
    for line in evaluations[-1:]:
        reward, version = line["eval/reward_mean"], line["policy_version"]
        lines.append(f"- Evaluation: {reward:.3f} at policy_version {version:.0f}.")
    if weights.is_adapter and not origin.is_hub_id:
        lines.append("The base model was a local folder. Export again with `--base NAME` to name it.")
    lines.append(f"```python\n{_example(weights, repo or 'PATH/OF/THIS/FOLDER')}\n```")
    if steps.values("reward/mean"):
        title = f"reward up to policy_version {weights.version}"
        write_reward_plot(folder, steps, title=title, evaluations=evaluations)
        lines.append(f"![Mean reward of the batches]({PLOT_FILE})")
    ModelCard(f"---\n{card_data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n").save(folder / "README.md")


def _example(weights: WeightsOut, name: str) -> str:
    if weights.is_adapter:
        return (
            "from peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")'
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="{weights.dtype}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
