//! `rannc explain` and `whatif`.

use insta::assert_snapshot;

use crate::folder::{Folder, TWO_NODES};

/// The text without the time of the search.
fn timeless(text: &str) -> String {
    let line = text.lines().find(|line| line.starts_with("Searched: ")).expect("the search is told about");
    let (before, after) = line.split_once(" measured) in ").expect("its time");
    assert!(after.ends_with("ms"), "{line}");
    text.replace(line, &format!("{before} measured) in [time]"))
}

#[test]
fn a_plan_is_explained() {
    let folder = Folder::new("explain");
    let line = "explain graph.json --cluster cluster.toml --batch 512 --memory-gb 0.78 --runners-up 3";
    assert_snapshot!(timeless(&folder.rannc(line).output()));
}

#[test]
fn an_explanation_for_programs_says_the_same() {
    let folder = Folder::new("explain-json");
    let line = "explain graph.json --cluster cluster.toml --batch 512 --memory-gb 0.78 --runners-up 3 --json";
    let json: serde_json::Value = serde_json::from_str(&folder.rannc(line).output()).expect("JSON");
    let stages = json["plan"]["stages"].as_array().expect("a list").len();
    assert_eq!(json["stages"].as_array().map(Vec::len), Some(stages));
    assert_eq!(json["cuts"].as_array().map(Vec::len), Some(stages - 1));
    assert_eq!(json["runners_up"].as_array().map(Vec::len), Some(3));
    let share = |name: &str| json["step"][name].as_f64().expect("a number");
    assert!((share("work") + share("fill_and_drain") + share("end") - 1.0).abs() < 1e-9);
    let best_us = json["plan"]["predicted"]["step_us"].as_f64().expect("a number");
    assert!(json["unlimited_step_us"].as_f64().expect("a number") <= best_us);
    for other in json["runners_up"].as_array().expect("a list") {
        assert!(other["step_us"].as_f64().expect("a number") >= best_us);
    }
}

#[test]
fn cases_stand_side_by_side() {
    let folder = Folder::new("whatif");
    let line = "whatif graph.json --cluster cluster.toml --batch 64,512 --devices 1,2,6 --memory-gb 0.8,16";
    assert_snapshot!(folder.rannc(line).output());
    assert_snapshot!(
        folder.rannc("whatif graph.json --cluster cluster.toml --batch 64 --memory-gb 0.6,16 --json").output()
    );
}

#[test]
fn cases_are_written_as_csv() {
    let folder = Folder::new("csv");
    let line = "whatif graph.json --cluster cluster.toml --batch 64 --memory-gb 0.6,16 --price-per-device-hour 1.5";
    let csv = folder.rannc(&format!("{line} --csv")).output();
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let place = |name: &str| rows[0].iter().position(|known| *known == name).expect(name);
    let json: serde_json::Value =
        serde_json::from_str(&folder.rannc(&format!("{line} --json")).output()).expect("JSON");
    let case = &json["cases"][1];
    for (cell, value) in [
        ("devices", &case["devices"]),
        ("step_us", &case["plan"]["step_us"]),
        ("mfu", &case["plan"]["mfu"]),
        ("price_per_million_rows", &case["price_per_million_rows"]),
    ] {
        assert_eq!(rows[2][place(cell)], value.to_string(), "{cell}");
    }
    // 4 devices at 1.5 an hour, and a million rows at so many a second.
    assert_eq!(rows[2][place("price_per_hour")], "6.0");
    let rows_per_s = case["plan"]["rows_per_s"].as_f64().expect("a number");
    let price = case["price_per_million_rows"].as_f64().expect("a number");
    assert!((price - 6.0 / 3600.0 * 1e6 / rows_per_s).abs() < 1e-9);
    // Nothing fits: the problem, which has commas, is one cell.
    assert_eq!((rows[1][place("step_us")], json["cases"][0]["plan"].is_null()), ("", true));
    assert_eq!(csv.lines().count(), 3);
}

