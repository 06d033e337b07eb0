"""The call layer: accepted messages, and the life of a call from request to delivery."""
