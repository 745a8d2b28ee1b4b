//! Cluster files: what people write, what they get wrong, and that nothing is lost. `PROPTEST_CASES`
//! runs more cases with damaged files.

use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::testing::{cases, damaged};

const DGX: &str = r#"name = "two DGX H100"

[device.h100]
preset = "H100"
memory_gib = 79

[[node]]
device = "h100"
devices = 8
count = 2

[[level]]
name = "NVLink"
nodes = 1
latency_us = 12
gb_per_s = 330

[[level]]
name = "InfiniBand"
latency_us = 25
gb_per_s = 40
collective_gb_per_s = 45.5
"#;

fn refused(text: &str) -> String {
    Cluster::from_toml(text).expect_err("must be refused").to_string()
}

/// The error when `from` is replaced in the file.
fn refused_with(from: &str, to: &str) -> String {
    assert!(DGX.contains(from), "{from}");
    refused(&DGX.replacen(from, to, 1))
}

#[test]
fn a_file_gives_a_cluster() {
    let cluster = Cluster::from_toml(DGX).expect("valid");
    assert_eq!((cluster.devices(), cluster.nodes.len()), (16, 2));
    assert_eq!(cluster.kinds[0].name, "H100");
    assert_eq!(cluster.levels[0].collective.bytes_per_s, 330e9);
    assert_eq!((cluster.levels[1].nodes, cluster.levels[1].send.latency_us), (2, 25.0));
    assert_eq!(cluster.levels[1].collective.bytes_per_s, 45.5e9);
    assert_eq!(Cluster::from_toml(&cluster.to_toml()).expect("just written"), cluster);
}

#[test]
fn kinds_may_differ_and_presets_join_them() {
    let text = r#"
        [device.old]
        preset = "Tesla V100-SXM2-32GB"
        [device.new]
        preset = "A100-80G"
        tf32 = true
        [device.new.efficiency]
        matrix.tf32 = [[1e6, 0.1], [1e12, 0.7]]
        [[node]]
        device = "new"
        devices = 8
        [[node]]
        device = "old"
        devices = 4
        count = 3
    "#;
    let cluster = Cluster::from_toml(text).expect("valid");
    assert_eq!(cluster.device_of(7).name, "A100-80G");
    assert_eq!(cluster.device_of(8).name, "V100-32G");
    assert_eq!(cluster.device_of(0).efficiency.matrix.tf32.points(), [(1e6, 0.1), (1e12, 0.7)]);
    let slower = Cluster::preset("V100-32G", 4, 4).expect("16 devices").levels;
    assert_eq!(cluster.levels, slower);
    assert_eq!(Cluster::from_toml(&cluster.to_toml()).expect("just written"), cluster);
}

#[test]
fn presets_survive_their_files() {
    for preset in rannc_cost::presets() {
        let cluster = Cluster::preset(preset.name, 3, 5).expect("15 devices");
        assert_eq!(Cluster::from_toml(&cluster.to_toml()).expect("just written"), cluster);
    }
}

#[test]
fn errors_name_field_line_and_remedy() {
    for (message, line, parts) in [
        (refused_with("= 79", "= -3"), 5, &["memory_gib of device h100", "from 0", "not -3"][..]),
        (refused_with("= 79", "= nan"), 5, &["memory_gib of device h100", "not NaN"]),
        (refused_with("= 79", "= 1"), 3, &["framework_gib of device H100 leaves nothing"]),
        (refused_with("\"H100\"", "\"H10\""), 4, &["no preset \"H10\"", "did you mean H100?", "RTX 4090"]),
        (refused_with("= \"h100\"", "= \"h10\""), 8, &["no device \"h10\"", "did you mean h100?"]),
        (refused_with("devices = 8", "devices = 0"), 9, &["node 0 needs at least one device"]),
        (refused_with("count = 2", "count = 0"), 10, &["count of a node must be at least 1"]),
        (refused_with("count = 2", "count = 2000000"), 9, &["more than 1000000 devices"]),
        (
            refused_with("gb_per_s = 330", "gb_per_s = 0"),
            16,
            &["gb_per_s of level NVLink must be a positive number, not 0"],
        ),
        (refused_with("latency_us = 25", "latency_us = inf"), 20, &["latency_us of level InfiniBand"]),
        (refused_with("nodes = 1", "nodes = 2"), 14, &["level NVLink is the first", "must be 1, not 2"]),
        (
            refused_with("latency_us = 25", "latency_us = 25\nnodes = 5"),
            21,
            &["the last and must join all 2 nodes, not 5"],
        ),
        (refused_with("preset = \"H100\"\n", ""), 3, &["device h100 has no fp64_tflops", "preset", "A100-40G"]),
    ] {
        assert!(message.contains(&format!("line {line}: ")), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn what_is_no_cluster_file_is_refused_with_its_place() {
    for (message, parts) in [
        (refused("name = "), &["line 1"][..]),
        (refused_with("devices = 8", "device_count = 8"), &["line 9", "device_count", "devices"]),
        (refused_with("devices = 8\n", ""), &["line 7", "missing field `devices`"]),
        (refused_with("devices = 8", "devices = -8"), &["line 9", "-8"]),
        (refused_with("latency_us = 25\n", ""), &["line 18", "missing field `latency_us`"]),
        (refused(""), &["at least one node"]),
    ] {
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn one_node_needs_no_second_level() {
    let text = DGX.replacen("count = 2", "count = 1", 1);
    assert_eq!(Cluster::from_toml(&text).expect("valid").level_between(0, 7), 0);
}

/// A file with everything that a file may have.
fn full() -> String {
    let efficiency = "\n[device.h100.efficiency]\nmatrix.half = [[1e6, 0.1], [1e12, 0.8]]\npointwise = [[1e6, 0.5]]\n";
    let second = "\n[device.v100]\npreset = \"V100-32G\"\ntf32 = false\nname = \"Tesla\"\nhost_gb_per_s = 11\n";
    let text = DGX.replacen("memory_gib = 79\n", &format!("memory_gib = 79\n{efficiency}{second}"), 1);
    format!("{text}nodes = 3\n").replacen("[[level]]", "[[node]]\ndevice = \"v100\"\ndevices = 4\n\n[[level]]", 1)
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn damaged_files_are_refused_or_read(text in damaged(prop_oneof![Just(full()), Just(written())])) {
        match Cluster::from_toml(&text) {
            Ok(cluster) => {
                prop_assert!(cluster.check().is_ok());
                let again = cluster.to_toml();
                prop_assert_eq!(Cluster::from_toml(&again).expect("just written").to_toml(), again);
                let last = cluster.devices() - 1;
                let us = cluster.all_reduce_us(cluster.group(&[0, last / 2, last]), 1e6);
                prop_assert!(us >= 0.0 && !us.is_nan());
                prop_assert!(cluster.kind_of(last) < cluster.kinds.len());
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// A file as RaNNC writes it.
fn written() -> String {
    Cluster::from_toml(&full()).expect("valid").to_toml()
}

#[test]
fn the_seed_of_the_fuzz_target_is_a_cluster() {
    let seed = include_str!("../../../fuzz/seeds/cluster/h200.toml");
    assert_eq!(Cluster::from_toml(seed).expect("valid").devices(), 8);
}
