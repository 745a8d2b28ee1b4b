//! Laws of clusters: their files lose nothing, communication behaves, shares never make more work
//! quicker.

use proptest::collection::vec;
use proptest::prelude::*;
use rannc_cost::{Cluster, Curve, Device, Level, Link, Node, RankGroup, presets, update_us};

/// A figure as a person writes it.
fn figure() -> impl Strategy<Value = f64> {
    (1..10_000_u32, -3..3_i32).prop_map(|(digits, exponent)| format!("{digits}e{exponent}").parse().expect("a number"))
}

fn curve() -> impl Strategy<Value = Curve> {
    vec((figure(), figure()), 0..5).prop_map(|mut points| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup_by(|a, b| a.0 == b.0);
        let mut longest = 0.0;
        points.retain(|&(work, share)| {
            let slower = work / share > longest;
            longest = f64::max(longest, work / share);
            slower
        });
        Curve::new(points)
    })
}

fn device() -> impl Strategy<Value = Device> {
    let preset = (0..presets().len()).prop_map(|place| presets()[place].device());
    (preset, ".{0,12}", any::<[bool; 2]>(), [figure(), figure(), figure(), figure()], 1..1_u64 << 40, curve(), curve())
        .prop_map(
            |(device, name, [host, tf32], [launch_us, action_us, tflops, gb_per_s], memory, matrix, pointwise)| {
                let mut device = Device { name, host, tf32, launch_us, action_us, ..device };
                device.memory_bytes = 2 * memory;
                device.framework_bytes = memory;
                device.flops_per_s.tf32 = tflops * 1e12;
                device.host_bytes_per_s = gb_per_s * 1e9;
                device.efficiency.matrix.tf32 = matrix;
                device.efficiency.pointwise = pointwise;
                device
            },
        )
}

fn link() -> impl Strategy<Value = Link> {
    (figure(), figure()).prop_map(|(latency_us, gb_per_s)| Link { latency_us, bytes_per_s: gb_per_s * 1e9 })
}

/// Levels of one node, of 2, of 4 and of all nodes, some left out.
fn levels(nodes: u32) -> impl Strategy<Value = Vec<Level>> {
    let sizes: Vec<u32> = [2, 4].into_iter().filter(|&size| size < nodes).collect();
    let count = sizes.len();
    let level = (".{0,8}", link(), link());
    (proptest::sample::subsequence(sizes, 0..=count), vec(level, count + 2)).prop_map(move |(sizes, levels)| {
        let last = (nodes > 1).then_some(nodes);
        let sizes = std::iter::once(1).chain(sizes).chain(last);
        sizes.zip(levels).map(|(nodes, (name, send, collective))| Level { name, nodes, send, collective }).collect()
    })
}

fn clusters() -> impl Strategy<Value = Cluster> {
    (vec(device(), 1..4), 1..9_u32).prop_flat_map(|(kinds, nodes)| {
        let node = (0..kinds.len(), 1..6_u32).prop_map(|(kind, devices)| Node { kind, devices });
        (Just(kinds), vec(node, nodes as usize), levels(nodes), ".{0,20}")
            .prop_map(|(kinds, nodes, levels, name)| Cluster { name, kinds, nodes, levels, dealt: Vec::new() })
    })
}

/// A cluster and some of its ranks.
fn groups() -> impl Strategy<Value = (Cluster, Vec<u32>)> {
    clusters().prop_flat_map(|cluster| {
        let ranks: Vec<u32> = (0..cluster.devices()).collect();
        let count = ranks.len();
        (Just(cluster), proptest::sample::subsequence(ranks, 1..=count))
    })
}

fn collectives(cluster: &Cluster, group: RankGroup, bytes: f64) -> [f64; 3] {
    [cluster.all_reduce_us(group, bytes), cluster.reduce_scatter_us(group, bytes), cluster.all_gather_us(group, bytes)]
}

