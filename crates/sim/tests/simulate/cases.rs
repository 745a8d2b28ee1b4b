//! Programs and costs for the tests.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use rannc_ir::testing::{graphs, mlp};
use rannc_ir::{Analysis, Graph, OpRun, ValueId};
use rannc_plan::{
    Action, Batch, Buckets, Call, Partition, Placement, Program, Recompute, Schedule, ScheduleKind, Sharding, Trained,
    build,
};
use rannc_sim::{Costs, Timeline, simulate};

/// Costs of a Stage; times and bytes of rows are for each row.
#[derive(Clone, Debug, Default)]
pub struct StageCosts {
    pub forward_us: f64,
    pub backward_us: f64,
    pub reduce_us: f64,
    pub update_us: f64,
    pub fixed_bytes: u64,
    pub row_bytes: u64,
    pub row_workspace_bytes: u64,
}

/// Costs from a table. A Value has one byte a row.
#[derive(Clone, Debug, Default)]
pub struct TableCosts {
    pub stages: Vec<StageCosts>,
    /// By member, of every sum over several Stages.
    pub tied_us: f64,
    /// By receiving rank, of every message.
    pub latency_us: Vec<f64>,
    /// By sending rank, of every byte.
    pub byte_us: Vec<f64>,
}

impl TableCosts {
    /// Equal Stages; messages take no time.
    pub fn uniform(stages: usize, ranks: usize, forward_us: f64, backward_us: f64) -> Self {
        let stage = StageCosts { forward_us, backward_us, ..StageCosts::default() };
        Self { stages: vec![stage; stages], tied_us: 0.0, latency_us: vec![0.0; ranks], byte_us: vec![0.0; ranks] }
    }

    pub fn run(&self, program: &Program) -> Timeline {
        simulate(program, self).expect("the program is sound")
    }

    fn stage(&self, stage: u32) -> &StageCosts {
        &self.stages[stage as usize]
    }
}

/// What the parts of a backward take, by the whole.
pub const INPUT_SHARE: f64 = 0.5;
pub const WEIGHT_SHARE: f64 = 0.75;

impl Costs for TableCosts {
    fn forward_us(&self, stage: u32, rows: u64) -> f64 {
        self.stage(stage).forward_us * rows as f64
    }
    fn backward_us(&self, stage: u32, rows: u64) -> f64 {
        self.stage(stage).backward_us * rows as f64
    }
    fn backward_input_us(&self, stage: u32, rows: u64) -> f64 {
        INPUT_SHARE * self.backward_us(stage, rows)
    }
    fn backward_weight_us(&self, stage: u32, rows: u64) -> f64 {
        WEIGHT_SHARE * self.backward_us(stage, rows)
    }
    fn waiting_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.microbatch_bytes(stage, rows) / 2
    }
    fn send_us(&self, src: u32, dst: u32, bytes: u64) -> f64 {
        self.latency_us[dst as usize] + self.byte_us[src as usize] * bytes as f64
    }
    fn value_bytes(&self, _: ValueId, rows: u64) -> u64 {
        rows
    }
    fn reduce_us(&self, stage: u32, _: u64) -> f64 {
        self.stage(stage).reduce_us
    }
    fn reduce_scatter_us(&self, stage: u32, _: u64) -> f64 {
        self.stage(stage).reduce_us / 2.0
    }
    fn gather_us(&self, stage: u32, _: u64) -> f64 {
        self.stage(stage).reduce_us / 4.0
    }
    fn reduce_tied_us(&self, ranks: &[u32], _: u64) -> f64 {
        self.tied_us * ranks.len() as f64
    }
    fn update_us(&self, stage: u32) -> f64 {
        self.stage(stage).update_us
    }
    fn fixed_bytes(&self, stage: u32) -> u64 {
        self.stage(stage).fixed_bytes
    }
    fn framework_bytes(&self, stage: u32) -> u64 {
        self.stage(stage).fixed_bytes.min(7)
    }
    fn microbatch_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.stage(stage).row_bytes * rows
    }
    fn workspace_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.stage(stage).row_workspace_bytes * rows
    }
}

/// How a call comes, and in which order.
pub type Way = (Call, ScheduleKind);

/// The Program of a Graph cut before these main Ops, with the ranks in order and `rows` rows in all, and without exchanges.
pub fn program(graph: &Graph, cuts: &[u32], replicas: &[usize], microbatches: u32, rows: u64, way: Way) -> Program {
    divided_program(graph, cuts, replicas, &[], microbatches, rows, way)
}

/// The same where the Replicas of each Stage divide so much.
pub fn divided_program(
    graph: &Graph,
    cuts: &[u32],
    replicas: &[usize],
    sharding: &[Sharding],
    microbatches: u32,
    rows: u64,
    way: (Call, impl Into<Schedule>),
) -> Program {
    let mut program = whole_program(graph, cuts, replicas, sharding, microbatches, rows, way);
    let is_between_stages = |action: &Action| !matches!(action, Action::Exchange(_));
    for own in &mut program.ranks {
        own.forward.retain(is_between_stages);
        own.backward.retain(is_between_stages);
    }
    program
}

/// The same with exchanges; the first rank has all rows.
pub fn whole_program(
    graph: &Graph,
    cuts: &[u32],
    replicas: &[usize],
    sharding: &[Sharding],
    microbatches: u32,
    rows: u64,
    way: (Call, impl Into<Schedule>),
) -> Program {
    let (call, schedule) = way;
    let mut ranks = 0..;
    let ranks: Vec<Vec<u32>> = replicas.iter().map(|&count| ranks.by_ref().take(count).collect()).collect();
    placed_program(graph, cuts, ranks, sharding, microbatches, rows, (call, schedule.into()))
}

