//! Messages of `kvpool serve` on the standard error.

use super::common;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::live::{Node, run, said, wait_until};
use rustix::process::Signal;
use serde_json::Value;

fn objects(text: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    text.lines().map(parse).collect()
}

#[test]
fn every_line_is_an_object_on_request() {
    let node = Node::start("serve --name n1 --size 1000 --log json --peers away=127.0.0.1:1");
    node.signal(Signal::HUP);
    wait_until("the peer was tried", || {
        node.json("stats")["extra"]["peers"]["away"].as_str().is_some_and(|state| state.contains("refused"))
    });
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0));
    let objects = objects(&errors);
    for object in &objects {
        let mut names = common::keys(object);
        names.retain(|name| !["timestamp", "level", "target", "fields"].contains(name));
        assert!(names.is_empty() && object["fields"]["message"].is_string(), "{object}");
    }
    let of = |message: &str| {
        let found =
            objects.iter().find(|object| object["fields"]["message"].as_str().unwrap().starts_with(message));
        found.unwrap_or_else(|| panic!("no {message:?} in {errors}"))
    };
    assert_eq!((&of("reloaded; ")["level"], &of("no link")["level"]), (&"INFO".into(), &"WARN".into()));
    assert_eq!(of("no link")["fields"]["peer"], "away");
    assert!(of("no link")["fields"]["error"].as_str().unwrap().contains("refused"));
    // Also what ends it at the start.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let output = run(&format!("serve --size 1000 --log json --admin {address}"));
    assert_eq!(output.status.code(), Some(2));
    let objects = self::objects(&said(&output));
    assert_eq!((objects.len(), &objects[0]["level"]), (1, &"ERROR".into()));
    assert!(objects[0]["fields"]["message"].as_str().unwrap().contains("in use"), "{objects:?}");
}

#[test]
fn levels_are_chosen() {
    let errors = |levels: &str| {
        let node = Node::start(&format!(
            "serve --name n1 --size 1000 --log-level {levels} --peers away=127.0.0.1:1"
        ));
        wait_until("the peer was tried", || {
            node.json("stats")["extra"]["peers"]["away"]
                .as_str()
                .is_some_and(|state| state.contains("refused"))
        });
        node.end(Signal::TERM).1
    };
    assert!(errors("warn").contains("kvpool: no link, peer: away, address: 127.0.0.1:1, error: "));
    assert_eq!(errors("off"), "");
    assert_eq!(errors("warn,kvpool_node=error"), "");
    let output = run("serve --size 1000 --log-level loud");
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("\"loud\" is no level"), "{}", said(&output));
    assert_eq!(run("serve --size 1000 --log xml").status.code(), Some(2));
}

#[test]
fn a_repeated_reason_is_told_once_a_second() {
    for format in ["text", "json"] {
        let node = Node::start(&format!("serve --name n1 --size 1000 --log {format}"));
        let (start, mut connections) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(3) || connections <= 20 {
            // No peer speaks like this.
            let mut stream = TcpStream::connect(&node.listen).unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
            connections += 1;
        }
        let seconds = start.elapsed().as_secs() as usize + 1;
        let (_, errors) = node.end(Signal::TERM);
        let lines = errors.lines().filter(|line| line.contains("a connection was refused")).count();
        assert!((1..=seconds + 1).contains(&lines), "{lines} lines in {seconds} s: {errors}");
    }
}
