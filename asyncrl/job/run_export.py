"""`asyncrl export`: write weights of a run to a new folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl import __version__
from asyncrl.base.errors import CheckpointDamaged, CheckpointError, ConfigError
from asyncrl.base.files import whole_folder
from asyncrl.base.http import Refused
from asyncrl.config import RunConfig
from asyncrl.journal.checkpoint_folders import TRAINER, Checkpoints, read_whole
from asyncrl.observe.run_dir import SUMMARY_FILE, read_config, read_evaluations, read_metrics, read_object
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.verdict import write_reward_plot
from asyncrl.trainer.model_folder import ModelPin, find_model, hub_source

DTYPES = ("float32", "bfloat16", "float16")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FINAL = "final"


@dataclass(frozen=True, slots=True)
class Export:
    """Weights to write from `folder`. `base`: hub id or folder of the initial model; `commit`: on the hub."""

    run_dir: Path
    config: RunConfig
    version: int
    folder: Path
    base: str
    commit: str | None
    dtype: str
    is_adapter: bool


def export_run(
    run_dir: Path,
    out: Path,
    *,
    step: str = "last",
    adapter: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Export weights to `out`. `base`: name of the initial model in adapters. Raises CheckpointError."""
    config = read_config(run_dir)
    out = out.expanduser().resolve()
    if adapter and config.trainer.lora is None:
        what = "--adapter: this run trains all weights (trainer.lora=none)"
        raise ConfigError(what, way_out="omit --adapter.")
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is not known", rule=f"it is one of {', '.join(DTYPES)}")
    if run_dir.resolve() in out.parents or (out.exists() and any(out.iterdir())):
        raise ConfigError(
            f"{out} is not empty, or is in {run_dir}",
            rule="an export changes no other file",
            way_out="choose another folder, or remove this one.",
        )
    commit = None
    if base is None:
        base, commit = _initial_model(config, run_dir)
    wanted = dtype or config.model.dtype
    has_final = not adapter and wanted == config.model.dtype
    version, folder = find_weights(run_dir, config, step, has_final=has_final, tell=tell)
    export = Export(run_dir, config, version, folder, base, commit, wanted, is_adapter=adapter)
    with whole_folder(out) as unfinished:
        if folder.name == FINAL:
            tell(f"copying {folder}")
            shutil.copytree(folder, unfinished)
        else:
            _load(export, unfinished, tell)
        _write_card(export, unfinished)
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    kind = "adapter" if adapter else "model"
    tell(f"{kind} of policy_version {version}, {num_bytes / 1e6:,.1f} MB: {out}")


def _initial_model(config: RunConfig, run_dir: Path) -> tuple[str, str | None]:
    """Return the hub id with its commit, or the folder."""
    path = config.model.path
    if path is None:
        return str((run_dir / "model").resolve()), None
    folder = Path(path).expanduser()
    if (cached := hub_source(folder)) is not None:
        return cached
    commit = ModelPin(run_dir, config.model.source).revision
    return (str(folder.resolve()), None) if commit is None else (path, commit)


def find_weights(
    run_dir: Path,
    config: RunConfig,
    step: str,
    *,
    has_final: bool = True,
    tell: Callable[[str], None] = print,
) -> tuple[int, Path]:
    """Return the version and folder of the weights that `step` names; checksums are verified."""
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    folders = {version: checkpoints.root / f"step_{version}" for version in checkpoints.versions()}
    summary = read_object(run_dir / SUMMARY_FILE, [])
    # an older final/ may be from before a resume
    if has_final and summary.get("state") == "done" and (run_dir / FINAL).is_dir():
        folders[summary["num_steps"]] = run_dir / FINAL
    rewards = {
        int(line["policy_version"]): line["eval/reward_mean"]
        for line in read_evaluations(run_dir, [])
        if "eval/reward_mean" in line and line.get("name", "") == (config.best_eval or "")
    }
    match step:
        case "last":
            wanted = sorted(folders, reverse=True)
        case "best":
            evaluated = folders.keys() & rewards.keys()
            wanted = sorted(evaluated, key=lambda version: (rewards[version], version))[-1:]
        case _:
            wanted = [version for version in folders if str(version) == step]
    available = f"steps {', '.join(map(str, sorted(folders)))}" if folders else "none"
    for version in wanted:
        folder = folders[version]
        if folder.name == FINAL:
            return version, folder
        tell(f"verifying the checksums of {folder.name}")
        try:
            read_whole(folder, version)
        except CheckpointDamaged as error:
            if step != "last":
                way_out = f"export another step ({available}), or restore the folder."
                raise CheckpointDamaged(error.what, rule=error.rule, way_out=way_out) from error
            tell(f"WARNING: skipped: {error.what}")
        else:
            return version, folder
    raise ConfigError(
        f"{run_dir} has no weights for --step {step}; available: {available}",
        rule="checkpoints are made every checkpoint.every steps and at a stop, final/ at the end (in the "
        "dtype of the run); best has the highest eval/reward_mean in eval.jsonl",
        way_out="use --step N with an available step, or --step last.",
    )


