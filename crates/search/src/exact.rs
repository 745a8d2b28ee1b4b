//! Tests that hold the sums and the dynamic program against what they stand for.

use proptest::prelude::*;
use rannc_cost::{Cluster, OpCost, OpWork, Poly, Work};

use crate::assemble::{SEVERAL_STAGES, best};
use crate::chain::{Affine, BlockSpec, Chain, ChainSpec, CloneSpec, CrossingSpec, KeptSpec, StateSpec};
use crate::price::{Pricing, Span, StepTime};
use crate::settings::Settings;
use crate::table::Entry;

fn block() -> impl Strategy<Value = BlockSpec> {
    (1..200_u32, 1..200_u32, 0..50_u32, 0..20_u32).prop_map(|(fixed, flops, workspace, private)| BlockSpec {
        work: vec![OpWork {
            forward: Work {
                flops: Poly::affine(f64::from(fixed) * 1e6, f64::from(flops) * 1e6),
                bytes: Poly::default(),
                launches: 1.0,
            },
            backward: Work { flops: Poly::affine(0.0, f64::from(flops) * 2e6), bytes: Poly::default(), launches: 2.0 },
            ..OpWork::default()
        }],
        workspace_bytes: vec![
            Affine { fixed: f64::from(workspace) * 1e4, per_row: 0.0 },
            Affine { fixed: 0.0, per_row: f64::from(workspace) * 1e3 },
        ],
        private_bytes: Affine { fixed: 0.0, per_row: f64::from(private) * 1e3 },
        output_bytes: Affine { fixed: f64::from(private) * 1e2, per_row: f64::from(workspace) * 1e2 },
    })
}

/// Blocks of a chain, increasing.
fn places(len: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::btree_set(0..len, 1..=len).prop_map(|places| places.into_iter().collect())
}

fn crossing(len: usize) -> impl Strategy<Value = Option<CrossingSpec>> {
    (places(len), 1..200_u32, any::<bool>()).prop_map(|(places, bytes, requires_grad)| {
        let (&made_by, used_by) = places.split_first()?;
        let bytes = Affine { fixed: 0.0, per_row: f64::from(bytes) * 1e3 };
        (!used_by.is_empty()).then(|| CrossingSpec { bytes, requires_grad, made_by, used_by: used_by.to_vec() })
    })
}

/// A tensor that several Blocks save, and that may cross them.
fn kept(len: usize) -> impl Strategy<Value = KeptSpec> {
    (places(len), places(len), any::<bool>(), 1..100_u32).prop_map(|(savers, users, crosses, bytes)| {
        let bytes = Affine { fixed: 0.0, per_row: f64::from(bytes) * 1e3 };
        let made_by = savers[0].min(users[0]);
        let used_by: Vec<usize> = users.into_iter().filter(|&user| user > made_by).collect();
        let crossing = (crosses && !used_by.is_empty()).then_some((made_by, used_by));
        KeptSpec { bytes, savers, crossing }
    })
}

fn spec(max_len: usize) -> impl Strategy<Value = ChainSpec> {
    (1..=max_len).prop_flat_map(|len| {
        let states = (places(len), 1..300_u32, any::<bool>()).prop_map(|(blocks, bytes, trainable)| StateSpec {
            bytes: f64::from(bytes) * 1e4,
            trainable,
            blocks,
        });
        let clones = (places(len), 1..100_u32).prop_map(|(blocks, us)| CloneSpec {
            cost: OpCost { forward_us: f64::from(us), backward_us: f64::from(us) / 2.0 },
            blocks,
        });
        (
            prop::collection::vec(block(), len),
            prop::collection::vec(states, 0..6),
            prop::collection::vec(clones, 0..3),
            prop::collection::vec(crossing(len), 0..6),
            prop::collection::vec(kept(len), 0..6),
        )
            .prop_map(|(blocks, states, clones, crossings, kept)| ChainSpec {
                blocks,
                states,
                clones,
                crossings: crossings.into_iter().flatten().collect(),
                kept,
            })
    })
}

fn settings(devices: u32) -> impl Strategy<Value = Settings> {
    (1..20_u64, 2..60_u64, any::<(bool, bool)>(), prop::option::of(1..=devices), prop::option::of(1..4_u32)).prop_map(
        move |(batch_rows, limit, (loss_inside, gather_inputs), stages, max_stages)| Settings {
            world_size: devices,
            batch_rows,
            memory_limit_bytes: Some(limit * 2_000_000),
            loss_inside,
            gather_inputs,
            stages: stages.filter(|stages| stages % 2 == 0),
            max_stages,
            max_microbatches: 6,
            ..Settings::default()
        },
    )
}

/// All ways to write `total` as a sum of `parts` positive numbers.
fn compositions(total: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 0 {
        return if total == 0 { vec![Vec::new()] } else { Vec::new() };
    }
    let with_first =
        |first: usize| compositions(total - first, parts - 1).into_iter().map(move |rest| [vec![first], rest].concat());
    (1..=total).flat_map(with_first).collect()
}