/// The same where Stages have these ranks.
pub fn placed_program(
    graph: &Graph,
    cuts: &[u32],
    ranks: Vec<Vec<u32>>,
    sharding: &[Sharding],
    microbatches: u32,
    rows: u64,
    (call, schedule): (Call, Schedule),
) -> Program {
    let end = u32::try_from(Analysis::new(graph).main_ops.len()).expect("small");
    let ends: Vec<u32> = [0].into_iter().chain(cuts.iter().copied()).chain([end]).collect();
    let runs: Vec<OpRun> = ends.windows(2).map(|ends| OpRun { first: ends[0], end: ends[1] }).collect();
    // A Graph may have nothing that depends on the batch.
    let blocks: Vec<(OpRun, Recompute)> =
        runs.iter().filter(|ops| ops.first < ops.end).map(|&ops| (ops, Recompute::None)).collect();
    let partition = Partition::new(graph, &runs).and_then(|found| found.with_spans(graph, &blocks));
    let partition = partition.expect("the cuts are allowed");
    let mut rows_per_rank = vec![0; 1 + ranks.iter().flatten().max().map_or(0, |&last| last as usize)];
    rows_per_rank[0] = rows;
    let batch = Batch { rows_per_rank, gather_inputs: true };
    let placement = Placement { ranks, microbatches, schedule, sharding: sharding.to_vec(), bucket_bytes: Vec::new() };
    let buckets = Buckets::of(graph, &partition, &placement, &Trained::captured(graph));
    build(&placement, &partition, &buckets, &batch, call).expect("the case is sound")
}

/// A chain of Stages, each of which sends one Value to the next.
pub fn chain(replicas: &[usize], microbatches: u32, rows: u64, way: Way) -> Program {
    let layers = u32::try_from(replicas.len()).expect("few stages");
    let cuts: Vec<u32> = (1..layers).map(|layer| 2 * layer).collect();
    program(&mlp(layers, 4), &cuts, replicas, microbatches, rows, way)
}

pub fn ways() -> impl Strategy<Value = Way> {
    let calls = prop_oneof![Just(Call::Forward), Just(Call::Whole), Just(Call::Halves)];
    (calls, prop_oneof![Just(ScheduleKind::FillDrain), Just(ScheduleKind::OneForwardOneBackward)])
}

fn shardings() -> impl Strategy<Value = Sharding> {
    prop::sample::select(Sharding::ALL.to_vec())
}

/// Random graphs cut where it is allowed, with up to three Replicas a Stage, on ranks of their own or on three ranks that all
/// share, and rows that do not divide.
pub fn programs() -> impl Strategy<Value = Program> {
    let replicas = vec(1..=3_usize, 5);
    let sharding = vec(shardings(), 5);
    let counts = (1..=6_u32, 1..=40_u64, prop::option::of(0..3_usize));
    (graphs(), vec(any::<Index>(), 0..5), replicas, sharding, counts, ways()).prop_map(
        |(graph, picks, replicas, sharding, (microbatches, rows, shared), way)| {
            let cuts = Analysis::new(&graph).cuts;
            let end = u32::try_from(cuts.len() - 1).expect("small");
            let allowed: Vec<u32> = (1..end).filter(|&cut| cuts[cut as usize].is_none()).collect();
            let chosen = picks.iter().filter(|_| !allowed.is_empty()).map(|pick| *pick.get(&allowed));
            let chosen: Vec<u32> = chosen.collect::<BTreeSet<u32>>().into_iter().take(4).collect();
            let replicas = &replicas[..=chosen.len()];
            match shared {
                None => whole_program(&graph, &chosen, replicas, &sharding, microbatches, rows, way),
                Some(first) => {
                    let ranks = shared_ranks(replicas, first);
                    placed_program(&graph, &chosen, ranks, &[], microbatches, rows, (way.0, way.1.into()))
                }
            }
        },
    )
}

/// The Replicas of Stages dealt out to three ranks, or to as many as there are.
fn shared_ranks(replicas: &[usize], first: usize) -> Vec<Vec<u32>> {
    let world = replicas.iter().sum::<usize>().min(3);
    let mut places = (first..).map(|place| u32::try_from(place % world).expect("few"));
    replicas.iter().map(|&count| places.by_ref().take(count).collect()).collect()
}

/// Programs with random costs; messages may take longer than computations.
pub fn priced_programs() -> impl Strategy<Value = (Program, TableCosts)> {
    (programs(), vec(stage_costs(), 5), 0.0..5.0, vec(0.0..5.0, 15), vec(0.0..1.0, 15)).prop_map(
        |(program, stages, tied_us, latency_us, byte_us)| {
            (program, TableCosts { stages, tied_us, latency_us, byte_us })
        },
    )
}

fn stage_costs() -> impl Strategy<Value = StageCosts> {
    ((0.0..4.0, 0.0..8.0, 0.0..20.0, 0.0..20.0), (0..100_u64, 0..100_u64, 0..100_u64)).prop_map(
        |((forward_us, backward_us, reduce_us, update_us), (fixed_bytes, row_bytes, row_workspace_bytes))| StageCosts {
            forward_us,
            backward_us,
            reduce_us,
            update_us,
            fixed_bytes,
            row_bytes,
            row_workspace_bytes,
        },
    )
}

/// Fails unless two times are equal but for rounding.
#[track_caller]
pub fn assert_close(found_us: f64, expected_us: f64) {
    let tolerance = 1e-9 * expected_us.abs().max(1.0);
    assert!((found_us - expected_us).abs() <= tolerance, "{found_us} us instead of {expected_us} us");
}
