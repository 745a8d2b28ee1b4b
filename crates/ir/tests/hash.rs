//! Structural hashes.

use proptest::prelude::*;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{Arg, DType, Dim, Entity, Graph, OpId, ParamId, ValueDef, ValueId, block_hash};

/// Everything that must not count is different in the result.
fn renamed(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    graph.name.push('x');
    graph.sample_rows += 1;
    for id in graph.values.ids() {
        graph.values[id].name.insert(0, 'x');
    }
    for id in graph.constants.ids() {
        graph.constants[id].name.insert(0, 'x');
    }
    for id in graph.ops.ids() {
        graph.ops[id].module.push('x');
        graph.ops[id].source = None;
    }
    graph
}

/// One structural change of the op.
fn changed(graph: &Graph, op: OpId, kind: u32) -> Graph {
    let mut graph = graph.clone();
    let target = &mut graph.ops[op];
    match kind {
        0 => target.target.push('x'),
        1 => target.args.push(Arg::None),
        2 => drop(target.kwargs.insert("x".to_owned(), Arg::Bool(true))),
        3 => target.grad_enabled = !target.grad_enabled,
        4 => target.random = !target.random,
        5 => target.opaque = !target.opaque,
        6 => target.region = if target.region.is_some() { None } else { Some(1000) },
        7 => target.row_group = if target.row_group.is_some() { None } else { Some(1000) },
        8 => target.args = vec![Arg::List(std::mem::take(&mut target.args))],
        _ => match target.results.first() {
            Some(&result) if kind == 9 => graph.values[result].shape.push(Dim::fixed(1)),
            Some(&result) if kind == 10 => graph.values[result].dtype = DType::Float64,
            Some(&result) => graph.values[result].requires_grad ^= true,
            None => target.target.push('y'),
        },
    }
    graph
}

proptest! {
    #[test]
    fn names_do_not_count(graph in graphs()) {
        let ops: Vec<OpId> = graph.ops.ids().collect();
        let other = renamed(&graph);
        prop_assert_eq!(graph.hash(), other.hash());
        prop_assert_eq!(block_hash(&graph, &ops), block_hash(&other, &ops));
    }

    #[test]
    fn structure_counts(graph in graphs(), pick in any::<prop::sample::Index>(), kind in 0..12_u32) {
        let ops: Vec<OpId> = graph.ops.ids().collect();
        if !ops.is_empty() {
            let other = changed(&graph, *pick.get(&ops), kind);
            prop_assert_ne!(graph.hash(), other.hash());
            prop_assert_ne!(block_hash(&graph, &ops), block_hash(&other, &ops));
        }
    }

    #[test]
    fn wiring_counts(graph in graphs(), pick in any::<prop::sample::Index>()) {
        let mut other = graph.clone();
        let ops: Vec<OpId> = graph.ops.iter().filter(|(_, op)| op.operands().len() > 1).map(|(id, _)| id).collect();
        if !ops.is_empty() {
            let op = *pick.get(&ops);
            other.ops[op].args.reverse();
            prop_assert_eq!(graph.hash() == other.hash(), graph.ops[op] == other.ops[op]);
        }
    }
}

#[test]
fn the_graph_hash_counts_what_is_around_the_ops() {
    let graph = mlp(2, 4);
    let hash = graph.hash();
    assert_eq!(hash.len(), 64);
    let differs = |change: fn(&mut Graph)| {
        let mut other = graph.clone();
        change(&mut other);
        assert_ne!(other.hash(), hash);
    };
    differs(|graph| graph.params[ParamId(0)].name.push('x'));
    differs(|graph| graph.params[ParamId(0)].aliases.push("tied".to_owned()));
    differs(|graph| graph.outputs.push(ValueId(0)));
    differs(|graph| graph.training = false);
    differs(|graph| graph.values[ValueId(1)].requires_grad = false);
    differs(|graph| graph.values[ValueId(3)].alias_of = Some(ValueId(0)));
}

#[test]
fn repeated_layers_have_equal_blocks() {
    let graph = mlp(4, 8);
    let layer = |index: u32| block_hash(&graph, &[OpId(2 * index), OpId(2 * index + 1)]);
    assert_eq!(layer(1), layer(2));
    assert_eq!(layer(1), layer(3));
    // The first layer's input carries no gradient.
    assert_ne!(layer(0), layer(1));
    assert_ne!(block_hash(&graph, &[OpId(2)]), block_hash(&graph, &[OpId(3)]));
    assert_ne!(block_hash(&graph, &[OpId(2), OpId(3)]), block_hash(&graph, &[OpId(3), OpId(4)]));
}

#[test]
fn block_hashes_tell_sharing_sources_and_sizes_apart() {
    let build = |weight: [usize; 2], width: i64, data: u8, stored: bool| {
        let mut builder = GraphBuilder::new("Blocks");
        let input = builder.input_with_grad(&[Dim::rows(1), Dim::fixed(width)]);
        let weights = ["a", "b"].map(|name| builder.param(name, &[width, width]));
        let constant = builder.constant(&[data; 4]);
        let first = builder.pointwise("aten.mm.default", &[input, weights[weight[0]]]);
        let second = builder.pointwise("aten.mm.default", &[first, weights[weight[1]]]);
        let added = if stored { constant } else { input };
        let last = builder.pointwise("aten.add.Tensor", &[second, added]);
        let graph = builder.finish(&[last]);
        block_hash(&graph, &graph.ops.ids().collect::<Vec<_>>())
    };
    let plain = build([0, 1], 8, 0, true);
    assert_eq!(plain, build([1, 0], 8, 0, true));
    assert_ne!(plain, build([0, 0], 8, 0, true));
    assert_ne!(plain, build([0, 1], 9, 0, true));
    assert_ne!(plain, build([0, 1], 8, 1, true));
    assert_ne!(plain, build([0, 1], 8, 0, false));
}

#[test]
fn the_source_of_an_operand_outside_a_block_does_not_count() {
    let mut builder = GraphBuilder::new("Sources");
    let input = builder.input_with_grad(&[Dim::rows(1), Dim::fixed(8)]);
    let shape = builder.shape(input);
    let pair = builder.op_with("pair", vec![Arg::Value(input)], &vec![(DType::Float32, shape); 2]);
    let pair_results = builder.clone().finish(&[]).ops[pair].results.clone();
    builder.pointwise("aten.relu.default", &[input]);
    builder.pointwise("aten.relu.default", &[pair_results[1]]);
    let graph = builder.finish(&[]);
    assert_eq!(block_hash(&graph, &[OpId::new(1)]), block_hash(&graph, &[OpId::new(2)]));
    let mut moved = graph.clone();
    moved.values[pair_results[1]].def = ValueDef::Op { op: pair, result: 5 };
    assert_ne!(block_hash(&graph, &[pair]), block_hash(&moved, &[pair]));
}
