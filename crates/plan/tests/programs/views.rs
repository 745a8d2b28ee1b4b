//! What a rank is handed.

use rannc_plan::{Action, Call, ScheduleKind, plan_channels};

use crate::cases::Given;

#[test]
fn the_json_of_a_view() {
    let program = Given::chain(&[1, 1], 1, &[2, 1], Call::Halves, ScheduleKind::FillDrain).build();
    let view = program.rank_view(1).expect("the rank exists");
    let json = serde_json::to_string(&view).expect("a view is plain data");
    let fields = [
        r#""rank":1"#,
        r#""stage":1"#,
        r#""replica":0"#,
        r#""call":"halves""#,
        r#""gather_inputs":true"#,
        r#""total_rows":3"#,
        r#""microbatches":[3]"#,
        r#""rows":[[0,3]]"#,
        r#""slices":[{"mb":0,"local":[0,1],"at":2}]"#,
        r#""inputs":[{"src":1,"dst":0,"mb":0,"value":100,"rows":[2,3]}]"#,
        r#""outputs":[{"src":1,"dst":0,"mb":0,"value":1,"rows":[0,2]},{"src":1,"dst":1,"mb":0,"value":1,"rows":[2,3]}]"#,
        r#""forward":[{"action":"recv","mb":0,"peer":0,"kind":"value","pieces":[{"value":0,"rows":[0,3]}]},{"action":"forward","mb":0}]"#,
        r#""backward":[{"action":"backward","mb":0},{"action":"send","mb":0,"peer":0,"kind":"grad","pieces":[{"value":0,"rows":[0,3]}]},{"action":"reduce"}]"#,
    ];
    assert_eq!(json, format!("{{{}}}", fields.join(",")));
    assert_eq!(serde_json::to_string(&Action::Reduce).expect("plain data"), r#"{"action":"reduce"}"#);
}

#[test]
fn channels_go_both_ways_between_all_replicas() {
    let case = Given::chain(&[1, 2], 1, &[1, 0, 0], Call::Whole, ScheduleKind::OneForwardOneBackward);
    assert_eq!(plan_channels(&case.placement, &case.partition), [(0, 1), (0, 2), (1, 0), (2, 0)]);
    assert_eq!(case.build().channels(), [(0, 1), (1, 0)], "the second replica has no rows");
}
