"""A search agent in the style of Search-R1, with its own small corpus."""
