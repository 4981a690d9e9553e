"""The batched speculative decoder: requests in, tokens out, a depth for each sequence and round.

`SpeculativeDecoder` (speculative_decoder.py) is the way in. Layers, from the outside: `Engine` (rounds,
queue, KV blocks) -> `TorchRunner` (models of a round) -> `Drafter`, `PackedModel` (packed, paged forward)
and the pure functions of `verification` and `sampling`.
"""
