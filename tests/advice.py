"""Collects what our pages, messages and help tell people: commands, and names of settings. Each with its
place; it judges none.

Where a command may stand:
    pages           in shell blocks, and between backticks
    configs         in comments with an indent, `#   asyncrl run ...`
    Python          in string literals, docstrings included: between backticks, or to the end of the line
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from asyncrl.errors import install_extra

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
CONFIGS = ("configs/*.yaml", "examples/**/*.yaml")
PACKAGES = ("asyncrl/**/*.py", "servers/**/*.py")
"""Whose messages people read."""
SCRIPTS = ("scripts/*.py", "examples/**/*.py", "benchmarks/*.py")
SHELL = ("scripts/*.sh", "Makefile")

START = r"(?:[A-Z][A-Z0-9_]*=\S* +)*(?:cd \S+ && )?(?:\.venv/bin/)?(?:asyncrl|python|bash|make|pip|uv) "
"""How a command begins."""
INSIDE = (
    r"(?<![\w./`\-\[])(?:\.venv/bin/)?(?:asyncrl [a-z]|python -m |python \S+\.py|pip install |bash \S+\.sh)"
)
"""The same in the middle of a sentence, where `make` and `python` are also words."""

GO_ON = "asyncrl run configs/quickstart.yaml --run-dir runs/mine"
SAMPLES = (
    (r"^install_extra\('(\w+)'\)$", lambda found: install_extra(found[1])),
    (
        r"^run_again\(\w*(?:\.\w+)*((?:, '[\w-]+')*)(?:, "
        r"\*more)?\)$",
        lambda found: f"{GO_ON} {_words(found[1])}",
    ),
    (r"^INSTALL$", lambda _: "that"),
    (r"\burl\b|\.url$", lambda _: "http://127.0.0.1:8700"),
    (r"_ENV$", lambda _: "NAME"),
    (r"worker_key|\bkey\b", lambda _: "KEY"),
    (r"^made_here$", lambda _: " model.scratch=none model.path=some/model"),
    (r"^folder$", lambda _: "RUN_DIR"),
    (r"^name$", lambda _: "harness"),
    (r"^module_name$", lambda _: "json"),
    (r"^num_steps$|^' '\.join", lambda _: "1"),
)
"""What stands for {expression} in a command; any other expression there is an error."""


def _words(literals: str) -> str:
    return " ".join(re.findall(r"'([\w-]+)'", literals))


@dataclass(frozen=True)
class Command:
    """`is_whole`: it can be typed as it stands. A command between backticks may be a mention, `asyncrl run`
    say.
    """

    where: str
    text: str
    is_whole: bool


@dataclass(frozen=True)
class Text:
    """A piece of prose with its place: the file and its first line. `is_message`: a program says it to
    people.
    """

    path: Path
    line: int
    text: str
    is_message: bool = False

    def where(self, position: int = 0) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line + self.text[:position].count(chr(10))}"


def files(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


@cache
def commands() -> tuple[Command, ...]:
    """All of them, in the order of files."""
    found: list[Command] = []
    for path in files(*PAGES):
        found += _in_page(path)
    for path in files(*CONFIGS):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := re.match(rf"#\s{{3,}}({START}.*)", line):
                found.append(
                    Command(f"{path.relative_to(ROOT)}:{number}", _without_note(match[1]), is_whole=True)
                )
    for text in (*strings(*PACKAGES, *SCRIPTS), *_shell_texts()):
        found += _in_text(text)
    return tuple(found)


def _in_page(path: Path) -> Iterator[Command]:
    prose = []
    for lines, first, kind in blocks(path):
        if kind == "prose":
            prose.append(Text(path, first, "\n".join(lines)))
            continue
        is_shell = kind in ("sh", "bash", "console") or (
            kind in ("indented", "plain") and any(re.match(START, line) for line in lines)
        )
        joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
        for number, line in enumerate(joined, start=first):
            if line.startswith("$ "):
                yield Command(f"{path.relative_to(ROOT)}:{number}", _without_note(line[2:]), is_whole=True)
            elif (
                is_shell
                and line.strip()
                and not any(other.startswith("$ ") for other in lines)
                and not line.startswith("#")
            ):
                yield Command(f"{path.relative_to(ROOT)}:{number}", _without_note(line), is_whole=True)
    for text in prose:
        yield from _in_backticks(text)


def blocks(path: Path) -> Iterator[tuple[list[str], int, str]]:
    """(lines, number of the first, kind) of a page: prose, indented, or the language of a fence."""
    kind, lines, first, is_fenced = "prose", list[str](), 1, False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"\s*```(\w*)", line)
        is_indented = line.startswith("    ") and not re.match(r"\s*([-*]|\d+\.) ", line)
        now = kind
        if fence:
            now, is_fenced = ("prose" if is_fenced else fence[1] or "plain"), not is_fenced
        elif not is_fenced and is_indented and kind == "prose" and (not lines or not lines[-1].strip()):
            now = "indented"
        elif not is_fenced and kind == "indented" and not is_indented and line.strip():
            now = "prose"
        if now != kind or fence:
            if lines:
                yield lines, first, kind
            kind, lines, first = now, [], number + bool(fence)
            if fence:
                continue
        lines.append(line.removeprefix("    ") if kind == "indented" else line)
    if lines:
        yield lines, first, kind


def _without_note(line: str) -> str:
    """What a shell would be given: no comment."""
    return re.sub(r"\s{2,}\S.*$" if re.match(r"make \S+\s{3,}", line) else r"\s+#.*$", "", line).strip()


def _in_text(text: Text) -> Iterator[Command]:
    text = replace(text, text=filled(re.sub(r"\\\n\s*", " ", text.text), is_strict=False))
    yield from _in_backticks(text)
    outside = re.sub(r"`[^`]*`", lambda span: "`" * len(span[0]), text.text)
    for match in re.finditer(rf"{INSIDE}[^\n`]*", outside):
        command = re.split(
            r"; | \(|\)|, |: |\.$|\.\s|'\"|  | in (?=the |asyncrl)", text.text[match.start() : match.end()]
        )[0]
        yield Command(text.where(match.start()), command.strip(), is_whole=False)


def _in_backticks(text: Text) -> Iterator[Command]:
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text.text):
        span = re.sub(r"\s+", " ", match[1]).strip()
        if re.match(START, span):
            yield Command(text.where(match.start()), span, is_whole=False)


def _shell_texts() -> Iterator[Text]:
    """What shell scripts print and what their heads say; what they run is run by CI."""
    for path in files(*SHELL):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := re.match(r"#\s+(.*)|\s*echo \"?(.*?)\"?(?: >&2)?$", line):
                yield Text(path, number, match[1] or match[2] or "", is_message=True)


@cache
def strings(*patterns: str) -> tuple[Text, ...]:
    """String literals of Python files, docstrings included, with {expressions} as they are written."""
    found: list[Text] = []
    for path in files(*patterns):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        _visit(tree, path, found, {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)})
    return tuple(found)


def _has_docstring(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return (
        isinstance(body, list)
        and bool(body)
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
    )


def _visit(node: ast.AST, path: Path, found: list[Text], docstrings: set[int]) -> None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("install_extra", "run_again")
    ):
        found.append(Text(path, node.lineno, filled(f"{{{ast.unparse(node)}}}"), is_message=True))
        return
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            elif isinstance(value, ast.FormattedValue):
                parts.append(f"{{{ast.unparse(value.value)}}}")
                _visit(value.value, path, found, docstrings)
        found.append(Text(path, node.lineno, "".join(parts), is_message=True))
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(Text(path, node.lineno, node.value, is_message=id(node) not in docstrings))
    for child in ast.iter_child_nodes(node):
        _visit(child, path, found, docstrings)


def filled(text: str, *, is_strict: bool = True) -> str:
    """A command with something in place of each {expression}. `is_strict`: raises ValueError for one that is
    not in SAMPLES.
    """

    def sample(match: re.Match[str]) -> str:
        for pattern, value in SAMPLES:
            if found := re.search(pattern, match[1]):
                return str(value(found))
        if not is_strict:
            return match[0]
        raise ValueError(f"what {{{match[1]}}} stands for is not known: add it to SAMPLES in tests/advice.py")

    return re.sub(r"\{([^{}]+)\}", sample, text)


_SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE)\b")
_DOTTED = r"(?<![\w./:{@\-\[])[a-z][a-z_0-9]*(?:\.[a-z][a-z_0-9]*)+(?![\w/(])"
_FILE = re.compile(
    r"\.(config|csv|git|gguf|id|jinja|json|jsonl|lock|log|md|new|parquet|part|pid|png|py|safetensors|sh|so|sqlite|tmp|toml|txt|yaml)$"
)


@dataclass(frozen=True)
class Setting:
    """A dotted name of prose that is no file, with the value that is set to it there, if it is a plain
    one.
    """

    where: str
    name: str
    value: str | None


@cache
def settings() -> tuple[Setting, ...]:
    """Of messages and help, and of what stands between backticks in pages."""
    texts = [
        text
        for text in strings(*PACKAGES)
        if text.is_message and " " in text.text and not _SQL.search(text.text)
    ]
    for path in files(*PAGES):
        for lines, first, kind in blocks(path):
            if kind == "prose":
                whole = Text(path, first, "\n".join(lines))
                texts += [
                    Text(path, first + whole.text[: span.start()].count("\n"), span[1])
                    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", whole.text)
                ]
    found = []
    for text in texts:
        plain = text.text
        while (
            shorter := re.sub(r"\{[^{}]*\}", "\0", plain)
        ) != plain:  # an {expression}, and one inside of it first
            plain = shorter
        for match in re.finditer(_DOTTED, plain):
            if not _FILE.search(match[0]):
                value = re.match(r"=(\[?[\w./:-]+\]?)(?![\w\0\[])", plain[match.end() :])
                found.append(
                    Setting(text.where(match.start()), match[0], value[1].rstrip(".:") if value else None)
                )
    return tuple(found)
