#!/usr/bin/env bash
# Runs what docs/results/learning_curves.png shows: the quickstart task by the plain synchronous loop and by asyncrl at
# max_staleness 0, 1 and 4, three seeds each, one run after the other; then draws. About half an hour on 2 cores.
#   bash scripts/run_results.sh [RUNS_DIR] [SEEDS]
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-runs/results}
seeds=${2:-0 1 2}
python=.venv/bin/python
quiet=(observe.console=none observe.tensorboard=false)
mkdir -p "$runs"
for seed in $seeds; do
    for eta in 4 1 0; do
        out=$runs/max_staleness_$eta-seed$seed
        [ -e "$out" ] || .venv/bin/asyncrl run configs/quickstart.yaml "seed=$seed" "buffer.max_staleness=$eta" "${quiet[@]}" --run-dir "$out"
        echo "$out: done"
    done
    out=$runs/sync_reference-seed$seed
    [ -e "$out" ] || "$python" benchmarks/sync_run.py configs/quickstart.yaml "seed=$seed" --run-dir "$out" 2>/dev/null
done
"$python" scripts/learning_curves.py "$runs" --out docs/results
