"""How a run went: did it learn, is it healthy, how fast was it."""
