"""A call: what it may send, and its life from the request to the last client that wants its answer."""
