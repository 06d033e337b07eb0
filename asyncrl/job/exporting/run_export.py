"""`asyncrl export`: write weights of a run to a separate folder, without changing the run directory.

The export is built next to OUT. It replaces only an older export: a folder with exactly the files in its
asyncrl.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl import __version__
from asyncrl.base.errors import CheckpointDamaged, CheckpointError, ConfigError
from asyncrl.base.files import whole_folder
from asyncrl.base.serving import Refused
from asyncrl.config import RunConfig
from asyncrl.job.exporting.hub_push import HubRepo
from asyncrl.job.exporting.model_card import WeightsOut, origin_of, write_card
from asyncrl.journal.checkpoints import MANIFEST, TRAINER, Checkpoints, read_whole
from asyncrl.observe.run_dir import read_config, read_evaluations
from asyncrl.trainer.model_folder import TOKENIZER, ModelPin, find_model

Tell = Callable[[str], None]
MARK = "asyncrl.json"
"""Record of an export's policy_version and files."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Checkpoint, or the Hugging Face folders final/ and adapter/ (`is_final`)."""

    version: int
    folder: Path
    is_final: bool


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
    tell: Tell = print,
) -> None:
    """Export weights to `out`, and with `push` to that hub repository.

    Raises ConfigError for a request that does not fit the run, CheckpointError for a damaged or removed
    checkpoint, HubError.
    """
    config = read_config(run_dir)
    _refuse_wrong(config, adapter=adapter, dtype=dtype, push=push, public=public)
    out = _free(run_dir, out, overwrite=overwrite)
    origin = origin_of(config, ModelPin(run_dir, config.model.source).revision, run_dir, base)
    if push is not None and adapter and not origin.is_hub_id:
        what = f"--push {push}: these adapters sit on a folder of this machine, {origin.name}"
        raise ConfigError(what, rule="others must find the base model", way_out="add --base with its hub id.")
    repo = None if push is None else HubRepo.opened(push, is_public=public)
    trained_in = config.model.dtype
    source = find_source(run_dir, config, step, is_as_trained=dtype in (None, trained_in), tell=tell)
    weights = WeightsOut(run_dir, config, source.version, dtype or trained_in, origin, is_adapter=adapter)
    with _told(source, out), whole_folder(out) as unfinished:
        (_copy if source.is_final else _load)(source, weights, unfinished, tell)
        write_card(weights, unfinished, repo=push)
        files = sorted([*(path.name for path in unfinished.iterdir()), MARK])
        mark = {"policy_version": source.version, "asyncrl": __version__, "files": files}
        (unfinished / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
        _as_umask(unfinished)
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    kind = "adapter" if adapter else "model"
    tell(f"{kind} of policy_version {source.version}, {num_bytes / 1e6:,.1f} MB: {out}")
    if repo is not None:
        tell(f"pushing to {repo.name}")
        tell(f"pushed: {repo.push(out, source.version)}")


def find_source(
    run_dir: Path, config: RunConfig, step: str, *, is_as_trained: bool = True, tell: Tell = print
) -> WeightsSource:
    """Return the weights that `step` names, with a checkpoint verified. final/ exists only in the dtype of
    the run. Raises ConfigError with the available steps, or CheckpointError.
    """
    versions = Checkpoints(run_dir, config.checkpoint).versions()
    final = _final_version(run_dir) if is_as_trained else None
    wanted = versions if final is None else sorted({*versions, final})
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
            return WeightsSource(version, run_dir / "final", is_final=True)
        folder = run_dir / "checkpoints" / f"step_{version}"
        with _removed(folder, config):
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*"))
            tell(f"comparing {folder.name} with its checksums, {num_bytes / 1e9:.2f} GB")
            try:
                read_whole(folder, version)
                return WeightsSource(version, folder, is_final=False)
            except CheckpointDamaged as error:
                if step != "last" or not (folder / MANIFEST).exists():
                    way_out = f"export another one, or copy the folder back; {_there(versions, final)}."
                    raise CheckpointDamaged(error.what, rule=error.rule, way_out=way_out) from error
                tell(f"WARNING: passed over: {error.what}")
    rule = f"checkpoints are made each checkpoint.every steps and at a stop, final/, in {config.model.dtype} "
    rule += "alone, at the end of a run; best is, of those that are there, by eval/reward_mean in eval.jsonl"
    what = f"{run_dir} has no weights of --step {step}: {_there(versions, final)}"
    raise ConfigError(what, rule=rule, way_out="give --step N of one that is there, or last.")


def _there(versions: list[int], final: int | None) -> str:
    found = f"checkpoints of steps {', '.join(map(str, versions))}" if versions else "no whole checkpoint"
    return found if final is None else f"{found}, and final/ of step {final}"


def _final_version(run_dir: Path) -> int | None:
    """Return None if final/ is missing or older than a resumed run."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        version = summary.get("num_steps")
        if summary.get("state") == "done" and isinstance(version, int) and (run_dir / "final").is_dir():
            return version
    return None


def _load(source: WeightsSource, weights: WeightsOut, path: Path, tell: Tell) -> None:
    from asyncrl.trainer.saved_model import save_model, save_peft
    from asyncrl.trainer.state import read_state

    model, state = weights.config.model, source.folder / TRAINER
    with _removed(source.folder, weights.config):
        pin, there = ModelPin(weights.run_dir, model.source), Path(read_state(state).model_path)
        if model.path is None:
            base = weights.run_dir / "model"
        else:
            base = there if there.is_dir() else find_model(model.path, model.revision, commit=pin.revision)
        try:
            pin.read(base)
        except ConfigError as error:
            way_out = "put its files back as they were; an export is of the model that was trained."
            raise ConfigError(error.what, rule=error.rule, way_out=way_out) from error
        dtype, template, origin = weights.dtype, model.chat_template, weights.origin
        if weights.is_adapter:
            named = (origin.name, origin.commit)
            save_peft(state, base, path, *named, dtype=dtype, chat_template=template)
        else:
            save_model(state, base, path, tell, dtype=dtype, chat_template=template)


def _copy(source: WeightsSource, weights: WeightsOut, path: Path, tell: Tell) -> None:
    """Copy final/, or adapter/ with the tokenizer of final/ and the name of its base."""
    kept = source.folder.with_name("adapter") if weights.is_adapter else source.folder
    tell(f"copying {kept}")
    shutil.copytree(kept, path)
    if weights.is_adapter:
        for file in [file for pattern in TOKENIZER for file in source.folder.glob(pattern)]:
            shutil.copyfile(file, path / file.name)
        config = path / "adapter_config.json"
        described = json.loads(config.read_text(encoding="utf-8"))
        described |= {"base_model_name_or_path": weights.origin.name, "revision": weights.origin.commit}
        config.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _removed(folder: Path, config: RunConfig) -> Iterator[None]:
    """Report a checkpoint that the run removed during the read."""
    try:
        yield
    except (CheckpointError, Refused, OSError) as error:
        if (folder / MANIFEST).exists():
            raise
        raise CheckpointError(
            f"checkpoint {folder} was removed while it was read",
            rule=f"a run that goes on keeps checkpoint.keep_last={config.checkpoint.keep_last} of them, "
            "and those of checkpoint.keep_every and keep_best",
            way_out="export again: --step last takes the newest.",
        ) from error


@contextlib.contextmanager
def _told(source: WeightsSource, out: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except Refused as error:
        raise CheckpointError(error.body.error, rule=error.body.rule, way_out=error.body.way_out) from error
    except (OSError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, shutil.Error):  # a list of (from, to, why)
            why = str(error.args[0][0][-1])
        what = f"cannot export {source.folder} to {out}: {why[:500]}"
        way_out = "free space on the disk of OUT, or name another folder; the run is as it was."
        raise ConfigError(what, way_out=way_out) from error


def _free(run_dir: Path, out: Path, *, overwrite: bool) -> Path:
    """Return the resolved path. Raises ConfigError if it would replace anything except an export."""
    out, inside = out.expanduser().resolve(), run_dir.resolve()
    if out == inside or inside in out.parents:
        rule = "an export changes nothing in a run directory"
        raise ConfigError(f"{out} lies in {run_dir}", rule=rule, way_out="name a folder elsewhere.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    rule = "--overwrite replaces an export of ours that is as it was written, and nothing else"
    try:
        named = set(json.loads((out / MARK).read_text(encoding="utf-8"))["files"])
        others = sorted({path.name for path in out.iterdir()} - named)
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{out} is there already, and is no export (it has no {MARK} of ours)"
        raise ConfigError(what, rule=rule, way_out="name another folder.") from None
    if others:
        what = f"{out} has files that no export wrote: {', '.join(others[:5])}"
        raise ConfigError(what, rule=rule, way_out="move them away, or name another folder.")
    if not overwrite:
        raise ConfigError(f"{out} is an export already", rule=rule, way_out="add --overwrite.")
    return out


def _refuse_wrong(
    config: RunConfig, *, adapter: bool, dtype: str | None, push: str | None, public: bool
) -> None:
    if adapter and config.trainer.lora is None:
        what = "--adapter was given, and this run trains all weights (trainer.lora=none)"
        raise ConfigError(what, way_out="leave it out.")
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is not known", rule=f"it is one of {', '.join(DTYPES)}")
    if public and push is None:
        raise ConfigError("--public is of a repository", way_out="add --push OWNER/NAME, or leave it out.")


def _as_umask(folder: Path) -> None:
    """Set permissions by the umask; copied files keep their source's."""
    mask = os.umask(0o022)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)
