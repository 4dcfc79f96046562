#!/usr/bin/env bash
# Runs all checks and comparisons on a device, the most important ones first:
#
#   measure.sh PROGRAM FOLDER [OPTION ...]
#
# PROGRAM is `gpu_check`, FOLDER takes a log and a report of each step, and the options go to all
# steps (`--quick --limit-factor 9` for a rehearsal on a mock driver). A step that fails ends no
# other one. COLD names a second program without machine code, whose kernels the driver compiles.
# STEPS names the steps to run, separated by commas; all by default. `steps.txt` lists each step
# with its exit code and its seconds.
set -uo pipefail
program=$1 folder=$2
options=("${@:3}")
mkdir -p "$folder"

step() { # NAME COMMAND ...: runs a command
    [[ -z ${STEPS:-} || ,$STEPS, == *,$1,* ]] || return 0
    local start=$SECONDS status=0
    "${@:2}" >"$folder/$1.log" 2>&1 || status=$?
    echo "$1: exit code $status, $((SECONDS - start)) s" | tee -a "$folder/steps.txt"
}

check() { # NAME OPTION ...: runs the program
    step "$1" "$program" --json "$folder/$1.jsonl" "${options[@]}" "${@:2}"
}

step machine bash -c 'nvidia-smi -q -d COMPUTE,CLOCK,PERFORMANCE,ECC; ldd --version; uname -a; nproc'
step list "$program" --list
check quick --quick
check full
# Sections that were killed at their limits, with longer ones.
killed=$(sed -n 's/.*"section":{"name":"\([a-z]*\)".*"error":"killed.*/\1/p' "$folder/full.jsonl" 2>/dev/null | paste -sd, -)
[[ -z $killed ]] || check slow --limit-factor 10 --only "$killed"
check variants --variants
# The spread of the sections that depend on timing most, and of all.
check again --only protocol,tables,resize,replay
check spread
if [[ -n ${COLD:-} ]]; then
    program=$COLD
    check cold --only load,kernels
fi
