"""Collects what the rooms report into metrics, console, TensorBoard, plot and verdict. Changes nothing in the
run.
"""
