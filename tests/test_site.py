"""The site of docs/: it builds without a warning, asks no other host for anything, and what its new pages say
of settings, words and files is so.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_advice import fault_of_setting

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
TRL_CONFIGS = (
    "trainer/base_config.py",
    "trainer/grpo_config.py",
    "experimental/async_grpo/async_grpo_config.py",
)
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser fetches without a click."""


class Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if LOADS.get(tag) == name]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.extras
def test_the_site_builds_without_a_warning_and_asks_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        reader = Fetched()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found
        assert [each for each in reader.found if re.match(r"(\w+:)?//", each)] == [], page
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", styles) == []


@pytest.mark.extras
def test_links_that_leave_docs_lead_to_the_files_on_the_site(site: Path) -> None:
    assert (
        'href="repository/configs/gsm8k-qwen2.5-1.5b-1gpu.yaml.html"'
        in (site / "colocation.html").read_text()
    )
    shown = (site / "repository/configs/gsm8k-qwen2.5-1.5b-1gpu.yaml.html").read_text()
    assert "max_staleness" in shown
    assert 'href="agent.py.html"' in (site / "repository/examples/search/index.html").read_text()
    copied = site / "repository/benchmarks/results/colocation.png"
    assert copied.read_bytes() == (ROOT / "benchmarks/results/colocation.png").read_bytes()


@pytest.mark.extras
def test_the_api_page_shows_what_users_import(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/api.md").read_text(), flags=re.M):
        assert f'id="{name}"' in page, name
    assert "An exception is a failed rollout" in page, "docstrings stand there, too"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_readable_in_the_dark_by_ear_and_without_a_network(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ET.fromstring(text)
    names = {element.tag.rsplit("}")[-1] for element in tree.iter()}
    assert {"title", "desc"} <= names
    assert not names & {"script", "image", "foreignObject"}
    light, dark = (set(re.findall(r"(--\w+): ", part)) for part in text.split("prefers-color-scheme: dark"))
    assert light == dark, "each colour has its twin"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert any(f"](pictures/{path.name})" in page for page in pages)


def rows(framework: str) -> list[tuple[list[str], list[str]]]:
    """(their keys, ours) of each row of a table of docs/coming-from.md."""
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {framework}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][2:]
    return [(re.findall("`([^`]+)`", theirs), re.findall("`([^`]+)`", ours)) for theirs, ours in cells]


@pytest.mark.parametrize("framework", ["TRL", "verl", "AReaL", "SkyRL", "prime-rl"])
def test_the_settings_beside_those_of_other_frameworks_exist(framework: str) -> None:
    table = rows(framework)
    assert len(table) > 12
    named = [name for _, ours in table for name in ours]
    assert [name for name in named if fault_of_setting(name, None) is not None] == []


def test_the_settings_of_trl_are_those_of_the_trl_that_is_installed() -> None:
    """Read from its sources: importing it takes longer than all else here."""
    trl, transformers = (Path(str(find_spec(name).origin)).parent for name in ("trl", "transformers"))  # type: ignore[union-attr]
    sources = [transformers / "training_args.py", *(trl / name for name in TRL_CONFIGS)]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    fields = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    named = {name for theirs, _ in rows("TRL") for name in theirs}
    assert named - fields == {"reward_funcs"}, "an argument of the trainer"
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    assert f"TRL {version('trl').rsplit('.', 1)[0]}." in page, "look whether the table still holds"


def test_the_glossary_is_in_order_and_has_the_words_of_the_project() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    words = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][2:]
    assert words == sorted(words, key=str.lower)
    named = {word for entry in words for word in entry.split(", ")}
    assert {"rollout", "turn", "trajectory", "group", "staleness", "policy_version", "deadline"} <= named


def test_the_picture_of_staleness_shows_ages_that_the_bound_allows() -> None:
    ages = re.findall(r"batch (\d): age (\d)", (ROOT / "docs/pictures/staleness.svg").read_text())
    assert len(ages) == 4
    assert all(int(age) <= min(2, int(batch)) for batch, age in ages)


@pytest.mark.extras
def test_the_dockerfile_passes_hadolint_and_copies_what_the_build_context_has() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    lint = [hadolint, "--failure-threshold", "style", "--no-color", ROOT / "Dockerfile"]
    done = subprocess.run(lint, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (ROOT / "Dockerfile").read_text()
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in text.splitlines() if re.match("COPY (?!--from)", line)]
    assert {name for names in copied for name in names} == sent
    assert all((ROOT / name).exists() for name in sent)
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, flags=re.M)
    for target in ("cpu", "cuda"):
        assert target in stages
        assert f"docker build --target {target}" in (ROOT / "docs/install.md").read_text()
    users = re.findall(r"^USER (\d+)", text, flags=re.M)
    assert users[-1] == "1000", "nothing runs as root"
