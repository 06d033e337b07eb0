"""Virtual clock and synchronous reference loop; shipped for users' tests."""
