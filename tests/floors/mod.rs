//! Checks the floors: no module imports upwards, and only `sync` names threads, atomics and tokio.
//!
//! The check reads the tokens of every file under `src/`, also inside macro calls and under a
//! `cfg`, and resolves `crate::`, `super::` and `self::` paths and use trees. It does not expand
//! macros, follow renames (`use crate as x`) or look into comments. Floors are strictly ordered, so
//! circles between them are impossible; [`circles`] finds those within a floor.

mod circles;

use std::fmt;
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// The floors of a crate.
struct Plan {
    /// Folder of its sources, below the workspace.
    folder: &'static str,
    /// From the ground up. A floor may import those in earlier rows; floors in one row must not
    /// import each other.
    floors: &'static [&'static [&'static str]],
    /// Paths that only the floor of the second field may name, outside of tests.
    reserved: &'static [(&'static [&'static str], &'static str)],
}

/// The library.
const CORE: Plan = Plan { folder: "src", floors: FLOORS, reserved: RESERVED };

/// The crate for migration between nodes.
const NODE: Plan = Plan {
    folder: "node/src",
    floors: &[
        &["wire", "settings", "protocol", "log"],
        &["transport"],
        &["topology", "metrics", "hints"],
        &["admin"],
        &["node"],
        &["tier", "membership", "events"],
        &["services"],
    ],
    reserved: &[(&["rustls"], "transport"), (&["tokio_rustls"], "transport"), (&["axum"], "admin")],
};

/// The backend for CUDA devices.
const CUDA: Plan = Plan {
    folder: "cuda/src",
    floors: &[
        &["capture", "engines", "gate", "host_pages", "params", "version"],
        &["error", "host_rows", "pieces"],
        &["context", "driver"],
        &["adopted", "event", "registered", "staging", "stream"],
        &["launch"],
        &["config", "kernels"],
        &["arena", "pending", "watch"],
        &["device"],
        &["command_scope"],
        &["memory"],
        &["storage", "tables"],
        &["device_rows", "moves", "packed"],
        &["crossing", "host_frames", "rows"],
    ],
    reserved: &[(&["libloading"], "driver"), (&["libc"], "host_pages")],
};

const FLOORS: &[&[&str]] = &[
    &["config"],
    &["ids", "dtype"],
    &["error", "sync"],
    &["frame"],
    &["clock"],
    &["block", "storage"],
    &["prefix"],
    &["hints", "tenants"],
    &["sequence"],
    &["compact"],
    &["migrate"],
    &["pool"],
    &["testing"],
];

const RESERVED: &[(&[&str], &str)] = &[
    (&["std", "sync", "atomic"], "sync"),
    (&["core", "sync", "atomic"], "sync"),
    (&["std", "thread"], "sync"),
    (&["std", "thread_local"], "sync"),
    (&["loom"], "sync"),
    (&["crossbeam_epoch"], "sync"),
    (&["crossbeam_queue"], "sync"),
    (&["crossbeam_utils"], "sync"),
    (&["dashmap"], "sync"),
    (&["tokio"], "sync"),
    (&["futures_timer"], "sync"),
];

impl Plan {
    fn rank(&self, floor: &str) -> Option<usize> {
        self.floors.iter().position(|row| row.contains(&floor))
    }

    /// Returns every source file, by its path below the folder.
    fn files(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(self.folder), "", &mut all);
        all
    }
}

/// A path in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Named {
    /// Resolved: begins with `crate` if it leads into this crate.
    path: Vec<String>,
    line: usize,
    in_test: bool,
}

