"""Start processes of a run on the nodes of a Ray cluster."""
