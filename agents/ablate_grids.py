"""The grids that come with specdepth."""

from __future__ import annotations

from pathlib import Path

from .ablate_grid import Grid, Variant, read_grid

LOAD_32 = {
    "decoder.max_num_seqs": 32,
    "workload.concurrencies": [1, 2, 4, 8, 16, 32],
    "workload.num_requests": 96,
}
"""Training meets every load that it is judged at."""

RELATIVE = {"action": "offset", "reward.form": "relative", "ppo.discount": 0.0}
"""What `reward.form` "relative" is made for."""

IMITATION = {"ppo.learning_rate": 1e-12}
"""PPO that moves nothing: what is left is where it would have started."""

FULL = Grid(
    name="full",
    base={
        **LOAD_32,
        # Small minibatches and an entropy bonus take the policy below where it started.
        "ppo.batch_size": 1024,
        "ppo.learning_rate": 5e-4,
        "ppo.ent_coef": 0.0,
    },
    variants=(
        Variant(name="imitation", dimension="warm-start", overrides=IMITATION),
        Variant(
            name="no-warm-start",
            dimension="warm-start",
            overrides={"warm_start.scheduler": "none"},
        ),
        Variant(name="discount-0", dimension="discount", overrides={"ppo.discount": 0.0}),
        Variant(name="discount-0.97", dimension="discount", overrides={"ppo.discount": 0.97}),
        Variant(name="team", dimension="reward", overrides={"reward.form": "team"}),
        Variant(name="throughput", dimension="reward", overrides={"reward.form": "throughput"}),
        Variant(name="one-rate", dimension="reward", overrides={"reward.by_load": False}),
        Variant(name="expected", dimension="tokens", overrides={"reward.tokens": "expected"}),
        Variant(
            name="one-depth",
            dimension="action",
            overrides={"action": "batch", "warm_start.scheduler": "goodput:positions"},
        ),
        Variant(name="offset", dimension="action", overrides={"action": "offset"}),
        Variant(name="offset-relative", dimension="action", overrides=RELATIVE),
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
    ),
    timesteps=163_840,
    minutes=6.0,
    num_requests=64,
)
"""What matters in training."""

SEARCH = Grid(
    name="search",
    base={**LOAD_32, **RELATIVE},
    variants=(
        Variant(
            name="after-search",
            dimension="search",
            overrides={"warm_start.search_iterations": 3},
        ),
    ),
    timesteps=163_840,
    minutes=6.0,
    num_requests=64,
)
"""A search of few parameters alone, PPO after it, and PPO from the rule where the search began. A search
that is worth its name takes more iterations than fit three minutes."""

LIVE = Grid(
    name="live",
    base={**LOAD_32, "replay.num_engines": 1, "workload.max_new_tokens": 64},
    variants=(Variant(name="live", dimension="source", overrides={"env": "live"}),),
    seeds=(0, 1),
    timesteps=16_384,
    minutes=6.0,
    num_requests=64,
)
"""Training on the decoder itself against replay, equal in steps, updates and lengths of texts: what one
decoder gets through in three minutes on one core."""

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

GRIDS = {grid.name: grid for grid in (FULL, SEARCH, LIVE, QUICK)}


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
