"""Extensions: found, listed, broken, switched off, removed."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import run_lines
from installed_extension import RECORD, SETTINGS, install, python
from job_runs import ROOT, environment, write_config

from asyncrl.base.extensions import AddedField, discover, extensions
from asyncrl.config.load import load_any, run_config_yaml, sections

QUICKSTART = "configs/quickstart.yaml"
OWN = sorted(path.parent.name for path in ROOT.glob("asyncrl/extensions/*/__init__.py"))
IN_USE = [pytest.param(name, marks=pytest.mark.extension(name)) for name in OWN]
UNKNOWN = "is not a known key, also not of an installed extension"
USES = {
    "openenv": (
        "generator.openenv=http://127.0.0.1:9",
        f"generator.openenv on the command line {UNKNOWN}",
    ),
    "trackers": (
        "observe.traces=otlp",
        f"observe.traces on the command line {UNKNOWN}",
    ),
    "verifiers": (
        "generator.verifiers=wordle task.verifiers=true task.python=none",
        f"generator.verifiers on the command line {UNKNOWN}",
    ),
    "ray": (
        "launcher=ray",
        "no installed extension has this launcher; known are local",
    ),
    "vllm": (
        "rollout.engine=vllm",
        "rollout.engine='vllm' on the command line: Input should be 'embedded'",
    ),
    "scoring": (
        "teacher.path=a/b algorithm.distill_weight=1",
        f"teacher on the command line {UNKNOWN}",
    ),
    "sft": ("seed=0", f"data in configs/sft.yaml {UNKNOWN}"),
    "tinker": ("seed=0", f"tinker in configs/tinker.yaml {UNKNOWN}"),
}
"""Settings that use an extension, and their refusal, for each of asyncrl's own."""
USED_IN = {"sft": "configs/sft.yaml", "tinker": "configs/tinker.yaml"}
"""Their configs, unless it is QUICKSTART."""
MAY_NAME: dict[str, dict[str, str]] = {
    "openenv": {},
    "ray": {
        "asyncrl/base/http.py": "the name of a secret",
        "asyncrl/config/run_config.py": "a way out",
        "asyncrl/launch/cluster_file.py": "the files start Ray",
    },
    "trackers": {"asyncrl/config/other_names.py": "settings of other trainers"},
    "verifiers": {},
    "vllm": {
        "asyncrl/config/other_names.py": "names in other frameworks",
        "asyncrl/job/check/model_check.py": "a way out, a column of models/support.csv",
        "asyncrl/models/rope_lengths.py": "a way out",
        "asyncrl/models/support.py": "a column of models/support.csv",
        "asyncrl/trainer/model/model_trial.py": "a way out",
        "servers/asyncrl_servers/embedded/decoder.py": "a way out",
        "servers/asyncrl_servers/embedded/embedded_engine.py": "a way out",
    },
    "scoring": {
        "asyncrl/algorithms/losses.py": "the distillation loss",
        "asyncrl/config/run_config.py": "a way out",
        "asyncrl/job/resume.py": "columns for the distillation loss",
        "asyncrl/messages/tokens.py": "columns for the distillation loss",
        "asyncrl/trainer/loss/objective.py": "the distillation loss",
    },
    "sft": {"asyncrl/tasks/task.py": "a way out"},
    "tinker": {},
}
"""Files of the core whose code may name an extension, with the reason."""
CALLED = {
    "scoring": r"teacher|the judge|\.judge\b|served_judge|reward_?model",
    "trackers": r"\b(wandb|mlflow|trackio|otlp|opentelemetry|traces)\b",
}
"""Words for a feature, as a pattern, where they are not the extension's name."""


# ---- a package from elsewhere