/// The time of one Plan, or `None` if it does not fit.
fn step_us(pricing: &Pricing<'_>, lengths: &[usize], replicas: &[usize]) -> Option<f64> {
    let mut step = StepTime::default();
    let (mut end, mut last_rank) = (pricing.chain.len(), pricing.settings.world_size);
    for (place, (&length, &replicas)) in lengths.iter().zip(replicas).rev().enumerate() {
        let replicas = u32::try_from(replicas).expect("few devices");
        let span = Span { first: end - length, end, replicas };
        let entry = Entry::priced(pricing, span, last_rank - replicas);
        if entry.max_in_flight < pricing.in_flight(place + 1) {
            return None;
        }
        step = step.prepend(entry.microbatch_us, entry.backward_us, entry.end_us);
        (end, last_rank) = (end - length, last_rank - replicas);
    }
    Some(step.step_us(pricing.microbatches))
}

/// The time of the Plan to choose among all.
fn brute_force(chain: &Chain, cluster: &Cluster, settings: &Settings, candidates: &[u64]) -> Option<f64> {
    let devices = settings.world_size as usize;
    let most = settings.max_stages.map_or(devices, |stages| stages as usize);
    let counts = settings.stages.map_or(1..=most, |stages| stages as usize..=stages as usize);
    let (mut single_us, mut several_us) = (f64::INFINITY, f64::INFINITY);
    for &microbatches in candidates {
        let pricing = Pricing::new(chain, cluster, settings, microbatches);
        for stages in counts.clone() {
            let best_us = if stages == 1 { &mut single_us } else { &mut several_us };
            for lengths in compositions(chain.len(), stages) {
                for replicas in compositions(devices, stages) {
                    *best_us = best_us.min(step_us(&pricing, &lengths, &replicas).unwrap_or(f64::INFINITY));
                }
            }
        }
    }
    let chosen_us = if several_us < single_us * SEVERAL_STAGES { several_us } else { single_us };
    chosen_us.is_finite().then_some(chosen_us)
}

fn small_cluster(nodes: u32) -> Cluster {
    let mut cluster = Cluster::preset("cpu", nodes, 4_u32.div_ceil(nodes)).expect("4 devices");
    for (level, bytes_per_s) in cluster.levels.iter_mut().zip([1e8, 3e7]) {
        level.send.bytes_per_s = bytes_per_s;
        level.collective.bytes_per_s = bytes_per_s;
    }
    cluster
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_search_equals_brute_force(spec in spec(5), settings in settings(4), nodes in 1..3_u32) {
        let (chain, cluster) = (Chain::new(spec), small_cluster(nodes));
        let candidates = settings.microbatch_candidates().expect("free microbatches");
        let expected = brute_force(&chain, &cluster, &settings, &candidates);
        let found = best(&chain, &cluster, &settings, &candidates);
        match (&expected, &found) {
            (Some(expected), Some((found, lower_bound_us))) => {
                prop_assert!((found.step_us - expected).abs() <= 1e-8 * expected, "{} {expected}", found.step_us);
                prop_assert!(*lower_bound_us <= found.step_us * (1.0 + 1e-9));
                let pricing = Pricing::new(&chain, &cluster, &settings, found.microbatches);
                let lengths: Vec<usize> = found.spans.iter().map(|span| span.end - span.first).collect();
                let replicas: Vec<usize> = found.spans.iter().map(|span| span.replicas as usize).collect();
                let us = step_us(&pricing, &lengths, &replicas).expect("fits");
                prop_assert!((us - found.step_us).abs() <= 1e-9 * us);
            }
            (None, None) => {}
            _ => prop_assert!(false, "{expected:?} {found:?}"),
        }
    }

    #[test]
    fn sums_count_every_tensor_once(spec in spec(7), rows in 1..9_u64) {
        let chain = Chain::new(spec.clone());
        for first in 0..chain.len() {
            for end in first + 1..=chain.len() {
                let holds = |places: &[usize]| places.iter().any(|place| (first..end).contains(place));
                let states: f64 = spec.states.iter().filter(|s| holds(&s.blocks)).map(|s| s.bytes).sum();
                prop_assert!((chain.state_bytes.at(first, end) - states).abs() < 1.0);
                let received = |made_by: usize, used_by: &[usize]| made_by < first && holds(used_by);
                let into = spec.crossings.iter().filter(|c| received(c.made_by, &c.used_by));
                let into: f64 = into.map(|c| c.bytes.at(rows)).sum();
                prop_assert!((chain.in_bytes.at(first, end, rows) - into).abs() < 1.0);
                let sent = |c: &&CrossingSpec| holds(&[c.made_by]) && c.used_by.iter().any(|&user| user >= end);
                let out: f64 = spec.crossings.iter().filter(sent).map(|c| c.bytes.at(rows)).sum();
                prop_assert!((chain.out_bytes.at(first, end, rows) - out).abs() < 1.0);
                let is_kept = |k: &&KeptSpec| {
                    holds(&k.savers) || k.crossing.as_ref().is_some_and(|(made_by, used_by)| received(*made_by, used_by))
                };
                let private: f64 = spec.blocks[first..end].iter().map(|b| b.private_bytes.at(rows)).sum();
                let kept: f64 = spec.kept.iter().filter(is_kept).map(|k| k.bytes.at(rows)).sum::<f64>() + private;
                prop_assert!((chain.kept_bytes.at(first, end, rows) - kept).abs() < 1.0);
                let outputs: f64 = spec.blocks[first..end].iter().map(|b| b.output_bytes.at(rows)).sum();
                prop_assert!((chain.output_bytes.at(first, end, rows) - outputs).abs() < 1.0);
            }
        }
    }
}
