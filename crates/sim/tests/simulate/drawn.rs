//! Small steps, worked out by hand.

use rannc_ir::testing::{GraphBuilder, mlp};
use rannc_ir::{Arg, DType, Dim};
use rannc_plan::{BatchKind, Call, Payload, Schedule, ScheduleKind, Sharding};
use rannc_sim::{Timeline, What};

use crate::cases::{TableCosts, chain, divided_program, program, whole_program};

/// One line a rank: what it does, from when to when.
fn draw(timeline: &Timeline) -> String {
    let mut drawing = String::new();
    for rank in &timeline.ranks {
        let events = rank.events.iter().map(|event| {
            let letter = |payload| if payload == Payload::Value { "v" } else { "g" };
            let name = match event.what {
                What::Forward { .. }
                | What::Backward { .. }
                | What::BackwardInput { .. }
                | What::BackwardWeight { .. } => event.what.computed().expect("it computes").to_string(),
                What::Send { mb, peer, payload, .. } => format!("{}{mb}>{peer}", letter(payload)),
                What::Recv { mb, peer, payload, .. } => format!("{}{mb}<{peer}", letter(payload)),
                What::Exchange { mb, kind } => match kind {
                    BatchKind::Input => format!("i{mb}"),
                    BatchKind::Output => format!("o{mb}"),
                    BatchKind::OutputGrad => format!("og{mb}"),
                    BatchKind::InputGrad => format!("ig{mb}"),
                },
                What::Reduce => "R".to_owned(),
                What::Gather => "G".to_owned(),
                What::Update => "U".to_owned(),
            };
            format!("{name} {}-{}", event.start_us, event.end_us)
        });
        drawing += &format!("{}: {}\n", rank.rank, events.collect::<Vec<_>>().join(", "));
    }
    drawing
}

fn costs(stages: usize, ranks: usize, byte_us: f64) -> TableCosts {
    let mut costs = TableCosts::uniform(stages, ranks, 2.0, 3.0);
    costs.byte_us.fill(byte_us);
    for stage in &mut costs.stages {
        (stage.reduce_us, stage.update_us) = (4.0, 1.0);
    }
    costs
}

#[test]
fn receives_one_computation_ahead() {
    let timeline = costs(2, 2, 1.0).run(&chain(&[1, 1], 2, 2, (Call::Whole, ScheduleKind::OneForwardOneBackward)));
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-2, F1 2-4, v0>1 2-3, v1>1 5-6, g0<1 8-9, B0 9-12, g1<1 13-14, B1 14-17, U 17-18
1: v0<0 2-3, F0 3-5, v1<0 5-6, B0 5-8, g0>0 8-9, F1 8-10, B1 10-13, g1>0 13-14, U 14-15
"
    );
    let [first, second] = &timeline.ranks[..] else { panic!("two ranks") };
    assert_eq!((first.busy_us, first.waiting_us, first.bubble_us), (10.0, 2.0, 5.0));
    assert_eq!((second.busy_us, second.waiting_us, second.bubble_us), (10.0, 2.0, 5.0));
}

#[test]
fn messages_of_two_replicas_share_the_link_of_the_receiver() {
    let timeline = costs(2, 3, 1.0).run(&chain(&[2, 1], 1, 2, (Call::Whole, ScheduleKind::OneForwardOneBackward)));
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-2, v0>2 2-4, g0<2 14-16, B0 16-19, R 19-23, U 23-24
1: F0 0-2, v0>2 2-4, g0<2 14-16, B0 16-19, R 19-23, U 23-24
2: v0<0 2-4, v0<1 2-4, F0 4-8, B0 8-14, g0>0 14-16, g0>1 14-16, U 16-17
"
    );
}

/// The second Replica of the first Stage has rows of the first microbatch only.
#[test]
fn fewer_rows_than_replicas() {
    let timeline = costs(2, 3, 1.0).run(&chain(&[2, 1], 2, 3, (Call::Whole, ScheduleKind::OneForwardOneBackward)));
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-2, F1 2-4, v0>2 2-4, v1>2 8-9, g0<2 14-16, B0 16-19, g1<2 19-20, B1 20-23, R 23-27, U 27-28
1: F0 0-2, v0>2 2-4, g0<2 14-16, B0 16-19, R 23-27, U 27-28
2: v0<0 2-4, v0<1 2-4, F0 4-8, v1<0 8-9, B0 8-14, g0>0 14-16, g0>1 14-16, F1 14-16, B1 16-19, g1>0 19-20, U 20-21
"
    );
}