FACTS = """
import json, pickle
from asyncrl.base.errors import ConfigError
from asyncrl.config import GeneratorConfig, RunConfig, load_config
from asyncrl.config.load import all_keys, run_config_yaml, schema_text
from asyncrl.job.resume import changed_keys, _is_free

def load(*overrides):
    try:
        return load_config("configs/quickstart.yaml", overrides)
    except ConfigError as error:
        return str(error).splitlines()[0]

plain, used = load(), load("generator.pager=n5", "pagers={number: 2}")
inner = load("task.generator={pager: n7}")
print(json.dumps({
    "keys": [key for key in all_keys() if "page" in key or "volume" in key],
    "schema": "Number of a pager." in schema_text(),
    "plain": [name for name in ("pager", "volume") if name in plain.generator.model_dump()],
    "top": ["pagers" in plain.model_dump(), used.model_dump()["pagers"]["number"]],
    "dumped": used.model_dump(mode="json")["generator"]["pager"],
    "copied": RunConfig.model_validate_json(used.model_dump_json()) == used,
    "pickled": pickle.loads(pickle.dumps(used)) == used,
    "one class": type(used.generator) is GeneratorConfig,
    "read": [used.pagers.tries, used.generator.called, inner.harnesses[0].pager],
    "given": load("generator.pager=n5", "generator.volume=4").generator.given("pager", "volume"),
    "none": load("generator.pager=none", "pagers=none") == plain,
    "free": [[key, _is_free(key, used)] for key in changed_keys(
        plain, load("generator.volume=9", "pagers={number: 2}"))],
    "refused": [load(*words.split()) for words in (
        "generator.pager=n5 generator.python=a:b", "pagers.number=0", "pagers.number=4",
        "pagers.numbre=4", "generator.volume=true", "generator.pagr=5")],
    "written": run_config_yaml(plain).splitlines()[1],
}))
"""


def test_added_settings_are_fields_like_others(tmp_path: Path) -> None:
    done = python("-c", FACTS, packages=install(tmp_path))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    generator = ["generator.pager", "generator.volume"]
    assert found.pop("keys") == [
        *(f"task.{key}" for key in generator),
        *generator,
        *(f"eval.task.{key}" for key in generator),
        "pagers",
        "pagers.number",
        "pagers.tries",
    ]
    refused = " ".join(found.pop("refused"))
    for part in (
        "generator.openenv, generator.pager, generator.verifiers, generator.remote",
        "pagers.number=0 on the command line: Input should be greater than or equal",
        "pagers on the command line: number=4 needs as many tries",
        "did you mean pagers.number?",
        "generator.volume='true'",
        "generator.pagr on the command line is not a known key, also not of an installed",
        "did you mean generator.pager?",
    ):
        assert part in refused
    assert "pager 1.0 of acme-pager" in found.pop("written")
    assert found == {
        "schema": True,
        "plain": [],
        "top": [False, 2],
        "dumped": "n5",
        "copied": True,
        "pickled": True,
        "one class": True,
        "read": [3, "pager n5", "n7"],
        "given": ["pager", "volume"],
        "none": True,
        "free": [
            ["generator.volume", True],
            ["pagers.number", False],
            ["pagers.tries", True],
        ],
    }


BEEP = """
import asyncio, json, sys
from pathlib import Path
from typing import get_args
from asyncrl.config import engine_kinds
from asyncrl.config.fields import EngineWith
from asyncrl.engines.kinds import maker_of
from asyncrl.launch.fork_server import ForkServer
from asyncrl.launch.processes import ChildProcess, ProcessSpec

async def answer_of(module):
    python = Path(sys.executable)
    spec = ProcessSpec("e", module, "{}", Path(sys.argv[1]), "", python=lambda: python)
    child = ChildProcess(spec)
    await child.start()
    await child.wait()
    return spec.log_path.read_text()

server = maker_of("beep")
print(json.dumps([
    get_args(engine_kinds.EngineKind), EngineWith("has_model").kinds(),
    engine_kinds.engines_with("keeps_turns"), ForkServer([]).modules,
    asyncio.run(answer_of(server)),
]))
"""
BEEPER = {
    "__init__.py": RECORD.replace(
        "HarnessKind\n", "HarnessKind, AddedEngine\n"
    ).replace(
        "    check=",
        """    engines={
        "beep": AddedEngine("acme_pager.settings:FACTS", "acme_pager:SERVER", "acme_pager.beep")
    },
    check=""",
    )
    + "SERVER = 'acme_pager.beep'\n",
    "settings.py": SETTINGS
    + "from asyncrl.config.engine_facts import EngineCapabilities\n"
    "FACTS = EngineCapabilities(keeps_turns=True, has_model=False)\n",
    "beep.py": "import sys, asyncrl_servers\nif __name__ == '__main__': print('beep', len(sys.argv))",
}

