#!/usr/bin/env bash
# A second time on a card that first_minutes.sh has measured: how it compares with others.
#
#   scripts/gpu/second_minutes.sh PROFILE [contest] [sanitizer] [vllm]      those stages, or all of them
#
# PROFILE is the this-machine.yaml that the first time has left; predictions are made by it.
#
#   minute    stage
#    0 - 10   contest     whole workloads against transformers' own ways, predicted and measured
#   10 - 14   sanitizer   compute-sanitizer, over a few steps of tiny models
#   14 - 23   vllm        the same rows by vLLM, where VLLM names the Python of an environment that has it
#
# Each begins with the preflight, which says what profile it is, and ends where that fails. The exit code is 1 if a check
# did not hold. See stages.sh for what it wants of the machine, and what it leaves.
. "$(dirname "${BASH_SOURCE[0]}")/stages.sh"
stages="contest sanitizer${VLLM:+ vllm}"
profile=${1:?which profile? the this-machine.yaml of the first time}
shift
known "$stages" "$@"
[ "$profile" -ef "$WORK/this-machine.yaml" ] || cp "$profile" "$WORK/this-machine.yaml" || exit 2
CHECK="${CHECK:-}${VLLM:+ --vllm $VLLM}"

failed=0
for name in ${*:-$stages}; do
    case $name in
        contest) stage 560 preflight contest ;;
        sanitizer) stage 240 preflight sanitizer ;;
        vllm) stage 540 preflight vllm ;;
    esac || failed=1
done
exit $failed
