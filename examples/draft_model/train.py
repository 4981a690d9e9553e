"""Distils an EAGLE-3 draft model on the target's own texts.

    python examples/draft_model/train.py --texts texts --out run --steps 2000

Needs what `texts.py` and `states.py` wrote. Checkpoints every few minutes and goes on from the last one
when run again. Ends with the folder `run/draft`, which `--draft` of every command takes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from dataset import Texts, frequent_tokens
from training import Unrolled, soft_loss

from specdepth.decoder.eagle_files import save_eagle
from specdepth.decoder.eagle_net import EagleConfig, EagleNet
from specdepth.decoder.loading import load_model


@dataclass(frozen=True, slots=True)
class Config:
    """How to train."""

    texts: Path
    """Folder of `texts.py` and `states.py`."""
    out: Path
    steps: int = 2000
    """Updates."""
    batch_tokens: int = 2048
    """Tokens of an update, padding included."""
    unroll: int = 3
    """Draft steps trained at once (training-time test)."""
    decay: float = 0.8
    """Weight of each further step."""
    learning_rate: float = 1e-3
    warmup: int = 60
    draft_vocab_size: int = 8192
    held_out_shards: int = 1
    """First shards, kept for the learning curve."""
    evaluate_every: int = 200
    blind: bool = False
    """Hide the target's states: a plain one-layer draft model of the same cost, for comparison."""
    model: str = "default"
    seed: int = 0
    threads: int = 1
    track: bool = False
    """Log to Weights & Biases."""


