"""Write docs/configuration.md, its pages of sections and configs/asyncrl.schema.json
from the config models, docs/metrics.md from observe/metrics.csv, and docs/tinker-requests.md
from the extension's requests.csv.

python scripts/reference_pages.py            write them
python scripts/reference_pages.py --check    exit with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from asyncrl.config.load import BASIC, Key, schema_text, sections
from asyncrl.observe.metrics import GAUGES, KINDS

ROOT = Path(__file__).resolve().parent.parent

CONFIG_HEAD = """\
# Configuration

{made}

A run is one YAML file of these sections. On the command line, `key=value` after the file replaces single settings:

```bash
asyncrl run configs/quickstart.yaml buffer.max_staleness=2 rollout.timeout_s=none
```

Bold keys are basic. The first three to change are `trainer.num_groups`, `buffer.max_staleness` and `placement`. `none` means off.
An unknown key is an error that names the closest key. `asyncrl check CONFIG` validates a config without starting anything.
`asyncrl keys` describes the basic settings, `asyncrl keys --all` every one. The run directory keeps the resolved config as `config.yaml`.

<div class="key-filter"></div>

| section | keys |
| --- | --- |
"""
MADE = (
    "<!-- Made by scripts/reference_pages.py from asyncrl/config/:"
    " change the docstrings there, then run the script. -->"
)
TOP_LEVEL = "top_level"
"""The page of settings outside any section."""

METRICS_HEAD = """\
# Metrics

<!-- Made by scripts/reference_pages.py from asyncrl/observe/metrics.csv: change it there. -->

Each step is a line of `metrics.jsonl`, and each metric a scalar in [trackers](monitoring.md). Each evaluation
is a line of `eval.jsonl`. A name ending in `*` covers all names with that beginning.

The journal gives the exact counts of tokens and groups. Other counts of the whole run are of the work that was
done: after a kill, repeated work counts again, and counts since the last step are lost.

<div class="key-filter"></div>
"""

TINKER_REQUESTS = ROOT / "asyncrl/extensions/tinker/requests.csv"
TINKER_HEAD = """\
# Requests of the Tinker API

<!-- Made by scripts/reference_pages.py from asyncrl/extensions/tinker/requests.csv: change it there. -->

Each request of package `tinker` and its state in [`asyncrl serve tinker`](tinker.md). A refused request gets a sentence. Routes that list, publish, expire and delete runs
and checkpoints, and `healthz` and `get_server_capabilities`, are supported, too.

request|state|note
---|---|---
"""


def config_pages() -> dict[str, str]:
    """Return docs/configuration.md, the list of all keys, and a page per section."""
    listed = [CONFIG_HEAD.format(made=MADE)]
    pages = dict[str, str]()
    for name, about, keys in sections():
        page = f"configuration/{name or TOP_LEVEL}.md"
        title = f"`{name}`" if name else "Top level"
        links = [f"[{_name(key)}]({page}#{key.name})" for key in keys]
        listed.append(f"| [{title}]({page}) | {_cell(about)}<br>{' '.join(links)} |\n")
        head = f"# {title}\n\n{MADE}\n\n{about} [All sections](../configuration.md)."
        table = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        rows = "".join(map(_row, keys))
        pages[f"docs/{page}"] = (
            f'{head}\n\n<div class="key-filter"></div>\n\n{table}{rows}'
        )
    return {"docs/configuration.md": "".join(listed), **pages}


def _name(key: Key) -> str:
    return f"**`{key.name}`**" if key.name in BASIC else f"`{key.name}`"


def _row(key: Key) -> str:
    default = (
        key.default if key.default in ("must be given", "") else f"`{key.default}`"
    )
    anchor = f'<a id="{key.name}"></a>'
    cells = [f"{anchor}{_name(key)}", key.type, default, key.meaning]
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """Return docs/metrics.md."""
    parts = [METRICS_HEAD]
    for kind, about in KINDS.items():
        parts.append(f"\n## {about}\n\nname|unit|meaning\n---|---|---\n")
        parts += [
            f"`{name}`|{gauge.unit}|{gauge.meaning}\n"
            for name, gauge in GAUGES.items()
            if gauge.kind == kind
        ]
    return "".join(parts)


def tinker_page() -> dict[str, str]:
    """Return docs/tinker-requests.md, nothing without the extension."""
    if not TINKER_REQUESTS.exists():
        return {}
    with TINKER_REQUESTS.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    lines = [f"`{name}`|{state}|{note}\n" for name, state, note in rows]
    return {"docs/tinker-requests.md": TINKER_HEAD + "".join(lines)}


def main() -> int:
    """Return 1 if a file is out of date."""
    parser = argparse.ArgumentParser(
        description="Write docs/configuration*, the schema, and other pages of reference."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only compare; exit with 1 if one is out of date",
    )
    is_check = parser.parse_args().check
    texts = {
        **config_pages(),
        "configs/asyncrl.schema.json": schema_text(),
        "docs/metrics.md": metrics_page(),
        **tinker_page(),
    }
    for path in (ROOT / "docs/configuration").glob("*.md"):
        if f"docs/configuration/{path.name}" not in texts and not is_check:
            path.unlink()  # a section that was removed
    for name, text in texts.items():
        path = ROOT / name
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(
                f"{path} is out of date.\n  Way out: python scripts/reference_pages.py",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
