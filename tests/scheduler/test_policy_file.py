from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.files import write_atomic
from specdepth.scheduler.policy_file import read_policy, save_policy


@pytest.fixture
def folder(tmp_path: Path, make_weights: Any, make_card: Any) -> Path:
    return save_policy(tmp_path / "policy", make_weights(), make_card())


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, drop: str = "", **changes: Any) -> None:
    """Change tensors and keep the checksum right, as a hostile file would."""
    path = folder / "policy.safetensors"
    tensors = load_file(path) | changes
    tensors.pop(drop, None)
    save_file(tensors, path)
    edit_config(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_saved_policy_reads_as_the_same(folder: Path, make_weights: Any, make_card: Any) -> None:
    weights, card = read_policy(folder)
    expected = make_weights()
    assert card == make_card()
    assert weights.depths == expected.depths
    assert (weights.clip, weights.activation) == (expected.clip, expected.activation)
    np.testing.assert_array_equal(weights.mean, expected.mean)
    np.testing.assert_array_equal(weights.inv_std, expected.inv_std)
    for got, wanted in zip(weights.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(weights.biases, expected.biases, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_folder_holds_two_data_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "policy.safetensors"]


def test_the_configuration_tells_what_the_policy_is(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == 1
    assert [feature["name"] for feature in config["features"]] == list(FEATURE_NAMES)
    assert config["layer_sizes"] == [NUM_FEATURES, 16, 12, 9]
    assert config["depths"] == list(range(9))
    assert config["env_id"] == "specdepth/LiveDecode-v0"
    assert config["versions"] == {"numpy": "2.0"}


def test_transposed_weights_are_written_right(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    plain = make_weights()
    strided = make_weights(weights=tuple(np.asfortranarray(weight) for weight in plain.weights))
    weights, _ = read_policy(save_policy(tmp_path, strided, make_card()))
    np.testing.assert_array_equal(weights.weights[0], plain.weights[0])


def test_saving_again_replaces_the_policy_and_keeps_other_files(
    folder: Path, make_weights: Any, make_card: Any
) -> None:
    (folder / "README.md").write_text("card")
    save_policy(folder, make_weights(hidden=(4,)), make_card(git_sha="new"))
    weights, card = read_policy(folder)
    assert weights.layer_sizes == (NUM_FEATURES, 4, 9)
    assert card.git_sha == "new"
    assert (folder / "README.md").read_text() == "card"


def test_an_interrupted_overwrite_is_refused_not_mixed(
    folder: Path, make_weights: Any, make_card: Any, monkeypatch: Any
) -> None:
    def interrupt(path: Path, data: bytes) -> None:
        if path.name == "config.json":
            raise KeyboardInterrupt
        write_atomic(path, data)

    monkeypatch.setattr("specdepth.scheduler.model_folder.write_atomic", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_policy(folder, make_weights(hidden=(4,)), make_card())
    with pytest.raises(ValueError, match="checksum differs"):
        read_policy(folder)


def test_a_policy_deeper_than_its_limit_is_not_saved(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    with pytest.raises(ValueError, match="deeper than max_num_speculative_tokens, which is 4"):
        save_policy(tmp_path / "p", make_weights(), make_card(max_num_speculative_tokens=4))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("training", [{"x": float("nan")}, {"x": object()}, {"x": np.float32(1)}])
def test_a_card_that_json_cannot_hold_is_not_saved(
    tmp_path: Path, make_weights: Any, make_card: Any, training: Any
) -> None:
    with pytest.raises(ValueError, match=r"JSON"):
        save_policy(tmp_path / "p", make_weights(), make_card(training=training))
    assert not (tmp_path / "p").exists()


# Weights


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": ()}, "1 to 16 layers"),
        ({"mean": np.zeros(NUM_FEATURES)}, "mean is float64"),
        ({"mean": np.zeros(3, np.float32)}, "inv_std is float32"),
        ({"inv_std": np.full(NUM_FEATURES, np.inf, np.float32)}, "inv_std holds NaN or infinite"),
        ({"clip": 0.0}, "clip must be"),
        ({"clip": float("nan")}, "clip must be"),
        ({"activation": "gelu"}, '"tanh" or "relu"'),
        ({"depths": (0, 1)}, "9 numbers"),
        ({"depths": (*range(8), -1)}, "one an action"),
    ],
)
def test_weights_that_make_no_network_are_refused(
    make_weights: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_weights(**changes)


# Files that must not load


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, '"format" must be'),
        ({"format_version": 2}, "format version 2, this specdepth reads 1"),
        ({"format_version": None}, "format version None"),
        ({"depths": "deep"}, '"depths" is missing or of the wrong type'),
        ({"depths": [0.5] * 9}, '"depths" must hold whole numbers'),
        ({"depths": [0, 1]}, "9 numbers"),
        ({"depths": list(range(1, 10))}, "do not fit max_num_speculative_tokens"),
        ({"max_num_speculative_tokens": True}, "max_num_speculative_tokens"),
        ({"max_num_speculative_tokens": 10**9}, "do not fit"),
        ({"layer_sizes": [NUM_FEATURES]}, "layer sizes"),
        ({"layer_sizes": [NUM_FEATURES] + [1] * 1000}, "layer sizes"),
        ({"layer_sizes": [NUM_FEATURES, 16, 12, 8]}, "the configuration says"),
        ({"layer_sizes": [NUM_FEATURES, 16, 9]}, "missing or unknown tensors layers.2"),
        ({"activation": "exec"}, '"tanh" or "relu"'),
        ({"mask_depths": 1}, "mask_depths"),
        ({"training": []}, "training"),
    ],
)
def test_bad_configurations_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"cannot use policy .*{words}"):
        read_policy(folder)


def test_other_features_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    features = config["features"]
    features[0]["name"] = "moon_phase"
    edit_config(folder, features=features)
    with pytest.raises(
        ValueError, match="has moon_phase that are not known, and lacks acceptance;"
    ):
        read_policy(folder)


def test_features_in_another_order_are_refused(folder: Path) -> None:
    features = json.loads((folder / "config.json").read_text())["features"]
    edit_config(folder, features=features[::-1])
    with pytest.raises(ValueError, match="come in another order"):
        read_policy(folder)


def test_features_in_another_unit_are_refused(folder: Path) -> None:
    features = json.loads((folder / "config.json").read_text())["features"]
    features[1]["unit"] = "furlongs"
    edit_config(folder, features=features)
    with pytest.raises(ValueError, match="acceptance_slow have another unit"):
        read_policy(folder)


@pytest.mark.parametrize("features", [[], [None], [1, 2], [{}], ["x" * 10_000] * 50])
def test_nonsense_features_are_refused_in_a_short_sentence(folder: Path, features: Any) -> None:
    edit_config(folder, features=features)
    with pytest.raises(ValueError, match="trained on other features") as error:
        read_policy(folder)
    assert len(str(error.value)) < 1500


def test_a_missing_folder_or_file_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no policy in .*nowhere: config\.json: No such file"):
        read_policy(tmp_path / "nowhere")
    (folder / "policy.safetensors").unlink()
    with pytest.raises(ValueError, match=r"policy\.safetensors: No such file"):
        read_policy(folder)


def test_a_flipped_bit_is_found(folder: Path) -> None:
    path = folder / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum differs"):
        read_policy(folder)


@pytest.mark.parametrize("name", ["config.json", "policy.safetensors"])
def test_every_truncation_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for end in range(0, len(data) - 2, len(data) // 40):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="cannot use policy"):
            read_policy(folder)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 64, b"\x80\x04N."])
