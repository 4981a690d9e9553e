from __future__ import annotations

from importlib import resources

import pytest

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.gpu_models import (
    H100,
    H200,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_32B,
    QWEN_HALF_B,
    VLLM_GRAPH_SIZES,
    Transformer,
    gpu_cost_model,
    shipped_gpu_models,
    smallest_tensor_parallel,
    write_gpu_models,
)

PLAIN = gpu_cost_model(H100, LLAMA_8B, cuda_graph_sizes=())


@pytest.mark.parametrize(
    ("model", "billions"),
    [(LLAMA_8B, 8.03), (LLAMA_70B, 70.55), (QWEN_32B, 32.76)],
)
def test_parameters_add_up_to_the_published_count(model: Transformer, billions: float) -> None:
    total = model.body_parameters + 2 * model.head_parameters  # these embeddings are not tied
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(("model", "billions"), [(LLAMA_1B, 1.236), (QWEN_HALF_B, 0.494)])
def test_small_models_tie_their_embedding(model: Transformer, billions: float) -> None:
    total = model.body_parameters + model.head_parameters
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


def test_kv_of_llama_8b_is_128_kib_a_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 2**17


def test_one_token_streams_the_weights_once() -> None:
    # 15.01 GB over 0.8 of 3.35 TB/s, and 32 layers of 15 us.
    assert PLAIN.pass_s(1) == pytest.approx(15.009e9 / 2.68e12 + 480e-6, rel=1e-3)


def test_a_large_pass_is_bound_by_arithmetic() -> None:
    # 2 x 7.505e9 FLOP a token over 0.65 of 989 TFLOP/s.
    assert PLAIN.pass_s(4096) == pytest.approx(4096 * 15.009e9 / 642.85e12 + 480e-6, rel=1e-3)


def test_the_pass_bends_where_arithmetic_takes_over() -> None:
    bend = 642.85e12 / 2.68e12  # FLOP a byte; a bfloat16 weight is 2 FLOP and 2 bytes
    assert PLAIN.free_tokens(0.001) == pytest.approx(bend, abs=1)
    assert PLAIN.pass_s(int(bend)) == pytest.approx(PLAIN.pass_s(1), rel=1e-4)


def test_context_is_read_from_memory() -> None:
    assert PLAIN.context_s == pytest.approx(2**17 / 2.68e12, rel=1e-4)


def test_prefill_saves_the_head() -> None:
    saved = PLAIN.pass_s(4096) - PLAIN.pass_s(4096, 4096)
    assert saved == pytest.approx(4095 * 2 * 4096 * 128256 / 642.85e12, rel=1e-2)


def test_two_gpus_share_weights_and_pay_for_talking() -> None:
    two = gpu_cost_model(H100, LLAMA_8B, tensor_parallel=2, cuda_graph_sizes=())
    talk = 2 * 32 * (8e-6 + 4096 * 2 / 450e9)
    assert two.pass_s(1) == pytest.approx(15.009e9 / 5.36e12 + 480e-6 + talk, rel=1e-3)


def test_more_bandwidth_moves_the_knee_down() -> None:
    faster = gpu_cost_model(H200, LLAMA_8B, cuda_graph_sizes=())
    assert faster.pass_s(1) < PLAIN.pass_s(1)
    assert faster.knee_tokens() < PLAIN.knee_tokens()


def test_drafting_is_free_without_a_draft_model() -> None:
    assert PLAIN.drafter_is_free
    drafted = gpu_cost_model(H100, LLAMA_8B, LLAMA_1B)
    assert 0 < drafted.draft_pass_s(1) < 0.25 * drafted.pass_s(1)


def test_graph_sizes_are_those_of_vllm() -> None:
    assert VLLM_GRAPH_SIZES[:5] == (1, 2, 4, 8, 16)
    assert VLLM_GRAPH_SIZES[-2:] == (496, 512)
    assert {248, 256, 272} < set(VLLM_GRAPH_SIZES)
    assert 264 not in VLLM_GRAPH_SIZES


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="139 GB of weights, 1 H100 SXM hold 80 GB"):
        gpu_cost_model(H100, LLAMA_70B)


@pytest.mark.parametrize(
    ("gpu", "model", "ways"),
    [
        (H100, LLAMA_8B, 1),
        (H100, QWEN_32B, 2),
        (H100, LLAMA_70B, 4),
        (H200, QWEN_32B, 1),
        (H200, LLAMA_70B, 2),
    ],
)
def test_as_few_gpus_as_leave_room_for_kv(gpu, model, ways: int) -> None:
    assert smallest_tensor_parallel(gpu, model) == ways


def test_the_shipped_files_are_what_the_code_writes(tmp_path) -> None:
    folder = resources.files("specdepth.checkpoints") / "costs"
    written = write_gpu_models(tmp_path)
    shipped = {entry.name for entry in folder.iterdir() if entry.name.endswith("-modelled.json")}
    assert {path.name for path in written} == shipped
    for path in written:
        with resources.as_file(folder / path.name) as there:
            assert CostModel.load(there) == CostModel.load(path), path.name


def test_shipped_models_say_that_they_are_modelled() -> None:
    models = dict(shipped_gpu_models())
    assert len(models) == 6
    for name, cost in models.items():
        assert name.endswith("-modelled")
        assert "modelled" in cost.name
        assert not cost.measured
        assert cost.cuda_graph_sizes == VLLM_GRAPH_SIZES
