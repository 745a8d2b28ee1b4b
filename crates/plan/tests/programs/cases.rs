//! Random cases for the tests of Programs.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use rannc_ir::{DType, ParamId, RowDim, ValueId};
use rannc_plan::testing::in_two_parts;
use rannc_plan::{
    Batch, Buckets, Call, CheckError, Crew, Crossing, Division, Gradient, InputPart, Order, OutputPart, OutputSource,
    Partition, Placement, Program, ProgramError, Schedule, ScheduleKind, Sharding, StagePart, build, check,
};

pub const ROWS: RowDim = RowDim { dim: 0, per_row: 1 };

/// All that a Program is built from.
#[derive(Clone, Debug)]
pub struct Given {
    pub placement: Placement,
    pub partition: Partition,
    pub params: Vec<Held>,
    pub batch: Batch,
    pub call: Call,
}

/// A trainable Param, and the Stages that hold it.
#[derive(Clone, Debug)]
pub struct Held {
    pub dtype: DType,
    pub bytes: u64,
    pub stages: Vec<u32>,
    /// True when its Stage's Replicas divide of it what the Placement says.
    pub divided: bool,
    /// The Span that alone uses it; without one its Stage's Replicas have it whole.
    pub span: Option<u32>,
}

impl Held {
    /// A Param of which nothing is divided.
    pub fn whole(dtype: DType, bytes: u64, stages: &[u32]) -> Self {
        Self { dtype, bytes, stages: stages.to_vec(), divided: false, span: None }
    }
}

impl Given {
    /// A chain of Stages of one Replica each on these ranks, each of which brings as many rows as there are microbatches.
    pub fn folded(ranks: &[u32], microbatches: u32, call: Call, schedule: impl Into<Schedule>) -> Self {
        let one = vec![1; ranks.len()];
        let case = Self::chain(&one, microbatches, &[], call, ScheduleKind::FillDrain);
        let world = ranks.iter().max().map_or(0, |&last| last as usize + 1);
        let placement = Placement {
            ranks: ranks.iter().map(|&rank| vec![rank]).collect(),
            schedule: schedule.into(),
            ..case.placement
        };
        let batch = Batch { rows_per_rank: vec![u64::from(microbatches); world], ..case.batch };
        Self { placement, batch, ..case }
    }

    /// A chain of Stages with ranks in order, one input, and one Value from each Stage to the next.
    pub fn chain(
        replicas: &[usize],
        microbatches: u32,
        rows_per_rank: &[u64],
        call: Call,
        schedule: ScheduleKind,
    ) -> Self {
        let mut next = 0..;
        let ranks = replicas.iter().map(|&count| next.by_ref().take(count).collect()).collect();
        let last = u32::try_from(replicas.len() - 1).expect("few stages");
        let mut partition = Partition { stages: vec![StagePart::default(); replicas.len()], ..Partition::default() };
        let input = InputPart { index: 0, value: ValueId(100), has_rows: true, requires_grad: false };
        partition.stages[0].inputs.push(input);
        partition.crossings = (0..last)
            .map(|from| Crossing { value: ValueId(from), from, to: vec![from + 1], row_dim: ROWS, requires_grad: true })
            .collect();
        let output = OutputPart {
            index: 0,
            value: ValueId(last),
            source: OutputSource::Stage(last),
            row_dim: Some(ROWS),
            requires_grad: true,
        };
        partition.outputs.push(output);
        let batch = Batch { rows_per_rank: rows_per_rank.to_vec(), gather_inputs: true };
        let placement = Placement {
            ranks,
            microbatches,
            schedule: schedule.into(),
            sharding: Vec::new(),
            bucket_bytes: Vec::new(),
        };
        Self { placement, partition, params: Vec::new(), batch, call }
    }

    /// Gradients of the Params, in the order in which the forward uses them.
    pub fn gradients(&self) -> Vec<Gradient> {
        let gradient = |(param, Held { dtype, bytes, stages, divided, span }): (u32, &Held)| {
            let mut holders: Vec<u32> =
                stages.iter().flat_map(|&stage| &self.placement.ranks[stage as usize]).copied().collect();
            holders.sort_unstable();
            holders.dedup();
            let elements = bytes / dtype.bytes();
            let stage =
                if *divided && stages.len() == 1 && holders.len() > 1 { Some(stages[0] as usize) } else { None };
            let asked = stage.and_then(|stage| self.placement.sharding.get(stage));
            let most = if span.is_some() { Sharding::Params } else { Sharding::Gradients };
            let sharding = asked.copied().unwrap_or_default().min(most);
            let span = span.filter(|_| sharding > Sharding::Gradients);
            let (dtype, bytes) = (*dtype, *bytes);
            Gradient { param: ParamId(param), dtype, elements, bytes, holders, sharding, span, gathered: dtype }
        };
        (0..).zip(&self.params).map(gradient).collect()
    }

