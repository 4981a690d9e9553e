"""An EAGLE-3 draft model: one network in training and in the engine, its files, and what it may read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.eagle_files import find_eagle, is_eagle, load_eagle, save_eagle
from specdepth.decoder.eagle_net import EagleNet, rotary_table
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.trace import TraceInfo
from specdepth.decoder.trace_recorder import record_proposals
from specdepth.decoder.trace_text import TextToRecord
from tests.decoder.tiny import Watched, build_decoder, greedy_text, repetitive_prompts, tiny_llama
from tests.decoder.tiny_eagle import Unrolled, eagle_config, tiny_eagle

TARGET = tiny_llama()
EAGLE = tiny_eagle(TARGET)
PROMPT = repetitive_prompts()[4]
DEPTH = 3


def read_by_target(tokens: list[int]) -> Tensor:
    """[T, A * H] what the target's own forward feeds to the layers that are read."""
    with torch.no_grad():
        seen = TARGET(
            input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.cat([seen[i][0] for i in EAGLE.net.config.state_layers], -1)


@torch.no_grad()
def drafted_by_definition(net: EagleNet, tokens: list[int], depth: int) -> list[Tensor]:
    """Logits [V'] of each draft step after `tokens`: every step runs all entries from scratch."""
    embed: Any = TARGET.get_input_embeddings()
    states = net.read(read_by_target(tokens)[:-1])
    cos, sin = rotary_table(net.config)
    drafted, shown = list(tokens), []

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        rows, keys, values = (
            part.transpose(0, 1)
            for part in (query, *(p.repeat_interleave(repeats, 1) for p in (key, value)))
        )
        scores = rows @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        return attended.transpose(0, 1)

    for _ in range(depth):
        length = len(drafted) - 1
        tables = (table[:length].double() for table in (cos, sin))
        out = net.midlayer(embed(torch.tensor(drafted[1:])), states, *tables, causal)
        logits = net.logits(out[-1])
        shown.append(logits)
        drafted.append(int(EAGLE.names[logits.argmax()]))
        states = torch.cat([states, out[-1:]])
    return shown


def text_of(tokens: list[int], start: int) -> TextToRecord:
    return TextToRecord(
        id="a",
        kind="toy",
        split="train",
        prompt_token_ids=tokens[:start],
        sampling=SamplingParams(max_new_tokens=len(tokens) - start),
        token_ids=tokens[start:],
    )


def test_the_engine_drafts_what_the_definition_says_at_every_position() -> None:
    tokens = PROMPT + greedy_text(TARGET, PROMPT, 20)
    decoder = build_decoder(TARGET, EAGLE, max_num_batched_tokens=16)
    info = TraceInfo(
        model_pair="a+b", drafter="draft-model", max_num_speculative_tokens=DEPTH, reads_target=True
    )
    trace = record_proposals(decoder, [text_of(tokens, len(PROMPT))], info)
    accepted = []
    assert trace.draft_top1 is not None
    for place, length in enumerate(range(len(PROMPT), len(tokens))):
        logits = drafted_by_definition(EAGLE.net, tokens[:length], DEPTH)
        expected = [float(row.softmax(-1).max()) for row in logits]
        np.testing.assert_allclose(trace.draft_top1[place], expected, rtol=1e-5)
        named = [int(EAGLE.names[row.argmax()]) for row in logits]
        wanted = tokens[length : length + DEPTH]
        same = [a == b for a, b in zip(named, wanted, strict=False)]
        accepted.append(same.index(False) if False in same else len(same))
    assert trace.accepted.tolist() == accepted
    assert max(accepted) > 0


def test_training_unrolls_the_steps_that_the_engine_takes() -> None:
    tokens = PROMPT + greedy_text(TARGET, PROMPT, 6)
    embed: Any = TARGET.get_input_embeddings()
    with torch.no_grad():
        steps = list(
            Unrolled(EAGLE.net, DEPTH).steps(
                embed(torch.tensor([tokens[1:]])), read_by_target(tokens)[None, :-1]
            )
        )
    # Training feeds the text's own tokens, so only places where they are what is drafted compare.
    compared = 0
    for length in range(3, len(tokens) - DEPTH):
        for step, logits in enumerate(drafted_by_definition(EAGLE.net, tokens[:length], DEPTH)):
            trained = EAGLE.net.logits(steps[step][0, length - 2 + step])
            torch.testing.assert_close(trained, logits, rtol=1e-5, atol=1e-6)
            compared += step > 0
            if int(EAGLE.names[logits.argmax()]) != tokens[length + step]:
                break
    assert compared > 0


def test_nothing_is_drafted_before_the_prompt_is_computed() -> None:
    decoder = build_decoder(TARGET, EAGLE)
    scheduler = Watched(DEPTH)
    decoder.generate([PROMPT], 12, depth_scheduler=scheduler)
    offers = [int(state.proposal_length[0]) for state in scheduler.states]
    assert offers[0] == 0
    assert all(offer > 0 for offer in offers[1:])


def test_a_round_computes_the_accepted_tokens_anew_and_charges_them() -> None:
    total = 0
    for prompt in repetitive_prompts()[1:]:
        decoder, scheduler = build_decoder(TARGET, EAGLE), Watched(DEPTH)
        decoder.generate([prompt], 30, depth_scheduler=scheduler)
        lags = [int(state.draft_lag[0]) for state in scheduler.states]
        accepted = [int(outcome.num_accepted[0]) for outcome in scheduler.outcomes]
        assert lags[1] == len(prompt) - 1  # the first token needs no entry, one is new
        assert lags[2:] == accepted[1:-1]
        total += sum(accepted)
    assert total > 0


def test_tokens_without_a_name_are_never_drafted() -> None:
    decoder = build_decoder(TARGET, EAGLE, verification="rejection")
    drafted: list[Tensor] = []
    drafter: Any = decoder.runner.draft_source
    draw = drafter.draft

    def watched(plan: Any) -> Any:
        proposal = draw(plan)
        unnamed = torch.ones(int(TARGET.config.vocab_size), dtype=torch.bool)
        unnamed[EAGLE.names] = False
        assert proposal.probs is None or bool((proposal.probs.probs[:, unnamed] == 0).all())
        for row, length in enumerate(proposal.lengths):
            drafted.append(proposal.token_ids[row, :length])
        return proposal

    drafter.draft = watched
    params = SamplingParams(temperature=1.0, seed=3)
    batch = decoder.generate([PROMPT], 40, params, depth_scheduler=DEPTH)
    assert torch.isin(torch.cat(drafted), EAGLE.names).all()
    assert set(batch[0].token_ids) - set(EAGLE.names.tolist())  # the text itself has others


def test_the_pool_pays_for_the_states() -> None:
    small = {"num_kv_blocks": None, "kv_cache_bytes": 100_000}
    with_eagle = build_decoder(TARGET, EAGLE, **small)
    alone = build_decoder(TARGET, "none", **small)
    token = alone.target.kv_bytes_per_token + 2 * 2 * 8 * 8 + 32 * 8
    assert with_eagle.config.num_kv_blocks == 100_000 // (4 * token)
    assert alone.config.num_kv_blocks == 100_000 // (4 * alone.target.kv_bytes_per_token)


# ------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_eagle(tmp_path / "draft", EAGLE.net, EAGLE.names)
    return tmp_path / "draft"


def test_a_checkpoint_comes_back_as_it_was(folder: Path) -> None:
    net, names = load_eagle(folder)
    assert net.config == EAGLE.net.config
    assert torch.equal(names, EAGLE.names)
    for name, value in EAGLE.net.state_dict().items():
        assert torch.equal(net.state_dict()[name], value)


def test_it_has_the_names_that_vllm_reads(folder: Path) -> None:
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < set(tensors)
    assert {
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.mlp.down_proj.weight",
    } < set(tensors)
    size = EAGLE.net.config.hidden_size
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * size)
    assert tensors["fc.weight"].shape == (size, 2 * size)
    named = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], named)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]


