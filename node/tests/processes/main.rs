//! Migration between real processes: nodes that are stopped, killed and cut off at each step, and a
//! server under the load of clients that die.
//!
//! The children are this test's own program, started again: [`child`] is their entry. They read
//! commands line by line, and print answers and events. No production code has a hook for these
//! tests: faults are signals, and what the [relay](relay) between two nodes does.
//!
//! | file | contents |
//! |---|---|
//! | `lines` | the lines that a child prints, and the clock that all processes share |
//! | `memory` | heap, resident memory and descriptors of a process |
//! | `content` | which tokens a sequence has, by its id |
//! | `state` | counts of a node |
//! | `child` | a node that obeys commands |
//! | `process` | the parent's handle of a child: commands, events, signals |
//! | `relay` | passes on what two nodes send, sees each message, and stops at the chosen one |
//! | `fault` | which fault happens at which step |
//! | `case` | one run with one fault, and what must be true afterwards |
//! | `faults` | the tests: all cases |
//! | `crowd` | clients and a server that send sequences to and fro |
//! | `ledger` | who owned which sequence when, by the events of all processes |
//! | `clients` | the test under load |
//!
//! `KVPOOL_FAULTS=commit/before/target/kill` runs the cases whose names contain this text, and prints
//! the messages of each. `KVPOOL_LOAD_SECONDS=600` makes the load last longer.
#![cfg(target_os = "linux")]

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod kv;

mod case;
mod child;
mod clients;
mod content;
mod crowd;
mod fault;
mod faults;
mod ledger;
mod lines;
mod memory;
mod process;
mod relay;
mod state;

#[global_allocator]
static HEAP: memory::Counting = memory::Counting;

/// Not a test by itself: the entry of the children.
#[test]
fn child() {
    let Ok(role) = std::env::var(process::ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["node", name, peer, address] => child::run(name, peer, address),
        ["server", seed] => crowd::serve(seed.parse().unwrap()),
        ["clients", server, first, count, process] => {
            let [first, count] = [first, count].map(|number| number.parse().unwrap());
            crowd::join(server.parse().unwrap(), first, count, process.parse().unwrap());
        }
        _ => panic!("unknown role {role}"),
    }
}
