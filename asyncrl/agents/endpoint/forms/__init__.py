"""Request and answer formats of the endpoints."""
