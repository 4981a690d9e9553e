"""The card of a fitted survival model: `README.md` beside its two data files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from specdepth.scheduler.survival_file import WEIGHTS_FILE

from .calibration import NUM_BINS
from .survival_study import MODEL, HeldOutScore, SurvivalStudy

CARD_FILE = "README.md"


def render_survival_card(study: SurvivalStudy, folder: Path) -> str:
    """Return the card as Markdown with YAML front matter, as on a model hub.

    Args:
        study: what was fitted and how it scored.
        folder: of the saved model, for its checksum.
    """
    card, weights = study.model.card, study.model.weights
    config = card.training["config"]
    checksum = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    lines = [
        "---",
        "library_name: specdepth",
        "license: apache-2.0",
        "tags:",
        "- speculative-decoding",
        "- calibration",
        "---",
        "",
        f"# Survival of drafted tokens for {card.model_pair}",
        "",
        "Estimates, for each running sequence, the chance that the first 1, 2, ..., "
        f"{weights.max_num_speculative_tokens} tokens of its present proposal are all accepted, from what "
        "the proposal shows and the sequence's history. Rules that weigh tokens against time build on it.",
        "",
        "```python",
        "from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth",
        "from specdepth.scheduler.survival_model import SurvivalModel",
        "",
        f'scheduler = CappedGreedyDepth(SurvivalModel.load("{folder.name}"))',
        "```",
        "",
        "## Held-out requests",
        "",
        "Cumulative survival in the rounds that the greedy rule over this model has on requests that "
        "were not fitted, every depth's outcome counted. ECE is the expected calibration error over "
        f"{NUM_BINS} bins; lower is better for all scores.",
        "",
        *_scores(study.held_out),
        "",
        "### Reliability, all depths together",
        "",
        *_reliability(study.held_out),
        "",
        "## Intended use",
        "",
        f"- Models: {card.model_pair}",
        f"- Drafter: {card.drafter}",
        f"- Deepest depth (`max_num_speculative_tokens`): {weights.max_num_speculative_tokens}",
        "- With another drafter, depth limit or meaning of the features it is refused. With other models, "
        "prompts or temperatures it runs and is likely to be off: fit one on a trace of them.",
        "",
        "## Fit",
        "",
        *(
            f"- trace `{name}`: temperature {trace['temperature']:g}, {trace['training_requests']} "
            f"requests to learn from and {trace['held_out_requests']} held out, "
            f"{trace['held_out_looping']} of these in verbatim loops"
            for name, trace in card.training["traces"].items()
        ),
        f"- {study.num_rows} rows: sequences in replayed rounds under fixed, random and greedy depths, "
        "and under the greedy rule over a first fit",
        f"- cost model of the greedy rules: {card.training['cost']}",
        f"- hazards by binary cross-entropy, {config['num_steps']} steps of AdamW, seed {config['seed']}",
        *([f"- made by `{card.training['command']}`"] if card.training["command"] else []),
        "",
        "## Format",
        "",
        f"- {len(weights.inputs)} x {len(weights.hidden_bias)} x {len(weights.out_bias)} tanh network to "
        "the logit of each position's conditional acceptance",
        "- monotone in match length, agreement and acceptance averages: "
        + ("yes, by the signs of its weights" if config["monotone"] else "no"),
        "- inputs: " + ", ".join(f"`{name}`" for name in weights.inputs),
        f"- sha256 of `{WEIGHTS_FILE}`: `{checksum}`",
        "- safetensors and JSON; nothing in it can run code",
        "",
    ]
    return "\n".join(lines)


def score_cells(score: HeldOutScore) -> tuple[str, ...]:
    """One line of the table of scores, as in `score_header`."""
    *depths, total = score.scores
    requests = "all" if score.looping else "no loops"
    return (
        score.trace,
        requests,
        score.estimator,
        *(f"{one.brier:.4f}" for one in depths),
        f"{total.brier:.4f}",
        f"{total.log_loss:.4f}",
        f"{total.calibration_error:.4f}",
    )


def score_header(score: HeldOutScore) -> tuple[str, ...]:
    """Names of the columns of `score_cells`."""
    depths = tuple(f"Brier at {one.depth}" for one in score.scores[:-1])
    return (
        "trace",
        "requests",
        "estimator",
        *depths,
        "Brier",
        "log loss (nats)",
        "ECE",
    )


def _scores(held_out: Sequence[HeldOutScore]) -> list[str]:
    return _table(score_header(held_out[0]), [score_cells(score) for score in held_out])


def _reliability(held_out: Sequence[HeldOutScore]) -> list[str]:
    lines = []
    for score in held_out:
        if score.estimator == MODEL and score.looping:
            lines += [
                (score.trace, f"{one.predicted:.3f}", f"{one.observed:.3f}", str(one.count))
                for one in score.scores[-1].bins
            ]
    return _table(("trace", "predicted", "observed", "predictions"), lines)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [header, ("---",) * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
