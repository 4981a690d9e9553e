"""Policies as artifacts, and the note that says which one a folder holds."""

from __future__ import annotations

import json

import pytest

from specdepth.agents.track_policies import (
    NOTE_FILE,
    collection_name,
    policy_artifact,
    policy_folder,
    policy_origin,
    write_note,
)
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.made_policy import save_constant


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (None, "draft-depth-policy"),
        ("discount-0", "draft-depth-policy-discount-0"),
        ("a b/c:d", "draft-depth-policy-a-b-c-d"),
    ],
)
def test_a_group_has_an_artifact_of_its_own(group, name):
    assert collection_name(group) == name


def test_names_are_no_longer_than_wandb_takes():
    assert len(collection_name("x" * 500)) == 128


def test_the_same_policy_is_the_same_version_whoever_logs_it(tmp_path):
    folder = save_constant(tmp_path / "a", 2)
    before = policy_artifact(folder, "one", {"seed": 1})
    write_note(folder, "team/specdepth/one:run-x")
    (folder / "notes.txt").write_text("mine")
    after = policy_artifact(folder, "one", {})
    assert before.digest == after.digest
    assert set(after.manifest.entries) == {"policy.safetensors", "config.json"}
    assert after.metadata["model_pair"] == "made + prompt-lookup"
    other = policy_artifact(save_constant(tmp_path / "b", 3), "one", {})
    assert other.digest != after.digest


def test_a_note_belongs_to_its_weights(tmp_path):
    folder = save_constant(tmp_path, 2)
    assert policy_origin(folder).artifact is None
    write_note(folder, "team/specdepth/one:v3")
    assert policy_origin(folder).artifact == "team/specdepth/one:v3"
    LearnedScheduler.load(folder)  # the note is in nobody's way
    save_constant(tmp_path, 3)
    assert policy_origin(folder).artifact is None


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"artifact": "x"}', '{"other": 1}', "\x00", "[" * 9999]
)
def test_a_damaged_note_is_none(tmp_path, text):
    folder = save_constant(tmp_path, 2)
    (folder / NOTE_FILE).write_text(text)
    assert policy_origin(folder).artifact is None


def test_a_note_of_a_wrong_kind_is_none(tmp_path):
    folder = save_constant(tmp_path, 2)
    sha256 = policy_origin(folder).weights_sha256
    (folder / NOTE_FILE).write_text(json.dumps({"weights_sha256": sha256, "artifact": ["x"]}))
    assert policy_origin(folder).artifact is None


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no policy in .*config\.json: No such file"):
        policy_artifact(tmp_path, "one", {})


def test_only_names_of_policies_lead_to_a_folder(tmp_path):
    folder = save_constant(tmp_path / "p", 2)
    for name in (f"policy:{folder}", str(folder), f"guarded:policy:{folder}"):
        assert policy_folder(name) == folder
    for name in ("off", "fixed:3", "policy:absent", f"policy:{tmp_path}"):
        assert policy_folder(name) is None
