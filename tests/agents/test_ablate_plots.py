from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from specdepth.agents.ablate_plots import by_dimension, iqm_plot, learning_plot, read_curve
from specdepth.agents.ablate_summary import summarise
from specdepth.agents.ablate_table import tidy_rows
from tests.agents.made_ablation import made_ablation

FOUND = summarise(tidy_rows(made_ablation()))
DIMENSIONS = {"base": "base", "better": "luck", "other": "skill"}


def curve(*speeds: float) -> tuple[np.ndarray, np.ndarray]:
    return 10.0 * np.arange(1, len(speeds) + 1), np.array(speeds)


def text_of(svg: str) -> str:
    found = re.match(r'<svg role="img" aria-label="([^"]*)"', svg)
    assert found is not None
    return found.group(1)


def test_the_base_comes_first_then_rules_then_dimensions() -> None:
    assert list(by_dimension(FOUND)) == ["base", "reference", "luck"]


def test_the_dot_plot_tells_its_numbers() -> None:
    text = text_of(iqm_plot(FOUND))
    assert "base: base 1.020; reference: rule:made 1.037; luck: better 1.110" in text
    assert "worse 0.770" in text


def test_learning_curves_are_means_over_seeds_as_far_as_all_went() -> None:
    svg = learning_plot(
        {"base": [curve(1.0, 2.0, 3.0), curve(3.0, 4.0)], "better": [curve(5.0, 6.0, 7.0)]},
        DIMENSIONS,
    )
    assert svg is not None
    assert "at the end base 3.0, better 7.0 tok/s" in text_of(svg)


def test_variants_without_curves_are_left_out() -> None:
    empty = curve()
    svg = learning_plot(
        {"base": [curve(1.0)], "better": [empty], "other": [curve(2.0)]}, DIMENSIONS
    )
    assert svg is not None
    assert "better" not in text_of(svg)
    assert learning_plot({"base": [empty]}, DIMENSIONS) is None
    assert learning_plot({}, DIMENSIONS) is None


def test_the_base_alone_has_a_figure() -> None:
    svg = learning_plot({"base": [curve(1.0, 2.5)]}, DIMENSIONS)
    assert svg is not None
    assert "base 2.5" in text_of(svg)


def test_a_curve_is_read_from_progress_without_its_gaps(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text(
        "time/total_timesteps,decode/throughput_tok_s,train/loss\n64,10.5,\n128,,0.1\n192,12.0,0.2\n"
    )
    steps, speeds = read_curve(path)
    assert steps.tolist() == [64, 192]
    assert speeds.tolist() == [10.5, 12.0]
    assert len(read_curve(tmp_path / "absent.csv")[0]) == 0
