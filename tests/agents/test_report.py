from __future__ import annotations

import io
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specdepth.agents.plots import knee_plot, line_styles
from specdepth.agents.report import headlines, render, write_report
from specdepth.agents.results import ResultRow, Results, Series, unit_of
from specdepth.agents.tables import (
    arithmetic_grid,
    draft_grid,
    metric_grid,
    pass_grid,
    with_speedups,
)
from specdepth.scheduler.cost import CostModel

COST = CostModel(
    name="tiny + prompt lookup",
    measured=True,
    tokens=(1, 8, 16, 64),
    verify_s=(0.05, 0.08, 0.10, 0.3),
    prefill_s=(0.05, 0.07, 0.09, 0.25),
    weight_bytes=270_000_000,
    flops_per_token=2.7e8,
)


def rows_of(policy: str, load: int | str, **values: float) -> list[ResultRow]:
    return [
        ResultRow(policy=policy, load=load, metric=name, value=value, unit=unit_of(name))
        for name, value in values.items()
    ]


def make_results() -> Results:
    rows: list[ResultRow] = []
    for load in (1, 4):
        rows += rows_of("off", load, throughput_tok_s=20.0 * load, mean_depth=0.0)
        rows += rows_of(
            "fixed-2",
            load,
            throughput_tok_s=30.0 * load,
            mean_depth=2.0,
            acceptance_length=2.2,
            acceptance_at_position_1=0.8,
            acceptance_at_position_2=0.5,
        )
        rows += rows_of("table", load, throughput_tok_s=28.0 * load)
        rows += rows_of(
            "learned",
            load,
            acceptance_length=2.0,
            mean_depth=1.5,
            depth_0_share=0.25,
            depth_1_share=0.25,
            depth_2_share=0.5,
            tpot_p50_ms=31.0,
            draft_share=0.0,
            verify_share=0.9,
            schedule_share=0.01,
            other_share=0.09,
            acceptance_at_position_1=0.9,
        )
        value = 40.0 * load
        rows.append(
            ResultRow(
                policy="learned",
                load=load,
                metric="throughput_tok_s",
                value=value,
                unit="tok/s",
                ci_low=value - 1,
                ci_high=value + 1,
            )
        )
    rows += rows_of("off", "bursty", throughput_tok_s=33.0)
    curve = Series(x=(0, 1, 2), y=(1.0, 2.0, 3.0), x_label="rounds", y_label="throughput (tok/s)")
    return Results.collect(
        "specdepth demo --seed 5", {"ppo": {"n_steps": 64}}, rows, series={"learning_curve": curve}
    )


class Page(HTMLParser):
    """Checks nesting, and collects ids, references and links."""

    void = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.external: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.void:
            self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(
                ("#", "data:")
            ):
                self.external.append(value or "")


def figures_of(page: str) -> dict[str, str]:
    """Alternative text of each figure, by title."""
    pattern = r'<figure><h3>([^<]*)</h3><svg role="img" aria-label="([^"]*)"'
    found = re.findall(pattern, page)
    assert len(found) == page.count("<figure>") == page.count("<svg role=")
    return {unescape(title): unescape(text) for title, text in found}


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_results(), COST, notes=["The machine was <busy>."])


def test_page_is_well_formed_and_self_contained(page: str) -> None:
    parsed = Page(page)
    assert parsed.external == []
    assert "script" not in parsed.tags
    assert not re.search(r"url\((?!#)|@import", page)


def test_ids_are_unique_over_all_figures(page: str) -> None:
    ids = Page(page).ids
    assert len(ids) == len(set(ids))


def test_references_of_figures_resolve(page: str) -> None:
    used = re.findall(r'(?:url\(#|href="#)([^)"]+)', page)
    assert used
    assert set(used) <= set(Page(page).ids)


def test_every_section_is_there(page: str) -> None:
    for heading in (
        "What a pass costs here",
        "More arithmetic, less traffic",
        "Throughput by load",
        "Throughput, ratio to off",
        "Each load in detail",
        "Depth against load",
        "Acceptance by position",
        "Where the time goes",
        "Learning curve",
        "How this was made",
        "specdepth demo --seed 5",
        "n_steps = 64",
        "bursty (tok/s)",
    ):
        assert heading in page, heading


def test_figures_have_a_title_and_an_alternative_text(page: str) -> None:
    titles = figures_of(page)
    assert list(titles) == [
        "The knee",
        "Throughput against load",
        "Ratio to no speculation",
        "All policies, bursty",
        "Depth against load",
        "Acceptance by position",
        "Where the time goes",
        "Learning curve",
    ]
    assert all(text.endswith(".") for text in titles.values())
    assert "learned: 40.000 at 1, 160.000 at 4" in titles["Throughput against load"]


def test_figures_take_the_colour_of_the_page(page: str) -> None:
    assert "currentColor" in page
    assert "#010203" not in page


def test_text_is_escaped() -> None:
    results = make_results()
    rows = tuple(replace(row, policy="<b>off</b>") for row in results.rows if row.policy == "off")
    evil = replace(results, rows=rows, command="specdepth <script>alert(1)</script>")
    text = render(evil, COST, title="<i>", notes=["<u>"])
    assert "<script" not in text
    assert "<b>off" not in text
    assert "<i>" not in text
    assert "&lt;u&gt;" in text
    Page(text)


def test_sections_without_numbers_are_left_out() -> None:
    bare = Results(command="specdepth profile")
    text = render(bare, COST)
    Page(text)
    assert "What a pass costs here" in text
    for heading in (
        "Throughput by load",
        "Each load in detail",
        "Learning",
        "More arithmetic",
        "Machine",
    ):
        assert heading not in text
    Page(render(bare))


