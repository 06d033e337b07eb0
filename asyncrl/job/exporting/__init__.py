"""Export weights as a model folder with a card, and to the hub."""
