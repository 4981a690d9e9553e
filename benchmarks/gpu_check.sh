#!/usr/bin/env bash
# The whole package on one GPU in under 8 minutes, into one JSON file:
#
#     bash benchmarks/gpu_check.sh [gpu_check.json] [--minutes 7.5] [--tiny]
#
# Needs a python3 (or $PYTHON) with torch 2.11 or newer, transformers, safetensors and numpy; no network,
# no installation. --tiny runs the same on the CPU with a small model, in under a minute.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# specdepth lies in folders at the top; links give it its name, as in .types/specdepth.
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/specdepth"
for path in "$root"/src/specdepth/* "$root"/{agents,checkpoints,decoder,envs,scheduler}; do
  [ "$(basename "$path")" = __pycache__ ] || ln -s "$path" "$links/specdepth/"
done
export PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 WANDB_MODE=disabled

"${PYTHON:-python3}" "$root/benchmarks/gpu_check.py" "$@"
