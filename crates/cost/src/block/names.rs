//! Short names for runs of ops.

use std::collections::HashMap;

use rannc_ir::{Graph, OpId, is_index, unit_path};

use crate::op::base_name;

/// Most names of a Stage.
const MAX_NAMES: usize = 8;
/// Components of a path without an index that are kept.
const PLAIN_COMPONENTS: usize = 2;

/// Names the modules that runs of a graph's main ops hold: `bert.embeddings`,
/// `bert.encoder.layer.0-5`. A module that is cut has the place behind its name: `h.13 up to attn`, `h.13 from mlp`.
pub struct ModuleNames<'a> {
    graph: &'a Graph,
    main_ops: &'a [OpId],
    /// Places of the main ops of each unit, increasing.
    places: HashMap<&'a str, Vec<u32>>,
}

impl<'a> ModuleNames<'a> {
    /// Names for the modules of this graph.
    pub fn new(graph: &'a Graph, main_ops: &'a [OpId]) -> Self {
        let mut places: HashMap<&str, Vec<u32>> = HashMap::new();
        for (place, &op) in (0..).zip(main_ops) {
            places.entry(unit(&graph.ops[op].module)).or_default().push(place);
        }
        Self { graph, main_ops, places }
    }

    /// The summary of a run of main ops. Its first and its last name are those at its ends.
    pub fn summary(&self, first: u32, end: u32) -> Vec<String> {
        let mut units: Vec<&str> = Vec::new();
        for &op in &self.main_ops[first as usize..end as usize] {
            let unit = unit(&self.graph.ops[op].module);
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        // Ops of the model itself are glue between its modules.
        if units.len() > 1 {
            units.retain(|unit| !unit.is_empty());
        }
        let mut names: Vec<Name<'_>> = Vec::new();
        for unit in units {
            let name = Name::new(unit, self.cut(unit, first, end));
            if !names.last_mut().is_some_and(|last| last.extend(&name)) {
                names.push(name);
            }
        }
        let mut summary: Vec<String> = names.iter().map(|name| name.text(&self.graph.name)).collect();
        let hidden = summary.len().saturating_sub(MAX_NAMES);
        if hidden > 0 {
            let last = summary.len() - 1;
            summary.splice(last - hidden..last, [format!("{hidden} more")]);
        }
        summary
    }

    /// Where a run cuts a unit: ` from mlp up to dropout`; empty when the unit is whole.
    fn cut(&self, unit: &str, first: u32, end: u32) -> String {
        let places = &self.places[unit];
        let (start, stop) =
            (places.partition_point(|&place| place < first), places.partition_point(|&place| place < end));
        let from = (start > 0).then(|| self.label(unit, places, start, start - 1));
        let up_to = (stop < places.len()).then(|| self.label(unit, places, stop - 1, stop));
        match (from, up_to) {
            (None, None) => String::new(),
            (Some(from), None) => format!(" from {from}"),
            (None, Some(up_to)) => format!(" up to {up_to}"),
            (Some(from), Some(up_to)) if from == up_to => format!(" only {from}"),
            (Some(from), Some(up_to)) => format!(" from {from} up to {up_to}"),
        }
    }

    /// What tells a main op of a unit from its neighbour on the other side of a cut: the submodule that it is in, or
    /// its name and the submodule before it. Both are given by their place among the unit's main ops.
    fn label(&self, unit: &str, places: &[u32], own: usize, other: usize) -> String {
        let op = |place: usize| &self.graph.ops[self.main_ops[places[place] as usize]];
        let path = |place: usize| op(place).module.strip_prefix(unit).unwrap_or_default().trim_start_matches('.');
        let parts = |place: usize| path(place).split('.').filter(|part| !part.is_empty()).collect::<Vec<_>>();
        let (own_parts, other_parts) = (parts(own), parts(other));
        let common = own_parts.iter().zip(&other_parts).take_while(|(own, other)| own == other).count();
        if own_parts.len() > common {
            return own_parts[..=common].join(".");
        }
        let name = base_name(&op(own).target);
        if own_parts.is_empty() {
            let before = (0..own).rev().map(parts).find_map(|parts| parts.first().copied());
            return before.map_or_else(|| name.to_owned(), |before| format!("{name} after {before}"));
        }
        format!("{name} in {}", own_parts.join("."))
    }
}

/// The repeated module of a path, or its first components.
fn unit(module: &str) -> &str {
    if module.split('.').any(is_index) {
        return unit_path(module, 1);
    }
    module.match_indices('.').nth(PLAIN_COMPONENTS - 1).map_or(module, |(place, _)| &module[..place])
}

/// A unit, or consecutive whole units of one list.
struct Name<'a> {
    /// The path without its index.
    list: &'a str,
    range: Option<(u64, u64)>,
    /// As [`ModuleNames::cut`] writes it.
    cut: String,
}

