"""`specdepth advise`: whether to speculate, how deep, and up to which batch size."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console
from .options import CommonOptions, IntList

if TYPE_CHECKING:
    from specdepth.decoder.trace import Trace
    from specdepth.scheduler.cost import CostModel

    from .advise import Advice

DEFAULT = "default"
VLLM_FILE, SGLANG_FILE, RULE_FILE = "vllm.json", "sglang.json", "rule.json"
TRACE_FILE = "trace.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(CommonOptions):
    """Say whether speculation pays for your requests on your machine, and how to set it.

    Replays a trace, or the log of a server, at rising loads with the pass times of a machine: the knee,
    the loads at which drafting pays, the batch size above which to switch it off, the best table as
    settings for vLLM and SGLang, and what a policy with a depth for each sequence would add. Needs no
    GPU; with a trace, or a log of token ids, no model either. Writes advice.json, vllm.json,
    sglang.json, and with a survival model rule.json, which `--policies rule:FILE` takes.

    specdepth advise
    specdepth advise --from-outputs log.jsonl --tokenizer org/model --cost-from times.csv
    specdepth advise --trace runs/trace.npz --cost h100-llama-8b-modelled --engine vllm-like
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
    positions, ema or confidence. By default a shipped model of the same pair, else counts of the
    trace."""


def run(options: Options, console: Console) -> None:
    """Advise and write.

    Raises:
        ValueError: bad options, an empty log, or a trace and cost model that do not fit.
    """
    from specdepth.decoder.engine_profile import EngineProfile
    from specdepth.scheduler.baselines.greedy_file import save_greedy
    from specdepth.scheduler.baselines.survival_names import make_survival, shipped_survival_for

    from .advice_text import as_mapping, caveats, judged_grid, sentences, sweep_grid
    from .advise import advise
    from .results import command_line, write_atomically
    from .session import config_of, make_folder, new_folder

    folder = new_folder(options, "advise")
    cost = _cost(options)
    profile = EngineProfile.named(options.engine)
    trace = _trace(options, folder, console)
    info = trace.info
    top = options.max_num_speculative_tokens or info.max_num_speculative_tokens
    survival_name = options.survival or shipped_survival_for(info.model_pair, info.drafter, top)
    survival = None
    if survival_name is not None:
        survival = make_survival(
            survival_name, drafter=info.drafter, max_num_speculative_tokens=top
        )
    with console.progress("Replaying") as update:
        found = advise(
            trace,
            cost,
            options.loads or None,
            depths=options.depths,
            max_num_speculative_tokens=options.max_num_speculative_tokens,
            survival=survival,
            profile=profile,
            seed=options.seed,
            progress=update,
        )
    settings = engine_settings(found)
    result = as_mapping(found) | {
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
    if survival_name is not None:
        save_greedy(
            folder / RULE_FILE,
            survival_name,
            found.rule,
            command=command_line(),
            cost_model=cost.name,
            trace=options.trace if options.from_outputs is None else TRACE_FILE,
        )
        written.append(RULE_FILE)
    console.table(sweep_grid(found))
    console.table(judged_grid(found))
    for line in sentences(found):
        console.show(line)
    console.show("")
    for line in settings_text(settings):
        console.show(line)
    console.show("")
    for line in caveats(found):
        console.show(line)
    console.say(f"Wrote {', '.join(written)} in {folder}.")
    console.finish(json.loads(json.dumps(result, default=str)))


def engine_settings(advice: Advice) -> dict[str, dict[str, Any]]:
    """The best table as settings of vLLM and SGLang, with what each makes of them, as JSON values."""
    from specdepth.scheduler import table_exports as exports

    info, size = advice.info, advice.max_load
    draft_model = info.model_pair.rpartition("+")[2]
    return {
        "vllm": {
            "speculative_config": exports.vllm_speculative_config(
                advice.table,
                max_batch_size=size,
                drafter=info.drafter,
                draft_model=draft_model,
                lookup=info.lookup,
            ),
            "limits": exports.VLLM_TABLE_LIMITS,
        },
        "sglang": {
            "flags": list(
                exports.sglang_flags(
                    advice.best_single, drafter=info.drafter, draft_model=draft_model
                )
            ),
            "adaptive_config": exports.sglang_adaptive_config(advice.table, size),
            "limits": exports.SGLANG_TABLE_LIMITS,
        },
    }


def settings_text(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Lines to paste."""
    vllm, sglang = settings["vllm"], settings["sglang"]
    config, flags = vllm["speculative_config"], sglang["flags"]
    lines = ["vLLM:"]
    if config is None:
        lines.append("  no --speculative-config")
    else:
        lines.append(f"  --speculative-config {shlex.quote(json.dumps(config))}")
        lines.append(f"  {vllm['limits']}")
    lines.append("SGLang, one depth:")
    lines.append(f"  {shlex.join(flags)}" if flags else "  no --speculative-algorithm")
    lines.append("SGLang, the table:")
    lines.append(
        f"  --speculative-adaptive --speculative-adaptive-config {SGLANG_FILE}, which holds "
        f"{json.dumps(sglang['adaptive_config'])}"
    )
    lines.append(f"  {sglang['limits']}")
    return lines


def _cost(options: Options) -> CostModel:
    from specdepth.decoder.trace_files import shipped_traces
    from specdepth.scheduler.cost import CostModel
    from specdepth.scheduler.cost_files import load_cost

    from .evaluate_in_replay import DEFAULT_COST

    if options.cost_from is not None:
        if options.cost is not None:
            raise ValueError("--cost and --cost-from exclude each other; name one of them.")
        return CostModel.from_step_times(options.cost_from)
    if options.cost is not None:
        return load_cost(options.cost)
    shipped = options.from_outputs is None and options.trace in (DEFAULT, *shipped_traces())
    if not shipped:
        raise ValueError(
            "advice needs the pass times of the machine that serves these requests: --cost-from "
            "times.csv, or --cost with a file or a shipped name."
        )
    return load_cost(DEFAULT_COST)


def _trace(options: Options, folder: Path, console: Console) -> Trace:
    from specdepth.decoder.trace_files import load_trace

    if options.from_outputs is None:
        return load_trace(options.trace)
    if options.trace != DEFAULT:
        raise ValueError("--trace and --from-outputs exclude each other; name one of them.")
    return _logged(options, options.from_outputs, folder, console)


def _logged(options: Options, log: Path, folder: Path, console: Console) -> Trace:
    """Record the log, as `specdepth record` does, into the folder."""
    from specdepth.decoder.output_log import LogColumns
    from specdepth.decoder.trace_files import load_trace

    from . import record_command
    from .recording import log_size

    columns = LogColumns(prompt=options.prompt_column, output=options.output_column)
    _, _, has_text = log_size(log, columns)
    if has_text and options.tokenizer is None:
        raise ValueError(
            f"output log {log} holds text; name the tokenizer of the model that answered with "
            "--tokenizer, or log token ids."
        )
    path = folder / TRACE_FILE
    record_options = record_command.Options(
        from_outputs=log,
        prompt_column=options.prompt_column,
        output_column=options.output_column,
        tokenizer=options.tokenizer,
        temperature=options.temperature,
        max_num_speculative_tokens=options.max_num_speculative_tokens
        or max(options.depths, default=1),
        seed=options.seed,
        threads=options.threads,
        out=path,
    )
    # What it prints is not this command's result.
    aside = Console(quiet=options.quiet, stdout=console.stderr, stderr=console.stderr)
    record_command.run(record_options, aside)
    return load_trace(path)
