//! What holds for every Program and all costs.

use std::collections::HashMap;

use proptest::prelude::*;
use rannc_plan::{Action, Message, Payload, Program, RankProgram, Seat};
use rannc_sim::{Costs, RankTimeline, Timeline, What};

use crate::cases::{TableCosts, assert_close, priced_programs};

/// Makes one thing slower.
fn slow_down(costs: &mut TableCosts, which: usize, by: f64) {
    let stage = which / 7 % costs.stages.len();
    let rank = which / 7 % costs.latency_us.len();
    let stage = &mut costs.stages[stage];
    let times = [
        &mut stage.forward_us,
        &mut stage.backward_us,
        &mut stage.reduce_us,
        &mut stage.update_us,
        &mut costs.latency_us[rank],
        &mut costs.byte_us[rank],
        &mut costs.tied_us,
    ];
    *times.into_iter().nth(which % 7).expect("one of seven") += by;
}

/// Start and end of all that keeps a rank's device from computing something else.
fn computations(rank: &RankTimeline) -> Vec<(f64, f64)> {
    let moves = |what: &What| {
        matches!(what, What::Send { .. } | What::Recv { .. } | What::Exchange { .. } | What::Reduce | What::Gather)
    };
    let on_device = rank.events.iter().filter(|event| !moves(&event.what));
    on_device.map(|event| (event.start_us, event.end_us)).collect()
}

/// The longest path of row 0 of a microbatch, which the same rank of a Stage has forward and backward.
fn row_path_us(program: &Program, costs: &TableCosts, mb: u32) -> f64 {
    let seats = program.ranks.iter().flat_map(|own| own.seats.iter().map(move |seat| (own, *seat)));
    let first: Vec<(&RankProgram, Seat)> = seats.filter(|(_, seat)| seat.replica == 0).collect();
    let is_first = |rank: u32, stage: u32| first.iter().any(|(own, seat)| (own.rank, seat.stage) == (rank, stage));
    let mut paths: HashMap<(Payload, u32), f64> = HashMap::new();
    let mut by_stage = first.clone();
    by_stage.sort_by_key(|(_, seat)| seat.stage);
    let backwards = if program.call.trains() { by_stage.iter().rev().copied().collect() } else { Vec::new() };
    let visits = by_stage.iter().map(|own| (Payload::Value, *own));
    let mut longest: f64 = 0.0;
    for (payload, (own, seat)) in visits.chain(backwards.into_iter().map(|own| (Payload::Grad, own))) {
        let rows = program.stage_rows[seat.stage as usize][mb as usize][0].rows();
        let forward_us = paths.get(&(Payload::Value, seat.stage)).copied().unwrap_or(0.0);
        let own_us = match payload {
            Payload::Value => costs.forward_us(seat.stage, rows),
            Payload::Grad => costs.backward_us(seat.stage, rows),
        };
        let mut path = forward_us;
        for message in received(own.forward.iter().chain(&own.backward), payload, mb) {
            let only_stage = |rank: u32| program.ranks[rank as usize].seats[0].stage;
            let (from, to) = message.stages.unwrap_or_else(|| (only_stage(message.peer), only_stage(own.rank)));
            if to != seat.stage || !is_first(message.peer, from) {
                continue;
            }
            let bytes = message.pieces.iter().map(|piece| piece.rows.rows()).sum();
            path = path.max(paths[&(payload, from)] + costs.send_us(message.peer, own.rank, bytes));
        }
        paths.insert((payload, seat.stage), path + own_us);
        longest = longest.max(path + own_us);
    }
    longest
}

fn received<'a>(actions: impl Iterator<Item = &'a Action>, payload: Payload, mb: u32) -> Vec<&'a Message> {
    let messages = actions.filter_map(|action| match action {
        Action::Recv(message) => Some(message),
        _ => None,
    });
    messages.filter(|message| message.kind == payload && message.mb == mb).collect()
}

fn check_accounts(timeline: &Timeline, rank: &RankTimeline) {
    let parts_us = [rank.busy_us, rank.waiting_us, rank.reduce_us, rank.update_us, rank.bubble_us];
    assert!(parts_us.iter().all(|&us| us >= 0.0));
    assert_close(parts_us.iter().sum(), timeline.step_us);
    let computations = computations(rank);
    assert!(computations.windows(2).all(|pair| pair[0].1 <= pair[1].0), "computations overlap");
    let device_us: f64 = computations.iter().map(|(start_us, end_us)| end_us - start_us).sum();
    assert_close(timeline.step_us - device_us, rank.waiting_us + rank.reduce_us + rank.bubble_us);
    let sums = rank.events.iter().filter(|event| matches!(event.what, What::Reduce | What::Gather));
    let sum_us: f64 = sums.map(|event| event.end_us - event.start_us).sum();
    assert!(rank.reduce_us <= sum_us + 1e-9);
    let is_message = |what| matches!(what, What::Send { .. } | What::Recv { .. } | What::Exchange { .. });
    let messages = rank.events.iter().filter(|event| is_message(event.what));
    let message_us: f64 = messages.map(|event| event.end_us - event.start_us).sum();
    assert!(rank.waiting_us <= message_us + 1e-9);
    assert!(rank.events.iter().all(|event| 0.0 <= event.start_us && event.end_us <= timeline.step_us));
    assert!(rank.events.is_sorted_by(|a, b| a.start_us <= b.start_us));
}

