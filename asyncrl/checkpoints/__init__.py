"""Whole checkpoints on disk: made beside, checked, renamed into place. Files are files here: what is in
them is for the parts that wrote them.
"""
