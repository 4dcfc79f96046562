//! The target's process, and the source's end of it: each line that it reads it answers by a line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};

use kvpool::transport::{Grant, SourceState, Tag, TransferState, Transport};
use kvpool_node::transport::nixl::{NixlSettings, NixlTransport};

use super::raw::Agent;
use super::{FRAMES, ROLE, contents, run, runs, storage, support, tensors};

/// The process, which has told its metadata.
pub struct Target {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// Of the transport.
    pub metadata: Vec<u8>,
    /// Of the agent of the baseline.
    pub agent: Vec<u8>,
    pub tensors: Vec<(usize, usize)>,
}

impl Target {
    pub fn start() -> Self {
        let program = std::env::current_exe().expect("a path");
        let mut command = Command::new(program);
        let command = command.env(ROLE, "target").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (metadata, agent, tensors) = (Vec::new(), Vec::new(), Vec::new());
        let mut target = Self { child, to, from: BufReader::new(from), metadata, agent, tensors };
        target.metadata = from_hex(&target.answer());
        target.agent = from_hex(&target.answer());
        let line = target.answer();
        let numbers: Vec<usize> = line.split(' ').map(|number| number.parse().expect("a number")).collect();
        target.tensors = numbers.chunks(2).map(|tensor| (tensor[0], tensor[1])).collect();
        target
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        assert!(self.from.read_line(&mut line).expect("a line") > 0, "the target ended");
        line.trim().to_owned()
    }

    fn ask(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("the target reads");
        assert_eq!(self.answer(), "ok", "{line}");
    }

    pub fn meet(&mut self, transport: &[u8], agent: &[u8]) {
        self.ask(&format!("meet {} {}", to_hex(transport), to_hex(agent)));
    }

    /// Allows the source to write all frames.
    pub fn grant(&mut self, tag: u64) {
        self.ask(&format!("grant {tag}"));
    }

    pub fn revoke(&mut self, tag: u64) {
        self.ask(&format!("revoke {tag}"));
    }

    /// Lets the agent of the baseline poll from now on, or not.
    pub fn poll(&mut self, is_on: bool) {
        self.ask(if is_on { "poll on" } else { "poll off" });
    }

    /// Compares all frames with those of a round, which came in runs of this length.
    pub fn check(&mut self, round: u64, len: u32) {
        self.ask(&format!("check {round} {len}"));
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let byte = |place: usize| u8::from_str_radix(&text[2 * place..][..2], 16).expect("two digits");
    (0..text.len() / 2).map(byte).collect()
}

/// Serves the source until it ends.
pub fn serve() {
    support::pin(1);
    let storage = storage();
    let transport = NixlTransport::new(&NixlSettings::default()).expect("the library is there");
    let region = transport.register(&storage).expect("host memory");
    let agent = Agent::new("plain-target", &tensors(&*storage), FRAMES as usize);
    println!("{}\n{}", to_hex(&transport.metadata()), to_hex(&agent.metadata()));
    let numbers: Vec<String> =
        tensors(&*storage).iter().map(|(start, bytes)| format!("{start} {bytes}")).collect();
    println!("{}", numbers.join(" "));
    // A thread of its own reads, because the agent has to poll meanwhile.
    let (line, lines) = channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|read| line.send(read))
    });
    let (mut peer, mut polls) = (None, false);
    loop {
        let line = match polls {
            true => match lines.try_recv() {
                Ok(line) => line,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    agent.serve();
                    continue;
                }
            },
            false => match lines.recv() {
                Ok(line) => line,
                Err(_) => return,
            },
        };
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["meet", metadata, other] => {
                peer = Some(transport.add_peer(&from_hex(metadata)).expect("the source's metadata"));
                agent.load(&from_hex(other));
            }
            ["grant", tag] => {
                let (tag, runs) = (Tag(tag.parse().expect("a tag")), vec![run(0, FRAMES)]);
                let grant =
                    Grant { tag, region, runs, peer: peer.expect("they have met"), hold: Arc::new(()) };
                // SAFETY: this process uses the frames only after the revoke.
                unsafe { transport.grant(grant) }.expect("a free tag");
            }
            ["revoke", tag] => {
                let state = transport.revoke(Tag(tag.parse().expect("a tag")), SourceState::Over);
                assert!(matches!(state, TransferState::Done), "{state:?}");
            }
            ["poll", on] => polls = on == "on",
            ["check", round, len] => {
                let (round, len) = (round.parse().expect("a number"), len.parse().expect("a number"));
                let (mut wanted, mut got) = (vec![0; storage.layout().packed_bytes()], Vec::new());
                got.resize(wanted.len(), 0);
                let (local, remote) = runs(len);
                for (from, to) in local.iter().zip(&remote) {
                    for (from, to) in from.frames().zip(to.frames()) {
                        contents(from.0, round, &mut wanted);
                        // SAFETY: the transfer is over.
                        unsafe { storage.pack(&[run(to.0, 1)], &mut got) }.expect("a frame");
                        assert!(wanted == got, "frame {} of round {round}", to.0);
                    }
                }
            }
            _ => panic!("unknown line {line}"),
        }
        println!("ok");
    }
}
