"""Engine servers: started as processes, never imported by asyncrl. Of asyncrl they import asyncrl.messages
alone.
"""
