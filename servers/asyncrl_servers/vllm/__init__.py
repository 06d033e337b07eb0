"""A vLLM server of the run, in vLLM's own Python: starting it, guarding it, and a worker extension that
brings weights in.
"""
