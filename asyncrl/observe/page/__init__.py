"""The page of a run: plain values, drawn by page.js."""
