#!/bin/bash
wc -w </app/text.txt >/app/answer.txt
