"""The built-in advantages and losses as `module:function`. Knows no torch: the functions are imported where they run.

A function of your own is named the same way in the config, and has the same signature as those beside this file.
"""

BUILT_IN_LOSSES = {
    "ppo_clip": "asyncrl.algorithms.losses:ppo_clip",
    "decoupled_ppo": "asyncrl.algorithms.losses:decoupled_ppo",
    "tis": "asyncrl.algorithms.losses:tis",
}
"""algorithm.loss by name."""

BUILT_IN_ADVANTAGES = {"grpo": "asyncrl.algorithms.advantages:grpo"}
"""algorithm.advantage by name."""