#[test]
fn clusters_stand_side_by_side() {
    let folder = Folder::new("clusters-compared");
    let line = "--batch 64 --json";
    let compared = folder.rannc(&format!("plan graph.json --cluster cluster.toml --cluster H200x2 {line}")).output();
    let json: serde_json::Value = serde_json::from_str(&compared).expect("JSON");
    for (place, cluster) in ["cluster.toml", "H200x2"].into_iter().enumerate() {
        let alone = folder.rannc(&format!("plan graph.json --cluster {cluster} {line}")).output();
        let alone: serde_json::Value = serde_json::from_str(&alone).expect("JSON");
        assert_eq!(json["cases"][place]["plan"]["step_us"], alone["predicted"]["step_us"], "{cluster}");
    }
    assert_eq!(json["cases"][1]["cluster"], "1 x 2 H200");
}

#[test]
fn the_time_of_devices_is_divided() {
    let folder = Folder::new("shares");
    let line = "whatif graph.json --cluster cluster.toml --batch 64,512 --devices 1,2,6 --json";
    let json: serde_json::Value = serde_json::from_str(&folder.rannc(line).output()).expect("JSON");
    for case in json["cases"].as_array().expect("a list") {
        let share = |name: &str| case["plan"][name].as_f64().expect(name);
        let sum: f64 = ["computing", "idle", "reducing", "updating"].map(share).iter().sum();
        assert!((sum - 1.0).abs() < 1e-9 && share("idle") >= 0.0, "{case}");
        assert!((share("computing") - (1.0 - share("bubble"))).abs() < 1e-9);
        assert!(share("mfu") > 0.0 && share("mfu") < share("computing"), "{case}");
        // One device waits for nobody.
        assert!(case["devices"] != 1 || share("idle") < 0.01, "{case}");
    }
}

#[test]
fn one_node_grows_by_what_its_preset_says() {
    let folder = Folder::new("grown");
    let seen = folder.rannc("whatif graph.json --cluster H200x2 --batch 64 --devices 1,8");
    assert!(seen.output().contains(" 8 "));
    let one_node = TWO_NODES.replace("count = 2", "count = 1");
    let (one_node, _) = one_node.split_once("[[level]]\nname = \"between\"").expect("two levels");
    folder.write("node.toml", one_node);
    assert_snapshot!(folder.errors(&["whatif graph.json --cluster node.toml --batch 64 --devices 4"]));
}

#[test]
fn what_the_runtime_cannot_do_may_be_assumed() {
    let folder = Folder::new("assume");
    let line = "plan graph.json --cluster cluster.toml --batch 512 --memory-gb 0.7";
    assert!(folder.rannc(line).error().contains("cannot run yet"));
    assert_eq!(folder.rannc(&format!("{line} --zero auto --assume recompute,offload")).code, 0);
}

#[test]
fn what_replicas_divide_is_told() {
    let folder = Folder::new("zero");
    let line = "graph.json --cluster cluster.toml --batch 512";
    let names: [(&str, &[&str]); 4] =
        [("off", &["none"]), ("1", &["optimizer"]), ("2", &["gradients"]), ("3", &["kept_params", "params"])];
    for (level, names) in names {
        let json: serde_json::Value =
            serde_json::from_str(&folder.rannc(&format!("plan {line} --zero {level} --json")).out).expect("JSON");
        for stage in json["stages"].as_array().expect("a list") {
            let several = stage["ranks"].as_array().is_some_and(|ranks| ranks.len() > 1);
            let sharding = stage["sharding"].as_str().expect("a name");
            assert!(if several { names.contains(&sharding) } else { sharding == "none" }, "{level}: {sharding}");
        }
    }
    let told = folder.rannc(&format!("explain {line} --zero 3")).out;
    assert!(told.contains("ZeRO 3") && told.contains("What replicas divide"), "{told}");
    assert!(told.contains("Precision: parameters in float32"), "{told}");
    let json = folder.rannc(&format!("explain {line} --zero 3 --json")).out;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let levels = json["shape"]["sharding"].as_array().expect("a list").iter();
    let divided = levels.filter(|level| level.as_str().is_some_and(|name| name.ends_with("params"))).count();
    assert_eq!(json["undivided"].as_array().map(Vec::len), Some(divided));
    assert!(divided > 0);
}
