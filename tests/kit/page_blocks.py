"""Blocks of code on pages."""

from __future__ import annotations

import re
from pathlib import Path


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(
        r"^ *```(\w*)\n(.*?)^ *```$",
        page.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    )
    return [text for language, text in found if language in languages]
