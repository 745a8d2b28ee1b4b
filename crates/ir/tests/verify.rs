//! Every promise of the verifier is broken here once, and the error names promise and place.

use proptest::prelude::*;
use rannc_ir::testing::{GraphBuilder, graphs};
use rannc_ir::{
    Arg, BufferId, ConstId, DType, Dim, Graph, GraphProblem, OpId, ParamId, SCHEMA, Source, ValueDef, ValueId,
    VerifyError,
};

/// v0 input, v1 weight, v2 bias, v3 buffer, v4 constant; op0 v5 linear, op1 v6 relu, op2 v7 in place.
fn valid() -> Graph {
    let mut builder = GraphBuilder::new("Valid");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(8)]);
    let hidden = builder.linear(input, 8, "layer");
    builder.buffer("count", DType::Int64, &[]);
    builder.constant(&[1, 2, 3, 4]);
    let relu = builder.pointwise("aten.relu.default", &[hidden]);
    let done = builder.in_place("aten.mul_.Tensor", relu);
    builder.finish(&[done])
}

fn broken(change: impl FnOnce(&mut Graph)) -> Vec<VerifyError> {
    let mut graph = valid();
    assert_eq!(graph.verify(), Ok(()));
    change(&mut graph);
    graph.verify().expect_err("the graph is broken").0
}

/// The change breaks one promise only, and the message is this one.
fn breaks(expected: &str, change: impl FnOnce(&mut Graph)) {
    let messages: Vec<String> = broken(change).iter().map(ToString::to_string).collect();
    assert_eq!(messages, [expected]);
}

const INPUT: ValueId = ValueId(0);
const WEIGHT: ValueId = ValueId(1);
const HIDDEN: ValueId = ValueId(3);
const BUFFER: ValueId = ValueId(4);
const CONSTANT: ValueId = ValueId(5);
const RELU: ValueId = ValueId(6);
const LAST: ValueId = ValueId(7);
const NONE: ValueId = ValueId(99);

#[test]
fn header() {
    breaks("graph: schema version 2 is not 1", |graph| graph.schema = SCHEMA + 1);
    breaks("graph: 0 sample rows are not from 1 to 1073741824", |graph| graph.sample_rows = 0);
    breaks("graph: 2147483648 sample rows are not from 1 to 1073741824", |graph| graph.sample_rows = 1 << 31);
}

#[test]
fn ids_in_range() {
    let op1 = "op1 aten.relu.default in layer at model.py:2";
    breaks("output 0: there is no value v99", |graph| graph.outputs = vec![NONE]);
    breaks("b0: there is no value v99", |graph| graph.buffers[BufferId(0)].update = Some(NONE));
    breaks(&format!("{op1}: there is no value v99"), |graph| {
        graph.ops[OpId(1)].kwargs.insert("more".to_owned(), Arg::List(vec![Arg::Value(NONE)]));
    });
    breaks("v7: it shares the storage of v99, which is not earlier", |graph| graph.values[LAST].alias_of = Some(NONE));
    breaks("input 1: there is no value v99", |graph| graph.inputs.push(NONE));
    breaks(&format!("{op1}: there is no value v99"), |graph| graph.ops[OpId(1)].results.push(NONE));
    assert_eq!(broken(|graph| graph.params[ParamId(0)].value = NONE).len(), 2);
    assert_eq!(broken(|graph| graph.buffers[BufferId(0)].value = NONE).len(), 2);
    assert_eq!(broken(|graph| graph.constants[ConstId(0)].value = NONE).len(), 2);
}

#[test]
fn owners_and_values_name_each_other() {
    breaks("input 1: v0 belongs to something else: Input(0)", |graph| graph.inputs.push(INPUT));
    breaks("v0: its def names an input, which does not name it back", |graph| graph.inputs.clear());
    breaks("input 1: v1 belongs to something else: Param(ParamId(0))", |graph| graph.inputs.push(WEIGHT));
    for (owned, def, names) in [
        (WEIGHT, ValueDef::Param(ParamId(9)), "p0: v1 belongs to something else: Param(ParamId(9))"),
        (BUFFER, ValueDef::Buffer(BufferId(9)), "b0: v4 belongs to something else: Buffer(BufferId(9))"),
        (CONSTANT, ValueDef::Constant(ConstId(9)), "c0: v5 belongs to something else: Constant(ConstId(9))"),
    ] {
        let errors = broken(|graph| graph.values[owned].def = def);
        assert!(matches!(errors[0].problem, GraphProblem::NotNamedBack(_)), "{errors:?}");
        assert_eq!(errors[1].to_string(), names);
        assert_eq!(errors.len(), 2);
    }
}

