"""The draft model's layer in one call, against the network that it stands for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from specdepth.decoder.eagle_model import EagleModel
from specdepth.decoder.eagle_net import EagleConfig, EagleLayer, EagleNet
from specdepth.decoder.models import PackedModel
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.tiny import tiny_llama

pytestmark = on_each_kernel

TARGET = tiny_llama(
    dtype=torch.bfloat16,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=96,
)
CONFIG = EagleConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=96,
    draft_vocab_size=64,
    state_layers=(0, 1),
    max_position_embeddings=128,
)


def made_net() -> EagleNet:
    torch.manual_seed(0)
    net = EagleNet(CONFIG)
    for parameter in net.parameters():
        if parameter.dim() == 1:  # norms that do nothing would hide which is which
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return net.bfloat16()


def outputs(
    model: EagleModel, lengths: list[int], split: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and new states of all entries of sequences laid back to back, in one pass or in two."""
    model.allocate(32, 16)
    generator = torch.Generator().manual_seed(1)
    rows, tables = sum(lengths), np.arange(4 * len(lengths), dtype=np.int32).reshape(-1, 4)
    ids = torch.randint(0, 96, (rows,), generator=generator)
    states = torch.randn(rows, 64, generator=generator).to(model.dtype)
    place = np.concatenate([np.arange(n) for n in lengths])
    parts = [(0, rows)] if split is None else [(0, split), (split, rows)]
    logits, made = [], []
    for start, stop in parts:
        inside = [
            place[start:stop][np.repeat(np.arange(len(lengths)), lengths)[start:stop] == i]
            for i in range(len(lengths))
        ]
        who = [i for i, one in enumerate(inside) if len(one)]
        starts = np.array([inside[i][0] for i in who])
        layout = model.layout(tables[who], starts, np.array([len(inside[i]) for i in who]))
        positions = torch.from_numpy(place[start:stop])
        with torch.inference_mode():
            every = np.arange(stop - start)
            logits.append(
                model.forward(ids[start:stop], positions, layout, every, states[start:stop])
            )
        assert model.states is not None
        made.append(model.states)
    return torch.cat(logits), torch.cat(made)


@pytest.mark.parametrize("lengths", [[1], [9], [3, 1, 20]])
def test_it_computes_what_the_network_computes(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, names = made_net(), torch.arange(64)
    target = PackedModel(copy.deepcopy(TARGET))
    exact_target = PackedModel(copy.deepcopy(TARGET).double())
    exact = EagleModel(copy.deepcopy(net), names, exact_target, "exact")
    want = outputs(exact, lengths)
    fast = EagleModel(net, names, target, "fast")
    monkeypatch.setattr(EagleLayer, "forward", None)  # only the kernel runs
    for got, wanted in zip(outputs(fast, lengths), want, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 0.02


def test_an_entry_has_the_same_bits_in_any_pass() -> None:
    model = EagleModel(made_net(), torch.arange(64), PackedModel(copy.deepcopy(TARGET)), "fast")
    whole = outputs(model, [3, 1, 20])
    for split in (1, 3, 4, 10, 23):
        for one, other in zip(outputs(model, [3, 1, 20], split), whole, strict=True):
            assert torch.equal(one, other)
