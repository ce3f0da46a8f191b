#!/usr/bin/env bash
# From what recipes/demo.sh left: a policy of 46 demonstrations and 300 steps, then improved by PPO on its own attempts.
#   bash recipes/ppo/somatable.sh [DEMO] [OUT] [SEED] [OPTIONS of soma ppo...]
set -euo pipefail
DEMO=${1:-outputs/demo}
OUT=${2:-outputs/ppo_somatable}
SEED=${3:-0}
soma fit --config pi05_somatable --seed_everything "$SEED" --data.root "$DEMO/demos/pick" --data.max_episodes 46 \
  --model.pretrained "$DEMO/base/policy" --trainer.max_steps 300 --model.training.decay_steps 300 \
  --trainer.default_root_dir "$OUT/start"
soma ppo --config ppo/somatable --policy "$OUT/start/policy" --out "$OUT/ppo" --rollout.seed "$SEED" \
  --ppo.seed "$SEED" "${@:4}"
