"""Request and answer formats of each endpoint. Each call becomes one chat, or one text."""