def test_a_made_up_cost_model_is_called_made_up() -> None:
    text = render(Results(command="x"), CostModel.linear(knee=8))
    assert "made up, not measured" in text


def test_report_is_written_to_its_folder(tmp_path: Path) -> None:
    path = write_report(tmp_path / "new", make_results(), COST)
    assert path == tmp_path / "new" / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert path.stat().st_size < 1_000_000


def test_the_same_results_make_the_same_page() -> None:
    results = make_results()
    assert render(results, COST) == render(results, COST)


def test_an_unknown_focus_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no results of policy 'leraned'.*learned"):
        render(make_results(), COST, focus="leraned")


def test_headlines_state_the_trade_of_speculation() -> None:
    numbers = {what: number for number, what, _ in headlines(make_results(), COST, "learned")}
    assert numbers["packed tokens double the time of a pass"] == "16"
    assert numbers["the arithmetic of plain decoding, a committed token"] == "1.25x"  # 2.5 / 2
    assert numbers["its memory traffic, a committed token"] == "0.50x"
    assert numbers["its time, measured, a committed token"] == "0.50x"  # 20 / 40
    assert numbers["the throughput without speculation"] == "2.00x"


def test_time_of_a_replay_is_called_modelled() -> None:
    replayed = replace(make_results(), config={"mode": "replay"})
    whats = [what for _, what, _ in headlines(replayed, COST, "learned")]
    assert "its time, modelled, a committed token" in whats


def test_the_learned_policy_is_the_subject_by_default(page: str) -> None:
    assert "What “learned” did" in page


def test_pass_table_has_units_and_ratios() -> None:
    grid = pass_grid(COST)
    assert grid.header == (
        "packed tokens",
        "verify (ms)",
        "ratio to 1 token",
        "prefill (ms)",
        "GFLOP/s",
        "GB/s",
    )
    assert grid.rows[1] == ("8", "80.0", "1.60", "70.0", "27.0", "3.38")


def test_draft_table_exists_only_with_a_draft_model() -> None:
    assert draft_grid(COST) is None
    grid = draft_grid(replace(COST, draft_sequences=(1, 4), draft_s=(0.005, 0.006)))
    assert grid is not None
    assert grid.rows == (("1", "5.00", "0.100"), ("4", "6.00", "0.120"))


def test_arithmetic_table_sets_prediction_beside_measurement() -> None:
    grid = arithmetic_grid(make_results(), COST, ["learned"])
    assert grid is not None
    load_one = dict(zip(grid.header, grid.rows[0], strict=True))
    assert load_one["FLOPs, x of off"] == "1.25"
    assert load_one["bytes, x of off"] == "0.50"
    predicted = COST.pass_s(2.5) / 2.0 / COST.pass_s(1)
    assert load_one["time, x of off (predicted)"] == f"{predicted:.2f}"
    assert load_one["time, x of off (measured)"] == "0.50"


def test_metric_table_stresses_the_best_of_each_load() -> None:
    grid = metric_grid(make_results(), "throughput_tok_s", "Throughput", "tok/s")
    assert grid.header == ("policy", "load 1 (tok/s)", "load 4 (tok/s)", "bursty (tok/s)")
    names = [row[0] for row in grid.rows]
    assert {names[r] for r, c in grid.best if c in (1, 2)} == {"learned"}
    assert grid.rows[names.index("learned")][1] == "40.0 [39.0, 41.0]"
    assert grid.rows[names.index("learned")][3] == ""


def test_lower_latency_is_better() -> None:
    rows = rows_of("off", 1, tpot_p50_ms=50.0) + rows_of("learned", 1, tpot_p50_ms=30.0)
    grid = metric_grid(Results(command="x", rows=tuple(rows)), "tpot_p50_ms", "TPOT", "ms")
    assert grid.best == ((1, 1),)


def test_ties_are_all_stressed() -> None:
    rows = rows_of("off", 1, throughput_tok_s=5.0) + rows_of("table", 1, throughput_tok_s=5.0)
    grid = metric_grid(Results(command="x", rows=tuple(rows)), "throughput_tok_s", "T", "tok/s")
    assert grid.best == ((0, 1), (1, 1))


def test_speedups_are_filled_in_but_never_replaced() -> None:
    given = ResultRow(policy="learned", load=1, metric="speedup", value=9.0, unit="x")
    results = make_results()
    rated = with_speedups(replace(results, rows=(*results.rows, given)))
    one, four = (rated.find("learned", load, "speedup") for load in (1, 4))
    assert one is given
    assert four is not None
    assert four.value == 2.0


def test_console_tables_hold_the_same_cells() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(metric_grid(make_results(), "throughput_tok_s", "T", "tok/s").as_rich())
    text = console.export_text()
    assert "load 4 (tok/s)" in text
    assert "160.0 [159.0, 161.0]" in text


def test_knee_beyond_the_grid_is_not_drawn_as_reached() -> None:
    flat = CostModel(name="flat", tokens=(1, 8), verify_s=(0.05, 0.06))
    svg = knee_plot(flat)
    assert svg.startswith("<svg")
    assert headlines(Results(command="x"), flat, None)[0][0] == "> 8"


def test_policies_differ_by_more_than_colour() -> None:
    names = ["off", "fixed-1", "fixed-2", "fixed-4", "fixed-8", "table", "goodput", "learned"]
    names += ["oracle:hindsight", "oracle:one-depth", "a", "b", "c", "d", "e", "f"]
    styles = line_styles(names, "learned")
    assert len({(s.marker, s.dashes) for s in styles.values()}) == len(names)