def main(config: Config) -> None:
    """Train, or go on training."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model(config.model, torch.bfloat16, torch.device("cpu"))
    target: Any = loaded.model
    texts = Texts(config.texts, config.held_out_shards)
    names = kept_names(config, texts, target.config.vocab_size)
    print(
        f"{len(texts.train)} texts of {texts.num_tokens} tokens; the draft vocabulary covers "
        f"{texts.coverage(names):.4f} of held-out answers.",
        flush=True,
    )
    net = from_target(target, texts.layers, names)
    if config.blind:
        net.fc.weight.requires_grad_(False).zero_()
    embed = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()[names]
    run = Run(config, net, embed, head, texts, names)
    run.resume()
    run.train()
    save_eagle(config.out / "draft", net.to(torch.bfloat16), names)
    print(f"Wrote {config.out / 'draft'}.")


def kept_names(config: Config, texts: Texts, vocab_size: int) -> Tensor:
    """Draft vocabulary, [V'] ids; that of an interrupted run, whatever texts came since."""
    path = config.out / "names.npy"
    if path.exists():
        return torch.from_numpy(np.load(path))
    names = frequent_tokens(texts, config.draft_vocab_size, vocab_size)
    np.save(path, names.numpy())
    return names


def from_target(target: Any, layers: tuple[int, ...], names: Tensor) -> EagleNet:
    """A network that starts from the target's last layer, final norm and output head."""
    shape = target.config
    rope = getattr(shape, "rope_parameters", None) or {}
    net = EagleNet(
        EagleConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=getattr(shape, "head_dim", shape.hidden_size // shape.num_attention_heads),
            vocab_size=shape.vocab_size,
            draft_vocab_size=len(names),
            state_layers=layers,
            max_position_embeddings=shape.max_position_embeddings,
            rope_theta=rope.get("rope_theta", 10000.0),
            rms_norm_eps=shape.rms_norm_eps,
        )
    )
    last, size = target.model.layers[-1], shape.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(net.midlayer.self_attn, name).weight
            torch.nn.init.normal_(weight, std=0.02)
            weight[:, size:] = getattr(last.self_attn, name).weight.float()
        net.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(net.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        net.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        net.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        net.fc.weight.zero_()
        net.fc.weight[:, -size:] = torch.eye(size)
        net.norm.weight.copy_(target.model.norm.weight)
        net.lm_head.weight.copy_(target.get_output_embeddings().weight[names])
    return net


class Run:
    """The state of a training run."""

    def __init__(
        self,
        config: Config,
        net: EagleNet,
        embed: Tensor,
        head: Tensor,
        texts: Texts,
        names: Tensor,
    ) -> None:
        self.config, self.net, self.embed, self.texts = config, net, embed, texts
        self.names = names
        self.head = head
        self.unrolled = Unrolled(net, config.unroll)
        self.optimizer = torch.optim.AdamW(
            net.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.tracker = None
        if config.track:
            import wandb

            self.tracker = wandb.init(
                project="specdepth", job_type="draft-model", config=asdict(config)
            )

    @property
    def checkpoint(self) -> Path:
        """File of the last state."""
        return self.config.out / "checkpoint.pt"

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.checkpoint.exists():
            kept = torch.load(self.checkpoint, weights_only=True)
            self.net.load_state_dict(kept["net"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step, self.curve = kept["step"], kept["curve"]
            print(f"Going on after step {self.step}.", flush=True)

    def keep(self) -> None:
        """Write a checkpoint."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "curve": self.curve,
            },
            part,
        )
        os.replace(part, self.checkpoint)
        (self.config.out / "curve.json").write_text(json.dumps(self.curve, indent=1))

    def rate(self) -> float:
        """Learning rate: warm-up, then a cosine down to a twentieth."""
        config = self.config
        if self.step < config.warmup:
            return config.learning_rate * (self.step + 1) / config.warmup
        share = (self.step - config.warmup) / max(config.steps - config.warmup, 1)
        return config.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)

    def train(self) -> None:
        """Run to the last step."""
        config, started, first, recent = self.config, time.perf_counter(), self.step, []
        while self.step < config.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate()
            batch = self.texts.batch(self.step, config.batch_tokens, config.seed)
            loss = self.loss(batch)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            recent.append(float(loss.detach()))
            self.step += 1
            if self.step % config.evaluate_every == 0 or self.step == config.steps:
                shown = {"step": self.step, "loss": float(np.mean(recent)), **self.evaluate()}
                recent = []
                self.curve.append(shown)
                self.keep()
                spent = time.perf_counter() - started
                left = spent / (self.step - first) * (config.steps - self.step)
                print(json.dumps(shown), f"{spent:.0f} s, {left:.0f} s left", flush=True)
                if self.tracker:
                    self.tracker.log(shown, step=self.step)
        if self.tracker:
            self.tracker.finish()

    def _steps(self, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        return self.unrolled.steps(self.embed[batch["tokens"][:, 1:]], batch["states"][:, :-1])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Weighted mean of the steps' losses over answer tokens."""
        config, total, weights = self.config, torch.zeros(()), 0.0
        with torch.autocast("cpu", torch.bfloat16):
            for step, out in enumerate(self._steps(batch)):
                wanted = batch["wanted"].clone()
                wanted[:, :step] = False
                rows = wanted.nonzero(as_tuple=True)
                logits = self.net.logits(out[rows])
                with torch.no_grad():
                    wanted_logits = batch["finals"][:, 1:][rows] @ self.head.T
                total = total + config.decay**step * soft_loss(logits, wanted_logits)
                weights += config.decay**step
        return total / weights

    @torch.inference_mode()
    def evaluate(self) -> dict[str, float]:
        """Shares of held-out greedy positions where the first j tokens of a draft all stand."""
        runs = []
        with torch.autocast("cpu", torch.bfloat16):
            for batch in self.texts.held_out(self.config.batch_tokens):
                tokens, stands, alive = batch["tokens"], [], None
                for step, out in enumerate(self._steps(batch)):
                    guess = self.names[self.net.logits(out).argmax(-1)]
                    # An anchor is the entry of step 0; step j of it lies j entries further right.
                    length = guess.shape[1] - step - 1
                    same = guess[:, step : step + length] == tokens[:, 2 + step : 2 + step + length]
                    alive = same if alive is None else alive[:, :length] & same
                    anchors = batch["wanted"][:, :length]
                    inside = torch.arange(length) + 2 + step < batch["lengths"][:, None]
                    stands.append(
                        (int((alive & anchors & inside).sum()), int((anchors & inside).sum()))
                    )
                runs.append(stands)
        sums = np.array(runs).sum(0)
        return {f"accepted_{j + 1}": float(a / max(n, 1)) for j, (a, n) in enumerate(sums)}


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
