#!/usr/bin/env bash
# Installs Harbor (https://harborframework.com), as it comes, into .venv-harbor (VENV_HARBOR=DIR for another place), with what a worker of
# asyncrl needs, for examples/harbor/trial.py. mini-swe-agent, which Harbor runs inside the sandbox, has a venv in .venv-harbor/tools.
# terminus-2 needs tmux: apt-get install tmux bubblewrap. Harbor needs Python 3.12: PYTHON=python3.12 scripts/setup_harbor.sh. About 650 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV_HARBOR:-.venv-harbor}
python=${PYTHON:-python3.12}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "setup-harbor: Harbor needs Python 3.12 or newer. Way out: PYTHON=.../python3.12 scripts/setup_harbor.sh" >&2
    exit 2
}
stamp=$(cksum <scripts/setup_harbor.sh; "$python" --version)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

rm -f "$venv/.setup-stamp" # an interrupted installation must not count as complete
for each in "$venv" "$venv/tools"; do
    [ -x "$each/bin/pip" ] || "$python" -m venv --clear "$each"
done
echo '*' >"$venv/.gitignore"
install() { # FOLDER [OPTION] PACKAGE...
    "$1/bin/python" -m pip --disable-pip-version-check install -qq --no-compile "${@:2}"
}
install "$venv" -e . 'harbor>=0.26,<0.27' 'openai>=3,<4' httpx
# As Harbor installs it, without `datasets`, which mini-swe-agent needs for its benchmarks.
install "$venv/tools" 'litellm[mcp]>=1.110,<2' orjson fastapi prompt_toolkit platformdirs textual typer tenacity python-dotenv rich pyyaml jinja2
install "$venv/tools" --no-deps 'mini-swe-agent>=2.4,<3'
# litellm takes 12 s of CPU at each start in which it is compiled again: a sandbox cannot write there.
"$venv/bin/python" -m compileall -q "$venv/lib" "$venv/tools/lib" >/dev/null || true
echo "$stamp" >"$venv/.setup-stamp"
