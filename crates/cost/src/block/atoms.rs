//! Atoms: the smallest runs of main ops that may stand alone.

use std::ops::Range;

use rannc_ir::Analysis;

/// The runs of main ops between the places where cutting is allowed, in order.
pub(super) fn atoms(analysis: &Analysis) -> Vec<Range<usize>> {
    let mut atoms = Vec::new();
    let mut first = 0;
    for (place, refusal) in analysis.cuts.iter().enumerate().skip(1) {
        if refusal.is_none() {
            atoms.push(first..place);
            first = place;
        }
    }
    atoms
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rannc_ir::testing::graphs;

    use super::*;

    proptest! {
        #[test]
        fn atoms_cover_the_main_ops_and_end_at_allowed_cuts(graph in graphs()) {
            let analysis = Analysis::new(&graph);
            let mut expected = 0;
            for atom in atoms(&analysis) {
                prop_assert_eq!(atom.start, expected);
                prop_assert!(atom.start < atom.end);
                prop_assert!(analysis.cuts[atom.end].is_none());
                expected = atom.end;
            }
            prop_assert_eq!(expected, analysis.main_ops.len());
        }
    }
}
