"""Check the size of each folder against its budget in pyproject.toml.

A code line is a line with code in it: blank lines, comments and docstrings do not count. `a, b = x, y` counts
as two lines, so that packing assignments hides nothing.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

ROOT = Path(__file__).parents[1]
LAYOUT = {COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER}


def count_code(source: str) -> int:
    """Return the number of code lines in a Python source text."""
    nodes = list(ast.walk(ast.parse(source)))
    ignored: set[int] = set()
    num_packed = 0
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str) and node.end_lineno is not None:
                ignored.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            num_packed += sum(len(to.elts) - 1 for to in node.targets if isinstance(to, ast.Tuple))
    lines: set[int] = set()
    for token in generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - ignored) + num_packed


def folder_of(path: Path, folders: list[str]) -> str | None:
    """Return the longest budgeted folder that contains the file."""
    inside = [folder for folder in folders if path.is_relative_to(folder)]
    return max(inside, key=len, default=None)


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["asyncrl"]["budget"]
    tracked = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in tracked:
        folder = folder_of(Path(name), list(budgets))
        if folder is not None and (ROOT / name).exists():
            sizes[folder] += count_code((ROOT / name).read_text(encoding="utf-8"))
            files[folder] += 1
    for folder, budget in budgets.items():
        mark = "" if sizes[folder] <= budget else "  over its budget"
        print(f"{folder:26} {files[folder]:4} files {sizes[folder]:6} of {budget:6} lines{mark}")
    product = sum(size for folder, size in sizes.items() if folder.startswith(("asyncrl", "servers")))
    print(f"{'product':26} {product:21} lines")
    over = [folder for folder, budget in budgets.items() if sizes[folder] > budget]
    if over:
        print(f"Way out: delete code in {', '.join(over)}, or raise the budget in pyproject.toml.")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
