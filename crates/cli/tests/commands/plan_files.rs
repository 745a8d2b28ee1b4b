//! Plans made by hand: what a search finds may change.

use rannc_cost::Blocks;
use rannc_ir::{Analysis, Graph, OpRun};
use rannc_plan::{
    BlockPlan, MemoryPrediction, PLAN_SCHEMA, Partition, Plan, Recompute, Schedule, ScheduleKind, Sharding, StagePlan,
    StagePrediction, StepPrediction, WholePrediction,
};

use crate::folder::Folder;

const MIB: u64 = 1 << 20;

/// Writes a plan of the folder's graph whose Stages end before these ops and have so many Replicas.
pub fn write_plan(folder: &Folder, file: &str, stages: &[(u32, u32)], change: impl FnOnce(&mut Plan)) {
    let graph = Graph::from_json(&folder.read("graph.json")).expect("a graph");
    let mut plan = Plan {
        schema: PLAN_SCHEMA,
        pyrannc: "0.1.0".to_owned(),
        graph_hash: graph.hash(),
        graph_name: graph.name.clone(),
        precision: "parameters in float32, products in bfloat16".to_owned(),
        world_size: stages.iter().map(|(_, replicas)| replicas).sum(),
        batch_rows: 24,
        microbatches: 4,
        schedule: ScheduleKind::OneForwardOneBackward.into(),
        stages: Vec::new(),
        eager_spans: Vec::new(),
        memory_budget_percent: None,
        predicted: StepPrediction { step_us: 2500.0, bubble: 0.3, lower_bound_us: 2400.0 },
        checksum: String::new(),
    };
    let (mut first, mut rank) = (0, 0);
    for &(end, replicas) in stages {
        let ops = OpRun { first, end };
        plan.stages.push(stage(ops, (rank..rank + replicas).collect(), blocks_of(&graph, ops)));
        (first, rank) = (end, rank + replicas);
    }
    let cuts: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
    let feeds = Partition::new(&graph, &cuts).map(|partition| partition.feeds()).unwrap_or_default();
    plan.stages.iter_mut().zip(feeds).for_each(|(stage, feeds)| stage.feeds = Some(feeds));
    change(&mut plan);
    folder.write(file, &plan.seal().expect("consistent").to_json());
}

/// Writes a plan of four Stages on two ranks: it goes there and back like a V.
pub fn write_shared_plan(folder: &Folder, file: &str) {
    write_plan(folder, file, &[(4, 1), (7, 1), (10, 1), (13, 1)], |plan| {
        plan.world_size = 2;
        plan.stages.iter_mut().zip([0, 1, 1, 0]).for_each(|(stage, rank)| stage.ranks = vec![rank]);
        plan.schedule = Schedule::Explicit(plan.orders().expect("it tells which Stages feed which"));
    });
}

/// Each op a Block.
fn blocks_of(graph: &Graph, ops: OpRun) -> Vec<BlockPlan> {
    let runs = (ops.first..ops.end).map(|op| OpRun { first: op, end: op + 1 });
    let found = Blocks::of(graph, &Analysis::new(graph), runs.clone());
    let hash = |place: usize| found.hashes[found.blocks[place].kind as usize].clone();
    runs.enumerate().map(|(place, ops)| BlockPlan { ops, hash: hash(place), recompute: Recompute::None }).collect()
}

fn stage(ops: OpRun, ranks: Vec<u32>, blocks: Vec<BlockPlan>) -> StagePlan {
    let ops_count = ops.end - ops.first;
    let layers = u64::from(ops_count);
    let us = f64::from(ops_count) / ranks.len() as f64;
    StagePlan {
        ops,
        modules: vec![format!("layers.{}-{}", ops.first / 2, (ops.end - 1) / 2)],
        ranks,
        blocks,
        feeds: None,
        sharding: Sharding::None,
        offload: false,
        bucket_bytes: None,
        predicted: StagePrediction {
            forward_us: 100.0 * us,
            backward_us: 200.0 * us,
            transfer_us: 20.0,
            reduce_us: 50.0,
            update_us: 12.5,
            in_bytes: 48 << 10,
            out_bytes: 48 << 10,
            memory: MemoryPrediction {
                params_bytes: 16 * MIB * layers,
                grads_bytes: 16 * MIB * layers,
                optimizer_bytes: 32 * MIB * layers,
                activations_bytes: 3 * MIB * layers,
                workspace_bytes: 17 * MIB,
                comm_bytes: MIB / 2,
                framework_bytes: 512 * MIB,
            },
            whole: WholePrediction::default(),
            sizes: Vec::new(),
        },
    }
}
