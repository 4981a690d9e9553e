"""What commands do before their own work: threads, model, prompts and schedulers from options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .options import CommonOptions, ModelOptions, PromptOptions

if TYPE_CHECKING:
    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.prompts import Prompt, Split
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.decoder.workload import WorkloadRequest
    from specdepth.scheduler.depth import DepthScheduler

DEFAULT = "default"


def set_up_torch(threads: int, seed: int) -> None:
    """Seed and threads of torch, and libraries told to keep quiet.

    Raises:
        ValueError: threads below 1.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}.")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def load_decoder(options: ModelOptions, console: Console) -> SpeculativeDecoder:
    """The decoder that `options` ask for.

    Raises:
        ValueError: bad options, unknown model, different vocabularies, a damaged cost file.
        OSError: a model that cannot be found.
        ModelFetchError: the default model cannot be fetched.
        MemoryError: it does not fit.
    """
    from specdepth.decoder.default_model import default_model_path
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.cost_files import load_cost

    cost = None if options.cost is None else load_cost(options.cost)
    set_up_torch(options.threads, options.seed)
    if options.target == DEFAULT:
        default_model_path(progress=console.say)
    return SpeculativeDecoder.from_pretrained(
        options.target,
        options.draft,
        max_num_speculative_tokens=options.top,
        max_num_seqs=options.max_num_seqs,
        dtype=options.dtype,
        device=options.device,
        verification=options.verification,
        cost=cost,
    )


def find_prompts(options: PromptOptions, split: Split) -> tuple[Prompt, ...]:
    """Prompts of a split, mixed by kind.

    Raises:
        ValueError: a file that is missing or holds none of the split.
    """
    from specdepth.decoder.prompts import load_prompt_file, load_prompts, mix

    if options.prompts == DEFAULT:
        found = load_prompts(split)
    else:
        every = load_prompt_file(options.prompts)
        found = tuple(prompt for prompt in every if prompt.split == split)
        if not found:
            raise ValueError(
                f"prompt file {options.prompts}: none of its {len(every)} prompts is in the split "
                f'"{split}", which goes by their text; give more prompts.'
            )
    return mix(found, len(found), options.seed)


def fitting_prompts(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Prompt]:
    """Those prompts that leave the model room for an answer, in order.

    Raises:
        ValueError: a model without tokenizer, or no prompt that fits.
    """
    from specdepth.decoder.prompts import render

    tokenizer, config = decoder.tokenizer, decoder.config
    if tokenizer is None:
        raise ValueError(
            "the model folder has no tokenizer, so it cannot read prompts; put the tokenizer's "
            "files into it."
        )
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    assert config.block_size is not None
    room = min(config.max_model_len, config.num_kv_blocks * config.block_size)
    fitting = [p for p in prompts if len(render(tokenizer, p)) + max_new_tokens <= room]
    if not fitting:
        raise ValueError(
            f"none of {len(prompts)} prompts fits: the model holds {room} tokens, "
            f"{max_new_tokens} of them for the answer; lower --max-new-tokens."
        )
    return fitting


def make_prompt_requests(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[WorkloadRequest]:
    """Requests for the prompts that the model can hold, in order.

    Raises:
        ValueError: a model without tokenizer, or no prompt that fits.
    """
    from specdepth.decoder.workload import make_requests

    fitting = fitting_prompts(decoder, prompts, sampling.max_new_tokens)
    assert decoder.tokenizer is not None
    return list(make_requests(fitting, decoder.tokenizer, sampling))


def check_names(names: Sequence[str], top: int) -> None:
    """Look at scheduler names before a model is loaded for them.

    Raises:
        ValueError: an unknown name, or a policy or depth that does not fit K = `top`.
    """
    from specdepth.scheduler.baselines import make_scheduler

    for name in names:
        make_scheduler(name, max_num_speculative_tokens=top)


def make_policies(decoder: SpeculativeDecoder, names: Sequence[str]) -> dict[str, DepthScheduler]:
    """Schedulers by the names given, each once, in order.

    Raises:
        ValueError: an unknown name, or a policy that does not fit the decoder.
    """
    return {name: make_policy(decoder, name) for name in names}


def make_policy(decoder: SpeculativeDecoder, name: str) -> DepthScheduler:
    """The scheduler that a name, or the folder of an exported policy, stands for.

    Raises:
        ValueError: an unknown name, or a policy that does not fit the decoder.
    """
    from specdepth.scheduler.baselines import make_scheduler

    return make_scheduler(
        name,
        model_pair=decoder.model_pair,
        drafter=decoder.engine.runner.drafter,
        max_num_speculative_tokens=decoder.config.max_num_speculative_tokens,
    )


def with_fixed(names: Sequence[str], depths: Sequence[int], top: int) -> list[str]:
    """`names` after "off" and the fixed depths up to `top`, which they are compared with."""
    fixed = ["off", *(f"fixed:{depth}" for depth in depths if 0 < depth <= top)]
    return list(dict.fromkeys([*fixed, *names]))


def new_folder(options: CommonOptions, name: str) -> Path:
    """The folder for a run's files: `--out`, or runs/NAME-TIME. Checked, not created.

    Raises:
        ValueError: it cannot be written to.
    """
    from datetime import datetime

    from .results import check_output_folder

    folder = options.out
    if folder is None:
        folder = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_output_folder(folder)
    return folder


def make_folder(folder: Path) -> Path:
    """Make a folder for files and return it.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}.") from error
    return folder


def config_of(options: CommonOptions, **more: object) -> Mapping[str, object]:
    """Settings for the results file; what only says how to print is left out."""
    hidden = ("json", "quiet", "debug")
    return {k: v for k, v in asdict(options).items() if k not in hidden} | more
