"""mkdocs hook: keep links out of docs/ working on the site, name the version, and let
long names in tables break at their dots and underscores only.

A linked file of the repository becomes a page with its text, or a copy if it is not
text; a linked folder becomes a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
COPIED = {".png", ".svg", ".csv", ".ipynb"}
CELL_NAME = re.compile(r"(?<=<code>)[\w./*]+(?=</code>)")
VERSION = re.compile(r'__version__ = "(.+)"')


def on_config(config: Any) -> Any:
    source = (ROOT / "asyncrl/__init__.py").read_text(encoding="utf-8")
    (version,) = VERSION.findall(source)
    config.site_name = f"asyncrl {version}"
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    # In the finished page: the search index, which is made before, has whole names.
    rows = re.split(r"(<td.*?</td>)", output, flags=re.DOTALL)
    rows[1::2] = [CELL_NAME.sub(with_breaks, cell) for cell in rows[1::2]]
    return "".join(rows)


def with_breaks(name: re.Match[str]) -> str:
    return re.sub(r"(?<=[._/])(?=\w)", "<wbr>", name[0])


def on_files(files: Files, config: Any) -> Files:
    pages = [
        (f"docs/{file.src_uri}", file.content_string)
        for file in files.documentation_pages()
    ]
    while pages:
        path, text = pages.pop()
        for link in LINK.findall(text):
            target = resolved(path, link)
            uri = uri_of(target)
            if not (ROOT / target).exists() or files.get_file_from_path(uri):
                continue  # mkdocs warns of a dead one
            if not uri.endswith(".md"):
                files.append(
                    File.generated(config, uri, abs_src_path=str(ROOT / target))
                )
                continue
            made = page_of(target)
            files.append(
                File.generated(
                    config, uri, content=made, inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
            if has_links(uri):
                pages.append((path_of(uri), made))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri

    def on_the_site(match: re.Match[str]) -> str:
        target = resolved(path_of(uri), match[1])
        there = (ROOT / target).exists()
        return (
            posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")
            if there
            else match[1]
        )

    return LINK.sub(on_the_site, markdown) if has_links(uri) else markdown


def resolved(path: str, link: str) -> str:
    """Path in the repository of what a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def uri_of(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{FOLDER}/{path}/index.md"
    return (
        f"{FOLDER}/{path}"
        if Path(path).suffix in (".md", *COPIED)
        else f"{FOLDER}/{path}.md"
    )


def path_of(uri: str) -> str:
    return (
        uri.removeprefix(f"{FOLDER}/")
        if uri.startswith(f"{FOLDER}/")
        else f"docs/{uri}"
    )


def has_links(uri: str) -> bool:
    return (
        not uri.startswith(f"{FOLDER}/")
        or (ROOT / path_of(uri)).exists()
        or uri.endswith("/index.md")
    )


def page_of(path: str) -> str:
    """Return the page of a file or folder."""
    file = ROOT / path
    if file.is_dir():
        inside = sorted(
            each.name for each in file.iterdir() if each.name[0] not in "._"
        )
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    fence = "~" * 8
    language = file.suffix.removeprefix(".") or "text"
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{fence} {language}\n{text}\n{fence}\n"
