//! Blocks: runs of Atoms, aligned to the modules that a model repeats.
//!
//! A chain of few Atoms keeps each of them as a Block. Otherwise Atoms of one repeated module (the
//! path up to an index: `encoder.layer.3`) form a unit, and
//! * many units: consecutive units merge into Blocks of about equal time;
//! * few units: each is divided into Blocks in proportion to its time, where few bytes cross.
//!
//! Equal units have equal times, so they are divided in the same way.

use std::collections::HashMap;
use std::ops::Range;

use rannc_ir::{Analysis, Graph, OpId, OpRun, ValueDef, ValueId, unit_path};

use super::atoms::atoms;
use super::blocks::{Blocks, index};
use crate::cluster::Device;
use crate::op::{ComputeCost, OpWork, Operation, tensor_bytes};

/// Blocks to aim for: the search's time and memory grow with their square.
const MOST_BLOCKS: usize = 128;
/// Rows at which times are taken.
const NOMINAL_ROWS: u64 = 16;
/// Levels of nested repeated modules that are told apart.
const MAX_LEVEL: usize = 3;

impl Blocks {
    /// Divides a verified graph. Nothing but the graph counts, so that what is known of a Block serves any number and
    /// kind of devices and any batch.
    pub fn new(graph: &Graph, analysis: &Analysis) -> Self {
        let ranges = merge(&measure(graph, analysis), MOST_BLOCKS);
        Self::of(
            graph,
            analysis,
            ranges.into_iter().map(|range| OpRun { first: index(range.start), end: index(range.end) }),
        )
    }
}

/// Time of Ops, forward and backward, on a usual device at a usual number of rows: to compare Ops of one Graph.
pub fn nominal_us(graph: &Graph, ops: &[OpId]) -> f64 {
    let device = Device::nominal();
    let cost = |&op: &OpId| OpWork::new(&Operation::new(graph, op)).at(device, NOMINAL_ROWS);
    ops.iter().map(cost).sum::<ComputeCost>().us()
}

/// An Atom as merging sees it.
struct TimedAtom {
    ops: Range<usize>,
    us: f64,
    /// Bytes that cross its end for each row.
    end_bytes: f64,
    module: String,
}

fn measure(graph: &Graph, analysis: &Analysis) -> Vec<TimedAtom> {
    let crossing_bytes = crossing_bytes(graph, analysis);
    let measured = atoms(analysis).into_iter().map(|ops| TimedAtom {
        us: nominal_us(graph, &analysis.main_ops[ops.clone()]),
        end_bytes: crossing_bytes[ops.end],
        module: graph.ops[analysis.main_ops[ops.start]].module.clone(),
        ops,
    });
    measured.collect()
}

/// For each place in the list of main ops, its end included: bytes of Values made before and used
/// after it, for one row.
fn crossing_bytes(graph: &Graph, analysis: &Analysis) -> Vec<f64> {
    let mut last_use: HashMap<ValueId, usize> = HashMap::new();
    for (place, &op) in analysis.main_ops.iter().enumerate() {
        last_use.extend(graph.ops[op].operands().into_iter().map(|value| (value, place)));
    }
    let mut changes = vec![0.0; analysis.main_ops.len() + 1];
    for (&value, &last) in &last_use {
        if let ValueDef::Op { op, .. } = graph.values[value].def
            && let Some(made) = analysis.main_index[op]
        {
            // Whole bytes, so that the order of the map does not show in the sums.
            let bytes = tensor_bytes(&graph.values[value]).at(1).round();
            changes[made as usize + 1] += bytes;
            changes[last + 1] -= bytes;
        }
    }
    let mut crossing = 0.0;
    changes
        .into_iter()
        .map(|change| {
            crossing += change;
            crossing
        })
        .collect()
}

fn merge(atoms: &[TimedAtom], target: usize) -> Vec<Range<usize>> {
    let as_ops = |run: Range<usize>| atoms[run.start].ops.start..atoms[run.end - 1].ops.end;
    if atoms.len() <= target {
        return atoms.iter().map(|atom| atom.ops.clone()).collect();
    }
    let levels = (1..=MAX_LEVEL).rev().map(|level| units(atoms, level));
    let runs = match levels.into_iter().find(|units| units.len() <= target) {
        Some(units) => divide(atoms, &units, target),
        None => gather(atoms, &units(atoms, 1), target),
    };
    runs.into_iter().map(as_ops).collect()
}

