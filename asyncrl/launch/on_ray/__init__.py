"""Launcher for Ray clusters."""
