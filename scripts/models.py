"""Write docs/models.csv: how tiny random models of all types are trained and served, or
of the types that are named. About an hour on two cores.

python scripts/models.py [TYPE...]
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [f"{ROOT}/tests/kit", f"{ROOT}/benchmarks"]

from model_served import forking, measure_vllm  # noqa: E402
from model_table import write_table  # noqa: E402
from model_zoo import TYPES  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, forking(Path(folder)) as forks:
        write_table(sys.argv[1:] or sorted(TYPES), partial(measure_vllm, forks=forks))


if __name__ == "__main__":
    main()
