#!/bin/bash
# 1 for the right number
if [ "$(tr -d '[:space:]' </app/answer.txt)" = 11 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
