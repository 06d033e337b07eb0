"""Write docs/metrics.md from observe/metrics.py.

python scripts/metrics_reference.py            write the page
python scripts/metrics_reference.py --check    exit with 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.observe.metrics import GAUGES, KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """\
# Metrics

<!-- Made by scripts/metrics_reference.py from asyncrl/observe/metrics.py: change it there. -->

Each step is a line of `metrics.jsonl`, and each metric a scalar in [trackers](monitoring.md). Each evaluation
is a line of `eval.jsonl`. A name ending in `*` covers all names with that beginning.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for kind, about in KINDS.items():
        parts.append(f"\n## {about}\n\n| name | unit | meaning |\n| --- | --- | --- |\n")
        parts += [
            f"| `{name}` | {gauge.unit} | {gauge.meaning} |\n"
            for name, gauge in GAUGES.items()
            if gauge.kind == kind
        ]
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if the page is out of date."""
    parser = argparse.ArgumentParser(description="Write docs/metrics.md from the declared metrics.")
    parser.add_argument("--check", action="store_true", help="only compare; exit with 1 if it is out of date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date.\n  Way out: python scripts/metrics_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