/// Runs of Atoms of the same module, told apart up to the given number of indices in the path.
fn units(atoms: &[TimedAtom], level: usize) -> Vec<Range<usize>> {
    let same = |left: &TimedAtom, right: &TimedAtom| unit_path(&left.module, level) == unit_path(&right.module, level);
    let mut first = 0;
    let chunks = atoms.chunk_by(same).map(|chunk| {
        let run = first..first + chunk.len();
        first = run.end;
        run
    });
    chunks.collect()
}

/// Merges consecutive units into at most `target` runs of about equal time.
fn gather(atoms: &[TimedAtom], units: &[Range<usize>], target: usize) -> Vec<Range<usize>> {
    let total_us: f64 = atoms.iter().map(|atom| atom.us).sum();
    let mut runs: Vec<Range<usize>> = Vec::new();
    let (mut done_us, mut last_slot) = (0.0, usize::MAX);
    for unit in units {
        let us: f64 = atoms[unit.clone()].iter().map(|atom| atom.us).sum();
        let slot = share(done_us + us / 2.0, total_us, target).min(target - 1);
        done_us += us;
        match runs.last_mut().filter(|_| slot == last_slot) {
            Some(run) => run.end = unit.end,
            None => runs.push(unit.clone()),
        }
        last_slot = slot;
    }
    runs
}

/// Divides each unit into runs, at most `target` altogether.
fn divide(atoms: &[TimedAtom], units: &[Range<usize>], target: usize) -> Vec<Range<usize>> {
    let unit_us = |unit: &Range<usize>| atoms[unit.clone()].iter().map(|atom| atom.us).sum::<f64>();
    let total_us: f64 = units.iter().map(unit_us).sum();
    let spare = target - units.len();
    let pieces = units.iter().flat_map(|unit| {
        let us = unit_us(unit);
        divide_unit(atoms, unit.clone(), 1 + share(us, total_us, spare), us)
    });
    pieces.collect()
}

fn share(part_us: f64, total_us: f64, amount: usize) -> usize {
    if total_us > 0.0 { (part_us / total_us * amount as f64) as usize } else { 0 }
}

