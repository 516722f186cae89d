#!/bin/sh
# The draft of dspark_jax/drafts/smollm2, from prompts to evaluation. Every stage resumes where it was stopped.
#
#   sh experiments/smollm2_draft.sh PROMPTS_TRAIN.jsonl PROMPTS_EVAL.jsonl OUT [ANSWERS [more conversations.jsonl ...]]
#
# ANSWERS: prompts to answer (default 6000). Needs about 7 KiB of disk a token of text for the features (bfloat16).
# RANK=0 trains DFlash, the same drafter without a sequential head, with the same budget.
set -eu
prompts=$1 eval=$2 out=$3 answers=${4:-6000}
shift 3
[ $# -gt 0 ] && shift
dspark=${DSPARK:-dspark} rank=${RANK:-64} first=${FIRST_STEPS:-2400} whole=${WHOLE_STEPS:-800}
run=$out/rank$rank
mkdir -p "$run"

$dspark answer --target smollm2 --prompts "$prompts" --limit "$answers" --out "$out/answers.jsonl" --batch-size 32

common="--target smollm2 --mask-id 4 --taps 3 10 17 23 28 --draft-vocab 8192 --markov-rank $rank
    --cache $out/features --cache-dtype bfloat16 --beta2 0.98 --tokens 2304 --held-out 64 --eval-every 100"
# Young drafts learn from the text, in early slots; then whole blocks, mostly from the target's distribution.
$dspark train $common --data "$@" "$out/answers.jsonl" --out "$run/first" \
    --ce-weight 0.5 --l1-weight 0.5 --lr 1e-3 --final-lr 0.3 --slots 4 --steps "$first"
$dspark train $common --data "$@" "$out/answers.jsonl" --out "$run/whole" --init "$run/first/draft" \
    --ce-weight 0.1 --l1-weight 0.9 --lr 3e-4 --steps "$whole"

$dspark eval --target smollm2 --draft "$run/whole/draft" --prompts "$eval" --batch-size 16 --json \
    --plot "$run/reliability.png" > "$run/evaluation.txt"
tail -n 1 "$run/evaluation.txt" > "$run/evaluation.json"
