"""Gives the package's README absolute links, which work on a package index. All else is
in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/asyncrl/asyncrl"
RELATIVE = r"(?!https?:|#|data:)"


def absolute(text: str) -> str:
    """Return the text of README.md with absolute addresses of pictures and pages."""
    raw, page = f"{REPOSITORY}/raw/main/", f"{REPOSITORY}/blob/main/"
    text = re.sub(rf'((?:src|srcset)="|!\[[^\]]*\]\(){RELATIVE}', rf"\g<1>{raw}", text)
    return re.sub(rf'(href="|\]\(){RELATIVE}', rf"\g<1>{page}", text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=absolute(readme), long_description_content_type="text/markdown"
    )
