from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.features import NUM_FEATURES
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights
from specdepth.scheduler.state import RoundOutcome, RoundState

MakeState = Callable[..., RoundState]
MakeOutcome = Callable[..., RoundOutcome]

SMOLLM2_S = tuple(ms / 1e3 for ms in (52.9, 61.2, 70.6, 83.2, 106, 159, 262, 463, 911))


def build_state(num_running: int = 4, depth: int = 8, **changes: Any) -> RoundState:
    """A plain prompt-lookup round of `num_running` sequences; fields can be replaced."""
    each = np.arange(num_running)
    unknown = np.full((num_running, depth), np.nan)
    fields: dict[str, Any] = {
        "num_running": num_running,
        "slots": each,
        "request_ids": each + 100,
        "positions": 50 + each,
        "num_generated": 10 + each,
        "num_remaining": 20 + each,
        "max_depths": np.full(num_running, depth),
        "acceptance_ema": np.full(num_running, 0.5),
        "acceptance_ema_slow": np.full(num_running, 0.5),
        "num_drafted_tokens": np.full(num_running, 12),
        "num_accepted_tokens": np.full(num_running, 6),
        "num_drafted_rounds": np.full(num_running, 3),
        "last_depth": np.full(num_running, min(4, depth)),
        "last_accepted": np.full(num_running, min(2, depth)),
        "full_streak": np.zeros(num_running, np.int64),
        "rounds_since_draft": np.zeros(num_running, np.int64),
        "proposal_length": np.full(num_running, depth),
        "match_length": np.full(num_running, 2),
        "num_matches": np.full(num_running, 1),
        "match_agreement": np.ones(num_running),
        "agreement": np.tile(0.9 ** np.arange(1, depth + 1), (num_running, 1)),
        "match_tokens": np.full(num_running, 2),
        "match_distance": np.full(num_running, 20),
        "match_in_output": np.zeros(num_running, np.bool_),
        "last_match_length": np.full(num_running, 3),
        "draft_top1": unknown,
        "draft_entropy": unknown,
        "draft_margin": unknown,
        "draft_lag": np.zeros(num_running, np.int64),
        "target_top1": np.full(num_running, 0.9),
        "target_entropy": np.full(num_running, 0.5),
        "round_index": 7,
        "num_waiting": 0,
        "num_prefill_tokens": 0,
        "num_context_tokens": int((50 + each).sum()),
        "kv_used_fraction": 0.25,
        "num_free_blocks": 768,
        "num_blocks": 1024,
        "block_size": 16,
        "max_num_seqs": max(num_running, 32),
        "max_num_speculative_tokens": depth,
        "drafter": "prompt-lookup",
        "cost": CostModel(
            name="smollm2", tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256), verify_s=SMOLLM2_S
        ),
    }
    return RoundState(**(fields | changes))


def build_outcome(state: RoundState, num_drafted: Any, num_accepted: Any, **changes: Any) -> Any:
    """The outcome of `state`, given drafted and accepted tokens."""
    drafted, accepted = np.asarray(num_drafted), np.asarray(num_accepted)
    none = np.zeros(state.num_running, np.bool_)
    fields: dict[str, Any] = {
        "slots": state.slots,
        "request_ids": state.request_ids,
        "depths": drafted,
        "num_drafted": drafted,
        "num_proposed": drafted,
        "num_accepted": accepted,
        "num_committed": accepted + 1,
        "finished": none,
        "preempted": none,
        "draft_top1": state.draft_top1,
        "draft_entropy": state.draft_entropy,
        "draft_margin": state.draft_margin,
        "target_top1": state.target_top1,
        "target_entropy": state.target_entropy,
        "num_preempted_prefills": 0,
        "num_pass_tokens": int(state.num_running + drafted.sum()),
        "num_prefill_tokens": 0,
        "num_context_tokens": state.num_context_tokens,
        "num_prefill_pairs": 0,
        "draft_pass_sequences": (),
        "num_catch_up_tokens": 0,
        "num_waiting": 0,
        "kv_used_fraction": 0.25,
        "start_s": 0.0,
        "draft_s": 0.0,
        "verify_s": 0.1,
        "schedule_s": 0.0,
        "other_s": 0.0,
    }
    return RoundOutcome(**(fields | changes))


@pytest.fixture
def make_state() -> MakeState:
    return build_state


@pytest.fixture
def make_outcome() -> MakeOutcome:
    return build_outcome


@pytest.fixture(scope="session")
def make_state_once() -> MakeState:
    """The same for hypothesis, which wants fixtures that outlive an example."""
    return build_state


def build_weights(depth: int = 8, hidden: tuple[int, ...] = (16, 12), **changes: Any) -> Any:
    """A random policy with one action for each depth up to `depth`."""
    rng = np.random.default_rng(3)
    sizes = (NUM_FEATURES, *hidden, depth + 1)
    fields: dict[str, Any] = {
        "weights": tuple(
            rng.normal(size=(outputs, inputs)).astype(np.float32)
            for inputs, outputs in itertools.pairwise(sizes)
        ),
        "biases": tuple(rng.normal(size=size).astype(np.float32) for size in sizes[1:]),
        "mean": rng.random(NUM_FEATURES).astype(np.float32),
        "inv_std": (5 * rng.random(NUM_FEATURES) + 0.5).astype(np.float32),
        "clip": 2.0,
        "activation": "tanh",
        "depths": tuple(range(depth + 1)),
    }
    return PolicyWeights(**(fields | changes))


def build_card(**changes: Any) -> PolicyCard:
    """A card for `build_weights`."""
    fields: dict[str, Any] = {
        "model_pair": "SmolLM2-135M-Instruct + prompt-lookup",
        "drafter": "prompt-lookup",
        "max_num_speculative_tokens": 8,
        "env_id": "specdepth/LiveDecode-v0",
        "git_sha": "0123abc",
        "versions": {"numpy": "2.0"},
        "training": {"steps": 1000, "return": -1.5},
    }
    return PolicyCard(**(fields | changes))


@pytest.fixture
def make_weights() -> Callable[..., PolicyWeights]:
    return build_weights


@pytest.fixture
def make_card() -> Callable[..., PolicyCard]:
    return build_card
