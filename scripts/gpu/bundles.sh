#!/usr/bin/env bash
# Packs what a GPU machine without a network lacks into FOLDER/base, trl, fa3 and vllm.tar.xz; unpack.sh unpacks them.
#
#   bash scripts/gpu/bundles.sh FOLDER [base trl fa3 vllm]
#
# For Python 3.12, torch 2.11 with CUDA 13, transformers 5.17 and a Hopper card (sm_90). Each file may have to fit a small
# upload: code of other architectures is blanked (fatbin.py), so vLLM's 327 MB become 37. Takes minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- base trl fa3 vllm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

tags=()
for minor in 5 12 17 24 27 28 31 34 35; do
    tags+=(--platform "manylinux_2_${minor}_x86_64")
done
tags+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
install() { # FOLDER PACKAGES: without their dependencies
    python3 -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none "${tags[@]}" --target "$1" "${@:2}"
    rm -rf "$1/bin"
}
pack() { # NAME: in blocks, which the other side unpacks in parallel
    tar -C "$1" -cf - . | xz -6 -T0 --block-size=32MiB >"$out/$1.tar.xz"
    ls -l "$out/$1.tar.xz"
}

make_base() {
    install base pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 annotated-doc==0.0.7 \
        typing-inspection==0.4.5 typing-extensions==4.16.0 fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 \
        httptools==0.9.0 llguidance==1.7.6 opentelemetry-api==1.45.2 aiohttp==3.14.5 aiosignal==1.4.0 \
        multidict==7.2.1 yarl==1.25.1 propcache==0.5.4 frozenlist==1.8.0 xxhash==4.1.0 uvloop==0.23.0 fastapi-swagger==0.4.64 \
        openai==2.54.0 distro==1.9.0 jiter==0.19.0 sniffio==1.3.1
}

make_trl() {
    install trl trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
}

# The package index has no FlashAttention 3 with a backward pass for torch 2.11 (tokenspeed-fa3 lacks it). xformers 0.0.34
# carries one, built on torch's stable ABI for CUDA 12.
make_fa3() {
    install xformers xformers==0.0.34
    install cuda nvidia-cuda-runtime-cu12==12.8.90
    mkdir -p fa3/flash_attn_3
    python3 "$here/fatbin.py" xformers/xformers/flash_attn_3/_C.so fa3/flash_attn_3/_C.so 90
    cp cuda/nvidia/cuda_runtime/lib/libcudart.so.12 fa3/flash_attn_3/
    touch fa3/flash_attn_3/__init__.py
    cat >fa3/flash_attn_interface.py <<'END'
"""Register flash_attn_3::fwd and bwd, from the library that xformers 0.0.34 ships."""

import ctypes
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "flash_attn_3"
ctypes.CDLL(str(FOLDER / "libcudart.so.12"))  # found under its name when the next library asks for it
torch.ops.load_library(str(FOLDER / "_C.so"))
END
}

# vLLM for dense models with FlashAttention 3: without FlashAttention 2, DeepGEMM, kernels of other cards and architectures,
# and code for experts. FlashInfer is missing, too: set VLLM_USE_FLASHINFER_SAMPLER=0. It holds the packages that its server
# imports and that base and the machine lack.
make_vllm() {
    install vllm vllm==0.32.0 apache-tvm-ffi==0.1.15.post2 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 \
        compressed-tensors==0.17.0 email-validator==2.4.0 fastapi==0.136.3 ijson==3.6.0 jmespath==1.1.0 \
        jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2 loguru==0.7.3 \
        model-hosting-container-standards==0.1.16 msgspec==0.22.0 opentelemetry-sdk==1.45.2 \
        opentelemetry-semantic-conventions==0.66b2 opentelemetry-semantic-conventions-ai==0.5.1 oss-harmony==0.0.11 \
        partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 \
        pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 python-dotenv==1.2.4 python-json-logger==4.2.0 \
        python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 \
        interegular==0.3.3 lm-format-enforcer==0.11.3 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.8
    cd vllm/vllm
    rm -rf vllm_flash_attn/_vllm_fa2* vllm-rs _qutlass* _deepselect* _flashkda* _flashmla*.so third_party/deep_gemm \
        third_party/fmha_sm100
    find . \( -path '*/static/*' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.h' -o -name '*.jpg' \) -type f -delete
    python3 "$here/fatbin.py" _C_stable_libtorch.abi3.so "$work/_C" 90 --ptx
    mv "$work/_C" _C_stable_libtorch.abi3.so
    python3 "$here/fatbin.py" _moe_C_stable_libtorch.abi3.so "$work/_C" 90
    mv "$work/_C" _moe_C_stable_libtorch.abi3.so
    cd "$work"
}

for name in "$@"; do
    "make_$name"
    pack "$name"
done
