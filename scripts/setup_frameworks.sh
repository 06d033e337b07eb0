#!/usr/bin/env bash
# Installs agent frameworks, as they come, into .venv-frameworks (VENV_FRAMEWORKS=DIR for another place), for tests/test_frameworks.py.
# A separate Python: some need openai 3, verifiers in .venv needs openai 2. CrewAI and OpenHands have separate venvs inside, because
# they need openai 2 and two versions of pydantic. Coding agents and the AI SDK come from npm. About 2.5 GB, no torch; seconds when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV_FRAMEWORKS:-.venv-frameworks}
python=${PYTHON:-python3}
frameworks=(
    'openai>=3.54,<4' 'anthropic>=2.13,<3' 'litellm>=1.110,<2' 'openai-agents>=0.24,<0.25' 'langchain>=1.5,<2' 'langchain-openai>=1.7,<2'
    'pydantic-ai-slim[openai,anthropic]>=2.68,<3' 'smolagents[openai]>=1.26,<2' 'inspect-ai>=0.3.285,<0.4'
)
alone=('mini-swe-agent>=2.4,<3') # installed without dependencies: it requires `datasets`, for its benchmarks
# mini-swe-agent needs them; examples/ need uvloop, for asyncrl
needed=('uvloop' 'prompt_toolkit' 'platformdirs' 'textual' 'typer' 'tenacity' 'python-dotenv')
crewai=('crewai>=1.15.30,<2')
openhands=('openhands-sdk>=1.58,<2') # Python 3.12 or newer
programs=('@anthropic-ai/claude-code@2.1.332' '@openai/codex@0.171' 'ai@7' '@ai-sdk/openai-compatible@3' '@ai-sdk/anthropic@4' 'zod@4')

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup-frameworks: $("$python" --version) is too old; asyncrl needs Python 3.11 or newer. Way out: PYTHON=python3.11 make setup-frameworks" >&2
    exit 2
}
python312=''
for candidate in "$python" python3.12 python3.13 "$HOME"/.pyenv/versions/3.1[2-9].*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        python312=$candidate
        break
    fi
done
npm=$(command -v npm || true)
stamp=$(cksum <scripts/setup_frameworks.sh; "$python" --version; echo "$python312 $npm")
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.setup-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
rm -f "$venv/.setup-stamp" # an interrupted installation must not count as complete
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo '*' >"$venv/.gitignore"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq --no-compile uv # ten times faster than pip

# uv does not read pip's configuration: it gets the same package indexes.
indexes=()
default=$(pip config get global.index-url 2>/dev/null || echo "${PIP_INDEX_URL:-}")
[ -z "$default" ] || indexes+=(--default-index "$default")
for index in $(pip config get global.extra-index-url 2>/dev/null || echo "${PIP_EXTRA_INDEX_URL:-}"); do
    indexes+=(--index "$index")
done
install() { # FOLDER [OPTION] PACKAGE...
    local folder=$1
    shift
    "$venv/bin/uv" pip install -q -p "$folder/bin/python" --index-strategy unsafe-best-match ${indexes[@]+"${indexes[@]}"} "$@"
}

echo "setup-frameworks: installing into $venv (a minute the first time)"
install "$venv" "${frameworks[@]}" "${needed[@]}"
install "$venv" --no-deps "${alone[@]}"
# What an index lacks is skipped, with its tests; the frameworks above are not.
skip() {
    echo "setup-frameworks: $1 cannot be installed from this index: its tests are skipped"
    rm -rf "${venv:?}/$2"
}
"$python" -m venv --without-pip "$venv/crewai"
install "$venv/crewai" "${crewai[@]}" || skip CrewAI crewai
if [ -n "$python312" ]; then
    "$python312" -m venv --without-pip "$venv/openhands"
    install "$venv/openhands" "${openhands[@]}" || skip OpenHands openhands
else
    echo "setup-frameworks: no Python 3.12 here, which OpenHands needs: its tests are skipped"
fi
# For its readers and its harness. Its fastmcp 3 needs another mcp than verifiers in .venv: the tests run them with the packages there.
install "$venv" --no-deps --target "$venv/openenv" 'openenv>=0.10,<0.11' || skip "OpenEnv 0.10" openenv
# Games; what else they import is in .venv.
install "$venv" --no-deps --target "$venv/textarena" 'textarena>=0.7.4,<0.8' 'nltk>=3.9,<4' || skip TextArena textarena
if [ -n "$npm" ]; then
    npm install --silent --no-audit --no-fund --prefix "$venv/npm" "${programs[@]}" || skip "Claude Code, Codex or the AI SDK" npm
else
    echo "setup-frameworks: no npm here, which Claude Code, Codex and the AI SDK need: their tests are skipped"
fi
if pip show -qq torch 2>/dev/null; then
    echo "setup-frameworks: one of these now pulls in torch, which none of the tests need: give it without that extra" >&2
    exit 1
fi
# Python compiles a module at its first import. The tests import all frameworks at once, which would take minutes.
compile() { # PYTHON SCRIPT...
    local python=$1
    shift
    [ -x "$python" ] || return 0
    for script in "$@"; do
        HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True "$python" -P -W ignore tests/frameworks/play.py "$script" </dev/null >/dev/null 2>&1 || true
    done
}
compile "$venv/crewai/bin/python" tests/frameworks/crewai_agent.py
compile "$venv/openhands/bin/python" tests/frameworks/openhands_agent.py
compile "$venv/bin/python" tests/frameworks/{litellm_chat,openai_agents,langchain_agent,pydantic_ai_agent,inspect_ai_eval}.py \
    tests/frameworks/{smolagents_agents,mini_swe_agent,programs,example_agents}.py
echo "$stamp" >"$venv/.setup-stamp"
echo "setup-frameworks: done in $(($(date +%s) - started)) s"
