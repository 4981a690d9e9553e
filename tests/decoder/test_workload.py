"""Workloads: rates, determinism, limits, and that everything is served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.arrivals import Arrivals, ClosedLoop, OpenLoop, Phase
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.workload import Workload, WorkloadRequest


def requests(n: int) -> tuple[WorkloadRequest, ...]:
    return tuple(
        WorkloadRequest(prompt_token_ids=(i,), sampling=SamplingParams()) for i in range(n)
    )


def workload(n: int, process: Arrivals) -> Workload:
    return Workload(requests=requests(n), process=process)


def serve(
    load: Workload, rng: np.random.Generator, num_slots: int = 8, round_s: float = 0.25
) -> list[tuple[float, int, int, int]]:
    """Drive `load` as the module docstring says, with requests that last random numbers of rounds.

    Returns (time, in the engine after releases, finished, released then) a step.
    """
    now_s, released, finished = 0.0, 0, 0
    steps: list[tuple[float, int, int, int]] = []
    left: list[int] = []  # rounds to go of each request in the engine; the first num_slots run
    while finished < load.num_requests:
        assert len(steps) < 50_000, "the workload does not end"
        running = min(len(left), num_slots)
        counts = {"num_running": running, "num_waiting": len(left) - running}
        due = load.arrivals(now_s=now_s, num_finished=finished, **counts)
        left += rng.integers(1, 6, due).tolist()
        released += due
        steps.append((now_s, len(left), finished, due))
        if not left:
            wake_s = load.next_arrival_s(now_s, num_finished=finished)
            assert wake_s is not None, "an idle engine with nothing to wait for"
            assert wake_s > now_s, "waiting that lets no time pass"
            now_s = wake_s
            continue
        left = [n - 1 for n in left[:num_slots]] + left[num_slots:]
        finished += left.count(0)
        left = [n for n in left if n]
        now_s += round_s
    assert released == load.num_requests
    return steps


PHASES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


class TestOpenLoop:
    def test_poisson_comes_at_its_rate_with_exponential_gaps(self) -> None:
        times = np.array(OpenLoop.poisson(20_000, 4.0, np.random.default_rng(1)).times_s)
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(0.25, rel=0.03)
        assert gaps.std() == pytest.approx(0.25, rel=0.03)

    def test_bursty_comes_at_the_mixed_rate_in_bursts(self) -> None:
        times = np.array(
            OpenLoop.bursty(
                40_000,
                quiet_rate=1.0,
                burst_rate=20.0,
                mean_quiet_s=3.0,
                mean_burst_s=1.0,
                rng=np.random.default_rng(2),
            ).times_s
        )
        assert len(times) / times[-1] == pytest.approx((1 * 3 + 20 * 1) / 4, rel=0.05)
        counts = np.histogram(times, bins=np.arange(0, times[-1], 1.0))[0]
        assert counts.var() > 3 * counts.mean()  # a Poisson process has variance = mean

    def test_equal_rates_make_a_plain_poisson_process(self) -> None:
        rng = np.random.default_rng(3)
        same = {"quiet_rate": 5.0, "burst_rate": 5.0, "mean_quiet_s": 2.0, "mean_burst_s": 0.5}
        times = np.array(OpenLoop.bursty(20_000, **same, rng=rng).times_s)
        counts = np.histogram(times, bins=np.arange(0, times[-1], 1.0))[0]
        assert counts.mean() == pytest.approx(5, rel=0.03)
        assert counts.var() == pytest.approx(5, rel=0.08)

    def test_no_arrivals_between_bursts_if_the_quiet_rate_is_0(self) -> None:
        rng = np.random.default_rng(4)
        silent = {"quiet_rate": 0.0, "burst_rate": 50.0, "mean_quiet_s": 9.0, "mean_burst_s": 1.0}
        times = np.array(OpenLoop.bursty(2_000, **silent, rng=rng).times_s)
        assert (np.diff(times) > 2).sum() > 10
        assert len(times) == 2_000

    def test_a_seed_fixes_the_times(self) -> None:
        first, again, other = (
            OpenLoop.poisson(50, 2.0, np.random.default_rng(s)) for s in (5, 5, 6)
        )
        assert first == again
        assert first != other

    def test_requests_come_at_their_times_however_slow_the_engine_is(self) -> None:
        load = workload(4, OpenLoop(times_s=(0.0, 1.0, 1.0, 5.0)))
        nothing = {"num_running": 0, "num_waiting": 0, "num_finished": 0}
        assert load.arrivals(now_s=0.0, **nothing) == 1
        assert load.arrivals(now_s=0.99, num_running=1, num_waiting=0, num_finished=0) == 0
        assert load.arrivals(now_s=1.0, num_running=0, num_waiting=1, num_finished=0) == 2
        assert load.arrivals(now_s=9.0, num_running=1, num_waiting=1, num_finished=1) == 1
        assert load.arrivals(now_s=99.0, num_running=0, num_waiting=0, num_finished=4) == 0

    def test_an_idle_engine_waits_for_the_next_time(self) -> None:
        load = workload(2, OpenLoop(times_s=(0.5, 2.0)))
        assert load.next_arrival_s(0.0, num_finished=0) == 0.5
        assert load.next_arrival_s(1.0, num_finished=1) == 2.0
        assert load.next_arrival_s(3.0, num_finished=2) is None

    @settings(deadline=None, max_examples=40)
    @given(seed=st.integers(0, 2**32), n=st.integers(1, 60), rate=st.floats(0.05, 50))
    def test_all_are_served_in_time(self, seed: int, n: int, rate: float) -> None:
        rng = np.random.default_rng(seed)
        process = OpenLoop.poisson(n, rate, rng)
        released = 0
        for now_s, _, _, due in serve(workload(n, process), rng):
            released += due
            assert released == sum(time <= now_s for time in process.times_s)

    @pytest.mark.parametrize("times", [(1.0, 0.5), (-1.0,), (float("nan"),), (float("inf"),)])
    def test_impossible_times_are_refused(self, times: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="finite, 0 or more, and in order"):
            OpenLoop(times_s=times)

    def test_a_rate_of_0_is_refused(self) -> None:
        with pytest.raises(ValueError, match="rate must be above 0, got 0"):
            OpenLoop.poisson(3, 0, np.random.default_rng(0))

    def test_too_few_times_are_refused(self) -> None:
        with pytest.raises(ValueError, match="3 requests have 2 arrival times"):
            workload(3, OpenLoop(times_s=(0.0, 1.0)))


class TestClosedLoop:
    @settings(deadline=None, max_examples=60)
    @given(seed=st.integers(0, 2**32), n=st.integers(1, 80), concurrencies=PHASES)
    def test_the_engine_is_full_and_never_over_full(
        self, seed: int, n: int, concurrencies: list[int]
    ) -> None:
        rng = np.random.default_rng(seed)
        process = ClosedLoop.varying(n, concurrencies, rng)
        steps = serve(workload(n, process), rng)
        for now_s, in_engine, finished, due in steps:
            limit = process.concurrency(now_s, finished)
            assert due == 0 or in_engine <= limit
            assert in_engine >= min(limit, n - finished)

    def test_constant_concurrency(self) -> None:
        steps = serve(workload(30, ClosedLoop.constant(4)), np.random.default_rng(0))
        assert {in_engine for _, in_engine, finished, _ in steps if finished <= 26} == {4}

    def test_each_concurrency_gets_its_share_of_the_requests(self) -> None:
        process = ClosedLoop.varying(100, [1, 4, 16], np.random.default_rng(0))
        shares = [process.concurrency(0.0, finished) for finished in range(100)]
        assert sorted(np.unique(shares, return_counts=True)[1].tolist()) == [33, 33, 34]

    def test_the_order_of_concurrencies_is_random_and_seeded(self) -> None:
        orders = {ClosedLoop.varying(9, range(1, 6), np.random.default_rng(s)) for s in range(9)}
        assert len(orders) > 5
        again = [ClosedLoop.varying(9, range(1, 6), np.random.default_rng(1)) for _ in range(2)]
        assert again[0] == again[1]

    def test_phases_by_time(self) -> None:
        phases = (Phase(concurrency=2, until=10.0), Phase(concurrency=5))
        process = ClosedLoop(phases=phases, unit="seconds")
        assert process.concurrency(9.9, 0) == 2
        assert process.concurrency(10.0, 0) == 5
        assert process.concurrency(1e9, 0) == 5

    def test_a_pause_by_time_is_waited_for(self) -> None:
        phases = (
            Phase(concurrency=3, until=1.0),
            Phase(concurrency=0, until=50.0),
            Phase(concurrency=3),
        )
        load = workload(40, ClosedLoop(phases=phases, unit="seconds"))
        steps = serve(load, np.random.default_rng(1))
        assert not any(due for now_s, _, _, due in steps if 1.0 <= now_s < 50.0)
        assert any(in_engine == 0 for _, in_engine, _, _ in steps)

    def test_nothing_is_released_while_concurrency_is_over_the_new_limit(self) -> None:
        phases = (Phase(concurrency=8, until=0.5), Phase(concurrency=2))
        load = workload(20, ClosedLoop(phases=phases, num_requests=20))
        assert load.arrivals(now_s=0, num_running=7, num_waiting=0, num_finished=10) == 0
        assert load.arrivals(now_s=0, num_running=1, num_waiting=0, num_finished=16) == 1

    def test_it_releases_no_more_than_there_are(self) -> None:
        load = workload(3, ClosedLoop.constant(8))
        assert load.arrivals(now_s=0, num_running=0, num_waiting=0, num_finished=0) == 3
        assert load.arrivals(now_s=0, num_running=1, num_waiting=1, num_finished=1) == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"phases": ()}, "at least one phase"),
            ({"phases": (Phase(concurrency=0),)}, "at least 1"),
            ({"phases": (Phase(concurrency=1, until=0.5),) * 2}, "need num_requests"),
            (
                {
                    "phases": (Phase(concurrency=1, until=2), Phase(concurrency=1)),
                    "num_requests": 4,
                },
                "end before 1",
            ),
            (
                {
                    "phases": (Phase(concurrency=1, until=5), Phase(concurrency=0)),
                    "unit": "seconds",
                },
                "at least 1, except",
            ),
            (
                {
                    "phases": tuple(Phase(concurrency=1, until=u) for u in (0.5, 0.2, 1)),
                    "num_requests": 4,
                },
                "later and later",
            ),
            (
                {
                    "phases": (Phase(concurrency=-1, until=5), Phase(concurrency=1)),
                    "unit": "seconds",
                },
                "0 or more",
            ),
            ({"phases": (Phase(concurrency=1),), "unit": "hours"}, "'fraction' or 'seconds'"),
        ],
    )
    def test_impossible_loops_are_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ClosedLoop(**options)  # type: ignore[arg-type]

    def test_another_number_of_requests_than_the_fractions_count_is_refused(self) -> None:
        process = ClosedLoop.varying(10, [1, 2], np.random.default_rng(0))
        with pytest.raises(ValueError, match="made for 10 requests, got 12"):
            workload(12, process)


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        workload(0, ClosedLoop.constant(1))
