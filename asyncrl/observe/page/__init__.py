"""The page of a run: its data is gathered here as plain values and drawn by page.js."""
