"""SmolLM2 in float32: speculative text is the target's own, up to logits that are as good as equal.

Another order of the same sums moves a logit by 1e-4 or so, which can turn a near tie. Where two texts
part, the logits of the two tokens must lie within `LOGIT_GAP`, by a plain forward of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdepth.decoder.default_model import default_model_path
from specdepth.decoder.prompts import KINDS, load_prompts, render
from specdepth.decoder.speculative_decoder import SpeculativeDecoder

pytestmark = pytest.mark.real

NUM_PROMPTS = 32
NUM_TOKENS = 64
NUM_GENERATED = 4
"""Prompts that transformers' own `generate` also decodes."""
LOGIT_GAP = 3e-4


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        "default", "prompt-lookup", dtype=torch.float32, device="cpu", max_model_len=512
    )


@pytest.fixture(scope="module")
def prompts(decoder: SpeculativeDecoder) -> list[list[int]]:
    """The shortest of each kind, so that prefill does not take all the time."""
    assert decoder.tokenizer is not None
    chosen: list[list[int]] = []
    for kind in KINDS:
        rendered = [render(decoder.tokenizer, p) for p in load_prompts("held-out", [kind])]
        chosen += sorted(rendered, key=len)[: -(-NUM_PROMPTS // len(KINDS))]
    return chosen[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def texts(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> dict[int, list[list[int]]]:
    """Greedy texts at depth 0 and at depth 4."""
    found = {}
    for depth in (0, 4):
        batch = decoder.generate(prompts, NUM_TOKENS, depth_scheduler=depth)
        found[depth] = [result.token_ids for result in batch]
        if depth:
            assert 0.1 < batch.metrics.acceptance_rate < 0.9
    return found


@torch.inference_mode()
def gap(model: PreTrainedModel, tokens: Sequence[int], first: int, second: int) -> float:
    """How far apart two tokens' logits are after `tokens`, in a plain forward."""
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    return float((logits[first] - logits[second]).abs())


def first_difference(left: list[int], right: list[int]) -> int | None:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def assert_same_up_to_ties(
    model: PreTrainedModel,
    prompts: list[list[int]],
    got: list[list[int]],
    wanted: list[list[int]],
    what: str,
) -> None:
    gaps = []
    for prompt, one, other in zip(prompts, got, wanted, strict=True):
        place = first_difference(one, other)
        if place is not None:
            assert place < min(len(one), len(other))  # one ends where the other goes on: no tie
            gaps.append(gap(model, prompt + one[:place], one[place], other[place]))
    print(f"{what}: {len(gaps)} of {len(got)} texts part, at gaps {[f'{g:.1e}' for g in gaps]}")
    assert all(each < LOGIT_GAP for each in gaps)


def test_depth_4_gives_the_text_of_depth_0(
    plain: PreTrainedModel, prompts: list[list[int]], texts: dict[int, list[list[int]]]
) -> None:
    assert len(prompts) == NUM_PROMPTS
    assert sum(len(text) == NUM_TOKENS for text in texts[4]) > NUM_PROMPTS / 2
    assert_same_up_to_ties(plain, prompts, texts[4], texts[0], "depth 4 against depth 0")


def test_every_token_is_the_one_that_a_plain_forward_would_take(
    plain: PreTrainedModel, prompts: list[list[int]], texts: dict[int, list[list[int]]]
) -> None:
    """Whole texts through plain transformers: each token has the largest logit, ties apart."""
    short = []
    with torch.inference_mode():
        for prompt, text in zip(prompts, texts[4], strict=True):
            logits = plain(
                input_ids=torch.tensor([prompt + text[:-1]]),
                use_cache=False,
                logits_to_keep=len(text),
            ).logits[0]
            short += (logits.amax(-1) - logits[range(len(text)), text]).tolist()
    ties = [each for each in short if each > 0]
    print(f"{len(ties)} of {len(short)} tokens lost a tie in the plain forward: {ties}")
    assert max(short) < LOGIT_GAP


def test_transformers_generate_writes_the_same(
    plain: PreTrainedModel, prompts: list[list[int]], texts: dict[int, list[list[int]]]
) -> None:
    chosen = list(range(0, NUM_PROMPTS, NUM_PROMPTS // NUM_GENERATED))
    generated = []
    for place in chosen:
        ids = torch.tensor([prompts[place]])
        output = plain.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        generated.append(output[0, ids.shape[1] :].tolist())
    assert_same_up_to_ties(
        plain,
        [prompts[place] for place in chosen],
        [texts[4][place] for place in chosen],
        generated,
        "depth 4 against transformers' generate",
    )


def test_the_shipped_draft_model_is_often_right_and_changes_no_text(
    plain: PreTrainedModel, prompts: list[list[int]], texts: dict[int, list[list[int]]]
) -> None:
    drafted = SpeculativeDecoder.from_pretrained(
        "default", "smollm2-eagle3", dtype=torch.float32, device="cpu", max_model_len=512
    )
    some = slice(0, len(prompts), 4)
    batch = drafted.generate(prompts[some], NUM_TOKENS, depth_scheduler=2)
    assert batch.metrics.acceptance_rate > 0.2
    written = [result.token_ids for result in batch]
    assert_same_up_to_ties(
        plain, prompts[some], written, texts[0][some], "the draft model against depth 0"
    )


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_default_model_runs_on_this_machine_in_any_format(dtype: str) -> None:
    """Whatever instructions there are: in bfloat16 it was once refused on a CPU without any for it."""
    decoder = SpeculativeDecoder.from_pretrained("default", dtype=dtype, device="cpu")
    (result,) = decoder.generate(["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,"], 24)
    assert (result.text or "").startswith(" 15, 16, 17, 18,")
    assert result.metrics.acceptance_length is not None
