"""The wheel contains its packages under unique names; a host of workers installs a
small part.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asyncrl.base.errors import OF_TRAIN
from asyncrl.config.generator_config import HARNESSES

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs/quickstart.yaml"
FILES = [
    path for folder in ("asyncrl", "servers") for path in (ROOT / folder).rglob("*.py")
]
SOURCE = "\n".join(path.read_text() for path in FILES)
WORKER_MODULES = [
    "asyncrl.agents.worker",
    *(kind.place.partition(":")[0] for kind in HARNESSES.values()),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["bash", str(ROOT / "scripts/wheel.sh"), str(folder)]
    environ = os.environ | {"PYTHON": sys.executable}
    subprocess.run(command, check=True, timeout=600, env=environ)
    return next(folder.glob("asyncrl-*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_the_wheel_has_its_packages_licenses_and_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "asyncrl",
        "asyncrl_servers",
    }
    assert {
        "asyncrl/py.typed",
        "asyncrl_servers/py.typed",
        "asyncrl_servers/embedded/__main__.py",
        "asyncrl/observe/static/page.html",
        "asyncrl/observe/static/page.js",
        "asyncrl/templates/content/quickstart.yaml",
        "asyncrl/templates/content/lookup.py",
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(
        name.endswith("LICENSE.uPlot") and ".dist-info/licenses/" in name
        for name in names
    )
    assert "License-Expression: Apache-2.0 AND MIT\n" in text
    links = re.findall(r'(?:\]\(|src="|srcset="|href=")([^)"]+)', text)
    assert len(links) > 10
    assert [
        link for link in links if not link.startswith(("https://", "http://", "#"))
    ] == []


@pytest.fixture(scope="module")
def worker_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    venv = tmp_path_factory.mktemp("worker") / "venv"
    install(venv, f"{wheel}[worker]")
    return venv


@contextlib.contextmanager
def serving(wheel: Path, folder: Path) -> Iterator[str]:
    """Serve a package index that has only this wheel; yield its address."""
    project = folder / "index/asyncrl"
    project.mkdir(parents=True)
    shutil.copy(wheel, project)
    handler = partial(SimpleHTTPRequestHandler, directory=str(project.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def install(venv: Path, *what: str, shares_packages: bool = False) -> None:
    """Make a venv, and install into it with the pip of these tests. `shares_packages`:
    it also has the packages of these tests, except asyncrl.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)],
        check=True,
        timeout=240,
    )
    if shares_packages:
        shared = venv / "shared"
        shared.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "asyncrl" not in path.name:
                (shared / path.name).symlink_to(path)
        (packages,) = venv.glob("lib/python3*/site-packages")
        (packages / "shared.pth").write_text(str(shared))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin/python"),
        "install",
        "--quiet",
        *what,
    ]
    # without PYTHONPATH, which may lead to this checkout: then pip has asyncrl already
    environ = os.environ | {"PYTHONPATH": "", "NO_PROXY": "127.0.0.1"}
    subprocess.run(pip, check=True, timeout=840, env=environ)


