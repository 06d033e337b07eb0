"""What pages, messages and help tell people to type can be typed.

Commands are read from shell blocks and backticks of the pages, from comments of the configs, and from the
string literals of the product; settings from the same places. Each command is parsed by the program that it
names and its config is loaded; what is neither known to work nor known to be prose fails with its place.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.main import get_command

from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config
from asyncrl.config.load import section_of
from asyncrl.errors import AsyncrlError, install_extra

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")

PROSE = frozenset(
    "again and at cannot in into is knows logs needs raises reads runs sets that they was wrote".split()
)
"""Words after `asyncrl` in a sentence that is no command."""
QUICKSTART = "configs/quickstart.yaml"
STANDS_FOR = {"CONFIG": QUICKSTART, "config.yaml": QUICKSTART, "N": "1", "URL": "http://127.0.0.1:8700"}
STANDS_FOR |= dict.fromkeys(("my_task.yaml", "my_agent.yaml"), QUICKSTART)  # test_tutorial.py runs those
"""Words that people replace by something of their own."""
EXTERNAL = ("cat", "curl", "docker", "export", "ln", "mkdir", "pip", "printf", "source", "uv", "vllm")
NO_SETTINGS = frozenset(
    """agent.harness asyncio.to_thread beta.messages.tool_runner chat.completion config.eval
    datasets.load_dataset e.g error.message fs.file functions.f kernel.yama.ptrace_scope ld.so.cache
    ld.so.conf ld.so.conf.d
    message.output_text.logprobs net.ipv4.ip_local_port_range node.device output_config.effort
    output_config.format prompt.info
    reasoning.effort reasoning.encrypted_content responses.parse rollout.oversample session.api_key
    session.base_url session.client settings.clip_low sys.argv task.answer task.seed text.format
    text.verbosity tokenizer.model tool_choice.name""".split()
)
"""Dotted names in prose that are of the kernel, of Python or of other frameworks."""
START = r"(?:[A-Z][A-Z0-9_]*=\S* +)*(?:cd \S+ && )?(?:\.venv/bin/)?(?:asyncrl|python|bash|make) "
FILE = re.compile(
    r"\.(config|csv|git|gguf|html|id|jinja|json|jsonl|lock|log|md|new|parquet|part|pid|png|py|safetensors|sh|so"
    r"|sqlite|tmp|toml|txt|yaml)$"
)


@dataclass(frozen=True)
class Text:
    """A piece of prose or of a shell block; `is_message`: a program says it."""

    path: Path
    line: int
    text: str
    is_shell: bool = False
    is_message: bool = False

    def where(self, position: int = 0) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line + self.text[:position].count(chr(10))}"


def files(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


@cache
def texts() -> tuple[Text, ...]:
    found = [text for path in files(*PAGES) for text in _of_page(path)]
    for path in files("configs/*.yaml", "examples/**/*.yaml"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := re.match(rf"#\s{{3,}}({START}.*)", line):
                command = re.sub(r"\s{3,}\S.*$", "", match[1])  # what it does stands beside it
                found.append(Text(path, number, command, is_shell=True))
    return (
        *found,
        *(text for path in files("asyncrl/**/*.py", "servers/**/*.py") for text in _of_module(path)),
    )


def _of_page(path: Path) -> Iterator[Text]:
    """Fenced blocks by themselves, and the prose between them."""
    parts = re.split(r"^\s*```(\w*)\n(.*?)^\s*```$", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    line = 1
    for index in range(0, len(parts), 3):
        yield Text(path, line, parts[index])
        line += parts[index].count("\n")
        if index + 2 < len(parts):
            is_shell = parts[index + 1] in ("sh", "bash", "console")
            yield Text(path, line + 1, parts[index + 2], is_shell=is_shell)
            line += parts[index + 2].count("\n") + 2


def _of_module(path: Path) -> Iterator[Text]:
    """String literals, each {expression} of an f-string as \\0; docstrings are no messages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield Text(path, node.lineno, node.value, is_message=id(node) not in docs)
        elif isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
            yield Text(path, node.lineno, "".join(parts), is_message=True)


