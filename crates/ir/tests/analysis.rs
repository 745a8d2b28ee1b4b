//! Row dimensions, batch-free ops, groups and cuts.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{
    Analysis, Arg, CutRefusal, DType, Dim, Graph, GroupReason, OpId, RowDim, ValueDef, ValueId, allowed_cuts, cuts,
    main_ops, row_dims,
};

const B: Dim = Dim::rows(1);

fn f(extent: i64) -> Dim {
    Dim::fixed(extent)
}

fn ints(items: &[i64]) -> Arg {
    Arg::List(items.iter().copied().map(Arg::Int).collect())
}

fn rows(dim: u32, per_row: u64) -> Option<RowDim> {
    Some(RowDim { dim, per_row })
}

fn v(value: ValueId) -> Arg {
    Arg::Value(value)
}

#[test]
fn a_plain_network_may_be_cut_everywhere() {
    let graph = mlp(3, 8);
    assert_eq!(main_ops(&graph).len(), 7);
    assert_eq!(allowed_cuts(&graph), [true; 8]);
}

#[test]
fn an_input_has_rows_only_in_its_first_dimension() {
    let mut builder = GraphBuilder::new("Inputs");
    let good = builder.input(DType::Float32, &[B, f(8)]);
    let second = builder.input(DType::Float32, &[f(8), B]);
    let square = builder.input(DType::Float32, &[B, B]);
    let longer = builder.input(DType::Float32, &[Dim { per_row: 1, fixed: 1 }]);
    let double = builder.input(DType::Float32, &[Dim::rows(2)]);
    let whole = builder.input(DType::Float32, &[f(3)]);
    let dims = row_dims(&builder.finish(&[]));
    assert_eq!(dims[good], rows(0, 1));
    assert_eq!(dims[double], rows(0, 2));
    for value in [second, square, longer, whole] {
        assert_eq!(dims[value], None, "{value}");
    }
}

#[test]
fn views_keep_rows_when_as_many_elements_stand_before() {
    let mut builder = GraphBuilder::new("Views");
    let input = builder.input(DType::Float32, &[B, f(6), f(4)]);
    let merged = builder.view(input, &[Dim::rows(6), f(4)]);
    let relu = builder.pointwise("aten.relu.default", &[merged]);
    let split = builder.view(relu, &[B, f(24)]);
    let turned = builder.op("aten.permute.default", vec![v(input), ints(&[1, 0, 2])], &[f(6), B, f(4)]);
    let mixed = builder.view(turned, &[Dim::rows(6), f(4)]);
    let mixed_on = builder.pointwise("aten.relu.default", &[mixed]);
    let wrong = builder.view(input, &[f(6), B, f(4)]);
    let unsqueezed = builder.op("aten.unsqueeze.default", vec![v(merged), Arg::Int(0)], &[f(1), Dim::rows(6), f(4)]);
    let dims = row_dims(&builder.finish(&[]));
    assert_eq!(dims[merged], rows(0, 6));
    assert_eq!(dims[relu], rows(0, 6));
    assert_eq!(dims[split], rows(0, 1));
    assert_eq!(dims[turned], rows(1, 1));
    assert_eq!(dims[mixed], None);
    assert_eq!(dims[mixed_on], None);
    assert_eq!(dims[wrong], None);
    assert_eq!(dims[unsqueezed], rows(1, 6));
}

#[test]
fn several_rows_a_row_survive_only_ops_that_keep_the_order() {
    let mut builder = GraphBuilder::new("Orders");
    let input = builder.input(DType::Float32, &[B, f(4)]);
    let two = [Dim::rows(2), f(2)];
    let folded = builder.view(input, &two);
    let flipped = builder.op("aten.flip.default", vec![v(folded), ints(&[0])], &two);
    let doubled = builder.op("aten.cat.default", vec![Arg::List(vec![v(input), v(input)])], &[Dim::rows(2), f(4)]);
    let beside =
        builder.op("aten.cat.default", vec![Arg::List(vec![v(folded), v(folded)]), Arg::Int(1)], &[Dim::rows(2), f(4)]);
    let contradicted = builder.op("aten.add.Tensor", vec![v(folded), v(flipped)], &two);
    let zeros = builder.op("aten.zeros.default", vec![Arg::List(vec![Arg::Dim(Dim::rows(2))])], &two);
    let padded = builder.op("aten.add.Tensor", vec![v(folded), v(zeros)], &two);
    let half = builder.op("aten.narrow.default", vec![v(folded), Arg::Int(0), Arg::Int(0), Arg::Dim(B)], &[B, f(2)]);
    let outer = builder.op("aten.mm.default", vec![v(folded), v(input)], &[Dim::rows(2), B]);
    let dims = row_dims(&builder.finish(&[]));
    assert_eq!(dims[beside], rows(0, 2));
    assert_eq!(dims[padded], rows(0, 2));
    for value in [flipped, doubled, contradicted, half, outer] {
        assert_eq!(dims[value], None, "{value}");
    }
}

