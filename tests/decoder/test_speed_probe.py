from __future__ import annotations

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


def test_the_probe_leaves_running_requests_alone() -> None:
    decoder = build_decoder(tiny_llama())
    probe = SpeedProbe(decoder)
    plain = decoder.generate([[1, 2, 3]], max_new_tokens=8, depth_scheduler=2)
    probed = decoder.generate(
        [[1, 2, 3]], max_new_tokens=8, depth_scheduler=2, on_token=lambda name, tokens: probe()
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in probed]
