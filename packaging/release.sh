#!/usr/bin/env bash
# Builds what a release consists of, into target/release-files, and runs each part where there is
# neither Rust nor this repository's environment:
#
#     archive   kvpool-VERSION-TARGET.tar.gz: the program with the features `top` and `redis`, man pages,
#               completions, licences. Statically linked (musl) where that can be built, and with the C
#               library of this machine where it cannot
#     wheel     the Python package, for CPython 3.11 and later. For glibc 2.17 and later (manylinux2014)
#               where that can be built, and for this machine where it cannot
#     sdist     the source of the Python package, from which pip builds a wheel
#
#     packaging/release.sh               # all
#     packaging/release.sh archive       # one of them
#
# Needs rustup, a C toolchain and Python 3.11. The tools (maturin, cargo-zigbuild, and zig as the C
# compiler and linker) come from the Python package index, into target/packaging. The first two parts have the
# licences of the crates that are linked into them. The wheel is tried with each Python of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

export RUSTUP_TOOLCHAIN="${RUSTUP_TOOLCHAIN:-1.95.0}"
export CARGO_INCREMENTAL=0

MATURIN=(maturin==1.16.0 wheel==0.45.1)
ZIG=(cargo-zigbuild==0.24.1 ziglang==0.17.1)
PYTEST=(pytest==9.2.0 numpy==2.4.6)
WHEEL_BYTES_MAX=8000000
# Tests of the package that need only it.
TESTS=(tests/test_{asyncio,copies,errors,memory,numbers,processes,tier,usage}.py)
FEATURES=top,redis
SHELLS=(bash elvish fish powershell zsh)
OUT=$PWD/target/release-files
VENV=$PWD/target/packaging
MACHINE=$(uname -m)
VERSION=$(sed -n '/^\[workspace.package\]/,/^$/ s/^version = "\(.*\)"$/\1/p' Cargo.toml)
TARGETS=${CARGO_TARGET_DIR:-target}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

say() { printf '== %s\n' "$*"; }
note() { printf 'NOTE: %s\n' "$*"; } # what is less than was wanted, and why
fail() { echo "packaging/release.sh: $*" >&2 && exit 1; }

