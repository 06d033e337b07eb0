#!/usr/bin/env bash
# Installs agent frameworks, as they come, into .venv-frameworks (VENV_FRAMEWORKS=DIR for another place), for tests/test_frameworks.py.
# A Python of their own: some need openai 3, verifiers in .venv needs openai 2. About 500 MB, no torch; seconds when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV_FRAMEWORKS:-.venv-frameworks}
python=${PYTHON:-python3}
frameworks=(
    'openai>=3.54,<4' 'anthropic>=2.13,<3' 'litellm>=1.83,<2' 'openai-agents>=0.24,<0.25' 'langchain>=1.4,<2' 'langchain-openai>=1.7,<2'
    'pydantic-ai-slim[openai,anthropic]>=2.68,<3' 'smolagents[openai]>=1.26,<2' 'inspect-ai>=0.3.285,<0.4'
)
alone=('mini-swe-agent>=2.4,<3') # without what it requires beside litellm: `datasets`, for its benchmarks
needed=('prompt_toolkit' 'platformdirs' 'textual' 'typer' 'tenacity' 'python-dotenv')

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup-frameworks: $("$python" --version) is too old; asyncrl needs Python 3.11 or newer. Way out: PYTHON=python3.11 make setup-frameworks" >&2
    exit 2
}
stamp=$(cksum <scripts/setup_frameworks.sh; "$python" --version)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
rm -f "$venv/.setup-stamp" # what is broken off half-way is not taken for whole
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo '*' >"$venv/.gitignore"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "setup-frameworks: installing into $venv (a minute the first time)"
pip install -qq --no-compile "${frameworks[@]}" "${needed[@]}"
pip install -qq --no-compile --no-deps "${alone[@]}"
if pip show -qq torch 2>/dev/null; then
    echo "setup-frameworks: one of these now pulls in torch, which none of the tests need: give it without that extra" >&2
    exit 1
fi
echo "$stamp" >"$venv/.setup-stamp"
echo "setup-frameworks: done in $(($(date +%s) - started)) s"
