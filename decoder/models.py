"""A transformers model as a packed, paged forward pass; what cannot be reproduced is refused by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specdepth.scheduler.state import Ints

from . import attention
from .attention import IMPLEMENTATION, PAGE_SIZE, Backend, LayerKV, PassLayout
from .graphs import GraphedPass
from .lean_llama import make_lean
from .paged_model import LayerShape, PagedModel
from .prepack import can_prepack, prepack
from .roofline import ModelSize, model_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PROBE_IMPLEMENTATION = "specdepth_probe"
CHECK_LENGTH = 24
"""Tokens of the load-time comparison with the model's own attention."""
RELATIVE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05}
"""Largest relative L2 error of logits in that comparison; 0.15 for bf16. A wrong mask, window or
position is off by the order of 1."""

MASK_PROBE_LENGTH = 2**17
"""Context at which a layer's mask must be causal or the sliding window that its attention is told."""

_PLAIN = "_specdepth_plain"
"""Attribute of a model that was prepacked."""

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModelError(ValueError):
    """The packed forward would not reproduce this model."""


class PackedModel(PagedModel):
    """A causal language model that runs ragged packed passes over a paged KV pool.

    Args:
        model: a transformers causal LM in evaluation mode on its device.
        vocab_size: real tokens; rows of the head beyond are padding and never returned.
        backend: None takes the first that reproduces the model's own logits: varlen on CUDA in 16
            bits, else SDPA.

    Raises:
        UnsupportedModelError: names the feature that is not reproduced.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        self.model = model
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        text_config = model.config.get_text_config()
        refuse_by_config(self.name, model.config, text_config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.backend: Backend = "sdpa"
        self.layers: list[LayerKV] = []
        self.block_size = 0
        self._graphs: GraphedPass | None = None
        self._watches, self._runs, self._seen = False, False, list[Tensor]()
        attention.register()
        own = model.config._attn_implementation
        try:
            plain: _Plain = getattr(model, _PLAIN, None) or _plain(model, self.name, vocab_size)
            self.vocab_size = min(vocab_size or plain.head_rows, plain.head_rows)
            self.size, self.shapes = plain.size, plain.shapes
            self._adopt(plain, backend)
        except BaseException:
            model.set_attn_implementation(own or "eager")  # a refused model stays its owner's
            raise

    def _adopt(self, plain: _Plain, backend: Backend | None) -> None:
        """Put the paged attention in place of the model's own, if it can be."""
        host_ids, reference = plain.token_ids.cpu().numpy(), plain.logits[:, : self.vocab_size]
        self.model.set_attn_implementation(IMPLEMENTATION)
        for choice in [backend] if backend else self._candidates(plain.has_softcap):
            self.backend = choice
            error = self._error(host_ids, reference)
            if error <= self.tolerance:
                break
            logger.info("%s does not reproduce %s: error %.2g", choice, self.name, error)
        else:
            raise UnsupportedModelError(
                f"{self.name}: the paged attention does not reproduce this model (relative error of "
                f"logits {error:.2g}); its attention has a feature that specdepth does not know. "
                "Use another model, or report its architecture."
            )
        if can_prepack(self.dtype, self.device) and prepack(self.model):
            setattr(self.model, _PLAIN, plain)  # for the next decoder, which will not find it plain
            make_lean(self.model)
            error = self._error(host_ids, reference)
            if not error <= self.tolerance:
                raise UnsupportedModelError(
                    f"{self.name}: prepacked weights do not reproduce this model (relative error of "
                    f"logits {error:.2g}); use dtype float32, and report its architecture."
                )

    def _candidates(self, has_softcap: bool) -> list[Backend]:
        """Backends to try, best first. The flash kernels have no soft-capping, and limits on heads."""
        fits = all(
            s.key_dim == s.value_dim and s.key_dim % 8 == 0 and s.key_dim <= 256
            for s in self.shapes
        )
        half = self.dtype in (torch.float16, torch.bfloat16)
        if self.device.type == "cuda" and half and fits and not has_softcap:
            return ["varlen", "varlen-with-cu-seq-k", "sdpa"]
        return ["bf16-kernel", "sdpa"] if self.has_kernel() and not has_softcap else ["sdpa"]

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of logits that counts as the same."""
        return RELATIVE_TOLERANCE.get(self.dtype, 0.15)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """See `PagedModel.allocate`."""
        self._graphs = None  # they hold the old pool
        super().allocate(num_blocks, block_size)

    def watch(self, layer_ids: Sequence[int]) -> None:
        """Keep, in `states`, what flows into these decoder layers in each pass from now on.

        Passes run without CUDA graphs then.

        Raises:
            ValueError: a layer that the model does not have.
        """
        layers = self.model.get_decoder().layers  # type: ignore[no-untyped-call]
        wrong = [i for i in layer_ids if not 0 <= i < len(layers)]
        if wrong:
            raise ValueError(
                f"{self.name} has layers 0..{len(layers) - 1}; layer {wrong[0]} cannot be read."
            )

        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._runs:  # not another decoder over the same model
                self._seen.append(inputs[0][0])

        for index in sorted(layer_ids):
            layers[index].register_forward_pre_hook(see)
        self._watches = True

    def forward(
        self, token_ids: Tensor, positions: Tensor, layout: PassLayout, logit_rows: Ints
    ) -> Tensor:
        """See `PagedModel.forward`."""
        rows = torch.from_numpy(logit_rows).to(self.device)
        if self._graphs is not None and self._graphs.fits(len(token_ids), layout):
            return self._graphs.run(token_ids, positions, layout)[rows]
        return self._forward(token_ids, positions, layout, rows)

    def use_graphs(self, max_num_seqs: int, max_query: int, max_model_len: int) -> bool:
        """Replay passes of up to `max_query` tokens a sequence from CUDA graphs from now on.

        Checked by comparing a replayed pass with an eager one; where they differ, or capture fails,
        passes stay eager and a warning says so.

        Returns:
            Whether graphs are in use.
        """
        if self.device.type != "cuda" or self.backend == "sdpa" or self._watches:
            return False
        graphs = GraphedPass(self, self._forward, max_num_seqs, max_query, max_model_len)
        count = min(2, max_query)
        ids = check_tokens(count, self.vocab_size).to(self.device)
        positions = torch.arange(count, device=self.device)
        layout = self.layout(np.zeros((1, 1), np.int32), np.zeros(1, np.int64), np.array([count]))
        try:
            with torch.inference_mode():
                graphs.capture(ids, positions, layout)
                eager = self._forward(ids, positions, layout).float()
                replayed = graphs.run(ids, positions, layout).float()
                error = float((eager - replayed).norm() / eager.norm())
        except RuntimeError as reason:
            logger.warning("CUDA graphs are off for %s: %s", self.name, reason)
            return False
        if not error <= self.tolerance:
            logger.warning("CUDA graphs are off for %s: logits differ by %.2g", self.name, error)
            return False
        self._graphs = graphs
        return True

    def _forward(
        self, token_ids: Tensor, positions: Tensor, layout: PassLayout, rows: Tensor | int = 0
    ) -> Tensor:
        """Eager pass; `rows` 0 is all rows."""
        self._seen.clear()
        self._runs = True
        try:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
                layout=layout,
            )
        finally:
            self._runs = False
        if self._watches:
            self.states = torch.cat(self._seen, 1)
        logits: Tensor = output.logits[0, :, : self.vocab_size]
        return logits

    def _error(self, ids: NDArray[np.int64], reference: Tensor) -> float:
        """Relative L2 error of the paged pass over `ids`, in three uneven chunks beside a copy that
        trails by one token; infinite where the backend refuses to run.
        """
        block_size = max(PAGE_SIZE[self.backend], 4) if self.backend != "sdpa" else 4
        blocks = -(-len(ids) // block_size)
        self.allocate(2 * blocks, block_size)
        tables = np.arange(2 * blocks, dtype=np.int32).reshape(blocks, 2).T
        rows = []
        try:
            with torch.inference_mode():
                for start, stop in ((0, 9), (9, 10), (10, len(ids))):
                    spans = [(start, stop), (max(start - 1, 0), stop - 1)]
                    layout = self.layout(
                        tables,
                        np.array([a for a, _ in spans]),
                        np.array([b - a for a, b in spans]),
                    )
                    tokens = np.concatenate([ids[a:b] for a, b in spans])
                    positions = np.concatenate([np.arange(a, b) for a, b in spans])
                    rows.append(
                        self.forward(
                            torch.from_numpy(tokens).to(self.device),
                            torch.from_numpy(positions).to(self.device),
                            layout,
                            np.arange(stop - start),
                        )
                    )
        except (RuntimeError, TypeError, ImportError) as refusal:
            if self.backend == "sdpa":
                raise
            logger.info("%s does not run here: %s", self.backend, refusal)
            return math.inf
        finally:
            self.layers = []
        got, want = torch.cat(rows).double(), reference.double()
        return float((got - want).norm() / want.norm().clamp_min(1e-30))


def check_tokens(count: int, vocab_size: int) -> Tensor:
    """Tokens that a model is tried on, int64 [count], from all over the vocabulary.

    Not the first ones: those are control tokens, on which models are ill-conditioned. SmolLM2's bfloat16
    logits are 0.55 off the float32 ones there, and 0.02 on these.
    """
    return torch.from_numpy(np.random.default_rng(0).integers(vocab_size, size=count))


def refuse_by_config(name: str, config: Any, text_config: Any) -> None:
    """Refuse what a configuration already tells.

    Raises:
        UnsupportedModelError: encoder-decoder, layer kinds without paged attention, or rotary
            embeddings that depend on the longest sequence in the batch.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; a decoder-only one is needed."
        )
    kinds = set(getattr(text_config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}, which keep a state that cannot be "
            "paged and rolled back here; only full and sliding-window attention is supported."
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    scopes = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for scope in scopes:
        if scope.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{name} scales its rotary embedding ({scope['rope_type']}) by the longest sequence of a "
                "batch, so the text would depend on the batch; set another rope_type."
            )


