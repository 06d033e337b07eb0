"""Weight transports from the trainer to the engines, both ends."""
