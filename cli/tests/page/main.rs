//! The live page in Chromium.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

mod browser;
#[path = "../../../node/tests/tier/faulty.rs"]
#[allow(dead_code)]
mod faulty;

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use browser::Browser;
use common::live::{Node, program};
use faulty::{Fault, Faulty};
use kvpool_node::admin::{AdminServer, Limits, PoolAdmin, Reporters};
use kvpool_node::tier::{SharedTier, TierPolicy, TierReporter, TierSettings, Tiered, TieredSettings};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Functions that find what is wrong on a page.
const CHECKS: &str = include_str!("checks.js");

/// Checks what holds for every state of the page.
#[track_caller]
fn check(browser: &mut Browser, what: &str) {
    for function in ["overflows", "faint"] {
        let found = browser.evaluate(&format!("({CHECKS}).{function}()"));
        assert_eq!(found, Value::Array(vec![]), "{what}: {function}");
    }
    for (role, name) in browser.accessible() {
        let is_named = ["button", "textbox", "img", "link", "table", "region", "columnheader", "heading"]
            .contains(&role.as_str());
        assert!(!is_named || !name.trim().is_empty(), "{what}: a {role} without a name");
    }
    assert!(browser.complaints.is_empty(), "{what}: {:?}", browser.complaints);
}

#[test]
fn the_page_follows_a_node_in_both_schemes_and_widths() {
    let Some(mut browser) = Browser::start() else { return };
    let node = Node::start(
        "serve --name gpu-node-1 --size 4000 --load conversations --load-rest 20ms --peers gpu-node-2=127.0.0.1:1",
    );
    for scheme in ["light", "dark"] {
        for width in [360, 1440] {
            let what = format!("{scheme}-{width}");
            browser.open(&node.url, width, scheme, true);
            browser.wait_for("document.title.includes('gpu-node-1')");
            browser.wait_for("document.body.innerText.includes('gpu-node-2')");
            browser.wait_for("document.querySelectorAll('#tiles dt').length == 10");
            browser.wait_for("document.querySelectorAll('figure polyline, figure polygon').length >= 3");
            browser.wait_for("document.querySelectorAll('#legend li').length >= 3");
            browser.wait_for("/sequence\\s+\\d+\\s+\\d/.test(document.getElementById('owners').innerText)");
            browser.wait_for("/layers.*bytes a block/.test(document.getElementById('layout').textContent)");
            browser.wait_for("!document.getElementById('tiles').innerText.includes('–')");
            assert_eq!(browser.evaluate("document.getElementById('state').textContent"), "serving");
            check(&mut browser, &what);
            browser.picture(&what);
            // The map changes.
            let cells = "document.getElementById('map').toDataURL()";
            let before = browser.evaluate(cells).to_string();
            browser.wait_for(&format!("{cells} != {before}"));
        }
    }
    // By keyboard alone: every stop has a visible focus, and the map is read cell by cell.
    browser.evaluate("document.activeElement.blur()");
    let mut stops = Vec::new();
    for _ in 0..12 {
        browser.press("Tab");
        let stop = browser.evaluate(&format!("({CHECKS}).focus()"));
        assert_eq!(stop["visible"], true, "{stop}");
        let name = stop["name"].as_str().unwrap().to_owned();
        if name == "map" {
            browser.press("ArrowRight");
            browser.press("ArrowRight");
            browser.wait_for("document.getElementById('cell').textContent.startsWith('Frame')");
            check(&mut browser, "the map is read");
        }
        if name == "compact" {
            browser.press("Enter");
            browser.wait_for("document.getElementById('compacted').textContent.startsWith('moved')");
        }
        stops.push(name);
    }
    for name in ["compact", "map"] {
        assert!(stops.iter().any(|stop| stop == name), "{name} is not among {stops:?}");
    }
    assert_eq!(node.end(Signal::TERM).0, Some(0));
}

