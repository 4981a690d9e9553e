"""A small EAGLE-3 draft model of a tiny target, trained for a few seconds so that it is often right."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specdepth.decoder.eagle_files import LoadedEagle
from specdepth.decoder.eagle_net import EagleConfig, EagleNet

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "draft_model"))
from training import Unrolled as Unrolled
from training import soft_loss


def eagle_config(target: PreTrainedModel, num_named: int) -> EagleConfig:
    """Of a network that reads both layers of a `tiny_llama`."""
    shape: Any = target.config
    return EagleConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=shape.vocab_size,
        draft_vocab_size=num_named,
        state_layers=(0, 1),
        max_position_embeddings=shape.max_position_embeddings,
    )


@cache
def tiny_eagle(target: PreTrainedModel, num_named: int = 80, steps: int = 120) -> LoadedEagle:
    """Distilled on the target's own samples at temperature 0.7; float64."""
    torch.manual_seed(0)
    size = int(target.config.vocab_size)
    names = torch.randperm(size)[:num_named].sort().values
    net = EagleNet(eagle_config(target, num_named))
    for parameter in net.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    unrolled = Unrolled(net, 2)
    embedding: Any = target.get_input_embeddings()
    embed = embedding.weight.detach().float()
    texts = sampled_texts(target, 64, 40)
    run: Any = target
    with torch.no_grad():
        seen = run(input_ids=texts, use_cache=False, output_hidden_states=True)
    states = torch.cat(seen.hidden_states[:2], -1).float()
    laws = seen.logits[..., names].float()
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(0, len(texts), 16))
        outputs = unrolled.steps(embed[texts[rows, 1:]], states[rows, :-1])
        loss = torch.zeros(())
        for step, out in enumerate(outputs):
            logits = net.logits(out[:, step:])
            loss = loss + soft_loss(logits.flatten(0, 1), laws[rows, 1 + step :].flatten(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return LoadedEagle("tiny-eagle", net.double(), names)


@torch.no_grad()
def sampled_texts(target: PreTrainedModel, count: int, length: int) -> torch.Tensor:
    """[count, length] tokens by plain sampling."""
    run: Any = target
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, int(target.config.vocab_size), (count, 1), generator=generator)
    for _ in range(length - 1):
        law = (run(input_ids=texts, use_cache=False).logits[:, -1] / 0.5).softmax(-1)
        texts = torch.cat([texts, torch.multinomial(law, 1, generator=generator)], 1)
    return texts
