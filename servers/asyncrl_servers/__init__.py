"""Engine servers: started as processes, never imported by asyncrl. Of asyncrl they reach messages, http,
waits, files and weights alone.
"""
