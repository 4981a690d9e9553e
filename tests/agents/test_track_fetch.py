"""Policies by name from W&B: the real client, and a server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

import specdepth
from specdepth.agents import track_fetch
from specdepth.agents.track_fetch import check_entries, fetch_names, fetch_policy
from specdepth.agents.track_policies import policy_artifact, policy_origin
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.artifact_server import artifact_server
from tests.agents.made_policy import save_constant

NAME = "wandb:team/specdepth/draft-depth-policy:best"
KEY = "x" * 40

Find = Callable[[str], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of depth 3."""
    return save_constant(tmp_path_factory.mktemp("made"), 3)


@pytest.fixture(scope="module")
def artifacts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the server has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        good = policy_artifact(made, "draft-depth-policy", {})
        (made / "more.py").write_text("raise SystemExit")
        good.add_file(str(made / "more.py"))
        damaged = wandb.Artifact("damaged", type="model")
        damaged.add_file(str(made / "more.py"), name="policy.safetensors")
        damaged.add_file(str(made / "config.json"))
        other = wandb.Artifact("other", type="model")
        other.add_file(str(made / "more.py"))
        results = wandb.Artifact("results", type="evaluation")
        results.add_file(str(made / "more.py"))
    return {one.name: one for one in (good, damaged, other, results)}


@pytest.fixture(scope="module")
def server(artifacts: dict[str, Any]) -> Iterator[str]:
    with artifact_server(artifacts) as address:
        yield address


@pytest.fixture(scope="module")
def find(server: str) -> Find:
    api = wandb.Api(overrides={"base_url": server}, api_key=KEY)
    return lambda path: api.artifact(path, type="model")


def test_a_fetched_policy_is_one_like_any_other(find, tmp_path):
    folder = fetch_policy(NAME, tmp_path / "new" / "here", find)
    assert LearnedScheduler.load(folder).weights.biases[0].argmax() == 3
    assert policy_origin(folder).artifact == "team/specdepth/draft-depth-policy:v3"


def test_files_that_no_policy_has_stay_where_they_are(find, tmp_path):
    folder = fetch_policy(NAME, tmp_path / "x", find)
    assert {path.name for path in folder.iterdir()} == {
        "policy.safetensors",
        "config.json",
        "wandb.json",
    }


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("wandb:team/p/name", "team/p/name:latest"),
        ("wandb:p/name:v2", "p/name:v2"),
        ("wandb:name:seed-0", "name:seed-0"),
    ],
)
def test_entity_project_and_alias_may_be_left_out(tmp_path, name, path):
    asked: list[str] = []

    def find(path: str) -> Any:
        asked.append(path)
        raise wandb.errors.CommError("not there")

    with pytest.raises(ValueError, match="not there"):
        fetch_policy(name, tmp_path, find)
    assert asked == [path]


@pytest.mark.parametrize("name", ["wandb:", "wandb:a/b/c/d:e", "wandb:a:b:c", "wandb:a/../b/c"])
def test_what_is_no_name_is_refused_before_anything_is_asked(tmp_path, name):
    with pytest.raises(ValueError, match='expected "wandb:entity/project/name:alias"'):
        fetch_policy(name, tmp_path, lambda path: pytest.fail("asked"))


def test_damaged_weights_are_refused_as_those_of_any_folder(find, tmp_path):
    folder = fetch_policy("wandb:team/specdepth/damaged", tmp_path, find)
    with pytest.raises(ValueError, match="its checksum differs"):
        LearnedScheduler.load(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wandb:team/specdepth/absent:best", "'absent:best' not found in 'team/specdepth'"),
        ("wandb:team/specdepth/other:v0", r"it is no policy: it has no policy\.safetensors"),
        ("wandb:team/specdepth/results:v0", "artifact is of type 'evaluation'"),
    ],
)
def test_what_is_no_policy_there_is_refused_in_a_sentence(find, tmp_path, name, reason):
    with pytest.raises(ValueError, match=f"cannot fetch {name} .*{reason}; check the name") as told:
        fetch_policy(name, tmp_path / "x", find)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "x").exists()


def test_references_to_other_places_are_not_followed():
    artifact = wandb.Artifact("x", type="model")
    artifact.add_reference("https://127.0.0.1/p", name="policy.safetensors", checksum=False)
    with pytest.raises(ValueError, match="a reference to another place, which is not followed"):
        check_entries(artifact.manifest.entries)


def test_files_larger_than_policies_are_not_downloaded(made):
    entries = policy_artifact(made, "x", {}).manifest.entries
    check_entries(entries)
    entries["config.json"].size = 1 << 40
    with pytest.raises(ValueError, match=r"config\.json is larger than 67108864 bytes"):
        check_entries(entries)


def test_names_of_schedulers_become_folders(find, tmp_path, monkeypatch):
    monkeypatch.setattr(track_fetch, "_find", find)
    monkeypatch.setenv("WANDB_MODE", "online")
    names = ["off", "table:1-2=3,3-=0", f"policy:{NAME}", f"guarded:policy:{NAME}:goodput"]
    found = fetch_names(names, tmp_path / "p")
    place = tmp_path / "p" / "team-specdepth-draft-depth-policy-best"
    assert found == {
        names[0]: names[0],
        names[1]: names[1],
        names[2]: f"policy:{place}",
        names[3]: f"guarded:policy:{place}:goodput",
    }
    made: Any = specdepth.make_scheduler(found[names[3]])
    assert isinstance(made.inner, LearnedScheduler)


def test_offline_it_says_what_to_do(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(
        ValueError, match="while WANDB_MODE is offline: unset it, or give the folder"
    ):
        specdepth.load_policy(NAME)


PROBE = """
import os, sys
{before}
from specdepth import load_policy
try:
    print(load_policy({name!r}).weights.biases[0].argmax())
except ValueError as error:
    print(error)
print("torch" in sys.modules, [n for n in os.listdir({temporary!r}) if 'specdepth' in n])
"""


@pytest.mark.parametrize(
    ("before", "key", "end"),
    [
        ("", KEY, "3"),
        ("", "", 'that you are logged in ("wandb login").'),
        ("sys.modules['wandb'] = None", KEY, "needs wandb; install it with: pip install wandb."),
    ],
)
def test_load_policy_takes_a_name_and_leaves_nothing(server, before, key, end, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "TMPDIR": str(temporary),
        "WANDB_BASE_URL": server,
        "WANDB_API_KEY": key,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before, name=NAME, temporary=str(temporary))],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, state = run.stdout.strip().splitlines()
    assert told.endswith(end)
    assert state == "False []"
