from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specdepth.agents.results import (
    ResultRow,
    Results,
    Series,
    check_writable,
    collect_device,
    collect_versions,
    rows_from_metrics,
    unit_of,
    write_atomically,
)
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.request import RequestMetrics


def make_row(**changes: object) -> ResultRow:
    values = {
        "policy": "off",
        "load": 4,
        "metric": "throughput_tok_s",
        "value": 42.5,
        "unit": "tok/s",
    }
    return ResultRow(**(values | changes))  # type: ignore[arg-type]


def make_results() -> Results:
    rows = (
        make_row(),
        make_row(policy="learned", value=50.0, ci_low=48.0, ci_high=52.0),
        make_row(load="varying", value=30),
        make_row(load=1, value=18.9),
    )
    series = {"learning_curve": Series(x=(0, 1), y=(1.0, 2.0), x_label="rounds", y_label="tok/s")}
    return Results.collect("specdepth demo --seed 3", {"seed": 3}, rows, series=series)


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    results = make_results()
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_rows_have_exactly_the_documented_fields(tmp_path: Path) -> None:
    make_results().save(tmp_path / "results.json")
    document = json.loads((tmp_path / "results.json").read_text())
    fields = {"policy", "load", "metric", "value", "unit", "ci_low", "ci_high"}
    assert all(set(row) == fields for row in document["rows"])
    assert document["format_version"] == 1
    assert {"config", "versions", "device", "command", "created"} <= set(document)


def test_loads_are_numbers_first_then_names() -> None:
    assert make_results().loads == [1, 4, "varying"]
    assert make_results().policies == ["off", "learned"]


def test_rows_are_found_by_policy_load_and_metric() -> None:
    results = make_results()
    row = results.find("learned", 4, "throughput_tok_s")
    assert row is not None
    assert row.value == 50.0
    assert results.find("learned", 1, "throughput_tok_s") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "12", True])
def test_values_that_are_no_finite_number_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="throughput_tok_s must be a finite number"):
        make_row(value=value)


@pytest.mark.parametrize(
    "bounds", [{"ci_low": 1.0}, {"ci_high": 1.0}, {"ci_low": float("nan"), "ci_high": 1.0}]
)
def test_half_an_interval_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="two finite numbers or none"):
        make_row(**bounds)


def test_a_series_needs_as_many_x_as_y() -> None:
    with pytest.raises(ValueError, match="as many x as y"):
        Series(x=(1.0,), y=(), x_label="x", y_label="y")


@dataclass(frozen=True)
class Inner:
    rate: float = 3e-4


@dataclass(frozen=True)
class Config:
    inner: Inner
    out: Path
    loads: tuple[int, ...]
    limit: float
    count: np.int64


def test_configs_become_plain_json(tmp_path: Path) -> None:
    config = Config(Inner(), Path("runs"), (1, 4), float("inf"), np.int64(7))
    results = Results.collect("x", config, [])
    results.save(tmp_path / "r.json")
    loaded = Results.load(tmp_path / "r.json")
    expected = {
        "inner": {"rate": 3e-4},
        "out": "runs",
        "loads": [1, 4],
        "limit": "inf",
        "count": 7,
    }
    assert loaded.config == results.config == expected


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read results .*none\.json: No such file"):
        Results.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot use results"),
        ("{", "cannot use results"),
        ("[]", 'the field "format" must be'),
        ('{"format": "specdepth-cost-model"}', 'the field "format" must be'),
        ('{"format": "specdepth-results", "format_version": 9}', "format version 9"),
        ('{"format": "specdepth-results", "format_version": 1}', "missing, unknown"),
    ],
)
def test_foreign_and_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Results.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["rows"][0].pop("value"),
        lambda d: d["rows"][0].update(value="high"),
        lambda d: d["rows"][0].update(extra=1),
        lambda d: d.update(rows=3),
        lambda d: d.update(series=[]),
        lambda d: d["series"]["learning_curve"].update(y=[1]),
        lambda d: d.update(config=3),
    ],
)
def test_damaged_fields_are_refused_in_one_sentence(tmp_path: Path, change) -> None:
    document = make_results().as_mapping()
    change(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"^cannot use results .*bad\.json: ") as error:
        Results.load(path)
    assert "\n" not in str(error.value)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    make_results().save(path)
    text = path.read_text().rstrip()
    for end in range(0, len(text) - 1, 97):
        path.write_text(text[:end])
        with pytest.raises(ValueError, match="cannot use results"):
            Results.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "r.json"
    write_atomically(path, "old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match=r"cannot write .*r\.json: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_folders_are_made_when_writing(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "r.json", "text")
    assert (tmp_path / "a" / "b" / "r.json").read_text() == "text"


def test_checking_a_place_creates_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*: .*file is a file, not a folder"):
        check_writable(tmp_path / "file" / "results.json")
    with pytest.raises(ValueError, match="cannot write"):
        write_atomically(tmp_path / "file" / "results.json", "text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="no permission"):
        check_writable(tmp_path / "results.json")


def test_permission_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda place, mode: asked.append(place))
    with pytest.raises(ValueError, match="no permission in"):
        check_writable(tmp_path / "a" / "b" / "c.json")
    assert asked == [tmp_path]


def test_engine_metrics_become_rows_with_units() -> None:
    metrics = EngineMetrics(2)
    metrics.on_finished(
        RequestMetrics(
            num_prompt_tokens=1,
            num_generated_tokens=5,
            num_rounds=5,
            num_drafted_tokens=0,
            num_accepted_tokens=0,
            num_preemptions=0,
            arrival_s=0.0,
            first_token_s=0.25,
            finished_s=1.25,
        )
    )
    rows = {row.metric: row for row in rows_from_metrics("off", 4, metrics)}
    assert set(rows) == set(metrics.as_dict())
    assert (rows["tpot_p50_ms"].value, rows["tpot_p50_ms"].unit) == (250.0, "ms")
    assert rows["throughput_tok_s"].unit == "tok/s"
    assert all((row.policy, row.load) == ("off", 4) for row in rows.values())


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("ttft_p99_ms", "ms"),
        ("elapsed_s", "s"),
        ("goodput_tok_s", "tok/s"),
        ("verify_share", "share"),
        ("acceptance_rate", "share"),
        ("acceptance_at_position_3", "share"),
        ("acceptance_length", "tokens"),
        ("rounds", ""),
    ],
)
def test_units_follow_names(metric: str, unit: str) -> None:
    assert unit_of(metric) == unit


def test_versions_and_device_are_recorded() -> None:
    versions, device = collect_versions(), collect_device()
    assert {"python", "torch", "transformers", "numpy", "specdepth"} <= set(versions)
    assert device["cpus"] >= 1
    assert device["cpu"]
    assert device["platform"]
