"""Start, connect, supervise, resume and report the parts of a run."""
