#!/usr/bin/env bash
# LIBERO on two CPU cores: a tiny pi0.5 learns four tasks of libero_goal from scratch (stage 1); then its action expert
# alone, on the frozen backbone, learns "put the bowl on the plate" (stage 2). Rolled out on the benchmark's 50 initial
# states of that task, which no demonstration uses; the control is trained like stage 2 and sees black images.
#   bash recipes/libero.sh [OUT] [SEED]          needs soma-lightning[libero]; about an hour
# BASE_DEMOS, DEMOS, EPISODES, WORKERS, IMAGE_SIZE, and further options of stage 1 (BASE_OPTIONS), of stage 2 and its
# control (TUNE_OPTIONS) and of rollouts (EVAL_OPTIONS) change the job; so does STREAM: from 1000 on, rollouts start from
# any number of states that LIBERO draws and no demonstration uses. What a stopped job left is kept: remove OUT to begin
# anew.
set -euo pipefail
OUT=${1:-outputs/libero}
SEED=${2:-0}
BASE_DEMOS=${BASE_DEMOS:-12} DEMOS=${DEMOS:-24} WORKERS=${WORKERS:-2} IMAGE_SIZE=${IMAGE_SIZE:-64}
EPISODES=${EPISODES:-50} STREAM=${STREAM:-0} BASE_OPTIONS=${BASE_OPTIONS:-} TUNE_OPTIONS=${TUNE_OPTIONS:-} EVAL_OPTIONS=${EVAL_OPTIONS:-}
TASK=put_the_bowl_on_the_plate
# Two thirds of the drawing time, for edges and mirror images that 64 pixels hardly show.
DRAWING='"reflections": false, "multisampling": false'
fail() { echo "error: $*" >&2 && exit 2; } # what a command would refuse an hour later
for name in SEED BASE_DEMOS DEMOS EPISODES WORKERS IMAGE_SIZE STREAM; do
  [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name=${!name} must be a whole number"
done
[ "$DEMOS" -ge 2 ] || fail "DEMOS=$DEMOS must be at least 2: one demonstration is kept for validation"
[ "$EPISODES" -ge 1 ] || fail "EPISODES=$EPISODES must be at least 1"
[ "$STREAM" -ne 0 ] || [ "$EPISODES" -le 50 ] ||
  fail "EPISODES=$EPISODES, but the benchmark has 50 initial states; ask for at most 50, or set STREAM=1000"
[ "$STREAM" -ne $((SEED + 1)) ] ||
  fail "STREAM=$STREAM is what the demonstrations of seed $SEED start from; take 0, or another one from 1000 on"
say() { printf '\n== [%4d s] %s\n' "$SECONDS" "$*"; }
kept() { [ -e "$1" ] && echo "kept: $1"; } # both are written whole, at the end

demos() { # folder, episodes, tasks
  local folder=$1 episodes=$2
  shift 2
  kept "$OUT/demos/$folder" && return
  soma demos --env libero --env_options "{\"suite\": \"libero_goal\", $DRAWING}" --image_size "$IMAGE_SIZE" \
    --episodes "$episodes" --seed "$SEED" --workers "$WORKERS" --out "$OUT/demos/$folder" "${@/#/--task=}"
}

train() { # name, options of soma fit
  local name=$1
  shift
  kept "$OUT/$name/policy" && return
  soma fit "$@" --seed_everything "$SEED" --trainer.default_root_dir "$OUT/$name"
}

fine_tune() { # name, further options of soma fit
  local name=$1
  shift
  train "$name" --config pi05_libero --data.root "$OUT/demos/plate" --model.pretrained "$OUT/base/policy" \
    "$@" $TUNE_OPTIONS
}

roll_out() { # name, policy
  soma eval --policy "$2" --env libero --task "$TASK" --episodes "$EPISODES" --num_envs "$WORKERS" --workers "$WORKERS" \
    --timeout_s 300 --out "$OUT/eval/$1" $EVAL_OPTIONS \
    --env_options "{\"suite\": \"libero_goal\", \"task_numbers\": [8], \"image_size\": $IMAGE_SIZE, \"stream\": $STREAM, $DRAWING}"
}

say "stage 1: demonstrations of four other tasks"
demos base "$BASE_DEMOS" put_the_bowl_on_the_stove put_the_bowl_on_top_of_the_cabinet \
  put_the_wine_bottle_on_top_of_the_cabinet put_the_cream_cheese_in_the_bowl
say "stage 1: the whole network learns them"
train base --config pi05_libero_base --data.root "$OUT/demos/base" $BASE_OPTIONS
say "stage 2: demonstrations of a new task, the bowl on the plate"
demos plate "$DEMOS" "$TASK"
say "stage 2: the action expert learns it on the frozen backbone"
fine_tune expert
say "control: the same with black images"
fine_tune blind --model.config '{zero_images: true}'
say "stage 1: rollouts from $EPISODES initial states"
roll_out stage1 "$OUT/base/policy"
say "stage 2: rollouts"
roll_out stage2 "$OUT/expert/policy"
say "control: rollouts"
roll_out blind "$OUT/blind/policy"
soma compare "stage 1=$OUT/eval/stage1" "stage 2=$OUT/eval/stage2" "blind=$OUT/eval/blind" --out "$OUT/success.png"