CYCLE = "from asyncrl.config.generator_config import GeneratorConfig\n" + SETTINGS
BROKEN = {
    "record": ({"__init__.py": "import acme_engine"}, "ModuleNotFoundError: No module"),
    "settings": ({"settings.py": "1 / 0"}, "ZeroDivisionError: division by zero"),
    "command": ({"pages.py": "1 / 0"}, "ZeroDivisionError: division by zero"),
    "cycle": (
        {"settings.py": CYCLE},
        "are imported by sections that extensions add to",
    ),
    "taken": (
        {"settings.py": SETTINGS.replace('"volume"', '"workers"')},
        "it adds the setting workers, which the section generator has",
    ),
    "section": (
        {"__init__.py": RECORD.replace('{"":', '{"journal":')},
        "no settings can be added to the section journal",
    ),
    "engine": (
        BEEPER | {"__init__.py": BEEPER["__init__.py"].replace('"beep"', '"embedded"')},
        "its engine embedded has the name of another",
    ),
    "harness": (
        {"__init__.py": RECORD.replace('{"pager":', '{"beeper":')},
        "beeper of harnesses has no setting generator.beeper",
    ),
    "job": (
        {
            "__init__.py": RECORD.replace(
                "check=", 'jobs={"pages": "acme_jobs:A"}, check='
            )
        },
        "acme_jobs:A cannot be imported: ModuleNotFoundError",
    ),
}


TRIED = f"""
import sys
from asyncrl.cli import app, main
app(["runs", sys.argv[1]], standalone_mode=False)
app(["extensions"], standalone_mode=False)
sys.argv[1:] = ["check", "{QUICKSTART}"]
main()
"""


QUICK = ("settings", "engine")
CASES = [
    pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in BROKEN
]


@pytest.mark.parametrize("case", CASES)
def test_package_that_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    files, says = BROKEN[case]
    # Commands that only read work; the list and the others name the package.
    done = python("-c", TRIED, tmp_path, packages=install(tmp_path, files))
    assert done.returncode == 2
    assert says in done.stdout
    for text in ("the extension pager 1.0 of acme-pager", says, "uninstall acme-pager"):
        assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_kind_of_a_package_is_one_like_others(tmp_path: Path) -> None:
    packages = install(tmp_path / "packages", BEEPER)
    done = python(
        "-c", BEEP, tmp_path, packages=packages, ASYNCRL_EXTENSIONS="core,pager"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["embedded", "beep"],
        ["embedded"],
        "embedded or beep",
        {"acme_pager.beep": "acme_pager.beep"},
        # In a Python that finds the server's package only by its link.
        "beep 5\n",
    ]


@pytest.mark.slow
def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path)
    install(tmp_path, name="beeper")
    points = tmp_path / "acme_beeper-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text().replace("beeper =", "pager ="))
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    check = f"check {QUICKSTART}"
    ((code, _, error),) = run_lines(ROOT, check, **path)
    assert code == 2
    assert "has an extension of this name, too" in error
    ((code, _, error),) = run_lines(ROOT, check, **path, ASYNCRL_EXTENSIONS="core")
    assert code == 0, error


def test_extensions_can_be_switched_off_and_are_named(tmp_path: Path) -> None:
    path = {"PYTHONPATH": f"{install(tmp_path)}:{ROOT}"}
    check = f"check {QUICKSTART} generator.pager=n5"

    def said(switch: str, *lines: str) -> list[str]:
        answers = run_lines(ROOT, *lines, **path, ASYNCRL_EXTENSIONS=switch)
        return [out + err for _, out, err in answers]

    off = "generator.pager on the command line is not a known key: it is of the extension pager"
    checked, shown = said("core", check, "work --help")
    assert off in checked
    assert "--pager" not in shown
    checked, refused, paged, listed, shown = said(
        "", check, check.replace("n5", "n0"), "page n5", "extensions", "work --help"
    )
    assert "pager n5 answers" in checked
    assert "generator.pager=n0 is not a number" in refused
    assert "paging n5" in paged
    assert "pager 1.0 of acme-pager\n    about: Rollouts that page somebody." in listed
    assert "fields: pagers, generator.pager, generator.volume" in listed
    assert "--pager NUMBER" in shown
    (checked,) = said("core,beeper", check)
    assert "the extension beeper cannot be used" in checked


