#!/usr/bin/env bash
# The first 25 minutes on a card: does it run, is it right, how fast is it, and what does offload hide.
#
#   scripts/gpu/first_minutes.sh [right] [job] [speed] [moved]      those stages, or all of them
#
#   minute    stage
#    0 -  1   preflight   always first; nothing goes on where it fails
#    1 -  7   right       tokens against transformers, recorded steps, copies, little memory, blocks beyond 2^31 elements
#    7 - 10   job         `vasuki run` as users have it, with weights on the host, stopped and killed
#   10 - 19   speed       ceilings of the card, its profile, copies, idle share, kernels, half of the memory
#   19 - 25   moved       the 8B shape from disk in little memory: park, stream and auto
#
# Where a command may last ten minutes: `right job`, then `speed`, then `moved`. The exit code is 1 if a check did not
# hold. See stages.sh for what it wants of the machine, and what it leaves.
. "$(dirname "${BASH_SOURCE[0]}")/stages.sh"
stages="right job speed moved"
known "$stages" "$@"

failed=0
stage 40 preflight || { echo "the preflight failed: nothing goes on" >&2; exit 1; }
for name in ${*:-$stages}; do
    case $name in
        right) stage 320 checkpoint tests golden cases offload attention "far blocks" ;;
        job) stage 150 job ;;
        speed) stage 500 ceilings profile overlap steps kernels capped ;;
        moved) stage 320 moved ;;
    esac || failed=1
done
exit $failed
