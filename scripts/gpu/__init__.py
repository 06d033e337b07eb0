"""The measurements of scripts/gpu_acceptance.py: a function each, which runs in a process of its own."""
