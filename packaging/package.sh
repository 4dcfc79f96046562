#!/usr/bin/env bash
# Makes the packages of all crates that are meant for a package registry, into target/package, and
# checks them: their files, their size, and that no other crate of the workspace could be published.
#
#     packaging/package.sh                  # also builds each crate from its package, which takes minutes
#     packaging/package.sh --no-verify      # only makes them
#
# Options are those of `cargo package`; `--allow-dirty` permits changes that are not committed.
set -euo pipefail
cd "$(dirname "$0")/.."

# In the order in which they can be published: each needs only those before it.
CRATES=(kvpool kvpool-policies kvpool-map kvpool-cuda kvpool-node kvpool-load kvpool-cli)
BYTES_MAX=$((3 << 19)) # of a package, to notice what does not belong there; a registry accepts more

PACKAGES=${CARGO_TARGET_DIR:-target}/package

fail() { echo "packaging/package.sh: $*" >&2 && exit 1; }

# What cargo would publish must be the list above.
publishable=$(cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import json, sys
print(*sorted(p["name"] for p in json.load(sys.stdin)["packages"] if p["publish"] is None))')
[[ $publishable == "$(printf '%s\n' "${CRATES[@]}" | sort | paste -sd ' ')" ]] ||
    fail "these crates can be published: $publishable"

# The source of the Python package has these manifests, and no tests: cargo does not read a manifest with a test
# whose place it would have to look for.
python3 - "${CRATES[@]}" <<'END' || fail "a test or bench has no path"
import json, pathlib, subprocess, sys, tomllib
data = json.loads(subprocess.check_output(["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]))
missing = [
    f"{package['name']}: {target['name']}"
    for package in data["packages"]
    if package["name"] in sys.argv[1:]
    for kind in ("test", "bench", "example")
    for target in tomllib.loads(pathlib.Path(package["manifest_path"]).read_text()).get(kind, [])
    if "path" not in target
]
print(*missing, sep="\n", end="\n" if missing else "", file=sys.stderr)
sys.exit(bool(missing))
END

# Together, so that they are resolved against each other: none of them needs to be on a registry.
rm -f "$PACKAGES"/kvpool*.crate
# The tests and benches are left out on purpose; cargo warns of each.
cargo package --locked "$@" "${CRATES[@]/#/-p}" 2> >(grep -v "^warning: ignoring" >&2)

for crate in "${CRATES[@]}"; do
    package=$(echo "$PACKAGES/$crate"-[0-9]*.crate)
    [[ -f $package ]] || fail "there is no package of $crate"
    files=$(tar -tzf "$package" | cut -d/ -f2-)
    for file in README.md LICENSE-APACHE LICENSE-MIT Cargo.toml; do
        grep -qx "$file" <<<"$files" || fail "$package has no $file"
    done
    # Symbolic links must have become files.
    ! tar -tvzf "$package" | grep '^l' || fail "$package has symbolic links"
    # Crates that are not published are dependencies of tests only, which cargo leaves out.
    manifest=$(tar -xzOf "$package" --wildcards '*/Cargo.toml')
    ! grep -E '^\[.*dependencies\.kvpool-(testkit|engine)' <<<"$manifest" || fail "$package depends on what is not published"
    # Documents to which its README links, except for that of the Python package.
    while read -r link; do
        [[ $link == bindings/python/README.md ]] || grep -qx "$link" <<<"$files" || fail "$package: README.md links to $link"
    done < <(tar -xzOf "$package" --wildcards "$crate-*/README.md" | grep -o '](\([^)#:]*\)[)#]' | sed 's/^](//; s/[)#]$//' | sort -u)
    bytes=$(stat -c %s "$package")
    ((bytes <= BYTES_MAX)) || fail "$package has $bytes bytes"
    printf '%8d bytes, %4d files  %s\n' "$bytes" "$(wc -l <<<"$files")" "${package##*/}"
done
