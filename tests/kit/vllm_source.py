"""Read names and signatures from the source of an unpacked vLLM, without importing it:
a CUDA wheel cannot be imported without a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.stmt | ast.alias


@dataclass(frozen=True)
class VllmSource:
    """`folder` contains the package vllm."""

    folder: Path

    @cache  # noqa: B019  # a few sources live as long as the tests
    def module(self, name: str) -> ast.Module | None:
        path = self.folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def signature(self, module: str, path: str) -> str | None:
        """Return the parameters of a function, or of a class's constructor, "" for a
        value, None if it is missing. Imports and base classes are followed.
        """
        place = self._find(module, path)
        if place is None:
            return None
        module, node = place
        if isinstance(node, ast.ClassDef):
            own = [
                _names_of(statement)[0]
                for statement in node.body
                if isinstance(statement, ast.AnnAssign)
            ]
            init = self._member(module, node, "__init__")
            if init is None:
                return ", ".join(own)
            node = init[1]
            return (
                ", ".join(_parameters(node)[1:])
                if isinstance(node, ast.FunctionDef)
                else ""
            )
        return (
            ", ".join(_parameters(node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            else ""
        )

    def _find(self, module: str, path: str) -> tuple[str, Definition] | None:
        name, _, rest = path.partition(".")
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        found = self._imported(module, node, ast.alias(name), path)
                        if found is not None:
                            return found
                    elif (alias.asname or alias.name) == name:
                        return self._imported(module, node, alias, path)
            elif name in _names_of(node):
                if not rest or not isinstance(node, ast.ClassDef):
                    return module, node
                return self._member(module, node, rest)
        # A submodule that its package does not import.
        return (module, ast.Pass()) if self.module(f"{module}.{name}") else None

    def _imported(
        self, module: str, node: ast.ImportFrom, alias: ast.alias, path: str
    ) -> tuple[str, Definition] | None:
        source = node.module or ""
        if node.level:
            is_package = self.folder.joinpath(
                *module.split("."), "__init__.py"
            ).is_file()
            parts = module.split(".")
            parent = parts[: len(parts) - node.level + is_package]
            source = ".".join([*parent, source]) if source else ".".join(parent)
        if source.partition(".")[0] != "vllm":
            return module, node
        _, _, rest = path.partition(".")
        return self._find(source, f"{alias.name}.{rest}" if rest else alias.name)

    def _member(
        self, module: str, owner: ast.ClassDef, name: str
    ) -> tuple[str, Definition] | None:
        for node in _statements(owner.body):
            if name in _names_of(node):
                return module, node
        # An attribute that a method sets.
        for node in ast.walk(owner):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node) == f"self.{name}":
                return module, ast.Pass()
        for base in owner.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                place = self._find(module, base.id)
                if place is not None and isinstance(place[1], ast.ClassDef):
                    found = self._member(place[0], place[1], name)
                    if found is not None:
                        return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, also those under if, try and with."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])
