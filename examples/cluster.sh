#!/usr/bin/env bash
# A cluster on this machine: etcd as the directory of members, Redis as the shared tier, and three
# nodes. Prefixes that one node computed are hits on the others. A node is killed and restarted, and
# then Redis. Prints what it does, checks every step, and exits with 1 if anything is wrong.
#
#     examples/cluster.sh                # builds target/release/kvpool with the feature `etcd` first
#     KVPOOL=path/to/kvpool examples/cluster.sh
#
# Needs the Debian packages etcd-server and redis-server, and protobuf-compiler for the build; exits
# with 2 if one is missing. Takes less than a minute after the build.
set -euo pipefail
cd "$(dirname "$0")/.."

needs() { # needs PROGRAM PACKAGE
    command -v "$1" >/dev/null && return
    echo "There is no program $1. On Debian: apt-get install $2"
    missing=yes
}
missing=
needs etcd etcd-server
needs redis-server redis-server
[ -n "${KVPOOL:-}" ] || needs protoc protobuf-compiler
[ -z "$missing" ] || exit 2

kvpool=${KVPOOL:-${CARGO_TARGET_DIR:-target}/release/kvpool}
if [ -z "${KVPOOL:-}" ]; then
    echo "Building $kvpool. The first time, this takes some minutes."
    cargo build --quiet --release -p kvpool-cli --features redis,etcd
    echo "Built after $SECONDS s."
fi
# Settings of the shell must not reach the nodes.
for variable in $(env | sed -n 's/^\(KVPOOL_[A-Z_]*\)=.*/\1/p'); do unset "$variable"; done

