from __future__ import annotations

import math

from specdepth.decoder.clock import ThreadClock, VirtualClock
from specdepth.decoder.speed_probe import SpeedProbe
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import build_decoder, tiny_llama


def test_the_probe_reads_the_engines_clock_of_the_moment() -> None:
    decoder = build_decoder(tiny_llama(), clock=VirtualClock(CostModel.linear()))
    probe = SpeedProbe(decoder)
    assert probe() == 0  # virtual time stands still
    decoder.engine.clock = ThreadClock()
    assert probe() > 0


def test_the_median_is_of_all_probes_so_far() -> None:
    decoder = build_decoder(tiny_llama(), clock=ThreadClock())
    probe = SpeedProbe(decoder)
    assert math.isnan(probe.median_s)
    seconds = [probe() for _ in range(5)]
    assert probe.median_s == sorted(seconds)[2]


def test_the_probe_leaves_running_requests_alone() -> None:
    decoder = build_decoder(tiny_llama())
    probe = SpeedProbe(decoder)
    plain = decoder.generate([[1, 2, 3]], max_new_tokens=8, depth_scheduler=2)

    def probe_too(name: str, tokens: list[int]) -> None:
        probe()

    probed = decoder.generate([[1, 2, 3]], max_new_tokens=8, depth_scheduler=2, on_token=probe_too)
    assert [r.token_ids for r in plain] == [r.token_ids for r in probed]
