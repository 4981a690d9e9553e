"""What replay says of the requests that were decoded: exactly that, where the clock is the cost model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdepth.agents.demo import Options
from specdepth.agents.demo_ground import Ground, record_ground
from specdepth.agents.demo_live import LiveComparison, compare_live
from specdepth.agents.demo_report import live_grid, live_verdicts
from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from tests.agents.tiny_target import COST, save_tiny_target, write_prompts

LOADS = (1, 4)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("live")
    return Options(
        target=str(save_tiny_target(folder / "tiny")),
        prompts=str(write_prompts(folder / "prompts.txt", 40)),
        loads=LOADS,
        max_num_seqs=4,
        max_new_tokens=12,
    )


@pytest.fixture(scope="module")
def decoder(options: Options) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        options.target,
        dtype="float64",
        device="cpu",
        max_num_seqs=4,
        num_kv_blocks=400,
        clock=VirtualClock(COST),
        cost=COST,
    )


@pytest.fixture(scope="module")
def ground(
    options: Options, decoder: SpeculativeDecoder, tmp_path_factory: pytest.TempPathFactory
) -> Ground:
    folder = tmp_path_factory.mktemp("ground")
    return record_ground(decoder, options, COST, folder, 60, lambda share, detail: None)


@pytest.fixture(scope="module")
def live(options: Options, decoder: SpeculativeDecoder, ground: Ground) -> LiveComparison:
    names = {"learned": ground.rules[0], "fixed:3": "fixed:3", "off": "off"}
    return compare_live(decoder, options, ground, names, 3, lambda share, detail: None)


def test_replay_serves_the_very_blocks_that_were_decoded(live: LiveComparison) -> None:
    assert set(live.replayed) == set(LOADS)
    for load, again in live.replayed.items():
        done = live.found.runs[load]
        assert again.num_blocks == done.num_blocks
        for name in done.policies:
            assert again.makespan_s[name] == pytest.approx(done.makespan_s[name], rel=1e-9)
            assert again.metrics[name].mean_depth == done.metrics[name].mean_depth


def test_rows_and_table_set_replay_beside_the_measured_ratio(live: LiveComparison) -> None:
    rows = {(row.policy, row.load): row.value for row in live.rows()}
    grid = live_grid(live)
    assert [line[0] for line in grid.rows] == ["learned", "fixed:3", "off"]
    for line in grid.rows:
        for place, load in enumerate(LOADS):
            measured, again = line[1 + 2 * place], line[2 + 2 * place]
            assert measured.split(" ")[0] == again == f"{rows[line[0], load]:.2f}"


def test_verdicts_are_the_ratios_to_all_others(live: LiveComparison) -> None:
    lines = live_verdicts(live.found)
    for line, load in zip(lines, LOADS, strict=True):
        assert line.startswith(f"Load {load}, learned: ")
        for rival in ("fixed:3", "off"):
            ratio = live.found.runs[load].ratio("learned", rival)
            clear = "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "no clear"
            (part,) = [one for one in line.split("; ") if f"x {rival} " in one]
            assert f"{ratio.value:.2f}x {rival} [{ratio.low:.2f}, {ratio.high:.2f}]" in part
            assert clear in part


def test_other_work_is_not_predicted(
    options: Options, decoder: SpeculativeDecoder, ground: Ground, live: LiveComparison
) -> None:
    from dataclasses import replace

    longer = replace(ground.trace, num_prompt=ground.trace.num_prompt + 1)
    other = replace(ground, trace=longer)
    names = {"learned": ground.rules[0], "off": "off"}
    found = compare_live(decoder, options, other, names, 1, lambda share, detail: None)
    assert found.found.loads == list(LOADS)
    assert found.replayed == {}
    assert all(cell == "" for line in live_grid(found).rows for cell in line[2::2])


def test_a_recorded_ground_holds_both_halves_and_a_rule_that_fits(
    ground: Ground, decoder: SpeculativeDecoder
) -> None:
    trace = ground.trace
    assert trace.info.model_pair == decoder.model_pair
    assert trace.info.lookup["max_ngram"] == 4
    assert len(trace.rows("train")) >= 4 <= len(trace.rows("held-out"))
    assert Path(ground.trace_name).is_file()
    assert ground.label(ground.rules[0]) == "greedy:fitted"
