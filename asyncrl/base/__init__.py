"""Shared by every folder: errors, HTTP client and server halves, waits, files and user code."""
