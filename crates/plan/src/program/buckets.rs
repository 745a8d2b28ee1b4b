//! Buckets: gradients that are summed together, over which ranks and in which order.
//!
//! Gradients come in the reverse order in which the forward first uses the Params. Those of a Stage's own Params fill
//! buckets that are summed one by one under its last backward. Those of Params that other Stages hold too are summed
//! over all holders after it, in an order common to all ranks, so that no two ranks wait for each other.

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::{DType, Graph, ParamId, Storages, ValueId};
use serde::{Deserialize, Serialize};

use crate::bucket_sizes::{BUCKET_BYTES, FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES, full_bytes};
use crate::partition::{Partition, computed_types, only_span};
use crate::plan::Placement;
use crate::saver::Sharding;

/// Type in which gradients are summed over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceDType {
    /// Float32, or that of a Param where it is wider.
    #[default]
    Float32,
    /// Bfloat16, but for wider types than float32.
    Bfloat16,
    /// That of the Param.
    Param,
}

impl ReduceDType {
    /// The type for gradients of a Param.
    pub const fn of(self, param: DType) -> DType {
        match (self, param) {
            (Self::Float32, DType::Float16 | DType::Bfloat16) => DType::Float32,
            (Self::Bfloat16, DType::Float16 | DType::Float32) => DType::Bfloat16,
            _ => param,
        }
    }
}

/// The gradient of a trainable Param.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gradient {
    /// The Param.
    pub param: ParamId,
    /// Its type.
    pub dtype: DType,
    /// Its elements.
    pub elements: u64,
    /// The size of what is summed over ranks.
    pub bytes: u64,
    /// The ranks that hold the Param, increasing.
    pub holders: Vec<u32>,
    /// What these ranks divide among them.
    pub sharding: Sharding,
    /// Where they divide the Param, the place of the Span that alone uses it among its Stage's.
    pub span: Option<u32>,
    /// The type in which they gather the Param, where they divide it; else its own.
    pub gathered: DType,
}

/// Gradients of one type and of the same ranks, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Place of the ranks that hold the Params among the groups.
    pub group: u32,
    /// The Params, in the order in which their gradients come.
    pub params: Vec<ParamId>,
    /// The type.
    pub dtype: DType,
    /// The size of what is summed over ranks.
    pub bytes: u64,
    /// What the group divides among its ranks.
    pub sharding: Sharding,
    /// Where anything is divided, how many elements each rank of the group has, one behind the other; together at least
    /// those of the Params.
    pub parts: Vec<u64>,
    /// Where the Params are divided, the place of the Span that alone uses them among its Stage's.
    pub span: Option<u32>,
    /// The type in which the Params are gathered, where they are divided; else their own.
    pub gathered: DType,
}

impl Bucket {
    /// The size of all parts, as they are gathered.
    pub(super) fn gathered_bytes(&self) -> u64 {
        let elements = self.parts.iter().fold(0, |sum: u64, &part| sum.saturating_add(part));
        elements.saturating_mul(self.gathered.bytes())
    }
}

/// Parts of the same size are multiples of so many elements: kernels and messages are fastest from aligned places.
const ALIGNED: u64 = 16;

/// Where buckets may be divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Division {
    /// Anywhere, into parts of the same size.
    #[default]
    Elements,
    /// Between Params.
    Params,
}

impl Division {
    /// How many elements each of `ranks` has of Params with these elements.
    fn parts(self, elements: &[u64], ranks: usize) -> Vec<u64> {
        let count = ranks as u64;
        let all = elements.iter().fold(0, |sum: u64, &own| sum.saturating_add(own));
        if self == Self::Elements {
            return vec![all.div_ceil(count).next_multiple_of(ALIGNED); ranks];
        }
        let mut parts = vec![0; ranks];
        let mut before: u64 = 0;
        for &own in elements {
            // A Param goes where its middle lies.
            let rank = (2 * u128::from(before) + u128::from(own)) * u128::from(count) / (2 * u128::from(all.max(1)));
            parts[(rank as usize).min(ranks - 1)] += own;
            before = before.saturating_add(own);
        }
        parts
    }
}

