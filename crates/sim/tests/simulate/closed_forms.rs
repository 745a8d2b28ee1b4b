//! Uniform Stages without communication, where time and memory are known (Narayanan et al., 2021,
//! "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).

use rannc_plan::{Call, ScheduleKind};

use crate::cases::{TableCosts, Way, assert_close, chain};

const SIZES: [(usize, u32); 8] = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 4), (4, 9), (8, 32)];

/// A backward that may begin before the call returns is no earlier where messages take no time.
const TRAINING: [Way; 4] = [
    (Call::Whole, ScheduleKind::OneForwardOneBackward),
    (Call::Whole, ScheduleKind::FillDrain),
    (Call::Halves, ScheduleKind::OneForwardOneBackward),
    (Call::Halves, ScheduleKind::FillDrain),
];

#[test]
fn bubble_and_step() {
    for way in TRAINING {
        for (stages, microbatches) in SIZES {
            let program = chain(&vec![1; stages], microbatches, u64::from(microbatches), way);
            let timeline = TableCosts::uniform(stages, stages, 2.0, 5.0).run(&program);
            let slots = (stages - 1) as f64 + f64::from(microbatches);
            assert_close(timeline.step_us, slots * 7.0);
            assert_close(timeline.bubble(), (stages - 1) as f64 / slots);
        }
    }
}

#[test]
fn forward_only() {
    for (stages, microbatches) in SIZES {
        let program =
            chain(&vec![1; stages], microbatches, u64::from(microbatches), (Call::Forward, ScheduleKind::FillDrain));
        let timeline = TableCosts::uniform(stages, stages, 2.0, 5.0).run(&program);
        assert_close(timeline.step_us, ((stages - 1) as f64 + f64::from(microbatches)) * 2.0);
    }
}

#[test]
fn memory_of_the_microbatches_in_flight() {
    for (stages, microbatches) in SIZES {
        let mut costs = TableCosts::uniform(stages, stages, 2.0, 5.0);
        for stage in &mut costs.stages {
            (stage.fixed_bytes, stage.row_bytes, stage.row_workspace_bytes) = (1000, 10, 3);
        }
        for way in TRAINING.into_iter().chain([(Call::Forward, ScheduleKind::FillDrain)]) {
            let program = chain(&vec![1; stages], microbatches, u64::from(microbatches), way);
            for (stage, rank) in costs.run(&program).ranks.iter().enumerate() {
                let in_flight = match way {
                    (Call::Whole, ScheduleKind::OneForwardOneBackward) => {
                        u64::from(microbatches).min((stages - stage) as u64)
                    }
                    (Call::Whole, ScheduleKind::FillDrain) | (Call::Halves, _) => u64::from(microbatches),
                    (Call::Forward, _) => 1,
                };
                assert_eq!(rank.peak_bytes, 1000 + in_flight * 10 + 3);
                assert_eq!(rank.memory.last().expect("memory has an end").1, 1000);
            }
        }
    }
}

#[test]
fn a_thousand_ranks() {
    let program = chain(&[128; 8], 32, 32 * 128, (Call::Whole, ScheduleKind::OneForwardOneBackward));
    let timeline = TableCosts::uniform(8, 1024, 2.0, 5.0).run(&program);
    assert_close(timeline.step_us, 39.0 * 7.0);
    assert_close(timeline.bubble(), 7.0 / 39.0);
}
