//! The JSON form.

use proptest::prelude::*;
use rannc_ir::testing::{graphs, mlp};
use rannc_ir::{Graph, GraphError};

fn error(text: &str) -> GraphError {
    Graph::from_json(text).expect_err("the text holds no graph")
}

proptest! {
    #[test]
    fn reads_what_it_wrote(graph in graphs()) {
        let text = graph.to_json();
        let read = Graph::from_json(&text).expect("a written graph is readable");
        prop_assert_eq!(read.to_json(), text);
        prop_assert_eq!(read, graph);
    }

    #[test]
    fn no_prefix_is_a_graph(cut in 0..1000_usize) {
        let text = mlp(1, 4).to_json();
        let prefix = &text[..cut % text.len()];
        prop_assert!(matches!(error(prefix), GraphError::NotJson(_)), "{}", prefix);
    }
}

#[test]
fn text_that_is_no_json() {
    assert!(matches!(error("graph"), GraphError::NotJson(_)));
    assert!(error("{").to_string().starts_with("the graph file is not JSON or was cut short: EOF"));
}

#[test]
fn another_schema_names_both_versions() {
    let text = mlp(1, 4).to_json().replace("\"schema\":1", "\"schema\":7");
    assert_eq!(
        error(&text).to_string(),
        "the graph file has schema version 7, this program reads version 1; capture the model again"
    );
    assert!(matches!(error("{\"schema\":2}"), GraphError::Schema { found: 2 }));
}

#[test]
fn json_that_is_no_graph() {
    for text in ["[]", "{}", "{\"schema\":1}", "{\"schema\":-1}"] {
        assert!(matches!(error(text), GraphError::Damaged(_)), "{text}");
    }
    let text = mlp(1, 4).to_json().replace("float32", "float33");
    assert!(error(&text).to_string().contains("float33"));
}

#[test]
fn a_graph_that_contradicts_itself() {
    let text = mlp(1, 4).to_json().replace("\"outputs\":[", "\"outputs\":[99,");
    assert_eq!(error(&text).to_string(), "the graph is not valid: output 0: there is no value v99");
}
