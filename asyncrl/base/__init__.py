"""Shared by every folder."""
