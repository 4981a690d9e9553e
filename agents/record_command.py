"""`specdepth record`: what a drafter would get, at each position of real texts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .console import Console, Interrupted
from .options import ModelOptions, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.prompt_lookup import LookupConfig
    from specdepth.decoder.prompts import Prompt
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.decoder.trace import TraceInfo

    from .recording import Source
    from .trace_parts import TraceParts

DEFAULT = "default"
DECODED_TOKENS = 128
LOGGED_TOKENS = 4096
HIDDEN = (tyro.conf.Suppress, tyro.conf.Fixed)
# What says only where and how to run, and not what comes out.
NOT_SETTINGS = ("out", "threads", "json", "quiet", "debug", "cost", "verification", "prompts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(ModelOptions):
    """Record a trace: for each position of answers, how many drafted tokens would be accepted.

    Policies are compared, trained and tuned on traces without the models. Either the target answers
    prompts, or an engine's log has the answers: then prompt lookup needs no model, only the
    tokenizer, and not even that where the log holds token ids. A trace holds counts, no text. An
    interrupted recording goes on where it was when the same command is run again.

    specdepth record --temperature 0.7 --out runs/smollm2.npz

    specdepth record --from-outputs log.jsonl --target org/model --out runs/log.npz
    """

    out: Path | None = None
    """File of the trace; runs/trace.npz by default."""
    prompts: str = DEFAULT
    """"default" (432 shipped prompts of six kinds), or a file: one prompt a line, or JSONL."""
    prompt_column: str = "prompt"
    """Key of the prompt in JSONL: a text; in logs also a list of token ids, or a chat."""
    from_outputs: Path | None = None
    """Log to take answers from instead of decoding: JSONL with prompts and outputs."""
    output_column: str = "output"
    """Key of the output in the log: a text, or a list of token ids."""
    kind_column: str | None = None
    """Key of the kind of request in the log; results can be reported by kind."""
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer for a log; that of --target by default."""
    raw: bool = False
    """Take text prompts as they are, without the model's chat template."""
    max_new_tokens: int | None = None
    """Longest answer, in tokens: 128 by default; 4096 for a log, whose longer outputs are cut."""
    temperature: float = 0.0
    """0 takes the most likely token. With a log: how it was sampled."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    max_ngram: int = 4
    """Longest n-gram that prompt lookup looks up."""
    min_ngram: int = 1
    """Shortest n-gram whose match proposes anything."""
    keep_text: bool = False
    """Write prompts and outputs to NAME.texts.jsonl beside the trace."""
    verification: Annotated[Rule, *HIDDEN] = "coupled"
    cost: Annotated[str | None, *HIDDEN] = None


def run(options: Options, console: Console) -> None:
    """Record and write.

    Raises:
        ValueError: bad options, prompts or log; parts of another recording; `--out` that exists.
        Interrupted: after Ctrl-C; complete parts are kept.
    """
    from specdepth.decoder.trace_summary import summarize

    from .trace_tables import kind_grid, match_grid, survival_grid

    out = options.out or Path("runs") / "trace.npz"
    if out.suffix != ".npz":
        raise ValueError(f"--out names the trace's file, which ends with .npz, got {out}.")
    sampling, lookup = _checked(options)
    if options.from_outputs is None:
        parts, source = _decoded(options, out, sampling, lookup, console)
    else:
        parts, source = _logged(options, options.from_outputs, out, sampling, lookup, console)
    num_kept = min(parts.num_done * source.chunk_size, source.num_requests)
    if num_kept:
        console.say(f"Going on after {num_kept} of {source.num_requests} requests.")
    try:
        _record(source, parts, options.keep_text, console)
    except KeyboardInterrupt:
        kept = min(parts.num_done * source.chunk_size, source.num_requests)
        raise Interrupted(
            f"interrupted; {kept} of {source.num_requests} requests are in {parts.folder}, the same "
            "command goes on from there."
        ) from None
    trace = parts.join()
    summary = summarize(trace)
    for grid in (kind_grid(summary), match_grid(summary), survival_grid(summary)):
        if grid.rows:
            console.table(grid)
    console.say(f"Wrote {out} ({out.stat().st_size / 1e3:,.0f} kB).")
    if options.keep_text:
        console.say(f"Prompts and outputs are in {parts.texts_file}.")
    console.finish(
        {"trace": str(out), "info": asdict(trace.info), "num_resumed_requests": num_kept}
        | asdict(summary)
    )


def _checked(options: Options) -> tuple[SamplingParams, LookupConfig]:
    """What can be refused before anything is read or loaded."""
    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.prompt_lookup import LookupConfig

    if options.draft == "none":
        raise ValueError("a trace needs a drafter; --draft none proposes nothing.")
    if not 1 <= options.top <= 255:
        raise ValueError(f"--max-num-speculative-tokens must be in 1..255, got {options.top}.")
    if options.from_outputs is not None and options.prompts != DEFAULT:
        raise ValueError(
            "--prompts and --from-outputs exclude each other: a log has its prompts in it."
        )
    if options.from_outputs is None:
        for flag in ("tokenizer", "kind_column"):
            if getattr(options, flag) is not None:
                raise ValueError(
                    f"--{flag.replace('_', '-')} is for a log; name it: --from-outputs."
                )
    default = DECODED_TOKENS if options.from_outputs is None else LOGGED_TOKENS
    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        max_new_tokens=default if options.max_new_tokens is None else options.max_new_tokens,
    )
    return sampling, LookupConfig(max_ngram=options.max_ngram, min_ngram=options.min_ngram)


def _decoded(
    options: Options,
    out: Path,
    sampling: SamplingParams,
    lookup: LookupConfig,
    console: Console,
) -> tuple[TraceParts, Source]:
    from .recording import DecodedPrompts, prompts_sha256
    from .session import fitting_prompts, load_decoder
    from .trace_parts import TraceParts

    prompts = _prompts(options)
    parts = TraceParts(out, _settings(options, prompts_sha256(prompts)))
    decoder = load_decoder(options, console)
    fitting = fitting_prompts(decoder, prompts, sampling.max_new_tokens)
    if len(fitting) < len(prompts):
        console.say(f"{len(prompts) - len(fitting)} prompts are too long for the model; left out.")
    info = _info(options, decoder.model_pair, sampling, lookup, decoder)
    return parts, DecodedPrompts(decoder, fitting, sampling, info, lookup)


def _logged(
    options: Options,
    log: Path,
    out: Path,
    sampling: SamplingParams,
    lookup: LookupConfig,
    console: Console,
) -> tuple[TraceParts, Source]:
    from specdepth.decoder.output_log import LogColumns

    from .recording import LoggedRequests, file_sha256, log_size
    from .session import load_decoder
    from .trace_parts import TraceParts

    columns = LogColumns(
        prompt=options.prompt_column, output=options.output_column, kind=options.kind_column
    )
    num_requests, num_empty, has_text = log_size(log, columns)
    if num_empty:
        console.say(f"{num_empty} requests have no output; left out.")
    parts = TraceParts(out, _settings(options, file_sha256(log)))
    decoder = None
    if options.draft == "prompt-lookup":
        pair = f"{_model_name(options)}+prompt-lookup"
    else:
        decoder = load_decoder(options, console)
        pair = decoder.model_pair
    return parts, LoggedRequests(
        log,
        columns,
        _load_tokenizer(options, console) if has_text else None,
        sampling,
        _info(options, pair, sampling, lookup, decoder),
        lookup,
        num_requests=num_requests,
        chat=not options.raw,
        decoder=decoder,
    )


def _record(source: Source, parts: TraceParts, keep_text: bool, console: Console) -> None:
    """Go through the parts that are missing."""
    first = parts.num_done * source.chunk_size
    start_s = time.monotonic()
    with console.progress("Recording") as update:

        def report(num_in_part: int) -> None:
            done = min(parts.num_done * source.chunk_size + num_in_part, source.num_requests)
            if done > first:
                left_s = (
                    (time.monotonic() - start_s) * (source.num_requests - done) / (done - first)
                )
                update(
                    done / source.num_requests,
                    f"{done} of {source.num_requests} requests, about {_duration(left_s)} left",
                )

        for trace, rows in source.record(parts.num_done, report):
            parts.add(trace, rows if keep_text else None)
            report(0)


def _prompts(options: Options) -> tuple[Prompt, ...]:
    from specdepth.decoder.prompts import load_prompt_file, load_prompts

    if options.prompts == DEFAULT:
        return load_prompts()
    return load_prompt_file(options.prompts, options.prompt_column, chat=not options.raw)


def _settings(options: Options, sha256: str) -> dict[str, object]:
    """What a recording's parts must agree in."""
    from .session import config_of

    chosen = {k: v for k, v in config_of(options).items() if k not in NOT_SETTINGS}
    log = options.from_outputs
    return chosen | {"from_outputs": None if log is None else log.name, "input_sha256": sha256}


