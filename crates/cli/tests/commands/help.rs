//! Help.

use insta::assert_snapshot;

use crate::folder::rannc;

fn help(command: &str) -> String {
    rannc([command, "--help"].into_iter().map(str::to_owned)).output()
}

#[test]
fn the_help_of_all() {
    assert_snapshot!(rannc(["--help".to_owned()].into_iter()).output());
}

#[test]
fn the_help_of_each_command() {
    for command in ["plan", "explain", "whatif", "simulate", "show", "diff", "cluster", "graph"] {
        let help = help(command);
        assert!(help.contains(&format!("Example: rannc {command} ")), "{help}");
        assert_snapshot!(format!("help_of_{command}"), help);
    }
}

#[test]
fn wrong_usage_has_its_own_code() {
    for line in ["", "shwo", "show", "plan graph.json --cluster H200x8 --batch 0", "graph graph.json --text --json"] {
        let seen = rannc(line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned));
        assert_eq!((seen.code, seen.out.as_str()), (2, ""), "{line}");
        assert!(seen.err.contains("--help") || seen.err.contains("Usage: rannc"), "{line}: {}", seen.err);
    }
}
