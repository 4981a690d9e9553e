"""What all tests share: one thread, no network by accident, deterministic examples."""

from __future__ import annotations

import os

# Before anything imports numpy or torch: two shared cores are steadier with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hubs, trackers and windows are never part of a test; the default model comes from a package.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import HealthCheck, settings

# Same examples in each run; `pytest --hypothesis-profile=explore` looks for new ones. No deadline:
# the machines that run this are noisy.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
