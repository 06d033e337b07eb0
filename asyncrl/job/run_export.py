"""`asyncrl export`: write weights of a run to a new folder. Only an export with exactly the files in its
asyncrl.json is replaced.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.base.errors import CheckpointDamaged, CheckpointError, ConfigError, HubError
from asyncrl.base.files import whole_folder
from asyncrl.base.http import Refused
from asyncrl.config import RunConfig
from asyncrl.journal.checkpoint_folders import MANIFEST, TRAINER, Checkpoints, read_whole
from asyncrl.observe.run_dir import SUMMARY_FILE, read_config, read_evaluations, read_metrics, read_object
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.verdict import write_reward_plot
from asyncrl.trainer.model_folder import TOKENIZER, ModelPin, find_model, hub_source

MARK = "asyncrl.json"
DTYPES = ("float32", "bfloat16", "float16")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
"""Files of an earlier push that may have to go."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Initial model. `name`: hub id or local path; `commit`: on the hub."""

    name: str
    commit: str | None = None

    @property
    def is_hub_id(self) -> bool:
        return self.commit is not None or HUB_ID.fullmatch(self.name) is not None

    @property
    def shown(self) -> str:
        return self.name if self.is_hub_id else Path(self.name).name


@dataclass(frozen=True, slots=True)
class Export:
    """Weights to write from `folder`."""

    run_dir: Path
    config: RunConfig
    version: int
    folder: Path
    is_final: bool
    base: BaseModel
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
    overwrite: bool = False,
    push: str | None = None,
    public: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Export weights to `out`, and with `push` to the hub. Raises CheckpointError or HubError."""
    config = read_config(run_dir)
    if adapter and config.trainer.lora is None:
        what = "--adapter: this run trains all weights (trainer.lora=none)"
        raise ConfigError(what, way_out="omit --adapter.")
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is not known", rule=f"it is one of {', '.join(DTYPES)}")
    out = _free(run_dir, out, overwrite=overwrite)
    origin = _base_model(config, ModelPin(run_dir, config.model.source).revision, run_dir, base)
    if push is not None and adapter and not origin.is_hub_id:
        raise ConfigError(
            f"--push {push}: these adapters belong to a base model in a local folder, {origin.name}",
            rule="users of the adapters must find the base model",
            way_out="add --base with its hub id.",
        )
    repo = None if push is None else open_repo(push, is_public=public)
    dtype = dtype or config.model.dtype
    found = find_weights(run_dir, config, step, is_as_trained=dtype == config.model.dtype, tell=tell)
    version, _, is_final = found
    export = Export(run_dir, config, *found, origin, dtype, is_adapter=adapter)
    with _failures_named(export), whole_folder(out) as unfinished:
        if is_final:
            _copy(export, unfinished, tell)
        else:
            _load(export, unfinished, tell)
        _write_card(export, unfinished, push or "PATH/OF/THIS/FOLDER")
        files = sorted([*(path.name for path in unfinished.iterdir()), MARK])
        mark = {"policy_version": version, "asyncrl": __version__, "files": files}
        (unfinished / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    kind = "adapter" if adapter else "model"
    tell(f"{kind} of policy_version {version}, {num_bytes / 1e6:,.1f} MB: {out}")
    if repo is not None:
        tell(f"pushing to {repo}")
        tell(f"pushed: {push_folder(repo, out, version)}")


def _free(run_dir: Path, out: Path, *, overwrite: bool) -> Path:
    """Resolve the path. Raises ConfigError if it would replace anything except an export."""
    out = out.expanduser().resolve()
    if run_dir.resolve() in (out, *out.parents):
        rule = "an export changes nothing in a run directory"
        raise ConfigError(f"{out} is inside {run_dir}", rule=rule, way_out="choose a folder elsewhere.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    rule = "--overwrite replaces only an unchanged earlier export"
    try:
        files = set(json.loads((out / MARK).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{out} exists and is not an export (it has no {MARK})"
        raise ConfigError(what, rule=rule, way_out="choose another folder.") from None
    if others := sorted({path.name for path in out.iterdir()} - files):
        what = f"{out} has files that no export wrote: {', '.join(others[:5])}"
        raise ConfigError(what, rule=rule, way_out="move them away, or choose another folder.")
    if not overwrite:
        raise ConfigError(f"{out} is already an export", rule=rule, way_out="add --overwrite.")
    return out


def _base_model(config: RunConfig, commit: str | None, run_dir: Path, base: str | None) -> BaseModel:
    if base is not None:
        return BaseModel(base)
    path = config.model.path
    if path is not None and (cached := hub_source(Path(path).expanduser())) is not None:
        return BaseModel(*cached)
    if path is not None and commit is not None:
        return BaseModel(path, commit)
    return BaseModel(str(Path(path or run_dir / "model").expanduser().resolve()))


def find_weights(
    run_dir: Path,
    config: RunConfig,
    step: str,
    *,
    is_as_trained: bool = True,
    tell: Callable[[str], None] = print,
) -> tuple[int, Path, bool]:
    """Return (version, folder, is_final) of the weights that `step` names; checksums are verified."""
    versions = Checkpoints(run_dir, config.checkpoint).versions()
    final = _final_version(run_dir) if is_as_trained else None
    wanted = sorted({*versions, *([] if final is None else [final])})
    available = f"steps {', '.join(map(str, wanted))}" if wanted else "none"
    if step == "best":
        rewards = {
            int(line["policy_version"]): line["eval/reward_mean"]
            for line in read_evaluations(run_dir, [])
            if "eval/reward_mean" in line and line.get("name", "") == (config.best_eval or "")
        }
        wanted = sorted((one for one in wanted if one in rewards), key=lambda one: (rewards[one], one))[-1:]
    elif step != "last":
        wanted = [one for one in wanted if str(one) == step]
    for version in reversed(wanted):
        if version == final:
            return version, run_dir / "final", True
        folder = run_dir / "checkpoints" / f"step_{version}"
        tell(f"verifying the checksums of {folder.name}")
        try:
            read_whole(folder, version)
        except CheckpointDamaged as error:
            if step != "last":
                way_out = f"export another step ({available}), or restore the folder."
                raise CheckpointDamaged(error.what, rule=error.rule, way_out=way_out) from error
            tell(f"WARNING: skipped: {error.what}")
        else:
            return version, folder, False
    raise ConfigError(
        f"{run_dir} has no weights for --step {step}; available: {available}",
        rule="checkpoints are made every checkpoint.every steps and at a stop, final/ at the end (in the "
        "dtype of the run); best has the highest eval/reward_mean in eval.jsonl",
        way_out="use --step N with an available step, or --step last.",
    )


def _final_version(run_dir: Path) -> int | None:
    """Return None if final/ is missing or older than a resumed run."""
    summary = read_object(run_dir / SUMMARY_FILE, [])
    version = summary.get("num_steps")
    is_done = summary.get("state") == "done" and isinstance(version, int)
    return version if is_done and (run_dir / "final").is_dir() else None


def _load(export: Export, path: Path, tell: Callable[[str], None]) -> None:
    from asyncrl.trainer.state import read_state, save_model, save_peft

    model = export.config.model
    state = export.folder / TRAINER
    pin = ModelPin(export.run_dir, model.source)
    trained_from = Path(read_state(state).model_path)
    if model.path is None:
        base = export.run_dir / "model"
    elif trained_from.is_dir():
        base = trained_from
    else:
        base = find_model(model.path, model.revision, commit=pin.revision)
    try:
        pin.read(base)
    except ConfigError as error:
        way_out = "restore its files; an export uses the model that was trained."
        raise ConfigError(error.what, rule=error.rule, way_out=way_out) from error
    if export.is_adapter:
        name, commit = export.base.name, export.base.commit
        save_peft(state, base, path, name, commit, dtype=export.dtype, chat_template=model.chat_template)
    else:
        save_model(state, base, path, tell, dtype=export.dtype, chat_template=model.chat_template)


def _copy(export: Export, path: Path, tell: Callable[[str], None]) -> None:
    """Copy final/, or adapter/ with the tokenizer."""
    source = export.folder.with_name("adapter") if export.is_adapter else export.folder
    tell(f"copying {source}")
    shutil.copytree(source, path)
    if export.is_adapter:
        for file in [file for pattern in TOKENIZER for file in export.folder.glob(pattern)]:
            shutil.copyfile(file, path / file.name)
        config = path / "adapter_config.json"
        values = json.loads(config.read_text(encoding="utf-8"))
        values |= {"base_model_name_or_path": export.base.name, "revision": export.base.commit}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_card(export: Export, folder: Path, name: str) -> None:
    """Write README.md, without local paths, and the reward curve."""
    from huggingface_hub import ModelCard, ModelCardData

    config = export.config
    steps = Steps()
    for line in read_metrics(export.run_dir, []):
        if line["step"] <= export.version:
            steps.add(line)
    evaluations = [
        line
        for line in read_evaluations(export.run_dir, [])
        if line["policy_version"] <= export.version and "eval/reward_mean" in line
    ]
    datasets = [task.dataset for task in config.tasks.values()]
    data = ModelCardData(
        base_model=export.base.name if export.base.is_hub_id else None,
        library_name="peft" if export.is_adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=[dataset for dataset in datasets if dataset and HUB_ID.fullmatch(dataset)] or None,
        tags=["asyncrl", "reinforcement-learning", *(["lora"] if config.trainer.lora else [])],
    )
    loader = "AutoPeftModelForCausalLM" if export.is_adapter else "AutoModelForCausalLM"
    oldest = max(steps.values("sample/staleness_max"), default=0.0)
    text = f"""# {export.base.shown}, {export.version} steps of reinforcement learning

