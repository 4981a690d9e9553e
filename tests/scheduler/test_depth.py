from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines import FixedDepth, HeuristicDepth, Off, RandomDepth, TableDepth
from specdepth.scheduler.depth import DepthScheduler, check_depths, check_lawful, lawful_rules


class Undeclared:
    def choose(self, state: Any) -> Any:
        return np.zeros(state.num_running, np.int64)

    def observe(self, outcome: Any) -> None:
        pass


class GreedyOnly(Undeclared):
    lawful_under = ("greedy",)


class Trims(Undeclared):
    def trim(self, state: Any, signals: Any) -> Any:
        return signals.num_proposed


# check_depths


def test_good_depths_pass_unchanged(make_state: Any) -> None:
    depths = np.array([0, 8, 3, 1])
    assert check_depths(depths, make_state(4), Off()) is depths


@pytest.mark.parametrize("depths", [[0, 8, 3, 1], (0, 8, 3, 1), np.array([0.0, 8.0, 3.0, 1.0])])
def test_whole_numbers_of_any_kind_become_int64(make_state: Any, depths: Any) -> None:
    checked = check_depths(depths, make_state(4), Off())
    assert checked.dtype == np.int64
    assert checked.tolist() == [0, 8, 3, 1]


def test_small_integer_types_become_int64(make_state: Any) -> None:
    assert check_depths(np.array([8] * 4, np.uint8), make_state(4), Off()).dtype == np.int64


def test_no_running_sequences_need_no_depths(make_state: Any) -> None:
    assert check_depths([], make_state(0), Off()).shape == (0,)


@pytest.mark.parametrize("depths", [[1, 2], [[1, 2, 3, 4]], 3, None, np.zeros((4, 1), int)])
def test_a_wrong_shape_is_refused_by_name(make_state: Any, depths: Any) -> None:
    with pytest.raises(ValueError, match=r"Off.choose returned depths of shape .* expected \(4,\)"):
        check_depths(depths, make_state(4), Off())


@pytest.mark.parametrize(
    "depths",
    [
        [1, 2, 3, float("nan")],
        [1, 2, 3, float("inf")],
        [1, 2, 3, 0.5],
        ["1", "2", "3", "4"],
        [True, False, True, True],
        [1, 2, 3, None],
        [1j, 2, 3, 4],
    ],
)
def test_what_is_no_whole_number_is_refused(make_state: Any, depths: Any) -> None:
    with pytest.raises(ValueError, match=r"expected whole numbers in 0\.\.8"):
        check_depths(depths, make_state(4), Off())


@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1"), (9, "9")])
def test_depths_out_of_range_are_refused_with_the_culprit(
    make_state: Any, bad: int, shown: str
) -> None:
    with pytest.raises(ValueError, match=rf"a depth of {shown}, expected whole numbers in 0\.\.8"):
        check_depths([0, 1, 2, bad], make_state(4), Off())


def test_deeper_than_the_possible_is_left_to_the_engine(make_state: Any) -> None:
    state = make_state(4, max_depths=np.zeros(4, np.int64))
    assert check_depths([8] * 4, state, Off()).tolist() == [8] * 4


# Lawfulness


def test_undeclared_schedulers_are_lawful_but_under_rejection() -> None:
    assert lawful_rules(Undeclared()) == {"greedy", "coupled", "prompt-lookup"}


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_undeclared_schedulers_pass_with_a_draft_model_otherwise(rule: Any) -> None:
    check_lawful(Undeclared(), rule, has_draft_model=True)


def test_undeclared_schedulers_pass_under_rejection_of_prompt_lookup() -> None:
    check_lawful(Undeclared(), "rejection", has_draft_model=False)


def test_undeclared_schedulers_are_told_how_to_declare_it() -> None:
    with pytest.raises(ValueError, match=r"Undeclared does not declare .* set `lawful_under"):
        check_lawful(Undeclared(), "rejection", has_draft_model=True)


@pytest.mark.parametrize(
    ("rule", "has_draft_model", "needed"),
    [("coupled", True, "coupled"), ("rejection", False, "prompt-lookup")],
)
def test_a_narrow_declaration_is_kept(rule: Any, has_draft_model: bool, needed: str) -> None:
    check_lawful(GreedyOnly(), "greedy", has_draft_model=True)
    with pytest.raises(ValueError, match=f'not under "{needed}"'):
        check_lawful(GreedyOnly(), rule, has_draft_model)


class TrimsLawfully(Trims):
    lawful_under = ("greedy", "coupled", "prompt-lookup", "rejection")


def test_trimming_goes_by_what_is_declared_too() -> None:
    with pytest.raises(ValueError, match="Trims does not declare"):
        check_lawful(Trims(), "rejection", has_draft_model=True)
    check_lawful(Trims(), "coupled", has_draft_model=True)
    check_lawful(Trims(), "rejection", has_draft_model=False)
    check_lawful(TrimsLawfully(), "rejection", has_draft_model=True)


@pytest.mark.parametrize(
    "scheduler",
    [Off(), FixedDepth(4), RandomDepth(), HeuristicDepth(), TableDepth([(1, 4, 2)])],
)
def test_baselines_are_lawful_under_every_rule(scheduler: DepthScheduler) -> None:
    assert isinstance(scheduler, DepthScheduler)
    check_lawful(scheduler, "rejection", has_draft_model=True)
    check_lawful(scheduler, "rejection", has_draft_model=False)
    check_lawful(scheduler, "coupled", has_draft_model=True)
    check_lawful(scheduler, "greedy", has_draft_model=True)
