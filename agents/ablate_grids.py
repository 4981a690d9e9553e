"""The grids that come with specdepth."""

from __future__ import annotations

from pathlib import Path

from .ablate_grid import Grid, Variant, read_grid

SHORT = {"timesteps": 16_384, "replay.num_engines": 1, "workload.max_new_tokens": 64}
"""What one live decoder gets through in three minutes on one core: the live run and a replayed one that is
equal in steps, updates and lengths of texts."""

OFFSET = {
    "env": "replay",
    "action": "offset",
    "warm_start.scheduler": "rule:smollm2-prompt-lookup-cpu-bf16",
}
"""A policy of offsets starts as a rule, and so needs one."""

FULL = Grid(
    name="full",
    base={
        "decoder.max_num_seqs": 32,
        "workload.concurrencies": [1, 2, 4, 8, 16, 32],
        "workload.num_requests": 96,
    },
    variants=(
        Variant(name="discount-0", dimension="discount", overrides={"ppo.discount": 0.0}),
        Variant(name="discount-0.97", dimension="discount", overrides={"ppo.discount": 0.97}),
        Variant(
            name="no-warm-start",
            dimension="warm-start",
            overrides={"warm_start.scheduler": "none"},
        ),
        Variant(name="one-rate", dimension="reward", overrides={"reward.by_load": False}),
        Variant(name="offset", dimension="action", overrides=OFFSET),
        Variant(
            name="offset-relative",
            dimension="reward",
            overrides={**OFFSET, "reward.form": "relative"},
        ),
        *(
            Variant(
                name=f"no-{'-'.join(groups)}",
                dimension="features",
                overrides={"ppo.masked_features": list(groups)},
            )
            for groups in (
                ("batch-size",),
                ("prices",),
                ("batch-size", "prices"),
                ("acceptance",),
                ("memory-pressure",),
                ("proposal",),
            )
        ),
        Variant(name="replay-short", dimension="source", overrides=SHORT),
        Variant(name="live-short", dimension="source", overrides={**SHORT, "env": "live"}),
    ),
)
"""What matters in training: a night on two cores."""

QUICK = Grid(
    name="quick",
    base={
        "decoder.max_num_seqs": 4,
        "workload.concurrencies": [1, 4],
        "workload.num_requests": 10,
        "replay.num_engines": 2,
        "ppo.n_steps": 32,
        "warm_start.rounds": 20,
        "warm_start.epochs": 5,
    },
    variants=(
        Variant(name="discount-0", dimension="discount", overrides={"ppo.discount": 0.0}),
        Variant(
            name="no-warm-start",
            dimension="warm-start",
            overrides={"warm_start.scheduler": "none"},
        ),
    ),
    seeds=(0, 1),
    timesteps=512,
    minutes=0.5,
    loads=(1, 4),
    num_requests=8,
)
"""Whether everything works; its numbers say nothing."""

GRIDS = {grid.name: grid for grid in (FULL, QUICK)}


def find_grid(name: str) -> Grid:
    """A shipped grid by name, or one from a file.

    Raises:
        ValueError: neither, or a file that cannot be used.
    """
    if name in GRIDS:
        return GRIDS[name]
    if not name.endswith(".json"):
        raise ValueError(
            f"no grid {name!r}; there are {', '.join(GRIDS)}, and JSON files with grids of your own."
        )
    return read_grid(Path(name))