{"Adapters" if export.is_adapter else "Weights"} of policy_version {export.version}, in {export.dtype},
trained with asyncrl {__version__}: loss {config.algorithm.loss}, advantage {config.algorithm.advantage},
{steps.total("tokens/trained"):,.0f} trained tokens. Staleness: at most {config.buffer.max_staleness} versions
allowed, {oldest:.0f} observed.

```python
from {data.library_name} import {loader}

model = {loader}.from_pretrained("{name}")
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


@contextlib.contextmanager
def _failures_named(export: Export) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (Refused, OSError, SafetensorError) as error:
        if not (export.is_final or (export.folder / MANIFEST).exists()):
            what = f"checkpoint {export.folder} was removed during the export"
            rule = f"the run keeps checkpoint.keep_last={export.config.checkpoint.keep_last} of them"
            raise CheckpointError(what, rule=rule, way_out="export again.") from error
        if isinstance(error, Refused):
            body = error.body
            raise CheckpointError(body.error, rule=body.rule, way_out=body.way_out) from error
        raise


def open_repo(name: str, *, is_public: bool) -> str:
    """Create the repository if missing. Raises HubError or ConfigError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo: str = api.create_repo(name, private=not is_public, exist_ok=True).repo_id
        is_private = api.repo_info(repo).private
    except Exception as error:
        raise _hub_error(name, error) from error
    if not is_public and not is_private:
        what = f"--push {name}: this repository is public"
        raise ConfigError(what, way_out="add --public, or choose another repository.")
    return repo


def push_folder(repo: str, folder: Path, version: int) -> str:
    """Upload and tag the folder. Raises HubError."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    tag = f"step-{version}"
    try:
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"policy_version {version}, exported by asyncrl",
            delete_patterns=REPLACED,
        )
        with contextlib.suppress(OSError):  # no such tag
            api.delete_tag(repo, tag=tag)
        api.create_tag(repo, tag=tag, revision=commit.oid)
    except Exception as error:
        raise _hub_error(repo, error, f" The export is complete: `hf upload {repo} {folder}`.") from error
    return f"{api.endpoint}/{repo}/tree/{tag}"


def _hub_error(repo: str, error: Exception, more: str = "") -> HubError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    code = "no answer" if status is None else f"status {status}"
    reason = (str(error).strip().splitlines() or [""])[0][:300]
    way_out = "check the network and HF_ENDPOINT, and that the token may write there (`hf auth login`)."
    return HubError(f"the hub refused {repo} ({code}): {reason}", way_out=way_out + more)