/// The first rank has all rows: it gives the second those of its Stage's input before it computes, and takes the outputs of
/// each microbatch behind its own forward of it.
#[test]
fn inputs_and_outputs_of_microbatches() {
    let mut builder = GraphBuilder::new("Criterion");
    let row = [Dim::rows(1), Dim::fixed(4)];
    let inputs = [builder.input(DType::Float32, &row), builder.input(DType::Float32, &row)];
    let made = builder.linear(inputs[0], 4, "layer");
    let late = builder.pointwise("aten.add.Tensor", &[made, inputs[1]]);
    let program = |call| {
        let graph = builder.clone().finish(&[late]);
        whole_program(&graph, &[1], &[1, 1], &[], 2, 2, (call, ScheduleKind::OneForwardOneBackward))
    };
    assert_eq!(
        draw(&costs(2, 2, 1.0).run(&program(Call::Whole))),
        "\
0: i0 0-1, i1 1-2, F0 1-3, v0>1 3-4, F1 3-5, o0 6-7, v1>1 6-7, g0<1 9-10, B0 10-13, o1 11-12, g1<1 14-15, B1 15-18, \
U 18-19
1: i0 0-1, i1 1-2, v0<0 3-4, F0 4-6, o0 6-7, v1<0 6-7, B0 6-9, g0>0 9-10, F1 9-11, o1 11-12, B1 11-14, g1>0 14-15, \
U 15-16
"
    );
    assert_eq!(
        draw(&costs(2, 2, 1.0).run(&program(Call::Halves))),
        "\
0: i0 0-1, i1 1-2, F0 1-3, v0>1 3-4, F1 3-5, v1>1 5-6, o0 6-7, o1 8-9, og0 9-10, og1 10-11, g0<1 13-14, B0 14-17, \
g1<1 16-17, B1 17-20, U 20-21
1: i0 0-1, i1 1-2, v0<0 3-4, F0 4-6, v1<0 5-6, o0 6-7, F1 6-8, o1 8-9, og0 9-10, og1 10-11, B0 10-13, g0>0 13-14, \
B1 13-16, g1>0 16-17, U 17-18
"
    );
}

#[test]
fn a_value_skips_a_stage() {
    let mut builder = GraphBuilder::new("Skip");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(4)]);
    let early = builder.linear(input, 4, "early");
    let middle = builder.linear(early, 4, "middle");
    let late = builder.linear(middle, 4, "late");
    let sum = builder.pointwise("aten.add.Tensor", &[late, early]);
    let program = program(&builder.finish(&[sum]), &[1, 2], &[1, 1, 1], 1, 1, (Call::Halves, ScheduleKind::FillDrain));
    let timeline = costs(3, 3, 1.0).run(&program);
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-2, v0>1 2-3, v0>2 2-3, g0<2 11-12, g0<1 15-16, B0 16-19, U 19-20
1: v0<0 2-3, F0 3-5, v0>2 5-6, g0<2 11-12, B0 12-15, g0>0 15-16, U 16-17
2: v0<0 2-3, v0<1 5-6, F0 6-8, B0 8-11, g0>0 11-12, g0>1 11-12, U 12-13
"
    );
}

