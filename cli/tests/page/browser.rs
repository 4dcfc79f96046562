//! Chromium without a window, by the DevTools protocol over pipes.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::common::live::pipe;

/// The longest time of any step. The machine may be busy.
const PATIENCE: Duration = Duration::from_secs(90);

/// A browser with one page.
pub struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    calls: u64,
    session: Option<String>,
    /// Exceptions of the page, and what the browser refused.
    pub complaints: Vec<String>,
    _folder: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser; `None`, with a note, where there is none.
    pub fn start() -> Option<Self> {
        let program = std::env::var("KVPOOL_CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        if Command::new(&program).arg("--version").output().is_err() {
            eprintln!("SKIPPED: no {program}; KVPOOL_CHROMIUM names another one");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        pipe(&path("to"));
        pipe(&path("from"));
        // The browser reads its third descriptor and writes to its fourth.
        let script = format!(
            "exec {program} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
             --hide-scrollbars --remote-debugging-pipe --user-data-dir={profile} about:blank 3<to 4>from",
            profile = path("profile").display()
        );
        let mut command = Command::new("sh");
        let child = command
            .args(["-c", &script])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let to = OpenOptions::new().write(true).open(path("to")).unwrap();
        let from = BufReader::new(File::open(path("from")).unwrap());
        let (calls, session, complaints) = (0, None, Vec::new());
        let mut this = Self { child, to, from, calls, session, complaints, _folder: folder };
        let target = this.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attached =
            this.call("Target.attachToTarget", json!({ "targetId": target["targetId"], "flatten": true }));
        this.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            this.call(&format!("{domain}.enable"), json!({}));
        }
        Some(this)
    }

    /// Calls a method, and returns its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser has ended");
            let answer: Value = serde_json::from_slice(&bytes).unwrap();
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(event["params"].to_string()),
            // Requests that fail are what some tests are about.
            Some("Log.entryAdded") if event["params"]["entry"]["source"] != "network" => {
                self.complaints.push(event["params"]["entry"]["text"].to_string());
            }
            _ => {}
        }
    }

    /// Opens a page in a window of this width.
    pub fn open(&mut self, url: &str, width: u32, scheme: &str, has_script: bool) {
        let is_phone = width < 500;
        let size = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": is_phone });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", scheme);
        self.call("Emulation.setScriptExecutionDisabled", json!({ "value": !has_script }));
        self.call("Page.navigate", json!({ "url": url }));
    }

    /// Evaluates an expression on the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub fn wait_for(&mut self, expression: &str) {
        let start = Instant::now();
        // The page may not be there yet.
        let tried = format!("(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()");
        while self.evaluate(&tried) != true {
            if start.elapsed() > PATIENCE {
                let text = self.evaluate("document.body.innerText");
                panic!("{expression} is not so: {text}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns the nodes that a screen reader sees: role, name and value.
    pub fn accessible(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}));
        let of = |node: &Value, what: &str| node[what]["value"].as_str().unwrap_or_default().to_owned();
        let nodes = tree["nodes"].as_array().unwrap().iter();
        nodes
            .filter(|node| node["ignored"] == false)
            .map(|node| (of(node, "role"), of(node, "name")))
            .collect()
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let code = match key {
                "Tab" => 9,
                "Enter" => 13,
                "ArrowRight" => 39,
                _ => 0,
            };
            let mut parameters =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if (key, kind) == ("Enter", "keyDown") {
                parameters["text"] = "\r".into();
            }
            self.call("Input.dispatchKeyEvent", parameters);
        }
    }

    /// Saves a picture of the whole page in the folder that KVPOOL_PAGE_PICTURES names, if it does.
    pub fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("KVPOOL_PAGE_PICTURES") else { return };
        let shot =
            self.call("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": true }));
        let text = shot["data"].as_str().unwrap();
        std::fs::write(Path::new(&folder).join(format!("{name}.png")), base64(text)).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its children end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Decodes base64 with padding.
fn base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| ALPHABET.iter().position(|&other| other == byte));
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::with_capacity(text.len()));
    for digit in digits {
        (bits, count) = (bits << 6 | digit as u32, count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
