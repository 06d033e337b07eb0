"""Runs the parts together: starts and supervises processes, connects the parts, resumes, watches and reports
a run.
"""
