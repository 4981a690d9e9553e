"""SmolLM2 in bfloat16 on our kernels: the text is the same to the token, whatever the schedule.

Other kernels round a row in another way among other numbers of rows, and near ties fall the other way.
"""

from __future__ import annotations

import pytest
import torch

from specdepth.decoder import bf16_kernels
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompts import KINDS, load_prompts, render
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.baselines import RandomDepth

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bf16_kernels.load() is None, reason="needs AVX-512, Linux and a C compiler"),
]

NUM_TOKENS = 32


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_does_not_depend_on_drafter_depths_batch_or_pool(temperature: float) -> None:
    torch.set_num_threads(1)
    texts = []
    for draft, slots, blocks, depth in (
        ("none", 1, 400, 0),
        ("prompt-lookup", 12, 400, 8),
        ("prompt-lookup", 12, 60, RandomDepth(1)),
        ("smollm2-eagle3", 5, 400, RandomDepth(2)),
    ):
        decoder = SpeculativeDecoder.from_pretrained(
            "default",
            draft,
            dtype=torch.bfloat16,
            device="cpu",
            max_num_seqs=slots,
            num_kv_blocks=blocks,
            verification="coupled",
        )
        assert decoder.target.backend == "bf16-kernel"
        assert decoder.tokenizer is not None
        prompts = [
            min((render(decoder.tokenizer, p) for p in load_prompts("held-out", [kind])), key=len)
            for kind in KINDS
        ] * 2
        sampling = [
            SamplingParams(temperature=temperature, seed=i, max_new_tokens=NUM_TOKENS)
            for i in range(len(prompts))
        ]
        batch = decoder.generate(prompts, sampling=sampling, depth_scheduler=depth)
        texts.append([result.token_ids for result in batch])
    assert sum(map(len, texts[0])) > 200
    assert texts[1:] == texts[:1] * 3
