#!/usr/bin/env bash
# programs.sh NPM claude [WINDOW] | codex | ai_sdk MODEL RESULT: starts a program that npm has installed in NPM. The last line is JSON:
# [its answer, the file that it makes] of a coding agent, and [answer, number of calls] of ai_sdk.mjs.
set -euo pipefail
npm=$1
program=$2
here=$(cd "$(dirname "$0")" && pwd)

if [ "$program" = ai_sdk ]; then
    cd "$npm" # Node finds packages of its folder for a script on standard input
    MODEL=$3 RESULT=$4 exec node --input-type=module <"$here/ai_sdk.mjs"
fi

HOME=$(mktemp -d)
trap 'rm -rf "$HOME"' EXIT
mkdir "$HOME/work" && cd "$HOME/work"
echo alpha >a.txt
echo beta >b.txt
echo iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg== | base64 -d >x.png
task="Join a.txt and b.txt into c.txt."
export HOME IS_SANDBOX=1
case $program in
claude)
    [ -z "${3:-}" ] || export CLAUDE_CODE_MAX_CONTEXT_TOKENS=$3
    "$npm/node_modules/.bin/claude" -p "$task" --model policy --dangerously-skip-permissions >said </dev/null || true
    ;;
codex)
    provider="{name=\"asyncrl\",base_url=\"$OPENAI_BASE_URL\",env_key=\"OPENAI_API_KEY\",wire_api=\"responses\"}"
    "$npm/node_modules/.bin/codex" exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -c model=policy \
        -c model_provider=asyncrl -c "model_providers.asyncrl=$provider" "$task" >said 2>log </dev/null || true
    grep -q "ran out of room in the model's context window" log && echo "context window" >said
    ;;
esac
node -e 'const { existsSync, readFileSync } = require("fs");
const made = existsSync("c.txt") ? readFileSync("c.txt", "utf8") : null;
console.log(JSON.stringify([readFileSync("said", "utf8").trim(), made]));'
