"""Write docs/configuration.md and configs/asyncrl.schema.json from the config models,
and docs/metrics.md from observe/metrics.csv.

python scripts/reference_pages.py            write them
python scripts/reference_pages.py --check    exit with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.config.load import BASIC, Key, schema_text, sections
from asyncrl.observe.metrics import GAUGES, KINDS

ROOT = Path(__file__).resolve().parent.parent

CONFIG_HEAD = """\
# Configuration

<!-- Made by scripts/reference_pages.py from asyncrl/config/. Change the docstrings there, then run the script. -->

A run is one YAML file of these sections. On the command line, `key=value` after the file replaces single settings:

```bash
asyncrl run configs/quickstart.yaml buffer.max_staleness=2 rollout.timeout_s=none
```

Bold keys are basic. The first three to change are `trainer.num_groups`, `buffer.max_staleness` and `placement`. `none` means off.
An unknown key is an error that names the closest key. `asyncrl check CONFIG` validates a config without starting anything.
`asyncrl keys` describes the basic settings, `asyncrl keys --all` every one. The run directory keeps the resolved config as `config.yaml`.
"""

METRICS_HEAD = """\
# Metrics

<!-- Made by scripts/reference_pages.py from asyncrl/observe/metrics.csv: change it there. -->

Each step is a line of `metrics.jsonl`, and each metric a scalar in [trackers](monitoring.md). Each evaluation
is a line of `eval.jsonl`. A name ending in `*` covers all names with that beginning.
"""


def config_page() -> str:
    """Return docs/configuration.md."""
    parts = [CONFIG_HEAD]
    for name, about, keys in sections():
        title = f"`{name}`" if name else "Top level"
        parts.append(
            f"\n## {title}\n\n{_cell(about)}\n\n| key | type | default | meaning |\n"
        )
        parts += ["| --- | --- | --- | --- |\n", *map(_row, keys)]
    return "".join(parts)


def _row(key: Key) -> str:
    default = (
        key.default if key.default in ("must be given", "") else f"`{key.default}`"
    )
    name = f"**`{key.name}`**" if key.name in BASIC else f"`{key.name}`"
    return f"| {name} | {_cell(key.type)} | {_cell(default)} | {_cell(key.meaning)} |\n"


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


def main() -> int:
    """Return 1 if a file is out of date."""
    parser = argparse.ArgumentParser(
        description="Write docs/configuration.md, its schema, and docs/metrics.md."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only compare; exit with 1 if one is out of date",
    )
    is_check = parser.parse_args().check
    texts = {
        "docs/configuration.md": config_page(),
        "configs/asyncrl.schema.json": schema_text(),
        "docs/metrics.md": metrics_page(),
    }
    for name, text in texts.items():
        path = ROOT / name
        if not is_check:
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
