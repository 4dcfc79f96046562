#!/usr/bin/env bash
# Two nodes on this machine, with mutual TLS. One is under load and runs short of memory: blocks move
# to the other by themselves. A sequence is migrated by hand. One node is killed and restarted.
# Prints what it does, checks every step, and exits with 1 if anything is wrong.
#
#     examples/two_nodes.sh                # builds target/release/kvpool first
#     KVPOOL=path/to/kvpool examples/two_nodes.sh
#
# Needs openssl. Takes a few seconds after the build.
set -euo pipefail
cd "$(dirname "$0")/.."

kvpool=${KVPOOL:-target/release/kvpool}
if [ -z "${KVPOOL:-}" ]; then
    echo "Building $kvpool."
    cargo build --quiet --release -p kvpool-cli --features node
fi
# Settings of the shell must not reach the nodes.
for variable in $(env | sed -n 's/^\(KVPOOL_[A-Z_]*\)=.*/\1/p'); do unset "$variable"; done

work=$(mktemp -d)
pids=()
finish() {
    local code=$?
    for pid in "${pids[@]:-}"; do
        [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true
    done
    if [ "$code" -ne 0 ]; then
        echo "FAILED. What the nodes said:"
        cat "$work"/*.err 2>/dev/null || true
    fi
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT

say() { printf '\n== %s\n' "$*"; }
fail() { echo "WRONG: $*"; exit 1; }
# Waits up to 30 seconds until a command succeeds.
await() {
    local what=$1
    shift
    for _ in $(seq 300); do
        if "$@"; then return 0; fi
        sleep 0.1
    done
    fail "not within 30 seconds: $what"
}
token() { echo "--token-file $work/token"; }
# stat URL KEY: a number of the statistics; empty if there is none.
stat() { "$kvpool" stats --json $(token) "$1" | sed -n "s/^ *\"$2\": \([0-9]*\),\{0,1\}$/\1/p" | head -1; }
at_least() { local is; is=$(stat "$1" "$2"); [ "${is:-0}" -ge "$3" ]; }
linked() { at_least "$1" peers_up 1; }
migrations() { "$kvpool" migration-status $(token) "$1"; }
offloaded() { migrations "$1" | grep -q 'offload.*committed'; }

say "Creating an authority, a certificate for each node, and the token of the cluster."
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj "/CN=example authority" \
    -keyout "$work/ca.key" -out "$work/ca.pem" 2>/dev/null
for node in node-a node-b; do
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$node" \
        -keyout "$work/$node.key" -out "$work/$node.csr" 2>/dev/null
    printf 'subjectAltName=DNS:%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$node" >"$work/$node.ext"
    openssl x509 -req -in "$work/$node.csr" -CA "$work/ca.pem" -CAkey "$work/ca.key" -CAcreateserial -days 1 \
        -extfile "$work/$node.ext" -out "$work/$node.pem" 2>/dev/null
done
(umask 077 && openssl rand -hex 32 >"$work/token")

# start NAME LISTEN FLAGS...: starts a node. Sets `pid`, `url` and `listen`.
start() {
    local name=$1 at=$2
    shift 2
    : >"$work/$name.out"
    "$kvpool" serve --name "$name" --listen "$at" --admin 127.0.0.1:0 $(token) --tls-ca "$work/ca.pem" \
        --tls-cert "$work/$name.pem" --tls-key "$work/$name.key" "$@" >"$work/$name.out" 2>>"$work/$name.err" &
    pid=$!
    pids+=("$pid")
    await "$name starts" grep -q '^listen: ' "$work/$name.out"
    url=$(sed -n 's/^admin: //p' "$work/$name.out")
    listen=$(sed -n 's/^listen: //p' "$work/$name.out")
    sed 's/^/   /' "$work/$name.out"
}

say "Starting node-b: 6000 blocks, no traffic of its own. It continues the sequences that it is given."
start node-b 127.0.0.1:0 --size 6000 --load arrivals
b=$url b_listen=$listen b_pid=$pid

say "Starting node-a: 2500 blocks under load. Below 500 blocks it moves blocks to node-b."
start node-a 127.0.0.1:0 --size 2500 --load conversations --load-rest 10ms \
    --peers "node-b=$b_listen" --migrate-below 500 --migrate-to node-b
a=$url a_pid=$pid
await "the nodes are linked" linked "$a"
echo "   linked, with TLS on both sides"

say "Memory runs short on node-a. Waiting until cached blocks and sequences have moved by themselves."
await "cached blocks move" offloaded "$a"
await "sequences arrive at node-b" at_least "$b" arrived 3
await "their answers are completed there" at_least "$b" arrived_completed 3
echo "   node-b was given $(stat "$b" arrived) sequences, and has completed $(stat "$b" arrived_completed) of them"
migrations "$a" | head -8

say "Migrating one sequence by hand."
# A conversation that is complete before the order arrives cannot move: then the next one is taken.
by_hand() {
    id=$(stat "$a" longest_sequence)
    [ -n "$id" ] && "$kvpool" migrate --sequence-id "$id" --target-node node-b $(token) "$a" 2>/dev/null
}
await "a sequence is migrated by hand" by_hand
committed() { migrations "$1" | grep "$id" | grep -q committed; }
await "node-a has given sequence $id away" committed "$a"
await "node-b has taken it" committed "$b"
goal=$(($(stat "$b" arrived)))
await "all that arrived so far are completed" at_least "$b" arrived_completed "$goal"
[ "$(stat "$b" blocks_corrupt)" = 0 ] || fail "node-b found wrong bytes"
echo "   node-b compared $(stat "$b" arrived_blocks_verified) blocks with what node-a wrote before it continued: all are right"

say "Statistics of node-a, and then of node-b."
"$kvpool" stats $(token) "$a"
"$kvpool" stats $(token) "$b"

say "Killing node-b, without a warning."
kill -9 "$b_pid"
wait "$b_pid" 2>/dev/null || true
unlinked() { ! linked "$a"; }
await "node-a notices" unlinked
"$kvpool" audit $(token) "$a"
echo "   node-a goes on with what it has"

say "Starting node-b again on the same port. node-a links again by itself, and blocks move again."
start node-b "$b_listen" --size 6000 --load arrivals
b=$url b_pid=$pid
await "the nodes are linked again" linked "$a"
await "sequences are completed on the new node-b" at_least "$b" arrived_completed 3

say "Auditing both: every frame is counted, every byte that was read back is compared."
for node in "$a" "$b"; do
    "$kvpool" audit $(token) "$node"
    [ "$(stat "$node" blocks_corrupt)" = 0 ] || fail "wrong bytes on $node"
    [ "$(stat "$node" findings)" = 0 ] || fail "findings on $node"
done

say "Ending both in order, node-a first, while blocks still move."
ended() { ! kill -0 "$1" 2>/dev/null; }
for node in node-a node-b; do
    [ "$node" = node-a ] && pid=$a_pid || pid=$b_pid
    kill "$pid"
    await "$node ends" ended "$pid"
    wait "$pid" || fail "$node ended with code $?: something was lost or corrupt"
done
say "All is well."
