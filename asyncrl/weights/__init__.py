"""How weights go from the trainer to the engines: one way each, both ends. Knows no batch, no request."""
