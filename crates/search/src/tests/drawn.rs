//! Chains, settings and clusters drawn at random.

use proptest::prelude::*;
use rannc_cost::{Cluster, OpWork, Poly, Work};
use rannc_plan::Sharding;

use crate::chain::BatchSpec;
use crate::chain::spec::{
    Affine, BlockSpec, ChainSpec, CloneSpec, ConversionSpec, CrossingSpec, InputSpec, KeptSpec, OutputSpec, StateSpec,
};
use crate::settings::{Savers, Settings};

fn block() -> impl Strategy<Value = BlockSpec> {
    (1..200_u32, 1..200_u32, 0..50_u32, 0..20_u32).prop_map(|(fixed, flops, workspace, private)| BlockSpec {
        kind: 0,
        span: 0,
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
        left_bytes: Affine::default(),
        waiting_bytes: Affine::default(),
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
    (places(len), places(len), any::<bool>(), 1..100_u32).prop_map(|(saved_by, users, crosses, bytes)| {
        let bytes = Affine { fixed: 0.0, per_row: f64::from(bytes) * 1e3 };
        let made_by = saved_by[0].min(users[0]);
        // The storage itself for some, a view of half of it that the first of them makes for the others.
        let halved = Affine { per_row: bytes.per_row / 2.0, ..bytes };
        let later = |made_by: usize, count| {
            users.iter().copied().filter(move |&user| user > made_by).take(count).collect::<Vec<_>>()
        };
        let crossing = |bytes, made_by, used_by: Vec<usize>| {
            (!used_by.is_empty()).then_some(CrossingSpec { bytes, requires_grad: true, made_by, used_by })
        };
        let whole = crossing(bytes, made_by, later(made_by, 2));
        let viewer = whole.as_ref().map_or(made_by, |whole| whole.used_by[0]);
        let crossings = whole.into_iter().chain(crossing(halved, viewer, later(viewer, 9)));
        let crossings = if crosses { crossings.collect() } else { Vec::new() };
        KeptSpec { bytes, saved_by, made_by: crosses.then_some(made_by), crossings }
    })
}

/// What the ranks bring and get, in most models little.
fn batch(len: usize) -> impl Strategy<Value = BatchSpec> {
    let bytes = |kilobytes: u32| Affine { fixed: 0.0, per_row: f64::from(kilobytes * kilobytes) * 1e3 };
    let input = (places(len), 0..30_u32, prop::bool::weighted(0.8));
    let input = input.prop_map(move |(used_by, size, has_rows)| InputSpec { bytes: bytes(size), has_rows, used_by });
    let output = (0..len, 0..30_u32, any::<bool>());
    let output = output.prop_map(move |(made_by, size, requires_grad)| OutputSpec {
        bytes: bytes(size),
        requires_grad,
        made_by,
    });
    let all = (prop::collection::vec(input, 0..3), prop::collection::vec(output, 0..3));
    all.prop_map(|(inputs, outputs)| BatchSpec { inputs, outputs })
}

/// Each Block a kind of its own; whether it begins a Span is drawn.
fn with_kinds_and_spans(blocks: Vec<(BlockSpec, bool)>) -> Vec<BlockSpec> {
    let mut span = 0;
    let spec = |(kind, (block, begins)): (u32, (BlockSpec, bool))| {
        span += usize::from(begins);
        BlockSpec { kind, span, ..block }
    };
    (0..).zip(blocks).map(spec).collect()
}

pub(super) fn spec(max_len: usize) -> impl Strategy<Value = ChainSpec> {
    (1..=max_len).prop_flat_map(|len| {
        let states = (places(len), 1..300_u32, any::<[bool; 3]>()).prop_map(
            |(blocks, bytes, [trainable, copied, beside_spans])| StateSpec {
                bytes: f64::from(bytes) * 1e4,
                message_bytes: f64::from(bytes) * if bytes % 3 == 0 { 2e4 } else { 1e4 },
                own_type_travels: bytes % 2 == 0,
                accumulated_bytes: f64::from(bytes) * if bytes % 3 == 0 || bytes % 5 == 0 { 2e4 } else { 1e4 },
                copy_bytes: if copied { f64::from(bytes) * 5e3 } else { 0.0 },
                trainable,
                beside_spans,
                blocks,
                first_use: bytes as usize % 4,
            },
        );
        let work = |us: u32| OpWork {
            forward: Work { bytes: Poly::affine(f64::from(us) * 1e4, 0.0), launches: 1.0, ..Work::default() },
            ..OpWork::default()
        };
        let clones = (places(len), 1..100_u32, any::<bool>()).prop_map(move |(blocks, us, once)| CloneSpec {
            work: work(us),
            blocks,
            once,
        });
        let conversions =
            (places(len), 1..100_u32).prop_map(move |(blocks, us)| ConversionSpec { work: work(us), blocks });
        (
            prop::collection::vec((block(), any::<bool>()), len),
            prop::collection::vec(states, 0..6),
            prop::collection::vec(clones, 0..3),
            prop::collection::vec(conversions, 0..3),
            prop::collection::vec(crossing(len), 0..6),
            prop::collection::vec(kept(len), 0..6),
            batch(len),
        )
            .prop_map(|(blocks, states, clones, conversions, crossings, kept, batch)| ChainSpec {
                batch,
                blocks: with_kinds_and_spans(blocks),
                spans: Vec::new(),
                states,
                clones,
                conversions,
                crossings: crossings.into_iter().flatten().collect(),
                kept,
            })
    })
}

/// A chain where most Blocks send Values to the next one, beside those that pass over Blocks.
pub(super) fn linked_spec(max_len: usize) -> impl Strategy<Value = ChainSpec> {
    let value = (1..200_u32, prop::bool::weighted(0.8));
    let links = prop::collection::vec(prop::option::weighted(0.8, value), max_len - 1);
    (spec(max_len), links).prop_map(|(mut spec, links)| {
        for (made_by, link) in links.into_iter().take(spec.blocks.len() - 1).enumerate() {
            spec.crossings.extend(link.map(|(bytes, requires_grad)| CrossingSpec {
                bytes: Affine { fixed: 0.0, per_row: f64::from(bytes) * 1e3 },
                requires_grad,
                made_by,
                used_by: vec![made_by + 1],
            }));
        }
        spec
    })
}

fn savers() -> impl Strategy<Value = Savers> {
    let levels = [vec![Sharding::None], Sharding::ALL.to_vec()].concat();
    let drawn = (any::<(bool, bool)>(), prop::sample::select(levels.clone()), prop::sample::select(levels));
    drawn.prop_map(|((recompute, offload), sharding, least)| Savers {
        recompute,
        sharding,
        least_sharding: if recompute { Sharding::None } else { least.min(sharding) },
        offload,
    })
}

pub(super) fn settings(devices: u32) -> impl Strategy<Value = Settings> {
    (
        (1..20_u64, 2..60_u64, any::<(bool, bool, bool)>()),
        (prop::option::of(1..=devices), prop::option::of(1..4_u32)),
        savers(),
    )
        .prop_map(
            move |((batch_rows, limit, (loss_inside, gather_inputs, may_idle)), (stages, max_stages), savers)| {
                Settings {
                    world_size: devices,
                    may_idle,
                    batch_rows,
                    memory_limit_bytes: Some(limit * 2_000_000),
                    loss_inside,
                    gather_inputs,
                    stages: stages.filter(|stages| stages % 2 == 0),
                    max_stages,
                    max_microbatches: 6,
                    savers,
                    ..Settings::default()
                }
            },
        )
}

/// One or two nodes, the second of them perhaps of slower devices.
pub(super) fn cluster() -> impl Strategy<Value = Cluster> {
    let slowdown = prop_oneof![Just(0.0), 0.0..1.0_f64];
    (1..3_u32, any::<bool>(), 1..20_u32, slowdown).prop_map(|(nodes, mixed, megabytes_per_s, slowdown)| {
        let mut cluster = Cluster::preset("cpu", nodes, 4_u32.div_ceil(nodes)).expect("4 devices");
        for (level, bytes_per_s) in cluster.levels.iter_mut().zip([1e8, 1e6 * f64::from(megabytes_per_s)]) {
            (level.send.bytes_per_s, level.collective.bytes_per_s) = (bytes_per_s, bytes_per_s);
        }
        cluster.kinds[0].message_slowdown = slowdown;
        if mixed && nodes == 2 {
            let mut slower = cluster.kinds[0].clone();
            slower.name = "slower".into();
            slower.message_slowdown /= 2.0;
            slower.flops_per_s.fp32 /= 3.0;
            slower.memory_bytes = 60_000_000;
            cluster.kinds.push(slower);
            cluster.nodes[1].kind = 1;
        }
        cluster
    })
}