/// All gradients of a deployed model, and how they are summed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buckets {
    /// In the order in which the forward first uses the Params.
    pub gradients: Vec<Gradient>,
    /// Ranks, increasing: first those of each Stage, then others that hold the same Params.
    pub groups: Vec<Vec<u32>>,
    /// In the order in which they are summed: of each group in that in which they are full.
    pub buckets: Vec<Bucket>,
}

/// What is trained, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trained {
    /// The Params that get gradients.
    pub params: BTreeSet<ParamId>,
    /// Those of them that every rank holds, whatever its Stage.
    pub everywhere: BTreeSet<ParamId>,
    /// In which type they are summed over ranks.
    pub reduce: ReduceDType,
    /// Those whose Replicas divide nothing of them, whatever the Plan says.
    pub undivided: BTreeSet<ParamId>,
    /// Those whose gradients every Replica has whole, whatever the Plan says.
    pub whole_gradients: BTreeSet<ParamId>,
    /// Where buckets may be divided.
    pub division: Division,
}

impl Trained {
    /// The Params that required gradients when the Graph was captured.
    pub fn captured(graph: &Graph) -> Self {
        let trained = graph.params.iter().filter(|(_, param)| graph.values[param.value].requires_grad);
        Self { params: trained.map(|(id, _)| id).collect(), ..Self::default() }
    }
}

impl Buckets {
    /// Divides the gradients of a Graph whose Stages run on these ranks.
    pub fn of(graph: &Graph, partition: &Partition, placement: &Placement, trained: &Trained) -> Self {
        Self::new(gradients(graph, partition, placement, trained), placement, trained.division)
    }

    /// Divides gradients, given in the order in which the forward first uses their Params.
    pub fn new(gradients: Vec<Gradient>, placement: &Placement, division: Division) -> Self {
        let (own, groups) = (stage_groups(&placement.ranks), groups(&gradients, &placement.ranks));
        let group_of: BTreeMap<&[u32], u32> =
            (0..).zip(&groups).map(|(number, ranks)| (ranks.as_slice(), number)).collect();
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut to_come: BTreeMap<Alike, u64> = BTreeMap::new();
        let group = |gradient: &Gradient| group_of.get(gradient.holders.as_slice()).copied();
        for gradient in &gradients {
            if let Some(group) = group(gradient) {
                let bytes = to_come.entry(alike(group, gradient)).or_default();
                *bytes = bytes.saturating_add(gradient.bytes);
            }
        }
        // The bucket that is being filled and the size at which it is full.
        let mut open: BTreeMap<Alike, (usize, u64)> = BTreeMap::new();
        for gradient in gradients.iter().rev() {
            let Some(group) = group(gradient) else { continue };
            let key = alike(group, gradient);
            let known = open.get(&key).copied().filter(|&(place, full)| buckets[place].bytes < full);
            let (place, full) = known.unwrap_or_else(|| {
                let least = own.get(group as usize).map(|own| placement.bucket_bytes_of(own));
                let is_first = least.is_some() && !buckets.iter().any(|other| other.group == group);
                let full = match () {
                    () if gradient.span.is_some() => LARGEST_BUCKET_BYTES,
                    () if is_first => FIRST_BUCKET_BYTES,
                    () => full_bytes(to_come[&key], least.unwrap_or(BUCKET_BYTES)),
                };
                let &Gradient { dtype, sharding, span, gathered, .. } = gradient;
                let (params, parts) = (Vec::new(), Vec::new());
                buckets.push(Bucket { group, params, dtype, bytes: 0, sharding, parts, span, gathered });
                (buckets.len() - 1, full)
            });
            open.insert(key, (place, full));
            buckets[place].params.push(gradient.param);
            buckets[place].bytes = buckets[place].bytes.saturating_add(gradient.bytes);
            to_come.entry(key).and_modify(|bytes| *bytes = bytes.saturating_sub(gradient.bytes));
        }
        let elements: BTreeMap<ParamId, u64> = gradients.iter().map(|found| (found.param, found.elements)).collect();
        for bucket in buckets.iter_mut().filter(|bucket| bucket.sharding != Sharding::None) {
            let own: Vec<u64> = bucket.params.iter().map(|param| elements[param]).collect();
            bucket.parts = division.parts(&own, groups[bucket.group as usize].len());
        }
        // One that is filled while others of its group come and go is full behind them.
        let came: BTreeMap<ParamId, usize> = gradients.iter().rev().map(|found| found.param).zip(0..).collect();
        buckets.sort_by_key(|bucket| (bucket.group, bucket.params.last().map(|param| came[param])));
        Self { gradients, groups, buckets }
    }
}

