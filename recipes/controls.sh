#!/usr/bin/env bash
# Two controls of the main job, trained and evaluated exactly like stage 2 of demo.sh, which must have run before:
# "blind" sees black images, "random backbone" trains the expert on a frozen backbone that never learned anything.
#   bash recipes/controls.sh [OUT] [SEED]
set -euo pipefail
OUT=${1:-outputs/demo}
SEED=${2:-0}
say() { printf '\n== [%4d s] %s\n' "$SECONDS" "$*"; }

train() { # name, further options of soma fit
  local name=$1
  shift
  say "$name: training"
  soma fit --config pi05_somatable --seed_everything "$SEED" --data.root "$OUT/demos/pick" \
    --trainer.default_root_dir "$OUT/$name" "$@"
  soma eval --policy "$OUT/$name/policy" --task pick --episodes 100 --out "$OUT/eval/$name" --overwrite true
}

train blind --model.pretrained "$OUT/base/policy" --model.config '{zero_images: true}'
train random_backbone --model.pretrained null --model.size tiny
say "comparison"
soma compare "stage 2=$OUT/eval/stage2" "stage 1=$OUT/eval/stage1" "blind=$OUT/eval/blind" \
  "random backbone=$OUT/eval/random_backbone" --claim_best "stage 2" --out "$OUT/controls.png"