proptest! {
    #[test]
    fn files_lose_nothing(cluster in clusters()) {
        let text = cluster.to_toml();
        let read = Cluster::from_toml(&text);
        prop_assert!(read.is_ok(), "{} in\n{text}", read.expect_err("shown"));
        prop_assert_eq!(read.expect("checked"), cluster);
    }

    #[test]
    fn collectives_follow_bytes_and_members((cluster, ranks) in groups(), bytes in 0.0..1e10) {
        let group = cluster.group(&ranks);
        let more = RankGroup { members: group.members + 1, ..group };
        let some = collectives(&cluster, group, bytes);
        for (us, larger) in some.into_iter().zip(collectives(&cluster, group, bytes * 1.5)) {
            prop_assert!(0.0 <= us && us <= larger);
        }
        for (us, larger) in some.into_iter().zip(collectives(&cluster, more, bytes)) {
            prop_assert!(us <= larger * (1.0 + 1e-12));
        }
        prop_assert!(ranks.len() > 1 || some == [0.0; 3]);
        prop_assert_eq!(collectives(&cluster, group, 0.0), [0.0; 3]);
        // A sum for all is a sum of parts that are then shared, or quicker.
        prop_assert!(some[0] <= (some[1] + some[2]) * (1.0 + 1e-12));
    }

    #[test]
    fn faster_links_never_take_longer((cluster, ranks) in groups(), place in 0..4_usize, bytes in 1.0..1e10) {
        let mut faster = cluster.clone();
        let levels = faster.levels.len();
        let level = &mut faster.levels[place % levels];
        for link in [&mut level.send, &mut level.collective] {
            link.latency_us /= 2.0;
            link.bytes_per_s *= 3.0;
        }
        let group = cluster.group(&ranks);
        for (fast, slow) in collectives(&faster, group, bytes).into_iter().zip(collectives(&cluster, group, bytes)) {
            prop_assert!(fast <= slow);
        }
        for level in 0..cluster.levels.len() {
            prop_assert!(faster.send_us(level, bytes) <= cluster.send_us(level, bytes));
        }
    }

    #[test]
    fn ranks_have_one_place((cluster, ranks) in groups()) {
        let group = cluster.group(&ranks);
        prop_assert_eq!(group.members as usize, ranks.len());
        prop_assert!(group.nodes * group.least_per_node <= group.members);
        for &rank in &ranks {
            prop_assert_eq!(cluster.kind_of(rank), cluster.nodes[cluster.node_of(rank) as usize].kind);
            prop_assert!(cluster.level_between(rank, ranks[0]) <= group.level);
            prop_assert_eq!(cluster.level_between(rank, ranks[0]), cluster.level_between(ranks[0], rank));
        }
        let first_last = cluster.level_between(ranks[0], ranks[ranks.len() - 1]);
        prop_assert_eq!(first_last, group.level);
    }

    #[test]
    fn more_work_is_never_done_sooner(curve in curve(), work in 0.0..1e9, more in 0.0..1e9) {
        prop_assert!(0.0 <= curve.at_peak(work));
        prop_assert!(curve.at_peak(work) <= curve.at_peak(work + more) * (1.0 + 1e-12));
        for &(work, share) in curve.points() {
            prop_assert!((curve.at_peak(work) / (work / share) - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn updates_follow_their_bytes(params in 0.0..1e12, optimizer in 0.0..1e12) {
        for preset in presets() {
            let device = preset.device();
            let us = update_us(&device, params, optimizer);
            prop_assert!(0.0 <= us && us <= update_us(&device, params + 1e6, optimizer));
            prop_assert!(us <= update_us(&device, params, optimizer + 1e6));
        }
    }
}

/// Measured on 8 H200 of one node.
#[test]
fn an_h200_node_communicates_as_measured() {
    const MIB: f64 = (1 << 20) as f64;
    let cluster = Cluster::preset("H200", 1, 8).expect("8 devices");
    let all = cluster.group(&[0, 1, 2, 3, 4, 5, 6, 7]);
    for (bytes, bus_gb_per_s, send_gb_per_s) in [(MIB, 20.0, 16.0), (256.0 * MIB, 346.0, 353.0)] {
        let bus = 2.0 * 7.0 / 8.0 * bytes / cluster.all_reduce_us(all, bytes) / 1e3;
        let send = bytes / cluster.send_us(0, bytes) / 1e3;
        assert!((bus / bus_gb_per_s - 1.0).abs() < 0.1, "{bus}");
        assert!((send / send_gb_per_s - 1.0).abs() < 0.1, "{send}");
    }
}
