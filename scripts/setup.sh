#!/usr/bin/env bash
# Installs asyncrl and its test extras into .venv (VENV=DIR for another place). Seconds when nothing changed.
# On a Linux machine without an NVIDIA GPU it takes care to install torch's CPU build: the CUDA build would pull
# gigabytes of libraries that nothing here could use.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
python=${PYTHON:-python3}
torch='torch>=2.11,<2.14'

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" --version) is too old; asyncrl needs Python 3.11 or newer. Way out: PYTHON=python3.11 make setup" >&2
    exit 2
}
stamp=$(cat pyproject.toml scripts/setup.sh | cksum; "$python" --version; pwd)
if [ -x "$venv/bin/asyncrl" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
has_torch() { "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; }

# pip reads the user's pip configuration (find-links, indexes); uv does not, so pip is asked first for a CPU build.
pip_offers_cpu_torch() {
    pip install --quiet --dry-run --no-deps --report - "$torch" 2>/dev/null |
        "$venv/bin/python" -c 'import json, sys; i = json.load(sys.stdin)["install"]; sys.exit(not i or "+cpu" not in i[0]["metadata"]["version"])' 2>/dev/null
}
install_cpu_torch() {
    if pip_offers_cpu_torch; then
        echo "setup: installing torch (CPU build)"
        pip install --no-compile --quiet "$torch"
    else
        local uv
        uv=$(command -v uv || true)
        [ -n "$uv" ] || { pip install --quiet uv; uv=$venv/bin/uv; }
        echo "setup: installing torch (CPU build, through uv)"
        "$uv" pip install --quiet --python "$venv/bin/python" --torch-backend=cpu "$torch"
    fi
}
if [ "$(uname -s)" = Linux ] && ! has_gpu && ! has_torch; then
    install_cpu_torch
fi

echo "setup: installing asyncrl into $venv"
if command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" -e '.[dev]'
else
    pip install --quiet -e '.[dev]'
fi
echo "$stamp" >"$venv/.setup-stamp"
echo "setup: done in $(($(date +%s) - started)) s"