class _MaskProbe:
    """Stands for the mask that transformers would build, in its convention for mask functions."""

    def __init__(self, *_: Any, mask_function: Any, **__: Any) -> None:
        self.mask_function = mask_function

    def sees_window(self, last: int, window: int | None) -> bool:
        """Whether the query at position `last` sees the last `window` keys up to its own, or all."""
        keys = torch.arange(last + 2)
        expected = (keys <= last) & (keys > (-1 if window is None else last - window))
        zero = torch.zeros(1, dtype=torch.int64)
        seen = self.mask_function(zero, zero, torch.tensor([last]), keys)
        return bool((torch.as_tensor(seen).expand_as(expected) == expected).all())


def probe_attention(
    model: PreTrainedModel, name: str, token_ids: Tensor
) -> tuple[list[LayerShape], bool]:
    """Run a few tokens and note what each attention layer hands to its attention function.

    Returns:
        Shapes in order of `layer_idx`, and whether a layer soft-caps its scores.

    Raises:
        UnsupportedModelError: layers that do not go through the attention interface, attention sinks,
            masks of the model's own making, bidirectional attention, or layers that share an index.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    seen: dict[int, LayerShape] = {}
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    last = min(longest or MASK_PROBE_LENGTH, MASK_PROBE_LENGTH) - 1
    problems: set[str] = set()
    softcaps: set[float] = set()

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kw: Any
    ) -> tuple[Tensor, None]:
        index = getattr(module, "layer_idx", None)
        if index is None or index in seen:
            problems.add("attention layers without an index of their own")
        else:
            seen[index] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        if kw.get("s_aux") is not None:
            problems.add("attention sinks")
        if isinstance(mask, _MaskProbe):
            mask = None if mask.sees_window(last, kw.get("sliding_window")) else mask
        if mask is not None:
            problems.add("an attention mask of its own making")
        if kw.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            problems.add("bidirectional attention")
        if kw.get("layout") is not None:
            problems.discard("attention that ignores keyword arguments")
        if kw.get("softcap") is not None:
            softcaps.add(kw["softcap"])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(PROBE_IMPLEMENTATION, probe)
    AttentionMaskInterface.register(PROBE_IMPLEMENTATION, _MaskProbe)
    problems.add("attention that ignores keyword arguments")
    model.set_attn_implementation(PROBE_IMPLEMENTATION)
    try:
        model(input_ids=token_ids, position_ids=positions, use_cache=False, layout=object())
    except (AttributeError, TypeError):  # it looked into the mask
        problems.add("an attention mask of its own making")
    expected = int(model.config.get_text_config().num_hidden_layers)
    if set(seen) != set(range(expected)):
        problems.discard("attention that ignores keyword arguments")
        problems.add(
            f"{expected - len(seen)} of {expected} layers outside transformers' attention interface"
        )
    if problems:
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) has {', '.join(sorted(problems))}, which the paged attention "
            "does not reproduce; use another model."
        )
    return [seen[i] for i in range(expected)], bool(softcaps)


class _Plain(NamedTuple):
    """A model as it was before anything of it was replaced."""

    size: ModelSize
    head_rows: int
    shapes: list[LayerShape]
    has_softcap: bool
    token_ids: Tensor
    """`check_tokens`, [CHECK_LENGTH]."""
    logits: Tensor
    """Of these tokens, [CHECK_LENGTH, head_rows]."""


@torch.inference_mode()
def _plain(model: PreTrainedModel, name: str, vocab_size: int | None) -> _Plain:
    """Look at a model that was not prepacked; ends with eager attention."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    named: Any = model.get_input_embeddings() if head is None else head
    rows = int(named.weight.shape[0])
    ids = check_tokens(CHECK_LENGTH, min(vocab_size or rows, rows)).to(model.device)
    shapes, has_softcap = probe_attention(model, name, ids[None, :4])
    model.set_attn_implementation("eager")
    return _Plain(
        size=model_size(model),
        head_rows=rows,
        shapes=shapes,
        has_softcap=has_softcap,
        token_ids=ids,
        logits=model(input_ids=ids[None], use_cache=False).logits[0],
    )
