from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.baselines import TableDepth
from specdepth.scheduler.table_exports import (
    sglang_adaptive_config,
    sglang_flags,
    vllm_ranges,
    vllm_speculative_config,
)

TABLE = TableDepth.parse("1-3=4,4-11=2,12-=0")
starts = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 8)),
    min_size=1,
    max_size=6,
    unique_by=lambda e: e[0],
)


def table_of(bands: list[tuple[int, int]]) -> TableDepth:
    lows = sorted(bands)
    first = [(1, lows[0][1]), *lows[1:]]
    ends = [low - 1 for low, _ in first[1:]] + [2**31 - 1]
    return TableDepth([(low, end, depth) for (low, depth), end in zip(first, ends, strict=True)])


def vllm_depth(ranges: list[list[int]], batch_size: int) -> int:
    """vLLM's rule, for sizes within and above the ranges."""
    return [depth for low, _, depth in ranges if low <= batch_size][-1]


def sglang_depth(config: dict[str, dict[str, list[int]]], batch_size: int) -> int:
    """SGLang's rule: the largest key that is not above the batch, or the smallest key."""
    keys = sorted(map(int, config))
    key = max((key for key in keys if key <= batch_size), default=keys[0])
    (depth,) = config[str(key)]["candidate_steps"]
    return depth


def test_vllm_ranges_end_at_the_largest_batch() -> None:
    assert vllm_ranges(TABLE, 32) == [[1, 3, 4], [4, 11, 2], [12, 32, 0]]


def test_ranges_above_the_largest_batch_are_left_out() -> None:
    assert vllm_ranges(TABLE, 8) == [[1, 3, 4], [4, 8, 2]]
    assert sglang_adaptive_config(TABLE, 8) == {
        "1": {"candidate_steps": [4]},
        "4": {"candidate_steps": [2]},
    }


def test_vllm_config_for_prompt_lookup_reads_back_as_the_table(tmp_path: Path) -> None:
    config = vllm_speculative_config(
        TABLE, max_batch_size=64, drafter="prompt-lookup", lookup={"max_ngram": 3, "min_ngram": 2}
    )
    assert config == {
        "method": "ngram",
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 11, 2], [12, 64, 0]],
    }
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(config))
    read = TableDepth.from_json(path)
    assert [read.depth_at(n) for n in range(1, 200)] == [TABLE.depth_at(n) for n in range(1, 200)]


def test_vllm_config_for_a_draft_model_names_it() -> None:
    config = vllm_speculative_config(
        TABLE, max_batch_size=64, drafter="draft-model", draft_model="org/draft"
    )
    assert config is not None
    assert (config["method"], config["model"]) == ("draft_model", "org/draft")


def test_a_draft_model_that_reads_the_target_is_eagle_3() -> None:
    config = vllm_speculative_config(
        TABLE, max_batch_size=64, drafter="draft-model", draft_model="org/eagle", reads_target=True
    )
    assert config == {
        "method": "eagle3",
        "model": "org/eagle",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 11, 2], [12, 64, 0]],
    }
    flags = sglang_flags(3, drafter="draft-model", draft_model="org/eagle", reads_target=True)
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "org/eagle",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


def test_a_table_that_never_drafts_has_no_vllm_config() -> None:
    off = TableDepth.parse("1-=0")
    assert vllm_speculative_config(off, max_batch_size=8, drafter="prompt-lookup") is None


def test_num_speculative_tokens_is_the_deepest_depth_that_can_come_up() -> None:
    rising = TableDepth.parse("1-8=2,9-=5")
    low = vllm_speculative_config(rising, max_batch_size=8, drafter="prompt-lookup")
    high = vllm_speculative_config(rising, max_batch_size=9, drafter="prompt-lookup")
    assert low is not None
    assert high is not None
    assert (low["num_speculative_tokens"], high["num_speculative_tokens"]) == (2, 5)


@given(starts, st.integers(1, 64))
def test_both_engines_take_the_depth_of_the_table(
    bands: list[tuple[int, int]], max_batch_size: int
) -> None:
    table = table_of(bands)
    ranges = vllm_ranges(table, max_batch_size)
    config = sglang_adaptive_config(table, max_batch_size)
    for batch_size in range(1, max_batch_size + 1):
        depth = table.depth_at(batch_size)
        assert vllm_depth(ranges, batch_size) == depth
        assert sglang_depth(config, batch_size) == depth


def test_sglang_counts_the_token_before_the_draft() -> None:
    assert sglang_flags(3, drafter="prompt-lookup") == (
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        "4",
        "--speculative-ngram-max-bfs-breadth",
        "1",
    )


def test_sglang_flags_for_a_draft_model_are_a_chain() -> None:
    flags = sglang_flags(3, drafter="draft-model", draft_model="org/draft")
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs == {
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "org/draft",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


def test_depth_zero_needs_no_sglang_flags() -> None:
    assert sglang_flags(0, drafter="draft-model") == ()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="1 or more, got 0"):
        vllm_ranges(TABLE, 0)
    with pytest.raises(ValueError, match="1 or more, got 0"):
        sglang_adaptive_config(TABLE, 0)
    with pytest.raises(ValueError, match="need its name"):
        vllm_speculative_config(TABLE, max_batch_size=8, drafter="draft-model")
    with pytest.raises(ValueError, match="proposes nothing"):
        sglang_flags(2, drafter="none")
    with pytest.raises(ValueError, match="0 or more, got -1"):
        sglang_flags(-1, drafter="prompt-lookup")
