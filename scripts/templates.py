"""Collect real chat templates, and keep docs/templates.csv: how the gateway continues
chats with each.

python scripts/templates.py FOLDER           download packages that contain templates, and write those there
python scripts/templates.py FOLDER --table   write docs/templates.csv, a row for each template

FOLDER gets NAME.jinja files, each content once, and index.json: the end of an answer,
whether there is a BOS, and why a template is not usable. tests/test_templates_oracle.py
compares the table, and its long test reads FOLDER:

python scripts/templates.py build/templates ASYNCRL_TEMPLATES=build/templates python -m
pytest -m long tests/test_templates_oracle.py
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kit"))

from template_oracle import END, KINDS, collected, installed, rendered  # noqa: E402
from template_runs import row, tell  # noqa: E402

TABLE = ROOT / "docs/templates.csv"
COLUMNS = (
    "template",
    "tool format",
    "thoughts",
    "joints exact",
    "known deviation",
    "not possible",
)
PACKAGES = {
    "llama-cpp-python": "--no-binary=:all:",
    "unsloth": "--only-binary=:all:",
    "xinference<3.5": "--only-binary=:all:",  # newer ones download their templates
    "axolotl": "--only-binary=:all:",
}
"""Packages whose files contain templates, and the archive to take."""
FILES = re.compile(
    r"chat_templates?/.*\.jinja$|/templates/[^/]+\.jinja$|llm_family\.json$|/chat_templates\.py$"
)
LEAST = 150
"""Usable templates."""
SAID = ("What is it?", "It is four.", "Why so?")
TOOL = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {}},
}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "folder", type=Path, help="folder of the templates, for example build/templates"
    )
    parser.add_argument(
        "--table", action="store_true", help="write docs/templates.csv from the FOLDER"
    )
    asked = parser.parse_args()
    if asked.table:
        return write_table({**installed(), **collected(asked.folder)})
    return collect(asked.folder)


# ---- the table


def write_table(templates: dict[str, str]) -> int:
    """Return the number of templates that the gateway does not continue as the oracle
    does.
    """
    num_wrong = 0
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, template in templates.items():
            told, wrong = tell(template, KINDS[0])
            writer.writerow([name, *row(template, told, wrong)])
            for fault in wrong.values():
                print(f"{name}: {fault}", file=sys.stderr)
            num_wrong += bool(wrong)
    print(f"{TABLE}: {len(templates)} templates, {num_wrong} with wrong stories")
    return num_wrong


# ---- the collection


def collect(folder: Path) -> int:
    """Return the exit status: 1 if there are too few usable templates."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(installed().items())
    for package in PACKAGES:
        print(f"{package}: downloading", flush=True)
        news = list(templates_of(package))
        print(f"{package}: {len(news)} templates", flush=True)
        found += news
    index: dict[str, dict[str, Any]] = {}
    # the first name stays
    for text, name in {text.strip(): name for name, text in reversed(found)}.items():
        index[name] = described(text)
        (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
    (folder / "index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True), encoding="utf-8"
    )
    num_usable = sum(not facts["unusable"] for facts in index.values())
    print(f"{folder}: {len(index)} distinct templates, {num_usable} of them usable")
    if num_usable < LEAST:
        print(
            f"{LEAST} are wanted; which package is missing is said above",
            file=sys.stderr,
        )
    return num_usable < LEAST


def templates_of(package: str) -> Iterator[tuple[str, str]]:
    """Download a package with pip and yield (name, template)."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        PACKAGES[package],
        package,
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--dest", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = done.stderr.strip().splitlines() or [
                f"it ended with {done.returncode}"
            ]
            print(f"{package}: not downloaded. pip says: {why[-1]}", file=sys.stderr)
        for archive in Path(folder).iterdir():
            for path, content in members(archive):
                for name, text in templates_in(path, content.decode()):
                    if "messages" in text and "{%" in text:
                        plain = re.sub(r"[^\w.-]+", "-", name).strip("-")
                        yield f"{re.split('[<=]', package)[0]}.{plain}", text


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files that may contain templates."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from (
                (name, wheel.read(name))
                for name in wheel.namelist()
                if FILES.search(name)
            )
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if FILES.search(member.name) else None
                if file is not None:
                    yield member.name, file.read()


def templates_in(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a Jinja file, of JSON with `chat_template`, or of texts
    that a module assigns.
    """
    if path.endswith(".jinja"):
        yield Path(path).stem, text
    elif path.endswith(".json"):
        yield from (
            (family["model_name"], family.get("chat_template") or "")
            for family in json.loads(text)
        )
    else:
        known: dict[str, str] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if value := joined(node.value, known):
                    known[name] = value
                    yield name.removesuffix("_template"), value


def joined(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return the text of a literal, of a known name, or of a sum of those."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [joined(left, known), joined(right, known)]
            return "".join(filter(None, parts)) if None not in parts else None
    return None


def described(template: str) -> dict[str, Any]:
    """Return the end of an answer, whether there is a BOS, and why the template is not
    usable.
    """
    roles = ("user", "assistant", "user")
    chat = [
        {"role": role, "content": text} for role, text in zip(roles, SAID, strict=True)
    ]
    refusal = ""
    for tools in (None, [{"type": "function", "function": TOOL}]):
        try:
            text = rendered(
                template,
                chat,
                tools,
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception as error:
            refusal = refusal or f"it refuses a plain chat: {error}"
            continue
        missing = [said for said in SAID if said not in text]
        end = END.search(text, text.find(SAID[1]))
        return {
            "end": end.group() if end else "",
            "bos": "<s>" in text,
            "unusable": f"it leaves out {missing[0]!r}" if missing else "",
        }
    return {"end": "", "bos": False, "unusable": refusal}


if __name__ == "__main__":
    sys.exit(main())
