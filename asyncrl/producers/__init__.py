"""Run rollouts; the one place where a failure becomes data. Knows no server, no weights."""
