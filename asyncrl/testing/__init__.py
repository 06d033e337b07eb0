"""Virtual clock, fakes and the synchronous reference loop; shipped so that users can test their tasks with
it.
"""
