"""What the decoder has to know of tokenizers: one vocabulary for two models, end tokens, and text
from tokens that arrive a few at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NUM_NAMED = 3
"""Differing tokens that an error message names."""
_HALF = "\ufffd"
"""What decoding puts in place of bytes that are no whole character (yet)."""


def vocabulary_size(
    tokenizer: PreTrainedTokenizerBase | None,
    config: PretrainedConfig,
    end_tokens: Iterable[int] = (),
) -> int:
    """Return V: tokens 0..V-1 may be proposed and sampled; later rows of the model are padding.

    Without a tokenizer all rows count. Ids in 0..V-1 that no token has stay possible, as they are
    in transformers. `end_tokens` count even where the tokenizer does not know them.
    """
    rows = int(config.get_text_config().vocab_size)
    if tokenizer is None:
        return rows
    ids = [*_vocabulary(tokenizer), *end_tokens]
    return min(rows, max(ids, default=-1) + 1) or rows


def check_same_vocabulary(
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    target_config: PretrainedConfig,
    draft_config: PretrainedConfig,
    end_tokens: Iterable[int] = (),
) -> int:
    """Return the target's `vocabulary_size` if the draft model speaks it, or refuse the pair.

    The models may pad their embeddings to different numbers of rows, and one tokenizer may go on
    after the other's last token, as later members of a family do; the draft model just has to have
    a row for each token of the target. Added tokens (control tokens, mostly) with other names are
    logged: they cost some acceptance and cannot change the target's output. A different vocabulary
    would not change it either, but hardly anything would be accepted, and nobody wants that.

    Without both tokenizers nothing but the numbers of rows can be compared.

    Raises:
        ValueError: naming the sizes, and the first tokens that differ.
    """
    size = vocabulary_size(target_tokenizer, target_config, end_tokens)
    target_rows = int(target_config.get_text_config().vocab_size)
    draft_rows = int(draft_config.get_text_config().vocab_size)
    if target_tokenizer is None or draft_tokenizer is None:
        if target_rows != draft_rows:
            missing = "the target" if target_tokenizer is None else "the draft model"
            raise ValueError(
                f"the target has a vocabulary of {target_rows} and the draft model one of "
                f"{draft_rows}, and without a tokenizer of {missing} they cannot be compared token "
                "by token; put the tokenizer's files into its folder, or use a draft model with "
                "the target's vocabulary."
            )
        return size
    target, draft = _vocabulary(target_tokenizer), _vocabulary(draft_tokenizer)
    different = sorted(i for i in target.keys() & draft.keys() if target[i] != draft[i])
    # A hole in one of them, before its end, is a difference too.
    both_end = min(max(target, default=-1), max(draft, default=-1))
    different += sorted(i for i in target.keys() ^ draft.keys() if i <= both_end)
    added = set(target_tokenizer.added_tokens_decoder) | set(draft_tokenizer.added_tokens_decoder)
    really = [i for i in different if i not in added]
    if really:
        named = ", ".join(
            f"{i} is {target.get(i)!r} in the target and {draft.get(i)!r} in the draft model"
            for i in really[:_NUM_NAMED]
        )
        more = ", ..." if len(really) > _NUM_NAMED else ""
        raise ValueError(
            f"the target ({len(target)} tokens) and the draft model ({len(draft)} tokens) have "
            f"different vocabularies: {len(really)} tokens differ ({named}{more}); "
            "use a draft model with the target's tokenizer, or draft='prompt-lookup'."
        )
    if draft_rows < size:
        raise ValueError(
            f"the target's vocabulary has {size} tokens and the draft model only {draft_rows} rows "
            f"(token {draft_rows} is {target.get(draft_rows)!r}); use a draft model with the "
            "target's tokenizer, or draft='prompt-lookup'."
        )
    if different:
        logger.warning(
            "target and draft model name %d added tokens differently (first: %d is %r and %r); "
            "the output is not affected, acceptance near them may be.",
            len(different),
            different[0],
            target.get(different[0]),
            draft.get(different[0]),
        )
    return size


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token of each id; added tokens included, which some classes leave out of `get_vocab`."""
    by_id = {int(i): token for token, i in tokenizer.get_vocab().items()}
    return by_id | {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}


