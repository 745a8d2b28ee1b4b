//! Programs drawn.

use rannc_ir::DType;
use rannc_plan::{Action, Call, CheckError, Crossing, Order, Schedule, ScheduleKind, Sharding, grid};

use crate::cases::{Given, Held};

fn draw(case: &Given) -> String {
    let program = case.build();
    case.check(&program).expect("built programs are sound");
    grid(&program).expect("checked programs come to their end")
}

#[test]
fn one_forward_one_backward() {
    let case = Given::chain(&[1, 1, 1, 1], 6, &[6, 6, 6, 6], Call::Whole, ScheduleKind::OneForwardOneBackward);
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
1: .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
2: .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
3: .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .
"
    );
}

#[test]
fn fill_drain_in_halves() {
    let case = Given::chain(&[1, 1, 1], 4, &[4, 4, 4], Call::Halves, ScheduleKind::FillDrain);
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
1: .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
2: .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
"
    );
}

/// The same grid as in halves, but the first gradient is asked for before the last forward.
#[test]
fn fill_drain_of_a_whole_call() {
    let case = Given::chain(&[1, 1, 1], 4, &[4, 4, 4], Call::Whole, ScheduleKind::FillDrain);
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
1: .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
2: .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
"
    );
    let case = Given::chain(&[1, 1], 2, &[2, 2], Call::Whole, ScheduleKind::FillDrain);
    let program = case.build();
    assert_eq!(
        list(&program.ranks[0].forward),
        "\
Exchange(mb 0, inputs from rank 1: v100[1..2])
Exchange(mb 1, inputs from rank 1: v100[1..2])
Forward(mb 0)
Send(mb 0, values to rank 1: v0[0..2])
Exchange(mb 0, outputs from rank 1: v1[0..1])
Recv(mb 0, gradients from rank 1: v0[0..2])
Forward(mb 1)
Send(mb 1, values to rank 1: v0[0..2])
Exchange(mb 1, outputs from rank 1: v1[0..1])
Recv(mb 1, gradients from rank 1: v0[0..2])
Backward(mb 0)
Backward(mb 1)
"
    );
    assert_eq!(program.ranks[0].backward, []);
}

/// A call in halves leaves a Schedule no choice: it says only in which order the forwards run among themselves, and
/// the backwards among themselves.
#[test]
fn one_forward_one_backward_in_halves_is_fill_drain() {
    let of = |schedule| Given::chain(&[1, 2, 1], 5, &[5, 2, 0, 3], Call::Halves, schedule).build();
    assert_eq!(of(ScheduleKind::OneForwardOneBackward), of(ScheduleKind::FillDrain));
}

#[test]
fn forward_only() {
    let case = Given::chain(&[1, 1], 3, &[3, 3], Call::Forward, ScheduleKind::FillDrain);
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 F2 .
1: .  F0 F1 F2
"
    );
}

/// The second Replica of the first Stage has rows of the first microbatch only.
#[test]
fn fewer_rows_than_replicas() {
    let case = Given::chain(&[2, 1], 3, &[2, 1, 1], Call::Whole, ScheduleKind::OneForwardOneBackward);
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 .  B0 .  B1
1: F0 .  .  B0 .  .
2: .  F0 B0 F1 B1 .
"
    );
}

#[test]
fn one_stage_is_data_parallel() {
    let case = Given::chain(&[3], 2, &[2, 2, 2], Call::Whole, ScheduleKind::OneForwardOneBackward);
    assert_eq!(
        draw(&case),
        "\
0: F0 B0 F1 B1
1: F0 B0 F1 B1
2: F0 B0 F1 B1
"
    );
    let program = case.build();
    assert!(program.inputs.iter().all(|transfer| transfer.src == transfer.dst), "nothing moves");
    assert!(program.channels().is_empty());
    let is_exchange = |action: &Action| matches!(action, Action::Exchange(_));
    assert!(!program.ranks.iter().any(|own| own.forward.iter().any(is_exchange)));
}

fn list(actions: &[Action]) -> String {
    actions.iter().map(|action| format!("{action}\n")).collect()
}

