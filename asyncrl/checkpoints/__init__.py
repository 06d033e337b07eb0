"""Whole checkpoints on disk: made beside, checked, renamed into place. Knows files; knows no torch and no
meaning of them.
"""
