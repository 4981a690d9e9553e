"""What the package ships, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdepth.checkpoints import shipped_names, shipped_path

KINDS = {
    "costs": ".json",
    "drafts": "",
    "rules": ".json",
    "survival": "",
    "traces": ".npz",
}


@pytest.mark.parametrize(("kind", "suffix"), KINDS.items())
def test_each_name_leads_to_what_is_shipped(kind: str, suffix: str) -> None:
    names = shipped_names(kind, suffix)
    assert names
    assert list(names) == sorted(names)
    for name in names:
        with shipped_path(kind, name, suffix) as path:
            assert path.is_file() if suffix else path.is_dir()


@pytest.mark.parametrize("kind", sorted({*KINDS, "policies"} - {"survival"}))
def test_each_kind_has_a_card(kind: str) -> None:
    with shipped_path(kind, "README", ".md") as path:
        assert len(path.read_text(encoding="utf-8").split()) > 15


def test_a_kind_that_is_not_there_has_no_names() -> None:
    assert shipped_names("nothing") == ()


def test_cards_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kind" / "one").mkdir(parents=True)
    (tmp_path / "kind" / "README.md").touch()
    monkeypatch.setattr("specdepth.checkpoints.files", lambda package: tmp_path)
    assert shipped_names("kind") == ("one",)
    assert shipped_names("kind", ".json") == ()
