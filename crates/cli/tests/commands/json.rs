//! docs/json.md tells what `--json` prints.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::folder::Folder;
use crate::plan_files::write_plan;

fn collect_keys(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                keys.insert(key.clone());
                collect_keys(value, keys);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_keys(item, keys)),
        _ => (),
    }
}

#[test]
fn every_key_is_documented() {
    let docs = include_str!("../../../../docs/json.md");
    let folder = Folder::new("keys");
    write_plan(&folder, "plan.json", &[(6, 1), (13, 2)], |_| ());
    write_plan(&folder, "other.json", &[(4, 1), (13, 2)], |_| ());
    let search = "graph.json --cluster cluster.toml --batch 64";
    for line in [
        "show plan.json",
        "show plan.json --batch 25",
        "diff plan.json other.json",
        &format!("plan {search} --stages 2"),
        &format!("explain {search} --stages 2"),
        &format!("whatif {search} --memory-gb 0.5,16 --price-per-device-hour 2"),
        "simulate plan.json graph.json --cluster cluster.toml",
        "graph graph.json",
        "cluster cluster.toml",
        "cluster",
    ] {
        let (command, _) = line.split_once(' ').unwrap_or((line, ""));
        assert!(docs.contains(&format!("`{command}")), "{command}");
        let json = serde_json::from_str(&folder.rannc(&format!("{line} --json")).output()).expect("JSON");
        let mut keys = BTreeSet::new();
        collect_keys(&json, &mut keys);
        assert!(keys.len() > 2, "{line}");
        for key in keys {
            assert!(docs.contains(&format!("`{key}`")), "{line}: {key}");
        }
    }
}
