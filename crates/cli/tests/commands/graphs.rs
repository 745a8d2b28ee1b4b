//! `rannc graph`.

use insta::assert_snapshot;

use crate::folder::Folder;

#[test]
fn a_graph_is_summed_up() {
    let folder = Folder::new("graph");
    assert_snapshot!(folder.rannc("graph graph.json").output());
}

#[test]
fn a_graph_is_summed_up_for_programs() {
    let folder = Folder::new("graph-json");
    assert_snapshot!(folder.rannc("graph graph.json --json").output());
}

#[test]
fn a_graph_is_printed() {
    let folder = Folder::new("graph-text");
    assert_snapshot!(folder.rannc("graph graph.json --text").output());
}
