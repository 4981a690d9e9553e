from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# The scripts find their helpers beside them, as they do when Python runs one.
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session")
def benchmarks() -> Path:
    return BENCHMARKS


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Llama without a tokenizer."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=5,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    return str(folder)
