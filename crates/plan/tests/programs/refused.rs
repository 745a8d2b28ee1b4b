//! What no Program can be built from.

use rannc_plan::{Call, Crossing, PlanFault, ProgramError, ScheduleKind};

use crate::cases::Given;

fn error(change: impl Fn(&mut Given)) -> ProgramError {
    let mut case = Given::chain(&[1, 2], 2, &[1, 1, 1], Call::Whole, ScheduleKind::OneForwardOneBackward);
    change(&mut case);
    case.try_build().expect_err("the arguments contradict each other")
}

#[test]
fn contradictions_are_refused() {
    assert_eq!(error(|case| case.batch.rows_per_rank = vec![1]), ProgramError::WorldSize { plan: 3, given: 1 });
    let twice = ProgramError::Placement(PlanFault::RankTwice { stage: 1, rank: 2 });
    assert_eq!(error(|case| case.placement.ranks[1].push(2)), twice);
    let never = ProgramError::Placement(PlanFault::NoMicrobatches);
    assert_eq!(error(|case| case.placement.microbatches = 0), never);
    assert_eq!(error(|case| drop(case.partition.stages.pop())), ProgramError::Stages { plan: 2, partition: 1 });
    let backward = |case: &mut Given| {
        let crossing = case.partition.crossings[0].clone();
        case.partition.crossings[0] = Crossing { from: 1, to: vec![0], ..crossing };
    };
    assert!(matches!(error(backward), ProgramError::Crossing { .. }));
    assert!(matches!(error(|case| case.partition.crossings[0].to.push(2)), ProgramError::Crossing { .. }));
    assert_eq!(error(|case| case.batch.rows_per_rank = vec![u64::MAX, 1, 0]), ProgramError::TooManyRows);
}

#[test]
fn an_empty_batch_is_refused() {
    assert_eq!(
        error(|case| case.batch.rows_per_rank = vec![0; 3]).to_string(),
        "the batch has no rows; give at least one row"
    );
    let others_only = error(|case| {
        case.batch.rows_per_rank = vec![0, 1, 1];
        case.batch.gather_inputs = false;
    });
    assert_eq!(others_only.to_string(), "the batch has no rows; give at least one row on rank 0");
}
