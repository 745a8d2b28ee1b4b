//! What the search predicts, against the simulator.

mod encoder;

use encoder::encoder;
use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::Graph;
use rannc_plan::{Batch, Partition, Plan, StageOps, StagePlan, build};
use rannc_search::{PlanCosts, SearchError, Settings};
use rannc_sim::{Timeline, simulate};

/// How far a prediction may be from the simulated step.
const TOLERANCE: f64 = 0.02;
/// A Stage's transfers by its computation, up to which that holds. Beyond, it matters that the runtime begins to
/// receive only one computation ahead, which the search does not model.
const TRANSFER_SHARE: f64 = 0.1;

fn simulated(graph: &Graph, cluster: &Cluster, settings: &Settings, plan: &Plan) -> Timeline {
    let cuts: Vec<StageOps> = plan.stages.iter().map(|stage| stage.ops).collect();
    let partition = Partition::new(graph, &cuts).expect("the search cuts where it may");
    let rows = plan.batch_rows / u64::from(plan.world_size);
    let batch = Batch { rows_per_rank: vec![rows; plan.world_size as usize], gather_inputs: true };
    let program = build(&plan.placement(), &partition, &batch, plan.schedule.training_mode()).expect("a program");
    let costs = PlanCosts::new(graph, cluster, &[], settings, plan).expect("its own plan");
    simulate(&program, &costs).expect("runs")
}

/// Random Stages (as many as asked for), Replicas, microbatches, Schedules, devices and links; equal rows everywhere.
fn cases() -> impl Strategy<Value = (u32, Vec<u32>, u32, bool, &'static str, u64)> {
    let replicas = prop::sample::select(vec![1_u32, 2, 4]);
    (4..16_u32, prop::collection::vec(replicas, 1..5), 0..4_u32, any::<bool>(), 1..3_u64).prop_flat_map(
        |(layers, replicas, microbatches, loss_inside, rows)| {
            let device = prop::sample::select(vec!["H200", "A100-40G", "V100-32G"]);
            (Just(layers), Just(replicas), Just(4 << microbatches), Just(loss_inside), device, Just(rows))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn predictions_agree_with_the_simulator((layers, replicas, microbatches, loss_inside, device, rows) in cases()) {
        let graph = encoder(layers, 1024, 256, 8000);
        let world_size: u32 = replicas.iter().sum();
        let cluster = Cluster::preset(device, 1, world_size).expect("devices");
        let settings = Settings {
            world_size,
            batch_rows: u64::from(world_size * microbatches) * 8 * rows,
            replicas: Some(replicas),
            microbatches: Some(microbatches),
            loss_inside,
            ..Settings::default()
        };
        let found = rannc_search::plan(&graph, &cluster, &[], &settings);
        prop_assume!(!matches!(found, Err(SearchError::DoesNotFit { .. })));
        let plan = found.expect("fits").plan;
        let is_small = |stage: &StagePlan| {
            let predicted = &stage.predicted;
            predicted.transfer_us <= TRANSFER_SHARE * (predicted.forward_us + predicted.backward_us)
        };
        prop_assume!(plan.stages.iter().all(is_small));
        let timeline = simulated(&graph, &cluster, &settings, &plan);
        let (predicted_us, simulated_us) = (plan.predicted.step_us, timeline.step_us);
        let error = predicted_us / simulated_us - 1.0;
        prop_assert!(error.abs() <= TOLERANCE, "{error:+.3}: {predicted_us} {simulated_us}");
        for (stage, planned) in (0..).zip(&plan.stages) {
            let peak = timeline.ranks.iter().filter(|rank| rank.stage == stage).map(|rank| rank.peak_bytes).max();
            let (predicted, simulated) = (planned.predicted.memory.total_bytes() as f64, peak.expect("a rank") as f64);
            prop_assert!((predicted / simulated - 1.0).abs() <= TOLERANCE, "memory {predicted} {simulated}");
        }
    }
}
