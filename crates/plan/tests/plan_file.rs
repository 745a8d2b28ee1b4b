//! The plan file. `PROPTEST_CASES` runs more cases with damaged files.

use proptest::prelude::*;
use rannc_ir::OpRun;
use rannc_ir::testing::{cases, damaged, mlp};
use rannc_plan::{
    BUCKET_BYTES, BlockPlan, FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES, MemoryPrediction, Plan, PlanFault,
    PlanFileError, Recompute, Schedule, ScheduleKind, Sharding, StagePlan, StagePrediction, StepPrediction,
};

fn block(first: u32, end: u32) -> BlockPlan {
    BlockPlan { ops: OpRun { first, end }, hash: "b1".into(), recompute: Recompute::None }
}

fn stage(first: u32, end: u32, ranks: &[u32]) -> StagePlan {
    let memory = MemoryPrediction { params_bytes: 1 << 30, grads_bytes: 7, ..MemoryPrediction::default() };
    let predicted = StagePrediction { forward_us: 0.1, backward_us: 1.0 / 3.0, memory, ..StagePrediction::default() };
    StagePlan {
        ops: OpRun { first, end },
        modules: vec!["net.0-3".into()],
        ranks: ranks.to_vec(),
        blocks: if end == 0 { vec![] } else { vec![block(first, first + 2), block(first + 2, end)] },
        feeds: None,
        sharding: Sharding::None,
        offload: false,
        bucket_bytes: None,
        predicted,
    }
}

fn unsealed() -> Plan {
    Plan {
        schema: rannc_plan::PLAN_SCHEMA,
        pyrannc: "0.1.0".into(),
        graph_hash: "abc".into(),
        graph_name: "Net".into(),
        precision: "parameters in float32".into(),
        world_size: 3,
        batch_rows: 12,
        microbatches: 4,
        schedule: ScheduleKind::OneForwardOneBackward.into(),
        stages: vec![
            StagePlan { feeds: Some(vec![1]), ..stage(0, 5, &[1]) },
            StagePlan { feeds: Some(vec![]), ..stage(5, 9, &[0, 2]) },
        ],
        eager_spans: Vec::new(),
        memory_budget_percent: None,
        predicted: StepPrediction { step_us: 12.5, bubble: 0.2, lower_bound_us: 10.0 },
        checksum: String::new(),
    }
}

fn sealed() -> Plan {
    unsealed().seal().expect("the plan is consistent")
}

fn fault(change: impl Fn(&mut Plan)) -> PlanFault {
    let mut plan = unsealed();
    change(&mut plan);
    match plan.seal() {
        Err(PlanFileError::Inconsistent(fault)) => fault,
        other => panic!("the plan is inconsistent, not {other:?}"),
    }
}

#[test]
fn a_named_schedule_has_orders_where_edges_are_told() {
    let plan = sealed();
    let orders = |plan: &Plan| plan.orders().map(|orders| orders.iter().map(ToString::to_string).collect::<Vec<_>>());
    let known = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"].map(str::to_owned).to_vec();
    assert_eq!(orders(&plan), Some(known.clone()));
    let mut apart = plan.clone();
    apart.stages[0].feeds = Some(Vec::new());
    assert_eq!(orders(&apart), Some(vec![known[1].clone(); 2]));
    let mut untold = plan.clone();
    untold.stages[0].feeds = None;
    assert_eq!(orders(&untold), None);
    untold.schedule = Schedule::Explicit(plan.orders().expect("edges are told"));
    assert_eq!(orders(&untold), Some(known));
}

#[test]
fn stages_feed_later_ones() {
    for feeds in [vec![0], vec![2], vec![1, 1]] {
        assert_eq!(fault(|plan| plan.stages[0].feeds = Some(feeds.clone())), PlanFault::Feeds(0));
    }
}

#[test]
fn buckets_have_sizes_that_links_may_ask_for() {
    for bytes in [0, FIRST_BUCKET_BYTES - 1, LARGEST_BUCKET_BYTES + 1, u64::MAX] {
        let expected = PlanFault::BucketBytes { stage: 1, bytes };
        assert_eq!(fault(|plan| plan.stages[1].bucket_bytes = Some(bytes)), expected);
    }
    let mut plan = unsealed();
    plan.stages[1].bucket_bytes = Some(FIRST_BUCKET_BYTES);
    let plan = plan.seal().expect("it is consistent");
    assert_eq!(plan.placement().bucket_bytes, [BUCKET_BYTES, FIRST_BUCKET_BYTES]);
    assert_eq!(Plan::from_json(&plan.to_json()).expect("the text is a plan"), plan);
    assert!(!sealed().to_json().contains("bucket_bytes"));
}

