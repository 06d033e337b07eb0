"""Whole checkpoints on disk: made beside, checked, renamed into place. Of what is in them,
the form of controller.json alone is known here.
"""