/// The charts begin with what the node has kept; a sequence under the pointer is highlighted; cells of
/// several frames show what is mixed.
#[test]
fn the_page_begins_with_the_history_and_shows_sequences_and_mixed_cells() {
    let Some(mut browser) = Browser::start() else { return };
    let node = Node::start("serve --name n1 --size 30000 --load conversations --load-rest 5ms");
    // Without any follower: the node keeps samples by itself.
    std::thread::sleep(Duration::from_secs(25));
    for (scheme, width) in [("light", 1440), ("dark", 360)] {
        browser.open(&node.url, width, scheme, true);
        browser.wait_for("history.length > 0 && stats && map && owned === null");
        let reach = browser.evaluate("(stats.time_ms - history[0].at) / 1000").as_f64().unwrap();
        assert!((15.0..120.0).contains(&reach), "the charts begin {reach} s ago");
        assert_eq!(
            browser.evaluate("[map.group, map.letters, map.cells.length == 2 * map.count]"),
            json!([8, 2, true])
        );
        browser.wait_for("document.querySelector('#legend .mixed')");
        // What comes later moves the map.
        browser.wait_for("document.getElementById('layout').textContent && version");
        let place = browser.evaluate(
            "(() => {
                const box = canvas.getBoundingClientRect();
                const at = map.cells.findIndex((cell, at) => at % 2 === 0 && classOf(cell) === 'o') / 2;
                return [box.left + (at % columns + 0.5) * side, box.top + (Math.floor(at / columns) + 0.5) * side];
            })()",
        );
        let before = browser.evaluate("canvas.toDataURL()");
        browser
            .call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": place[0], "y": place[1] }));
        browser.wait_for("/; sequence \\d+/.test(document.getElementById('cell').textContent)");
        assert_ne!(browser.evaluate("canvas.toDataURL()"), before);
        browser.picture(&format!("sequence-{scheme}-{width}"));
        check(&mut browser, &format!("mixed, {scheme}"));
    }
    node.end(Signal::TERM);
}

#[test]
fn a_node_that_goes_away_is_told_and_followed_again() {
    let Some(mut browser) = Browser::start() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |size: &str| Node::start(&format!("serve --name n1 --size {size} --admin 127.0.0.1:{port}"));
    let node = start("3000");
    browser.open(&node.url, 1440, "light", true);
    let used = "document.getElementById('tiles').innerText.includes";
    browser.wait_for(&format!("{used}('of 3,000')"));
    node.signal(Signal::KILL);
    drop(node);
    browser.wait_for("document.getElementById('state').textContent == 'not reachable'");
    browser.wait_for("document.getElementById('link').textContent.includes('figures of')");
    assert_eq!(browser.evaluate(&format!("{used}('of 3,000')")), true, "the last figures stay");
    browser.picture("away");
    check(&mut browser, "away");
    let node = start("5000");
    browser.wait_for(&format!("{used}('of 5,000')"));
    browser.wait_for("document.getElementById('state').textContent == 'serving'");
    browser.wait_for("!document.body.classList.contains('stale')");
    check(&mut browser, "back");
    // A connection that stays and says nothing.
    node.signal(Signal::STOP);
    browser.wait_for("document.getElementById('state').textContent == 'not reachable'");
    node.signal(Signal::CONT);
    browser.wait_for("document.getElementById('state').textContent == 'serving'");
    node.end(Signal::TERM);
}

