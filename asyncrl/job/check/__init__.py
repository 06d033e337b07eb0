"""What `asyncrl check` prints, and a start refuses."""