#[test]
fn reads_what_it_writes_to_the_byte() {
    let plan = sealed();
    let text = plan.to_json();
    let again = Plan::from_json(&text).expect("the text is a plan");
    assert_eq!(again, plan);
    assert_eq!(again.to_json(), text);
    assert_eq!(again.seal().expect("still consistent").checksum, plan.checksum);
}

#[test]
fn spans_that_are_not_compiled_are_told_where_there_are_any() {
    assert!(!sealed().to_json().contains("eager_spans"));
    let plan = Plan { eager_spans: vec!["s1".into(), "s2".into()], ..unsealed() }.seal().expect("it is consistent");
    let again = Plan::from_json(&plan.to_json()).expect("the text is a plan");
    assert_eq!(again.eager_spans, ["s1", "s2"]);
}

#[test]
fn a_budget_of_compiled_spans_is_told_where_there_is_one() {
    assert!(!sealed().to_json().contains("memory_budget_percent"));
    let plan = Plan { memory_budget_percent: Some(80), ..unsealed() }.seal().expect("it is consistent");
    let again = Plan::from_json(&plan.to_json()).expect("the text is a plan");
    assert_eq!(again.memory_budget_percent, Some(80));
}

#[test]
fn a_listed_schedule_has_every_computation_once() {
    let listed = |orders: &[&str]| {
        let orders = orders.iter().map(|text| text.parse().expect("an order")).collect();
        move |plan: &mut Plan| {
            plan.microbatches = 2;
            plan.schedule = Schedule::Explicit(orders);
        }
    };
    let faults = [
        (vec!["F0 F1 B0 B1"], "its schedule lists 1 orders, but there must be 2: one of stage 0, one of stage 1"),
        (
            vec!["F0 F1 B0 B1", "F0 B0 F1"],
            "the order of stage 1 lacks a computation, or has one of a microbatch that the plan does not have",
        ),
    ];
    for (orders, expected) in faults {
        let mut plan = unsealed();
        listed(&orders)(&mut plan);
        let error = plan.seal().expect_err("it lacks something").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut plan = unsealed();
    listed(&["F0 F1 B0 B1", "F0 B0 F1 B1"])(&mut plan);
    let sealed = plan.seal().expect("the plan is consistent");
    assert_eq!(Plan::from_json(&sealed.to_json()).expect("the text is a plan"), sealed);
}

#[test]
fn the_head_of_the_file_is_plain() {
    let text = sealed().to_json();
    let head: Vec<&str> = text.lines().take(18).collect();
    assert_eq!(
        head.join("\n"),
        r#"{
  "schema": 3,
  "pyrannc": "0.1.0",
  "graph_hash": "abc",
  "graph_name": "Net",
  "precision": "parameters in float32",
  "world_size": 3,
  "batch_rows": 12,
  "microbatches": 4,
  "schedule": "1f1b",
  "stages": [
    {
      "ops": {
        "first": 0,
        "end": 5
      },
      "modules": [
        "net.0-3""#
    );
}

#[test]
fn edited_and_damaged_files_are_refused() {
    let text = sealed().to_json();
    let error = |text: &str| Plan::from_json(text).expect_err("the file is damaged");
    assert!(matches!(
        error(&text.replace("\"microbatches\": 4", "\"microbatches\": 5")),
        PlanFileError::Checksum { .. }
    ));
    assert!(matches!(error(&text.replace("\"batch_rows\": 12", "\"batch_rows\": 12.5")), PlanFileError::Form(_)));
    assert!(matches!(error(&text.replace("batch_rows", "batch_lines")), PlanFileError::Form(_)));
    assert!(matches!(error(&text[..text.len() / 2]), PlanFileError::NotJson(_)));
    assert!(matches!(error("[]"), PlanFileError::Schema { .. }));
    assert_eq!(
        error(&text.replace("\"schema\": 3", "\"schema\": 4")).to_string(),
        "the plan file has schema 4, this RaNNC reads schema 3; make the plan again with this version"
    );
}

#[test]
fn inconsistent_plans_are_refused() {
    assert_eq!(fault(|plan| plan.stages.clear()), PlanFault::NoStages);
    assert_eq!(fault(|plan| plan.microbatches = 0), PlanFault::NoMicrobatches);
    assert_eq!(fault(|plan| plan.batch_rows = 0), PlanFault::NoRows);
    let few_rows = PlanFault::FewRows { microbatches: u32::MAX, rows: 12 };
    assert_eq!(fault(|plan| plan.microbatches = u32::MAX), few_rows);
    let many = |plan: &mut Plan| (plan.microbatches, plan.batch_rows) = (u32::MAX, u64::MAX);
    assert_eq!(fault(many), PlanFault::TooManyMicrobatches(u32::MAX));
    assert_eq!(fault(|plan| plan.world_size = u32::MAX), PlanFault::TooManyRanks(u32::MAX));
    assert_eq!(fault(|plan| plan.memory_budget_percent = Some(101)), PlanFault::MemoryBudget(101));
    let gap = PlanFault::Ops { stage: 1, first: 6, end: 9, expected: 5 };
    assert_eq!(fault(|plan| plan.stages[1].ops.first = 6), gap);
    let none = PlanFault::Ops { stage: 1, first: 5, end: 5, expected: 5 };
    assert_eq!(fault(|plan| plan.stages[1].ops.end = 5), none);
    assert_eq!(fault(|plan| plan.stages[0].ranks.clear()), PlanFault::NoRanks(0));
    assert_eq!(fault(|plan| plan.stages[1].ranks.push(2)), PlanFault::RankTwice { stage: 1, rank: 2 });
    let outside = PlanFault::RankOutside { stage: 0, rank: 3, world_size: 3 };
    assert_eq!(fault(|plan| plan.stages[0].ranks.push(3)), outside);
    assert_eq!(fault(|plan| plan.world_size = 4), PlanFault::RankUnused(3));
    assert_eq!(fault(|plan| plan.predicted.step_us = f64::NAN), PlanFault::NotFinite);
}

#[test]
fn files_are_written_and_read() {
    let folder = std::env::temp_dir().join(format!("rannc-plan-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
    let path = folder.join("plan.json");
    let plan = sealed();
    plan.write(&path).expect("the folder is writable");
    assert_eq!(Plan::read(&path).expect("the file was just written"), plan);
    std::fs::remove_dir_all(&folder).expect("the folder was just made");
    assert!(matches!(Plan::read(&path), Err(PlanFileError::Read { .. })));
    assert!(matches!(plan.write(&path), Err(PlanFileError::Write { .. })));
}

#[test]
fn other_worlds_are_refused() {
    let plan = sealed();
    assert!(plan.check_world(3).is_ok());
    assert_eq!(
        plan.check_world(4).expect_err("the plan is for 3").to_string(),
        "the plan is for 3 ranks, this job has 4; start 3 ranks or make a plan for 4"
    );
}

#[test]
fn other_graphs_are_refused() {
    let (graph, other) = (mlp(2, 8), mlp(3, 8));
    let plan = Plan { graph_hash: graph.hash(), ..unsealed() }.seal().expect("the plan is consistent");
    assert!(plan.check_graph(&graph).is_ok());
    assert!(matches!(plan.check_graph(&other), Err(PlanFileError::OtherGraph { .. })));
}

#[test]
fn a_model_without_main_ops_is_one_stage() {
    let plan = Plan { stages: vec![stage(0, 0, &[0, 1, 2])], ..unsealed() };
    assert!(plan.seal().is_ok());
}

/// Four Stages on two ranks, there and back.
fn folded() -> Plan {
    let stages = [stage(0, 5, &[1]), stage(5, 9, &[0]), stage(9, 13, &[0]), stage(13, 17, &[1])];
    let mut plan = Plan { world_size: 2, microbatches: 1, stages: stages.into(), ..unsealed() };
    plan.schedule = listed(&["F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1"]);
    plan
}

fn listed(orders: &[&str]) -> Schedule {
    Schedule::Explicit(orders.iter().map(|text| text.parse().expect("an order")).collect())
}

#[test]
fn a_rank_may_have_several_stages() {
    let plan = folded().seal().expect("the plan is consistent");
    assert_eq!(Plan::from_json(&plan.to_json()).expect("just written"), plan);
    let crews = plan.crews();
    assert_eq!(crews.iter().map(ToString::to_string).collect::<Vec<_>>(), ["stages 0, 3", "stages 1, 2"]);
    let one = plan.stages[0].predicted.memory;
    assert_eq!(plan.memory_of(&crews[0]).total_bytes(), 2 * one.total_bytes());
    let error = plan.check_runnable().expect_err("one stage a rank is run");
    assert_eq!(
        error.to_string(),
        "rank 1 of the plan has stages 0, 3; this RaNNC can show and simulate several stages on a rank, but runs only one: \
         give every rank one stage, as all plans of its own search do"
    );
    assert!(unsealed().seal().expect("consistent").check_runnable().is_ok());
}

#[test]
fn orders_of_shared_ranks_name_their_stages() {
    let faults = [
        (vec!["F0 B0"; 4], "lists 4 orders, but there must be 2: one of stages 0, 3, one of stages 1, 2;"),
        (vec!["F0@0 F0@3 B0@3 B0@0", "F0 B0"], "the order of stages 1, 2 must name one of its ranks' stages"),
        (vec!["F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@1"], "the order of stages 1, 2 lacks a computation"),
    ];
    for (orders, expected) in faults {
        let error = Plan { schedule: listed(&orders), ..folded() }.seal().expect_err("it is wrong").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut plan = folded();
    plan.stages[3].ranks = vec![1, 0];
    plan.stages[3].sharding = Sharding::Gradients;
    assert!(plan.seal().expect_err("in turn").to_string().contains("the replicas of stage 3 divide gradients or"));
}

#[test]
fn blocks_make_up_their_stage() {
    let run = |first, end| OpRun { first, end };
    for runs in
        [vec![run(4, 9)], vec![run(5, 5), run(5, 9)], vec![run(5, 8)], vec![run(5, 7), run(6, 9)], vec![run(5, 10)]]
    {
        let blocks = runs.into_iter().map(|OpRun { first, end }| block(first, end)).collect::<Vec<_>>();
        let found = fault(|plan| plan.stages[1].blocks = blocks.clone());
        assert_eq!(found, PlanFault::Blocks(1));
    }
    let found = fault(|plan| plan.stages[1].blocks[1].recompute = Recompute::Stage);
    assert_eq!(found, PlanFault::Recompute(1));
    let mut plan = unsealed();
    plan.stages[1].blocks[1].recompute = Recompute::Block;
    let plan = plan.seal().expect("a block of its own");
    assert_eq!(Plan::from_json(&plan.to_json()).expect("just written"), plan);
    let error = plan.check_runnable().expect_err("cannot be run yet");
    assert!(error.to_string().starts_with("stage 1 of the plan asks for recomputation"), "{error}");
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn damaged_files_are_refused(text in damaged(Just(sealed().to_json()))) {
        // Damage that JSON does not see, of spaces or the order of fields, does no harm.
        match Plan::from_json(&text) {
            Ok(plan) => prop_assert_eq!(plan, sealed()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn what_is_sealed_can_be_read(text in damaged(Just(sealed().to_json()))) {
        let Ok(plan) = serde_json::from_str::<Plan>(&text) else { return Ok(()) };
        match plan.seal() {
            Ok(plan) => {
                let again = Plan::from_json(&plan.to_json());
                prop_assert!(plan.schema != rannc_plan::PLAN_SCHEMA || again.is_ok_and(|again| again == plan));
                prop_assert_eq!(plan.placement().ranks.len(), plan.stages.len());
                for memory in plan.stages.iter().map(|stage| stage.predicted.memory) {
                    prop_assert!(memory.params_bytes <= memory.total_bytes());
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn the_seed_of_the_fuzz_target_can_be_sealed() {
    let seed = include_str!("../../../fuzz/seeds/plan/plan.json");
    let plan: Plan = serde_json::from_str(seed).expect("of the form of a plan");
    assert_eq!(plan.seal().expect("consistent").stages.len(), 2);
}