    pub fn try_build(&self) -> Result<Program, ProgramError> {
        let buckets = Buckets::new(self.gradients(), &self.placement, Division::Elements);
        build(&self.placement, &self.partition, &buckets, &self.batch, self.call)
    }

    pub fn build(&self) -> Program {
        self.try_build().expect("the case is sound")
    }

    pub fn check(&self, program: &Program) -> Result<(), CheckError> {
        check(program, &self.partition, &self.gradients())
    }

    /// Lets backwards come in two parts where Stages do not divide gradients.
    fn split_backwards(&mut self, seed: u64) {
        let Placement { ranks, microbatches, schedule, sharding, .. } = &mut self.placement;
        let edges: Vec<(usize, usize)> = self.partition.edges().collect();
        let may_split = |crew: &Crew| crew.stages.iter().all(|&stage| sharding[stage as usize] < Sharding::Gradients);
        let order = |(crew, (seed, order)): (Crew, (u64, Order))| {
            if may_split(&crew) { in_two_parts(&order, seed) } else { order }
        };
        let orders = (seed..).zip(schedule.orders(ranks, &edges, *microbatches));
        *schedule = Schedule::Explicit(Crew::of_stages(ranks).into_iter().zip(orders).map(order).collect());
    }

    /// The same case with another call and Schedule.
    pub fn with(&self, call: Call, schedule: ScheduleKind) -> Self {
        let mut case = Self { call, ..self.clone() };
        case.placement.schedule = schedule.into();
        case
    }
}

pub fn calls() -> impl Strategy<Value = Call> {
    prop_oneof![Just(Call::Forward), Just(Call::Whole), Just(Call::Halves)]
}

pub fn schedules() -> impl Strategy<Value = ScheduleKind> {
    prop_oneof![Just(ScheduleKind::FillDrain), Just(ScheduleKind::OneForwardOneBackward)]
}

/// Partitions of one to five Stages with skips and shared Values, on shuffled ranks, some of which may have several Stages,
/// and uneven batches.
pub fn cases() -> impl Strategy<Value = Given> {
    prop_oneof![2 => Just(false), 1 => Just(true)].prop_flat_map(given)
}

/// Cases where every rank has one Stage.
pub fn lone_cases() -> impl Strategy<Value = Given> {
    given(false)
}

/// Cases where ranks may have several Stages.
pub fn shared_cases() -> impl Strategy<Value = Given> {
    given(true)
}

fn given(shared: bool) -> impl Strategy<Value = Given> {
    (vec(1..=4usize, 1..=5).prop_flat_map(move |replicas| stage_ranks(replicas, shared))).prop_flat_map(|ranks| {
        let world = ranks.iter().flatten().max().map_or(0, |&last| last as usize + 1);
        let stages = ranks.len();
        let placement = (1..=9u32, schedules(), vec(shardings(), stages));
        let placement = placement.prop_map(move |(microbatches, schedule, mut sharding)| {
            let crews = Crew::of_stages(&ranks);
            for &stage in crews.iter().filter(|crew| crew.is_shared()).flat_map(|crew| &crew.stages) {
                sharding[stage as usize] = sharding[stage as usize].min(Sharding::Optimizer);
            }
            Placement {
                ranks: ranks.clone(),
                microbatches,
                schedule: schedule.into(),
                sharding,
                bucket_bytes: Vec::new(),
            }
        });
        let parts = prop::option::of(any::<u64>());
        (placement, partitions(stages), params(stages), batches(world), calls(), parts).prop_map(
            |(placement, partition, params, batch, call, parts)| {
                let mut given = Given { placement, partition, params, batch, call };
                parts.into_iter().for_each(|seed| given.split_backwards(seed));
                given
            },
        )
    })
}

/// Ranks of Stages with so many Replicas: all different, or any of as many as the largest Stage has and up to three more.
fn stage_ranks(replicas: Vec<usize>, shared: bool) -> BoxedStrategy<Vec<Vec<u32>>> {
    let all: Vec<u32> = (0..).take(replicas.iter().sum()).collect();
    if !shared {
        let deal = move |shuffled: Vec<u32>| {
            let mut rest = shuffled.into_iter();
            replicas.iter().map(|&count| rest.by_ref().take(count).collect()).collect()
        };
        return Just(all).prop_shuffle().prop_map(deal).boxed();
    }
    let most = replicas.iter().copied().max().unwrap_or(1);
    let drawn = (0..4usize).prop_flat_map(move |more| {
        let few: Vec<u32> = all[..(most + more).min(all.len())].to_vec();
        vec(Just(few).prop_shuffle(), replicas.len()).prop_map({
            let replicas = replicas.clone();
            move |shuffled| shuffled.into_iter().zip(&replicas).map(|(ranks, &count)| ranks[..count].to_vec()).collect()
        })
    });
    drawn.prop_map(|ranks: Vec<Vec<u32>>| numbered(&ranks)).boxed()
}

