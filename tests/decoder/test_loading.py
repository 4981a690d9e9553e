"""Models from folders and from memory, with and without a tokenizer, in any precision."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from specdepth.decoder import bf16_kernels, loading
from specdepth.decoder.loading import is_model, load_model, resolve_device, resolve_dtype
from tests.decoder.tiny import char_tokenizer, greedy_text, tiny_llama

CPU = torch.device("cpu")
MODEL = tiny_llama(eos_token_id=[7, 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "my-model"
    copy.deepcopy(MODEL).save_pretrained(path)
    return path


def test_a_folder_is_a_model_with_its_end_tokens(folder: Path) -> None:
    loaded = load_model(folder, torch.float64, CPU)
    assert loaded.name == "my-model"
    assert loaded.tokenizer is None
    assert loaded.end_token_ids == (7, 9)
    assert loaded.model.dtype == torch.float64
    assert not loaded.model.training
    assert greedy_text(loaded.model, [1, 2], 8) == greedy_text(MODEL, [1, 2], 8)


def test_a_folder_brings_its_tokenizer_and_an_argument_goes_before_it(
    folder: Path, tmp_path: Path
) -> None:
    copy.deepcopy(MODEL).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), torch.float32, CPU)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("ab")["input_ids"] == [65, 66]
    mine = char_tokenizer()
    assert load_model(tmp_path, torch.float32, CPU, mine).tokenizer is mine
    assert load_model(folder, torch.float32, CPU, mine).tokenizer is mine


def test_a_loaded_model_is_taken_as_it_is() -> None:
    model = copy.deepcopy(MODEL).train()
    loaded = load_model(model, torch.float32, CPU)
    assert loaded.model is model
    assert loaded.name == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


def test_rotary_frequencies_keep_their_precision_in_bf16() -> None:
    """`model.to(bfloat16)` would round them, and far positions would turn by wrong angles."""
    wanted = tiny_llama(dtype=torch.float32).model.rotary_emb.inv_freq
    model = load_model(tiny_llama(dtype=torch.float32), torch.bfloat16, CPU).model
    got = model.model.rotary_emb.inv_freq
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)


def test_tied_weights_stay_tied() -> None:
    model = load_model(tiny_llama(tie_word_embeddings=True), torch.float32, CPU).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_only_loaded_models_are_models() -> None:
    assert is_model(MODEL)
    assert not is_model("default")
    assert not is_model(torch.nn.Linear(2, 2))


def test_dtypes_by_name_and_by_value() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("bfloat16", cpu) == resolve_dtype(torch.bfloat16, cpu) == torch.bfloat16
    with pytest.raises(ValueError, match="got 'nn'"):
        resolve_dtype("nn", cpu)


@pytest.mark.parametrize(
    ("flags", "kernels", "expected"),
    [
        ({"avx512f", "avx512_bf16"}, None, torch.bfloat16),
        ({"amx_bf16"}, None, torch.bfloat16),
        ({"asimd", "bf16"}, None, torch.bfloat16),
        ({"avx2", "avx512f", "avx512_vnni"}, None, torch.float32),
        ({"avx2", "avx512f", "avx512_vnni"}, "compiled", torch.bfloat16),
        (set(), None, torch.float32),
    ],
)
def test_auto_takes_bfloat16_only_where_a_cpu_is_fast_with_it(
    flags: set[str],
    kernels: str | None,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(bf16_kernels, "load", lambda: kernels)
    assert resolve_dtype("auto", torch.device("cpu")) == expected


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_sixteen_bits_on_a_gpu(
    has: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    assert resolve_dtype("auto", torch.device("cuda")) == expected


def test_no_device_named_takes_what_there_is() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device(None).type == wanted
    assert resolve_device("cpu") == resolve_device(CPU) == CPU


@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_refused() -> None:
    count = torch.cuda.device_count()
    assert resolve_device(f"cuda:{count - 1}").index == count - 1
    with pytest.raises(ValueError, match=f"sees {count} CUDA devices"):
        resolve_device(f"cuda:{count}")
