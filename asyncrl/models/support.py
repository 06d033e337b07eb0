"""Rows of docs/models.csv: how models of each type are trained and served, as tests
measure it. Imports no torch.
"""

from __future__ import annotations

import csv
from importlib.resources import files

CELLS = ("trainer", "embedded engine", "vllm on a CPU")


def find_support(model_type: str) -> list[dict[str, str]]:
    """Return the rows of a type and of its variants; none if it is not tested."""
    text = (files("asyncrl.models") / "support.csv").read_text(encoding="utf-8")
    return [
        row for row in csv.DictReader(text.splitlines()) if row["type"] == model_type
    ]


def support_lines(rows: list[dict[str, str]]) -> list[str]:
    """Return a line for the type, and one for each variant with other cells."""
    names = dict[str, str]()
    for row in rows:
        text = ", ".join(f"{cell}: {row[cell]}" for cell in CELLS)
        names.setdefault(text, f"{row['type']} {row['variant']}".rstrip())
    return [f"model: {name}: {text}" for text, name in names.items()]
