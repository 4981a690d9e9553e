"""`specdepth advise`: whether to speculate, how deep, and up to which batch size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import UseAppendAction

from .console import Console
from .options import CommonOptions, IntList

if TYPE_CHECKING:
    from .advice_drafters import DrafterComparison

DEFAULT = "default"
RULE_FILE = "rule.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(CommonOptions):
    """Say whether speculation pays for your requests on your machine, and how to set it.

    Replays a trace, or the log of a server, at rising loads with the pass times of a machine: the knee,
    the loads at which drafting pays, the batch size above which to switch it off, the best table as
    settings for vLLM and SGLang, and what a policy with a depth for each sequence would add; with
    several drafters for one target, which of them pays most at which load. Needs no GPU; with a trace,
    or a log of token ids, no model either. Writes advice.json, vllm.json, sglang.json, and with a
    survival model rule.json, which `--policies rule:FILE` takes.

    specdepth advise
    specdepth advise --from-outputs log.jsonl --tokenizer org/model --cost-from times.csv
    specdepth advise --trace runs/trace.npz --cost h100-llama-8b-modelled --engine vllm-like
    specdepth advise --trace lookup.npz --cost lookup.json --compare draft.npz=draft.json
    """

    trace: str = DEFAULT
    """File that "specdepth record" wrote, or the name of a shipped trace."""
    from_outputs: Path | None = None
    """Instead: a server's log, JSONL with prompts and outputs; its trace for prompt lookup is kept in
    the folder."""
    prompt_column: str = "prompt"
    """Key of the prompt in the log: a text, a list of token ids, or a chat."""
    output_column: str = "output"
    """Key of the output in the log: a text, or a list of token ids."""
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer, for a log with text."""
    temperature: float = 0.0
    """How the outputs of the log were sampled."""
    cost: str | None = None
    """Pass times: a file that "specdepth profile" wrote, or a shipped name; with the default trace
    those of a CPU."""
    cost_from: Path | None = None
    """Instead: step times of the engine that serves, CSV with sequences, tokens or depth, context and
    ms."""
    compare: UseAppendAction[tuple[str, ...]] = ()
    """TRACE=COST: the same requests recorded with another drafter, and its pass times, as files or
    shipped names; again, or with commas, for more. With the default trace and cost, the shipped draft
    model; "none" compares nothing."""
    loads: IntList = ()
    """Concurrent requests, with commas; by default 1,2,4,... until drafting pays no more."""
    depths: IntList = (1, 2, 3, 4, 6, 8)
    """Fixed depths to try, with commas."""
    max_num_speculative_tokens: int | None = None
    """Deepest depth, K; as deep as recorded by default."""
    engine: str = "specdepth"
    """Engine to replay: "specdepth", or "vllm-like": a round of lag, padded drafts."""
    survival: str | None = None
    """Survival estimator of the per-sequence policy: a shipped model, the folder of a fitted one, match,
    positions, ema or confidence. By default, and with compared drafters, a shipped model of the same
    pair, else counts of the trace."""


def run(options: Options, console: Console) -> None:
    """Advise and write.

    Raises:
        ValueError: bad options, an empty log, a trace and cost model that do not fit, or traces to
            compare that are not of the same requests.
    """
    from specdepth.decoder.engine_profile import EngineProfile
    from specdepth.scheduler.baselines.greedy_file import save_greedy

    from .advice_drafters import compare_drafters
    from .advice_drafters_text import drafters_mapping
    from .advice_settings import SGLANG_FILE, VLLM_FILE, engine_settings
    from .advice_text import as_mapping
    from .advise_inputs import load_drafters
    from .results import command_line, write_atomically
    from .session import config_of, make_folder, new_folder

    folder = new_folder(options, "advise")
    profile = EngineProfile.named(options.engine)
    drafters = load_drafters(options, folder, console)
    with console.progress("Replaying") as update:
        compared = compare_drafters(
            {name: one.drafting for name, one in drafters.items()},
            options.loads or None,
            depths=options.depths,
            max_num_speculative_tokens=options.max_num_speculative_tokens,
            profile=profile,
            seed=options.seed,
            progress=update,
        )
    found, chosen = compared.advice[compared.best], drafters[compared.best]
    settings = engine_settings(found)
    traces = {name: one.trace for name, one in drafters.items()}
    result = as_mapping(found) | {
        "drafters": drafters_mapping(compared, traces) if len(drafters) > 1 else None,
        "settings": settings,
        "config": config_of(options),
        "command": command_line(),
        "folder": str(folder),
    }
    files = {"advice.json": result, SGLANG_FILE: settings["sglang"]["adaptive_config"]}
    if settings["vllm"]["speculative_config"] is not None:
        files[VLLM_FILE] = settings["vllm"]["speculative_config"]
    make_folder(folder)
    for name, values in files.items():
        write_atomically(folder / name, json.dumps(values, indent=1, default=str) + "\n")
    written = list(files)
    if chosen.survival is not None:
        save_greedy(
            folder / RULE_FILE,
            chosen.survival,
            found.rule,
            command=command_line(),
            cost_model=found.cost.name,
            trace=chosen.trace,
        )
        written.append(RULE_FILE)
    _show(compared, settings, console)
    console.say(f"Wrote {', '.join(written)} in {folder}.")
    console.finish(json.loads(json.dumps(result, default=str)))


def _show(
    compared: DrafterComparison, settings: dict[str, dict[str, Any]], console: Console
) -> None:
    from . import advice_drafters_text as drafters_text
    from .advice_settings import settings_text
    from .advice_text import caveats, judged_grid, sentences, sweep_grid

    found, notes = compared.advice[compared.best], []
    if len(compared.advice) > 1:
        console.table(drafters_text.drafter_grid(compared))
        for line in drafters_text.drafter_sentences(compared):
            console.show(line)
        console.show("")
        notes = drafters_text.drafter_caveats(compared)
    console.table(sweep_grid(found))
    console.table(judged_grid(found))
    for lines in (sentences(found), settings_text(settings), [*notes, *caveats(found)]):
        console.show("")
        for line in lines:
            console.show(line)
