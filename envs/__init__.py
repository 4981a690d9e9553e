"""Gymnasium environments over the speculative decoder.

Importing this package registers `specdepth/LiveDecode-v0`; models are loaded when one is made:

    import gymnasium
    env = gymnasium.make("specdepth.envs:specdepth/LiveDecode-v0", target="default")
"""

import gymnasium

LIVE_DECODE = "specdepth/LiveDecode-v0"
"""The real engine. Nondeterministic: on the wall clock, rewards are measured times."""

if LIVE_DECODE not in gymnasium.registry:  # a second import of a reloaded package
    gymnasium.register(
        id=LIVE_DECODE,
        entry_point="specdepth.envs.decode_env:LiveDecodeEnv",
        nondeterministic=True,
    )

__all__ = ["LIVE_DECODE"]
