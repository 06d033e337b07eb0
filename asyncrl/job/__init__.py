"""Run the parts together: start and supervise processes, connect the parts, resume, watch and report."""
