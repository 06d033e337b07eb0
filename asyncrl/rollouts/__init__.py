"""Scores a held-out task at fixed versions, beside training. Knows no buffer, no trainer: nothing of it is
trained on.
"""
