"""Advantages and losses: pure tensor functions, each with its paper. Knows no device, no config, no logging.

These tables hold the built-in names as `module:function`; the functions are imported where they run, so this
module costs no torch. A function of your own is named the same way and has the same signature.
"""

BUILT_IN_LOSSES = {
    "ppo_clip": "asyncrl.algorithms.losses:ppo_clip",
    "decoupled_ppo": "asyncrl.algorithms.losses:decoupled_ppo",
    "tis": "asyncrl.algorithms.losses:tis",
}
"""algorithm.loss by name."""

BUILT_IN_ADVANTAGES = {"grpo": "asyncrl.algorithms.advantages:grpo"}
"""algorithm.advantage by name."""
