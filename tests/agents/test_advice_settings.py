from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdepth.agents.advice import Advice
from specdepth.agents.advice_settings import engine_settings, settings_text
from specdepth.agents.advise import advise
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace


@pytest.fixture(scope="module")
def found() -> Advice:
    return advise(make_trace(24, 8), CostModel.linear(knee=100), [1], depths=[2])


def settings_of(found: Advice, **changes: Any) -> dict[str, dict[str, Any]]:
    info = replace(found.info, drafter="draft-model", model_pair="big+org/small", **changes)
    return engine_settings(replace(found, info=info))


@pytest.mark.parametrize(
    ("reads_target", "method", "algorithm"),
    [(False, "draft_model", "STANDALONE"), (True, "eagle3", "EAGLE3")],
)
def test_settings_of_a_draft_model_name_it_and_its_kind(
    found: Advice, reads_target: bool, method: str, algorithm: str
) -> None:
    settings = settings_of(found, reads_target=reads_target)
    config = settings["vllm"]["speculative_config"]
    assert (config["method"], config["model"]) == (method, "org/small")
    assert config["num_speculative_tokens"] == 2
    flags = settings["sglang"]["flags"]
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs["--speculative-algorithm"] == algorithm
    assert pairs["--speculative-draft-model-path"] == "org/small"
    text = " ".join(settings_text(settings))
    assert f'"method": "{method}"' in text
    assert "depth 0 still costs a draft pass" in text


def test_prompt_lookup_has_no_draft_passes_to_warn_of(found: Advice) -> None:
    settings = engine_settings(found)
    assert settings["vllm"]["speculative_config"]["method"] == "ngram"
    assert "draft pass" not in " ".join(settings_text(settings))
