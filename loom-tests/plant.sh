#!/usr/bin/env bash
# Plants bugs: copies the tree to target/planted/tree, applies every patch in loom-tests/mutants and
# cuda-tests/mutants to the copy, and prints its path. Fails if a patch does not apply. The bugs are
# inactive until KVPOOL_MUTANT names one.
#
# `plant.sh save` regenerates the patches from the copy: to add a bug, or to repair a patch, edit
# the copy and save.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$PWD/target/planted/tree

if [[ ${1:-} == save ]]; then
    rm -rf loom-tests/mutants cuda-tests/mutants
    while read -r file; do
        # Bugs in the order of device work are caught by the mock driver's schedules; models catch
        # all others.
        suite=loom-tests
        if ! grep -q "kvpool_mutant" "$copy/$file"; then
            name=planted
        else
            name=${file#src/} && name=${name%.rs}
            grep -qE "kvpool_mutant = \"($(sed -n "/<<'LIST'/,/^LIST/p" cuda-tests/mutants.sh | awk 'NF == 3 { print $1 }' | paste -sd '|'))\"" "$copy/$file" && suite=cuda-tests
        fi
        mkdir -p "$(dirname "$suite/mutants/$name")"
        base=$file label=a/$file
        [[ -e $file ]] || base=/dev/null label=/dev/null
        diff -u --label "$label" --label "b/$file" "$base" "$copy/$file" >>"$suite/mutants/$name.patch" || [[ $? == 1 ]]
    done < <(cd "$copy" && find src Cargo.toml -type f | sort | while read -r file; do
        cmp -s "$file" "$OLDPWD/$file" || echo "$file"
    done)
    exit
fi

mkdir -p "$copy"
exec 9>target/planted/lock
flock 9
fresh=$(mktemp -d target/planted/fresh.XXXXXX)
trap 'rm -rf "$fresh"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -cf - -T - 2>/dev/null | tar -xf - -C "$fresh"
find loom-tests/mutants cuda-tests/mutants -name '*.patch' | sort | while read -r patch; do
    # Keeps git from using a repository that contains this folder.
    if ! (cd "$fresh" && GIT_CEILING_DIRECTORIES=$OLDPWD/target/planted git apply "$OLDPWD/$patch") >&2; then
        echo "plant.sh: $patch does not apply" >&2
        exit 1
    fi
done
# Unchanged files keep their modification times, so that few crates are rebuilt.
(cd "$fresh" && find . -type f) | while read -r file; do
    cmp -s "$fresh/$file" "$copy/$file" || { mkdir -p "$copy/$(dirname "$file")" && cp -p "$fresh/$file" "$copy/$file" && touch "$copy/$file"; }
done
(cd "$copy" && find . -type f) | while read -r file; do
    [[ -e $fresh/$file ]] || rm "$copy/$file"
done
echo "$copy"
