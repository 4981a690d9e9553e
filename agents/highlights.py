"""Which policies stand out in a report: with thirty lines in a figure nobody finds the one they look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .evaluate_in_replay import TABLE
from .intervals import geometric_mean
from .replay_evaluate import BEST_FIXED
from .results import Results

MAX_LINES = 10
"""As many policies can be told apart; with more, only some stand out."""
NUM_STRONGEST = 3
"""Rules that stand out by what they reached."""
ORACLE_PREFIX = "oracle:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Highlights:
    """Policies of a report."""

    names: tuple[str, ...]
    """Those that stand out, in the order of the results."""
    rest: tuple[str, ...]
    """All others, in grey."""


def choose_highlights(results: Results, focus: str | None) -> Highlights:
    """Pick `focus`, off, the best fixed depth, the table, learned policies, strong rules and oracles.

    All of them where that is readable.
    """
    policies = results.policies
    if len(policies) <= MAX_LINES:
        return Highlights(names=tuple(policies), rest=())
    picked = {focus, "off", best_fixed(results)}
    picked |= {name for name in policies if is_learned(name) or is_oracle(name) or is_table(name)}
    others = [name for name in policies if name not in picked and not is_fixed(name)]
    picked |= set(strongest_first(results, others)[:NUM_STRONGEST])
    return Highlights(
        names=tuple(name for name in policies if name in picked),
        rest=tuple(name for name in policies if name not in picked),
    )


def best_fixed(results: Results) -> str | None:
    """The best fixed depth at each load if the results name it, else the fixed depth best over all."""
    if BEST_FIXED in results.policies:
        return BEST_FIXED
    fixed = [name for name in results.policies if name.startswith("fixed")]
    return next(iter(strongest_first(results, fixed)), None)


def strongest_first(results: Results, policies: Sequence[str]) -> list[str]:
    """`policies` by the geometric mean of their throughput; those that lack a load are left out."""
    scores = {}
    loads = {row.load for row in results.rows if row.metric == "throughput_tok_s"}
    for name in policies:
        rows = [results.find(name, load, "throughput_tok_s") for load in loads]
        values = [row.value for row in rows if row is not None and row.value > 0]
        if values and len(values) == len(loads):
            scores[name] = geometric_mean(values)
    return sorted(scores, key=lambda name: -scores[name])


def is_oracle(policy: str) -> bool:
    """Whether it knows what no deployment knows."""
    return policy.startswith(ORACLE_PREFIX)


def is_table(policy: str) -> bool:
    """Whether it goes by batch size alone."""
    return policy == TABLE or policy.startswith("table")


def is_learned(policy: str) -> bool:
    """Whether it is a trained policy, by its name: "learned", "policy:FOLDER", or a path."""
    return policy.startswith(("learned", "policy:")) or (":" not in policy and "/" in policy)


def is_fixed(policy: str) -> bool:
    """Whether it always drafts as deep: "off", "fixed:4", "best-single-fixed"."""
    return policy == "off" or policy.startswith("fixed") or policy == "best-single-fixed"