SECONDS=0
work=$(mktemp -d)
pids=()
finish() {
    local code=$?
    trap - EXIT
    for pid in "${pids[@]:-}"; do
        [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true
    done
    if [ "$code" -ne 0 ]; then
        echo "FAILED. What the nodes said:"
        tail -n 20 "$work"/*.err 2>/dev/null || true
    fi
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '\n== %s\n' "$*"; }
fail() { echo "WRONG: $*"; exit 1; }
# Waits up to 120 seconds until a command succeeds: on a busy machine, a debug build is slow.
await() {
    local what=$1 end=$((SECONDS + 120))
    shift
    while ! "$@"; do
        [ "$SECONDS" -lt "$end" ] || fail "not within 120 seconds: $what"
        sleep 0.1
    done
}
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() { # prints a port on which nothing listens
    local port
    while port=$((20000 + RANDOM % 12000)) && listens "$port"; do :; done
    echo "$port"
}
token() { echo "--token-file $work/token"; }
# stat URL KEY: a number or a word of the statistics; empty if there is none.
stat() { "$kvpool" stats --json $(token) "$1" | sed -n "s/^ *\"$2\": \"\{0,1\}\([a-z0-9_]*\)\"\{0,1\},\{0,1\}$/\1/p" | head -1; }
at_least() { local is; is=$(stat "$1" "$2"); [ "${is:-0}" -ge "$3" ]; }
is() { [ "$(stat "$1" "$2")" = "$3" ]; }
# more URL KEY BY: waits until a counter has grown.
more() {
    local before
    before=$(stat "$1" "$2")
    await "$2 of $1 grows by $3" at_least "$1" "$2" $((${before:-0} + $3))
}

# start NAME FLAGS...: starts a node. Sets `pid` and `url`.
start() {
    local name=$1
    shift
    : >"$work/$name.out"
    "$kvpool" serve --name "$name" --size 12000 --listen 127.0.0.1:0 --admin 127.0.0.1:0 $(token) \
        --membership "etcd://127.0.0.1:$etcd_port/example" --membership-lease 4s \
        --tier "redis://127.0.0.1:$redis_port" --tier-namespace "example, revision 1" --tier-patience 1s \
        --load conversations --load-rest 20ms "$@" >"$work/$name.out" 2>>"$work/$name.err" &
    pid=$!
    pids+=("$pid")
    await "$name starts" grep -q '^listen: ' "$work/$name.out"
    url=$(sed -n 's/^admin: //p' "$work/$name.out")
    sed 's/^/   /' "$work/$name.out"
}
start_redis() {
    redis-server --port "$redis_port" --bind 127.0.0.1 --save "" --appendonly no --dir "$work" \
        --maxmemory 256mb --maxmemory-policy allkeys-lru >/dev/null &
    redis_pid=$!
    pids+=("$redis_pid")
    await "Redis starts" listens "$redis_port"
}
all() { printf '%s\n' "$a" "$b" "$c"; }
name() { # of the node at an address
    case $1 in "$a") echo node-a ;; "$b") echo node-b ;; *) echo node-c ;; esac
}
audit() { # of the nodes at these addresses
    local node
    for node; do
        "$kvpool" audit $(token) "$node" | sed "s/^/   $(name "$node"): /"
        is "$node" blocks_corrupt 0 || fail "wrong bytes on $node"
        is "$node" findings 0 || fail "findings on $node"
        is "$node" bad_values 0 || fail "wrong values of the tier on $node"
    done
}

etcd_port=$(free_port) etcd_peers=$(free_port) redis_port=$(free_port)
say "Starting etcd and Redis on the loopback, at ports $etcd_port and $redis_port."
etcd --name example --data-dir "$work/etcd" --initial-cluster "example=http://127.0.0.1:$etcd_peers" \
    --listen-client-urls "http://127.0.0.1:$etcd_port" --advertise-client-urls "http://127.0.0.1:$etcd_port" \
    --listen-peer-urls "http://127.0.0.1:$etcd_peers" --initial-advertise-peer-urls "http://127.0.0.1:$etcd_peers" \
    >"$work/etcd.log" 2>&1 &
pids+=("$!")
await "etcd starts" listens "$etcd_port"
start_redis
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$work/token")

say "Starting node-a under load. It stores each block that it computes in Redis, and publishes its cache's events."
start node-a --kv-events tcp://127.0.0.1:0
a=$url a_pid=$pid
await "node-a stores blocks" at_least "$a" stored_blocks 2000
echo "   node-a has stored $(stat "$a" stored_blocks) blocks"

say "Starting node-b and node-c, which only read the tier: what they find there, node-a has computed."
start node-b --tier-policy read-only
b=$url b_pid=$pid
start node-c --tier-policy read-only
c=$url c_pid=$pid
for node in "$b" "$c"; do
    await "blocks come back on $node" at_least "$node" fetched_blocks 500
    is "$node" stored_blocks 0 || fail "$node has stored blocks"
done
echo "   node-b has taken $(stat "$b" fetched_blocks) blocks from the tier, node-c $(stat "$c" fetched_blocks), and neither has stored one"

say "The three have found each other in etcd: no node was told of a peer."
for node in $(all); do await "$node is linked with both others" is "$node" peers_up 2; done
"$kvpool" stats $(token) "$a" | grep -E '^ *(members|node-[bc]) ' | sed 's/^/   /'

say "Killing node-b, without a warning. Its entry in etcd expires after 4 s."
kill -9 "$b_pid"
wait "$b_pid" 2>/dev/null || true
await "node-a drops node-b" is "$a" peers_up 1
audit "$a" "$c"
echo "   both others go on"

say "Starting node-b again, on another port and with an empty cache. From now on it stores blocks too."
start node-b
b=$url b_pid=$pid
await "blocks come back on the new node-b" at_least "$b" fetched_blocks 500
for node in $(all); do await "$node is linked with both others" is "$node" peers_up 2; done
await "node-b stores blocks" at_least "$b" stored_blocks 100
echo "   node-b has taken $(stat "$b" fetched_blocks) blocks from the tier, and has stored $(stat "$b" stored_blocks) new ones"

say "Killing Redis. Each node notices, and serves its requests without the tier."
kill -9 "$redis_pid"
wait "$redis_pid" 2>/dev/null || true
for node in $(all); do await "the circuit breaker of $node opens" is "$node" breaker open; done
for node in $(all); do more "$node" completed 5; done
echo "   the circuit breakers are open; all three have completed further conversations"

say "Starting Redis again, empty. The nodes try it again after 5 s, and fill it."
start_redis
for node in "$a" "$b"; do more "$node" stored_blocks 500; done
more "$c" fetched_blocks 200
echo "   node-c takes blocks from the tier again: $(stat "$c" fetched_blocks) by now"

say "Auditing all: every frame is counted, and every byte that was read back was compared."
audit $(all)
for node in "$a" "$b" "$c"; do
    echo "   $(name "$node"): $(stat "$node" completed) conversations completed, $(stat "$node" tokens_verified) tokens compared, 0 wrong"
done
at_least "$a" batches 1 || fail "node-a has published no events"
echo "   node-a: $(stat "$a" events) events of its cache published"

say "Ending all in order: each leaves the directory, and stores its last blocks."
ended() { ! kill -0 "$1" 2>/dev/null; }
for pid in "$c_pid" "$b_pid" "$a_pid"; do
    kill "$pid"
    await "a node ends" ended "$pid"
    wait "$pid" || fail "a node ended with code $?: something was lost or corrupt"
done
say "All is well, after $SECONDS s."
