#!/usr/bin/env bash
# The measurements that one GPU still owes, in calls of at most 600 s on a machine without a network. All four fit into
# 30 minutes, in the order vllm, trainer, shared, engine:
#
#   bash scripts/gpu/calls.sh NAME BUNDLES OUT [--tiny]     # from the root of the repository; NAME: see below
#
# BUNDLES holds what scripts/gpu/bundles.sh made. Each row has its own limit, so a broken row costs no other row.
# Results are written as they come. The exit code is 1 if a row failed.
# On one H100 a start took 30 s, and a transfer of 60 MB 4 to 15 s. The first import of vLLM takes 17 s, its start 75 to
# 115 s; a row that is slow on the CPU, such as a compilation, runs well in the background of such a start.
set -uo pipefail
name=$1
out=$3
tiny=(${4:+"$4"})
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}
site=$(bash scripts/gpu/unpack.sh "$2" "${SITE:-/tmp/site}") || exit 1
export PYTHONPATH=$site
# A virtual machine may show little memory until programs use it, and a run is refused by what is shown: use some, for 8 s.
[ ${#tiny[@]} -gt 0 ] || python3 - <<'END' || true
import time, psutil
held, end_s = [], time.monotonic() + 8
available = shown = psutil.virtual_memory().available
while sum(map(len, held)) + available < 32 * 2**30 and time.monotonic() < end_s:
    held.append(b"1" * min(2**29, available // 8))
    time.sleep(0.05)
    available = psutil.virtual_memory().available
held.clear()
print(f"host memory: {shown / 2**30:.1f} GiB shown, {psutil.virtual_memory().available / 2**30:.1f} after use")
END
echo "== $SECONDS s: unpacked"

failed=0
row() { # LIMIT_S PART NAME
    timeout --signal=INT --kill-after=5 $(($1 + 5)) python3 scripts/gpu_acceptance.py --part "$2" --row "$3" --budget-s "$1" \
        --out "$out" "${tiny[@]}" || failed=1
    echo "== $SECONDS s: $3"
}

case $name in
shared) # bundles base, fa3: async and colocated runs of one device, a kill
    row 265 5 one-device
    row 150 5 one-device-kill
    ;;
trainer) # base, fa3, trl: repeated steps, TRL's step, long sequences
    row 150 3 deterministic
    row 130 3 trl
    row 120 3 0.6B-65k
    ;;
vllm) # base, vllm: whole runs with vLLM, colocated and at once, and an agent
    row 180 5 vllm-colocated
    row 170 5 vllm-async
    row 210 5 vllm-agent
    ;;
engine) # base: both decode steps through the server, at more rows
    row 150 5 decode
    ;;
*)
    echo "calls: no call $name. Way out: shared, trainer, vllm or engine" >&2
    exit 2
    ;;
esac
exit $failed
