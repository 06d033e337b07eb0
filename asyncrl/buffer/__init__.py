"""Admission, deadlines, staleness, choice of batch. Knows versions and slots; knows no HTTP, no torch, no rewards, no clock."""