#[test]
fn ops_that_read_no_input_are_not_main_ops() {
    let mut builder = GraphBuilder::new("Free");
    let input = builder.input(DType::Float32, &[B, f(8)]);
    let weight = builder.param("weight", &[8, 8]);
    let free = builder.op("aten.t.default", vec![v(weight)], &[f(8), f(8)]);
    let drawn = builder.op("aten.rand.default", vec![], &[f(8)]);
    builder.last_op().random = true;
    let filled = builder.op("aten.zeros.default", vec![], &[f(8)]);
    let buffer = builder.buffer("count", DType::Float32, &[]);
    builder.in_place("aten.add_.Tensor", buffer);
    let read = builder.op("aten.clone.default", vec![v(buffer)], &[]);
    let view = builder.view(filled, &[f(2), f(4)]);
    builder.in_place("aten.fill_.Scalar", view);
    let scratch = builder.op("aten.zeros.default", vec![], &[f(8)]);
    builder.op("aten.copy_.default", vec![v(scratch), v(input)], &[f(8)]);
    builder.last_op().mutates = vec![scratch];
    let product = builder.op("aten.mm.default", vec![v(input), v(free)], &[B, f(8)]);
    let graph = builder.finish(&[product, drawn, read]);
    assert_eq!(main_ops(&graph), [1, 3, 4, 7, 8, 9].map(OpId));
    let clones = Analysis::new(&graph).clones(&graph, OpId(2));
    assert_eq!(clones.into_iter().collect::<Vec<_>>(), [2, 5, 6].map(OpId));
}

#[test]
fn a_changed_storage_a_region_and_an_unsendable_value_forbid_cuts() {
    let mut builder = GraphBuilder::new("Groups");
    let input = builder.input(DType::Float32, &[B, f(8)]);
    let fresh = builder.pointwise("aten.relu.default", &[input]);
    let view = builder.view(fresh, &[B, f(2), f(4)]);
    builder.in_place("aten.mul_.Tensor", view);
    let used = builder.pointwise("aten.exp.default", &[fresh]);
    let norm = builder.op("aten.norm.Scalar", vec![v(used)], &[]);
    let scaled = builder.pointwise("aten.div.Tensor", &[used, norm]);
    let first = builder.pointwise("aten.sin.default", &[scaled]);
    builder.last_op().region = Some(7);
    let second = builder.pointwise("aten.cos.default", &[first]);
    builder.last_op().region = Some(7);
    let graph = builder.finish(&[second]);
    let storage = CutRefusal::Group { first: OpId(0), last: OpId(2), reason: GroupReason::Storage(fresh) };
    let region = CutRefusal::Group { first: OpId(6), last: OpId(7), reason: GroupReason::Region(7) };
    let unsendable = CutRefusal::NoRowDim { value: norm, producer: OpId(4), consumer: OpId(5) };
    let mixed = CutRefusal::NoRowDim { value: scaled, producer: OpId(5), consumer: OpId(6) };
    let expected = [None, Some(storage), Some(storage), None, None, Some(unsendable), Some(mixed), Some(region), None];
    assert_eq!(cuts(&graph), expected);
    assert_eq!(
        unsendable.describe(&graph),
        "v5, made by op4 and used by op5, has no dimension proven to run over the batch \
         (op4 aten.norm.Scalar at model.py:5; op5 aten.div.Tensor at model.py:6)"
    );
}

#[test]
fn running_statistics_hold_together_only_the_ops_that_share_them() {
    let mut builder = GraphBuilder::new("Norms");
    let input = builder.input(DType::Float32, &[B, f(8)]);
    let one = builder.batch_norm(input, "one");
    let two = builder.batch_norm(one, "two");
    let relu = builder.pointwise("aten.relu.default", &[two]);
    let graph = builder.clone().finish(&[relu]);
    assert_eq!(allowed_cuts(&graph), [true; 4]);

    let shared: Vec<ValueId> = graph.ops[OpId(0)].operands()[1..].to_vec();
    let again = builder.pointwise("aten.batch_norm.default", &[&[relu], &shared[..]].concat());
    builder.last_op().mutates = shared[2..].to_vec();
    let graph = builder.finish(&[again]);
    assert_eq!(allowed_cuts(&graph), [true, false, false, false, true]);
}

