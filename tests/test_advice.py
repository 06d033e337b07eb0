"""What pages, messages and help tell people to type can be typed: each command is parsed by the program it
names, and cheap ones run.

Nothing is skipped: what is neither known to work nor known to be prose is a failure, with its file and line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from advice import PACKAGES, ROOT, Command, commands, filled, settings, strings
from packaging.requirements import Requirement
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.main import get_command
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.errors import AsyncrlError
from asyncrl.placement.choices import settle_dtype
from asyncrl.run.check import look

PROSE = frozenset(
    "again and at cannot in into is knows logs needs raises reads runs sets that they was wrote".split()
)
"""Words after `asyncrl` in a sentence that is no command."""
STANDS_FOR = {
    "CONFIG": "configs/quickstart.yaml",
    "N": "1",
    "URL": "http://127.0.0.1:8700",
    "config.yaml": "configs/quickstart.yaml",
}
"""Words that people replace by something of their own."""
EXTERNAL = ("cat", "curl", "export", "ln", "mkdir", "printf", "source", "vllm")
"""Programs of others, which a page may tell people to call."""
RUN_DIRS = ("RUN_DIR", "RUN", "DIR", "runs/...")


def test_the_scanner_finds_commands_wherever_they_stand() -> None:
    found = {command.text for command in commands()}
    assert len(found) > 60
    for expected in (
        "make quickstart",
        ".venv/bin/asyncrl keys buffer",
        "cd examples/verifiers_env && asyncrl run calculator.yaml",
        "python benchmarks/trainer.py",
        "pip install -e '.[verifiers]'",
        "python examples/smollm2.py",
        "asyncrl check CONFIG",
    ):
        assert expected in found, expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("asyncrl export RUN_DIR", "neither a command nor known as prose"),
        ("asyncrl run configs/quickstart.yaml --resume", "requires an argument"),
        ("asyncrl run configs/nothing.yaml", "cannot read the config"),
        ("asyncrl run configs/quickstart.yaml trainer.lr=1", "trainer.lr"),
        ("asyncrl run configs/quickstart.yaml algorithm.loss=nothing", "algorithm.loss=nothing is not known"),
        ("asyncrl keys bufer", "there is no section"),
        ("python examples/smollm2.py --nothing", "unrecognized arguments"),
        ("python examples/nothing.py", "there is no such file"),
        ("pip install 'asyncrl[vllm]'", "on no package index"),
        ("pip install -e '.[nothing]'", "no extra"),
        ("make nothing", "make"),
        ("frobnicate", "not known"),
    ],
)
def test_a_command_that_does_not_work_is_found(text: str, fault: str, run_dir: Path) -> None:
    assert fault in (fault_of(Command("here:1", text, is_whole=True), run_dir) or "")


def test_every_command_that_people_are_told_works(run_dir: Path) -> None:
    seen: dict[tuple[str, bool], str | None] = {}
    faults = []
    for command in commands():
        key = (command.text, command.is_whole)
        if key not in seen:
            seen[key] = fault_of(command, run_dir)
        if seen[key]:
            faults.append(f"{command.where}: `{command.text}`: {seen[key]}")
    assert not faults, "\n" + "\n".join(faults)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that took one step."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(run_config_yaml(load_config(ROOT / "configs/quickstart.yaml")))
    (folder / "status.json").write_text(json.dumps({"state": "done"}))
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "time_s": 1.0, "perf/step_s": 1.0, "reward/mean": 0.5}) + "\n"
    )
    line = {"version": 0, "min_version": 0, "loss": 0.0, "num_loss_tokens": 0, "trajectories": []}
    (folder / "trained.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def fault_of(command: Command, run_dir: Path) -> str | None:
    """Why it cannot be typed; None if it can."""
    if not command.is_whole and (match := re.match(r"asyncrl (\w+)", command.text)) and match[1] in PROSE:
        return None
    try:
        text, folder = command.text if command.is_whole else filled(command.text), ROOT
        text = re.sub(r"(?<= )\[[^\]]*\]", "", text)  # what may be left out
        if match := re.match(r"cd (\S+) && (.*)", text):
            text, folder = match[2], ROOT / match[1]
        if match := re.fullmatch(
            r"[a-z_]+=\$\((.*)\)", text
        ):  # a variable of the shell that is set to what it prints
            text = match[1]
        words = shlex.split(text, comments=True)
    except ValueError as error:
        return str(error)
    while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
        words = words[1:]
    if words and words[-1] == "...":
        words = words[:-1]
    if not words:
        return "nothing is left of it"
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    match program:
        case "asyncrl":
            return _fault_of_asyncrl(arguments, folder, run_dir, is_whole=command.is_whole)
        case "python":
            return _fault_of_python(arguments, folder, re.findall(r" \[(--[\w-]+)", command.text))
        case "pip":
            return _fault_of_pip(arguments)
        case "make":
            return _fault_of_make(arguments)
        case "bash":
            return None if (folder / arguments[0]).is_file() else "there is no such file"
        case _ if program in EXTERNAL:
            return None
    return f"the program {program} is not known: is it in EXTERNAL?"


# ---- settings

NO_SETTINGS = {
    "agent.harness": "of verifiers",
    "config.eval": "Python, in an assertion",
    "datasets.load_dataset": "Python",
    "e.g": "Latin",
    "fs.file": "fs.file-max, of the kernel",
    "kernel.yama.ptrace_scope": "of the kernel",
    "net.ipv4.ip_local_port_range": "of the kernel",
    "node.device": "of ComfyUI",
    "prompt.info": "Python, what a task is given",
    "rollout.oversample": "of other frameworks: a page says that there is none",
    "session.api_key": "Python, what an agent is given",
    "session.base_url": "Python, what an agent is given",
    "session.client": "Python, what an agent is given",
    "settings.clip_low": "Python, what a loss is given",
    "task.answer": "Python, what an agent is given",
    "task.seed": "Python, what an agent is given",
}
"""Dotted names in prose that are something else, and what."""


def test_every_setting_that_is_named_exists_and_takes_the_value_that_is_named_with_it() -> None:
    named = settings()
    assert len(named) > 300
    faults = [
        f"{setting.where}: {fault}"
        for setting in named
        if (fault := fault_of_setting(setting.name, setting.value))
    ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("run.dir", None, "no setting"),
        ("trainer.lr", None, "no setting"),
        ("trainer.lora.targets.x", None, "no setting"),
        ("buffer.on_overdue", "keep", "does not take"),
        ("rollout.vllm.seed", None, None),
        ("buffer.max_staleness", "0", None),
        ("trainer.lora.rank", "8", None),
        ("rollout.vllm_python", "auto", None),
    ],
)
def test_a_setting_that_does_not_exist_is_found(name: str, value: str | None, fault: str | None) -> None:
    found = fault_of_setting(name, value)
    assert (fault in found if found else False) if fault else found is None


def fault_of_setting(name: str, value: str | None) -> str | None:
    """Why it is none; None if it is one, or is known to be something else."""
    if name in NO_SETTINGS:
        return None
    module, _, attribute = name.rpartition(".")
    if name.split(".")[0] in ("asyncrl", "asyncrl_servers", "importlib", "torch"):
        is_there = importlib.util.find_spec(module) and (
            importlib.util.find_spec(name) or hasattr(importlib.import_module(module), attribute)
        )
        return None if is_there else f"there is no {name} in Python"
    field = _field(name)
    if field is None:
        return f"{name} is no setting (`asyncrl keys`); if it is something else, say so in NO_SETTINGS"
    if value is not None and isinstance(field, FieldInfo) and not re.fullmatch(r"[A-Z_]+|.*\.\.\..*", value):
        takes = TypeAdapter(
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        )
        fault = ""
        for read in (None, value) if value == "none" else (yaml.safe_load(value),):
            try:
                takes.validate_python(read)
            except ValidationError as error:
                fault = f"{name} does not take {value}: {error.errors()[0]['msg']}"
            else:
                return None
        return fault
    return None


def _field(name: str) -> FieldInfo | str | None:
    """The setting of this name, 'free' below a mapping, which takes any key, None if there is none."""
    model: Any = RunConfig
    field: FieldInfo | None = None
    for part in name.split("."):
        if model is dict:
            return "free"
        if model is None or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        kinds = (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if model is None and any(dict in (kind, get_origin(kind)) for kind in kinds):
            model = dict
    return field


# ---- asyncrl


def _fault_of_asyncrl(arguments: Sequence[str], folder: Path, run_dir: Path, *, is_whole: bool) -> str | None:
    names = [*get_command(app).commands]  # type: ignore[attr-defined]
    if arguments and re.fullmatch("[a-z]+", arguments[0]) and arguments[0] not in names:
        return f"`{arguments[0]}` is neither a command nor known as prose (PROSE)"
    given = [_real(word, run_dir) for word in arguments]
    try:
        name, found = _parse(given)
    except Exception as error:  # of typer's own copy of click, which has no public name
        message = str(error.format_message() if hasattr(error, "format_message") else error)
        is_short = type(error).__name__ == "NoArgsIsHelpError" or re.search(
            r"Missing argument|requires an argument", message
        )
        is_mention = not is_whole and is_short and _options_exist(given)
        return None if is_mention else f"{type(error).__name__}: {message}"
    try:
        if "config" in found:
            config = load_config(folder / found["config"], found.get("overrides") or [])
            if name in ("run", "check") and is_whole:
                _look(folder, run_config_yaml(config))
    except AsyncrlError as error:
        return str(error)
    is_quick = name in ("keys", "status", "inspect") and found.get("group") is None
    if is_quick or (name == "check" and given[1:] == ["configs/quickstart.yaml"]):
        done = CliRunner().invoke(app, given)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            return f"it raised {type(done.exception).__name__}: {done.exception}"
        return None if done.exit_code == 0 else f"it ended with {done.exit_code}: {done.output[-300:]}"
    return None


@cache
def _look(folder: Path, text: str) -> None:
    """Load all that a told run names, where its model is here. Raises ConfigError; each config is looked at
    once.
    """
    config = RunConfig.model_validate(yaml.safe_load(text))
    if config.model.scratch is None and not (folder / (config.model.path or "")).is_dir():
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        look(settle_dtype(config)[0])


def _real(word: str, run_dir: Path) -> str:
    if word in RUN_DIRS:
        return str(run_dir)
    if word.endswith("/config.yaml"):
        return str(run_dir / "config.yaml")
    return STANDS_FOR.get(word, word)


def _parse(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Name of the command and its parameters, by the program's own parser; nothing is done."""
    found: list[tuple[str, dict[str, Any]]] = []

    def hold(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                hold(command, f"{name} ")
            else:
                command.callback = lambda name=prefix + name, **parameters: found.append((name, parameters))

    group = get_command(app)
    hold(group, "")
    group.main([*arguments], prog_name="asyncrl", standalone_mode=False)
    return found[0] if found else ("", {})  # --version, --help


def _options_exist(arguments: Sequence[str]) -> bool:
    command: Any = get_command(app)
    for word in arguments:
        if hasattr(command, "commands") and word in command.commands:
            command = command.commands[word]
    known = {option for parameter in command.params for option in parameter.opts}
    return all(word in known for word in arguments if word.startswith("--"))


VLLM_OPTIONS = frozenset(
    "--dtype --enable-lora --logprobs-mode --max-lora-rank --max-model-len --max-num-seqs "
    "--worker-extension-cls".split()
)
"""What messages tell people to start a vLLM with."""


def test_every_option_that_a_message_names_exists_and_is_not_left_without_its_value() -> None:
    faults = []
    for text in strings(*PACKAGES):
        for match in re.finditer(
            r"(?<![\w-])--[a-z][\w-]*", text.text if text.is_message and " " in text.text else ""
        ):
            if match[0] not in option_names() | VLLM_OPTIONS:
                faults.append(f"{text.where(match.start())}: there is no option {match[0]}")
            elif text.text[: match.start()].endswith("with ") and not re.match(
                r" [\w'{]", text.text[match.end() :]
            ):
                faults.append(
                    f"{text.where(match.start())}: `with {match[0]}` is not what can be typed: it takes a "
                    f"value"
                )
    assert not faults, "\n" + "\n".join(faults)


@cache
def option_names() -> set[str]:
    """Of all our commands."""

    def of(command: Any) -> set[str]:
        own = {option for parameter in command.params for option in parameter.opts}
        return own.union(*(of(sub) for sub in getattr(command, "commands", {}).values()))

    return {*of(get_command(app)), "--help"}


# ---- python, pip, make


class _Parsed(BaseException):
    """The script's arguments are as its parser wants them."""


def _fault_of_python(arguments: Sequence[str], folder: Path, options: Sequence[str]) -> str | None:
    """`options`: those that may be given, too."""
    if arguments[0] == "-c":
        return None if compile(arguments[1], "-c", "exec") else "-"
    if arguments[0] == "-m":
        module = "".join(arguments[1:2])
        is_known = (
            not module
            or module == "MODULE"
            or module.startswith("my_")
            or importlib.util.find_spec(module) is not None
        )
        return None if is_known else f"there is no module {module}"
    path = folder / arguments[0]
    if not path.is_file():
        return "there is no such file"
    helper = path.parent / "report.py"
    source = path.read_text() + (
        helper.read_text() if helper.is_file() and "from report import" in path.read_text() else ""
    )
    if missing := [option for option in options if f'"{option}"' not in source]:
        return f"it has no option {', '.join(missing)}"
    if "ArgumentParser" not in source:
        return "it takes no arguments" if arguments[1:] and "sys.argv" not in source else None
    needs_one = "required=True" in source or any(
        "nargs" not in rest for rest in re.findall(r'add_argument\(\s*"\w([^)]*)', source)
    )
    return _fault_of_arguments(path, tuple(arguments[1:])) if arguments[1:] or needs_one else None


@cache
def _fault_of_arguments(path: Path, arguments: tuple[str, ...]) -> str | None:
    """By the script's own parser, up to the line where it has parsed."""
    said: list[str] = []
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *_: object) -> None:
        parse(self, list(arguments))
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(
            argparse.ArgumentParser, "error", lambda _, message: said.append(message) or sys.exit(2)
        )
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(os, "environ", os.environ.copy())
        patch.syspath_prepend(str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Parsed:
            return None
        except SystemExit as error:
            return "; ".join(said) or str(error)
    return "it ran to its end without reading its arguments"


def _fault_of_pip(arguments: Sequence[str]) -> str | None:
    if arguments[0] != "install":
        return f"pip {arguments[0]} is not known here"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {
        Requirement(text).name
        for text in (*project["dependencies"], *(entry for extra in extras.values() for entry in extra))
    }
    is_checkout = False
    for word in arguments[1:]:
        if word in ("-e", "--editable"):
            is_checkout = True
        elif word.startswith("-") or word == "WHEEL":
            continue
        elif word.partition("[")[0] == ".":
            if not is_checkout:
                return "the checkout is installed with -e"
            wanted = re.findall(r"[\w-]+", word.partition("[")[2])
            if missing := [name for name in wanted if name not in extras]:
                return f"pyproject.toml has no extra {', '.join(missing)}"
        elif word.partition("[")[0] == "asyncrl":
            return "asyncrl is on no package index"
        elif Requirement(word).name not in known:
            return f"{word} is not among the dependencies of pyproject.toml"
    return None


@cache
def _make(target: str) -> str | None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else f"make: {done.stderr.strip()}"


def _fault_of_make(arguments: Sequence[str]) -> str | None:
    return next(filter(None, (_make(target) for target in arguments if "=" not in target)), None)