def run_python(*arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_worker_host_installs_at_most_160_mb(worker_venv: Path) -> None:
    (packages,) = worker_venv.glob("lib/python3*/site-packages")
    said = subprocess.run(
        ["du", "-sm", packages], capture_output=True, text=True, check=True
    ).stdout
    assert int(said.split()[0]) <= 160, said
    for line in ("work --help", f"run {QUICKSTART}", f"serve gateway {QUICKSTART}"):
        command = [worker_venv / "bin/asyncrl", *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if line == "work --help":
            assert (done.returncode, "--slots" in done.stdout) == (0, True)
        else:
            assert (done.returncode, "pip install 'asyncrl[train]'" in done.stderr) == (
                2,
                True,
            ), done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_base_install_reads_runs_without_torch(
    wheel: Path, worker_venv: Path, tmp_path: Path
) -> None:
    def outcome(*words: str | Path, venv: Path = worker_venv) -> str:
        command = [venv / "bin/python", "-E", "-m", "asyncrl.cli", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    has_torch = (
        "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    )
    assert (
        subprocess.run([worker_venv / "bin/python", "-E", "-c", has_torch]).returncode
        == 1
    )
    outcome("init", "quickstart")
    config = tmp_path / "quickstart.yaml"
    assert "buffer.look_ahead" in outcome("keys", "buffer")
    training = tmp_path / "venv"
    with serving(wheel, tmp_path) as index:
        options = ("--isolated", "--index-url", index)
        install(training, *options, "asyncrl[train]", shares_packages=True)
    where = [
        training / "bin/python",
        "-E",
        "-c",
        "import asyncrl; print(asyncrl.__file__)",
    ]
    found = subprocess.check_output(where, cwd=tmp_path, text=True)
    assert found.startswith(str(training / "lib"))
    assert "rollout.deterministic" in outcome("check", config, venv=training)
    outcome(
        "run",
        config,
        "trainer.num_steps=3",
        "--run-dir",
        tmp_path / "run",
        venv=training,
    )
    for words in (["status"], ["inspect"], ["inspect", "--samples"], ["report"]):
        outcome(words[0], tmp_path / "run", *words[1:])
    assert (tmp_path / "run/report.html").is_file()
    (listed,) = json.loads(outcome("runs", tmp_path, "--json"))
    assert (listed["state"], listed["steps"]) == ("done", 3)


def test_worker_and_harnesses_import_nothing_of_the_train_extra() -> None:
    hide = f"import sys; sys.modules.update(dict.fromkeys({sorted(OF_TRAIN)}))"
    modules = ", ".join(WORKER_MODULES)
    code = f"import {modules}; from asyncrl.cli import app; app(['work', '--help'])"
    run_python("-c", f"{hide}; {code}")


def test_fastapi_is_imported_only_where_it_serves() -> None:
    code = (
        "import sys, asyncrl.cli, asyncrl.job.loop, asyncrl.job.serve, asyncrl.agents.worker; "
        "assert not {'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    run_python("-c", code)


def test_train_extra_brings_the_documented_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {
        re.split("[<>=]", each)[0].replace("-", "_") for each in extras["train"]
    } == OF_TRAIN
    assert extras["worker"] == []


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {
        re.split(r"[<>=\[]", each)[0].replace("-", "_") for each in sum(lists, [])
    }
    # of mlflow-skinny, pyyaml, ipython, wandb, openenv-core, opentelemetry-sdk, protobuf
    declared |= {
        "mlflow",
        "yaml",
        "IPython",
        "requests",
        "openenv",
        "opentelemetry",
        "google",
    }
    imports = re.findall(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", SOURCE, re.M)
    tops = {"".join(either) for either in imports} - sys.stdlib_module_names
    # torch for CUDA brings its own Triton, and the CPU build does not
    assert tops - declared <= {"asyncrl", "asyncrl_servers", "triton"}


def test_names_are_unique_across_folders() -> None:
    own = ("__init__.py", "__main__.py", "settings.py")
    modules = Counter(path.name for path in FILES if path.name not in own)
    classes = Counter(re.findall(r"^class (\w+)", SOURCE, re.M))
    ((name, count),) = (modules + classes).most_common(1)
    assert count == 1, name


@pytest.mark.slow
def test_setup_writes_the_bytecode_of_a_run() -> None:
    said = run_python("scripts/import_run.py", PYTHONDONTWRITEBYTECODE="").splitlines()
    assert re.search(rf": 1 of {len(said)}, torch$", said[0])
    code = """
import importlib, sys
from pathlib import Path
import asyncrl.job.loop, asyncrl.cli, torch.distributed.checkpoint
from asyncrl.launch.fork_server import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
caches = [getattr(spec, "cached", None) for spec in specs]
missing = [path for path in caches if isinstance(path, str) and not Path(path).exists()]
assert not missing, missing
"""
    run_python("-c", code, PYTHONDONTWRITEBYTECODE="1")
