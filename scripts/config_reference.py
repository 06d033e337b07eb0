"""Write docs/configuration.md and configs/asyncrl.schema.json from the config models.

python scripts/config_reference.py            write both
python scripts/config_reference.py --check    exit with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.config.load import BASIC, Key, schema_text, sections

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "configs" / "asyncrl.schema.json"

HEAD = """\
# Configuration

<!-- Made by scripts/config_reference.py from asyncrl/config/. Change the docstrings there, then run the script. -->

A run is one YAML file of these sections. On the command line, `key=value` after the file replaces single settings:

```bash
asyncrl run configs/quickstart.yaml buffer.max_staleness=2 rollout.timeout_s=none
```

Bold keys are basic. The first three to change are `trainer.num_groups`, `buffer.max_staleness` and `placement`. `none` means off.
An unknown key is an error that names the closest key. `asyncrl check CONFIG` validates a config without starting anything.
`asyncrl keys` describes the basic settings, `asyncrl keys --all` every one. The run directory keeps the resolved config as `config.yaml`.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, about, keys in sections():
        title = f"`{name}`" if name else "Top level"
        parts.append(f"\n## {title}\n\n{_cell(about)}\n\n| key | type | default | meaning |\n")
        parts += ["| --- | --- | --- | --- |\n", *map(_row, keys)]
    return "".join(parts)


def _row(key: Key) -> str:
    default = key.default if key.default in ("must be given", "") else f"`{key.default}`"
    name = f"**`{key.name}`**" if key.name in BASIC else f"`{key.name}`"
    return f"| {name} | {_cell(key.type)} | {_cell(default)} | {_cell(key.meaning)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a file is out of date."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the config models.")
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if out of date")
    options = parser.parse_args(arguments)
    for path, text in ((PAGE, page()), (SCHEMA, schema_text())):
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date.\n  Way out: python scripts/config_reference.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
