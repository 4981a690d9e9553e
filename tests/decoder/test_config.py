"""Settings that cannot be right are refused with the field, the value and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdepth.decoder.config import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be"),
        ("temperature", math.nan, "temperature must be"),
        ("top_k", -1, r"top_k must be 0 \(off\) or more, got -1"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.1, r"top_p must be in \(0, 1\], got 1.1"),
        ("top_p", math.nan, r"top_p must be in"),
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, got 0"),
        ("stop", "END", "stop must be a tuple of strings, got 'END'"),
        ("stop", ("a", ""), "must not hold an empty string"),
    ],
)
def test_bad_sampling_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be at least 1"),
        ("kv_cache_bytes", 0, "kv_cache_bytes must be at least 1"),
        ("max_num_speculative_tokens", -1, "max_num_speculative_tokens must be 0 or more"),
        ("max_model_len", 0, "max_model_len must be at least 1"),
        ("num_kv_blocks", -3, "num_kv_blocks must be at least 1, got -3"),
        ("block_size", 0, "block_size must be at least 1"),
        ("lookahead", "hope", "lookahead must be one of .*, got 'hope'"),
        ("verification", "typical", "verification must be one of .*, got 'typical'"),
    ],
)
def test_bad_engine_settings_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})


def test_the_defaults_are_greedy_and_rejection() -> None:
    assert SamplingParams().temperature == 0
    config = EngineConfig()
    assert (config.verification, config.lookahead) == ("rejection", "reserve")
    assert config.max_num_speculative_tokens == 8
