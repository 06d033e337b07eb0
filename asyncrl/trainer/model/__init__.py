"""The policy model of the trainer: how it is built, sharded, packed and evaluated."""