#[test]
fn a_token_is_asked_for() {
    let Some(mut browser) = Browser::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "0123456789abcdef0123").unwrap();
    let node = Node::start_with(program().args(["serve", "--name", "n1", "--token-file"]).arg(&token));
    browser.open(&node.url, 360, "dark", true);
    browser.wait_for("document.getElementById('state').textContent == 'token needed'");
    assert_eq!(browser.evaluate("document.activeElement.id"), "secret");
    for table in ["owners", "migrations", "peers"] {
        let text = browser.evaluate(&format!("document.getElementById('{table}').innerText.trim()"));
        assert_eq!(text, "unknown", "{table}: nothing was read yet");
    }
    check(&mut browser, "token");
    browser.picture("token");
    let enter = |browser: &mut Browser, text: &str| {
        browser.evaluate(&format!("document.getElementById('secret').value = '{text}'"));
        browser.press("Enter");
    };
    enter(&mut browser, "another-token-of-a-node");
    browser.wait_for("document.getElementById('refused').textContent.includes('refused')");
    enter(&mut browser, "0123456789abcdef0123");
    browser.wait_for("document.getElementById('state').textContent == 'serving'");
    assert_eq!(browser.evaluate("getComputedStyle(document.getElementById('token')).display"), "none");
    browser.wait_for("document.getElementById('migrations').innerText.trim() == 'none'");
    node.end(Signal::TERM);
}

#[test]
fn without_scripts_it_shows_a_picture() {
    let Some(mut browser) = Browser::start() else { return };
    let node = Node::start("serve --name n1 --size 3000 --load conversations --load-rest 20ms");
    for (scheme, width) in [("light", 1440), ("dark", 360)] {
        browser.open(&node.url, width, scheme, false);
        browser.wait_for("document.images.length == 1 && document.images[0].complete");
        assert!(browser.evaluate("document.images[0].naturalWidth").as_f64() > Some(100.0));
        let text = browser.evaluate("document.body.innerText").as_str().unwrap().to_owned();
        assert!(text.contains("JavaScript, which is off"), "{text}");
        // What needs scripts is not there.
        for gone in ["connecting", "Compact now", "Occupancy"] {
            assert!(!text.contains(gone), "{gone}: {text}");
        }
        check(&mut browser, &format!("no script, {scheme}"));
        browser.picture(&format!("no-script-{scheme}-{width}"));
    }
    node.end(Signal::TERM);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiers_are_shown_with_their_state() {
    let Some(mut browser) = tokio::task::spawn_blocking(Browser::start).await.unwrap() else { return };
    let pool = kv::pool(kv::plain(), 100);
    let (store, reporters) = (Faulty::new(1 << 20), Reporters::new());
    let mut settings = TierSettings::default();
    (settings.failures, settings.rest) = (1, Duration::from_secs(600));
    let tier = SharedTier::new(store.clone(), settings).unwrap();
    let tiered =
        Tiered::new(pool.clone(), Arc::new(tier), TieredSettings::new("t").policy(TierPolicy::Manual))
            .unwrap();
    reporters.add(TierReporter::new("memory", &tiered));
    let server = AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), None, Limits::default()).unwrap();
    let url = server.address().to_string();
    let admin = Arc::new(PoolAdmin::new("a", pool.clone()).reporters(reporters));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(server.run(admin, async { drop(ended.await) }, Duration::from_secs(1)));
    let row = "document.getElementById('peers').innerText";
    let mut browser = tokio::task::spawn_blocking(move || {
        browser.open(&url, 360, "light", true);
        browser.wait_for(&format!("{row}.includes('memory')"));
        browser.wait_for(&format!("/memory\\s+tier\\s+up, 0 stored/.test({row})"));
        check(&mut browser, "tiers");
        browser.picture("tiers");
        browser
    })
    .await
    .unwrap();
    // Blocks are cached, and the tier refuses them.
    store.set_fault(Fault::Refuse);
    drop(kv::admit(&pool, 7, &kv::prompt(1, 41)).unwrap());
    let _ = tiered.offload(10, Instant::now() + Duration::from_secs(20)).await;
    tokio::task::spawn_blocking(move || {
        browser.wait_for(&format!("/tier\\s+down, not asked.* last error \\d s ago: .*reached/.test({row})"))
    })
    .await
    .unwrap();
    drop(end);
    serving.await.unwrap().unwrap();
}
