"""Gymnasium environments over the speculative decoder.

Importing this package registers them; models and traces are loaded when one is made:

    import gymnasium
    env = gymnasium.make("specdepth.envs:specdepth/LiveDecode-v0", target="default")
    env = gymnasium.make("specdepth.envs:specdepth/ReplayDecode-v0", trace=..., cost=...)
"""

import gymnasium

LIVE_DECODE = "specdepth/LiveDecode-v0"
"""The real engine. Nondeterministic: on the wall clock, rewards are measured times."""
REPLAY_DECODE = "specdepth/ReplayDecode-v0"
"""The same engine on recorded outcomes and a virtual clock: deterministic, and needs no model."""

if LIVE_DECODE not in gymnasium.registry:  # a second import of a reloaded package
    gymnasium.register(
        id=LIVE_DECODE,
        entry_point="specdepth.envs.decode_env:LiveDecodeEnv",
        nondeterministic=True,
    )
    gymnasium.register(id=REPLAY_DECODE, entry_point="specdepth.envs.replay_env:ReplayDecodeEnv")

__all__ = ["LIVE_DECODE", "REPLAY_DECODE"]
