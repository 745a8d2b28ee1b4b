//! What a rank is handed.

use rannc_plan::{Action, Call, Pass, ScheduleKind, plan_channels};

use crate::cases::Given;

#[test]
fn the_json_of_a_view() {
    let program = Given::chain(&[1, 1], 1, &[2, 1], Call::Halves, ScheduleKind::FillDrain).build();
    let view = program.rank_view(1).expect("the rank exists");
    let json = serde_json::to_string(&view).expect("a view is plain data");
    let fields = [
        r#""rank":1"#,
        r#""seats":[{"stage":1,"replica":0,"rows":[[0,3]],"global_rows":[[[0,3]]]}]"#,
        r#""call":"halves""#,
        r#""gather_inputs":true"#,
        r#""total_rows":3"#,
        r#""microbatches":[3]"#,
        r#""slices":[{"mb":0,"local":[0,1],"at":2}]"#,
        r#""inputs":[{"src":1,"dst":0,"mb":0,"value":100,"rows":[2,3]}]"#,
        r#""outputs":[{"src":1,"dst":0,"mb":0,"value":1,"rows":[0,2]},{"src":1,"dst":1,"mb":0,"value":1,"rows":[2,3]}]"#,
        r#""exchanges":true"#,
        r#""value_window":null"#,
        r#""grad_window":2"#,
        r#""forward":[{"action":"exchange","kind":"input","mb":0,"sends":[{"peer":0,"pieces":[{"value":100,"rows":[2,3]}]}],"recvs":[]},{"action":"recv","mb":0,"peer":0,"kind":"value","pieces":[{"value":0,"rows":[0,3]}]},{"action":"forward","mb":0},{"action":"exchange","kind":"output","mb":0,"sends":[{"peer":0,"pieces":[{"value":1,"rows":[0,2]}]}],"recvs":[]}]"#,
        r#""backward":[{"action":"exchange","kind":"output_grad","mb":0,"sends":[],"recvs":[{"peer":0,"pieces":[{"value":1,"rows":[0,2]}]}]},{"action":"backward","mb":0},{"action":"send","mb":0,"peer":0,"kind":"grad","pieces":[{"value":0,"rows":[0,3]}]}]"#,
    ];
    assert_eq!(json, format!("{{{}}}", fields.join(",")));
    let sum = Action::AllReduce { group: 1, bucket: 2, bytes: 3 };
    let json = serde_json::to_string(&sum).expect("plain data");
    assert_eq!(json, r#"{"action":"all_reduce","group":1,"bucket":2,"bytes":3}"#);
    let gather = Action::AllGather { group: 1, bucket: 2, mb: 4, pass: Pass::Forward, bytes: 3 };
    let json = serde_json::to_string(&gather).expect("plain data");
    assert_eq!(json, r#"{"action":"all_gather","group":1,"bucket":2,"mb":4,"pass":"forward","bytes":3}"#);
    let sum = Action::ReduceScatter { group: 1, bucket: 2, mb: 4, bytes: 3 };
    let json = serde_json::to_string(&sum).expect("plain data");
    assert_eq!(json, r#"{"action":"reduce_scatter","group":1,"bucket":2,"mb":4,"bytes":3}"#);
}

#[test]
fn rows_know_their_place_in_the_global_batch() {
    // Microbatch 0 is rows 0..2 of rank 0's three and 0..2 of rank 2's four, microbatch 1 is the rest.
    let program = Given::chain(&[2, 1], 2, &[3, 0, 4], Call::Whole, ScheduleKind::FillDrain).build();
    let places = |rank| -> Vec<String> {
        let view = program.rank_view(rank).expect("the rank exists");
        let text = |runs: &Vec<_>| runs.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        view.seats[0].global_rows.iter().map(text).collect()
    };
    assert_eq!(places(0), ["0..2", "2..3 5..6"]);
    assert_eq!(places(1), ["3..5", "6..7"]);
    assert_eq!(places(2), ["0..2 3..5", "2..3 5..7"]);
    let whole = Given::chain(&[1, 1], 1, &[3, 4], Call::Whole, ScheduleKind::FillDrain).build();
    assert_eq!(whole.rank_view(0).expect("the rank exists").seats[0].global_rows, [[rannc_plan::Interval::new(0, 7)]]);
}

#[test]
fn channels_go_both_ways_between_all_replicas() {
    let case = Given::chain(&[1, 2], 1, &[1, 0, 0], Call::Whole, ScheduleKind::OneForwardOneBackward);
    assert_eq!(plan_channels(&case.placement, &case.partition), [(0, 1), (0, 2), (1, 0), (2, 0)]);
    assert_eq!(case.build().channels(), [(0, 1), (1, 0)], "the second replica has no rows");
}
