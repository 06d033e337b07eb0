"""Admission, deadlines, staleness, choice of batch. Knows versions, slots and equal rewards; knows no HTTP,
no torch, no clock.
"""
