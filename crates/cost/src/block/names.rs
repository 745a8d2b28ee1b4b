//! Short names for runs of ops.

use std::collections::HashMap;

use rannc_ir::{Graph, OpId};

use super::paths::{is_index, unit_path};

/// Longest summary of a Stage.
const MAX_NAMES: usize = 8;
/// Components of a path without an index that are kept.
const PLAIN_COMPONENTS: usize = 2;

/// Names the modules that runs of a graph's main ops hold: `bert.embeddings`,
/// `bert.encoder.layer.0-5`. A module that is cut has ` (part)` behind its name.
pub struct ModuleNames<'a> {
    graph: &'a Graph,
    main_ops: &'a [OpId],
    /// Number of main ops of each unit.
    sizes: HashMap<&'a str, usize>,
}

impl<'a> ModuleNames<'a> {
    /// Names for the modules of this graph.
    pub fn new(graph: &'a Graph, main_ops: &'a [OpId]) -> Self {
        let mut sizes = HashMap::new();
        for &op in main_ops {
            *sizes.entry(unit(&graph.ops[op].module)).or_insert(0) += 1;
        }
        Self { graph, main_ops, sizes }
    }

    /// The summary of a run of main ops.
    pub fn summary(&self, first: u32, end: u32) -> Vec<String> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for &op in &self.main_ops[first as usize..end as usize] {
            let unit = unit(&self.graph.ops[op].module);
            match counts.iter_mut().find(|(known, _)| *known == unit) {
                Some((_, count)) => *count += 1,
                None => counts.push((unit, 1)),
            }
        }
        // Ops of the model itself are glue between its modules.
        if counts.len() > 1 {
            counts.retain(|(unit, _)| !unit.is_empty());
        }
        let mut names: Vec<Name<'_>> = Vec::new();
        for (unit, count) in counts {
            let name = Name::new(unit, self.sizes[unit] == count);
            if !names.last_mut().is_some_and(|last| last.extend(&name)) {
                names.push(name);
            }
        }
        let hidden = names.len().saturating_sub(MAX_NAMES);
        let mut summary: Vec<String> = names.iter().take(MAX_NAMES).map(|name| name.text(&self.graph.name)).collect();
        if hidden > 0 {
            summary.push(format!("and {hidden} more"));
        }
        summary
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
    whole: bool,
}

impl<'a> Name<'a> {
    fn new(unit: &'a str, whole: bool) -> Self {
        let (list, last) = unit.rsplit_once('.').unwrap_or(("", unit));
        let index = if is_index(last) { last.parse().ok() } else { None };
        match index {
            Some(index) => Self { list, range: Some((index, index)), whole },
            None => Self { list: unit, range: None, whole },
        }
    }

    /// Takes in the unit that follows; false if it does not continue the list.
    fn extend(&mut self, next: &Name<'_>) -> bool {
        match (&mut self.range, next.range) {
            (Some((_, last)), Some((index, _)))
                if self.list == next.list && self.whole && next.whole && last.checked_add(1) == Some(index) =>
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
        if self.whole { name } else { format!("{name} (part)") }
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
        assert_eq!(names(&modules, 0, 2), ["0", "1 (part)"]);
        assert_eq!(names(&modules, 2, 4), ["1 (part)", "2"]);
        assert_eq!(names(&modules, 0, 4), ["0-2"]);
    }

    #[test]
    fn long_summaries_end() {
        let modules: Vec<String> = (0..12).map(|number| format!("part{number}")).collect();
        let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
        assert_eq!(names(&modules, 0, 12).last().map(String::as_str), Some("and 4 more"));
    }
}
