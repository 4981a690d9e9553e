"""The model card of an exported policy: `README.md` beside its two data files."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdepth.envs import LIVE_DECODE
from specdepth.scheduler.features import FEATURES
from specdepth.scheduler.policy_file import WEIGHTS_FILE, PolicyCard, PolicyWeights

from .results import collect_versions

if TYPE_CHECKING:
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

CARD_FILE = "README.md"

TAGS = ("reinforcement-learning", "speculative-decoding")
PPO = "PPO of stable-baselines3, each slot an agent"
"""How a policy was made whose training notes no "method"."""


def make_card(
    decoder: SpeculativeDecoder | ReplayDecoder,
    training: Mapping[str, Any],
    env_id: str = LIVE_DECODE,
) -> PolicyCard:
    """What a policy trained on `decoder` is for, and how it came about (plain JSON values)."""
    return PolicyCard(
        model_pair=decoder.model_pair,
        drafter=decoder.engine.runner.drafter,
        max_num_speculative_tokens=decoder.config.max_num_speculative_tokens,
        mask_depths=True,
        env_id=env_id,
        git_sha=git_sha(),
        versions=collect_versions(),
        training=training,
    )


def render_card(weights: PolicyWeights, card: PolicyCard, folder: Path) -> str:
    """Return the card as Markdown with YAML front matter, as on a model hub.

    Args:
        weights: for sizes.
        card: what the policy was made for.
        folder: of the exported policy, for its checksum.
    """
    training = dict(card.training)
    checksum = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    loads = training.get("loads")
    lines = [
        *_front_matter(card, training),
        f"# Draft depth for {card.model_pair}",
        "",
        "Chooses how many tokens to draft for each sequence in each round of batched speculative "
        "decoding, 0 to "
        f"{card.max_num_speculative_tokens}. The text does not depend on it; the speed does.",
        "",
        "```python",
        "from specdepth import SpeculativeDecoder, load_policy",
        "",
        "decoder = SpeculativeDecoder.from_pretrained(",
        f"    ..., max_num_speculative_tokens={card.max_num_speculative_tokens}",
        ")",
        f'results = decoder.generate(prompts, depth_scheduler=load_policy("{folder.name}"))',
        "```",
        "",
        "## Intended use",
        "",
        f"- Models: {card.model_pair}",
        f"- Drafter: {card.drafter}",
        f"- Deepest depth (`max_num_speculative_tokens`): {card.max_num_speculative_tokens}",
        f"- Machine: {training.get('machine', 'not recorded')}",
        f"- Loads seen in training (concurrent sequences): {loads or 'not recorded'}",
        "",
        "## Where it does not transfer",
        "",
        "To another drafter, another depth limit, or another version of the features it is refused. "
        "On other models, prompts, machines or loads it runs, and is likely to lose to a fixed depth "
        "tuned there: what it knows of prices comes from the cost model, what it knows of acceptance "
        "from the training prompts. Profile and evaluate first.",
        "",
        "## Training",
        "",
        *_training(card, training),
        "",
        "## Format",
        "",
        f"- {' x '.join(map(str, weights.layer_sizes))} {weights.activation} network on "
        f"{len(FEATURES)} features, normalisation folded in",
        *_form(weights, card),
        f"- sha256 of `{WEIGHTS_FILE}`: `{checksum}`",
        "- safetensors and JSON; nothing in it can run code",
        "",
    ]
    return "\n".join(lines)


def _form(weights: PolicyWeights, card: PolicyCard) -> list[str]:
    if weights.action == "offset":
        loads = ", ".join(str(load) for load in sorted(weights.shrinkage))
        return [
            "- outputs are logits of acceptance by position, as learning bent them; the greedy rule chooses "
            f"depths by them, with shrinkage and price by number of sequences ({loads})"
        ]
    masked = (
        f"- depths deeper than can be honoured are masked: {'yes' if card.mask_depths else 'no'}"
    )
    if weights.action == "batch":
        return ["- one depth for all sequences, from the mean of their features", masked]
    return [masked]


def git_sha() -> str:
    """Commit of the checkout that this package runs from; empty outside of one."""
    try:
        run = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _front_matter(card: PolicyCard, training: Mapping[str, Any]) -> list[str]:
    method = "PPO" if "method" not in training else "Search"
    # JSON strings are YAML strings, whatever is in a model's name.
    lines = [
        "---",
        "library_name: specdepth",
        "license: apache-2.0",
        "tags:",
        *(f"- {tag}" for tag in (*TAGS, *(["stable-baselines3"] if method == "PPO" else []))),
        "model-index:",
        f"- name: {json.dumps(f'{method} on {card.env_id}')}",
        "  results:",
        "  - task:",
        "      type: reinforcement-learning",
        "      name: reinforcement-learning",
        "    dataset:",
        f"      name: {json.dumps(card.env_id)}",
        f"      type: {json.dumps(card.env_id)}",
    ]
    numbers = _numbers(training.get("metrics"))
    if numbers:
        lines.append("    metrics:")
    for name, value in numbers.items():
        lines += [f"    - type: {json.dumps(name)}", f"      value: {value:.6g}"]
    return [*lines, "---", ""]


def _training(card: PolicyCard, training: Mapping[str, Any]) -> list[str]:
    lines = [f"Environment `{card.env_id}`, {training.get('method', PPO)}."]
    command = training.get("command")
    if command:
        lines += ["", "```console", f"$ {command}", "```"]
    facts = {
        "seed": training.get("seed"),
        "minutes": training.get("minutes"),
        "rounds": training.get("rounds"),
        "decisions": training.get("decisions"),
        "updates": training.get("updates"),
        "warm start": training.get("warm_start"),
        "trace": _trace(training.get("trace")),
        "commit": card.git_sha or None,
        "versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
    }
    lines += [
        "",
        *(f"- {name}: {value}" for name, value in facts.items() if value not in (None, "")),
    ]
    numbers = _numbers(training.get("metrics"))
    if numbers:
        lines += [
            "",
            "Decoding in the last update, with exploration (not an evaluation):",
            "",
            "| metric | value |",
            "|---|---|",
            *(f"| {name} | {value:.4g} |" for name, value in numbers.items()),
        ]
    return lines


def _trace(trace: Any) -> str | None:
    if not isinstance(trace, Mapping):
        return None
    return f"{trace.get('name')}, sha256 {trace.get('sha256')}"


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
