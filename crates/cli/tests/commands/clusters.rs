//! `rannc cluster`.

use insta::assert_snapshot;
use rannc_cost::{Cluster, presets};

use crate::folder::{Folder, TWO_NODES};

#[test]
fn a_file_is_shown() {
    let folder = Folder::new("cluster");
    assert_snapshot!(folder.rannc("cluster cluster.toml").output());
    let json: serde_json::Value =
        serde_json::from_str(&folder.rannc("cluster cluster.toml --json").output()).expect("JSON");
    assert_eq!(json["kinds"][0]["memory_bytes"], 16_u64 << 30);
    assert_eq!(json["levels"][1]["nodes"], 2);
}

#[test]
fn a_preset_is_a_file_to_start_from() {
    let folder = Folder::new("preset");
    for preset in presets() {
        let words = ["cluster", "--preset", preset.name, "--nodes", "2", "--devices", "4"];
        let text = crate::folder::rannc(words.into_iter().map(str::to_owned)).output();
        let cluster = Cluster::from_toml(&text).expect("a cluster file");
        assert_eq!(cluster, Cluster::preset(preset.name, 2, 4).expect("8 devices"));
        folder.write("cluster.toml", &text);
        assert!(folder.rannc("cluster cluster.toml").output().contains("8 devices on 2 nodes"));
    }
}

#[test]
fn all_presets_are_listed() {
    let folder = Folder::new("presets");
    let list = folder.rannc("cluster").output();
    let json: serde_json::Value = serde_json::from_str(&folder.rannc("cluster --json").output()).expect("JSON");
    assert_eq!(json.as_array().map(Vec::len), Some(presets().len()));
    for preset in presets() {
        assert!(list.contains(preset.name), "{list}");
    }
}

#[test]
fn wrong_clusters_are_one_line() {
    let folder = Folder::new("wrong-clusters");
    folder.write("typo.toml", &TWO_NODES.replace("memory_gib", "memory_gb"));
    folder.write("cut.toml", &TWO_NODES[..40]);
    folder.write("negative.toml", &TWO_NODES.replace("gb_per_s = 40", "gb_per_s = -40"));
    folder.write("empty.toml", "");
    let lines = [
        "cluster missing.toml",
        "cluster typo.toml",
        "cluster cut.toml",
        "cluster negative.toml",
        "cluster empty.toml",
        "cluster H200",
        "cluster h200",
        "cluster H20",
        "cluster H20x8",
        "cluster rtx4090",
        "cluster H201x8",
        "cluster H200x0",
        "cluster --preset H201",
        "plan graph.json --cluster missing.toml --batch 24",
    ];
    assert_snapshot!(folder.errors(&lines));
}
