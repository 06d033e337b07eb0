"""`asyncrl export`: write weights of a run to a new folder."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import __version__
from asyncrl.base.errors import (
    AsyncrlError,
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
)
from asyncrl.base.extensions import rows
from asyncrl.base.files import whole_folder
from asyncrl.base.http import Refused
from asyncrl.config import JobConfig, RunConfig
from asyncrl.config.engineless_config import EnginelessConfig
from asyncrl.config.load import job_forms, writer_of
from asyncrl.config.model_config import split_hub_id
from asyncrl.journal.checkpoint_folders import TRAINER, Checkpoints, read_checkpoint
from asyncrl.journal.read import FinishedGroup, finished_groups
from asyncrl.launch.model_sizes import find_architecture
from asyncrl.observe.run_dir import (
    ID_FILE,
    SUMMARY_FILE,
    journal_path,
    read_config,
    read_evaluations,
    read_metrics,
    read_object,
    read_settings,
    tell_unknown_kind,
)
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.verdict import write_reward_plot
from asyncrl.trainer.model.model_folder import ModelPin, find_model

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FINAL = "final"


def export_run(
    run_dir: Path,
    out: Path,
    *,
    step: str = "last",
    adapter: bool = False,
    role: str | None = None,
    push: str | None = None,
    private: bool = False,
    tell: Callable[[str], None] = print,
    is_inside: bool = False,
) -> dict[str, object]:
    """Export weights to `out`, upload them to the repository `push`, and return the facts
    of the export. `role`: whose policy, with trainer.roles. `is_inside`: `out` may be in the
    run directory. Raises ConfigError, CheckpointError or AsyncrlError.
    """
    job = read_settings(run_dir)
    config = job.as_run()
    tell_unknown_kind(run_dir, job, tell)
    out = out.expanduser().resolve()
    if adapter and not config.trainer.adapters:
        what = "--adapter: this run trains all weights (trainer.lora=none)"
        raise ConfigError(what, way_out="omit --adapter.")
    roles = config.trainer.roles or {}
    if role not in (roles or {None}):
        known = ", ".join(roles) or "none: all agents share one policy"
        given = "no --role is given" if role is None else f"--role {role}"
        raise ConfigError(
            f"{given}; the roles of the run are {known}",
            rule="a policy per role is exported by itself",
            way_out="give --role one of them, or omit it if there are none.",
        )
    if not is_inside:
        check_new_folder(out, run_dir)
    folder = Path(config.model.path or run_dir / "model").expanduser()
    base, _ = split_hub_id(str(config.model.path))
    if folder.is_dir():
        base = str(folder.resolve())
    version, folder = find_weights(
        run_dir, config, step, has_final=not (adapter or roles)
    )
    if push is not None:
        _make_repository(push, is_private=private)
    with whole_folder(out) as unfinished:
        tell(f"exporting {folder}")
        if folder.name == FINAL:
            shutil.copytree(folder, unfinished)
        else:
            _load(
                run_dir,
                config,
                folder / TRAINER,
                unfinished,
                base if adapter else None,
                tell,
                role or "",
            )
        _write_card(run_dir, job, version, base, unfinished, adapter=adapter)
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    kind = "adapter" if adapter else "model"
    name = f"{kind} of policy_version {version}"
    tell(f"{name}, {num_bytes / 1e6:,.1f} MB: {out}")
    if push is not None:
        tell(f"uploading to {push}")
        command = shlex.join(["hf", "upload", push, str(out)])
        with _reaching_hub(push, f"the export is whole: `{command}`.") as hub:
            hub.upload_folder(repo_id=push, folder_path=out, commit_message=name)
    return {
        "kind": kind,
        "policy_version": version,
        "num_bytes": num_bytes,
        "out": str(out),
    }


@contextlib.contextmanager
def _reaching_hub(repo: str, way_out: str) -> Iterator[HfApi]:
    """Yield the hub; its errors become an AsyncrlError."""
    from huggingface_hub import HfApi, errors

    try:
        yield HfApi()
    except (
        OSError,
        ValueError,
        RuntimeError,
        errors.HTTPError,  # type: ignore[attr-defined]
    ) as error:
        raise AsyncrlError(
            f"--push {repo}: {type(error).__name__}: {error!s:.500}", way_out=way_out
        ) from error


def _make_repository(repo: str, *, is_private: bool) -> None:
    """Make the repository if it does not exist, before an export that may take long."""
    way_out = (
        "log in with `hf auth login` or HF_TOKEN, or correct OWNER/NAME or the network."
    )
    with _reaching_hub(repo, way_out) as hub:
        hub.whoami()  # raises without a token, and names the ways to give one
        # Not False: an organisation may make repositories private by default.
        hub.create_repo(repo, private=is_private or None, exist_ok=True)
        is_public = not hub.model_info(repo).private
    if is_private and is_public:
        raise ConfigError(
            f"--private: {repo} exists and is public",
            rule="an export does not change who can read a repository",
            way_out="choose another name, or make it private on the hub.",
        )


def check_new_folder(out: Path, run_dir: Path) -> None:
    """Raise ConfigError unless `out` is new or empty, and outside the run."""
    if run_dir.resolve() in out.parents or (out.exists() and any(out.iterdir())):
        raise ConfigError(
            f"{out} is not empty, or is in {run_dir}",
            rule="an export changes no other file",
            way_out="choose another folder, or remove this one.",
        )


def read_finished(
    run_dir: Path, tell: Callable[[str], None]
) -> Iterator[FinishedGroup]:
    """Yield the finished groups that have their tokens, then report how many have not.
    Raises ConfigError, JournalError.
    """
    path = journal_path(run_dir)
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} has no journal", way_out="name the directory of a run."
        )
    num_deleted = 0
    for group in finished_groups(path):
        if group.messages is None:  # by journal.keep=checkpoint
            num_deleted += 1
        else:
            yield group
    if num_deleted:
        tell(
            f"the tokens of {num_deleted} trained groups are deleted; journal.keep=all keeps them"
        )


def find_trained_model(run_dir: Path, config: RunConfig) -> tuple[Path, ModelPin]:
    """Return the folder of the model that the run began with, and its pin."""
    model = config.model
    pin = ModelPin(run_dir, model.path)
    if model.path is None:
        return run_dir / "model", pin
    return find_model(model.path, commit=pin.revision), pin


def find_weights(
    run_dir: Path, config: RunConfig, step: str, *, has_final: bool = True
) -> tuple[int, Path]:
    """Return the version and folder of the weights that `step` names; checksums are
    verified.
    """
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    folders = {
        version: checkpoints.root / f"step_{version}"
        for version in checkpoints.versions()
    }
    summary = read_object(run_dir / SUMMARY_FILE, [])
    # Only the summary of a run that is done gives the number: after a failure, final/ may be from
    # before a resume.
    # Version 0.1.0 wrote only the state.
    is_done = summary.get("state") == "done"
    trained = config.trainer.num_steps if is_done else None
    final_version = summary.get("policy_version", trained)
    if has_final and final_version is not None and (run_dir / FINAL).is_dir():
        folders[final_version] = run_dir / FINAL
    rewards = {
        int(line["policy_version"]): line["eval/reward_mean"]
        for line in read_evaluations(run_dir, [])
        if "eval/reward_mean" in line
        and line.get("name", "") == (config.best_eval or "")
    }
    evaluated = folders.keys() & rewards.keys()
    wanted = {
        "last": max(folders, default=None),
        "best": max(
            evaluated, key=lambda version: (rewards[version], version), default=None
        ),
    } | {str(version): version for version in folders}
    available = f"steps {', '.join(map(str, sorted(folders)))}" if folders else "none"
    version = wanted.get(step)
    if version is None:
        raise ConfigError(
            f"{run_dir} has no weights for --step {step}; available: {available}",
            rule="checkpoints are made every checkpoint.every steps and at a stop, final/ at the end; best "
            "has the highest eval/reward_mean in eval.jsonl",
            way_out="use --step N with an available step, or --step last.",
        )
    if folders[version].name != FINAL:
        try:
            read_checkpoint(folders[version], version)
        except CheckpointDamaged as error:
            error.way_out = f"export another step ({available}), or restore the folder."
            raise
    return version, folders[version]


def _load(
    run_dir: Path,
    config: RunConfig,
    state: Path,
    out: Path,
    adapter_of: str | None,
    tell: Callable[[str], None],
    role: str,
) -> None:
    """Write a model, or the adapters of the base model of this name."""
    from asyncrl.trainer.ranks.state import save_model, save_peft

    model = config.model
    template = model.chat_template
    try:
        folder, pin = find_trained_model(run_dir, config)
        # Refuses other files under the same name: the checkpoint's weights, and
        # adapters even more, belong to the base model that was trained.
        pin.read(folder)
        if adapter_of is None:
            save_model(
                state,
                folder,
                out,
                tell,
                dtype=model.dtype,
                chat_template=template,
                role=role,
            )
        else:
            save_peft(
                state,
                folder,
                out,
                {"base_model_name_or_path": adapter_of, "revision": pin.revision},
                dtype=model.dtype,
                chat_template=template,
                role=role,
            )
    except ConfigError as error:
        error.way_out = "restore the files of the base model; an export uses the model that was trained."
        raise
    except Refused as error:
        raise CheckpointError(
            error.body.error, rule=error.body.rule, way_out=error.body.way_out
        ) from error


def _write_card(
    run_dir: Path,
    job: JobConfig,
    version: int,
    base: str,
    folder: Path,
    *,
    adapter: bool,
) -> None:
    """Write README.md, without local paths, and the reward curve."""
    from huggingface_hub import ModelCard, ModelCardData

    config = job.as_run()
    is_on_hub = HUB_ID.fullmatch(base) is not None
    settings = job.model_dump()
    (sources,) = (settings[key] for key in job_forms() if key in settings)
    sources = sources if isinstance(sources, list) else [sources]
    names = [one["dataset"] for one in sources]
    model = config.model
    commit = ModelPin(run_dir, model.path).revision
    if is_on_hub and commit is not None:
        model = model.model_copy(update={"path": f"{base}@{commit}"})
    here = find_architecture(model)
    licence = _licence_of(here.parent, folder)
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["asyncrl", job.tag],
        datasets=[name for name in names if name and HUB_ID.fullmatch(name)] or None,
        license=licence,
    )
    name = _model_name(base if config.model.path else None)
    trainer = config.trainer
    rows = {
        "base model": name,
        "data": _shown(sources),
        "reward": _shown(
            [one["reward"] or "of the task" for one in sources if "reward" in one]
        ),
        "learning rate": f"{trainer.learning_rate:g}, {trainer.schedule}",
        "licence": f"{licence}: see the base model",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
    steps = Steps(line for line in read_metrics(run_dir, []) if line["step"] <= version)
    oldest = max(steps.values("sample/staleness_max"), default=0.0)
    writer = writer_of(run_dir / "config.yaml") or __version__
    text = f"""# {name}, {version} steps of {job.about}

