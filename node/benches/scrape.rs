//! Time of an allocation and a free while the metrics of the node are scraped, beside the same
//! without scrapes.
//!
//! Two pinned threads allocate and free. A window lasts a second; windows with no scrape, one
//! scrape and a hundred scrapes take turns. Time is processor time of the threads: it contains
//! every miss that a scrape causes in them, and not the time that a core was taken from them. A
//! ratio is the median over rounds of a window over that without scrapes beside it.
//!
//! `cargo bench -p kvpool-node --bench scrape [ROUNDS]`

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvpool::{AllocRequest, KvLayout, Pool};
use kvpool_node::Node;
use kvpool_node::admin::{AdminServer, Limits};
use kvpool_node::settings::Address;

const BLOCKS: usize = 16_384;
/// Blocks that a thread holds at a time.
const HELD: usize = 64;
const THREADS: usize = 2;
const WINDOW: Duration = Duration::from_secs(1);
const SCRAPES: [u32; 3] = [0, 1, 100];

/// Scrapes once. Returns the bytes of the answer.
fn scrape(address: SocketAddr) -> usize {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("# EOF"), "a part of an answer");
    answer.len()
}

/// Allocates and frees until the window is over. Returns nanoseconds of processor time per pair.
fn allocate(pool: &Pool, begin: &Barrier) -> f64 {
    let mut held = Vec::with_capacity(HELD);
    begin.wait();
    let (end, before, mut pairs) = (Instant::now() + WINDOW, support::thread_time(), 0u64);
    while Instant::now() < end {
        for _ in 0..16 {
            held.extend((0..HELD).map(|_| pool.allocate(AllocRequest::new(1)).expect("free blocks")));
            held.clear();
        }
        pairs += 16 * HELD as u64;
    }
    (support::thread_time() - before).as_nanos() as f64 / pairs as f64
}

/// Returns the mean of the threads.
fn window(pool: &Pool, address: SocketAddr, scrapes: u32) -> f64 {
    let begin = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let begin = &begin;
                scope.spawn(move || {
                    support::pin(thread);
                    allocate(pool, begin)
                })
            })
            .collect();
        begin.wait();
        let began = Instant::now();
        for number in 0..scrapes {
            let due = WINDOW * (2 * number + 1) / (2 * scrapes);
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            scrape(address);
        }
        let times = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        times.sum::<f64>() / THREADS as f64
    })
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("scrape: to measure, run `cargo bench -p kvpool-node --bench scrape`");
        return;
    }
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(15);
    let pool = Pool::builder(KvLayout::named("tiny").expect("a known name")).blocks(BLOCKS);
    let pool = pool.build().expect("memory");
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().expect("threads");
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = AdminServer::bind(&address, None, Limits::default()).expect("a free port");
    let Address::Tcp { host, port } = server.address().address() else { unreachable!("a port") };
    let at = SocketAddr::new(host.parse().expect("an IP address"), *port);
    let node = Node::builder(pool.clone()).name("scraped").admin(server);
    let _node = runtime.block_on(node.start()).expect("it starts");
    println!("{THREADS} threads allocate and free; an answer has {} bytes", scrape(at));
    let (mut times, mut ratios) = ([vec![], vec![], vec![]], [vec![], vec![]]);
    for round in 0..rounds {
        let mut got = [0.0; 3];
        for turn in 0..3 {
            let way = (turn + round) % 3;
            got[way] = window(&pool, at, SCRAPES[way]);
            times[way].push(got[way]);
        }
        (0..2).for_each(|more| ratios[more].push(got[more + 1] / got[0]));
    }
    assert_eq!(pool.free_blocks(), BLOCKS);
    let [without, one, hundred] = times.map(|mut times| support::median(&mut times));
    let [of_one, of_hundred] = ratios.map(|mut ratios| support::median(&mut ratios));
    println!("without a scrape          {without:7.2} ns a pair");
    println!("a scrape per second       {one:7.2} ns a pair   {of_one:.3} of it");
    println!("a hundred per second      {hundred:7.2} ns a pair   {of_hundred:.3} of it");
}
