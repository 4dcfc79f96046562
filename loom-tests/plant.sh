#!/usr/bin/env bash
# Plants bugs: copies the tree to target/planted/tree, applies every patch in loom-tests/mutants,
# cuda-tests/mutants and node/mutants to the copy, and prints its path. A patch that does not apply
# fails. The bugs are inactive until KVPOOL_MUTANT names one.
#
# `plant.sh mend` applies as much as possible, and leaves the rejected hunks beside the files of the
# copy (*.rej). `plant.sh save` writes the patches anew from the copy. To add a bug: plant, edit the
# copy, save. To repair a patch: mend, edit the copy, remove the *.rej, save.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD copy=$PWD/target/planted/tree mode=${1:-plant}
mkdir -p "$copy"
exec 9>target/planted/lock
flock 9

sources() { # identifies the sources that patches are made against
    find src cuda/src node/src Cargo.toml -type f | sort | xargs cat | git hash-object --stdin
}

if [[ $mode == save ]]; then
    if [[ $(cat target/planted/sources 2>/dev/null) != "$(sources)" ]]; then
        echo "plant.sh: the copy was not planted from these sources; plant or mend it first" >&2
        exit 1
    fi
    if find "$copy/src" "$copy/cuda/src" "$copy/node/src" -name '*.rej' | grep .; then
        echo "plant.sh: plant the bugs of these rejected hunks, and remove the files" >&2
        exit 1
    fi
    # Bugs in the order of device work are those of the mock driver's schedules; the models catch all
    # others.
    device=$(sed -n "/<<'LIST'/,/^LIST/p" cuda-tests/mutants.sh | awk 'NF == 3 { print $1 }' | paste -sd '|')
    rm -rf loom-tests/mutants cuda-tests/mutants node/mutants
    (cd "$copy" && find src cuda/src node/src Cargo.toml -type f | sort) | while read -r file; do
        ! cmp -s "$copy/$file" "$file" || continue
        suite=loom-tests name=planted
        [[ $file != cuda/* ]] || suite=cuda-tests
        [[ $file != node/* ]] || suite=node
        if grep -q kvpool_mutant "$copy/$file" && [[ $file != */planted.rs ]]; then
            name=${file#node/} && name=${name/src\//} && name=${name%.rs}
            ! grep -qE "kvpool_mutant = \"($device)\"" "$copy/$file" || suite=cuda-tests
        fi
        mkdir -p "$(dirname "$suite/mutants/$name")"
        base=$file label=a/$file
        [[ -e $file ]] || base=/dev/null label=/dev/null
        diff -u --label "$label" --label "b/$file" "$base" "$copy/$file" >>"$suite/mutants/$name.patch" ||
            [[ $? == 1 ]]
    done
    exit
fi

fresh=$(mktemp -d target/planted/fresh.XXXXXX)
trap 'rm -rf "$fresh"' EXIT
git ls-files -z --cached --others --exclude-standard |
    tar --null --ignore-failed-read -cf - -T - 2>/dev/null | tar -xf - -C "$fresh"
options=()
[[ $mode != mend ]] || options=(--reject)
for patch in $(find loom-tests/mutants cuda-tests/mutants node/mutants -name '*.patch' | sort); do
    # As outside of a repository: the patches' paths are relative to the copy.
    if ! (cd "$fresh" && GIT_CEILING_DIRECTORIES=$root/target/planted git apply "${options[@]}" "$root/$patch") >&2; then
        [[ $mode == mend ]] || { echo "plant.sh: $patch does not apply" >&2 && exit 1; }
    fi
done
# Unchanged files keep their times, so that little is rebuilt.
(cd "$fresh" && find . -type f -o -type l) | while read -r file; do
    cmp -s "$fresh/$file" "$copy/$file" || { mkdir -p "$(dirname "$copy/$file")" && cp "$fresh/$file" "$copy/$file"; }
done
(cd "$copy" && find . -type f) | while read -r file; do
    [[ -e $fresh/$file ]] || rm "$copy/$file"
done
sources >target/planted/sources
echo "$copy"
