//! What is printed fits the terminal.

use insta::assert_snapshot;

use crate::folder::Folder;
use crate::plan_files::write_plan;

const SEARCH: &str = "graph.json --cluster cluster.toml --batch 512 --memory-gb 0.78";

/// What all commands print in a terminal with so many columns.
fn printed(folder: &Folder, columns: usize) -> String {
    let lines = [
        format!("plan {SEARCH} --stages 3"),
        format!("explain {SEARCH} --runners-up 3"),
        "whatif graph.json --cluster cluster.toml --batch 64 --devices 1,6 --memory-gb 0.8,16 --price-per-device-hour 2"
            .to_owned(),
        "plan graph.json --cluster cluster.toml --cluster H200x2 --batch 64".to_owned(),
        "simulate plan.json graph.json --cluster cluster.toml --timeline".to_owned(),
        "show plan.json".to_owned(),
        "show plan.json --batch 3".to_owned(),
        "diff plan.json other.json".to_owned(),
        "cluster cluster.toml".to_owned(),
        "graph graph.json".to_owned(),
        "plan graph.json --cluster cluster.toml --batch 24 --memory-gb 0.0001".to_owned(),
    ];
    let printed = lines.map(|line| {
        let seen = folder.rannc_at(Some(columns), &line);
        let text: String = seen.out + &seen.err;
        let is_wide = |line: &&str| line.chars().count() > columns;
        assert_eq!(text.lines().find(is_wide), None, "{line} at {columns} columns");
        let timeless = text.lines().map(|line| match line.split_once(" of them measured) in ") {
            Some((before, _)) => format!("{before} of them measured) in [time]\n"),
            None => format!("{line}\n"),
        });
        format!("$ rannc {line}\n{}\n", timeless.collect::<String>())
    });
    printed.concat()
}

#[test]
fn everything_fits_80_and_160_columns() {
    let folder = Folder::new("widths");
    write_plan(&folder, "plan.json", &[(6, 1), (13, 2)], |plan| plan.batch_rows = 256);
    write_plan(&folder, "other.json", &[(4, 1), (8, 1), (13, 1)], |plan| plan.predicted.step_us = 2500.2);
    for columns in [80, 160] {
        assert_snapshot!(format!("at_{columns}_columns"), printed(&folder, columns));
    }
}