#[test]
fn results_and_values_name_each_other() {
    let elsewhere = broken(|graph| graph.values[HIDDEN].def = ValueDef::Op { op: OpId(1), result: 0 });
    assert!(matches!(elsewhere[0].problem, GraphProblem::NotNamedBack("an op")), "{elsewhere:?}");
    assert!(elsewhere.iter().any(|error| matches!(error.problem, GraphProblem::NotOwned(HIDDEN, _))), "{elsewhere:?}");
    breaks("v7: its def names an op, which does not name it back", |graph| graph.ops[OpId(2)].results.clear());
    breaks("op1 aten.relu.default in layer at model.py:2: v0 belongs to something else: Input(0)", |graph| {
        graph.ops[OpId(1)].results.push(INPUT);
    });
    breaks(
        "op1 aten.relu.default in layer at model.py:2: v6 stands at a place of the returned tuple that does not increase",
        |graph| graph.ops[OpId(1)].results.push(RELU),
    );
}

#[test]
fn topological_order() {
    for late in [RELU, LAST] {
        let expected = format!("op1 aten.relu.default in layer at model.py:2: {late} is used before it is made");
        breaks(&expected, |graph| graph.ops[OpId(1)].args.push(Arg::List(vec![Arg::Value(late)])));
    }
}

#[test]
fn changes_in_place() {
    let expected = |value: ValueId| {
        format!(
            "op2 aten.mul_.Tensor in layer at model.py:3: {value} is changed in place but is no operand, or is listed twice"
        )
    };
    breaks(&expected(HIDDEN), |graph| graph.ops[OpId(2)].mutates.push(HIDDEN));
    breaks(&expected(RELU), |graph| graph.ops[OpId(2)].mutates.push(RELU));
    breaks(&expected(NONE), |graph| graph.ops[OpId(2)].mutates.push(NONE));
}

#[test]
fn storages() {
    breaks("v6: it shares the storage of v6, which is not earlier", |graph| graph.values[RELU].alias_of = Some(RELU));
    breaks("v6: it shares the storage of v7, which is not earlier", |graph| {
        graph.values[RELU].alias_of = Some(LAST);
    });
    breaks("v5: it shares the storage of v3, which is not earlier", |graph| {
        graph.values[CONSTANT].alias_of = Some(HIDDEN);
    });
}

#[test]
fn names() {
    breaks("v1: it has an empty name", |graph| graph.values[WEIGHT].name.clear());
    breaks("v1: the name \"t0\" stands twice", |graph| graph.values[WEIGHT].name = "t0".to_owned());
    breaks("p1: the name \"layer.weight\" stands twice", |graph| {
        graph.params[ParamId(1)].aliases.push("layer.weight".to_owned());
    });
    breaks("b0: the name \"layer.weight\" stands twice", |graph| {
        graph.buffers[BufferId(0)].name = "layer.weight".to_owned();
    });
    breaks("c0: it has an empty name", |graph| graph.constants[ConstId(0)].name.clear());
}

#[test]
fn dimensions() {
    let wide = Dim { per_row: 1 << 33, fixed: 0 };
    breaks("v6: the dimension Dim { per_row: 8589934592, fixed: 0 } is out of limits", |graph| {
        graph.values[RELU].shape[0] = wide;
    });
    breaks("v6: the dimension Dim { per_row: 1, fixed: -5 } is out of limits", |graph| {
        graph.values[RELU].shape[0] = Dim { per_row: 1, fixed: -5 };
    });
    breaks("v6: the tensor has too many bytes", |graph| graph.values[RELU].shape = vec![Dim::fixed(1 << 40); 2]);
    let minimum = Dim { per_row: i64::MIN, fixed: i64::MIN };
    assert_eq!(broken(|graph| graph.values[RELU].shape[0] = minimum).len(), 1);
    assert_eq!(broken(|graph| graph.ops[OpId(1)].args.push(Arg::Dim(minimum))).len(), 1);
}