tools() { # tools NAME==VERSION...: installs Python packages; fails if one cannot be had
    [[ -x $VENV/bin/python ]] || python3 -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# ---- The archive

# Prints the target of the archive: static if it can be.
target() {
    local target=$MACHINE-unknown-linux-musl
    if rustup target add "$target" >&2 && { tools "${ZIG[@]}" && "$VENV/bin/cargo-zigbuild" --version; } >&2; then
        echo "$target"
    else
        echo "$MACHINE-unknown-linux-gnu"
    fi
}

archive() {
    local target build name folder shell program
    target=$(target)
    if [[ $target == *-musl ]]; then
        build=(env "PATH=$VENV/bin:$PATH" cargo zigbuild)
    else
        note "the target for musl, or zig, cannot be had: the program is linked to the C library of this machine"
        build=(cargo build)
    fi
    say "building the program for $target"
    "${build[@]}" --locked --profile dist --target "$target" -p kvpool-cli --features "$FEATURES"

    name=kvpool-$VERSION-$target
    folder=$WORK/$name
    program=$TARGETS/$target/dist/kvpool
    mkdir -p "$folder/man/man1" "$folder/completions"
    install -m 755 "$program" "$folder/kvpool"
    install -m 644 LICENSE-APACHE LICENSE-MIT CHANGELOG.md "$folder"
    install -m 644 packaging/kvpool.service docs/alerts.yml docs/grafana.json "$folder"
    python3 packaging/notices.py kvpool-cli "$target" "$FEATURES" >"$folder/THIRD-PARTY.txt"
    "$program" man "$folder/man/man1"
    for shell in "${SHELLS[@]}"; do "$program" completions "$shell" >"$folder/completions/kvpool.$shell"; done
    # The same bytes for the same files, at any time and by any user.
    tar -C "$WORK" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -cf - "$name" |
        gzip -9n >"$OUT/$name.tar.gz"
    [[ $target != *-musl ]] || ! readelf -l "$program" | grep -q INTERP || fail "$program is not static"
    try_archive "$OUT/$name.tar.gz" "$name"
    say "the program has $(stat -c %s "$program") bytes, the archive $(stat -c %s "$OUT/$name.tar.gz")"
}

try_archive() { # try_archive FILE FOLDER: unpacks and runs it without an environment
    say "running ${1##*/} in an empty environment"
    local place=$WORK/installed
    mkdir "$place"
    tar -C "$place" -xzf "$1"
    (
        cd "$place"
        local kvpool=(env -i "./$2/kvpool")
        "${kvpool[@]}" --version
        "${kvpool[@]}" info
        "${kvpool[@]}" replay --requests 200 | tail -1
        # A node, asked for its state and ended.
        "${kvpool[@]}" serve --size 500 --layout tiny --admin 127.0.0.1:0 --listen 127.0.0.1:0 >served 2>&1 &
        local node=$! address="" i
        for ((i = 0; i < 100 && ${#address} == 0; i++)); do
            sleep 0.1
            address=$(grep -o 'http://127\.0\.0\.1:[0-9]*' served | head -1 || true)
        done
        "${kvpool[@]}" stats "$address" >statistics || { cat served; kill "$node"; return 1; }
        head -3 statistics
        kill "$node"
        wait "$node" || { cat served && return 1; }
    )
    ls "$place/$2" "$place/$2/man/man1" "$place/$2/completions"
}

# ---- The wheel

# Sets BUILD to the options of maturin.
maturin_options() {
    tools "${MATURIN[@]}" || fail "maturin cannot be had"
    if tools "${ZIG[@]}" && "$VENV/bin/python" -m ziglang version >/dev/null; then
        # zig links against the symbols of an older C library than this machine's.
        BUILD=(--zig --compatibility manylinux2014)
    else
        note "zig cannot be had: the wheel is for the C library of this machine and later ones"
        BUILD=(--compatibility linux)
    fi
}

wheel() {
    local made bytes python tried=""
    maturin_options
    say "building the wheel"
    env "PATH=$VENV/bin:$PATH" maturin build --profile dist --locked -m bindings/python/Cargo.toml --out "$WORK/wheel" "${BUILD[@]}"
    made=$(echo "$WORK"/wheel/kvpool-*.whl)
    # The licences of what is linked into it, beside its own.
    "$VENV/bin/python" -m wheel unpack --dest "$WORK" "$made" >/dev/null
    (($(find "$WORK/kvpool-$VERSION" -path '*licenses/LICENSE-*' | wc -l) == 2)) || fail "$made has not both licences"
    python3 packaging/notices.py kvpool-python "$MACHINE-unknown-linux-gnu" >"$(dirname "$(find "$WORK/kvpool-$VERSION" -name LICENSE-MIT)")/THIRD-PARTY.txt"
    sed -i '0,/^License-File:/s//License-File: THIRD-PARTY.txt\n&/' "$WORK/kvpool-$VERSION"/kvpool-*.dist-info/METADATA
    rm -f "$OUT"/kvpool-*.whl
    "$VENV/bin/python" -m wheel pack --dest-dir "$OUT" "$WORK/kvpool-$VERSION" >/dev/null
    made=$OUT/${made##*/}
    [[ -f $made ]] || fail "$made was not packed"
    [[ $made == *-cp311-abi3-* ]] || fail "${made##*/} is not for the stable ABI of Python 3.11"
    bytes=$(stat -c %s "$made")
    ((bytes <= WHEEL_BYTES_MAX)) || fail "${made##*/} has $bytes bytes, more than $WHEEL_BYTES_MAX: it is not stripped, or has grown"
    for python in python3.{11..19} python3; do
        # A name may be a shim of a version that is not there; `python3` is tried if it is the only name.
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        [[ $python != python3 || -z $tried ]] || continue
        try_wheel "$python" "$made"
        tried=yes
    done
    [[ -n $tried ]] || fail "there is no Python 3.11 or later to try the wheel with"
    say "${made##*/} has $bytes bytes"
}

try_wheel() { # try_wheel PYTHON FILE: installs and tests it where there is no Rust
    say "running ${2##*/} in an environment of its own, without Rust, under $1"
    local place=$WORK/$1 tool
    local clean=(env -i HOME="$place" PATH="$place/venv/bin:/usr/bin:/bin" LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1)
    "$1" -m venv "$place/venv"
    for tool in cargo rustc maturin; do
        ! "${clean[@]}" sh -c "command -v $tool" || fail "the environment has $tool"
    done
    "${clean[@]}" python -m pip install --quiet --disable-pip-version-check --only-binary :all: "$2" "${PYTEST[@]}"
    cp -r bindings/python/{examples,tests} "$place"
    (
        cd "$place"
        "${clean[@]}" python examples/engine_loop.py
        "${clean[@]}" python -m pytest -q -p no:cacheprovider -W error "${TESTS[@]}"
    )
}

sdist() {
    maturin_options
    say "building a wheel from the source of the package"
    rm -f "$OUT/kvpool-$VERSION.tar.gz"
    "$VENV/bin/maturin" sdist -m bindings/python/Cargo.toml --out "$OUT" 2>"$WORK/said" || { cat "$WORK/said" && fail "no sdist"; }
    # The times of the files are those of now: with those of the archive, which are older than what the wheel's build
    # left, cargo would take the crates of this tree for the archive's, and compile nothing.
    mkdir "$WORK/source"
    tar -C "$WORK/source" -xmzf "$OUT/kvpool-$VERSION.tar.gz"
    # As pip does for users without a wheel. With the options of the wheel, for the other crates that it has compiled.
    CARGO_TARGET_DIR=$(realpath "$TARGETS") PATH=$VENV/bin:$PATH MATURIN_PEP517_ARGS="${BUILD[*]}" "$VENV/bin/python" -m pip wheel \
        --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$WORK/from-sdist" "$WORK/source/kvpool-$VERSION"
    python3 -m venv "$WORK/sdist"
    "$WORK/sdist/bin/python" -m pip install --quiet --disable-pip-version-check "$WORK"/from-sdist/kvpool-*.whl
    (cd "$WORK" && sdist/bin/python "$OLDPWD/bindings/python/examples/engine_loop.py")
}

# ---- All parts

[[ $(uname -s) == Linux ]] || fail "releases are built on Linux"
parts=("$@")
(($#)) || parts=(archive wheel sdist)
mkdir -p "$OUT"
for part in "${parts[@]}"; do
    case $part in
        archive | wheel | sdist) "$part" ;;
        *) echo "packaging/release.sh: there is no part $part" >&2 && exit 2 ;;
    esac
done
(cd "$OUT" && sha256sum kvpool-*.tar.gz kvpool-*.whl 2>/dev/null >SHA256SUMS || true)
say "made $OUT"
cat "$OUT/SHA256SUMS"
