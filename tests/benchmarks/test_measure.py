from __future__ import annotations

import json
import math
import time
from argparse import Namespace

import numpy as np
import pytest
from _measure import (
    Pairs,
    Printer,
    Timing,
    abba,
    alternate,
    bounds,
    machine,
    median_ratio,
    parse,
    result_line,
    time_pairs,
    timed,
    versions,
)
from hypothesis import given
from hypothesis import strategies as st

from specdepth.agents.intervals import Interval


def test_pairs_run_in_the_order_a_b_b_a() -> None:
    order: list[str] = []

    def a() -> str:
        order.append("a")
        return f"a{len(order)}"

    def b() -> str:
        order.append("b")
        return f"b{len(order)}"

    pairs = alternate(a, b, 4)
    assert "".join(order) == "abbaabba"
    assert pairs == [("a1", "b2"), ("a4", "b3"), ("a5", "b6"), ("a8", "b7")]
    assert list(abba(4)) == [True, False, True, False]


def test_linear_drift_cancels_over_two_pairs() -> None:
    """B does the same work as A while the machine slows down by one second a run."""
    now = iter(range(100))

    def run() -> Timing:
        seconds = float(next(now))
        return Timing(seconds, seconds)

    pairs = Pairs.of(alternate(run, run, 6))
    assert pairs.a_cpu_s.sum() == pairs.b_cpu_s.sum()


def test_warm_up_is_dropped() -> None:
    calls = {"a": 0, "b": 0}

    def count(name: str) -> None:
        calls[name] += 1

    pairs = time_pairs(lambda: count("a"), lambda: count("b"), 3, warm_up=2)
    assert len(pairs) == 3
    assert calls == {"a": 5, "b": 5}


def test_cpu_time_leaves_out_a_sleep_and_wall_time_does_not() -> None:
    timing = timed(lambda: time.sleep(0.05))
    assert timing.wall_s >= 0.05
    assert timing.cpu_s < 0.02


def test_ratio_is_the_median_of_paired_ratios_not_the_ratio_of_medians() -> None:
    pairs = Pairs.of(
        [(Timing(1, 2), Timing(2, 2)), (Timing(9, 3), Timing(3, 1)), (Timing(4, 1), Timing(4, 2))]
    )
    assert pairs.ratio().value == 1.0  # of 0.5, 3, 1
    assert pairs.wall_ratio().value == 1.0  # of 1, 3, 0.5
    assert np.median(pairs.a_cpu_s) / np.median(pairs.b_cpu_s) == 4 / 3


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=20),
    st.floats(0.1, 10),
    st.integers(0, 2**31 - 1),
)
def test_constant_factor_has_an_interval_of_no_width(
    times: list[float], factor: float, seed: int
) -> None:
    figure = median_ratio([factor * t for t in times], times, seed)
    assert [figure.value, figure.low, figure.high] == pytest.approx([factor] * 3)


def test_interval_covers_the_median_and_depends_on_the_seed_alone() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, 40), rng.uniform(1, 2, 40)
    figure = median_ratio(a, b, seed=3)
    assert figure.low < figure.value < figure.high
    assert figure == median_ratio(a, b, seed=3)


def test_joined_pairs_are_all_pairs() -> None:
    one, two = (Pairs.of([(Timing(n, 1), Timing(1, 1))] * n) for n in (1, 3))
    joined = Pairs.joined([one, two])
    assert joined.a_cpu_s.tolist() == [1, 3, 3, 3]
    assert len(joined) == 4


def test_a_single_pair_has_no_interval() -> None:
    assert bounds(Interval(1.0, math.nan, math.nan)) is None
    assert bounds(Interval(1.0, 0.912345, 1.1)) == [0.9123, 1.1]


def test_table_aligns_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Printer().table(("name", "ms"), [("long name", 1.23456), ("x", 100)])
    assert capsys.readouterr().out.splitlines() == [
        "name          ms",
        "long name  1.235",
        "x            100",
    ]


def test_json_only_prints_the_line_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(json_only=True)
    printer.line("for people")
    printer.table(("a",), [("b",)])
    printer.result({"ratio": 0.5})
    assert capsys.readouterr().out == '{"ratio": 0.5}\n'


def test_nan_never_gets_into_the_line() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Printer().result({"ratio": math.nan})


def test_result_line_says_how_often_with_what_and_on_what() -> None:
    arguments = Namespace(seed=7, quick=True, target="/somewhere/model", dtype="float32")
    line = result_line("name", arguments, 12, {"ratio": 0.5})
    assert (line["benchmark"], line["ratio"], line["n"], line["seed"]) == ("name", 0.5, 12, 7)
    assert (line["quick"], line["target"], line["dtype"]) == (True, "model", "float32")
    assert set(line["versions"]) >= {"python", "torch", "transformers", "numpy", "specdepth"}
    assert line["machine"]["cores"] >= 1
    assert json.loads(json.dumps(line)) == line
    assert machine()["cpu"]
    assert versions()["numpy"] == np.__version__


def test_options_have_the_same_names_everywhere() -> None:
    arguments = parse("Doc.\n\nMore.", ["--quick", "--seed", "3", "--json-only", "--target", "t"])
    assert (arguments.quick, arguments.seed, arguments.json_only) == (True, 3, True)
    assert arguments.target == "t"
    assert parse("Doc.", []).target == "default"
