//! The test under load: 64 clients of one server, some of which are killed all the time.

use std::time::{Duration, Instant};

use crate::ledger::{Ledger, Owner, Totals};
use crate::lines::now;
use crate::process::{Process, wait_until};

/// Sets how long the load lasts, in seconds.
const SECONDS: &str = "KVPOOL_LOAD_SECONDS";

/// Sets the seed of the kills.
const SEED: &str = "KVPOOL_LOAD_SEED";

/// Processes with clients, and clients of each.
const PROCESSES: usize = 16;
const CLIENTS: usize = 4;

/// Longest time between two moments at which nothing is open, when memory is measured.
const ROUND: Duration = Duration::from_secs(30);

/// Time between two kills, in milliseconds.
const KILLS_MS: std::ops::Range<u64> = 20..200;

/// Growth of the server's heap that is no leak: what it remembers of the latest migrations has no fixed
/// size.
const HEAP_SLACK: usize = 256 << 10;

/// Growth of resident memory that is no leak: the allocator's own.
const RESIDENT_SLACK: usize = 16 << 20;

/// Growth of the number of allocations of a size that is printed.
const GROWTH_SHOWN: usize = 50;

/// Descriptors that the server opens for itself.
const DESCRIPTORS_SLACK: usize = 4;

fn number(variable: &str, otherwise: u64) -> u64 {
    let Ok(text) = std::env::var(variable) else { return otherwise };
    text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number"))
}

/// Memory of the server while nothing is open.
#[derive(Clone, Copy, Debug)]
struct Measured {
    heap: usize,
    resident: usize,
}

struct Load {
    server: Process,
    crowd: Vec<Process>,
    /// The number of each process of the crowd in the ledger.
    numbers: Vec<usize>,
    ledger: Ledger,
    totals: Totals,
    random: fastrand::Rng,
    killed: usize,
    /// Of the server, with all clients linked, before the first one is killed.
    descriptors: usize,
}

impl Load {
    fn start(seed: u64) -> Self {
        let server = Process::start("server", &format!("server {seed}"));
        let mut ledger = Ledger::default();
        ledger.owners.push(Owner { clients: 0..0, died: None });
        let random = fastrand::Rng::with_seed(seed);
        let (crowd, numbers, totals) = (Vec::new(), Vec::new(), Totals::default());
        let mut load = Self { server, crowd, numbers, ledger, totals, random, killed: 0, descriptors: 0 };
        for place in 0..PROCESSES {
            let (process, number) = load.join(place);
            load.crowd.push(process);
            load.numbers.push(number);
        }
        wait_until("all clients are linked", || load.server.state()["up"] == PROCESSES * CLIENTS);
        load.descriptors = load.server.state()["descriptors"];
        load
    }

    /// Starts the clients of a place.
    fn join(&mut self, place: usize) -> (Process, usize) {
        let (number, first) = (self.ledger.owners.len(), place * CLIENTS);
        self.ledger.owners.push(Owner { clients: first..first + CLIENTS, died: None });
        let role = format!("clients {} {first} {CLIENTS} {number}", self.server.greeting);
        (Process::start(&format!("clients {first}.. ({number})"), &role), number)
    }

    fn tell_all(&mut self, command: &str) {
        for process in &mut self.crowd {
            assert_eq!(process.ask(command), "done");
        }
    }

    /// Kills one process with its clients, and starts another one in its place.
    fn kill_one(&mut self) {
        let place = self.random.usize(0..PROCESSES);
        self.crowd[place].kill();
        let (process, number) = self.join(place);
        let dead = std::mem::replace(&mut self.crowd[place], process);
        let dead_number = std::mem::replace(&mut self.numbers[place], number);
        self.ledger.owners[dead_number].died = dead.died();
        self.ledger.add(dead_number, dead.all_events());
        self.killed += CLIENTS;
        assert_eq!(self.crowd[place].ask("go"), "done");
    }

