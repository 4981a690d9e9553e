from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdepth.agents import survival_command, survival_study
from specdepth.agents.console import Console
from specdepth.agents.survival_card import render_survival_card
from specdepth.agents.survival_fit import SurvivalFitConfig
from specdepth.agents.survival_study import (
    BASE,
    MODEL,
    TABLE,
    SurvivalStudy,
    counted_survival,
    study_survival,
)
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.survival_model import SurvivalModel, save_survival
from tests.agents.made_trace import DEPTH, RATES, make_trace
from tests.agents.test_survival_fit import made_rows

torch.set_num_threads(1)
COST = CostModel.linear(knee=8)
QUICK = SurvivalFitConfig(num_steps=200, hidden_units=6)


@pytest.fixture(scope="module")
def study() -> SurvivalStudy:
    traces = {"first": make_trace(30, 24), "second": make_trace(30, 24, seed=1)}
    return study_survival(traces, COST, QUICK, command="the command")


def test_the_model_beats_the_base_rate_on_held_out_requests(study: SurvivalStudy) -> None:
    for trace in ("first", "second"):
        model, base = study.find(trace, True, MODEL), study.find(trace, True, BASE)
        assert model.scores[-1].brier < base.scores[-1].brier - 0.03
        assert model.scores[-1].log_loss < base.scores[-1].log_loss - 0.08


def test_the_match_length_table_is_the_law_so_the_model_cannot_beat_it_by_much(
    study: SurvivalStudy,
) -> None:
    model, table = study.find("first", True, MODEL), study.find("first", True, TABLE)
    assert abs(model.scores[-1].brier - table.scores[-1].brier) < 0.02


def test_each_trace_is_scored_with_and_without_looping_requests(study: SurvivalStudy) -> None:
    keys = [(one.trace, one.looping, one.estimator) for one in study.held_out]
    assert len(keys) == len(set(keys)) == 2 * 2 * 3
    every, plain = study.find("first", True, MODEL), study.find("first", False, MODEL)
    assert 0 < plain.scores[-1].count < every.scores[-1].count


def test_depths_beyond_the_deepest_are_not_scored(study: SurvivalStudy) -> None:
    depths = [score.depth for score in study.find("first", True, MODEL).scores]
    assert depths == [1, 2, 4, None]


def test_a_trace_without_loops_is_scored_once() -> None:
    trace = make_trace(12, 12, looping=np.zeros(12, np.bool_))
    study = study_survival({"only": trace}, COST, replace(QUICK, num_steps=20))
    assert [one.looping for one in study.held_out] == [True] * 3


def test_a_trace_without_held_out_requests_is_learned_from_and_not_scored() -> None:
    config = replace(QUICK, num_steps=20)
    small, more = make_trace(12, 12), make_trace(12, 12, seed=1, held_out=np.zeros(12, np.bool_))
    alone = study_survival({"small": small}, COST, config)
    study = study_survival({"small": small, "more": more}, COST, config)
    assert {one.trace for one in study.held_out} == {"small"}
    # Eight of the twelve requests of the small one train, and all twelve of the other.
    assert 2 * alone.num_rows < study.num_rows < 3 * alone.num_rows


def test_of_a_long_trace_each_behaviour_serves_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(QUICK, num_steps=20)
    whole = study_survival({"only": make_trace(60, 12)}, COST, config)
    monkeypatch.setattr(survival_study, "MANY_REQUESTS", 39)
    parts = study_survival({"only": make_trace(60, 12)}, COST, config)
    assert parts.num_rows == pytest.approx(whole.num_rows / survival_study.NUM_PARTS, rel=0.1)


def test_held_out_requests_do_not_change_the_model() -> None:
    trace = make_trace(12, 12)
    held_out = np.repeat(trace.held_out, trace.num_tokens)
    changed = replace(trace, accepted=np.where(held_out, 0, trace.accepted))
    config = replace(QUICK, num_steps=20)
    first, second = (study_survival({"only": one}, COST, config) for one in (trace, changed))
    np.testing.assert_array_equal(
        first.model.weights.hidden_weight, second.model.weights.hidden_weight
    )
    assert first.held_out != second.held_out


