//! A cluster that can be read can be written again and has sound times.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rannc_cost::Cluster;

fuzz_target!(|text: &str| {
    let Ok(cluster) = Cluster::from_toml(text) else { return };
    let written = cluster.to_toml();
    assert_eq!(Cluster::from_toml(&written).expect("just written").to_toml(), written);
    let last = cluster.devices() - 1;
    assert!(cluster.kind_of(last) < cluster.kinds.len());
    assert!(cluster.all_reduce_us(cluster.group(&[0, last]), 1e6) >= 0.0);
});
