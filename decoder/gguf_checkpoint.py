"""Turns a GGUF file of a Llama model into a folder that transformers loads.

Written for the default model, whose only package holds a GGUF. transformers can read GGUF too, but
needs accelerate for it, cannot save what it read, and (5.24) builds the tokenizer without the digit
rule that this family was trained with; here the files are written directly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write `folder` (created) with config, generation config, tokenizer and bfloat16 weights.

    Weights are dequantised in float32 and rounded to bfloat16 once.

    Args:
        gguf_path: a Llama model with a byte-level BPE tokenizer, any quantisation that gguf knows.
        folder: where to; files of the same names are overwritten.

    Raises:
        ValueError: another architecture or tokenizer.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    architecture, pre = _field(reader, "general.architecture"), _field(reader, "tokenizer.ggml.pre")
    tokenizer_model = _field(reader, "tokenizer.ggml.model")
    if (architecture, tokenizer_model, pre) != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f"{gguf_path.name} holds architecture {architecture!r} with tokenizer "
            f"{tokenizer_model!r}/{pre!r}; only 'llama' with 'gpt2'/'smollm' can be converted: "
            "load the model from its original folder instead."
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(reader)
    config = _config(reader, tie_word_embeddings="lm_head.weight" not in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    _write_json(folder / "config.json", config)
    end_tokens = _end_tokens(reader)
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": end_tokens,
            "pad_token_id": config["pad_token_id"],
        },
    )
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))
    template = _field(reader, "tokenizer.chat_template", default=None)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _field(reader: GGUFReader, name: str, **default: Any) -> Any:
    field = reader.get_field(name)
    if field is None:
        if "default" in default:
            return default["default"]
        raise ValueError(f"the GGUF file has no field {name!r}; it is damaged or of another kind.")
    return field.contents()


def _config(reader: GGUFReader, *, tie_word_embeddings: bool) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # GGUF stores a float32, so 1e-5 comes back as 9.999999747e-06.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _end_tokens(reader: GGUFReader) -> list[int]:
    """The end of a turn, and of a text: a completion without a chat template meets the latter."""
    end = int(_field(reader, "tokenizer.ggml.eos_token_id"))
    tokens = _field(reader, "tokenizer.ggml.tokens")
    others = [i for i, token in enumerate(tokens[:64]) if token == "<|endoftext|>" and i != end]
    return [end, *others]


def _tensors(reader: GGUFReader) -> dict[str, Tensor]:
    import torch
    from gguf import dequantize

    heads = _field(reader, "llama.attention.head_count")
    heads_of = {"attn_q": heads, "attn_k": _field(reader, "llama.attention.head_count_kv")}
    tensors = {}
    for tensor in reader.tensors:
        name, kind = _tensor_name(tensor.name)
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads_of:
            values = _unpermute(values, heads_of[kind])
        weight = torch.from_numpy(np.array(values, np.float32))
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    return tensors


def _tensor_name(name: str) -> tuple[str, str]:
    """Return transformers' name of a GGUF tensor, and the kind of matrix it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}", stem
    block, layer, kind = stem.split(".")
    if block != "blk" or kind not in _LAYER_NAMES:
        raise ValueError(f"the GGUF file holds a tensor {name!r} that no Llama model has.")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", kind


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order of query and key: it interleaves the two halves that RoPE rotates.

    Args:
        weight: [num_heads * head size, hidden].
        num_heads: query or key heads.
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm" in GGUF: each digit by itself, then GPT-2's rule.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    named = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **{ours: tokens[_field(reader, f"tokenizer.ggml.{its}")] for ours, its in named.items()},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
