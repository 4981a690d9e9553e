from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdepth.scheduler.files import write_atomic
from specdepth.scheduler.survival_file import (
    SurvivalCard,
    SurvivalWeights,
    read_survival,
    save_survival,
)

INPUTS = ("acceptance", "match_2", "last_depth")


def build_weights(hidden: int = 5, depth: int = 8, **changes: Any) -> SurvivalWeights:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    inputs = changes.get("inputs", INPUTS)
    fields: dict[str, Any] = {
        "inputs": inputs,
        "hidden_weight": draw(hidden, len(inputs)),
        "hidden_bias": draw(hidden),
        "out_weight": draw(depth, hidden),
        "out_bias": draw(depth),
    }
    return SurvivalWeights(**(fields | changes))


def build_card(**changes: Any) -> SurvivalCard:
    fields: dict[str, Any] = {
        "model_pair": "SmolLM2-135M-Instruct + prompt-lookup",
        "drafter": "prompt-lookup",
        "git_sha": "0123abc",
        "versions": {"numpy": "2.0"},
        "training": {"rows": 1000},
    }
    return SurvivalCard(**(fields | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_survival(tmp_path / "survival", build_weights(), build_card())


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, drop: str = "", **changes: Any) -> None:
    """Change tensors and keep the checksum right, as a hostile file would."""
    path = folder / "survival.safetensors"
    tensors = load_file(path) | changes
    tensors.pop(drop, None)
    save_file(tensors, path)
    edit_config(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_saved_model_reads_as_the_same(folder: Path) -> None:
    weights, card = read_survival(folder)
    expected = build_weights()
    assert card == build_card()
    assert weights.inputs == INPUTS
    for name in ("hidden_weight", "hidden_bias", "out_weight", "out_bias"):
        np.testing.assert_array_equal(getattr(weights, name), getattr(expected, name))


def test_the_folder_holds_two_data_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "survival.safetensors"]


def test_the_configuration_tells_what_the_model_is(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["format"], config["format_version"]) == ("specdepth-survival", 1)
    assert config["inputs"][0] == {"name": "acceptance", "unit": "fraction"}
    assert (config["hidden_units"], config["max_num_speculative_tokens"]) == (5, 8)


def test_transposed_weights_are_written_right(tmp_path: Path) -> None:
    plain = build_weights()
    strided = build_weights(hidden_weight=np.asfortranarray(plain.hidden_weight))
    weights, _ = read_survival(save_survival(tmp_path, strided, build_card()))
    np.testing.assert_array_equal(weights.hidden_weight, plain.hidden_weight)


def test_saving_again_replaces_the_model_and_keeps_other_files(folder: Path) -> None:
    (folder / "README.md").write_text("card")
    save_survival(folder, build_weights(hidden=2), build_card(git_sha="new"))
    weights, card = read_survival(folder)
    assert (len(weights.hidden_bias), card.git_sha) == (2, "new")
    assert (folder / "README.md").read_text() == "card"


def test_an_interrupted_overwrite_is_refused_not_mixed(folder: Path, monkeypatch: Any) -> None:
    def interrupt(path: Path, data: bytes) -> None:
        if path.name == "config.json":
            raise KeyboardInterrupt
        write_atomic(path, data)

    monkeypatch.setattr("specdepth.scheduler.model_folder.write_atomic", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_survival(folder, build_weights(hidden=2), build_card())
    with pytest.raises(ValueError, match="checksum differs"):
        read_survival(folder)


@pytest.mark.parametrize("training", [{"x": float("nan")}, {"x": object()}, {"x": np.float32(1)}])
def test_a_card_that_json_cannot_hold_is_not_saved(tmp_path: Path, training: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_survival(tmp_path / "s", build_weights(), build_card(training=training))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": ("acceptance", "moon_phase", "tide")}, "moon_phase, tide are no features"),
        ({"inputs": ("acceptance", "match_2", "acceptance")}, "a name twice"),
        ({"inputs": ()}, "1 to 4096 inputs"),
        ({"out_bias": np.zeros(0, np.float32)}, "positions"),
        ({"out_bias": np.zeros(2000, np.float32)}, "1 to 1024 positions"),
        ({"hidden_bias": np.zeros(4, np.float32)}, "hidden_weight is float32"),
        ({"out_weight": np.zeros((8, 5))}, "out_weight is float64"),
        ({"out_bias": np.full(8, np.nan, np.float32)}, "out_bias holds NaN or infinite"),
    ],
)
def test_weights_that_make_no_network_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_weights(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "specdepth-policy"}, '"format" must be'),
        ({"format_version": 2}, "format version 2, this specdepth reads 1"),
        ({"format_version": True}, "format version True"),
        ({"inputs": "acceptance"}, '"inputs" is missing or of the wrong type'),
        ({"inputs": []}, "1 to 4096 inputs"),
        ({"inputs": [None]}, "None are not known"),
        ({"inputs": [{"name": "acceptance", "unit": "furlongs"}]}, "acceptance have another unit"),
        ({"inputs": [{"name": "moon", "unit": "x"}]}, "other features: moon are not known"),
        ({"inputs": [{"name": "acceptance", "unit": "fraction"}] * 2}, "a name twice"),
        ({"inputs": [{"name": "acceptance", "unit": "fraction"}]}, "hidden_weight is float32"),
        ({"hidden_units": 6}, r"\(5, 8\), the configuration says \(6, 8\)"),
        ({"max_num_speculative_tokens": 4}, "the configuration says"),
        ({"max_num_speculative_tokens": True}, "max_num_speculative_tokens"),
        ({"training": []}, "training"),
    ],
)
def test_bad_configurations_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"cannot use survival model .*{words}"):
        read_survival(folder)


@pytest.mark.parametrize("inputs", [["x" * 10_000] * 50, [{"name": "y" * 10_000}] * 5000])
def test_nonsense_inputs_are_refused_in_a_short_sentence(folder: Path, inputs: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"inputs": inputs}
    text = json.dumps(config)[: 1 << 20]
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="cannot use survival model") as error:
        read_survival(folder)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": "out_bias"}, "missing or unknown tensors out_bias"),
        ({"extra": np.zeros(1, np.float32)}, "missing or unknown tensors extra"),
        ({"out_bias": np.zeros(7, np.float32)}, "out_weight is float32"),
        ({"hidden_bias": np.full(5, np.inf, np.float32)}, "NaN or infinite"),
        ({"hidden_bias": np.zeros(5, np.float16)}, "hidden_bias is float16"),
    ],
)
def test_bad_tensors_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_tensors(folder, **changes)
    with pytest.raises(ValueError, match=rf"cannot use survival model .*{words}"):
        read_survival(folder)


def test_a_missing_folder_or_file_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no survival model in .*nowhere: config\.json: No such"):
        read_survival(tmp_path / "nowhere")
    (folder / "survival.safetensors").unlink()
    with pytest.raises(ValueError, match=r"survival\.safetensors: No such file"):
        read_survival(folder)


def test_a_file_that_is_too_large_is_refused_unread(folder: Path) -> None:
    (folder / "config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match=r"config\.json is larger than"):
        read_survival(folder)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    path = folder / "survival.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum differs"):
        read_survival(folder)


@pytest.mark.parametrize("name", ["config.json", "survival.safetensors"])
def test_every_truncation_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for end in range(0, len(data) - 2, len(data) // 40):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="cannot use survival model"):
            read_survival(folder)
