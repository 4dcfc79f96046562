//! Checks that the files of a folder, and its folders, do not import each other in a circle.
//!
//! Each path that a file names is resolved to the file that defines the item, through re-exports of
//! modules in between. A `mod.rs` is the folder's front: it defines nothing, so it can be left out.
//! An import between files of two folders counts as an edge between the entries of the folder that
//! contains both. Method calls are not imports.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};

use super::{Named, walk};

/// A module by its path below the crate: `["block", "word"]`.
type Module = Vec<String>;

#[derive(Default)]
struct House {
    /// Files by module, with the paths that they name outside of tests.
    files: BTreeMap<Module, (String, Vec<Named>)>,
    /// Target of a name that a module re-exports.
    exports: BTreeMap<(Module, String), Vec<String>>,
}

fn module_of(file: &str) -> Module {
    let parts = file.trim_end_matches(".rs").split('/');
    parts.filter(|part| *part != "mod").map(String::from).collect()
}

impl House {
    fn new(all: &[(String, String)]) -> Self {
        let mut house = Self::default();
        for (file, text) in all {
            let module = module_of(file);
            if file == "lib.rs" || module.iter().any(|part| part == "tests" || part == "models") {
                continue;
            }
            let mut named = Vec::new();
            walk(text.parse().unwrap(), &module, false, &mut named);
            named.retain(|at| !at.in_test);
            house.files.insert(module, (file.clone(), named));
        }
        let modules: BTreeSet<Module> = house.files.keys().cloned().collect();
        for (module, (_, named)) in &house.files {
            for at in named {
                // `child::Item`: the module re-exports its child's item.
                let child: Module = module.iter().chain(at.path.first()).cloned().collect();
                if let Some(name) = at.path.last()
                    && modules.contains(&child)
                {
                    let target = module.iter().chain(&at.path).cloned().collect();
                    house.exports.insert((module.clone(), name.clone()), target);
                }
            }
        }
        house
    }

    /// Returns the module whose file defines the target of a path.
    fn definition(&self, mut path: Vec<String>) -> Option<Module> {
        for _ in 0..16 {
            let depth = (1..=path.len()).rev().find(|&depth| self.files.contains_key(&path[..depth]))?;
            let export = path.get(depth).and_then(|name| {
                self.exports.get(&(path[..depth].to_vec(), name.clone())).filter(|&target| *target != path)
            });
            match export {
                Some(target) => path = target.clone(),
                None => return Some(path[..depth].to_vec()),
            }
        }
        None
    }

    /// By folder: the imports between its entries, and their places.
    fn edges(&self) -> BTreeMap<Module, BTreeMap<String, BTreeMap<String, String>>> {
        let mut edges: BTreeMap<_, BTreeMap<String, BTreeMap<String, String>>> = BTreeMap::new();
        for (module, (file, named)) in &self.files {
            if file.ends_with("/mod.rs") {
                continue;
            }
            for at in named.iter().filter(|at| at.path[0] == "crate") {
                let Some(target) = self.definition(at.path[1..].to_vec()) else { continue };
                let common = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
                let entry = |of: &Module| of.get(common).cloned().unwrap_or_else(|| "(parent)".into());
                let (from, to) = (entry(module), entry(&target));
                if *module != target && common > 0 {
                    let of_folder = edges.entry(module[..common].to_vec()).or_default();
                    of_folder.entry(from).or_default().entry(to).or_insert(format!("{file}:{}", at.line));
                }
            }
        }
        edges
    }
}

/// Lists the items that a folder's front defines: the search for circles would miss them.
pub fn defined_in_fronts(all: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    for (file, text) in all.iter().filter(|(file, _)| file.ends_with("/mod.rs")) {
        let tokens: TokenStream = text.parse().unwrap();
        for token in tokens {
            if let TokenTree::Ident(word) = &token
                && ["struct", "enum", "union", "trait", "fn", "impl", "static", "type"]
                    .iter()
                    .any(|item| word == item)
            {
                found.push(format!("{file}:{} defines a `{word}`", word.span().start().line));
            }
        }
    }
    found
}

/// Returns a circle through `start`, if there is one.
fn circle(edges: &BTreeMap<String, BTreeMap<String, String>>, start: &str) -> Option<Vec<String>> {
    let mut paths = vec![vec![start.to_string()]];
    let mut seen = BTreeSet::new();
    while let Some(path) = paths.pop() {
        for next in edges.get(path.last()?).into_iter().flat_map(BTreeMap::keys) {
            let longer: Vec<_> = path.iter().cloned().chain([next.clone()]).collect();
            if next == start {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                paths.insert(0, longer);
            }
        }
    }
    None
}

/// Describes every circle in a tree of files, given by their paths below `src/` and their texts.
pub fn circles(all: &[(String, String)]) -> Vec<String> {
    let mut found = BTreeSet::new();
    for (folder, edges) in House::new(all).edges() {
        for start in edges.keys() {
            let Some(path) = circle(&edges, start) else { continue };
            // One report per circle: from its first entry.
            if path.iter().min() == path.first() {
                let at: Vec<_> = path.windows(2).map(|step| edges[&step[0]][&step[1]].as_str()).collect();
                found.insert(format!("{}: {} ({})", folder.join("/"), path.join(" -> "), at.join(", ")));
            }
        }
    }
    found.into_iter().collect()
}

#[test]
fn planted_circles_are_found() {
    let tree = |files: &[(&str, &str)]| -> Vec<(String, String)> {
        files.iter().map(|&(file, text)| (file.into(), text.into())).collect()
    };
    let planted = [
        // Through a re-export, and through two folders.
        (
            &[
                ("a/mod.rs", "mod b; mod c; pub use b::{B, X as Y};"),
                ("a/b.rs", "use super::c::C;"),
                ("a/c.rs", "use crate::a::B;"),
            ][..],
            "a: b -> c -> b (a/b.rs:1, a/c.rs:1)",
        ),
        (
            &[
                ("a/b/mod.rs", "pub use d::D;"),
                ("a/b/d.rs", "\nuse crate::a::c::E;"),
                ("a/c/mod.rs", ""),
                ("a/c/e.rs", "use super::super::b::D;"),
            ][..],
            "a: b -> c -> b (a/b/d.rs:2, a/c/e.rs:1)",
        ),
        (
            &[("a/b.rs", "mod c; use crate::a::b::c::C;"), ("a/b/c.rs", "use super::B;")][..],
            "a/b: (parent) -> c -> (parent) (a/b.rs:1, a/b/c.rs:1)",
        ),
    ];
    for (files, expected) in planted {
        assert_eq!(circles(&tree(files)), [expected]);
    }
    let sound = [
        &[
            ("a/mod.rs", "pub use b::B; pub use c::C;"),
            ("a/b.rs", "use super::C;"),
            ("a/c.rs", "use crate::z::Z;"),
        ][..],
        &[("a/b.rs", "use super::c;"), ("a/c.rs", "#[cfg(test)] mod tests { use super::super::b::B; }")],
    ];
    for files in sound {
        assert_eq!(circles(&tree(files)), Vec::<String>::new());
    }
    let front = tree(&[
        ("a/mod.rs", "mod b;\npub use b::{B, C as D};\npub trait T { fn f(); }"),
        ("a/b.rs", "struct B;"),
    ]);
    assert_eq!(defined_in_fronts(&front), ["a/mod.rs:3 defines a `trait`"]);
}
