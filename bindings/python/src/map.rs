//! `Map`: a picture of a pool.

use std::sync::Arc;

use kvpool::Pool;
use kvpool::storage::groups::{GroupId, LayerGroups};
use kvpool_map::{Group, Picture};
use pyo3::prelude::*;

use crate::error::Outcome;
use crate::layers::keeps;
use crate::pool::PyPool;

/// Returns the groups of a picture, of which those that share blocks are one.
fn groups(model: &LayerGroups) -> Vec<Group> {
    let ids = || (0..model.groups().len()).map(GroupId);
    let own = ids().filter(|id| model.groups()[id.0].shares_blocks_of().is_none());
    let group = |id: GroupId| {
        let is_here =
            |other: &GroupId| *other == id || model.groups()[other.0].shares_blocks_of() == Some(id);
        let mut words: Vec<String> = Vec::new();
        for word in ids().filter(is_here).map(|other| keeps(model.groups()[other.0].reach())) {
            if !words.contains(&word) {
                words.push(word);
            }
        }
        Group { caption: words.join(", "), lists: Pool::layer_lists(model, id) }
    };
    own.map(group).filter(|group| !group.lists.is_empty()).collect()
}

#[pymethods]
impl PyPool {
    /// Returns a picture of all frames: which are free, owned, cached or fixed. The groups of a
    /// layered pool have a shade each.
    #[pyo3(signature = (title="kvpool"))]
    fn map(&self, py: Python<'_>, title: &str) -> Outcome<Map> {
        let (pool, model) = (self.share()?, self.layer_groups().map(Arc::clone));
        let svg = py.detach(|| {
            let (snapshot, stats) = (pool.snapshot(), pool.stats());
            let notes =
                vec![format!("{} of {} blocks used, {} cached", stats.used, stats.total, stats.evictable)];
            let panels = vec![("now", &snapshot)];
            let groups = model.map_or_else(Vec::new, |model| groups(&model));
            kvpool_map::draw(&Picture { title: title.to_owned(), notes, panels, groups })
        });
        Ok(Map { svg })
    }
}

/// A picture of a pool, as an SVG document; notebooks show it.
#[pyclass(frozen, name = "Map", module = "kvpool._kvpool")]
pub struct Map {
    svg: String,
}

#[pymethods]
impl Map {
    /// The SVG document.
    #[getter]
    fn svg(&self) -> &str {
        &self.svg
    }

    /// Writes the document to a file.
    fn save(&self, path: std::path::PathBuf) -> PyResult<()> {
        Ok(std::fs::write(path, &self.svg)?)
    }

    fn _repr_svg_(&self) -> &str {
        &self.svg
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.Map, {} bytes of SVG>", self.svg.len())
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Map>()
}
