#!/usr/bin/env bash
# The main job on two CPU cores: a tiny pi0.5 learns to reach from scratch (stage 1); then its action expert alone,
# on the frozen backbone, learns to pick (stage 2), and both are rolled out on 100 held-out initial states.
#   bash recipes/demo.sh [OUT] [SEED]
set -euo pipefail
OUT=${1:-outputs/demo}
SEED=${2:-0}
say() { printf '\n== [%4d s] %s\n' "$SECONDS" "$*"; }

say "stage 1: demonstrations of two reaching tasks"
soma demos --env somatable --task reach_cube --task reach_green --episodes 250 --seed "$SEED" --workers 2 \
  --out "$OUT/demos/reach" --overwrite true
say "stage 1: the whole network learns them"
soma fit --config pi05_somatable_base --seed_everything "$SEED" --data.root "$OUT/demos/reach" \
  --trainer.default_root_dir "$OUT/base"
say "stage 2: demonstrations of a new task, pick"
soma demos --env somatable --task pick --episodes 200 --seed "$SEED" --workers 2 --out "$OUT/demos/pick" --overwrite true
say "stage 2: the action expert learns it on the frozen backbone"
soma fit --config pi05_somatable --seed_everything "$SEED" --data.root "$OUT/demos/pick" \
  --model.pretrained "$OUT/base/policy" --trainer.default_root_dir "$OUT/expert"
say "rollouts on 100 held-out initial states of pick"
soma eval --policy "$OUT/base/policy" --task pick --episodes 100 --out "$OUT/eval/stage1" --overwrite true
soma eval --policy "$OUT/expert/policy" --task pick --episodes 100 --out "$OUT/eval/stage2" --overwrite true
soma compare "stage 1=$OUT/eval/stage1" "stage 2=$OUT/eval/stage2" --claim_best "stage 2" --out "$OUT/success.png"
say "files"
find "$OUT" -name '*.png' -o -name '*.mp4' -o -name 'results.json' -o -name 'run_report.json' -o -name policy | sort
