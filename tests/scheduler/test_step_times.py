from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.step_times import StepTime, fit_step_times, read_step_times


def write(folder: Path, text: str) -> Path:
    path = folder / "times.csv"
    path.write_text(text, encoding="utf-8")
    return path


def verify(tokens: int, context: int, seconds: float) -> StepTime:
    return StepTime(
        kind="verify", sequences=1, tokens=tokens, context_tokens=context, seconds=seconds
    )


# Reading


def test_a_row_is_a_pass(tmp_path: Path) -> None:
    path = write(tmp_path, "sequences,tokens,context,ms\n4,20,100,7.5\n")
    assert read_step_times(path) == [
        StepTime(kind="verify", sequences=4, tokens=20, context_tokens=400, seconds=0.0075)
    ]


def test_depth_stands_for_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, "batch_size,k,ms\n4,3,7.5\n")
    assert read_step_times(path)[0].tokens == 16


def test_without_tokens_and_depth_each_sequence_has_one_token(tmp_path: Path) -> None:
    path = write(tmp_path, "num_seqs,step_time_ms\n4,7.5\n")
    assert read_step_times(path)[0].tokens == 4


def test_other_names_delimiters_and_comments_are_read(tmp_path: Path) -> None:
    text = (
        "\ufeff# from a log\nPhase; Num Tokens ;total-context; latency_ms;gpu\n\ndecode;8;900;5;x\n"
    )
    path = write(tmp_path, text)
    assert read_step_times(path) == [
        StepTime(kind="verify", sequences=8, tokens=8, context_tokens=900, seconds=0.005)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hold no passes"),
        ("sequences,ms\n", "hold no passes"),
        ("sequences,tokens\n1,1\n", "columns \"ms\" and .* are needed, .*'sequences', 'tokens'"),
        ("ms\n1\n", 'columns "ms" and "sequences" or "tokens" are needed'),
        ("ms,batch,sequences\n1,1,1\n", "'batch' and 'sequences' mean the same"),
        ("tokens,ms\n1,1\n4,abc\n", "line 3, column 'ms': expected a number .* got 'abc'"),
        ("tokens,ms\n1,0\n", "line 2, column 'ms'"),
        ("tokens,ms\n1,nan\n", "line 2, column 'ms'"),
        ("tokens,ms\n\n1.5,3\n", "line 3, column 'tokens': expected a whole number"),
        ("tokens,ms\n-3,3\n", "line 2, column 'tokens'"),
        ("tokens,sequences,ms\n3\n", "line 2 has no column"),
        ("tokens,kind,ms\n3,train,1\n", "line 2, column 'kind': expected verify"),
        ("tokens,context,ms\n3,-1,1\n", "line 2, column 'context'"),
        ("tokens,kind,ms\n3,prefill,1\n", "none of the 1 passes is of kind verify"),
    ],
)
def test_bad_files_are_refused_by_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CostModel.from_step_times(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read step times .*none\.csv"):
        CostModel.from_step_times(tmp_path / "none.csv")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot use step times"):
        CostModel.from_step_times(path)


# Fitting


@given(
    st.floats(1e-3, 0.05),
    st.floats(0.0, 1e-3),
    st.floats(0.0, 1e-6),
)
def test_a_known_law_is_recovered(base: float, token_s: float, context_s: float) -> None:
    steps = [
        verify(n, context, base + token_s * n + context_s * context)
        for n in (1, 4, 16, 64)
        for context in (100, 2000, 9000)
    ]
    cost = fit_step_times(steps, name="law")
    for n, context in ((1, 0), (8, 500), (64, 4000)):
        assert cost.pass_s(n, 0, context) == pytest.approx(
            base + token_s * n + context_s * context, rel=1e-6
        )


def test_a_fifth_of_spikes_moves_nothing_much() -> None:
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(400):
        n, context = int(rng.choice([1, 8, 32])), int(rng.integers(0, 20_000))
        seconds = (0.01 + 2e-4 * n + 3e-7 * context) * (1 + 0.02 * rng.standard_normal())
        steps.append(verify(n, context, seconds * (8 if rng.random() < 0.2 else 1)))
    cost = fit_step_times(steps, name="noisy")
    assert cost.context_s == pytest.approx(3e-7, rel=0.15)
    assert cost.pass_s(8, 0, 10_000) == pytest.approx(0.0146, rel=0.05)


def test_the_smallest_size_stands_for_smaller_ones() -> None:
    cost = fit_step_times([verify(8, 0, 0.02), verify(16, 0, 0.03)], name="wide")
    assert cost.tokens == (1, 8, 16)
    assert cost.pass_s(1) == cost.pass_s(8) == 0.02
    assert cost.measured


def test_one_context_a_size_leaves_context_in_the_price() -> None:
    cost = fit_step_times([verify(1, 100, 0.02), verify(2, 900, 0.03)], name="x")
    assert cost.context_s == 0.0
    assert cost.pass_s(2) == 0.03


def test_prefill_and_draft_passes_have_curves_of_their_own(tmp_path: Path) -> None:
    text = "kind,sequences,tokens,ms\nverify,1,1,10\nverify,8,8,12\nverify,8,64,30\n"
    text += "prefill,1,64,20\nprefill,2,256,80\ndraft,1,1,1\ndraft,8,8,2\ndraft,8,8,4\n"
    cost = CostModel.from_step_times(write(tmp_path, text))
    assert cost.tokens == (1, 8, 64, 256)
    assert cost.pass_s(64, 64) == pytest.approx(0.02)
    assert cost.pass_s(256, 256) == pytest.approx(0.08)
    assert cost.pass_s(8, 8) == pytest.approx(0.012)  # prefill that small was not measured
    assert cost.draft_pass_s(8) == pytest.approx(0.003)
    assert cost.name == "times"


def test_staircases_are_kept() -> None:
    steps = [verify(n, 0, s) for n, s in ((1, 0.05), (8, 0.12), (16, 0.08))]
    assert fit_step_times(steps, name="stairs").pass_s(8) == 0.12
