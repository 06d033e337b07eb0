#!/usr/bin/env bash
# The measurements that one GPU still owes, in calls of at most 240 s on a machine without a network:
#
#   bash scripts/gpu/calls.sh NAME BUNDLES OUT [--tiny]     # from the root of the repository; NAME: see below
#
# BUNDLES holds what scripts/gpu/bundles.sh made. Each row has its own limit, so a broken row costs no other row.
# On one H100 a start took 30 s, and a transfer of 60 MB 4 to 15 s. The first import of vLLM takes 17 s, its start 75 to
# 115 s; a row that is slow on the CPU, such as a compilation, runs well in the background of such a start.
set -uo pipefail
name=$1
out=$3
tiny=(${4:+"$4"})
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}
site=$(bash scripts/gpu/unpack.sh "$2" "${SITE:-/tmp/site}") || exit 1
export PYTHONPATH=$site
echo "== $SECONDS s: unpacked"

row() { # LIMIT_S PART NAME
    timeout --signal=INT $(($1 + 10)) python3 scripts/gpu_acceptance.py --part "$2" --row "$3" --budget-s "$1" --out "$out" "${tiny[@]}"
    echo "== $SECONDS s: $3"
}

case $name in
shared) # bundles base, fa3: MPS against time slices, a kill under MPS
    row 130 5 one-device
    row 90 5 one-device-kill
    ;;
trainer) # base, fa3, trl: repeated steps, long sequences, TRL's step, float32
    row 110 3 deterministic
    row 60 3 trl
    row 70 3 0.6B-65k
    ;;
vllm) # base, vllm: whole runs with vLLM, colocated and at once, and an agent
    row 110 5 vllm-colocated
    row 60 5 vllm-async
    row 60 5 vllm-agent
    ;;
engine) # base: both decode steps through the server, at more rows
    row 100 5 decode
    ;;
*)
    echo "calls: no call $name. Way out: shared, trainer, vllm or engine" >&2
    exit 2
    ;;
esac
