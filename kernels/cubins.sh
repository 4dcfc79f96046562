#!/usr/bin/env bash
# Builds machine code from the PTX in `ptx/`: kernels/cubins.sh PTXAS FOLDER
#
# A program that is then built with KVPOOL_CUBINS=FOLDER (an absolute path) and
# RUSTFLAGS="--cfg kvpool_cubins" contains it, and its devices need not compile the PTX, which remains
# for other architectures. A kernel that spills registers, or has a stack frame, fails.
set -euo pipefail
if [[ $# -ne 2 ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
ptxas=$1 folder=$2
cd "$(dirname "$0")/ptx"
mkdir -p "$folder"
for name in kvpool probes; do
    for sm in 80 90; do
        ptx=$name.sm$sm.ptx
        [[ -e $ptx ]] || ptx=$name.sm80.ptx
        log=$("$ptxas" -v -arch="sm_$sm" -o "$folder/$name.sm$sm.cubin" "$ptx" 2>&1)
        if grep -E "[1-9][0-9]* bytes (stack frame|spill)" <<<"$log"; then
            echo "cubins.sh: a kernel in $ptx spills on sm_$sm, or has a stack frame" >&2
            exit 1
        fi
        echo "$name.sm$sm: $(grep -c "Used [0-9]* registers" <<<"$log") kernels, at most" \
            "$(grep -oE "Used [0-9]+ registers" <<<"$log" | sort -k2 -n | tail -1 | grep -oE "[0-9]+") registers"
    done
done
