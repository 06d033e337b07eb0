"""Check the size of each folder against its budget in pyproject.toml.

Size is counted in standard lines: syntax nodes divided by 4.5. Annotations, docstrings,
comments and operator tokens are free. Formatting does not change the count, so packing
statements into fewer lines gains nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODES_PER_LINE = 4.5
"""Nodes in a code line of prime-rl, slime, SkyRL and TRL: 4.2 to 4.5."""
FREE_NODES = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
FREE_FIELDS = ("annotation", "returns")


def is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_nodes(source: str) -> int:
    """Return the number of syntax nodes that count in a Python source text."""
    total = 0
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, FREE_NODES) or is_docstring(node):
            continue
        total += 1
        for name, value in ast.iter_fields(node):
            if name in FREE_FIELDS:
                continue
            children = value if isinstance(value, list) else [value]
            stack.extend(child for child in children if isinstance(child, ast.AST))
    return total


def folder_of(path: Path, folders: list[str]) -> str | None:
    """Return the longest budgeted folder that contains the file."""
    inside = [folder for folder in folders if path.is_relative_to(folder)]
    return max(inside, key=len, default=None)


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["asyncrl"][
        "budget"
    ]
    tracked = subprocess.check_output(
        ["git", "ls-files", "*.py"], cwd=ROOT, text=True
    ).split()
    nodes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in tracked:
        folder = folder_of(Path(name), list(budgets))
        if folder is not None and (ROOT / name).exists():
            nodes[folder] += count_nodes((ROOT / name).read_text(encoding="utf-8"))
            files[folder] += 1
    sizes = {folder: round(nodes[folder] / NODES_PER_LINE) for folder in budgets}
    for folder, budget in budgets.items():
        mark = "" if sizes[folder] <= budget else "  over its budget"
        print(
            f"{folder:26} {files[folder]:4} files {sizes[folder]:6} of {budget:6} standard lines{mark}"
        )
    over = [folder for folder, budget in budgets.items() if sizes[folder] > budget]
    if over:
        print(
            f"Way out: delete code in {', '.join(over)}, or raise the budget in pyproject.toml."
        )
    product = [name for name in sizes if name.startswith(("asyncrl", "servers"))]
    # The server of an extension may run in another environment.
    own = ROOT / "asyncrl/extensions"
    added = [name for name in product if (own / Path(name).name).is_dir()]
    print(f"core: {sum(sizes[name] for name in product if name not in added)}")
    print(f"extensions: {sum(sizes[name] for name in added)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
