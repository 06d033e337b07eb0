"""What a run would be like under other settings: from a config, or from what a run has measured."""
