"""Settings of a training run: one tree of frozen dataclasses, read by the command line and kept as
`config.json` in the run's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from specdepth.decoder.config import Lookahead
from specdepth.envs.reward import REWARDS, Timing
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.depth import VerificationRule

from .feature_groups import columns_of
from .results import write_atomically
from .track_config import TrackConfig as TrackConfig

FORMAT = "specdepth-train-config"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The decoder that training drives."""

    target: str = "default"
    """Hub name or folder of the target model; "default" is SmolLM2-135M-Instruct."""
    draft: str = "prompt-lookup"
    """"prompt-lookup", or hub name or folder of a draft model."""
    max_num_speculative_tokens: int | None = None
    """K, the deepest depth; None takes the trace's on replay, else 32 with prompt lookup and 8 with a draft
    model. A policy of depths is for one K."""
    max_num_seqs: int = 16
    """Sequences that run at once; an agent each."""
    dtype: str = "auto"
    """Of the models; "auto" takes bfloat16, on a CPU without instructions for it float32."""
    device: str | None = None
    """Of the models; None takes a GPU if there is one. The policy itself always trains on the CPU."""
    verification: VerificationRule = "rejection"
    """Rule for sampled requests."""
    cost: Path | None = None
    """Cost model: file written by `specdepth profile`, or name of a shipped one. None takes a made-up
    one, fine for a try only, and not enough for replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """What training on replay runs on instead of models. Of `DecoderConfig` it takes K, slots and
    cost model.
    """

    trace: str | None = None
    """File or shipped name of a trace; its training requests are used."""
    num_engines: int = 8
    """Engines that run at once, each on workloads of its own."""
    looping: bool = True
    """Whether texts that fell into verbatim repetition take part."""
    num_kv_blocks: int | None = None
    """Blocks of 16 tokens in each engine's KV pool; None is plenty. Few bring memory pressure."""
    lookahead: Lookahead = "reserve"
    """When blocks run out: "reserve" preempts the youngest sequence, "clip" cuts depths."""
    trace_sha256: str = ""
    """Refuse a trace of another content. Empty takes any, and is filled in for --resume."""
    cost_sha256: str = ""
    """The same of the cost model."""

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ValueError(f"num_engines must be at least 1, got {self.num_engines}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """PPO of stable-baselines3 [Schulman et al. 2017, arXiv 1707.06347]."""

    learning_rate: float = 1e-3
    """Step of Adam."""
    n_steps: int = 128
    """Rounds between two updates."""
    batch_size: int = 64
    """Decisions in a minibatch."""
    n_epochs: int = 8
    """Passes over the decisions in an update."""
    discount: float = 0.9
    """Discount of what comes one `reference_round_s` later, in 0..1."""
    reference_round_s: float | None = None
    """Seconds that `discount` refers to; None takes a round of one sequence at depth 0 by the cost
    model."""
    gae_lambda: float = 0.9
    """Lambda of the advantage estimate, 0..1, per step of an agent."""
    clip_range: float = 0.2
    """Bound of the policy ratio."""
    ent_coef: float = 0.005
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Bound of the gradient's norm."""
    target_kl: float | None = 0.03
    """An update stops early beyond 1.5 times this KL divergence; None never."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of policy and critic, which share none. A policy of offsets has the
    first of them only, and that as wide as the policy it starts as, or wider."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Between layers."""
    offset_std: float = 0.3
    """Standard deviation of the logits that a policy of offsets tries, at the start."""
    masked_features: tuple[str, ...] = ()
    """Groups of features that a policy of depths does not see; see `agents/feature_groups.py`."""

    def __post_init__(self) -> None:
        if self.n_steps < 2 or self.batch_size < 2 or self.n_epochs < 1:
            raise ValueError(
                f"n_steps and batch_size must be at least 2 and n_epochs at least 1, got "
                f"{self.n_steps}, {self.batch_size}, {self.n_epochs}."
            )
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}.")
        columns_of(self.masked_features)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}.")
        if self.reference_round_s is not None and not self.reference_round_s > 0:
            raise ValueError(f"reference_round_s must be above 0, got {self.reference_round_s}.")
        if not self.offset_std > 0:
            raise ValueError(f"offset_std must be above 0, got {self.offset_std}.")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden must hold widths of at least 1, got {self.hidden}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """What agents are paid; see `specdepth.envs.reward.slot_rewards`."""

    timing: Timing = "modelled"
    """Rounds are charged by the cost model ("modelled") or by the clock ("measured")."""
    form: Literal["difference", "relative", "team", "throughput"] = "difference"
    """"difference": a sequence's tokens, less the time that its drafts add and its share of the rest.
    "relative": on replay with prompt lookup and action "offset", what it gained over the depth of the
    policy's starting point, by the trace; made for a `ppo.discount` of 0. "team": the sum of the
    differences, for all sequences alike. "throughput": the round's tokens a second, for all alike. The
    last two are there for comparison."""
    tokens: Literal["sampled", "expected"] = "sampled"
    """"sampled": pay for the tokens that a round committed. "expected": for those that the survival model
    of the rule `warm_start.scheduler` expected of its depths."""
    token_worth: float = 0.8
    """Of a further token, in "relative"."""
    by_load: bool | None = None
    """Whether each number of running sequences has its own seconds per token; None: in closed loops,
    where the load is not the policy's doing."""

    def __post_init__(self) -> None:
        if self.form != "relative" and self.form not in REWARDS:
            raise ValueError(f"form must be relative or {', '.join(REWARDS)}, got {self.form!r}.")
        if self.tokens not in ("sampled", "expected"):
            raise ValueError(f'tokens must be "sampled" or "expected", got {self.tokens!r}.')
        if (self.form, self.tokens) == ("relative", "expected"):
            raise ValueError(
                'form "relative" takes what each depth would have earned from the trace; tokens must be '
                '"sampled" with it.'
            )
        if not self.token_worth > 0:
            raise ValueError(f"token_worth must be above 0, got {self.token_worth}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """Imitation before PPO, which from random weights tends to collapse to one depth."""

    scheduler: str = "heuristic"
    """What to imitate, by the names of `specdepth evaluate`: "fixed:4", "table:1-4=4,5-=1",
    "heuristic", the folder of a policy; "none" starts from random weights."""
    search_iterations: int = 0
    """On replay with action "offset": steps of a search of few parameters, a load, before PPO starts where it
    ended; 14 take 10 to 15 minutes. The policy found stays in the run's folder, in searched/."""
    search_pools: tuple[float, ...] = ()
    """KV pools for a second search, of what the policy does about memory pressure, as shares of what a
    load's requests fill: 0.3 and 0.5 preempt often. None leaves the policy blind to it."""
    rounds: int = 300
    """Rounds that it drives each engine for; should meet every load of the workload."""
    epochs: int = 30
    """Passes over the decisions of these rounds, shared among the engines if there are several."""
    smoothing: float = 0.15
    """Share of the target given to all depths alike, 0..1, so that there is something left to explore."""
    max_share: float = 0.3
    """Largest share of `minutes` to spend on it, 0..1."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.epochs < 1:
            raise ValueError(
                f"rounds and epochs must be at least 1, got {self.rounds}, {self.epochs}."
            )
        if self.search_iterations < 0:
            raise ValueError(f"search_iterations must be 0 or more, got {self.search_iterations}.")
        for name in ("smoothing", "max_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run."""

    env: Literal["live", "replay"] = "live"
    """Environment: "live" is the decoder itself, "replay" the same engine on a recorded trace and a cost
    model, which needs no model and no time to speak of."""
    action: Literal["depth", "offset", "batch"] = "depth"
    """What the policy says: "depth" is a depth for each sequence. "offset" starts at the tuned greedy rule
    that `warm_start.scheduler` names, and learns to bend the acceptance that the rule expects. "batch" is
    one depth for all sequences of a round, from what they have in common; it is there for comparison."""
    out: Path = Path("runs/train")
    """Folder of the run; must not hold another one."""
    seed: int = 0
    """Of weights, workloads and minibatches."""
    minutes: float | None = 4.0
    """Wall time to train for; None for no limit."""
    timesteps: int | None = None
    """stable-baselines3's count to stop at: rounds times slots, empty ones included; None for no
    limit."""
    checkpoint_minutes: float = 1.0
    """Wall time between checkpoints; one more is written at the end and on Ctrl-C."""
    prompts: Path | None = None
    """Prompts, a text file with one a line or JSONL, of which the training half is used; None takes the
    shipped ones."""
    track: bool = False
    """Log to Weights & Biases."""
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    wandb: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        if self.minutes is None and self.timesteps is None:
            raise ValueError("training needs an end: set minutes or timesteps.")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}.")
        if self.timesteps is not None and self.timesteps < 1:
            raise ValueError(f"timesteps must be at least 1, got {self.timesteps}.")
        if not self.checkpoint_minutes >= 0:
            raise ValueError(
                f"checkpoint_minutes must be 0 or more, got {self.checkpoint_minutes}."
            )
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}.")
        if self.action not in ("depth", "offset", "batch"):
            raise ValueError(f'action must be "depth", "offset" or "batch", got {self.action!r}.')
        if self.action == "offset" and self.ppo.masked_features:
            raise ValueError(
                "masked_features are for policies of depths; one of offsets starts at a rule that reads "
                "them all."
            )
        if self.warm_start.search_iterations and (self.env, self.action) != ("replay", "offset"):
            raise ValueError(
                'warm_start.search_iterations needs env "replay" and action "offset", got '
                f"{self.env!r} and {self.action!r}."
            )
        if self.reward.form == "relative" and (self.env, self.action) != ("replay", "offset"):
            raise ValueError(
                'reward.form "relative" needs env "replay" and action "offset", got '
                f"{self.env!r} and {self.action!r}."
            )
        if self.env not in ("live", "replay"):
            raise ValueError(f'env must be "live" or "replay", got {self.env!r}.')

    @property
    def by_load(self) -> bool:
        """Whether each load has its own reference rate."""
        return (
            not self.workload.is_open_loop if self.reward.by_load is None else self.reward.by_load
        )

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON values."""
        settings: dict[str, Any] = _plain(asdict(self))
        return settings

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` into `folder`, whole or not at all."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION} | self.to_dict()
        write_atomically(Path(folder) / CONFIG_FILE, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TrainConfig:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, damaged or foreign file, unknown settings, values out of range.
        """
        path = Path(folder) / CONFIG_FILE
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes, which no settings are.")
            return cls.from_dict(json.loads(data.decode("utf-8")))
        except OSError as error:
            raise ValueError(f"no training run in {folder}: {error.strerror}.") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"cannot use {path}: {error}") from error

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TrainConfig:
        """Inverse of `to_dict`, with the format in it.

        Raises:
            ValueError: another format or version, or an unknown setting.
        """
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            raise ValueError(f'these are no training settings: "format" must be "{FORMAT}".')
        version = document.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise ValueError(f"format version {version!r}, this specdepth reads {FORMAT_VERSION}.")
        values = {k: v for k, v in document.items() if k not in ("format", "format_version")}
        for name, kind in _NESTED.items():
            if name in values:
                values[name] = _build(kind, values[name])
        for name in ("out", "prompts"):
            values[name] = _path(values.get(name)) or cls.__dataclass_fields__[name].default
        built = _build(cls, values)
        assert isinstance(built, TrainConfig)
        return built


_NESTED: dict[str, type] = {
    "decoder": DecoderConfig,
    "replay": ReplayConfig,
    "workload": WorkloadConfig,
    "ppo": PPOConfig,
    "reward": RewardConfig,
    "warm_start": WarmStartConfig,
    "wandb": TrackConfig,
}


def _build(kind: type, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} must be an object, got {values!r}.")
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)} of {kind.__name__}.")
    made = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if kind is DecoderConfig:
        made["cost"] = _path(made.get("cost"))
    return kind(**made)


def _path(value: Any) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise ValueError(f"expected a path, got {value!r}.")
    return None if value is None else Path(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
