//! What is said of Replicas that divide parameters, against what the runtime divides.

mod encoder;

use encoder::encoder;
use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::Graph;
use rannc_ir::testing::graphs;
use rannc_plan::{Buckets, Plan, Sharding, Trained};
use rannc_search::{PlanCosts, Savers, SearchError, Settings};

/// Each amount of a Plan is cut off to whole bytes.
const CUT_OFF: f64 = 4.0;

/// All Replicas divide parameters.
fn settings(replicas: Vec<u32>, batch_rows: u64) -> Settings {
    let savers = Savers { sharding: Sharding::Params, least_sharding: Sharding::Params, ..Savers::default() };
    Settings { world_size: replicas.iter().sum(), replicas: Some(replicas), batch_rows, savers, ..Settings::default() }
}

/// By Stage, the parameters that a rank need not keep, because other Replicas do, and how many it keeps whole.
fn left_out(graph: &Graph, plan: &Plan) -> Vec<(f64, usize)> {
    let partition = plan.partition(graph).expect("the search cuts where it may");
    let buckets = Buckets::of(graph, &partition, &plan.placement(), &Trained::captured(graph));
    let of_stage = |ranks: &Vec<u32>| {
        let held = buckets.gradients.iter().filter(|gradient| gradient.holders.contains(&ranks[0]));
        let (divided, whole): (Vec<_>, Vec<_>) = held.partition(|gradient| gradient.span.is_some());
        let bytes: u64 = divided.iter().map(|gradient| gradient.elements * gradient.dtype.bytes()).sum();
        (bytes as f64 * (1.0 - 1.0 / ranks.len() as f64), whole.len())
    };
    plan.placement().ranks.iter().map(of_stage).collect()
}

/// By Stage, by how much memory for parameters is said to be less than where Replicas divide nothing.
fn said_to_be_left_out(graph: &Graph, cluster: &Cluster, settings: &Settings, plan: &Plan) -> Vec<f64> {
    let mut undivided = plan.clone();
    undivided.stages.iter_mut().for_each(|stage| stage.sharding = Sharding::None);
    let undivided = undivided.seal().expect("it is consistent");
    let costs = PlanCosts::new(graph, cluster, &[], settings, &undivided).expect("of this graph");
    let undivided = costs.predicted().expect("figures");
    let less = plan.stages.iter().zip(&undivided.stages).map(|(stage, undivided)| {
        let params_bytes = stage.predicted.memory.params_bytes - stage.predicted.whole.params_bytes;
        undivided.predicted.memory.params_bytes as f64 - params_bytes as f64
    });
    less.collect()
}

#[test]
fn a_table_that_both_ends_of_a_stage_use_is_whole() {
    let (graph, cluster) = (encoder(6, 256, 64, 10_000), Cluster::preset("H200", 1, 4).expect("devices"));
    for replicas in [vec![4], vec![2, 2]] {
        let settings = settings(replicas, 16);
        let plan = rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan;
        let said = said_to_be_left_out(&graph, &cluster, &settings, &plan);
        for ((bytes, whole), said) in left_out(&graph, &plan).into_iter().zip(said) {
            assert!((said - bytes).abs() <= CUT_OFF && whole == 1, "{said} {bytes} {whole}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_stage_leaves_out_less_than_said(
        graph in graphs(),
        replicas in prop::collection::vec(2..4_u32, 1..3),
        limit_kib in prop::option::of(2..30_u64),
    ) {
        let settings = settings(replicas, 120);
        let savers = Savers { recompute: true, ..settings.savers };
        let settings = Settings { memory_limit_bytes: limit_kib.map(|kib| kib << 10), savers, ..settings };
        let mut cluster = Cluster::preset("cpu", 1, settings.world_size).expect("devices");
        cluster.kinds[0].framework_bytes = 0;
        match rannc_search::plan(&graph, &cluster, &[], &settings) {
            Ok(found) => {
                let said = said_to_be_left_out(&graph, &cluster, &settings, &found.plan);
                for (said, (bytes, _)) in said.into_iter().zip(left_out(&graph, &found.plan)) {
                    prop_assert!(said <= bytes + CUT_OFF, "{said} {bytes}");
                }
            }
            Err(SearchError::Empty { .. } | SearchError::TooFewBlocks { .. } | SearchError::DoesNotFit(_)) => {}
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}