#[derive(PartialEq, Eq, Debug)]
struct Violation {
    file: String,
    line: usize,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// Checks one file, given by its path below `src/`.
fn check(plan: &Plan, file: &str, text: &str) -> Vec<Violation> {
    let module: Vec<String> = (file.trim_end_matches(".rs").split('/'))
        .filter(|part| !["lib", "mod"].contains(part))
        .map(String::from)
        .collect();
    // The crate root is above all floors.
    let Some(floor) = module.first().cloned() else { return Vec::new() };
    let violation = |line, what| Violation { file: file.into(), line, what };
    let Some(own) = plan.rank(&floor) else {
        return vec![violation(1, format!("`{floor}` is on no floor: give it one in {}", file!()))];
    };
    let in_test = module.last().is_some_and(|last| last == "tests");
    let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut named = Vec::new();
    walk(tokens, &module, in_test, &mut named);
    let mut found: Vec<_> =
        named.into_iter().filter_map(|at| Some(violation(at.line, judge(plan, &at, &floor, own)?))).collect();
    found.dedup();
    found
}

/// Returns the fault of a path named on a floor, if any.
fn judge(plan: &Plan, at: &Named, floor: &str, own: usize) -> Option<String> {
    if at.path[0] == "crate" {
        let target = at.path.get(1)?;
        return match plan.rank(target) {
            None => Some(format!("`crate::{target}` is no floor")),
            Some(rank) if target != floor && rank >= own => {
                Some(format!("`{floor}` imports `{target}`, which is not below it"))
            }
            _ => None,
        };
    }
    let (path, owner) = plan.reserved.iter().find(|(path, _)| at.path.starts_with_names(path))?;
    (!at.in_test && *owner != floor).then(|| format!("only `{owner}` names `{}`", path.join("::")))
}

trait StartsWithNames {
    fn starts_with_names(&self, names: &[&str]) -> bool;
}

impl StartsWithNames for Vec<String> {
    fn starts_with_names(&self, names: &[&str]) -> bool {
        self.len() >= names.len() && self.iter().zip(names).all(|(a, b)| a == b)
    }
}

/// Collects the paths of a token stream in `module`.
fn walk(tokens: TokenStream, module: &[String], in_test: bool, named: &mut Vec<Named>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut next_is_test = false;
    let mut i = 0;
    while i < tokens.len() {
        match &tokens[i] {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                if let Some(TokenTree::Group(group)) = tokens.get(i + 1) {
                    next_is_test |= is_test_cfg(group);
                }
                i += 1;
            }
            TokenTree::Ident(ident) if ident == "mod" => {
                // An inline module is one level deeper for `super`.
                if let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(body))) =
                    (tokens.get(i + 1), tokens.get(i + 2))
                {
                    let mut inner = module.to_vec();
                    inner.push(name.to_string());
                    walk(body.stream(), &inner, in_test || next_is_test, named);
                    i += 2;
                }
                next_is_test = false;
                i += 1;
            }
            TokenTree::Ident(_) => {
                let line = tokens[i].span().start().line;
                i = path(&tokens, i, &mut Vec::new(), &mut |path| {
                    let path = resolve(path, module);
                    named.push(Named { path, line, in_test: in_test || next_is_test });
                });
            }
            TokenTree::Group(group) => {
                walk(group.stream(), module, in_test || next_is_test, named);
                if group.delimiter() == Delimiter::Brace {
                    next_is_test = false;
                }
                i += 1;
            }
            TokenTree::Punct(punct) => {
                if punct.as_char() == ';' {
                    next_is_test = false;
                }
                i += 1;
            }
            TokenTree::Literal(_) => i += 1,
        }
    }
}

/// Reads a path or a use tree that begins at `i`, calls `found` with each of its paths, and returns
/// its end.
fn path(
    tokens: &[TokenTree],
    mut i: usize,
    prefix: &mut Vec<String>,
    found: &mut dyn FnMut(&[String]),
) -> usize {
    let depth = prefix.len();
    loop {
        match tokens.get(i) {
            Some(TokenTree::Ident(ident)) => {
                prefix.push(ident.to_string());
                i += 1;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace && !prefix.is_empty() => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                let mut at = 0;
                while at < inner.len() {
                    at = path(&inner, at, prefix, found).max(at + 1);
                }
                prefix.truncate(depth);
                return i + 1;
            }
            _ => break,
        }
        if !(is_colon(tokens.get(i)) && is_colon(tokens.get(i + 1))) {
            break;
        }
        i += 2;
    }
    // A single name is local, unless it continues a use tree.
    if prefix.len() > depth.max(1) {
        found(prefix);
    }
    prefix.truncate(depth);
    i
}

fn is_colon(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':')
}

/// Replaces leading `self` and `super` by the module that they denote.
fn resolve(path: &[String], module: &[String]) -> Vec<String> {
    let mut base = module.to_vec();
    let mut rest = path;
    let mut is_relative = false;
    while let Some((first, tail)) = rest.split_first() {
        match first.as_str() {
            "super" => drop(base.pop()),
            "self" => {}
            _ => break,
        }
        is_relative = true;
        rest = tail;
    }
    if !is_relative {
        return path.to_vec();
    }
    std::iter::once("crate".to_string()).chain(base).chain(rest.iter().cloned()).collect()
}

/// Matches `#[cfg(test)]`, also inside `all(..)`.
fn is_test_cfg(attribute: &Group) -> bool {
    let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
    let [TokenTree::Ident(name), TokenTree::Group(condition)] = &tokens[..] else { return false };
    if name != "cfg" {
        return false;
    }
    let condition: Vec<TokenTree> = condition.stream().into_iter().collect();
    let has_test = |stream: TokenStream| {
        stream.into_iter().any(|token| matches!(token, TokenTree::Ident(ident) if ident == "test"))
    };
    match &condition[..] {
        [TokenTree::Ident(test)] => test == "test",
        [TokenTree::Ident(all), TokenTree::Group(group)] => all == "all" && has_test(group.stream()),
        _ => false,
    }
}