/// The first and the last Stage hold one table, whose gradients they sum when both have done all else.
#[test]
fn tied_gradients_wait_for_all_holders() {
    let mut builder = GraphBuilder::new("Tied");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(4)]);
    let table = builder.param("table", &[4, 4]);
    let wide = [Dim::rows(1), Dim::fixed(4)];
    let linear = |builder: &mut GraphBuilder, value| {
        builder.op("aten.linear.default", vec![Arg::Value(value), Arg::Value(table)], &wide)
    };
    let first = linear(&mut builder, input);
    let middle = builder.linear(first, 4, "middle");
    let last = linear(&mut builder, middle);
    let way = (Call::Whole, ScheduleKind::OneForwardOneBackward);
    let program = program(&builder.finish(&[last]), &[1, 2], &[1, 2, 1], 1, 2, way);
    let timeline = TableCosts { tied_us: 3.0, ..costs(3, 4, 1.0) }.run(&program);
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-4, v0>1 4-6, v0>2 4-6, g0<1 25-27, g0<2 25-27, B0 27-33, R 33-39, U 39-40
1: v0<0 4-6, F0 6-8, v0>3 8-10, g0<3 20-22, B0 22-25, g0>0 25-27, R 25-29, U 29-30
2: v0<0 4-6, F0 6-8, v0>3 8-10, g0<3 20-22, B0 22-25, R 25-29, g0>0 25-27, U 29-30
3: v0<1 8-10, v0<2 8-10, F0 10-14, B0 14-20, g0>1 20-22, g0>2 20-22, R 33-39, U 39-40
"
    );
}

/// Each Replica's part of a microbatch's gradients is summed under the next forward; the next backward waits for that.
#[test]
fn divided_gradients_are_summed_between_backwards() {
    let way = (Call::Whole, ScheduleKind::OneForwardOneBackward);
    let dividing = |way| divided_program(&mlp(1, 4), &[], &[2], &[Sharding::Gradients], 2, 3, way);
    let mut costs = costs(1, 2, 1.0);
    costs.stages[0].reduce_us = 10.0;
    assert_eq!(
        draw(&costs.run(&dividing(way))),
        "\
0: F0 0-2, B0 2-5, F1 5-7, R 5-10, B1 10-13, R 13-18, U 18-19
1: F0 0-2, B0 2-5, R 5-10, R 13-18, U 18-19
"
    );
}

/// A Replica without rows gives its part of the parameters where the other computes.
#[test]
fn divided_params_are_gathered_before_computations() {
    let way = (Call::Whole, ScheduleKind::OneForwardOneBackward);
    let program = divided_program(&mlp(1, 4), &[], &[2], &[Sharding::Params], 2, 3, way);
    assert_eq!(
        draw(&costs(1, 2, 1.0).run(&program)),
        "\
0: G 0-1, F0 1-3, G 3-4, B0 4-7, R 7-9, G 7-8, F1 8-10, G 10-11, B1 11-14, R 14-16, U 16-17
1: G 0-1, F0 1-3, G 3-4, B0 4-7, R 7-9, G 7-8, G 10-11, R 14-16, U 16-17
"
    );
}

/// Gradients leave behind the first part of a backward; the second one keeps the microbatch, and is ready for the sum.
#[test]
fn a_backward_in_two_parts_sends_early() {
    let orders = ["F0 F1 B0 B1", "F0 I0 F1 W0 I1 W1"].map(|text| text.parse().expect("an order"));
    let program =
        divided_program(&mlp(2, 4), &[2], &[1, 2], &[], 2, 4, (Call::Whole, Schedule::Explicit(orders.into())));
    let mut costs = costs(2, 3, 0.5);
    costs.stages[1].row_bytes = 8;
    let timeline = costs.run(&program);
    assert_eq!(
        draw(&timeline),
        "\
0: F0 0-4, F1 4-8, v0>1 4-5, v0>2 4-5, v1>1 8-9, v1>2 8-9, g0<1 8.5-9.5, g0<2 8.5-9.5, B0 9.5-15.5, g1<1 14.75-15.75, \
g1<2 14.75-15.75, B1 15.75-21.75, U 21.75-22.75
1: v0<0 4-5, F0 5-7, I0 7-8.5, v1<0 8-9, g0>0 8.5-9.5, F1 9-11, W0 11-13.25, I1 13.25-14.75, g1>0 14.75-15.75, W1 14.75-17, \
R 17-21, U 21-22
2: v0<0 4-5, F0 5-7, I0 7-8.5, v1<0 8-9, g0>0 8.5-9.5, F1 9-11, W0 11-13.25, I1 13.25-14.75, g1>0 14.75-15.75, W1 14.75-17, \
R 17-21, U 21-22
"
    );
    assert_eq!(timeline.ranks[1].peak_bytes, 20);
}
