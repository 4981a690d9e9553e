"""What an `Advice` means for vLLM and SGLang: settings to paste, and what each makes of them."""

from __future__ import annotations

import json
import shlex
from typing import Any

from specdepth.scheduler import table_exports as exports

from .advice import Advice

VLLM_FILE, SGLANG_FILE = "vllm.json", "sglang.json"


def engine_settings(advice: Advice) -> dict[str, dict[str, Any]]:
    """The best table as settings of vLLM and SGLang, with what each makes of them, as JSON values."""
    info, size = advice.info, advice.max_load
    draft_model = info.model_pair.rpartition("+")[2]
    has_model = info.drafter == "draft-model"
    return {
        "vllm": {
            "speculative_config": exports.vllm_speculative_config(
                advice.table,
                max_batch_size=size,
                drafter=info.drafter,
                draft_model=draft_model,
                lookup=info.lookup,
                reads_target=info.reads_target,
            ),
            "limits": exports.VLLM_TABLE_LIMITS
            + (f" {exports.VLLM_DRAFT_MODEL_LIMITS}" if has_model else ""),
        },
        "sglang": {
            "flags": list(
                exports.sglang_flags(
                    advice.best_single,
                    drafter=info.drafter,
                    draft_model=draft_model,
                    reads_target=info.reads_target,
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
