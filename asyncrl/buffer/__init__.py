"""Admission, deadlines, staleness, choice of batch. Pure: no HTTP, no torch, no clock of its own."""
