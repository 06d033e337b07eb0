"""Write docs/models.csv: how tiny random models of all types are trained and served.
Minutes on a core.

python scripts/models.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [f"{ROOT}/tests", f"{ROOT}/benchmarks"]

from model_table import write_table  # noqa: E402

write_table()
