"""`specdepth/LiveDecode-v0`: how deep to draft, as a Gymnasium environment over the real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import Workload
from specdepth.scheduler.cost import CostModel

from .arguments import WorkloadLike
from .engine_env import EngineEnv
from .workload_config import PromptLike, PromptPool, WorkloadConfig

DecoderSource = SpeculativeDecoder | Callable[[], SpeculativeDecoder]


class LiveDecodeEnv(EngineEnv):
    """Choose the draft depth of each sequence in each round of a batched speculative decoder.

    ## Description
    Speculative decoding spends the spare arithmetic of a memory-bound forward pass on drafted
    tokens. A batch spends it too, so the best depth falls as more sequences run, and it differs
    between sequences, since some drafts are more likely to be accepted than others. The environment
    serves a workload with the same engine rounds that deployment runs: each step is one round, draft
    and verify, of all running sequences. The text does not depend on the actions.

    ## Action Space
    `MultiDiscrete([K + 1] * S)`, S the engine's slots (`max_num_seqs`), K its deepest depth
    (`max_num_speculative_tokens`): tokens to draft for the sequence in each slot. Entries of empty
    slots are ignored. A depth that cannot be honoured (nothing more to propose, the request's last
    tokens) is clipped by the engine.

    ## Observation Space
    `Box(float32, [S, 1 + F])`: a row a slot. Column 0 (`active`) is 1 where a sequence decodes; the
    others are the features of `specdepth.scheduler.features`, the same as in deployment. Rows of
    empty slots are 0. `metadata["column_names"]` and `metadata["column_units"]` name them; bounds
    are true.

    ## Rewards
    In seconds: minus the elapsed seconds of the round, plus its committed tokens times
    `seconds_per_token`. A workload's tokens are the same whatever is done, so the return is a
    constant minus the time in which there was work; the constant only reduces variance. Rounds in
    which no sequence decodes yet (prompts being prefilled) ask for no action; their seconds are
    charged to the step before, those ahead of the first step to none. Not charged: the time that
    the agent takes to decide, and waits for the next arrival with an empty engine. A learner should
    discount by `info["step_s"]` and not by the step, or long rounds look cheap.

    ## Starting State
    A workload is drawn from `np_random`: prompts, their kinds, seeds, and arrivals. The first
    observation is the first round in which a sequence decodes.

    ## Episode End
    Terminated when the workload is served. Truncated after `max_rounds` steps, or when the backend
    fails (out of memory, lost device): `info["error_type"]` and `info["error"]` then say what
    happened, the observation is the last one, and the reward 0: nothing is known about that round.
    Errors of the program are raised.

    ## Arguments
    With `gymnasium.make("specdepth.envs:specdepth/LiveDecode-v0", ...)`:

    * `decoder`: a `SpeculativeDecoder`, or a function that makes one (as vector environments need).
    * `target`, `draft`: names for `SpeculativeDecoder.from_pretrained`, instead of `decoder`.
    * `decoder_options`: its further arguments, for example `{"max_num_seqs": 16}`.
    * `prompts`: texts, token lists or `Prompt`s; None takes the shipped training prompts.
    * `workload`: a `WorkloadConfig` or its fields as a mapping, of which each episode draws a new
      one, or a fixed `Workload`. `reset(options={"workload": ...})` overrides it for an episode.
    * `cost`: the machine's prices shown in the observation; None keeps the decoder's.
    * `sampling`: `SamplingParams` for all requests, instead of what the workload's fields say.
    * `max_rounds`: steps after which an episode is truncated; None for no limit.
    * `seconds_per_token`: of the reference policy; None takes decoding without speculation at the
      workload's typical load by the cost model.

    `reset(options=...)` takes `workload`, `seconds_per_token` and `max_rounds`. One decoder serves
    one environment at a time. On the wall clock the environment is not deterministic; with a
    decoder on a `VirtualClock` it is.

    ## Version History
    * v0: first version.
    """

    def __init__(
        self,
        decoder: DecoderSource | None = None,
        *,
        target: str = "default",
        draft: str = "prompt-lookup",
        decoder_options: Mapping[str, Any] | None = None,
        prompts: Sequence[PromptLike] | None = None,
        workload: WorkloadLike | None = None,
        cost: CostModel | None = None,
        sampling: SamplingParams | None = None,
        max_rounds: int | None = None,
        seconds_per_token: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.decoder = _make_decoder(decoder, target, draft, decoder_options)
        engine = self.decoder.engine
        super().__init__(engine, workload, max_rounds, seconds_per_token, render_mode)
        if cost is not None:
            engine.cost = cost
        self._sampling = sampling
        drawn = isinstance(self._workload, WorkloadConfig)
        self._prompts = PromptPool(self.decoder, prompts) if drawn or prompts is not None else None

    @property
    def spec(self) -> EnvSpec | None:
        """How it was made."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        # Wrappers copy the spec deeply, and a copy of a decoder is a second set of models.
        if spec is not None and isinstance(spec.kwargs.get("decoder"), SpeculativeDecoder):
            decoder = spec.kwargs["decoder"]
            spec = replace(spec, kwargs=spec.kwargs | {"decoder": lambda: decoder})
        self._spec = spec

    _spec: EnvSpec | None = None

    def _draw(self, config: WorkloadConfig) -> Workload:
        if self._prompts is None:
            self._prompts = PromptPool(self.decoder)
        return self._prompts.workload(config, self.np_random, self._sampling)


def _make_decoder(
    decoder: DecoderSource | None,
    target: str,
    draft: str,
    options: Mapping[str, Any] | None,
) -> SpeculativeDecoder:
    """The decoder that is given, made or named.

    Raises:
        ValueError: options for a finished decoder, or something else than a decoder.
    """
    if decoder is None:
        return SpeculativeDecoder.from_pretrained(target, draft, **(options or {}))
    if options:
        raise ValueError("decoder_options go with target and draft, not with a finished decoder.")
    made = decoder if isinstance(decoder, SpeculativeDecoder) else decoder()
    if not isinstance(made, SpeculativeDecoder):
        raise ValueError(
            f"decoder must be a SpeculativeDecoder or a function that makes one, got {made!r}."
        )
    return made