#[test]
fn an_assigned_buffer_holds_its_readers_and_its_writer_together() {
    let mut builder = GraphBuilder::new("Assigned");
    let input = builder.input(DType::Float32, &[B, f(8)]);
    let buffer = builder.buffer("average", DType::Float32, &[8]);
    let centred = builder.pointwise("aten.sub.Tensor", &[input, buffer]);
    let relu = builder.pointwise("aten.relu.default", &[centred]);
    let update = builder.op("aten.mean.dim", vec![v(relu)], &[f(8)]);
    builder.assign_buffer(buffer, update);
    let graph = builder.finish(&[relu]);
    assert_eq!(allowed_cuts(&graph), [true, false, false, true]);
}

/// Asks for every cut what the specification asks, directly.
fn may_cut(graph: &Graph, analysis: &Analysis, cut: usize) -> bool {
    let before = |op: OpId| analysis.main_index[op].is_some_and(|index| (index as usize) < cut);
    let sendable = analysis.main_ops[cut..].iter().flat_map(|&op| graph.ops[op].operands()).all(|value| {
        match graph.values[value].def {
            ValueDef::Op { op, .. } if before(op) => analysis.row_dims[value].is_some(),
            _ => true,
        }
    });
    let whole = analysis.groups.iter().all(|group| {
        let inside = group.ops.iter().filter(|&&op| before(op)).count();
        inside == 0 || inside == group.ops.len()
    });
    sendable && whole
}

proptest! {
    #[test]
    fn cuts_are_those_of_the_definition(graph in graphs()) {
        let analysis = Analysis::new(&graph);
        let expected: Vec<bool> =
            (0..=analysis.main_ops.len()).map(|cut| may_cut(&graph, &analysis, cut)).collect();
        prop_assert_eq!(allowed_cuts(&graph), expected);
    }

    #[test]
    fn batch_free_ops_read_only_what_every_stage_can_have(graph in graphs()) {
        let analysis = Analysis::new(&graph);
        for (id, op) in graph.ops.iter().filter(|&(id, _)| analysis.batch_free[id]) {
            prop_assert!(!op.random && !op.opaque && op.region.is_none());
            for value in op.operands() {
                prop_assert!(analysis.storages.changers(value).all(|changer| analysis.batch_free[changer]));
                match graph.values[value].def {
                    ValueDef::Input(_) => prop_assert!(false, "{} reads {}", id, value),
                    ValueDef::Op { op, .. } => prop_assert!(analysis.batch_free[op]),
                    _ => prop_assert!(!analysis.storages.is_changed(value)),
                }
            }
        }
    }

    #[test]
    fn row_dims_are_dimensions_of_their_values(graph in graphs()) {
        let dims = row_dims(&graph);
        for (id, value) in graph.values.iter() {
            if let Some(rows) = dims[id] {
                let extent = value.shape[rows.dim as usize];
                prop_assert_eq!((u64::try_from(extent.per_row), extent.fixed), (Ok(rows.per_row), 0));
            }
        }
    }
}

/// The other properties would pass on a generator that makes only plain chains.
#[test]
fn the_generator_makes_every_kind_of_graph() {
    let mut runner = TestRunner::deterministic();
    let mut seen = [0; 9];
    for _ in 0..200 {
        let graph = graphs().new_tree(&mut runner).expect("the strategy rejects nothing").current();
        let analysis = Analysis::new(&graph);
        let ops = || graph.ops.values();
        let facts = [
            analysis.cuts.iter().filter(|cut| cut.is_none()).count() > 3,
            analysis.cuts.iter().any(|cut| matches!(cut, Some(CutRefusal::NoRowDim { .. }))),
            analysis.groups.iter().any(|group| matches!(group.reason, GroupReason::Storage(_))),
            analysis.groups.iter().any(|group| matches!(group.reason, GroupReason::Region(_))),
            analysis.main_ops.len() < graph.ops.len(),
            analysis.row_dims.values().any(|rows| rows.is_some_and(|rows| rows.per_row > 1)),
            ops().any(|op| op.random) && ops().any(|op| op.opaque),
            graph.buffers.values().any(|buffer| buffer.update.is_some()),
            graph.values.values().any(|value| value.dtype == DType::Int64 && matches!(value.def, ValueDef::Op { .. })),
        ];
        for (count, fact) in seen.iter_mut().zip(facts) {
            *count += i32::from(fact);
        }
    }
    assert!(seen.iter().all(|&count| count >= 10), "{seen:?}");
}