@pytest.mark.slow
def test_run_can_be_read_and_resumed_without_its_extension(tmp_path: Path) -> None:
    packages = install(tmp_path / "packages")
    config = write_config(
        tmp_path,
        generator={"pager": "n5", "volume": 3},
        trainer={"num_steps": 2},
        checkpoint={"every": 1},
    )
    plain = write_config(tmp_path / "plain", trainer={"num_steps": 2})
    run_dirs = {config: tmp_path / "used", plain: tmp_path / "unused"}
    for path, run_dir in run_dirs.items():
        run = ("-m", "asyncrl", "run", path, "--run-dir", run_dir)
        done = python(*run, packages=packages)
        assert done.returncode == 0, done.stderr
        written = (run_dir / "config.yaml").read_text()
        assert "pager 1.0 of acme-pager" in written.splitlines()[1]
        assert set(yaml.safe_load(written)["generator"]) & {"pager", "volume"} == (
            {"pager"} if path == config else set()
        )
        for command in ("status", "report", "inspect"):
            done = python("-m", "asyncrl", command, run_dir)
            assert done.returncode == 0, done.stderr
    more = ("trainer.num_steps=3", "--allow-change", "trainer.num_steps")
    resume = ("-m", "asyncrl", "run", plain, *more, "--run-dir", run_dirs[plain])
    done = python(*resume)
    assert done.returncode == 0, done.stderr
    # By the user's file and by the run's own, which says what is missing.
    for path in (config, run_dirs[config] / "config.yaml"):
        run = ("-m", "asyncrl", "run", path, *more, "--run-dir", run_dirs[config])
        done = python(*run)
        assert done.returncode == 2
        assert "generator.pager" in done.stderr
        assert (
            "install pager 1.0 of acme-pager: the run was started with it"
            in done.stderr
        )


# ---- asyncrl's own


def test_own_extensions_are_the_folders() -> None:
    own = [
        source for source in discover().sources.values() if source.package == "asyncrl"
    ]
    assert (
        sorted(source.name for source in own) == OWN == sorted(USES) == sorted(MAY_NAME)
    )
    known = {key.name: key.meaning for *_, keys in sections() for key in keys}
    names = {section for section, *_ in sections()}
    for extension in extensions().values():
        assert not extension.page or (ROOT / extension.page).is_file()
        for section in extension.fields:
            for added in extension.fields_of(section):
                assert isinstance(added, AddedField)
                key = f"{section}.{added.name}".removeprefix(".")
                assert key in names or known[key] == added.text


EACH_FIRST = """
import importlib, os, sys, torch
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as missing:
            if missing.name.startswith("asyncrl"):
                raise
            os._exit(0)  # a package of an extra
        from asyncrl.config import load
        load.all_keys()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print(module)
"""


@pytest.mark.slow
def test_each_module_of_an_extension_can_be_imported_first() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in ROOT.glob("asyncrl/extensions/*/*.py")
    ]
    done = python("-c", EACH_FIRST, *modules)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


SEEDS = """
import sys
from pathlib import Path
from asyncrl.config.load import load_written
for path in sys.argv[1:]:
    print(load_written(Path(path)).seed)
"""


