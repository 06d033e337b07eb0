#!/usr/bin/env bash
# Unpacks what bundles.sh made, on a GPU machine without a network, from the root of the repository:
#
#   export PYTHONPATH=$(bash scripts/gpu/unpack.sh FOLDER SITE)
#
# FOLDER holds the bundles; any of them may be missing. base, trl and fa3 go to SITE, a folder outside the repository.
# vllm becomes .venv-vllm, a separate Python that also finds the packages of SITE and of `python3`, in this order.
set -euo pipefail
bundles=$1
site=$2

unpack() { # BUNDLE FOLDER
    [ -e "$bundles/$1.tar.xz" ] || return 0
    if command -v xz >/dev/null; then
        xz --decompress --stdout --threads=0 "$bundles/$1.tar.xz" | tar -xf - -C "$2"
    else
        python3 -m tarfile --filter data -e "$bundles/$1.tar.xz" "$2"
    fi
}

mkdir -p "$site"
started=()
for name in base trl fa3; do
    unpack "$name" "$site" &
    started+=($!)
done
if [ -e "$bundles/vllm.tar.xz" ]; then
    python3 -m venv --without-pip .venv-vllm
    packages=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # python3 may itself belong to a virtual environment, whose packages a new environment does not see.
    image=$(python3 -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])')
    # The bundle has no FlashInfer, which vLLM's sampler imports by default. Python runs a line that begins with import.
    sampler='import os; os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")'
    printf '%s\n' "$site" "$image" "$sampler" >"$packages/image.pth"
    unpack vllm "$packages"
fi
for process in "${started[@]}"; do
    wait "$process"
done
# In parallel: the first import of vLLM then takes 9 s of CPU less, in each process where Python may not write bytecode.
python3 -m compileall -q -j 0 "$site" ${packages:+"$packages"} >/dev/null || true # a template of a package may be no Python
echo "$site"
