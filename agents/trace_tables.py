"""Tables of what a trace shows."""

from __future__ import annotations

from specdepth.decoder.trace_summary import TraceSummary

from .tables import Grid

SHOWN_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of the last table, besides the deepest one recorded."""


def kind_grid(summary: TraceSummary) -> Grid:
    """Requests, tokens and what is on offer, a line a kind."""
    return Grid(
        title="What was recorded",
        header=(
            "kind",
            "requests",
            "held out",
            "output tokens",
            "positions with an offer (%)",
            "mean run (tokens)",
            "looping requests (%)",
        ),
        rows=tuple(
            (
                one.kind,
                str(one.num_requests),
                str(one.num_held_out),
                str(one.num_tokens),
                f"{100 * one.offer_share:.1f}",
                f"{one.mean_run:.2f}",
                f"{100 * one.looping_share:.1f}",
            )
            for one in summary.kinds
        ),
    )


def match_grid(summary: TraceSummary) -> Grid:
    """Acceptance by length of the n-gram match."""
    return Grid(
        title="By length of the match",
        header=("match (tokens)", "positions (%)", "first token right (%)", "mean run (tokens)"),
        rows=tuple(
            (
                str(one.match_length),
                f"{100 * one.share:.1f}",
                f"{100 * one.acceptance:.1f}",
                f"{one.mean_run:.2f}",
            )
            for one in summary.matches
        ),
    )


def survival_grid(summary: TraceSummary) -> Grid:
    """Share of drafts that are right up to each depth."""
    top = len(summary.survival)
    return Grid(
        title="Drafts that are right up to a depth",
        header=("depth (tokens)", "share (%)"),
        rows=tuple(
            (str(depth), f"{100 * share:.1f}")
            for depth, share in enumerate(summary.survival, start=1)
            if depth in SHOWN_DEPTHS or depth == top
        ),
    )
