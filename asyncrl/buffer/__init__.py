"""Admission, deadlines, staleness and batches. Pure: no HTTP, no torch, no clock."""
