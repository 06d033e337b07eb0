"""Facts about a language model's structure, which the trainer and the embedded engine
share.
"""
