"""What the demo prints and writes at its end: tables with the learned policy first, verdicts, files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .comparison import Comparison
from .demo_live import LiveComparison
from .demo_replay import ReplayedComparison
from .demo_state import LEARNED, DemoState
from .evaluate_in_replay import TABLE
from .load_runs import load_name
from .load_tables import policy_grid
from .replay_evaluate import ORACLE
from .report import write_report
from .results import ResultRow, Results, Series, command_line
from .session import config_of
from .tables import Grid
from .verdicts import claim, show_arithmetic, verdicts

REPLAY_FOLDER = "replay"


def conclude(demo: DemoState) -> None:
    """Print and write whatever there is."""
    console, trained = demo.console, demo.trained
    said: dict[str, list[str]] = {"replay": [], "live": []}
    notes, reports = demo.notes, []
    if demo.replayed is not None:
        said["replay"] = verdicts(demo.replayed.found, LEARNED, demo.replayed.strongest_label)
        reports.append(_show_replay(demo, demo.replayed, said["replay"]))
    results = _results(demo, _live_rows(demo))
    if results.rows:
        assert demo.live is not None
        assert demo.replayed is not None
        console.table(live_grid(demo.live))
        said["live"] = live_verdicts(demo.live.found)
        if demo.cost is not None:
            show_arithmetic(console, results, demo.cost, [LEARNED])
            done = claim(demo.live.found, demo.cost, LEARNED)
            said["live"] += [] if done is None else [done]
        notes += demo.live.found.notes
    results.save(demo.folder / "results.json")
    lines = [f"In replay. {line}" for line in said["replay"]]
    lines += [f"Live. {line}" for line in said["live"]]
    focus = LEARNED if results.rows else None
    title = "How deep to draft: a demo"
    page = [*lines, " ".join(notes)]
    reports.insert(
        0, write_report(demo.folder, results, demo.cost, title=title, focus=focus, notes=page)
    )
    for line in [*lines, *notes]:
        console.show(line)
    if trained is not None:
        console.show(f"Policy: {trained.policy_folder}")
    console.show(f"Reports: {', '.join(map(str, reports))}")
    console.finish(
        {
            "results": results.as_mapping(),
            "cost": None if demo.cost is None else demo.cost.to_dict(),
            "trace": None if demo.ground is None else demo.ground.trace_name,
            "policy": None if trained is None else str(trained.policy_folder),
            "verdicts": said,
            "notes": notes,
            "folder": str(demo.folder),
        }
        | _chosen(demo)
    )


def live_grid(live: LiveComparison) -> Grid:
    """Ratios to off by policy and load, measured, and beside each what replay says of these requests."""
    found = live.found
    header = ["policy"]
    for load in found.constant_loads:
        header += [f"{load_name(load)} (x)", "replay"]
    lines = []
    for name in found.policies:
        cells = [name]
        for load in found.constant_loads:
            ratio = found.runs[load].ratio(name, "off")
            low, high = ratio.bounds
            bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
            again = live.replayed.get(load)
            cells.append(f"{ratio.value:.2f}{bounds}")
            cells.append("" if again is None else f"{again.ratio(name, 'off').value:.2f}")
        lines.append(tuple(cells))
    kind = {"cpu": "CPU time", "wall": "wall time", "virtual": "modelled time"}[found.clock]
    return Grid(
        title=f"Live, in turn: throughput, ratio to off, {kind}; replay of the same requests beside it",
        header=tuple(header),
        rows=tuple(lines),
    )


def live_verdicts(found: Comparison) -> list[str]:
    """A sentence for each load: the learned policy against all others."""
    sentences = []
    for load in found.constant_loads:
        run, parts = found.runs[load], []
        for name in run.policies:
            if name == LEARNED:
                continue
            ratio = run.ratio(LEARNED, name)
            low, high = ratio.bounds
            if low is None or high is None:
                parts.append(f"{ratio.value:.2f}x {name} (too few requests for an interval)")
                continue
            word = "faster" if low > 1 else "slower" if high < 1 else "no clear difference"
            parts.append(f"{ratio.value:.2f}x {name} [{low:.2f}, {high:.2f}] ({word})")
        sentences.append(f"{load_name(load).capitalize()}, {LEARNED}: {'; '.join(parts)}.")
    return sentences


def _show_replay(demo: DemoState, replayed: ReplayedComparison, said: Sequence[str]) -> Path:
    """Print the short table, write all of it; returns the report."""
    results = _results(demo, _rows(replayed.found, replayed), mode="replay")
    short = tuple(row for name in replayed.shown for row in results.rows if row.policy == name)
    title = f"Replay of {_num_requests(replayed.found)} held-out requests: throughput, ratio to "
    for metric, what, digits in (
        ("speedup", "off", 2),
        ("ratio_to_best_fixed", "the best depth", 3),
    ):
        grid = policy_grid(replace(results, rows=short), metric, title + what, "x", digits)
        demo.console.table(grid)
    folder = demo.folder / REPLAY_FOLDER
    folder.mkdir(exist_ok=True)
    results.save(folder / "results.json")
    demo.notes.append(
        f"On the training split of the trace the best single depth is {replayed.best_single}, the best "
        f"table {replayed.table}, and the strongest rule {replayed.strongest_label}; all were chosen "
        "there."
    )
    notes = [*said, *replayed.found.notes]
    title = "How deep to draft: the demo's replay"
    return write_report(folder, results, demo.cost, title=title, focus=LEARNED, notes=notes)


def _num_requests(found: Comparison) -> int:
    return max(run.num_requests for run in found.runs.values())


def _live_rows(demo: DemoState) -> list[ResultRow]:
    if demo.live is None or demo.replayed is None or not demo.live.found.loads:
        return []
    rows = [*_rows(demo.live.found, demo.replayed), *demo.live.rows()]
    # Off is the only fixed depth that ran live; the best of all is in the replay.
    return [row for row in rows if row.metric != "ratio_to_best_fixed"]


def _rows(found: Comparison, replayed: ReplayedComparison) -> list[ResultRow]:
    """Rows of a comparison, with those of its ratios to the strongest rule."""
    rows = found.rows(best_single=replayed.best_single, table=TABLE, oracle=ORACLE)
    for load in found.loads:
        run = found.runs[load]
        for name in run.policies:
            ratio = run.ratio(name, replayed.strongest_label)
            low, high = ratio.bounds
            rows.append(
                ResultRow(
                    policy=name,
                    load=load,
                    metric="ratio_to_strongest_rule",
                    value=ratio.value,
                    unit="x",
                    ci_low=low,
                    ci_high=high,
                )
            )
    return rows


def _chosen(demo: DemoState) -> dict[str, str | None]:
    """What the training split said."""
    replayed = demo.replayed
    return {
        "strongest_rule": None if replayed is None else replayed.strongest_label,
        "table": None if replayed is None else replayed.table,
        "best_single_fixed": None if replayed is None else replayed.best_single,
    }


def _results(demo: DemoState, rows: Sequence[ResultRow], **more: object) -> Results:
    series = dict[str, Series]()
    if demo.curve:
        updates, rewards = zip(*demo.curve, strict=True)
        series["learning_curve"] = Series(
            x=updates, y=rewards, x_label="updates", y_label="reward a decision (tokens)"
        )
    config = config_of(
        demo.options,
        out=demo.folder,
        seconds_used=round(time.monotonic() - demo.start_s, 1),
        **_chosen(demo),
        **more,
    )
    device = str(demo.decoder.target.device)
    return Results.collect(command_line(), config, rows, device=device, series=series)
