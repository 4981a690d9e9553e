"""Figure of a sensitivity study: depth against each signal alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, Drawing
from .sensitivity import Sensitivity, Signal

LABELS: dict[Signal, str] = {
    "batch size": "running\nsequences",
    "acceptance": "recent\nacceptance",
    "free KV": "free KV (tokens\na sequence)",
}
"""What the levels of a signal are."""
_COLORS = (RED, BLUE, ORANGE, GREEN, PINK)
_MARKERS = "osD^v"
_DASHES = ("-", "--", "-.", ":")


def plot_sensitivity(studies: Mapping[str, Sequence[Sensitivity]]) -> str:
    """Mean depth by the level of each signal, the signals side by side, a line a policy, as SVG.

    Args:
        studies: signals by policy; the first policy's say which signals and levels there are.

    Raises:
        ValueError: no policy, or one whose signals or levels differ from the first one's.
    """
    if not studies:
        raise ValueError("a sensitivity plot needs at least one policy.")
    first = next(iter(studies.values()))
    shape = [(one.signal, one.levels) for one in first]
    for name, curves in studies.items():
        if [(one.signal, one.levels) for one in curves] != shape:
            raise ValueError(
                f"{name!r} was studied at other signals or levels than the first policy."
            )
    num_levels = sum(len(one.levels) for one in first)
    with Drawing(1.6 + 0.32 * num_levels, 3.6) as page:
        axes = page.axes
        start, ticks, names = 0, list[int](), list[str]()
        for number, curve in enumerate(first):
            places = range(start, start + len(curve.levels))
            for at, (policy, curves) in enumerate(studies.items()):
                axes.plot(
                    places,
                    curves[number].depths,
                    color=_COLORS[at % len(_COLORS)],
                    marker=_MARKERS[at % len(_MARKERS)],
                    ls=_DASHES[at % len(_DASHES)],
                    ms=5,
                    label=policy if number == 0 else None,
                )
            ticks += places
            names += [f"{level:g}" for level in curve.levels]
            axes.text(
                (places[0] + places[-1]) / 2,
                -0.13,
                LABELS[curve.signal],
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
            )
            start = places[-1] + 2
            if number + 1 < len(first):
                axes.axvline(start - 1, color=GREY, lw=0.8, ls=":")
        axes.set_xticks(ticks, names)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("mean depth (tokens)")
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(len(studies), 3))
        text = "; ".join(
            f"{policy}, {curve.signal}: "
            + ", ".join(
                f"{depth:.2f} at {level:g}"
                for level, depth in zip(curve.levels, curve.depths, strict=True)
            )
            for policy, curves in studies.items()
            for curve in curves
        )
        return page.svg("sensitivity", f"Line charts: mean depth (tokens) by one signal. {text}.")