fn check_memory(costs: &TableCosts, program: &Program, rank: &RankTimeline) {
    assert!(rank.memory.is_sorted_by(|a, b| a.0 < b.0));
    assert!(rank.memory.iter().all(|&(_, bytes)| bytes <= rank.peak_bytes));
    let stages = || rank.seats.iter().map(|seat| seat.stage);
    let framework_bytes = stages().map(|stage| costs.framework_bytes(stage)).max().expect("a seat");
    let beside_bytes = stages().map(|stage| costs.fixed_bytes(stage) - costs.framework_bytes(stage)).sum::<u64>();
    let fixed_bytes = framework_bytes + beside_bytes;
    assert_eq!(rank.memory.last().expect("memory has an end").1, fixed_bytes);
    for &Seat { stage, replica } in &rank.seats {
        let rows = program.stage_rows[stage as usize].iter().map(|replicas| replicas[replica as usize].rows());
        let alone = rows.map(|rows| costs.microbatch_bytes(stage, rows) + costs.workspace_bytes(stage, rows));
        assert!(rank.peak_bytes >= fixed_bytes + alone.max().unwrap_or(0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn slower_is_never_faster((program, costs) in priced_programs(), which in any::<usize>(), by in 0.0..10.0) {
        let before = costs.run(&program);
        let mut slower = costs;
        slow_down(&mut slower, which, by);
        let after = slower.run(&program);
        prop_assert!(after.step_us >= before.step_us - 1e-9);
    }

    #[test]
    fn never_below_the_bounds((program, costs) in priced_programs()) {
        let timeline = costs.run(&program);
        for rank in &timeline.ranks {
            prop_assert!(timeline.step_us >= rank.busy_us + rank.reduce_us + rank.update_us - 1e-9);
        }
        for (mb, _) in (0..).zip(&program.microbatches).filter(|&(_, &rows)| rows > 0) {
            prop_assert!(timeline.step_us >= row_path_us(&program, &costs, mb) - 1e-9);
        }
    }

    #[test]
    fn times_and_memory_add_up((program, costs) in priced_programs()) {
        let timeline = costs.run(&program);
        let busy_us: f64 = timeline.ranks.iter().map(|rank| rank.busy_us).sum();
        prop_assert!((0.0..=1.0).contains(&timeline.bubble()));
        assert_close(timeline.step_us * timeline.ranks.len() as f64 * (1.0 - timeline.bubble()), busy_us);
        for (own, rank) in program.ranks.iter().zip(&timeline.ranks) {
            prop_assert_eq!((own.rank, &own.seats), (rank.rank, &rank.seats));
            let actions = own.forward.len() + own.backward.len() + usize::from(program.call.trains());
            prop_assert_eq!(rank.events.len(), actions);
            check_accounts(&timeline, rank);
            check_memory(&costs, &program, rank);
        }
    }

    #[test]
    fn scaled_costs_scale_the_step((program, costs) in priced_programs()) {
        let mut doubled = costs.clone();
        doubled.tied_us *= 2.0;
        for stage in &mut doubled.stages {
            stage.forward_us *= 2.0;
            stage.backward_us *= 2.0;
            stage.reduce_us *= 2.0;
            stage.update_us *= 2.0;
        }
        for us in doubled.latency_us.iter_mut().chain(&mut doubled.byte_us) {
            *us *= 2.0;
        }
        assert_close(doubled.run(&program).step_us, 2.0 * costs.run(&program).step_us);
    }

    #[test]
    fn messages_follow_each_other_on_their_channel((program, costs) in priced_programs()) {
        let timeline = costs.run(&program);
        for rank in &timeline.ranks {
            let mut free_us: HashMap<(u32, Option<(u32, u32)>), f64> = HashMap::new();
            for event in &rank.events {
                let What::Recv { mb, peer, stages, payload } = event.what else { continue };
                let sent = What::Send { mb, peer: rank.rank, stages, payload };
                let same = |other: &&rannc_sim::Event| other.what == sent && other.start_us == event.start_us;
                prop_assert_eq!(timeline.ranks[peer as usize].events.iter().filter(same).count(), 1);
                prop_assert!(event.start_us >= free_us.insert((peer, stages), event.end_us).unwrap_or(0.0));
            }
        }
    }

    #[test]
    fn timelines_survive_json((program, costs) in priced_programs()) {
        let timeline = costs.run(&program);
        let json = serde_json::to_string(&timeline).expect("timelines hold finite numbers");
        prop_assert_eq!(serde_json::from_str::<Timeline>(&json).expect("it was just written"), timeline);
    }
}