def _load(export: Export, path: Path, tell: Callable[[str], None]) -> None:
    from asyncrl.trainer.state import read_state, save_model, save_peft

    model = export.config.model
    template = model.chat_template
    state = export.folder / TRAINER
    pin = ModelPin(export.run_dir, model.source)
    try:
        trained_from = Path(read_state(state).model_path)
        if model.path is None:
            folder = export.run_dir / "model"
        elif trained_from.is_dir():
            folder = trained_from
        else:
            folder = find_model(model.path, model.revision, commit=pin.revision)
        pin.read(folder)
        if export.is_adapter:
            name, commit = export.base, export.commit
            save_peft(state, folder, path, name, commit, dtype=export.dtype, chat_template=template)
        else:
            save_model(state, folder, path, tell, dtype=export.dtype, chat_template=template)
    except ConfigError as error:
        error.way_out = "restore the files of the base model; an export uses the model that was trained."
        raise
    except Refused as error:
        raise CheckpointError(error.body.error, rule=error.body.rule, way_out=error.body.way_out) from error


def _write_card(export: Export, folder: Path) -> None:
    """Write README.md, without local paths, and the reward curve."""
    from huggingface_hub import ModelCard, ModelCardData

    config = export.config
    is_on_hub = HUB_ID.fullmatch(export.base) is not None
    shown = export.base if is_on_hub else Path(export.base).name
    steps = Steps(line for line in read_metrics(export.run_dir, []) if line["step"] <= export.version)
    evaluations = [
        line
        for line in read_evaluations(export.run_dir, [])
        if line["policy_version"] <= export.version and "eval/reward_mean" in line
    ]
    datasets = [task.dataset for task in config.tasks.values()]
    data = ModelCardData(
        base_model=export.base if is_on_hub else None,
        library_name="peft" if export.is_adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=[dataset for dataset in datasets if dataset and HUB_ID.fullmatch(dataset)] or None,
        tags=["asyncrl", "reinforcement-learning", *(["lora"] if config.trainer.lora else [])],
    )
    loader = "AutoPeftModelForCausalLM" if export.is_adapter else "AutoModelForCausalLM"
    oldest = max(steps.values("sample/staleness_max"), default=0.0)
    text = f"""# {shown}, {export.version} steps of reinforcement learning

{"Adapters" if export.is_adapter else "Weights"} of policy_version {export.version}, in {export.dtype},
trained with asyncrl {__version__}: loss {config.algorithm.loss}, advantage {config.algorithm.advantage},
{steps.total("tokens/trained"):,.0f} trained tokens. Staleness: at most {config.buffer.max_staleness} versions
allowed, {oldest:.0f} observed.

```python
from {data.library_name} import {loader}

model = {loader}.from_pretrained("PATH_OR_HUB_ID_OF_THIS_FOLDER")
```
"""
    for line in evaluations[-1:]:
        reward = line["eval/reward_mean"]
        text += f"\nEvaluation: {reward:.3f} at policy_version {line['policy_version']:.0f}.\n"
    if steps.values("reward/mean"):
        title = f"reward up to policy_version {export.version}"
        write_reward_plot(folder / "reward.png", steps, title=title)
        text += "\n![Mean reward of the batches](reward.png)\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")
