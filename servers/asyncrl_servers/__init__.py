"""Engine servers. They import only messages, http, waits, files and weights from
asyncrl.
"""