def commands() -> list[tuple[str, str, bool]]:
    """(place, command, it can be typed as it stands) of all commands."""
    found = []
    for text in texts():
        if text.is_shell:
            lines = re.sub(r"\\\n\s*", " ", text.text).splitlines()
            typed = [re.sub(r"\s+#.*$", "", line.removeprefix("$ ")) for line in lines]
            found += [(text.where(), command.strip(), True) for command in typed]
            continue
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text.text):
            found.append((text.where(match.start()), re.sub(r"\s+", " ", match[1]).strip(), False))
    return [each for each in found if re.match(START, f"{each[1]} ") and "\0" not in each[1]]


def fault_of(command: str, *, is_whole: bool = True) -> str | None:
    """Why it cannot be typed; None if it can."""
    folder = ROOT
    if match := re.match(r"cd (\S+) && (.*)", command):
        folder, command = ROOT / match[1], match[2]
    command = re.sub(r"(?<= )\[[^\]]*\]", "", command)  # what may be left out
    try:
        words = [word for word in shlex.split(command, comments=True) if word != "..."]
    except ValueError as error:
        return str(error)
    while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
        words = words[1:]
    match words[0].removeprefix(".venv/bin/"), words[1:]:
        case "asyncrl", arguments:
            return _fault_of_asyncrl(arguments, folder, is_whole=is_whole)
        case "python", ["-m", module, *_]:
            is_known = module.startswith(("my_", "MODULE", "module")) or importlib.util.find_spec(module)
            return None if is_known else f"there is no module {module}"
        case (("python" | "bash"), [file, *_]) if file not in ("-c", "-m"):
            return None if (folder / file).is_file() else f"there is no file {file}"
        case "make", targets:
            return next(filter(None, map(_fault_of_make, targets)), None)
        case program, _ if program in (*EXTERNAL, "python", "bash"):
            return None
    return f"the program {words[0]} is not known"


def _fault_of_asyncrl(arguments: list[str], folder: Path, *, is_whole: bool) -> str | None:
    if arguments and re.fullmatch("[a-z]+", arguments[0]) and arguments[0] not in get_command(app).commands:  # type: ignore[attr-defined]
        is_prose = not is_whole and arguments[0] in PROSE
        return None if is_prose else f"`{arguments[0]}` is neither a command nor known as prose"
    given = [STANDS_FOR.get(word.split("/")[-1], word) for word in arguments]
    try:
        found = _parse(given)
        if "config" in found:
            load_config(folder / found["config"], found.get("overrides") or [])
    except AsyncrlError as error:
        return str(error)
    except Exception as error:  # of typer's own copy of click, which has no public name
        message = f"{error.format_message() if hasattr(error, 'format_message') else error}"
        is_short = not is_whole and re.search(r"Missing argument|requires an argument|Usage", message)
        return None if is_short else f"{type(error).__name__}: {message}"
    return None


def _parse(arguments: list[str]) -> dict[str, Any]:
    """The parameters of the command by the program's own parser; nothing is done."""
    found: dict[str, Any] = {}

    def hold(command: Any) -> None:
        for sub in getattr(command, "commands", {}).values():
            hold(sub)
        if not hasattr(command, "commands"):
            command.callback = found.update

    group = get_command(app)
    hold(group)
    group.main([*arguments], prog_name="asyncrl", standalone_mode=False)
    return found


@cache
def _fault_of_make(target: str) -> str | None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 or "=" in target else f"make: {done.stderr.strip()}"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("asyncrl eksport RUN_DIR", "neither a command nor known as prose"),
        ("asyncrl run configs/quickstart.yaml --resume", "requires an argument"),
        ("asyncrl run configs/quickstart.yaml trainer.lr=1", "trainer.lr"),
        ("python examples/nothing.py", "there is no file"),
        ("make nothing", "make"),
    ],
)
def test_a_command_that_does_not_work_is_found(command: str, fault: str) -> None:
    assert fault in (fault_of(command) or "")


def test_every_command_that_people_are_told_works() -> None:
    found = commands()
    assert len(found) > 100
    checked = [(place, command, fault_of(command, is_whole=is_whole)) for place, command, is_whole in found]
    assert [each for each in checked if each[2] is not None] == []


