//! A graph that can be read can be analysed, hashed and written again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rannc_ir::{Analysis, Graph};

fuzz_target!(|text: &str| {
    let _ = Graph::from_text(text);
    let Ok(graph) = Graph::from_json(text) else { return };
    assert_eq!(Graph::from_json(&graph.to_json()).expect("just written"), graph);
    Analysis::new(&graph);
    graph.hash();
});
