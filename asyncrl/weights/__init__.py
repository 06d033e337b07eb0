"""How weights go from the trainer to the engines: a Transport for each way, with both ends of it."""
