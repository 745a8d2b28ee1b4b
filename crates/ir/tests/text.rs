//! The text form.

use proptest::prelude::*;
use rannc_ir::testing::graphs;
use rannc_ir::{Arg, DType, Dim, Graph, GraphError, OpId};

/// Every field and every kind of argument, as the text form prints them.
const EVERYTHING: &str = r#"graph "Every \"thing\"" schema 1 evaluation rows 8
input v3:i64[b,128] "ids"
input v1:f32[] grad "scale"
param p0 "embedding.weight" "decoder.weight" = v0:bf16[30522,768] grad "p_embedding_weight"
buffer b0 "norm.mean" "norm.mean_too" = v2:f64[768] "b_norm_mean" update v6
buffer b1 "mask" = v5:bool[0] "b_mask"
const c0 "lifted" = v4:u8[3] "c_lifted" data "AAEC"
op0 v6:f32[2b,3b-1,5] grad alias v0 "x", v8#2:f16[-b+9] "y" = aten.pair.default(v0, v3, none, true, [1, [-2, 0.5]], <2b>, <7>, <-b+1>, how="a\nb", "odd key"=torch.float32, device=torch"cuda:0") mutates v0, v3 no_grad random opaque region 3 row_group 4 @encoder.0 "my model.py":31
op1 = "<built-in f>"(v6, -inf, 1e-05, nan, [], "") @"odd module"
op2 v7:c64[1] "z" = leaf()
outputs v7, v3
"#;

fn at(text: &str) -> String {
    Graph::from_text(text).expect_err("the text holds no graph").to_string()
}

proptest! {
    #[test]
    fn reads_what_it_wrote(graph in graphs()) {
        let text = graph.to_text();
        let read = Graph::from_text(&text).expect("a written graph is readable");
        prop_assert_eq!(read.to_text(), text);
        prop_assert_eq!(read, graph);
    }

    #[test]
    fn damage_is_an_error_or_another_graph(graph in graphs(), place in any::<prop::sample::Index>(), new in any::<char>()) {
        for text in [graph.to_text(), EVERYTHING.to_owned()] {
            let mut chars: Vec<char> = text.chars().collect();
            let place = place.index(chars.len());
            chars[place] = new;
            let damaged: String = chars.into_iter().collect();
            if let Ok(graph) = Graph::from_text(&damaged) {
                prop_assert_eq!(Graph::from_text(&graph.to_text()).expect("verified"), graph);
            }
        }
    }

    #[test]
    fn cut_text_is_an_error(place in any::<prop::sample::Index>()) {
        let end = EVERYTHING.rfind("outputs").expect("there are outputs") + 1;
        prop_assert!(Graph::from_text(&EVERYTHING[..place.index(end)]).is_err());
    }

    #[test]
    fn damaged_json_does_not_panic(graph in graphs(), place in any::<prop::sample::Index>(), new in any::<char>()) {
        let mut chars: Vec<char> = graph.to_json().chars().collect();
        let place = place.index(chars.len());
        chars[place] = new;
        let damaged: String = chars.into_iter().collect();
        if let Ok(graph) = Graph::from_json(&damaged) {
            graph.to_text();
            graph.hash();
        }
    }
}

#[test]
fn every_field_has_a_place() {
    let graph = Graph::from_text(EVERYTHING).expect("it is a graph");
    assert_eq!(graph.to_text(), EVERYTHING);
    assert_eq!(Graph::from_json(&graph.to_json()).expect("it is valid"), graph);
    assert_eq!(graph.op_text(OpId(2)), "op2 v7:c64[1] \"z\" = leaf()");
    let op = &graph.ops[OpId(0)];
    assert_eq!(
        op.args[5..],
        [Arg::Dim(Dim::rows(2)), Arg::Dim(Dim::fixed(7)), Arg::Dim(Dim { per_row: -1, fixed: 1 })]
    );
    assert_eq!(op.kwargs["device"], Arg::Torch("cuda:0".to_owned()));
    assert_eq!(graph.ops[OpId(1)].args[2], Arg::Float("1e-05".to_owned()));
    assert_eq!(graph.values[op.results[1]].dtype, DType::Float16);
}

#[test]
fn every_type_has_a_name_of_its_own() {
    for dtype in DType::ALL {
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
    }
}

#[test]
fn errors_name_line_and_column() {
    let lines = |body: &str| format!("graph \"G\" schema 1 training rows 4\n{body}");
    let cases = [
        ("", "line 2, column 1: expected input, param, buffer, const, an op such as op3, or outputs"),
        ("input v0:f33[b] \"x\"\n", "line 2, column 10: expected a type such as f32"),
        ("input v0:f32[b;2] \"x\"\n", "line 2, column 15: expected ,"),
        ("input v0:f32[x] \"x\"\n", "line 2, column 14: expected an extent such as 8 or 2b+1"),
        ("input v0:f32[] x\n", "line 2, column 16: expected a string in double quotes"),
        ("input v0:f32[] \"x\ny\"\n", "line 2, column 16: expected a string in double quotes"),
        ("input v0:f32[] \"x\" \"y\"\n", "line 2, column 20: expected the end of the line"),
        ("input v1:f32[] \"x\"\noutputs\n", "line 4, column 1: v0 is not defined"),
        ("input v0:f32[] \"x\"\ninput v0:f32[] \"y\"\n", "line 3, column 7: v0 is defined twice"),
        ("op1 = f()\n", "line 2, column 1: expected op0, ids count up"),
        ("op0 = f(v)\n", "line 2, column 9: expected an id such as v3"),
        ("op0 = f(1 2)\n", "line 2, column 11: expected ,"),
        ("op0 = f(é)\n", "line 2, column 9: expected an argument"),
        ("op0 = f(a=1, 2)\n", "line 2, column 14: expected a named argument"),
        ("op0 = f(a=1, a=2)\n", "line 2, column 14: the argument a stands twice"),
        ("op0 = f(99999999999999999999)\n", "line 2, column 9: expected an argument"),
        ("op0 = f() @\n", "line 2, column 12: expected a module path"),
        ("op0 = f() \"a\":x\n", "line 2, column 15: expected a line number"),
        ("outputs v0,\n", "line 2, column 12: expected an id such as v3"),
        ("outputs\nop0 = f()\n", "line 3, column 1: nothing may follow the outputs"),
    ];
    for (body, expected) in cases {
        assert_eq!(at(&lines(body)), expected, "{body}");
    }
    let deep = lines(&format!("op0 = f({}{})\n", "[".repeat(100), "]".repeat(100)));
    assert_eq!(at(&deep), "line 2, column 42: lists nest too deep");
    assert_eq!(at("module \"G\""), "line 1, column 1: expected graph");
    assert!(matches!(Graph::from_text("graph \"G\" schema 2"), Err(GraphError::Schema { found: 2 })));
    assert_eq!(at(&lines("outputs v7\n")), "the graph is not valid: output 0: there is no value v7");
}
