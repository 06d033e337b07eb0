"""Engine servers, started as processes. They import only messages, http, waits, files and weights from
asyncrl.
"""
