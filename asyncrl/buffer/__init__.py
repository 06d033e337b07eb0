"""Admission, staleness and batches. Pure."""
