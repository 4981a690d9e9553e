"""The section of `gpu_check.py` that trains a policy and judges it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _gpu_common import Check, Skip


def train(check: Check) -> dict[str, Any]:
    """Train a policy for a short time, export it, load it back and compare it on held-out prompts."""
    decoder = check.need_decoder()
    try:
        from specdepth.agents.evaluate import evaluate
        from specdepth.agents.train import train as train_policy
        from specdepth.agents.train_config import TrainConfig
        from specdepth.envs.workload_config import WorkloadConfig
    except ModuleNotFoundError as error:
        raise Skip(f"the package {error.name} is not installed") from error
    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.workload import WorkloadRequest
    from specdepth.scheduler.baselines import make_scheduler
    from specdepth.scheduler.learned import LearnedScheduler

    scale, top = check.scale, check.scale.max_num_speculative_tokens
    minutes = min(scale.train_minutes, check.left_s / 120)
    prompts = [prompt for prompt, _ in check.texts]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            out=Path(folder) / "run",
            seed=check.seed,
            minutes=minutes,
            workload=WorkloadConfig(
                num_requests=2 * max(scale.loads),
                concurrencies=scale.loads,
                max_new_tokens=scale.new_tokens,
            ),
        )
        trained = train_policy(config, decoder, prompts=prompts[: scale.num_train_prompts])
        learned = LearnedScheduler.load(trained.policy_folder, drafter="recorded-text")
    names = ["off", *(f"fixed:{depth}" for depth in (1, 2, 4, 8) if depth <= top), "heuristic"]
    policies: dict[str, Any] = {
        name: make_scheduler(name, max_num_speculative_tokens=top) for name in names
    }
    sampling = SamplingParams(max_new_tokens=scale.new_tokens)
    requests = [
        WorkloadRequest(prompt_token_ids=tuple(prompt), sampling=sampling)
        for prompt in prompts[scale.num_train_prompts :]
    ]
    compared = evaluate(
        decoder,
        policies | {"learned": learned},
        requests,
        scale.loads,
        minutes=min(scale.evaluate_minutes, max(check.left_s, 6.0) / 60),
        clock="wall",
    )
    rows = []
    for load in compared.loads:
        run, best = compared.runs[load], compared.best_fixed(load)
        for name in run.policies:
            rate, over = run.throughput(name), run.ratio(name, best)
            rows.append(
                {
                    "load": load,
                    "policy": name,
                    "throughput_tok_s": rate.value,
                    "over_best_fixed": over.value,
                    "interval": over.bounds,
                    "best_fixed": best,
                }
            )
    check.printer.table(
        ("load", "policy", "tok/s", "over best fixed"),
        [(str(r["load"]), r["policy"], r["throughput_tok_s"], r["over_best_fixed"]) for r in rows],
    )
    return {
        "updates": trained.num_updates,
        "rounds": trained.num_rounds,
        "decisions": trained.num_decisions,
        "train_minutes": minutes,
        "rows": rows,
        "notes": compared.notes,
    }
