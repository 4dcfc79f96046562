//! Servers of other projects, on ports of the loopback: Redis and etcd.
//!
//! They are the programs `redis-server` and `etcd` of the path. Tests without them print that they are
//! skipped; with the variables `KVPOOL_REDIS` or `KVPOOL_ETCD`, which name the programs, they fail.
#![allow(dead_code, reason = "builds without a feature use a part")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::live::wait_until;

/// A server that is killed with this value.
pub struct Server {
    start: Box<dyn Fn(&Path) -> Command>,
    ports: [u16; 2],
    data: TempDir,
    child: Option<Child>,
}

/// Returns a port that is free now; another process could take it before the server does.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns a program that can be run, by its name or by a variable.
fn program(name: &str, variable: &str, package: &str) -> Option<String> {
    let named = std::env::var(variable).ok();
    let program = named.clone().unwrap_or_else(|| name.to_owned());
    match Command::new(&program).arg("--version").output() {
        Ok(_) => Some(program),
        Err(error) if named.is_none() && error.kind() == ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no program {name}; it is in Debian's package {package}");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

impl Server {
    /// Prepares a Redis server with a bounded memory; `None` if there is no program.
    pub fn redis() -> Option<Self> {
        let program = program("redis-server", "KVPOOL_REDIS", "redis-server")?;
        let port = free_port();
        let start = move |data: &Path| {
            let mut command = Command::new(&program);
            command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
            command.args(["--appendonly", "no", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]);
            command.arg("--dir").arg(data);
            command
        };
        Some(Self {
            start: Box::new(start),
            ports: [port, 0],
            data: tempfile::tempdir().unwrap(),
            child: None,
        })
    }

    /// Prepares an etcd whose leases can be short; `None` if there is no program.
    pub fn etcd() -> Option<Self> {
        let program = program("etcd", "KVPOOL_ETCD", "etcd-server")?;
        let ports = [free_port(), free_port()];
        let start = move |data: &Path| {
            let [client, peer] = ports.map(|port| format!("http://127.0.0.1:{port}"));
            let mut command = Command::new(&program);
            command.arg("--name=test").arg(format!("--data-dir={}", data.join("etcd").display()));
            command.args([
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
            ]);
            command.args([
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
            ]);
            command.arg(format!("--initial-cluster=test={peer}"));
            // Leases of a second, and a leader at once.
            command.args(["--heartbeat-interval=50", "--election-timeout=500"]);
            command
        };
        Some(Self { start: Box::new(start), ports, data: tempfile::tempdir().unwrap(), child: None })
    }

    /// Starts it, and waits until it listens.
    pub fn run(&mut self) {
        let mut command = (self.start)(self.data.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        wait_until("the server listens", || TcpStream::connect(("127.0.0.1", self.ports[0])).is_ok());
    }

    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), signal).unwrap();
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Returns the number of keys that a Redis server has.
    pub fn keys(&self) -> u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port())).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"DBSIZE\r\n").unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        String::from_utf8(answer).unwrap().trim().strip_prefix(':').unwrap().parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
