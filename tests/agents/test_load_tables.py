from __future__ import annotations

from specdepth.agents.load_tables import load_grid, policy_grid
from specdepth.agents.results import ResultRow, Results, unit_of


def results_of(load: int | str, **policies: dict[str, float]) -> Results:
    rows = [
        ResultRow(policy=policy, load=load, metric=metric, value=value, unit=unit_of(metric))
        for policy, values in policies.items()
        for metric, value in values.items()
    ]
    return Results(command="x", rows=tuple(rows))


def test_a_load_has_tails_goodput_and_the_gap_with_their_units() -> None:
    one = {
        "tpot_p99_ms": 31.26,
        "ttft_p95_ms": 120.4,
        "goodput_tok_s": 7.0,
        "oracle_gap_closed": 0.256,
    }
    grid = load_grid(results_of("poisson 8", rule=one), "poisson 8", ["rule"])
    assert grid.title == "Poisson 8"
    assert grid.header == (
        "policy",
        "oracle gap closed (share)",
        "goodput (tok/s)",
        "TPOT p99 (ms)",
        "TTFT p95 (ms)",
    )
    assert grid.rows == (("rule", "0.26", "7.0", "31.3", "120"),)


def test_low_latency_and_high_goodput_are_the_best() -> None:
    slow = {"goodput_tok_s": 9.0, "tpot_p50_ms": 30.0, "mean_depth": 3.0}
    fast = {"goodput_tok_s": 8.0, "tpot_p50_ms": 20.0, "mean_depth": 1.0}
    grid = load_grid(results_of(4, slow=slow, fast=fast), 4, ["slow", "fast"])
    assert grid.header[1:] == ("goodput (tok/s)", "TPOT p50 (ms)", "depth (tokens)")
    assert set(grid.best) == {(0, 1), (1, 2)}  # depth is neither good nor bad


def test_policies_without_numbers_at_the_load_are_left_out() -> None:
    grid = load_grid(results_of(4, a={"speedup": 1.0}), 4, ["a", "absent"])
    assert [row[0] for row in grid.rows] == ["a"]
    assert load_grid(results_of(4, a={"speedup": 1.0}), 8, ["a"]).rows == ()


def test_oracles_are_shown_and_never_stressed() -> None:
    values = {"off": 1.0, "oracle:hindsight": 3.0, "rule": 2.0}
    results = results_of(1, **{name: {"throughput_tok_s": value} for name, value in values.items()})
    detail = load_grid(results, 1, results.policies)
    overview = policy_grid(results, "throughput_tok_s", "Throughput", "tok/s")
    for grid in (detail, overview):
        assert [row[:2] for row in grid.rows][1] == ("oracle:hindsight", "3.0")
        assert grid.best == ((2, 1),)


def test_a_load_that_only_oracles_served_has_no_best() -> None:
    rows = results_of(1, off={"speedup": 1.0}, rule={"speedup": 2.0}).rows
    more = results_of(2, **{"oracle:hindsight": {"speedup": 3.0}}).rows
    grid = policy_grid(Results(command="x", rows=(*rows, *more)), "speedup", "Ratio", "x")
    assert grid.header == ("policy", "load 1 (x)", "load 2 (x)")
    assert grid.best == ()
