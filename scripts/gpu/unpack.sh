#!/usr/bin/env bash
# Unpacks what bundles.sh made, on a GPU machine without a network, from the root of the repository:
#
#   export PYTHONPATH=$(bash scripts/gpu/unpack.sh FOLDER SITE)
#
# FOLDER holds the bundles, of which any may be missing. base and fa3 go to SITE, a folder outside the repository.
# vllm becomes .venv-vllm, a Python of its own that also finds the packages of `python3` and of SITE, in this order.
set -euo pipefail
bundles=$1
site=$2
here=$PWD

unpack() { # BUNDLE FOLDER
    [ -e "$bundles/$1.tar.xz" ] || return 0
    if command -v xz >/dev/null; then
        xz --decompress --stdout --threads=0 "$bundles/$1.tar.xz" | tar -xf - -C "$2"
    else
        python3 -m tarfile -e "$bundles/$1.tar.xz" "$2"
    fi
}

mkdir -p "$site"
unpack base "$site" &
base=$!
unpack fa3 "$site" &
fa3=$!
if [ -e "$bundles/vllm.tar.xz" ]; then
    python3 -m venv --without-pip .venv-vllm
    packages=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # python3 may itself be that of a virtual environment, whose packages a new environment does not see.
    image=$(python3 -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])')
    printf '%s\n' "$site" "$image" >"$packages/image.pth"
    unpack vllm "$packages"
fi
wait $base $fa3
echo "$site"
