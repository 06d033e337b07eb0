#!/bin/sh
# An agent in plain shell: curl and sed, no Python, no jq. generator.command runs it once a rollout, with the task as JSON on
# standard input and the address and key of its session in the environment. Its last line is the reward.
set -eu

task=$(cat)

# The value of a text field of one-line JSON, with its escapes, so that it can be put into JSON again.
field() { printf '%s' "$2" | sed -n 's/.*"'"$1"'": *"\(\([^"\\]\|\\.\)*\)".*/\1/p'; }

# One call of the model; prints its answer as JSON. --retry is safe: the gateway samples a call once.
ask() {
    curl --silent --show-error --fail-with-body --retry 3 "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header 'Content-Type: application/json' \
        --data "{\"model\": \"$OPENAI_MODEL\", \"messages\": [$1]}"
}

question=$(field content "$task")
letter=${question%% *}
count=${question#* }

messages="{\"role\": \"user\", \"content\": \"$question\"}"
reply=$(ask "$messages")  # by itself, so that set -e sees a refused call: it fails the rollout, and is no reward of 0
first=$(field content "$reply")

# The second turn continues the first: the same messages, the unchanged answer, and one more message.
messages="$messages, {\"role\": \"assistant\", \"content\": \"$first\"}, {\"role\": \"user\", \"content\": \"$letter\"}"
reply=$(ask "$messages")
second=$(field content "$reply")

# Right letters of both turns, and the distance of the first length from the requested length.
count_letters() { printf '%s' "$1" | tr -cd "$letter" | wc -c; }
right=$(($(count_letters "$first") + $(count_letters "$second")))
total=$((${#first} + ${#second}))
away=$((${#first} - count))
reward=$(awk "BEGIN { away = $away < 0 ? -($away) : $away; print 0.7 * $right / ($total + ($total == 0)) + 0.3 / (1 + away) }")

# Lines before the last line are ignored; the last line is the outcome. It could be the bare number. A program whose
# output is not its own posts it instead, with generator.outcomes=posted (docs/generators.md).
echo "asked for $question, got '$first', then '$second'"
echo "{\"reward\": $reward, \"metrics\": {\"first_length\": ${#first}, \"right_letters\": $right}}"
