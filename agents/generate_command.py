"""`specdepth generate`: one prompt, streamed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from .console import Console, Interrupted
from .options import ModelOptions

if TYPE_CHECKING:
    from specdepth.decoder.request import GenerationResult
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.state import RoundOutcome

GENERATION_FILE = "generation.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(ModelOptions):
    """Decode a prompt and stream its text as rounds commit it.

    A round drafts k tokens, verifies them in one pass of the target, and commits those that were
    right plus one more. The text does not depend on the policy; the speed does.

    specdepth generate "Why is the sky blue?" --verbose

    specdepth generate "def fib(n):" --raw --policy fixed:6 --max-new-tokens 200
    """

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """Text to answer or go on with; "-" reads it from stdin."""
    policy: str = "fixed:4"
    """What chooses depths: off, fixed:4, table:1-4=4,5-=0, heuristic, random:0, or the folder of an
    exported policy."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    raw: bool = False
    """Take the prompt as it is, without the model's chat template."""
    verbose: bool = False
    """Show the depth and the accepted tokens of each round."""


def run(options: Options, console: Console) -> None:
    """Decode `options.prompt`.

    Raises:
        ValueError: bad prompt, option or policy.
        Interrupted: after Ctrl-C; the text so far is out.
    """
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty; give some text, or - to read it from stdin.")
    # Settings are checked before a model is loaded.
    from specdepth.decoder.config import SamplingParams

    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
    )
    from .session import check_names, load_decoder, make_policy, new_folder

    check_names([options.policy], options.top)
    if options.out is not None:
        new_folder(options, "generate")
    decoder = load_decoder(options, console)
    policy = make_policy(decoder, options.policy)
    tokens = _encode(decoder, text, not options.raw)
    engine = decoder.engine
    engine.set_scheduler(policy)
    engine.collect_deltas = True
    request = engine.add_request(tokens, sampling)
    rounds: list[dict[str, Any]] = []
    writer = _Writer(decoder, console, options.verbose)
    try:
        while engine.has_work:
            outcome = engine.step()
            committed = [token for delta in engine.take_deltas() for token in delta.token_ids]
            if outcome is not None and len(outcome.depths):
                rounds.append(_round(outcome))
                writer.add(committed, rounds[-1])
    except KeyboardInterrupt:
        engine.abort(request.request_id)
        writer.finish()
        result = engine.take_finished()[0]
        _conclude(options, console, result, rounds)
        raise Interrupted(
            f"interrupted after {len(result.token_ids)} tokens, which are above."
        ) from None
    writer.finish()
    _conclude(options, console, engine.take_finished()[0], rounds)


def _encode(decoder: SpeculativeDecoder, text: str, chat: bool) -> list[int]:
    if decoder.tokenizer is None:
        raise ValueError(
            "the model folder has no tokenizer, so it cannot read text; put the tokenizer's files "
            "into it, or use decoder.generate with token ids."
        )
    from specdepth.decoder.prompts import Prompt, render

    prompt = Prompt(id="", kind="", text=text, split="held-out", chat=chat)
    return render(decoder.tokenizer, prompt)


def _round(outcome: RoundOutcome) -> dict[str, Any]:
    return {
        "depth": int(outcome.depths[0]),
        "num_drafted_tokens": int(outcome.num_drafted[0]),
        "num_accepted_tokens": int(outcome.num_accepted[0]),
        "num_committed_tokens": int(outcome.num_committed[0]),
        "elapsed_ms": 1e3 * outcome.elapsed_s,
    }


class _Writer:
    """Streams the text; with `verbose`, a line a round."""

    def __init__(self, decoder: SpeculativeDecoder, console: Console, verbose: bool) -> None:
        from specdepth.decoder.tokenizers import Detokenizer

        assert decoder.tokenizer is not None
        self._text = Detokenizer(decoder.tokenizer)
        self._ends = set(decoder.end_token_ids)
        self._console, self._verbose = console, verbose
        if verbose:
            console.show("round  depth  accepted      ms  text")
        self._count = 0

    def add(self, tokens: list[int], numbers: dict[str, Any]) -> None:
        """Take the tokens that a round committed."""
        piece = self._text.append([token for token in tokens if token not in self._ends])
        self._count += 1
        if not self._verbose:
            self._console.write(piece)
            return
        accepted = f"{numbers['num_accepted_tokens']}/{numbers['num_drafted_tokens']}"
        self._console.show(
            f"{self._count:5}  {numbers['depth']:5}  {accepted:>8}  {numbers['elapsed_ms']:6.1f}  "
            f"{piece!r}"
        )

    def finish(self) -> None:
        """Write what was held back."""
        rest = self._text.finish()
        if not self._verbose:
            self._console.write(f"{rest}\n")
        elif rest:
            self._console.show(f"{'':31}{rest!r}")


def _conclude(
    options: Options, console: Console, result: GenerationResult, rounds: list[dict[str, Any]]
) -> None:
    from .results import write_atomically

    metrics = result.metrics
    drafted, accepted = metrics.num_drafted_tokens, metrics.num_accepted_tokens
    tpot = f", {1e3 * metrics.tpot_s:.1f} ms a token" if metrics.num_generated_tokens > 1 else ""
    first = f"first token after {metrics.ttft_s:.2f} s" if metrics.num_generated_tokens else ""
    console.say(
        f"{metrics.num_generated_tokens} tokens in {metrics.num_rounds} rounds "
        f"(acceptance length {metrics.acceptance_length:.2f}, {accepted} of {drafted} drafted tokens "
        f"accepted); {first}{tpot}; {result.finish_reason}."
    )
    found = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "policy": options.policy,
        "num_prompt_tokens": metrics.num_prompt_tokens,
        "num_generated_tokens": metrics.num_generated_tokens,
        "num_rounds": metrics.num_rounds,
        "num_drafted_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_length": metrics.acceptance_length,
        "ttft_s": metrics.ttft_s if metrics.num_generated_tokens else None,
        "tpot_ms": 1e3 * metrics.tpot_s,
        "throughput_tok_s": metrics.throughput_tok_s,
        "rounds": rounds,
    }
    if options.out is not None:
        write_atomically(options.out / GENERATION_FILE, json.dumps(found, indent=1) + "\n")
    console.finish(found)
