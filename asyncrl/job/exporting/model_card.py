"""README.md of an export: what the weights are, how they came about, and how to load them.

It is made to be given away: no path of this machine, no setting that says where or for whom the run worked,
and texts of users as text, whatever Markdown or HTML is in them.
"""

from __future__ import annotations

import html
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from asyncrl import __version__
from asyncrl.config import RunConfig
from asyncrl.config.model_task import TaskConfig
from asyncrl.job.resume import FREE_KEYS
from asyncrl.observe.recorder import METRICS_FILE, metrics_of, read_evaluations
from asyncrl.observe.run_numbers import Steps, by_evaluation
from asyncrl.observe.verdict.verdict import PLOT_FILE, write_reward_plot
from asyncrl.trainer.model_folder import hub_source

SHOWN_SECTIONS = ("seed", "rollout", "buffer", "trainer", "algorithm", "eval")
"""What says how the weights were learnt. Settings of the task, of agents and of places may hold secrets."""
HIDDEN = {"task", "vllm", "threads"}
"""Keys of these sections that do not."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
A_PATH = re.compile(r"(^|[\s\"'=:,\[({])(~|\.{0,2}/|[A-Za-z]:\\)")
MOST_EVALUATIONS = 10


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """The model that a run began with. `name`: by which others load it, a hub id; or a path of this machine,
    and then `shown` is all that a card has of it. `commit`: of the hub.
    """

    name: str
    shown: str
    commit: str | None = None

    @property
    def is_hub_id(self) -> bool:
        """Others can load it."""
        return self.name == self.shown


@dataclass(frozen=True, slots=True)
class WeightsOut:
    """What is exported of a run, in `dtype`."""

    run_dir: Path
    config: RunConfig
    version: int
    dtype: str
    origin: ModelOrigin
    is_adapter: bool = False


def origin_of(config: RunConfig, commit: str | None, run_dir: Path, base: str | None = None) -> ModelOrigin:
    """Of a run that fetched its model at this commit, None for one that was on this machine; `base`: as the
    user names it.
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
    """Write README.md, and beside it the reward curve up to these weights if there is one."""
    steps, oldest = Steps(), 0.0
    for line in metrics_of(weights.run_dir / METRICS_FILE, [], "step"):
        if line["step"] <= weights.version:
            steps.add(line)
            oldest = max(oldest, line.get("sample/staleness_max", 0.0))
    evaluations = [
        line
        for line in read_evaluations(weights.run_dir, [])
        if line["policy_version"] <= weights.version and "eval/reward_mean" in line
    ]
    has_curve = bool(steps.values("reward/mean"))
    if has_curve:
        title = f"reward up to policy_version {weights.version}"
        write_reward_plot(folder, steps, title=title, evaluations=evaluations)
    facts = _facts(weights, steps, evaluations, oldest)
    text = "\n".join(_card(weights, facts, evaluations, has_curve=has_curve, repo=repo))
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def _card(
    weights: WeightsOut,
    facts: Iterator[tuple[str, str]],
    evaluations: Sequence[dict[str, Any]],
    *,
    has_curve: bool,
    repo: str | None,
) -> Iterator[str]:
    config, origin = weights.config, weights.origin
    what = "Adapters" if weights.is_adapter else "Weights"
    yield f"---\n{yaml.safe_dump(_front_matter(weights), sort_keys=False).strip()}\n---\n"
    yield f"# {escaped(origin.shown)}, {weights.version} steps of reinforcement learning\n"
    yield f"{what} of policy_version {weights.version} of a run of asyncrl, fully asynchronous RL of language"
    yield "models with a hard bound on the staleness of every token.\n"
    yield from _table(("", ""), facts)
    if weights.is_adapter and not origin.is_hub_id:
        yield "The model under these adapters was a folder on the machine of the run, whose path stands in"
        yield "`adapter_config.json`. Put the hub id or the folder of that model there, as"
        yield "`asyncrl export --base NAME` does.\n"
    yield "## Load it\n"
    yield f"```python\n{_example(weights, repo)}\n```\n"
    if has_curve:
        yield f"## Reward\n\n![Mean reward of the batches]({PLOT_FILE})\n"
    if evaluations:
        yield "## Evaluations\n"
        newest = evaluations[-MOST_EVALUATIONS:]
        rows = ((f"{line['policy_version']:.0f} {line.get('name', '')}", _reward(line)) for line in newest)
        yield from _table(("policy_version", "reward"), rows)
    yield "## Settings that differ from the defaults\n"
    yield from _table(("setting", "value"), _settings(config))


