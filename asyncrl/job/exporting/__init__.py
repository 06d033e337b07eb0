"""Export weights of a run, from a checkpoint or final/, as a model folder with a card, also to the hub."""
