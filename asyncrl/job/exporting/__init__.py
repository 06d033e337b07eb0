"""Weights of a run as a folder that others load: from a checkpoint or final/, with a card, and to the hub."""
