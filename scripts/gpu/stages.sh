# What first_minutes.sh and second_minutes.sh share; sourced by both.
#
# Nothing of vasuki need be installed, and nothing is fetched. Packages that the machine lacks come as wheels in $WHEELS.
# What one call leaves in $WORK later ones find: the measured profile, and the report that grows.
#
#   PYTHON   the interpreter that has torch (python3)
#   WORK     a folder that stays from call to call (out/gpu)
#   OUT      a folder for what is taken home: four files, written again after every stage (WORK/results)
#   WHEELS   a folder of wheels to run with (none)
#   CHECK    more options of gpu_check.py, such as --device cpu --toy
#   SCALE    times the seconds that each stage has (1)
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3}
WORK=${WORK:-$root/out/gpu}
OUT=${OUT:-$WORK/results}
most_bytes=$((16 * 2**20 - 1))
mkdir -p "$WORK/site" "$OUT"
for wheel in ${WHEELS:+"$WHEELS"/*.whl}; do "$PYTHON" -m zipfile -e "$wheel" "$WORK/site" || exit; done
export PYTHONPATH="$root:$root/solvers:$WORK/site" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# stage SECONDS SECTION...: run sections of gpu_check.py within that time, and leave in $OUT what is known by now.
stage() {
    local seconds=$(($1 * ${SCALE:-1})) file code
    shift
    echo "== $(date +%T) $*, up to $seconds s"
    # A kernel that hangs lets no section end itself.
    # shellcheck disable=SC2086
    timeout --kill-after 5 $((seconds + 30)) "$PYTHON" "$root/scripts/gpu/gpu_check.py" --out "$WORK" \
        --checkpoint "$root/models/dates" --budget-s "$seconds" ${CHECK:-} --only "$@" 2>&1 | tee -a "$WORK/log.txt"
    code=${PIPESTATUS[0]}
    for file in gpu_check.md gpu_check.json this-machine.yaml log.txt; do
        [ -e "$WORK/$file" ] && tail -c "$most_bytes" "$WORK/$file" >"$OUT/$file"
    done
    return "$code"
}

# known STAGES NAME...: refuse names that are none of the stages.
known() {
    local name stages=$1
    for name in "${@:2}"; do
        [[ " $stages " == *" $name "* ]] || { echo "there is no stage '$name'; there are: $stages" >&2; exit 2; }
    done
}
