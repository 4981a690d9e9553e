"""Which kernels in bfloat16 are taken, and what a decoder on them promises."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder import bf16_kernels, native
from specdepth.decoder.bf16_kernels import INSTRUCTION_SETS
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.models import PackedModel
from specdepth.scheduler.baselines import RandomDepth
from tests.decoder.bf16 import needs_kernels
from tests.decoder.tiny import build_decoder, noisy_copy, repetitive_prompts, tiny_llama

AVX512, AMX = (frozenset(instructions.needed) for instructions in reversed(INSTRUCTION_SETS))
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
"""Sizes that all kernels take."""


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What `load` found before is asked anew, here and afterwards."""
    bf16_kernels.load.cache_clear()
    yield
    bf16_kernels.load.cache_clear()


@needs_kernels
@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_it_runs_on_torch_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert bf16_kernels.load() is None
    assert "no C compiler" in caplog.text
    assert PackedModel(tiny_llama(dtype=torch.bfloat16, **WIDE)).backend == "sdpa"


@pytest.mark.usefixtures("forgotten")
def test_a_cpu_without_the_instructions_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: AVX512 - {"avx512vl"})
    monkeypatch.setattr(native, "compiled", None)
    assert bf16_kernels.load() is None
    assert not caplog.records


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        (AMX, None, "amx"),
        (AMX, "ALL", "amx"),
        (AMX, "avx512_core_amx", "amx"),
        (AMX, "AVX512_CORE_BF16", "avx512"),
        (AMX, "AVX10_1_512_AMX_FP16", "amx"),
        (AMX, "AVX10_1_512", "avx512"),
        (AMX, "AVX2", None),
        (AMX - {"avx512_bf16"}, None, "avx512"),
        (AMX - {"amx_bf16"}, None, "avx512"),
        (AVX512, None, "avx512"),
        (AVX512, "AVX512_CORE_AMX", "avx512"),
        (AVX512, "SSE41", None),
        (frozenset({"avx2"}), None, None),
    ],
)
def test_the_best_that_the_cpu_and_onednns_own_limit_allow(
    flags: frozenset[str], limit: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    monkeypatch.setattr(bf16_kernels, "_tiles_are_granted", lambda: True)
    monkeypatch.setattr(bf16_kernels, "compiled_with", lambda instructions: instructions.name)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    loaded: Any = bf16_kernels.load()
    assert loaded == expected


@pytest.mark.usefixtures("forgotten")
def test_what_does_not_compile_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: AMX)
    monkeypatch.setattr(bf16_kernels, "_tiles_are_granted", lambda: True)
    monkeypatch.setattr(
        bf16_kernels, "compiled_with", lambda it: None if it.name == "amx" else it.name
    )
    loaded: Any = bf16_kernels.load()
    assert loaded == "avx512"


@pytest.mark.usefixtures("forgotten")
def test_without_tile_registers_it_is_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: AMX)
    monkeypatch.setattr(bf16_kernels, "_tiles_are_granted", lambda: False)
    monkeypatch.setattr(bf16_kernels, "compiled_with", lambda instructions: instructions.name)
    loaded: Any = bf16_kernels.load()
    assert loaded == "avx512"


# ----------------------------------------- the same bits whatever shares a pass

MODEL = tiny_llama(dtype=torch.bfloat16, **WIDE)


def logits_of(packed: PackedModel, texts: list[list[int]], splits: list[list[int]]) -> torch.Tensor:
    """Logits [T, V] of all tokens of all texts, each computed in chunks that end at its `splits`.

    Pass i holds the i-th chunk of each text that has one.
    """
    packed.allocate(64, 16)
    tables = np.arange(4 * len(texts), dtype=np.int32).reshape(len(texts), 4)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, splits))):
        who = [i for i, ends in enumerate(splits) if step < len(ends)]
        starts = np.array([splits[i][step - 1] if step else 0 for i in who])
        ends = np.array([splits[i][step] for i in who])
        ids = np.concatenate([texts[i][a:b] for i, a, b in zip(who, starts, ends, strict=True)])
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        layout = packed.layout(tables[who], starts, ends - starts)
        with torch.inference_mode():
            logits = packed.forward(
                torch.from_numpy(ids), torch.from_numpy(positions), layout, np.arange(len(ids))
            )
        for i, part in zip(who, logits.split((ends - starts).tolist()), strict=True):
            rows[i].append(part)
    return torch.cat([part for parts in rows for part in parts])


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_token_has_the_same_logits_in_any_pass(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    texts = [rng.integers(0, 64, n).tolist() for n in lengths]

    def split(n: int) -> list[int]:
        inner = data.draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=5))
        return sorted({end for end in inner if end < n} | {n})

    packed = PackedModel(copy.deepcopy(MODEL))
    assert packed.backend == "bf16-kernel"
    one_by_one = torch.cat([logits_of(packed, [t], [list(range(1, len(t) + 1))]) for t in texts])
    assert torch.equal(logits_of(packed, texts, [split(n) for n in lengths]), one_by_one)


@needs_kernels
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_in_bfloat16_does_not_depend_on_the_schedule(drafter: str, temperature: float) -> None:
    """As in float64, to the token: no near tie falls the other way in a pass of another size."""
    draft = drafter if drafter == "prompt-lookup" else noisy_copy(MODEL, 0.02)
    prompts = repetitive_prompts(vocab_size=64)
    sampling = [
        SamplingParams(temperature=temperature, seed=i, max_new_tokens=40)
        for i in range(len(prompts))
    ]
    texts = []
    for depth, options in (
        (0, {"max_num_seqs": 1}),
        (8, {"max_num_seqs": 4}),
        (RandomDepth(1), {"max_num_seqs": 4, "max_num_batched_tokens": 40}),
        (RandomDepth(2), {"max_num_seqs": 3, "num_kv_blocks": 10}),  # preempts
    ):
        settings: dict[str, Any] = {
            "dtype": torch.bfloat16,
            "block_size": 16,
            "verification": "coupled",
        }
        decoder = build_decoder(MODEL, draft, **(settings | options))
        results = decoder.generate(prompts, sampling=sampling, depth_scheduler=depth)
        texts.append([result.token_ids for result in results])
    assert results.metrics.num_preemptions > 0
    assert texts[1:] == texts[:1] * 3
