"""An ablation with made-up numbers: two loads and a day, a variant that is better and one that is not."""

from __future__ import annotations

from specdepth.agents.ablate import Ablation
from specdepth.agents.ablate_grid import Grid, Variant
from specdepth.agents.ablate_run import Done
from specdepth.agents.results import ResultRow

FIXED = {"off": (10.0, 40.0, 20.0), "fixed:1": (12.0, 50.0, 25.0), "fixed:2": (16.0, 30.0, 24.0)}
"""Throughput at load 1, at load 4, and over the day."""
RULE = {"rule:made": (16.8, 51.0, 26.0)}
LEARNED = {
    ("base", 0): (16.0, 50.0, 25.0),
    ("base", 1): (17.6, 52.0, 26.0),
    ("better", 0): (17.6, 55.0, 27.0),
    ("better", 1): (19.2, 56.0, 28.0),
    ("worse", 0): (8.0, 45.0, 20.0),
    ("worse", 1): (8.0, 48.0, 22.0),
}
LOADS: tuple[int | str, ...] = (1, 4, "varying")
GRID = Grid(
    name="made",
    variants=(
        Variant(name="better", dimension="luck", overrides={"ppo.discount": 0.5}),
        Variant(name="worse", dimension="luck", overrides={"ppo.discount": 0.0}),
    ),
    seeds=(0, 1),
    loads=(1, 4),
)


def speeds(policy: str, values: tuple[float, ...]) -> tuple[ResultRow, ...]:
    return tuple(
        ResultRow(policy=policy, load=load, metric="throughput_tok_s", value=value, unit="tok/s")
        for load, value in zip(LOADS, values, strict=True)
    )


def done(rows: tuple[ResultRow, ...], sha: str = "abc", **training: float) -> Done:
    counts = {"timesteps": 64.0, "updates": 1.0, "rounds": 16.0, "decisions": 40.0}
    times = {"elapsed_s": 60.0, "short": 0.0}
    return Done(rows=rows, training=counts | times | training, settings={}, git_sha=sha)


def made_ablation(grid: Grid = GRID) -> Ablation:
    rules = [row for name, values in (FIXED | RULE).items() for row in speeds(name, values)]
    return Ablation(
        grid=grid,
        references=done(tuple(rules)),
        done={cell: done(speeds("learned", values)) for cell, values in LEARNED.items()},
    )