def test_counting_multiplies_the_rates_of_a_match_length() -> None:
    seen = made_rows(40_000)
    chances = counted_survival(seen, seen, by_match=True)
    for match in range(1, 5):
        row = chances[seen.match_lengths == match][0]
        np.testing.assert_allclose(row, RATES[match] ** np.arange(1, DEPTH + 1), atol=0.03)


def test_counting_without_groups_gives_all_rows_the_same() -> None:
    seen = made_rows(500)
    chances = counted_survival(seen, seen, by_match=False)
    assert np.all(chances == chances[0])
    # half a success in one try is added
    expected = ((seen.runs > 0).sum() + 0.5) / 501
    assert chances[0, 0] == pytest.approx(expected)


def test_a_match_length_that_was_never_seen_gets_a_half() -> None:
    seen = made_rows(500)
    short = seen.select(seen.match_lengths == 1)
    long = seen.select(seen.match_lengths == 4)
    np.testing.assert_allclose(
        counted_survival(short, long, by_match=True)[0], 0.5 ** np.arange(1, 5)
    )


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ({}, "at least one trace"),
        (
            {"a": make_trace(), "b": make_trace(info=replace(make_trace().info, model_pair="x"))},
            "one model_pair: trace a has made [+] prompt-lookup, b has x",
        ),
        ({"a": make_trace(held_out=np.zeros(40, np.bool_))}, "no request of a is held out"),
        (
            {"a": make_trace(held_out=np.ones(40, np.bool_)), "b": make_trace()},
            "all 40 requests of trace a are held out",
        ),
    ],
)
def test_traces_that_do_not_do_are_refused(traces: dict[str, Trace], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        study_survival(traces, COST, QUICK)


# Card and command


def test_the_card_tells_scores_traces_and_how_it_was_made(
    study: SurvivalStudy, tmp_path: Path
) -> None:
    save_survival(tmp_path, study.model.weights, study.model.card)
    text = render_survival_card(study, tmp_path)
    assert text.startswith("---\nlibrary_name: specdepth\n")
    best = study.find("second", False, MODEL).scores[-1]
    assert f"| {best.brier:.4f} | {best.log_loss:.4f} | {best.calibration_error:.4f} |" in text
    assert "- trace `first`: temperature 0, 20 requests to learn from and 10 held out, 2 of" in text
    assert "- made by `the command`" in text
    assert "monotone in match length, agreement and acceptance averages: yes" in text


def options(tmp_path: Path, **changes: Any) -> survival_command.Options:
    make_trace(12, 12).save(tmp_path / "greedy.npz")
    make_trace(12, 12, seed=1).save(tmp_path / "sampled.npz")
    COST.save(tmp_path / "cost.json")
    fields: dict[str, Any] = {
        "traces": (str(tmp_path / "greedy.npz"), str(tmp_path / "sampled.npz")),
        "cost": tmp_path / "cost.json",
        "out": tmp_path / "out",
        "num_steps": 20,
        "json": True,
        "quiet": True,
    }
    return survival_command.Options(**(fields | changes))


def test_the_command_writes_a_model_that_loads_a_card_and_a_figure(tmp_path: Path) -> None:
    stdout = io.StringIO()
    console = Console(as_json=True, quiet=True, stdout=stdout, stderr=io.StringIO())
    survival_command.run(options(tmp_path, figure=tmp_path / "figures" / "r.svg"), console)
    model = SurvivalModel.load(tmp_path / "out", model_pair="made + prompt-lookup")
    assert model.max_num_speculative_tokens == DEPTH
    assert (tmp_path / "out" / "README.md").read_text().startswith("---")
    assert (tmp_path / "figures" / "r.svg").read_text().startswith("<svg")
    told = json.loads(stdout.getvalue())
    assert told["held_out"] == model.card.training["held_out"]
    assert {one["trace"] for one in told["held_out"]} == {"greedy", "sampled"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"traces": ("a/x.npz", "b/x.npz")}, "told apart by file name, got x, x"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"traces": ("nowhere.npz",)}, "no trace .nowhere.npz."),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        survival_command.run(options(tmp_path, **changes), Console(quiet=True))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        survival_command.run(options(tmp_path, out=tmp_path / "taken"), Console(quiet=True))
