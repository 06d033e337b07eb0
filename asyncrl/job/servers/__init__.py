"""Which servers a run has, and what each is told."""
