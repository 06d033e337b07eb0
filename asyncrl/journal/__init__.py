"""What happened in a run, in order, in one SQLite file: all that a killed run needs to go on."""
