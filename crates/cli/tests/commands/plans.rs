//! `rannc plan`, `show` and `diff`.

use insta::assert_snapshot;
use rannc_plan::{BlockPlan, Plan, Recompute, Schedule, Sharding, StagePlan};

use crate::folder::Folder;
use crate::plan_files::{write_plan, write_shared_plan};

/// A folder with a plan of two Stages.
fn planned(name: &str) -> Folder {
    let folder = Folder::new(name);
    write_plan(&folder, "plan.json", &[(6, 1), (13, 2)], |_| ());
    folder
}

#[test]
fn a_plan_file_is_shown() {
    let folder = planned("show");
    assert_snapshot!(folder.rannc("show plan.json").output());
    assert_eq!(folder.rannc("show plan.json --json").output(), folder.read("plan.json"));
}

#[test]
fn a_schedule_is_shown_alike_by_name_and_as_a_list() {
    let folder = planned("order");
    write_plan(&folder, "listed.json", &[(6, 1), (13, 2)], |plan| {
        plan.schedule = Schedule::Explicit(plan.orders().expect("it tells which Stages feed which"));
    });
    write_plan(&folder, "untold.json", &[(6, 1), (13, 2)], |plan| {
        plan.stages.iter_mut().for_each(|stage| stage.feeds = None);
    });
    let order = |file: &str| {
        let shown = folder.rannc(&format!("show {file}")).output();
        shown.split_once("Order of each stage\n").map(|(_, order)| order.trim_end().to_owned())
    };
    assert_eq!(
        order("plan.json").as_deref(),
        Some("Stage 0: F0 F1 B0 F2 B1 F3 B2 B3\n\nStage 1: F0 B0 F1 B1 F2 B2 F3 B3")
    );
    assert_eq!(order("listed.json"), order("plan.json"));
    assert_eq!(order("untold.json"), None);
}

/// What a device holds for both its Stages, and the order of both.
#[test]
fn ranks_with_several_stages_are_shown() {
    let folder = Folder::new("shared");
    write_shared_plan(&folder, "plan.json");
    assert_snapshot!(folder.rannc("show plan.json").output());
    write_plan(&folder, "other.json", &[(6, 1), (13, 1)], |_| ());
    assert_snapshot!(folder.rannc("diff plan.json other.json").output());
}

#[test]
fn ways_to_save_memory_are_shown() {
    let folder = Folder::new("saving");
    write_plan(&folder, "plan.json", &[(4, 1), (8, 2), (13, 4)], |plan| {
        plan.stages[0].blocks.iter_mut().for_each(|block| block.recompute = Recompute::Stage);
        plan.stages[1].sharding = Sharding::Optimizer;
        plan.stages[1].offload = true;
        for block in [1, 3, 4] {
            plan.stages[2].blocks[block].recompute = Recompute::Block;
        }
    });
    assert_snapshot!(folder.rannc("show plan.json").output());
}

#[test]
fn a_batch_is_divided() {
    let folder = planned("batch");
    assert_snapshot!(folder.rannc("show plan.json --batch 25").output());
    assert_snapshot!(folder.rannc("show plan.json --batch 25 --json").output());
}

#[test]
fn plans_differ() {
    let folder = planned("diff");
    write_plan(&folder, "other.json", &[(4, 1), (8, 1), (13, 1)], |plan| {
        plan.microbatches = 8;
        plan.predicted.step_us = 2750.0;
        plan.stages[0].blocks.iter_mut().for_each(|block| block.recompute = Recompute::Stage);
    });
    assert_snapshot!(folder.rannc("diff plan.json other.json").output());
    assert_snapshot!(folder.rannc("diff plan.json other.json --json").output());
    assert_eq!(folder.rannc("diff plan.json plan.json").output(), "The plans are the same.\n");
}

#[test]
fn plans_of_other_graphs_differ() {
    let folder = planned("diff-graphs");
    write_plan(&folder, "other.json", &[(6, 1), (13, 2)], |plan| {
        plan.graph_hash = "0".repeat(64);
        plan.graph_name = "Other".to_owned();
    });
    assert_snapshot!(folder.rannc("diff plan.json other.json").output());
}

#[test]
fn a_plan_is_searched_written_and_shown() {
    let folder = Folder::new("plan");
    let line = "plan graph.json --cluster cluster.toml --batch 24 --stages 2 --memory-gb 1.5";
    let seen = folder.rannc(&format!("{line} -o plan.json"));
    assert_eq!((seen.code, seen.err.as_str()), (0, "Written to plan.json\n"));
    assert_snapshot!(seen.out);
    let plan = Plan::from_json(&folder.read("plan.json")).expect("a plan");
    assert_eq!((plan.stages.len(), plan.world_size, plan.batch_rows), (2, 4, 24));
    assert_eq!(folder.rannc(&format!("{line} --json")).output(), folder.read("plan.json"));
}

#[test]
fn a_plan_of_the_version_before_is_upgraded() {
    let folder = Folder::new("upgrade");
    folder.write("old.json", include_str!("old-plan.json"));
    assert!(folder.rannc("show old.json").error().contains("`rannc upgrade PLAN GRAPH`"));
    let seen = folder.rannc("upgrade old.json graph.json -o plan.json");
    assert_eq!((seen.code, seen.err.as_str()), (0, "Written to plan.json\n"));
    assert_snapshot!(seen.out);
    let plan = Plan::from_json(&folder.read("plan.json")).expect("a plan");
    let again: Vec<usize> = plan.stages.iter().map(StagePlan::blocks_again).collect();
    assert_eq!(again, [1, 0]);
    let blocks: Vec<&BlockPlan> = plan.stages.iter().flat_map(|stage| &stage.blocks).collect();
    assert_eq!(blocks.len(), 13);
    assert_eq!(blocks[2].hash, blocks[4].hash);
    let seen = folder.rannc("upgrade plan.json graph.json");
    assert_eq!((seen.code, seen.err.as_str()), (0, "plan.json is of this version\n"));
    folder.write("cut.json", &include_str!("old-plan.json").replace("\"microbatches\": 2", "\"microbatches\": 3"));
    assert!(folder.rannc("upgrade cut.json graph.json").error().contains("checksum"));
    folder.write("other.json", &rannc_ir::testing::mlp(5, 2048).to_json());
    assert!(folder.rannc("upgrade old.json other.json").error().contains("was made for graph"));
}
