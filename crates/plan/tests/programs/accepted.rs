//! Programs of random cases pass the checker and move every row to its place.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use rannc_ir::testing::graphs;
use rannc_ir::{Analysis, OpRun};
use rannc_plan::{Action, Partition, in_flight, plan_channels};

use crate::cases::{Given, calls, cases, schedules, shared_cases};
use crate::oracle;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_program_is_accepted_and_runs(case in cases()) {
        let program = case.build();
        prop_assert_eq!(case.check(&program), Ok(()));
        prop_assert_eq!(oracle::run(&case, &program), Ok(()));
    }

    #[test]
    fn every_program_of_shared_ranks_is_accepted_and_runs(case in shared_cases()) {
        let program = case.build();
        prop_assert_eq!(case.check(&program), Ok(()));
        prop_assert_eq!(oracle::run(&case, &program), Ok(()));
        for (own, held) in program.ranks.iter().zip(in_flight(&program).expect("it ends")) {
            let microbatches = program.microbatches.iter().filter(|&&rows| rows > 0).count();
            prop_assert!(held <= (own.seats.len() * microbatches) as u64);
        }
    }
}

/// Random graphs divided at any of their allowed cuts, with up to three Replicas a Stage.
fn divided_graphs() -> impl Strategy<Value = Given> {
    let graph = (graphs(), vec(any::<Index>(), 0..4)).prop_map(|(graph, picks)| {
        let cuts = Analysis::new(&graph).cuts;
        let end = u32::try_from(cuts.len() - 1).expect("small");
        let allowed: Vec<u32> = (1..end).filter(|&cut| cuts[cut as usize].is_none()).collect();
        let inner = picks.iter().filter(|_| !allowed.is_empty()).map(|pick| *pick.get(&allowed));
        let inner: BTreeSet<u32> = inner.collect();
        let ends: Vec<u32> = [0].into_iter().chain(inner).chain([end]).collect();
        let runs: Vec<OpRun> = ends.windows(2).map(|ends| OpRun { first: ends[0], end: ends[1] }).collect();
        Partition::new(&graph, &runs).expect("the cuts are allowed")
    });
    (graph, vec(1..=3usize, 5), 1..=5u32, vec(0..=7u64, 15), calls(), schedules()).prop_map(
        |(partition, replicas, microbatches, mut rows, call, schedule)| {
            let replicas = &replicas[..partition.stages.len()];
            rows.truncate(replicas.iter().sum());
            rows[0] += 1;
            Given { partition, ..Given::chain(replicas, microbatches, &rows, call, schedule) }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn programs_of_divided_graphs_are_accepted_and_run(case in divided_graphs()) {
        let program = case.build();
        prop_assert_eq!(case.check(&program), Ok(()));
        prop_assert_eq!(oracle::run(&case, &program), Ok(()));
    }

    #[test]
    fn views_hold_all_of_the_program(case in cases()) {
        let program = case.build();
        let channels = plan_channels(&case.placement, &case.partition);
        prop_assert!(channels.is_sorted_by(|a, b| a < b));
        prop_assert!(program.channels().iter().all(|pair| channels.binary_search(pair).is_ok()));
        let mut input_ends = 0;
        let mut places = vec![Vec::new(); case.placement.ranks.len()];
        for own in &program.ranks {
            let view = program.rank_view(own.rank).expect("the rank exists");
            prop_assert_eq!((&view.forward, &view.backward), (&own.forward, &own.backward));
            for seat in &view.seats {
                let stage = own.has_several_seats().then_some(seat.stage);
                for (mb, (rows, runs)) in (0..).zip(seat.rows.iter().zip(&seat.global_rows)) {
                    prop_assert_eq!(rows.rows(), runs.iter().map(|run| run.rows()).sum::<u64>());
                    prop_assert!(runs.windows(2).all(|pair| pair[0].hi < pair[1].lo));
                    places[seat.stage as usize].extend(runs.iter().flat_map(|run| run.lo..run.hi));
                    let forward = Action::Forward { mb, stage };
                    let forwards = view.forward.iter().filter(|&action| *action == forward).count();
                    prop_assert_eq!(forwards, usize::from(!rows.is_empty()));
                }
            }
            input_ends += view.inputs.iter().map(|t| if t.src == t.dst { 2 } else { 1 }).sum::<usize>();
        }
        for mut rows in places {
            rows.sort_unstable();
            prop_assert!(rows.into_iter().eq(0..program.total_rows), "each Stage has every row of the batch once");
        }
        prop_assert_eq!(input_ends, 2 * program.inputs.len());
        let world = u32::try_from(program.ranks.len()).expect("few ranks");
        prop_assert_eq!(program.rank_view(world), None);
    }

    #[test]
    fn programs_are_deterministic(case in cases()) {
        prop_assert_eq!(case.build(), case.build());
    }
}
