#!/usr/bin/env bash
# Installs asyncrl with an extra into .venv: scripts/setup.sh [train|test|dev], by default dev. VENV=DIR: another folder.
# test has all of train, and dev all of test, so it does nothing where the same or a larger extra is installed already.
# It writes the bytecode of what a run imports: elsewhere pip leaves none, and where PYTHONDONTWRITEBYTECODE is set, as in many images,
# each process of each run would compile torch again.
# On Linux without an NVIDIA GPU it installs torch's CPU build: the CUDA build pulls in gigabytes that nothing here can use.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-dev}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
torch='torch>=2.11,<2.14'
declare -A levels=([train]=1 [test]=2 [dev]=3)

[ -n "${levels[$extra]:-}" ] || { echo "setup: no extra $extra. Way out: train, test or dev" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" --version) is too old; asyncrl needs Python 3.11 or newer. Way out: PYTHON=python3.11 make quickstart" >&2
    exit 2
}
stamp=$(cat pyproject.toml scripts/setup.sh | cksum; "$python" --version; pwd)
for installed in train test dev; do
    [ "${levels[$installed]}" -ge "${levels[$extra]}" ] || continue
    [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" != "$stamp $installed" ] || [ ! -x "$venv/bin/asyncrl" ] || exit 0
done

started=$(date +%s)
say() { echo "setup: $(($(date +%s) - started)) s: $*"; }
say "installing asyncrl[$extra] into $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
log=$venv/setup.log
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
has_torch() { "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; }

# The log of pip or uv, in a line every few seconds; while wheels are unpacked, which they do not log, the newest package.
progress() {
    local pid timer line newest num
    "$@" >"$log" 2>&1 & pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 8 & timer=$!
        wait -n "$pid" "$timer" || true
        kill "$timer" 2>/dev/null || { # the time is over, and pip still works
            # `true`: with pipefail, a program whose reader has enough would end this script
            line=$({ grep -v '^WARNING' "$log" || true; } | tail -n 1 | tr -s ' ' | cut -c 1-90)
            newest=$(ls -t "$packages" | grep '\.dist-info$' | head -n 1 || true)
            num=$(ls "$packages" | grep -c '\.dist-info$' || true)
            case $line in "" | Installing* | *uninstall*) line="unpacking, $num packages are in, the last is ${newest%.dist-info}" ;; esac
            say "$line"
        }
    done
    wait "$pid" || { cat "$log" >&2; exit 1; }
}

# pip reads the user's pip configuration (find-links, indexes); uv does not, so pip is asked first for a CPU build.
pip_offers_cpu_torch() {
    pip install --quiet --dry-run --no-deps --report - "$torch" 2>/dev/null |
        "$venv/bin/python" -c 'import json, sys; i = json.load(sys.stdin)["install"]; sys.exit(not i or "+cpu" not in i[0]["metadata"]["version"])' 2>/dev/null
}
install_cpu_torch() {
    local uv
    if command -v uv >/dev/null || ! pip_offers_cpu_torch; then # else pip takes that build when it installs asyncrl
        uv=$(command -v uv || true)
        [ -n "$uv" ] || { pip install --quiet --no-compile uv; uv=$venv/bin/uv; }
        say "installing torch (CPU build, through uv)"
        progress "$uv" pip install --python "$venv/bin/python" --torch-backend=cpu "$torch"
    fi
}

if [ "$(uname -s)" = Linux ] && ! has_gpu && ! has_torch; then
    install_cpu_torch
fi
if command -v uv >/dev/null; then
    progress uv pip install --python "$venv/bin/python" -e ".[$extra]"
else # not compiled: that takes minutes, and most is never imported
    progress "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --progress-bar off -e ".[$extra]"
fi
if [ "$extra" = dev ]; then # without its dependencies: some of them are for other models only
    progress "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --no-deps 'tinker-cookbook>=0.6'
fi
say "compiling what a run imports"
progress env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" scripts/import_run.py
echo "$stamp $extra" >"$venv/.setup-stamp"
say "done"