    /// Waits until nothing is open anywhere. Twice, because a sequence may move between two looks.
    fn drain(&mut self) {
        let busy = ["waiting", "running", "open", "used", "in_transfer", "quarantined", "unavailable"];
        let mut quiet = 0;
        let mut last = String::new();
        let began = Instant::now();
        while quiet < 2 {
            let mut is_busy = false;
            for process in std::iter::once(&mut self.server).chain(&mut self.crowd) {
                let state = process.state();
                if busy.iter().any(|&name| state[name] > 0) {
                    is_busy = true;
                    last = format!("{}: {state:?}", process.name);
                }
            }
            quiet = if is_busy { 0 } else { quiet + 1 };
            assert!(began.elapsed() < 2 * crate::process::PATIENCE, "it never drains: {last}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checks everything while nothing is open, and measures the server.
    fn settle(&mut self) -> Measured {
        let clients = PROCESSES * CLIENTS;
        wait_until("all clients are linked", || self.server.state()["up"] == clients);
        // Connections of clients that were killed are closed.
        let most = self.descriptors + DESCRIPTORS_SLACK;
        wait_until("descriptors are closed", || self.server.state()["descriptors"] <= most);
        for process in std::iter::once(&mut self.server).chain(&mut self.crowd) {
            assert_eq!(process.ask("audit"), "sound", "{}", process.name);
            assert_eq!(process.state()["bad_blocks"], 0, "{}", process.name);
        }
        self.ledger.add(0, self.server.take_events());
        for (process, &number) in self.crowd.iter().zip(&self.numbers) {
            self.ledger.add(number, process.take_events());
        }
        self.ledger.settle(&mut self.totals);
        let state = self.server.state();
        Measured { heap: state["heap"], resident: state["resident"] }
    }

    /// Runs the load for some time, and then until nothing is open.
    fn round(&mut self, time: Duration) -> Measured {
        let began = Instant::now();
        self.tell_all("go");
        while began.elapsed() < time {
            let pause = Duration::from_millis(self.random.u64(KILLS_MS));
            std::thread::sleep(pause.min(time.saturating_sub(began.elapsed())));
            self.kill_one();
        }
        self.tell_all("pause");
        self.drain();
        self.settle()
    }
}

/// Clients that are killed lose what they own; nothing else is lost, no sequence runs twice, and the
/// server has in the end what it had at half time.
#[test]
fn clients_that_are_killed_lose_only_their_own() {
    let (seconds, seed) = (number(SECONDS, 5), number(SEED, 17));
    println!("{seconds} s, seed {seed}: {SECONDS}={seconds} {SEED}={seed}");
    let time = Duration::from_secs(seconds);
    let halves = (time.as_secs_f64() / 2.0 / ROUND.as_secs_f64()).ceil().max(1.0) as u32;
    let mut load = Load::start(seed);
    let (began, begun_ns) = (Instant::now(), now());
    let (mut measured, mut sizes) = (Vec::new(), Vec::new());
    for _ in 0..2 * halves {
        measured.push(load.round(time / (2 * halves)));
        sizes.push(load.server.counts("sizes"));
        let (last, totals, killed) = (measured[measured.len() - 1], load.totals, load.killed);
        println!(
            "{:>6.1} s: {killed} clients killed, {totals:?}, server: {last:?}",
            began.elapsed().as_secs_f64()
        );
    }
    let (half, end) = (measured[halves as usize - 1], measured[2 * halves as usize - 1]);
    // A busy machine serves few sequences in that time.
    while load.totals.inherited == 0 && began.elapsed() < 3 * time + crate::process::PATIENCE {
        load.round(time / (2 * halves));
    }
    println!("server: {:?}", load.server.ask("state"));
    println!("half time: {half:?}\nend:       {end:?}, after {} ms", (now() - begun_ns) / 1_000_000);
    for (size, count) in &sizes[2 * halves as usize - 1] {
        let before = sizes[halves as usize - 1][size];
        if *count > before + GROWTH_SHOWN {
            println!("allocations of {size} bytes and more: {before} at half time, {count} at the end");
        }
    }
    let Totals { sequences, moves, inherited, .. } = load.totals;
    assert!(load.killed > 0 && inherited > 0 && moves > sequences, "{:?}", load.totals);
    assert!(end.heap <= half.heap + half.heap / 16 + HEAP_SLACK, "the heap grows");
    assert!(end.resident <= half.resident + half.resident / 8 + RESIDENT_SLACK, "resident memory grows");
}
