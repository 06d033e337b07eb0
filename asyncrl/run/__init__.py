"""What stands between the rooms and job.py: processes brought up and kept up, rooms wired, a run resumed,
watched and told.
"""