def end_token_ids(
    generation_config: GenerationConfig | None,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[int, ...]:
    """Return the tokens that end a text, several or none, in increasing order.

    The first of the three that names any decides, which is what transformers' `generate` does; the
    tokenizer comes last, since many name one end token where the model has several.
    """
    text_config = config.get_text_config() if config is not None else None
    for source in (generation_config, text_config, config, tokenizer):
        named: int | Sequence[int] | None = getattr(source, "eos_token_id", None)
        if named is None:
            continue
        ids = {int(i) for i in ([named] if isinstance(named, int) else named)}
        ids = {i for i in ids if i >= 0}  # -1 stands for none in some configurations
        if ids:
            return tuple(sorted(ids))
    return ()


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text of `token_ids` without special tokens; exactly what a `Detokenizer` gives piecewise."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


class Detokenizer:
    """Text of one growing sequence, for streaming and for stop strings.

    `append` gives out text as soon as it is final: never half a UTF-8 character, nor what may turn
    out to be the beginning of a stop string. Work goes by the new tokens, not by the length: only
    a window of the last tokens is decoded again, enough to get spaces and characters right that
    depend on their neighbours.
    """

    _trim_at = 24
    """Tokens in the window at which it is cut."""
    _context = 6
    """Tokens that a cut keeps, at least."""
    _longest_half = 64
    """Tokens without one whole character after which they count as broken bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.text = ""
        """Everything given out so far."""
        self.num_tokens = 0
        """Tokens taken; once `stopped`, up to the one that completed a stop string, included."""
        self.stopped = False
        """Whether a stop string came up; it and what follows it are not in `text`."""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0
        """Characters of the window's text that are final."""
        self._held = ""
        """Final text that may begin a stop string."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the new text, often less than theirs and sometimes more."""
        if not self.stop:
            self.num_tokens += len(token_ids)
            return self._give(self._decode(token_ids))
        given = ""
        for token in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            given += self._until_stop(self._decode([token]))
        return given

    def finish(self) -> str:
        """Return what was held back, at the end of the sequence."""
        if self.stopped:
            return ""
        rest = decode(self._tokenizer, self._window)[self._settled :]
        self._settled += len(rest)
        given = self._until_stop(rest) if self.stop else self._give(rest)
        held, self._held = self._held, ""
        return given + self._give(held)

    def _give(self, text: str) -> str:
        self.text += text
        return text

    def _until_stop(self, text: str) -> str:
        """Pass `text` on up to a stop string, or to what may become one."""
        text = self._held + text
        starts = [start for start in map(text.find, self.stop) if start >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return self._give(text[: min(starts)])
        num_held = max(_overlap(text, stop) for stop in self.stop)
        free = len(text) - num_held
        self._held = text[free:]
        return self._give(text[:free])

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final with `token_ids`."""
        self._window.extend(token_ids)
        text = decode(self._tokenizer, self._window)
        before, end = self._settled, len(text.rstrip(_HALF))
        self._settled = max(before, end)
        new = text[before : self._settled]
        if len(self._window) >= self._trim_at:
            new += self._trim(text)
        return new

    def _trim(self, text: str) -> str:
        """Cut the window where its rest still decodes to the end of `text`."""
        for keep in range(self._context, len(self._window) - self._context):
            tail = decode(self._tokenizer, self._window[-keep:])
            dropped = len(text) - len(tail)
            whole = tail[:1] not in ("", _HALF) and text.endswith(tail)
            if whole and dropped < self._settled:
                self._window, self._settled = self._window[-keep:], self._settled - dropped
                return ""
        if len(self._window) < self._longest_half:
            return ""
        return self._give_up_half(text)

    def _give_up_half(self, text: str) -> str:
        """Settle the first half of a window of broken bytes, and drop it."""
        middle = len(self._window) // 2
        # Not between the bytes of a character: there, the head would not be how the text begins.
        for cut in range(middle, middle + 4):
            head = decode(self._tokenizer, self._window[:cut])
            if text.startswith(head):
                break
        new = text[self._settled : len(head)]
        self._window, self._settled = self._window[cut:], max(self._settled - len(head), 0)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
