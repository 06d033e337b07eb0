"""The page that explains a run: what it shows is gathered here as plain data, and drawn by page.js."""
