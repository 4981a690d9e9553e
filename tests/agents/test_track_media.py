"""Histograms, the map of depths, and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.agents.results import ResultRow, Results
from specdepth.agents.track_media import (
    depth_counts,
    depth_histograms,
    depth_image,
    load_table,
    row_table,
)


def row(policy: str, load: int | str, metric: str, value: float, **more: Any) -> ResultRow:
    return ResultRow(policy=policy, load=load, metric=metric, value=value, unit="", **more)


RESULTS = Results(
    command="made",
    rows=(
        row("a", 4, "sequence_rounds", 200.0),
        row("a", 4, "depth_0_share", 0.25),
        row("a", 4, "depth_2_share", 0.75),
        row("a", "varying", "sequence_rounds", 3.0),
        row("a", "varying", "depth_1_share", 1.0),
        row("a", 4, "speedup", 1.5, ci_low=1.0, ci_high=2.0),
        row("a", "varying", "throughput_tok_s", 80.0),
        row("b", 4, "throughput_tok_s", 90.0),
        row("b", 4, "depth_3_share", 1.0),
    ),
)


def test_shares_become_counts_of_every_depth():
    counts = depth_counts(RESULTS, "a")
    assert {load: one.tolist() for load, one in counts.items()} == {
        4: [50.0, 0.0, 150.0],
        "varying": [0.0, 3.0, 0.0],
    }


def test_a_policy_without_rounds_has_no_counts():
    assert depth_counts(RESULTS, "b") == {}
    assert depth_counts(RESULTS, "absent") == {}


def test_histograms_have_a_bin_for_each_depth():
    found = depth_histograms(depth_counts(RESULTS, "a"))
    assert set(found) == {"depths/at_4", "depths/at_varying", "depths/all"}
    whole = found["depths/all"]
    assert whole.histogram == [50, 3, 150]
    assert whole.bins == [-0.5, 0.5, 1.5, 2.5]


def test_the_map_is_darkest_where_all_choices_are():
    wide: dict[int | str, Any] = {1: np.array([10.0, 0.0]), 8: np.array([0.0, 10.0])}
    image = depth_image(wide, "a").image
    assert image is not None
    grey = np.asarray(image.convert("L"), np.float64)
    height, width = grey.shape
    # Corners of the plane of cells, clear of labels and of the numbers in the cells.
    left, right = round(0.35 * width), round(0.94 * width)
    top, bottom = round(0.06 * height), round(0.6 * height)
    assert grey[bottom, left] < 100 < 200 < grey[top, left]
    assert grey[top, right] < 100 < 200 < grey[bottom, right]


def test_tables_hold_every_number_once():
    table = row_table(RESULTS.rows)
    assert table.columns == ["policy", "load", "metric", "value", "unit", "ci_low", "ci_high"]
    assert len(table.data) == len(RESULTS.rows)
    assert table.data[5] == ["a", "4", "speedup", 1.5, "", 1.0, 2.0]
    assert table.data[6][-2:] == [None, None]


def test_the_table_by_load_has_a_line_for_each_policy_and_load():
    table = load_table(RESULTS)
    assert table.columns == ["policy", "load", "throughput_tok_s", "speedup"]
    assert table.data == [
        ["a", "4", None, 1.5],
        ["a", "varying", 80.0, None],
        ["b", "4", 90.0, None],
    ]


@pytest.mark.parametrize("first", [None, 1.0])
def test_a_missing_number_may_stand_anywhere(first):
    bounds = {} if first is None else {"ci_low": first, "ci_high": first}
    rows = [row("a", 1, "x", 1.0, **bounds), row("a", 2, "x", 1.0, ci_low=0.0, ci_high=2.0)]
    assert len(row_table(rows).data) == 2
