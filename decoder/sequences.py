"""State of the running sequences as arrays over slots: shared by engine and runner."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Bools, Floats, Ints

from .request import Request

NO_END = np.iinfo(np.int64).max


class SequenceTable:
    """Struct of arrays over S slots.

    A sequence of `num_tokens` committed tokens has the KV of the first `num_computed` of them in the
    target's cache (`draft_computed` in the draft's). What is missing is *pending*; the last committed
    token is always pending, since it is the first input of the next round. A prompt that waits for
    prefill, a preempted sequence, and a draft model that sat out are all just more pending tokens.

    Invariant: 0 <= num_computed < num_tokens <= max_model_len for each active slot.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.tokens: NDArray[np.int64] = np.zeros((num_slots, max_model_len), np.int64)
        """[S, max_model_len] committed tokens."""
        self.active: Bools = np.zeros(num_slots, np.bool_)
        self.number: Ints = np.zeros(num_slots, np.int64)
        """Request number."""
        self.num_prompt: Ints = np.zeros(num_slots, np.int64)
        self.num_tokens: Ints = np.zeros(num_slots, np.int64)
        self.num_computed: Ints = np.zeros(num_slots, np.int64)
        self.draft_computed: Ints = np.zeros(num_slots, np.int64)
        self.max_tokens: Ints = np.zeros(num_slots, np.int64)
        """Prompt length + max_new_tokens."""
        self.end_at: Ints = np.full(num_slots, NO_END)
        """Length at which a recorded text ends; `NO_END` where only tokens can tell."""
        self.attempt: Ints = np.zeros(num_slots, np.int64)
        """Decoding rounds that the request has begun, failed and preempted ones included: keys random
        draws, so that none is ever used twice."""
        self.num_rounds: Ints = np.zeros(num_slots, np.int64)
        """Decoding rounds that committed something."""
        self.first_token_s: Floats = np.full(num_slots, np.nan)
        """When the first token was committed, on the engine's clock."""
        self.temperature: Floats = np.zeros(num_slots)
        self.top_k: Ints = np.zeros(num_slots, np.int64)
        self.top_p: Floats = np.ones(num_slots)
        self.seed: Ints = np.zeros(num_slots, np.int64)
        self.ignore_eos: Bools = np.zeros(num_slots, np.bool_)

    def start(self, slot: int, request: Request) -> int:
        """Put `request` into `slot`, with what it generated before; returns its number of tokens."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        length = len(prompt) + len(request.generated)
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : length] = request.generated
        self.active[slot] = True
        self.number[slot] = request.number
        self.num_prompt[slot] = len(prompt)
        self.num_tokens[slot] = length
        self.num_computed[slot] = self.draft_computed[slot] = 0
        self.max_tokens[slot] = len(prompt) + sampling.max_new_tokens
        self.end_at[slot] = NO_END
        self.attempt[slot] = request.attempt
        self.num_rounds[slot] = request.num_rounds
        self.first_token_s[slot] = request.first_token_s
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.seed[slot] = np.uint64(int(sampling.seed or 0) % 2**64).astype(np.int64)
        self.ignore_eos[slot] = sampling.ignore_eos
        return length

    def stop(self, slot: int, request: Request) -> None:
        """Free `slot` and hand its tokens and counts back to `request`."""
        request.generated = self.generated(slot).tolist()
        request.attempt = int(self.attempt[slot])
        request.num_rounds = int(self.num_rounds[slot])
        request.first_token_s = float(self.first_token_s[slot])
        self.active[slot] = False

    def generated(self, slot: int) -> Ints:
        """Tokens that the engine produced in `slot`."""
        return self.tokens[slot, self.num_prompt[slot] : self.num_tokens[slot]]
