"""Client and worker of the optimizer steps. Knows tensors and batches; knows no engine, no prompt's
meaning.
"""
