//! What cannot be simulated, and what is said about it.

use rannc_plan::{Action, Call, Message, Payload, Program, ScheduleKind};
use rannc_sim::simulate;

use crate::cases::{TableCosts, chain};

fn refusal(program: &Program, costs: &TableCosts) -> String {
    simulate(program, costs).expect_err("the program cannot run").to_string()
}

fn small() -> (Program, TableCosts) {
    (chain(&[1, 1], 2, 2, (Call::Whole, ScheduleKind::OneForwardOneBackward)), TableCosts::uniform(2, 2, 1.0, 2.0))
}

#[test]
fn ranks_that_wait_for_each_other() {
    let (mut program, costs) = small();
    program.ranks[0].forward.retain(|action| !matches!(action, Action::Send(message) if message.mb == 1));
    let expected = "deadlock: rank 0 waits in action 6, Backward(mb 1); rank 1 waits in action 5, Forward(mb 1);";
    assert_eq!(refusal(&program, &costs), expected);
}

#[test]
fn a_reduction_without_all_replicas() {
    let mut program = chain(&[2], 1, 2, (Call::Whole, ScheduleKind::OneForwardOneBackward));
    program.ranks[1].forward.retain(|action| !matches!(action, Action::AllReduce { .. }));
    let text = refusal(&program, &TableCosts::uniform(1, 2, 1.0, 2.0));
    assert_eq!(text, "deadlock: rank 0 waits in action 1, AllReduce(bucket 0, 80 bytes over group 0);");
}

#[test]
fn a_peer_that_does_not_exist() {
    let (mut program, costs) = small();
    let message = Message { mb: 0, peer: 7, kind: Payload::Value, stages: None, pieces: Vec::new() };
    program.ranks[0].forward.push(Action::Send(message));
    let text = refusal(&program, &costs);
    assert!(text.ends_with("a message comes from or goes to a rank that does not exist"), "{text}");
}

#[test]
fn a_microbatch_that_does_not_exist() {
    let (mut program, costs) = small();
    program.ranks[0].forward.push(Action::Forward { mb: 2, stage: None });
    assert!(refusal(&program, &costs).ends_with("a rank computes what stage_rows does not have"));
}

#[test]
fn ranks_out_of_order() {
    let (mut program, costs) = small();
    program.ranks.swap(0, 1);
    assert!(refusal(&program, &costs).ends_with("the ranks are not numbered in order"));
}

#[test]
fn costs_that_are_no_times() {
    let (program, mut costs) = small();
    costs.stages[1].backward_us = -1.0;
    let expected =
        "the cost model gives the backward of 1 rows in stage 1 -1 us; a time must be finite and not negative";
    assert_eq!(refusal(&program, &costs), expected);
    costs.stages[1] = costs.stages[0].clone();
    costs.byte_us[0] = f64::NAN;
    assert!(refusal(&program, &costs).contains("NaN us"));
    costs.byte_us[0] = 0.0;
    costs.stages[0].update_us = f64::INFINITY;
    assert!(refusal(&program, &costs).contains("the update of stage 0 inf us"));
}