#[test]
fn stored_tensors() {
    for (value, owner) in [(WEIGHT, "p0"), (BUFFER, "b0")] {
        breaks(&format!("{owner}: its shape depends on the batch"), |graph| {
            graph.values[value].shape = vec![Dim::rows(1)];
        });
    }
    let constant = broken(|graph| graph.values[CONSTANT].shape = vec![Dim { per_row: 1, fixed: 4 }]);
    assert_eq!(constant[0].problem, GraphProblem::BatchDependent);
}

#[test]
fn constants() {
    let data = |text: &'static str| move |graph: &mut Graph| text.clone_into(&mut graph.constants[ConstId(0)].data);
    for text in ["AQIDBA", "AQID BA=", "AQI=BA==", "A===", "====", "AQIDBA=é"] {
        breaks("c0: its data is not base64", data(text));
    }
    breaks("c0: its data has 3 bytes, its shape and type say 4", data("AQID"));
    breaks("c0: its data has 5 bytes, its shape and type say 4", data("AQIDBAU="));
    breaks("c0: its data has 0 bytes, its shape and type say 4", data(""));
    breaks("c0: its data has 4 bytes, its shape and type say 8", |graph| graph.values[CONSTANT].dtype = DType::Int16);
}

#[test]
fn gradients_and_arguments() {
    breaks("v6: its type i64 carries no gradient", |graph| graph.values[RELU].dtype = DType::Int64);
    for text in ["1", "one", "", "+1.0", ".5", "infinity", "NaN", "1.0f", "1e"] {
        breaks(
            &format!("op0 aten.linear.default in layer at model.py:1: {text:?} is no float as Python writes it"),
            |graph| graph.ops[OpId(0)].args.push(Arg::Float(text.to_owned())),
        );
    }
    let deep = |depth| (0..depth).fold(Arg::Int(1), |inner, _| Arg::List(vec![inner]));
    breaks("op0 aten.linear.default in layer at model.py:1: its arguments nest more than 32 deep", |graph| {
        graph.ops[OpId(0)].args.push(deep(33));
    });
    let mut graph = valid();
    graph.ops[OpId(0)].args.extend([deep(32), Arg::Float("-1e-05".to_owned()), Arg::Float("-inf".to_owned())]);
    assert_eq!(graph.verify(), Ok(()));
    assert_eq!(Graph::from_json(&graph.to_json()).expect("readable"), graph);
    assert_eq!(Graph::from_text(&graph.to_text()).expect("readable"), graph);
}

#[test]
fn places_of_ops() {
    breaks("op0  in layer at model.py:1: it has no target", |graph| graph.ops[OpId(0)].target.clear());
    breaks("op0 aten.linear.default in layer at m.py:0: source lines count from 1", |graph| {
        graph.ops[OpId(0)].source = Some(Source { file: "m.py".to_owned(), line: 0 });
    });
}

#[test]
fn all_errors_are_reported() {
    let mut graph = valid();
    graph.outputs = vec![NONE; 12];
    graph.schema = 9;
    let errors = graph.verify().expect_err("the graph is broken");
    assert_eq!(errors.0.len(), 13);
    assert!(errors.to_string().ends_with("output 8: there is no value v99; and 3 more"));
}

proptest! {
    #[test]
    fn generated_graphs_are_valid(graph in graphs()) {
        prop_assert_eq!(graph.verify(), Ok(()));
    }

    #[test]
    fn a_value_of_another_owner_is_found(graph in graphs(), pick in any::<prop::sample::Index>(), op in any::<u32>()) {
        let value = *pick.get(&graph.values.ids().collect::<Vec<_>>());
        let def = ValueDef::Op { op: OpId(op % 100), result: 7 };
        let mut changed = graph.clone();
        changed.values[value].def = def;
        let named = changed.ops.get(OpId(op % 100)).is_some_and(|op| op.results.contains(&value));
        prop_assert_eq!(changed.verify().is_ok(), named && changed.ops[OpId(op % 100)].results.last() == Some(&value));
    }
}