def test_every_setting_that_is_named_exists_and_takes_the_value_that_is_named_with_it() -> None:
    dotted = r"(?<![\w./:{@\-\[\0])[a-z][a-z_0-9]*(?:\.[a-z][a-z_0-9]*)+(?![\w/(\0])"
    num_named, faults = 0, {}
    for text in texts():
        if text.path.name == "coming-from.md":  # test_site.py: it has the names of others, too
            continue
        if text.is_shell or (text.path.suffix == ".py" and not (text.is_message and " " in text.text)):
            continue
        if re.search(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE)\b", text.text):
            continue
        quoted = r"(?<!`)`([^`]+)`(?!`)" if text.path.suffix == ".md" else r"(?s)\A(.*)\Z"
        for span in re.finditer(quoted, text.text):
            for match in re.finditer(dotted, span[1]):
                if FILE.search(match[0]):
                    continue
                num_named += 1
                value = re.match(r"=(\[?[\w./:-]+\]?)(?![\w\0\[])", span[1][match.end() :])
                if fault := fault_of_setting(match[0], value[1].rstrip(".:") if value else None):
                    faults[text.where(span.start())] = fault
    assert num_named > 300
    assert faults == {}


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("trainer.lr", None, "trainer.lr is no setting"),
        ("buffer.on_overdue", "keep", "buffer.on_overdue does not take keep"),
        ("rollout.vllm.seed", None, "fine"),
        ("buffer.max_staleness", "0", "fine"),
    ],
)
def test_a_setting_that_does_not_exist_is_found(name: str, value: str | None, fault: str) -> None:
    assert (fault_of_setting(name, value) or "fine").startswith(fault)


def fault_of_setting(name: str, value: str | None) -> str | None:
    """Why it is none; None if it is one, or is known to be something else."""
    if name in NO_SETTINGS or name.split(".")[0] in ("asyncrl", "asyncrl_servers", "importlib", "torch"):
        return None
    field = _field(name)
    if field is None:
        return f"{name} is no setting (`asyncrl keys`); if it is something else, say so in NO_SETTINGS"
    if value is None or not isinstance(field, FieldInfo) or re.fullmatch(r"[A-Z_]+|.*\.\.\..*", value):
        return None
    takes = TypeAdapter(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
    fault = ""
    for read in (None, value) if value == "none" else (yaml.safe_load(value),):
        try:
            takes.validate_python(read)
        except ValidationError as error:
            fault = f"{name} does not take {value}: {error.errors()[0]['msg']}"
        else:
            return None
    return fault


def _field(name: str) -> FieldInfo | str | None:
    """The setting of this name, 'free' below a mapping, which takes any key, None if there is none."""
    model: Any = RunConfig
    field: FieldInfo | None = None
    first, *rest = name.split(".")
    if first in ("task", "eval") and rest and rest[0] in ("0", "sums", "words"):  # of several, as in docs
        rest = rest[1:]
    for part in (first, *rest):
        if model is dict:
            return "free"
        if model is None or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        model, kinds = section_of(field), (field.annotation, *get_args(field.annotation))
        if model is None and any(dict in (kind, get_origin(kind)) for kind in kinds):
            model = dict
    return field


def test_every_option_that_a_message_names_exists() -> None:
    def options(command: Any) -> set[str]:
        own = {option for parameter in command.params for option in parameter.opts}
        return own.union(*(options(sub) for sub in getattr(command, "commands", {}).values()))

    of_vllm = "--dtype --enable-lora --enable-return-routed-experts --enable-scale-out --logprobs-mode "
    of_vllm += "--max-lora-rank --max-model-len --max-num-seqs --structured-outputs-config "
    of_vllm += "--worker-extension-cls"
    of_others = "--address --head --revision"  # of ray start, and of hf download
    known = {*options(get_command(app)), "--help", *of_vllm.split(), *of_others.split()}
    messages = [text for text in texts() if text.is_message and " " in text.text]
    named = [(text.where(), re.findall(r"(?<![\w-])--[a-z][\w-]*", text.text)) for text in messages]
    assert [(where, options) for where, options in named if not known.issuperset(options)] == []


@pytest.mark.parametrize("extra", ["train", "harness", "verifiers", "vllm", "smollm2", "dev"])
def test_an_absent_extra_is_named_with_a_command_that_installs_it(extra: str) -> None:
    assert f"[{extra}]" in install_extra(extra)
    assert f"\n{extra} = " in (ROOT / "pyproject.toml").read_text()