/// The same ranks, numbered without a gap.
fn numbered(ranks: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let used: BTreeSet<u32> = ranks.iter().flatten().copied().collect();
    let number = |rank: &u32| u32::try_from(used.iter().take_while(|used| *used < rank).count()).expect("few");
    ranks.iter().map(|own| own.iter().map(number).collect()).collect()
}

fn shardings() -> impl Strategy<Value = Sharding> {
    prop::sample::select(Sharding::ALL.to_vec())
}

/// Params of a few bytes to more than a bucket, each on one Stage or several.
pub fn params(stages: usize) -> impl Strategy<Value = Vec<Held>> {
    let dtype = prop_oneof![4 => Just(DType::Float32), 1 => Just(DType::Float64)];
    let bytes = prop_oneof![1..100_u64, Just(1 << 20), Just(20 << 20), Just(30 << 20)];
    let held = (dtype, bytes, 0..stages, vec(prop::bool::weighted(0.2), stages), prop::bool::weighted(0.7));
    let held = (held, prop::option::weighted(0.8, 0..3u32));
    let held = held.prop_map(move |((dtype, bytes, first, also, divided), span)| {
        let holds = |&stage: &usize| stage == first || also[stage];
        Held { dtype, bytes, stages: (0..stages).filter(holds).map(stage_number).collect(), divided, span }
    });
    vec(held, 0..8)
}

fn batches(world: usize) -> impl Strategy<Value = Batch> {
    (vec(prop_oneof![0..=2u64, 0..=20u64], world), any::<bool>()).prop_map(|(mut rows_per_rank, gather_inputs)| {
        rows_per_rank[0] +=
            u64::from(rows_per_rank[0] == 0 && (!gather_inputs || rows_per_rank.iter().all(|&n| n == 0)));
        Batch { rows_per_rank, gather_inputs }
    })
}

fn partitions(stages: usize) -> impl Strategy<Value = Partition> {
    let crossing = (0..stages, vec(any::<bool>(), stages), any::<bool>());
    let input = (vec(any::<bool>(), stages), any::<bool>(), any::<bool>());
    let output = (any::<prop::sample::Index>(), 0..=stages, any::<bool>(), any::<bool>());
    (vec(crossing, 0..7), vec(input, 1..4), vec(output, 0..4)).prop_map(move |(crossings, inputs, outputs)| {
        let mut partition = Partition { stages: vec![StagePart::default(); stages], ..Partition::default() };
        for (index, (users, has_rows, requires_grad)) in (0..).zip(&inputs) {
            let input = InputPart {
                index,
                value: ValueId(100 + index),
                has_rows: *has_rows || index == 0,
                requires_grad: *requires_grad,
            };
            for (part, _) in partition.stages.iter_mut().zip(users).filter(|(_, uses)| **uses) {
                part.inputs.push(input);
            }
        }
        for (id, (from, users, requires_grad)) in (0..).zip(crossings) {
            let from = stage_number(from);
            let to: Vec<u32> = (0..).zip(&users).filter(|&(to, &uses)| uses && to > from).map(|(to, _)| to).collect();
            if !to.is_empty() {
                partition.crossings.push(Crossing { value: ValueId(id), from, to, row_dim: ROWS, requires_grad });
            }
        }
        for (index, (pick, source, has_rows, requires_grad)) in (0..).zip(outputs) {
            let shared = (source == 0 && !partition.crossings.is_empty()).then(|| pick.get(&partition.crossings));
            let (value, source) = match shared {
                Some(crossing) => (crossing.value, OutputSource::Stage(crossing.from)),
                None if source == stages => (ValueId(100), OutputSource::Input(0)),
                None => (ValueId(200 + index), OutputSource::Stage(stage_number(source))),
            };
            // Two outputs of one Value are alike.
            let known = partition.outputs.iter().find(|output| output.value == value);
            let alike = known.map_or((has_rows.then_some(ROWS), requires_grad), |own| (own.row_dim, own.requires_grad));
            let (row_dim, requires_grad) = alike;
            partition.outputs.push(OutputPart { index, value, source, row_dim, requires_grad });
        }
        partition
    })
}

fn stage_number(stage: usize) -> u32 {
    u32::try_from(stage).expect("few stages")
}