def _info(
    options: Options,
    model_pair: str,
    sampling: SamplingParams,
    lookup: LookupConfig,
    decoder: SpeculativeDecoder | None,
) -> TraceInfo:
    from specdepth.decoder.trace import TraceInfo

    from .results import collect_versions

    is_lookup = options.draft == "prompt-lookup"
    return TraceInfo(
        model_pair=model_pair,
        drafter="prompt-lookup" if is_lookup else "draft-model",
        max_num_speculative_tokens=options.top,
        # Sampled text does not depend on depths either, where its noise is coupled or it is a log.
        verification="coupled" if sampling.temperature else "greedy",
        source="decoder" if options.from_outputs is None else "outputs",
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        reads_target=decoder is not None and decoder.drafter_reads_target,
        lookup=asdict(lookup) if is_lookup else {},
        versions=collect_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _model_name(options: Options) -> str:
    """Of the model that answered, which is not loaded; "log" if it was not named."""
    if options.target == DEFAULT:
        return "log"
    folder = Path(options.target)
    return folder.name if folder.is_dir() else options.target


def _load_tokenizer(options: Options, console: Console) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from specdepth.decoder.default_model import default_model_path

    from .session import set_up_torch

    set_up_torch(options.threads, options.seed)
    name = options.tokenizer or options.target
    path = str(default_model_path(progress=console.say)) if name == DEFAULT else name
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"no tokenizer {name!r}: {reason}; name one with --tokenizer.") from error
    return tokenizer


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
