//! Damaged graph files are refused or read, and what is read can be worked with. `PROPTEST_CASES` runs
//! more cases.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rannc_ir::testing::{cases, damaged, graphs, mlp};
use rannc_ir::{Analysis, Graph};

/// One of a hundred small graphs, as drawing graphs takes longer than reading them.
fn small_graphs() -> impl Strategy<Value = Graph> {
    let mut runner = TestRunner::deterministic();
    let mut drawn: Vec<Graph> =
        (0..300).map(|_| graphs().new_tree(&mut runner).expect("every graph is accepted").current()).collect();
    drawn.sort_by_key(|graph| graph.ops.len());
    drawn.truncate(100);
    prop::sample::select(drawn)
}

/// Everything that readers of a graph do with it first.
fn work_with(graph: &Graph) -> Result<(), TestCaseError> {
    prop_assert_eq!(&Graph::from_json(&graph.to_json()).expect("a written graph is readable"), graph);
    let analysis = Analysis::new(graph);
    prop_assert!(analysis.main_ops.len() <= graph.ops.len());
    prop_assert_eq!(graph.hash().len(), 64);
    Ok(())
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn of_json(text in damaged(small_graphs().prop_map(|graph| graph.to_json()))) {
        match Graph::from_json(&text) {
            Ok(graph) => work_with(&graph)?,
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn of_text(text in damaged(small_graphs().prop_map(|graph| graph.to_text()))) {
        match Graph::from_text(&text) {
            Ok(graph) => work_with(&graph)?,
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// The cases above see both outcomes.
#[test]
fn of_both_kinds() {
    let text = mlp(1, 4).to_json();
    assert!(Graph::from_json(&text.replace("linear", "bilinear")).is_ok());
    assert!(Graph::from_json(&text[1..]).is_err());
}

#[test]
fn the_seeds_of_the_fuzz_target_are_graphs() {
    let json = Graph::from_json(include_str!("../../../fuzz/seeds/graph/mlp.json")).expect("valid");
    let text = Graph::from_text(include_str!("../../../fuzz/seeds/graph/mlp.txt")).expect("valid");
    assert_eq!(json, text);
}
