"""`specdepth evaluate --mode replay` to its report: figures, alternative texts and tables, against
results.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specdepth.agents.cli import main
from specdepth.agents.decision_log import QUANTITIES, timeline_name
from specdepth.agents.highlights import MAX_LINES
from specdepth.agents.results import Results
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.01, knee=3, name="made")


@dataclass
class Page(HTMLParser):
    """Figures (title and alternative text) and tables by the heading before them."""

    text: str
    figures: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.heading, self.reading = "", ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h2", "h3"):
            self.heading = ""
        elif tag == "svg":
            self.figures[self.heading] = dict(attrs).get("aria-label") or ""
        elif tag == "table":
            self.tables[self.heading] = []
        elif tag == "tr":
            self.tables[self.heading].append([])
        elif tag in ("td", "th"):
            self.tables[self.heading][-1].append("")
        self.reading = tag

    def handle_endtag(self, tag: str) -> None:
        self.reading = ""

    def handle_data(self, data: str) -> None:
        if self.reading in ("h2", "h3"):
            self.heading += data
        elif self.reading in ("td", "th"):
            self.tables[self.heading][-1][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every rule on 6 requests."""
    folder = tmp_path_factory.mktemp("report")
    make_trace(18, num_tokens=8).save(folder / "made.npz")
    COST.save(folder / "cost.json")
    arguments = [
        *("evaluate", "--mode", "replay", "--max-num-speculative-tokens", "4"),
        *("--trace", str(folder / "made.npz"), "--cost", str(folder / "cost.json")),
        *("--loads", "1,3", "--arrivals", "constant,varying", "--tpot-limit-ms", "60"),
        *("--out", str(folder / "out"), "--quiet"),
    ]
    assert main(arguments) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return Results.load(run / "results.json")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def focus(page: Page) -> str:
    found = re.search("What “(.*?)” did", page.text)
    assert found is not None
    return found.group(1)


def test_without_policies_every_rule_is_compared(results: Results) -> None:
    assert {"heuristic", "goodput", "greedy:match", "ucb", "tuned-table"} <= set(results.policies)
    assert len(results.policies) > 2 * MAX_LINES


def test_every_figure_is_there_with_its_alternative_text(page: Page) -> None:
    assert list(page.figures) == [
        "The knee",
        "Throughput against load",
        "Ratio to no speculation",
        "Ratio to the best fixed depth",
        "All policies, varying",
        "Depth against load",
        "Depth against load and what a sequence shows",
        "Batch, KV use and depth over time, varying",
        "Acceptance by position",
        "Acceptance by depth",
        "Where the time goes",
    ]
    assert all(len(text) > 40 for text in page.figures.values())
    assert not re.search(r"<script|<img|\bhttps?://(?!www\.w3\.org)", page.text)


def test_ids_are_unique(page: Page) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page.text)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("title", "metric"),
    [
        ("Throughput against load", "throughput_tok_s"),
        ("Ratio to no speculation", "speedup"),
        ("Ratio to the best fixed depth", "ratio_to_best_fixed"),
    ],
)
def test_curves_tell_the_numbers_of_the_subject(page, results, focus, title, metric) -> None:
    values = [f"{results.find(focus, load, metric).value:.3f} at {load}" for load in (1, 3)]
    assert f"{focus}: {', '.join(values)}." in page.figures[title]


def test_the_varying_day_ranks_all_policies(page: Page, results: Results) -> None:
    listed = page.figures["All policies, varying"].split(". ", 1)[1].rstrip(".").split(", ")
    expected = {
        f"{name} {row.value:.3f}"
        for name in results.policies
        if (row := results.find(name, "varying", "ratio_to_best_fixed")) is not None
    }
    assert set(listed) == expected
    values = [float(one.split()[-1]) for one in listed]
    assert values == sorted(values, reverse=True)


def test_the_map_tells_the_mean_depths(page: Page, results: Results, focus: str) -> None:
    text = page.figures["Depth against load and what a sequence shows"]
    for load in (1, 3, "varying"):
        values = [
            f"{row.value:.2f} at {n}"
            for n in range(1, 5)
            if (row := results.find(focus, load, f"depth_at_match_{n}")) is not None
        ]
        assert len(values) > 1
        assert f"load {load}: {', '.join(values)}" in text


def test_the_timeline_sets_the_subject_against_the_table(page, results, focus) -> None:
    text = page.figures["Batch, KV use and depth over time, varying"]
    for policy in (focus, "tuned-table"):
        for quantity, label in QUANTITIES.items():
            y = results.series[timeline_name("varying", quantity, policy)].y
            assert f"{policy}, {label}: {sum(y) / len(y):.2f} on average" in text


@pytest.mark.parametrize(("by", "title"), [("position", "position"), ("depth", "depth")])
def test_acceptance_is_that_of_the_results(page, results, focus, by, title) -> None:
    text = page.figures[f"Acceptance by {title}"]
    row = results.find("fixed:4", 3, f"acceptance_at_{by}_4")
    assert re.search(rf"fixed:4, load 3: [^;]*{row.value:.2f} at 4", text)
    assert f"{focus}, load 1: " in text


@pytest.mark.parametrize(
    ("title", "metric", "digits"),
    [
        ("Throughput", "throughput_tok_s", 1),
        ("Throughput, ratio to off", "speedup", 2),
        ("Throughput, ratio to the best fixed depth", "ratio_to_best_fixed", 3),
    ],
)
def test_tables_hold_every_policy_and_its_numbers(page, results, title, metric, digits) -> None:
    header, *rows = page.tables[title]
    assert len(header) == 4
    assert [row[0] for row in rows] == results.policies
    for name, *cells in rows:
        for load, cell in zip((1, 3, "varying"), cells, strict=True):
            row = results.find(name, load, metric)
            assert cell.split(" ")[0] == f"{row.value:.{digits}f}"


@pytest.mark.parametrize("load", [1, 3, "varying"])
def test_each_load_has_tails_goodput_and_the_gap_closed(page, results, focus, load) -> None:
    title = f"Load {load}" if load != "varying" else "Varying"
    header, *rows = page.tables[title]
    names = [row[0] for row in rows]
    assert {focus, "off", "tuned-table", "oracle:hindsight", "oracle:best-fixed"} <= set(names)
    assert len(names) <= MAX_LINES + 2
    columns = {
        "oracle gap closed (share)": ("oracle_gap_closed", 2),
        "goodput (tok/s)": ("goodput_tok_s", 1),
        "TPOT p99 (ms)": ("tpot_p99_ms", 1),
        "TTFT p95 (ms)": ("ttft_p95_ms", 0),
    }
    for column, (metric, digits) in columns.items():
        for row in rows:
            value = results.find(row[0], load, metric).value
            assert row[header.index(column)] == f"{value:.{digits}f}"


def test_notes_at_the_top_are_about_the_subject(page: Page, focus: str) -> None:
    notes = re.findall(r'<p class="note">(.*?)</p>', page.text)
    assert sum(f", {focus}: " in note for note in notes) == 3  # a sentence a load
    assert len(notes) < 10