/// Gradients that may share a bucket: their group, type, what is divided, by which Span it is gathered, and in which type.
type Alike = (u32, DType, Sharding, Option<u32>, DType);

fn alike(group: u32, &Gradient { dtype, sharding, span, gathered, .. }: &Gradient) -> Alike {
    (group, dtype, sharding, span, gathered)
}

/// The gradients of a Graph's Params that some rank holds.
fn gradients(graph: &Graph, partition: &Partition, placement: &Placement, trained: &Trained) -> Vec<Gradient> {
    let stage_ranks = &placement.ranks;
    let mut first_use: BTreeMap<ValueId, usize> = BTreeMap::new();
    for (place, op) in graph.ops.values().enumerate() {
        for value in op.operands() {
            first_use.entry(value).or_insert(place);
        }
    }
    let mut by_use: Vec<ParamId> = trained.params.iter().copied().collect();
    let unused = graph.ops.len();
    by_use.sort_by_key(|&param| first_use.get(&graph.params[param].value).copied().unwrap_or(unused));
    let holders = |param: ParamId| -> Vec<u32> {
        let everywhere = trained.everywhere.contains(&param);
        let stages = partition.stages.iter().zip(stage_ranks);
        let holding = stages.filter(|(part, _)| everywhere || part.params.contains(&param));
        let ranks: BTreeSet<u32> = holding.flat_map(|(_, ranks)| ranks).copied().collect();
        ranks.into_iter().collect()
    };
    let storages = Storages::new(graph);
    // What several Stages hold, or all ranks for the tail, stays whole.
    let shared = |param: ParamId, holders: &[u32]| {
        let mut own = (0..).zip(&partition.stages).filter(|(_, part)| part.params.contains(&param));
        let stage = own.next().map(|(stage, _): (usize, _)| stage).filter(|_| own.next().is_none());
        let divided = holders.len() > 1 && !trained.undivided.contains(&param);
        let stage = stage.filter(|&stage| divided && stage_ranks[stage].len() == holders.len());
        let asked = stage.and_then(|stage| placement.sharding.get(stage).copied()).unwrap_or_default();
        // What the tail adds comes with no microbatch.
        let whole = trained.whole_gradients.contains(&param) || trained.everywhere.contains(&param);
        let asked = if whole { asked.min(Sharding::Optimizer) } else { asked };
        let part = stage.map(|stage| &partition.stages[stage]).filter(|_| asked.divides_params());
        let Some(part) = part else { return (asked, None) };
        match only_span(graph, &storages, part, graph.params[param].value) {
            Some(span) => (asked, Some(span)),
            None => (Sharding::Gradients, None),
        }
    };
    let computed = computed_types(graph);
    let gradient = |param: ParamId| {
        let value = &graph.values[graph.params[param].value];
        let extents = value.shape.iter().map(|dim| u64::try_from(dim.fixed).unwrap_or(0));
        let elements = extents.fold(1, u64::saturating_mul);
        let bytes = trained.reduce.of(value.dtype).bytes().saturating_mul(elements);
        let holders = holders(param);
        let (sharding, span) = shared(param, &holders);
        let gathered = if span.is_some() { computed[&param] } else { value.dtype };
        Gradient { param, dtype: value.dtype, elements, bytes, holders, sharding, span, gathered }
    };
    by_use.into_iter().map(gradient).filter(|gradient| !gradient.holders.is_empty()).collect()
}

/// The ranks of each Stage, but of Stages with the same ones once.
pub(super) fn stage_groups(stage_ranks: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for ranks in stage_ranks {
        let ranks: Vec<u32> = ranks.iter().copied().collect::<BTreeSet<u32>>().into_iter().collect();
        if !groups.contains(&ranks) {
            groups.push(ranks);
        }
    }
    groups
}

