"""Which process runs where: starts, watches and ends the child processes. Knows no message that they speak."""