/// Cuts a unit of `total_us` near the ends of `pieces` equal shares of its time, at the Atom of each
/// neighbourhood where the fewest bytes cross.
fn divide_unit(atoms: &[TimedAtom], unit: Range<usize>, pieces: usize, total_us: f64) -> Vec<Range<usize>> {
    // For each share: the best place to cut, its bytes, its distance from the share's end.
    let mut best: Vec<Option<(usize, f64, f64)>> = vec![None; pieces];
    let mut done_us = 0.0;
    let inner = unit.start..unit.end.saturating_sub(1);
    for (place, atom) in inner.clone().zip(&atoms[inner]) {
        done_us += atom.us;
        let shares = if total_us > 0.0 { done_us / total_us * pieces as f64 } else { 0.0 };
        let nearest = shares.round();
        if nearest < 1.0 || nearest as usize >= pieces {
            continue;
        }
        let (bytes, distance) = (atom.end_bytes, (shares - nearest).abs());
        let slot = &mut best[nearest as usize];
        if slot.is_none_or(|(_, least, near)| (bytes, distance) < (least, near)) {
            *slot = Some((place + 1, bytes, distance));
        }
    }
    let mut runs = Vec::new();
    let mut first = unit.start;
    for end in best.into_iter().flatten().map(|(place, ..)| place).chain([unit.end]) {
        runs.push(first..end);
        first = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use rannc_ir::testing::{graphs, mlp};

    use super::*;

    fn divided(graph: &Graph) -> Blocks {
        Blocks::new(graph, &Analysis::new(graph))
    }

    #[test]
    fn few_atoms_are_the_blocks() {
        let blocks = divided(&mlp(5, 8));
        assert_eq!(blocks.blocks.len(), 11);
        assert_eq!(blocks.blocks[2].kind, blocks.blocks[4].kind);
    }

    #[test]
    fn repeated_layers_give_equal_blocks() {
        let blocks = divided(&mlp(80, 8));
        assert!(blocks.blocks.len() <= MOST_BLOCKS && blocks.blocks.len() >= 80, "{}", blocks.blocks.len());
        assert!(blocks.hashes.len() <= 4, "{}", blocks.hashes.len());
        let cuts_layers = blocks.blocks.iter().filter(|block| block.ops.first % 2 == 0).count();
        assert!(cuts_layers >= 80);
    }

    #[test]
    fn many_layers_are_gathered_whole() {
        let blocks = divided(&mlp(300, 8));
        assert!((65..=MOST_BLOCKS).contains(&blocks.blocks.len()), "{}", blocks.blocks.len());
        assert!(blocks.blocks.iter().all(|block| block.ops.first % 2 == 0));
    }

    proptest! {
        #[test]
        fn blocks_cover_the_main_ops(graph in graphs()) {
            let analysis = Analysis::new(&graph);
            let blocks = divided(&graph);
            let mut expected = 0;
            for block in &blocks.blocks {
                prop_assert_eq!(block.ops.first, expected);
                prop_assert!(analysis.cuts[block.ops.end as usize].is_none());
                expected = block.ops.end;
            }
            prop_assert_eq!(expected as usize, analysis.main_ops.len());
            prop_assert_eq!(&blocks, &divided(&graph));
        }

        #[test]
        fn batch_free_ops_belong_to_their_only_block(graph in graphs()) {
            let analysis = Analysis::new(&graph);
            let blocks = divided(&graph).blocks;
            let makers = |values: Vec<ValueId>| values.into_iter().filter_map(|value| match graph.values[value].def {
                ValueDef::Op { op, .. } if analysis.batch_free[op] => Some(op),
                _ => None,
            });
            let mut users: BTreeMap<OpId, Vec<usize>> = BTreeMap::new();
            for (place, block) in blocks.iter().enumerate() {
                let main = &analysis.main_ops[block.ops.first as usize..block.ops.end as usize];
                let mut used: Vec<ValueId> = main.iter().flat_map(|&op| graph.ops[op].operands()).collect();
                if place + 1 == blocks.len() {
                    used.extend(&graph.outputs);
                }
                let cloned: BTreeSet<OpId> = makers(used).flat_map(|op| analysis.clones(&graph, op)).collect();
                cloned.into_iter().for_each(|op| users.entry(op).or_default().push(place));
            }
            // What is given out or lies where something is changed in place stays with what others use, and all before it.
            let changed = |op: OpId| {
                let values = graph.ops[op].operands().into_iter().chain(graph.ops[op].results.iter().copied());
                values.into_iter().any(|value| analysis.storages.is_changed(value))
            };
            let stays = users.keys().copied().filter(|&op| changed(op));
            let stays: BTreeSet<OpId> =
                stays.chain(makers(graph.outputs.clone())).flat_map(|op| analysis.clones(&graph, op)).collect();
            for (place, block) in blocks.iter().enumerate() {
                let alone = users.iter().filter(|(op, places)| **places == [place] && !stays.contains(op));
                let own = alone.map(|(&op, _)| op);
                let main = &analysis.main_ops[block.ops.first as usize..block.ops.end as usize];
                let each = own.chain(main.iter().copied()).filter(|&op| !analysis.once[op]);
                let expected: BTreeSet<OpId> = each.collect();
                prop_assert_eq!(&block.own_ops, &expected.into_iter().collect::<Vec<_>>());
            }
        }

        #[test]
        fn merging_keeps_to_the_target(us in prop::collection::vec(0.0..9.0_f64, 1..80), target in 1..20_usize, period in 1..9_usize) {
            let atoms: Vec<TimedAtom> = us.iter().enumerate().map(|(place, &us)| TimedAtom {
                ops: place..place + 1, us, end_bytes: (place % 3) as f64, module: format!("layers.{}", place / period),
            }).collect();
            let runs = merge(&atoms, target);
            prop_assert!(runs.len() <= target);
            prop_assert_eq!(runs.iter().map(ExactSizeIterator::len).sum::<usize>(), us.len());
            prop_assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
