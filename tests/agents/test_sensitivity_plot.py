from __future__ import annotations

from xml.etree import ElementTree

import pytest

from specdepth.agents.sensitivity import LEVELS, SIGNALS, Sensitivity
from specdepth.agents.sensitivity_plot import plot_sensitivity


def study(depth: float) -> list[Sensitivity]:
    return [
        Sensitivity(
            signal=signal,
            levels=LEVELS[signal],
            depths=tuple(depth + 0.1 * at for at in range(len(LEVELS[signal]))),
            num_states=7,
        )
        for signal in SIGNALS
    ]


def test_it_holds_each_policy_and_signal() -> None:
    svg = plot_sensitivity({"mine": study(1.0), "other": study(0.5)})
    root = ElementTree.fromstring(svg)
    text = root.attrib["aria-label"]
    assert "mine, acceptance: 1.00 at 0, 1.10 at 0.2" in text
    assert "other, free KV: 0.50 at 0" in text
    assert svg == plot_sensitivity({"mine": study(1.0), "other": study(0.5)})


def test_policies_that_were_studied_differently_do_not_share_a_figure() -> None:
    with pytest.raises(ValueError, match="'other' was studied at other signals"):
        plot_sensitivity({"mine": study(1.0), "other": study(0.5)[:2]})
    with pytest.raises(ValueError, match="at least one policy"):
        plot_sensitivity({})
