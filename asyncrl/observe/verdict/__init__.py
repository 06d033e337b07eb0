"""Judge a run: did it learn, is it healthy, how fast was it."""