def test_what_is_no_safetensors_is_refused(folder: Path, data: bytes) -> None:
    (folder / "policy.safetensors").write_bytes(data)
    edit_config(folder, weights_sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(ValueError, match=r"cannot use policy .*safetensors"):
        read_policy(folder)


@pytest.mark.parametrize(
    ("drop", "changes", "words"),
    [
        ("layers.1.bias", {}, "missing or unknown tensors layers.1.bias"),
        ("", {"extra": np.zeros(1, np.float32)}, "missing or unknown tensors extra"),
        ("", {"clip": np.zeros(2, np.float32)}, "clip must be one number"),
        ("", {"clip": np.zeros((), np.float32)}, "clip must be one number"),
        ("", {"mean": np.full(NUM_FEATURES, np.nan, np.float32)}, "mean holds NaN"),
        ("", {"mean": np.zeros(NUM_FEATURES, np.float16)}, "mean is float16"),
        ("", {"layers.0.bias": np.zeros((16, 1), np.float32)}, "bias 0 is float32"),
        ("", {"layers.0.weight": np.zeros((NUM_FEATURES, 16), np.float32)}, "weight 0 is float32"),
        ("", {"layers.0.bias": np.zeros((), np.float32)}, "cannot use policy"),
        ("", {"layers.2.bias": np.full(9, np.inf, np.float32)}, "bias 2 holds NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, drop: str, changes: dict[str, Any], words: str
) -> None:
    edit_tensors(folder, drop, **changes)
    with pytest.raises(ValueError, match=words):
        read_policy(folder)


@pytest.mark.parametrize(
    ("name", "size"), [("config.json", 1 << 20), ("policy.safetensors", 1 << 26)]
)
def test_oversized_files_are_not_read(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(size + 1)
    with pytest.raises(ValueError, match=f"{name} is larger than {size} bytes"):
        read_policy(folder)


def test_a_policy_of_one_depth_for_all_says_so(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    save_policy(tmp_path, make_weights(action="batch"), make_card())
    assert json.loads((tmp_path / "config.json").read_text())["action"] == "batch"
    weights, _ = read_policy(tmp_path)
    assert weights.action == "batch"
    assert not weights.shrinkage


def test_an_action_that_is_not_known_is_refused(folder: Path) -> None:
    edit_config(folder, action="team")
    with pytest.raises(ValueError, match=r"policy action is one of .*'batch'.*, got 'team'"):
        read_policy(folder)