def test_a_folder_of_another_model_is_left_to_transformers(tmp_path: Path) -> None:
    assert find_eagle(tmp_path) is None
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not is_eagle(tmp_path)
    assert find_eagle("prompt-lookup") is None


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def test_damaged_checkpoints_are_refused_with_a_reason(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    twice = tensors["d2t"].clone()
    twice[1] = twice[0] - 1
    for wrong, reason in (
        ({"d2t": twice}, "names a token twice"),
        ({"d2t": tensors["d2t"] + 1000}, "does not have"),
        ({"d2t": tensors["d2t"][:-1]}, "entries"),
        ({"fc.weight": tensors["fc.weight"][:, :5].contiguous()}, "fc.weight"),
    ):
        save_file(tensors | wrong, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"cannot use the EAGLE-3 .*{reason}"):
            load_eagle(folder)
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot use the EAGLE-3"):
        load_eagle(folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 2}, "one layer"),
        ({"eagle_config": {}}, "which layers"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"draft_vocab_size": 500}, "draft vocabulary"),
        ({"architectures": ["Other"]}, "architecture"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    folder: Path, fields: dict[str, Any], reason: str
) -> None:
    change(folder, **fields)
    with pytest.raises(ValueError, match=reason):
        load_eagle(folder)


def test_a_draft_model_of_another_target_is_refused() -> None:
    other = tiny_llama(hidden_size=64)
    with pytest.raises(ValueError, match="use the target that it was trained for"):
        build_decoder(other, EAGLE)


def test_layers_that_the_target_does_not_have_are_refused() -> None:
    config = replace(eagle_config(TARGET, 80), state_layers=(0, 7))
    eagle = replace(EAGLE, net=EagleNet(config).double())
    with pytest.raises(ValueError, match=r"layers 0\.\.1; layer 7"):
        build_decoder(TARGET, eagle)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"state_layers": ()}, "different and increasing"),
        ({"state_layers": (1, 0)}, "different and increasing"),
        ({"head_dim": 7}, "even head size"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"draft_vocab_size": 98}, "1..97"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(eagle_config(TARGET, 80), **changed)


def test_a_folder_is_named_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    TARGET.save_pretrained(tmp_path / "target")
    decoder = SpeculativeDecoder.from_pretrained(
        str(tmp_path / "target"), str(folder), dtype="float64", verification="coupled"
    )
    assert decoder.model_pair == "target+draft"
    assert decoder.drafter_reads_target
    text = decoder.generate([PROMPT], 12, depth_scheduler=DEPTH)[0].token_ids
    assert text == greedy_text(TARGET, PROMPT, 12)
