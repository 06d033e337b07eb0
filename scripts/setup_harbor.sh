#!/usr/bin/env bash
# Installs Harbor (https://harborframework.com), as it comes, into .venv-harbor (VENV_HARBOR=DIR for another place), for
# examples/harbor/trial.py. It needs Python 3.12: PYTHON=python3.12 scripts/setup_harbor.sh. About 320 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV_HARBOR:-.venv-harbor}
python=${PYTHON:-python3.12}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "setup-harbor: Harbor needs Python 3.12 or newer. Way out: PYTHON=.../python3.12 scripts/setup_harbor.sh" >&2
    exit 2
}
[ -x "$venv/bin/pip" ] || "$python" -m venv --clear "$venv"
echo '*' >"$venv/.gitignore"
"$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-compile 'harbor>=0.26,<0.27'
