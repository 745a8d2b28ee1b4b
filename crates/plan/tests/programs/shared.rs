//! Ranks with several Stages.

use rannc_ir::DType;
use rannc_plan::{
    Action, Call, CheckError, Order, PlanFault, Program, ProgramError, Schedule, ScheduleKind, Sharding, grid,
};

use crate::cases::{Given, Held};
use crate::oracle;

const FILL_DRAIN: ScheduleKind = ScheduleKind::FillDrain;
const ONE_FORWARD_ONE_BACKWARD: ScheduleKind = ScheduleKind::OneForwardOneBackward;

fn draw(case: &Given) -> String {
    let program = case.build();
    case.check(&program).expect("built programs are sound");
    oracle::run(case, &program).expect("checked programs run");
    grid(&program).expect("checked programs come to their end")
}

fn listed(orders: &[&str]) -> Schedule {
    Schedule::Explicit(orders.iter().map(|text| text.parse::<Order>().expect("an order")).collect())
}

fn list(actions: &[Action]) -> String {
    actions.iter().map(|action| format!("{action}\n")).collect()
}

#[test]
fn interleaved() {
    let case = Given::folded(&[0, 1, 0, 1], 4, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    assert_eq!(
        draw(&case),
        "\
0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B0@0 B1@2 F2@2 B1@0 .    B2@2 F3@2 B2@0 .    B3@2 .    B3@0
1: .    F0@1 F1@1 F0@3 B0@3 F1@3 B0@1 B1@3 F2@1 B1@1 F2@3 B2@3 F3@1 B2@1 F3@3 B3@3 .    B3@1 .
"
    );
    let case = Given::folded(&[0, 1, 0, 1], 2, Call::Halves, FILL_DRAIN);
    assert_eq!(
        draw(&case),
        "\
0: F0@0 F1@0 F0@2 F1@2 .    .    B0@2 B1@2 B0@0 B1@0
1: .    F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1 .
"
    );
    let case = Given::folded(&[0, 1, 0, 1], 2, Call::Forward, ONE_FORWARD_ONE_BACKWARD);
    assert_eq!(
        draw(&case),
        "\
0: F0@0 F1@0 F0@2 F1@2 .
1: .    F0@1 F1@1 F0@3 F1@3
"
    );
}

/// Between the second and the third Stage there is no message.
#[test]
fn shaped_like_a_v() {
    let case = Given::folded(&[0, 1, 1, 0], 4, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    assert_eq!(
        draw(&case),
        "\
0: F0@0 F1@0 F2@0 F0@3 B0@3 F1@3 B1@3 B0@0 F3@0 B1@0 .    F2@3 B2@3 F3@3 B3@3 B2@0 .    B3@0
1: .    F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1 F2@1 F2@2 F3@1 F3@2 B2@2 B2@1 B3@2 B3@1 .
"
    );
    let case = Given::folded(&[0, 1, 1, 0], 1, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    assert_eq!(
        list(&case.build().ranks[1].forward),
        "\
Exchange(mb 0, inputs to rank 0: v100[1..2])
Recv(mb 0, values from rank 0, stage 0 to 1: v0[0..2])
Forward(mb 0, stage 1)
Recv(mb 0, gradients from rank 0, stage 3 to 2: v2[0..2])
Forward(mb 0, stage 2)
Send(mb 0, values to rank 0, stage 2 to 3: v2[0..2])
Exchange(mb 0, outputs from rank 0: v3[1..2])
Backward(mb 0, stage 2)
Backward(mb 0, stage 1)
Send(mb 0, gradients to rank 0, stage 1 to 0: v0[0..2])
"
    );
}

#[test]
fn first_and_last_stage_on_one_rank() {
    let case = Given::folded(&[0, 1, 2, 0], 3, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    assert_eq!(
        draw(&case),
        "\
0: F0@0 F1@0 F2@0 F0@3 B0@3 F1@3 B1@3 B0@0 F2@3 B1@0 B2@3 .    .    B2@0
1: .    F0   F1   F2   .    .    B0   .    B1   .    .    .    B2   .
2: .    .    F0   F1   .    B0   F2   B1   .    .    .    B2   .    .
"
    );
    assert_eq!(
        list(&case.build().ranks[1].forward[..4]),
        "\
Exchange(mb 0, inputs to rank 0: v100[1..2])
Exchange(mb 1, inputs to rank 0: v100[1..2])
Exchange(mb 2, inputs to rank 0: v100[1..2])
Recv(mb 0, values from rank 0, stage 0 to 1: v0[0..3])
"
    );
}

/// A listed order has one line for the ranks of the same Stages, as the grid has for each rank.
#[test]
fn a_listed_order_is_run_as_it_stands() {
    let orders = ["F0@0 F1@0 F0@3 I0@3 F1@3 B1@3 W0@3 B0@0 B1@0", "F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1"];
    let case = Given::folded(&[0, 1, 1, 0], 2, Call::Whole, listed(&orders));
    let drawn = draw(&case);
    let without_gaps =
        |line: &str| line.split_whitespace().skip(1).filter(|cell| *cell != ".").collect::<Vec<_>>().join(" ");
    assert_eq!(drawn.lines().map(without_gaps).collect::<Vec<_>>(), orders);
    let waiting = ["F0@3 F0@0 F1@0 F1@3 B0@3 B1@3 B0@0 B1@0", orders[1]];
    let case = Given::folded(&[0, 1, 1, 0], 2, Call::Whole, listed(&waiting));
    let verdict = case.check(&case.build());
    assert!(matches!(verdict, Err(CheckError::Deadlock(_))), "{verdict:?}");
}

/// What a person reads where something is computed before its Values are there, or a name is wrong.
#[test]
fn damage_to_what_is_handed_over_is_found() {
    let case = Given::folded(&[0, 1, 1, 0], 2, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    let place = |program: &Program, rank: usize, text: &str| {
        let found = program.ranks[rank].forward.iter().position(|action| action.to_string().starts_with(text));
        found.expect("it is there")
    };
    let error_after = |damage: &dyn Fn(&mut Program)| {
        let mut program = case.build();
        damage(&mut program);
        case.check(&program).expect_err("the program is damaged").to_string()
    };
    let swapped = |one: &'static str, other: &'static str| {
        error_after(&move |program| {
            let places = [one, other].map(|text| place(program, 1, text));
            program.ranks[1].forward.swap(places[0], places[1]);
        })
    };
    assert_eq!(
        swapped("Forward(mb 0, stage 1)", "Forward(mb 0, stage 2)"),
        "rank 1, action 3, Forward(mb 0, stage 2): rows 0..2 of v1 must have come exactly once from stage 1"
    );
    assert_eq!(
        swapped("Backward(mb 1, stage 1)", "Backward(mb 1, stage 2)"),
        "rank 1, action 17, Backward(mb 1, stage 1): rows 0..2 of v1 must have come exactly once from stage 2"
    );
    let changed = |text: &'static str, change: fn(&mut Action)| {
        error_after(&move |program| {
            let place = place(program, 1, text);
            change(&mut program.ranks[1].forward[place]);
        })
    };
    let unnamed = |action: &mut Action| match action {
        Action::Forward { stage, .. } => *stage = None,
        Action::Recv(message) => message.stages = None,
        _ => {}
    };
    assert_eq!(
        changed("Forward(mb 0, stage 1)", unnamed),
        "rank 1, action 3, Forward(mb 0): the rank does not have this stage, or has several and must name one"
    );
    assert_eq!(
        changed("Recv(mb 0, values", unnamed),
        "rank 1, action 2, Recv(mb 0, values from rank 0: v0[0..2]): the rank does not have this stage, or has several and must name one"
    );
    assert_eq!(
        error_after(&|program| {
            program.ranks[1].seats.pop();
        }),
        "the program's lists do not fit together: a replica has no rank"
    );
}

/// Stages 0 and 2 have the same ranks, and a Param in common, which both seats of a rank add to.
#[test]
fn tied_params_of_shared_ranks_are_summed_once() {
    let mut case = Given::folded(&[0, 2, 0], 2, Call::Whole, ONE_FORWARD_ONE_BACKWARD);
    case.placement.ranks = vec![vec![0, 1], vec![2], vec![1, 0]];
    let held = |bytes, stages: &[u32]| Held::whole(DType::Float32, bytes, stages);
    case.params = vec![held(8, &[0, 2]), held(12, &[0]), held(16, &[2]), held(4, &[0, 1]), held(20, &[1])];
    let program = case.build();
    assert_eq!(case.check(&program), Ok(()));
    assert_eq!(oracle::run(&case, &program), Ok(()));
    assert_eq!(program.groups, [vec![0, 1], vec![2], vec![0, 1, 2]]);
    let summed = |rank: usize| {
        let sums = program.ranks[rank].forward.iter().filter(|action| action.group().is_some());
        sums.map(ToString::to_string).collect::<Vec<_>>()
    };
    let tied = "AllReduce(bucket 2, 4 bytes over group 2)";
    assert_eq!(summed(0), ["AllReduce(bucket 0, 36 bytes over group 0)", tied]);
    assert_eq!((summed(1), summed(2)), (summed(0), vec![tied.to_owned()]));
}

#[test]
fn shared_ranks_divide_no_gradients() {
    let mut case = Given::folded(&[0, 0], 1, Call::Whole, FILL_DRAIN);
    case.placement.ranks = vec![vec![0, 1], vec![1]];
    case.batch.rows_per_rank = vec![1, 1];
    case.placement.sharding = vec![Sharding::Optimizer, Sharding::Params];
    assert!(case.try_build().is_ok(), "one replica has nothing to divide");
    case.placement.sharding[0] = Sharding::Gradients;
    assert_eq!(case.try_build(), Err(ProgramError::Placement(PlanFault::DividedSeats(0))));
}