/// Returns every file under a folder, by its path below it.
fn files(root: &Path, below: &str, out: &mut Vec<(String, String)>) {
    let folder = root.join(below);
    let mut entries: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap())
        .collect();
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        let name = entry.file_name().into_string().expect("file names are UTF-8");
        let file = if below.is_empty() { name } else { format!("{below}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            files(root, &file, out);
        } else if file.ends_with(".rs") {
            out.push((file, fs::read_to_string(entry.path()).unwrap()));
        }
    }
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    for plan in [CORE, CUDA, NODE] {
        let all = plan.files();
        let found = [circles::circles(&all), circles::defined_in_fronts(&all)].concat();
        assert!(found.is_empty(), "{}:\n{}", plan.folder, found.join("\n"));
    }
}

#[test]
fn no_floor_imports_upwards() {
    for plan in [CORE, CUDA, NODE] {
        let all = plan.files();
        for floor in plan.floors.iter().copied().flatten() {
            let is_of = |(file, _): &(String, String)| file.split(['/', '.']).next() == Some(floor);
            assert!(all.iter().any(is_of), "no floor `{floor}` in {}", plan.folder);
        }
        let violations: Vec<String> = (all.iter().flat_map(|(file, text)| check(&plan, file, text)))
            .map(|violation| format!("{}/{violation}", plan.folder))
            .collect();
        assert!(violations.is_empty(), "{}", violations.join("\n"));
    }
}

#[test]
fn planted_violations_are_found() {
    for (file, text, what) in [
        ("frame/owner.rs", "use crate::pool::Pool;", "`frame` imports `pool`"),
        ("frame/owner.rs", "\nuse crate::{ids::Run, block::{self, BlockWord}};", "`frame` imports `block`"),
        ("clock/word.rs", "type B = crate::sequence::Batch;", "`clock` imports `sequence`"),
        ("block/core.rs", "fn f() { assert!(matches!(x, crate::storage::Y)); }", "`block` imports `storage`"),
        ("storage/host/tests.rs", "use super::super::super::block::Blocks;", "`storage` imports `block`"),
        ("frame/bits.rs", "mod m { use super::super::super::pool; }", "`frame` imports `pool`"),
        ("frame/bits.rs", "pub(in crate::pool) fn f() {}", "`frame` imports `pool`"),
        ("error.rs", "use crate::sync::Arc;", "`error` imports `sync`"),
        ("frame/bits.rs", "use crate::Pool;", "`crate::Pool` is no floor"),
        ("frame/bits.rs", "use std::sync::atomic::AtomicU64;", "only `sync` names `std::sync::atomic`"),
        ("frame/bits.rs", "use std::{fmt, sync::{Arc, atomic}};", "only `sync` names `std::sync::atomic`"),
        ("frame/bits.rs", "fn f() { std::thread::yield_now() }", "only `sync` names `std::thread`"),
        ("frame/bits.rs", "fn f() { ::loom::model(|| ()) }", "only `sync` names `loom`"),
        ("frame/bits.rs", "#[cfg(test)] mod tests {} use loom::model;", "only `sync` names `loom`"),
        ("attic.rs", "", "`attic` is on no floor"),
    ] {
        let found = check(&CORE, file, text);
        assert!(matches!(&found[..], [one] if one.what.starts_with(what)), "{file}: {text}: {found:?}");
    }
}

#[test]
fn allowed_imports_pass() {
    for (file, text) in [
        ("pool/pool.rs", "use crate::{block::Blocks, storage::Storage}; use super::latency::Sampler;"),
        ("block/core.rs", "use crate::block::Core; use super::super::frame::MagazinePair;"),
        (
            "frame/owner.rs",
            "// use crate::pool::Pool;\n/// [`crate::pool::Pool`]\nconst A: &str = \"crate::pool\";",
        ),
        (
            "frame/owner.rs",
            "#[cfg(all(test, not(kvpool_loom)))] mod tests { fn f() { std::thread::spawn(g); } }",
        ),
        ("frame/tests.rs", "use std::thread;"),
        ("frame/owner.rs", "use std::sync::PoisonError; pub(crate) fn f(thread: A, loom: B) {}"),
        ("sync/asymmetric.rs", "mod imp { use std::sync::atomic::fence; use super::super::Ordering; }"),
        ("lib.rs", "pub mod pool;"),
    ] {
        assert_eq!(check(&CORE, file, text), [], "{file}: {text}");
    }
}
