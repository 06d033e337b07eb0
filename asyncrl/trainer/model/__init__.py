"""The trainer's policy model: construction, sharding, packing, evaluation."""
