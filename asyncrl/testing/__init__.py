"""Virtual clock; shipped for users' tests."""