/// The ranks of the Stages, then the other sets of holders, sorted.
fn groups(gradients: &[Gradient], stage_ranks: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut groups = stage_groups(stage_ranks);
    let shared: BTreeSet<&Vec<u32>> = gradients.iter().map(|gradient| &gradient.holders).collect();
    let others: Vec<Vec<u32>> = shared.into_iter().filter(|ranks| !groups.contains(ranks)).cloned().collect();
    groups.extend(others);
    groups
}

#[cfg(test)]
mod tests {
    use rannc_ir::Entity;

    use super::*;
    use crate::schedule::ScheduleKind;

    const MIB: u64 = 1 << 20;

    fn gradient(number: usize, bytes: u64) -> Gradient {
        Gradient {
            param: ParamId::new(number),
            dtype: DType::Float32,
            elements: bytes / 4,
            bytes,
            holders: vec![0, 1],
            sharding: Sharding::None,
            span: None,
            gathered: DType::Float32,
        }
    }

    fn divided(sizes: impl IntoIterator<Item = u64>, least: u64) -> (Vec<u64>, Vec<ParamId>) {
        buckets_of((0..).zip(sizes).map(|(number, bytes)| gradient(number, bytes)).collect(), least)
    }

    fn buckets_of(gradients: Vec<Gradient>, least: u64) -> (Vec<u64>, Vec<ParamId>) {
        let placement = Placement {
            ranks: vec![vec![0, 1]],
            microbatches: 1,
            schedule: ScheduleKind::FillDrain.into(),
            sharding: Vec::new(),
            bucket_bytes: vec![least],
        };
        let found = Buckets::new(gradients, &placement, Division::Elements);
        let params = found.buckets.iter().flat_map(|bucket| bucket.params.clone()).collect();
        (found.buckets.iter().map(|bucket| bucket.bytes).collect(), params)
    }

    #[test]
    fn buckets_are_small_at_both_ends_and_few() {
        let (sizes, params) = divided(std::iter::repeat_n(3 * MIB, 400), 25 * MIB);
        assert_eq!(params, (0..400).rev().map(ParamId::new).collect::<Vec<_>>());
        assert_eq!(sizes.iter().sum::<u64>(), 1200 * MIB);
        assert_eq!(sizes[0], 3 * MIB);
        assert!(sizes[1..].iter().all(|&bytes| bytes <= LARGEST_BUCKET_BYTES + 3 * MIB), "{sizes:?}");
        assert!(sizes[1..].is_sorted_by(|one, next| one >= next), "{sizes:?}");
        assert!(*sizes.last().unwrap() <= 28 * MIB, "{sizes:?}");
        assert!(sizes.len() < 20, "{sizes:?}");
        let (smaller, _) = divided(std::iter::repeat_n(3 * MIB, 400), MIB);
        assert_eq!(smaller[..8], sizes[..8]);
        assert_eq!(smaller.last(), Some(&(3 * MIB)));
        assert!(smaller.len() < 30, "{smaller:?}");
    }

    #[test]
    fn small_models_have_buckets_of_the_least_size() {
        let sizes = |least: u64| divided(std::iter::repeat_n(MIB, 80), least * MIB).0;
        assert_eq!(sizes(25), [1, 25, 25, 25, 4].map(|mib| mib * MIB));
        assert_eq!(sizes(128), [1, 79].map(|mib| mib * MIB));
    }

    #[test]
    fn none_waits_for_one_that_is_full_later() {
        // A table of which several Spans make use shares its bucket with what comes first.
        let (sharding, spans) = (Sharding::Params, [None, Some(0), Some(1), None]);
        let gradients = (0..).zip(spans).map(|(number, span)| Gradient { sharding, span, ..gradient(number, MIB / 2) });
        let (_, params) = buckets_of(gradients.collect(), MIB);
        assert_eq!(params, [2, 1, 3, 0].map(ParamId::new));
    }

    #[test]
    fn parts_hold_all_elements() {
        assert_eq!(Division::Elements.parts(&[5, 30], 4), [16; 4]);
        assert_eq!(Division::Elements.parts(&[0], 3), [0; 3]);
        assert_eq!(Division::Params.parts(&[5, 30, 5, 10], 2), [35, 15]);
        assert_eq!(Division::Params.parts(&[7], 3), [0, 7, 0]);
        assert_eq!(Division::Params.parts(&[0, 0], 2), [0, 0]);
    }
}
