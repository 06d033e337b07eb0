#!/bin/bash
# a half for the right lines, 1 for the right order
reward=0
[ "$(sort /app/sorted.txt)" = "$(cat /tests/sorted.txt)" ] && reward=0.5
cmp -s /app/sorted.txt /tests/sorted.txt && reward=1
echo "{\"reward\": $reward, \"num_lines\": $(cat /app/sorted.txt | wc -l)}" >/logs/verifier/reward.json