impl<'a> Name<'a> {
    fn new(unit: &'a str, cut: String) -> Self {
        let (list, last) = unit.rsplit_once('.').unwrap_or(("", unit));
        let index = if is_index(last) { last.parse().ok() } else { None };
        match index {
            Some(index) => Self { list, range: Some((index, index)), cut },
            None => Self { list: unit, range: None, cut },
        }
    }

    /// Takes in the unit that follows; false if it does not continue the list.
    fn extend(&mut self, next: &Name<'_>) -> bool {
        match (&mut self.range, next.range) {
            (Some((_, last)), Some((index, _)))
                if self.list == next.list
                    && self.cut.is_empty()
                    && next.cut.is_empty()
                    && last.checked_add(1) == Some(index) =>
            {
                *last = index;
                true
            }
            _ => false,
        }
    }

    fn text(&self, model: &str) -> String {
        let dot = if self.list.is_empty() { "" } else { "." };
        let name = match self.range {
            Some((first, last)) if first == last => format!("{}{dot}{first}", self.list),
            Some((first, last)) => format!("{}{dot}{first}-{last}", self.list),
            None if self.list.is_empty() => model.to_owned(),
            None => self.list.to_owned(),
        };
        name + &self.cut
    }
}

#[cfg(test)]
mod tests {
    use rannc_ir::testing::GraphBuilder;
    use rannc_ir::{DType, Dim, main_ops};

    use super::*;

    fn names(modules: &[&str], first: u32, end: u32) -> Vec<String> {
        let mut builder = GraphBuilder::new("Model");
        let mut value = builder.input(DType::Float32, &[Dim::rows(1)]);
        for module in modules {
            value = builder.module(module).pointwise("aten.relu.default", &[value]);
        }
        let graph = builder.finish(&[value]);
        let main_ops = main_ops(&graph);
        ModuleNames::new(&graph, &main_ops).summary(first, end)
    }

    #[test]
    fn layers_are_counted() {
        let modules =
            ["bert.embeddings.words", "bert.encoder.layer.0.fc", "bert.encoder.layer.1", "bert.encoder.layer.2", ""];
        assert_eq!(names(&modules, 0, 5), ["bert.embeddings", "bert.encoder.layer.0-2"]);
        assert_eq!(names(&modules, 2, 3), ["bert.encoder.layer.1"]);
        assert_eq!(names(&modules, 4, 5), ["Model"]);
    }

    #[test]
    fn cut_modules_are_marked() {
        let modules = ["0", "1.fc1", "1.fc2", "2"];
        assert_eq!(names(&modules, 0, 2), ["0", "1 up to fc1"]);
        assert_eq!(names(&modules, 2, 4), ["1 from fc2", "2"]);
        assert_eq!(names(&modules, 2, 3), ["1 from fc2"]);
        assert_eq!(names(&modules, 0, 4), ["0-2"]);
    }

    #[test]
    fn ops_of_a_cut_module_itself_are_named_by_what_is_before() {
        let modules = ["h.0.attn.qkv", "h.0.attn", "h.0.attn.proj", "h.0", "h.0.mlp", "h.0"];
        assert_eq!(names(&modules, 0, 1), ["h.0 up to attn.qkv"]);
        assert_eq!(names(&modules, 1, 2), ["h.0 only relu in attn"]);
        assert_eq!(names(&modules, 2, 4), ["h.0 from attn.proj up to relu after attn"]);
        assert_eq!(names(&modules, 4, 6), ["h.0 from mlp"]);
    }

    #[test]
    fn long_summaries_end() {
        let modules: Vec<String> = (0..12).map(|number| format!("part{number}")).collect();
        let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
        assert_eq!(names(&modules, 0, 12)[6..], ["part6", "4 more", "part11"]);
    }
}