@pytest.mark.extension(*OWN)
def test_config_of_a_run_is_read_without_the_extension(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.yaml" for name in OWN]
    for name, path in zip(OWN, paths, strict=True):
        config = load_any(ROOT / USED_IN.get(name, QUICKSTART), USES[name][0].split())
        path.write_text(run_config_yaml(config))
    done = python("-c", SEEDS, *paths, ASYNCRL_EXTENSIONS="core")
    assert done.stdout == "0\n" * len(OWN), done.stderr


@functools.cache
def code_of(path: Path) -> str:
    """Return the code of a file, without its comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                each
                for each in body
                if not (
                    isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                )
            ] or [ast.Pass()]
    return ast.unparse(tree)


@pytest.mark.parametrize("name", IN_USE)
def test_code_of_the_core_names_no_extension(name: str) -> None:
    words = CALLED.get(name, rf"(?<![a-z]){name}(?![a-z])")
    core = [
        path
        for folder in ("asyncrl", "servers")
        for path in (ROOT / folder).rglob("*.py")
        if "extensions/" not in str(path)
        and "templates/content" not in str(path)
        and path.parent != ROOT / "servers/asyncrl_servers" / name
    ]
    named = {
        str(path.relative_to(ROOT))
        for path in core
        if re.search(words, path.read_text(encoding="utf-8"), re.I)
        and re.search(words, code_of(path), re.I)
    }
    assert named == MAY_NAME[name].keys()


@pytest.fixture(params=IN_USE)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A copy of the product without an extension, and its name."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("asyncrl", "servers", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.rmtree(tmp_path / "asyncrl/extensions" / request.param)
    server = tmp_path / "servers/asyncrl_servers" / request.param
    shutil.rmtree(server, ignore_errors=True)
    return request.param, tmp_path


@pytest.mark.slow
@pytest.mark.rotated
def test_core_works_without_an_extension(without: tuple[str, Path]) -> None:
    name, folder = without

    def asyncrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=folder,
            env={"PYTHONPATH": f"{folder}:{folder}/servers", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert f"\n{name} " not in f"\n{asyncrl('extensions').stdout}"
    for arguments in (
        ("check", QUICKSTART),
        ("run", QUICKSTART, "trainer.num_steps=3", "--run-dir", "run"),
    ):
        done = asyncrl(*arguments)
        assert done.returncode == 0, done.stderr
    overrides, says = USES[name]
    done = asyncrl("check", USED_IN.get(name, QUICKSTART), *overrides.split())
    assert done.returncode == 2
    assert says in done.stderr


# ---- packages of this repository


def test_simulated_engine_is_found_as_its_installation_declares_it() -> None:
    folder = ROOT / "benchmarks"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (found,) = metadata.distributions(name=project["name"], path=[str(folder)])
    assert found.version == project["version"]
    points = {point.name: point.value for point in found.entry_points}
    assert points == project["entry-points"]["asyncrl.extensions"]


@pytest.mark.slow
def test_example_is_installed_used_and_removed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "examples/extension", source)
    simulated = tmp_path / "simulated"
    shutil.copytree(ROOT / "benchmarks", simulated)
    venv = (sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    subprocess.run(venv, check=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # The packages of this environment, instead of a download.
    (packages / "parent.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")

    def inside(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "venv/bin/python", "-m", *arguments],
            cwd=ROOT,
            env=environment(ASYNCRL_EXTENSIONS=""),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    done = inside("pip", "install", *offline, source, simulated)
    assert done.returncode == 0, done.stderr
    assert "tries 1.0 of asyncrl-tries" in inside("asyncrl", "extensions").stdout
    assert "simulated 1.0 of" in inside("asyncrl", "extensions").stdout
    engine = ("rollout.engine=fixed", "rollout.fixed_tokens=7")
    two = (QUICKSTART, "generator.tries=2", "rollout.max_prompt_tokens=40", *engine)
    few = ("trainer.num_steps=2", "observe.trackers=[csv]")
    assert "tries: 2 answers" in inside("asyncrl", "check", *two).stdout
    refused = inside("asyncrl", "check", *two, "gateway.max_calls=1")
    assert "generator.tries=2 is more than gateway.max_calls=1" in refused.stderr
    run_dir = tmp_path / "run"
    done = inside("asyncrl", "run", *two, *few, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    last = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[-1])
    assert last["num_sampled"] == 2 * 7
    tracked = (run_dir / "rewards.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in tracked] == ["1", "2"]

    assert inside("pip", "uninstall", "-y", "asyncrl-tries").returncode == 0
    assert "tries" not in inside("asyncrl", "extensions").stdout
    assert inside("asyncrl", "status", run_dir).returncode == 0
    refused = inside("asyncrl", "run", *two, *few, "--run-dir", run_dir)
    assert refused.returncode == 2
    assert "generator.tries on the command line is not a known key" in refused.stderr
    assert (
        "rollout.engine='fixed'"
        in inside("asyncrl", "check", QUICKSTART, engine[0]).stderr
    )
    assert "install tries 1.0 of asyncrl-tries" in refused.stderr