#[test]
fn actions_of_a_stage_between_two() {
    let case = Given::chain(&[1, 2, 1], 2, &[2, 1, 1, 2], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let program = case.build();
    assert_eq!(
        list(&program.ranks[1].forward),
        "\
Exchange(mb 0, inputs to rank 0: v100[1..2])
Recv(mb 0, values from rank 0: v0[0..2])
Recv(mb 1, values from rank 0: v0[0..1])
Forward(mb 0)
Send(mb 0, values to rank 3: v1[0..2])
Exchange(mb 0, outputs from rank 3: v2[1..2])
Recv(mb 0, gradients from rank 3: v1[0..2])
Forward(mb 1)
Send(mb 1, values to rank 3: v1[0..1])
Recv(mb 1, gradients from rank 3: v1[0..1])
Backward(mb 0)
Send(mb 0, gradients to rank 0: v0[0..2])
Backward(mb 1)
Send(mb 1, gradients to rank 0: v0[0..1])
"
    );
}

#[test]
fn skips_and_shared_values_travel_directly() {
    let mut case = Given::chain(&[1, 1, 1], 1, &[1, 1, 1], Call::Whole, ScheduleKind::OneForwardOneBackward);
    case.partition.crossings[0] = Crossing { to: vec![1, 2], ..case.partition.crossings[0].clone() };
    let program = case.build();
    assert_eq!(
        list(&program.ranks[0].forward),
        "\
Exchange(mb 0, inputs from rank 1: v100[1..2] from rank 2: v100[2..3])
Recv(mb 0, gradients from rank 1: v0[0..3])
Recv(mb 0, gradients from rank 2: v0[0..3])
Forward(mb 0)
Send(mb 0, values to rank 1: v0[0..3])
Send(mb 0, values to rank 2: v0[0..3])
Exchange(mb 0, outputs from rank 2: v2[0..1])
Backward(mb 0)
"
    );
    assert_eq!(
        list(&program.ranks[2].forward),
        "\
Exchange(mb 0, inputs to rank 0: v100[2..3])
Recv(mb 0, values from rank 0: v0[0..3])
Recv(mb 0, values from rank 1: v1[0..3])
Forward(mb 0)
Exchange(mb 0, outputs to rank 0: v2[0..1] to rank 1: v2[1..2])
Backward(mb 0)
Send(mb 0, gradients to rank 0: v0[0..3])
Send(mb 0, gradients to rank 1: v1[0..3])
"
    );
}

/// The first Stage feeds nobody, so it is its own end.
#[test]
fn depth_is_counted_in_the_graph_of_stages() {
    let mut case = Given::chain(&[1, 1, 1], 3, &[3, 3, 3], Call::Whole, ScheduleKind::OneForwardOneBackward);
    case.partition.crossings.remove(0);
    assert_eq!(
        draw(&case),
        "\
0: F0 B0 F1 B1 F2 B2 .  .
1: F0 F1 .  B0 F2 B1 .  B2
2: .  F0 B0 F1 B1 F2 B2 .
"
    );
}

#[test]
fn a_listed_order_is_run_as_it_stands() {
    let mut case = Given::chain(&[1, 1], 3, &[3, 3], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let orders = ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"].map(|text| text.parse::<Order>().expect("an order"));
    case.placement.schedule = Schedule::Explicit(orders.to_vec());
    assert_eq!(
        draw(&case),
        "\
0: F0 F1 F2 B0 .  B1 .  B2
1: .  F0 B0 F1 B1 F2 B2 .
"
    );
    case.placement.schedule = Schedule::Explicit(orders.iter().rev().cloned().collect());
    let verdict = case.check(&case.build());
    assert!(matches!(verdict, Err(CheckError::Deadlock(_))), "{verdict:?}");
}

#[test]
fn gradients_are_summed_over_all_who_hold_them() {
    let mut case = Given::chain(&[2, 1], 2, &[2, 2, 2], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let held = |bytes, stages: &[u32]| Held::whole(DType::Float32, bytes, stages);
    case.params = vec![held(8, &[0, 1]), held(1 << 20, &[0]), held(12, &[0]), held(16, &[1])];
    let program = case.build();
    assert_eq!(case.check(&program), Ok(()));
    let tail = |rank: usize, count: usize| {
        let actions = &program.ranks[rank].forward;
        list(&actions[actions.len() - count..])
    };
    assert_eq!(
        tail(1, 3),
        "\
AllReduce(bucket 0, 1048588 bytes over group 0)
Backward(mb 1)
AllReduce(bucket 2, 8 bytes over group 2)
"
    );
    assert!(tail(2, 1).starts_with("AllReduce(bucket 2"), "a group of one rank sums nothing");
    assert_eq!(program.groups, [vec![0, 1], vec![2], vec![0, 1, 2]]);
}

/// The second Replica has rows of the first microbatch only, and does its part of the second's sum at the end.
#[test]
fn divided_gradients_are_summed_for_each_microbatch() {
    let mut case = Given::chain(&[2], 2, &[2, 1], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let held = |dtype, divided| Held { divided, ..Held::whole(dtype, 8, &[0]) };
    case.params = vec![held(DType::Float32, true), held(DType::Float32, false), held(DType::Float64, true)];
    case.placement.sharding = vec![Sharding::Gradients];
    let program = case.build();
    assert_eq!(case.check(&program), Ok(()));
    let first = "\
Forward(mb 0)
ReduceScatter(mb 0, bucket 0, 8 bytes over group 0)
ReduceScatter(mb 0, bucket 2, 8 bytes over group 0)
Backward(mb 0)
";
    let second = "\
ReduceScatter(mb 1, bucket 0, 8 bytes over group 0)
ReduceScatter(mb 1, bucket 2, 8 bytes over group 0)
AllReduce(bucket 1, 8 bytes over group 0)
";
    assert_eq!(list(&program.ranks[0].forward), format!("{first}Forward(mb 1)\n{second}Backward(mb 1)\n"));
    assert_eq!(list(&program.ranks[1].forward), format!("{first}{second}"));
}

/// Spans are gathered in the order in which a computation comes to them, by the Replica without rows too.
#[test]
fn divided_params_are_gathered_for_each_computation() {
    let mut case = Given::chain(&[2], 2, &[2, 1], Call::Whole, ScheduleKind::OneForwardOneBackward);
    let held = |span| Held { divided: true, span: Some(span), ..Held::whole(DType::Float32, 8, &[0]) };
    case.params = vec![held(0), held(1)];
    case.placement.sharding = vec![Sharding::Params];
    let program = case.build();
    assert_eq!(case.check(&program), Ok(()));
    let forward = |mb| {
        format!(
            "AllGather(forward of mb {mb}, bucket 1, 128 bytes over group 0)\n\
             AllGather(forward of mb {mb}, bucket 0, 128 bytes over group 0)\n"
        )
    };
    let backward = |mb| {
        format!(
            "ReduceScatter(mb {mb}, bucket 0, 8 bytes over group 0)\n\
             ReduceScatter(mb {mb}, bucket 1, 8 bytes over group 0)\n\
             AllGather(backward of mb {mb}, bucket 0, 128 bytes over group 0)\n\
             AllGather(backward of mb {mb}, bucket 1, 128 bytes over group 0)\n"
        )
    };
    let with_rows = |mb| format!("{}Forward(mb {mb})\n{}Backward(mb {mb})\n", forward(mb), backward(mb));
    assert_eq!(list(&program.ranks[0].forward), format!("{}{}", with_rows(0), with_rows(1)));
    assert_eq!(list(&program.ranks[1].forward), format!("{}{}{}", with_rows(0), forward(1), backward(1)));
}

/// Once for all computations of a list: of a call in halves, for its forwards and for its backwards.
#[test]
fn divided_params_that_are_kept_are_gathered_once() {
    for (call, schedule) in
        [(Call::Whole, ScheduleKind::OneForwardOneBackward), (Call::Halves, ScheduleKind::FillDrain)]
    {
        let mut case = Given::chain(&[2], 2, &[0, 3], call, schedule);
        let held = |span| Held { divided: true, span: Some(span), ..Held::whole(DType::Float32, 8, &[0]) };
        case.params = vec![held(0), held(1)];
        case.placement.sharding = vec![Sharding::KeptParams];
        let program = case.build();
        assert_eq!(case.check(&program), Ok(()));
        let forward = "\
AllGather(forward of mb 0, bucket 1, 128 bytes over group 0)
AllGather(forward of mb 0, bucket 0, 128 bytes over group 0)
";
        let backward = "\
AllGather(backward of mb 0, bucket 0, 128 bytes over group 0)
AllGather(backward of mb 0, bucket 1, 128 bytes over group 0)
";
        for own in &program.ranks {
            let gathers = |actions: &[Action]| {
                let is_gather = |action: &Action| matches!(action, Action::AllGather { .. });
                list(&actions.iter().filter(|action| is_gather(action)).cloned().collect::<Vec<_>>())
            };
            assert_eq!(gathers(&own.forward), forward);
            assert_eq!(gathers(&own.backward), if call == Call::Halves { backward } else { "" });
        }
    }
}