def _front_matter(weights: WeightsOut) -> dict[str, Any]:
    origin, tasks = weights.origin, weights.config.tasks.values()
    datasets = [task.dataset for task in tasks if HUB_ID.fullmatch(task.dataset or "")]
    tags = ["asyncrl", "reinforcement-learning", *(["lora"] if weights.config.trainer.lora else [])]
    relation = "adapter" if weights.is_adapter else "finetune"
    return {
        **({"base_model": origin.name, "base_model_relation": relation} if origin.is_hub_id else {}),
        "library_name": "peft" if weights.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        **({"datasets": datasets} if datasets else {}),
        "tags": tags,
    }


def _facts(
    weights: WeightsOut, steps: Steps, evaluations: Sequence[dict[str, Any]], oldest: float
) -> Iterator[tuple[str, str]]:
    config, lora = weights.config, weights.config.trainer.lora
    commit = f", commit {weights.origin.commit}" if weights.origin.commit else ""
    yield "base model", escaped(weights.origin.shown + commit)
    trained = "all weights" if lora is None else f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}"
    trained += "" if lora is None or weights.is_adapter else ", merged"
    yield "weights", f"{trained}, {weights.dtype}"
    for name, task in config.tasks.items():
        share = f", share {config.shares[name]} of {sum(config.shares.values())}" if name else ""
        yield f"task {name}".strip(), escaped(task_words(task) + share)
    yield "algorithm", escaped(f"loss {config.algorithm.loss}, advantage {config.algorithm.advantage}")
    num_tokens = steps.total("tokens/trained")
    yield "steps", f"{weights.version} of {config.trainer.num_steps}, {num_tokens:,.0f} tokens trained"
    if rewards := steps.values("reward/mean"):
        tenth = -(-len(rewards) // 10)
        first, last = (sum(part) / len(part) for part in (rewards[:tenth], rewards[-tenth:]))
        yield "reward", f"{first:.3f} in the first tenth of these steps, {last:.3f} in the last"
    if evaluations:
        for name, lines in by_evaluation(evaluations).items():
            where = f"at policy_version {lines[-1]['policy_version']:.0f}"
            yield f"evaluation {name}".strip(), f"{_reward(lines[-1])} {where}"
    bound, ages = config.buffer.max_staleness, steps.values("sample/staleness_mean")
    seen = f"; observed: {sum(ages) / len(ages):.2f} on average, {oldest:.0f} at most" if ages else ""
    yield "staleness", f"at most {bound} versions allowed{seen}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    yield "exported with", f"asyncrl {__version__}, {packages}, Python {platform.python_version()}"


def task_words(task: TaskConfig) -> str:
    """What was learnt, without paths and settings."""
    if task.files is not None:
        return f"prompts of {', '.join(Path(file).name for file in task.files)}, reward {task.reward}"
    if task.dataset is not None:
        name = task.dataset if HUB_ID.fullmatch(task.dataset) else Path(task.dataset).name
        return f"dataset {name}, split {task.split}, reward {task.reward}"
    if task.reasoning_gym is not None:
        return f"{task.reasoning_gym} of reasoning-gym"
    return task.python or "a verifiers environment"


def _reward(line: Mapping[str, Any]) -> str:
    error = f" ± {line['eval/standard_error']:.3f}" if "eval/standard_error" in line else ""
    return f"{line['eval/reward_mean']:.3f}{error}"


def _settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    given = config.model_dump(mode="json", exclude_defaults=True)
    for section in SHOWN_SECTIONS:
        values = given.get(section)
        several = values if isinstance(values, list) else [values]
        for number, one in enumerate(several):
            place = section if one is values else f"{section}.{number}"
            for key, value in one.items() if isinstance(one, dict) else ():
                if key not in HIDDEN and key not in FREE_KEYS.get(section, "").split():
                    yield from _setting(f"{place}.{key}", value)
            if one is not None and not isinstance(one, dict):
                yield from _setting(place, one)


def _setting(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _setting(f"{key}.{name}", inner)
        return
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    yield f"`{key}`", "a path" if A_PATH.search(text) else escaped(text)


def _table(head: tuple[str, str], rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |\n| --- | --- |"
    yield from (f"| {name} | {value} |" for name, value in rows)
    yield ""


def _example(weights: WeightsOut, repo: str | None) -> str:
    name = repo or "PATH/OF/THIS/FOLDER"
    if weights.is_adapter:
        lines = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer", ""]
        lines += [f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")']
    else:
        lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="{weights.dtype}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")']
    return "\n".join(lines if weights.is_adapter else [*lines, f"# or, in a shell: vllm serve {name}"])


def escaped(text: str) -> str:
    """As one line of plain text in Markdown: no link, tag, emphasis or cell comes of it."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", html.escape(line, quote=False))