{"Adapters" if adapter else "Weights"} of policy_version {version}, in {config.model.dtype}, trained with
asyncrl {writer}: {steps.total("tokens/trained"):,.0f} trained tokens"""
    if isinstance(config, EnginelessConfig):
        text += ".\n"
    else:
        text += f""", loss {config.algorithm.loss},
advantage {config.algorithm.advantage}. Staleness: at most {config.buffer.max_staleness} versions
allowed, {oldest:.0f} observed.
"""
    text += f"\n| | |\n| --- | --- |\n{table}"
    for line in read_evaluations(run_dir, []):
        if line["policy_version"] == version and "eval/reward_mean" in line:
            text += f"\nEvaluation: {line['eval/reward_mean']:.3f}.\n"
    if steps.values("reward/mean"):
        write_reward_plot(
            folder / "reward.png", steps, title=f"reward up to policy_version {version}"
        )
        text += "\n![Mean reward of the batches](reward.png)\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


SHOWN = ("python", "files", "dataset", "reasoning_gym", "model", "path")
"""Keys of data and rewards that a card names."""


def _shown(value: object) -> str:
    """Return names of data or of a reward, without paths, prompts and addresses.

    >>> _shown({"files": ["/home/me/rows.jsonl"], "split": "train"})
    'rows.jsonl'
    >>> _shown({"model": {"path": "Qwen/Qwen3-8B", "reads": "chat"}})
    'Qwen/Qwen3-8B'
    """
    if isinstance(value, Mapping):
        names = dict.fromkeys([*SHOWN, *rows("rewards")])
        value = [value[name] for name in names if value.get(name)]
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    name = str(value)
    return name if HUB_ID.fullmatch(name) else Path(name).name


def _model_name(path: str | None) -> str:
    """Return the name of a model, without its path: of a model that a run trained, also
    the name of the run.
    """
    if path is None:
        return "random weights"
    folder = Path(path)
    if folder.name == FINAL and (folder.parent / ID_FILE).is_file():
        base = read_config(folder.parent).model.path
        return f"{_model_name(base)} after {folder.parent.name}"
    return folder.name if folder.is_dir() else _shown(path)


def _licence_of(base: Path, folder: Path) -> str:
    """Return the licence that the base folder names, which may be a snapshot in the
    hub's cache, and copy its file to `folder`.
    """
    files = sorted(base.glob("LICENSE*"))
    for file in files:
        shutil.copyfile(file, folder / file.name)
    card = base / "README.md"
    if card.is_file():
        from huggingface_hub import ModelCard

        if (named := ModelCard.load(card).data.license) is not None:
            return str(named)
    return "other" if files else "unknown"
