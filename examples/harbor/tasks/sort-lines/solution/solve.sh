#!/bin/bash
sort /app/text.txt >/app/sorted.txt
