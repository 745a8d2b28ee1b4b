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
    for command in ["plan", "explain", "whatif", "simulate", "show", "diff", "cluster", "graph", "completion"] {
        let help = help(command);
        assert!(help.contains(&format!("Example: rannc {command} ")), "{help}");
        assert_snapshot!(format!("help_of_{command}"), help);
    }
}

#[test]
fn shells_complete_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = rannc(["completion", shell].into_iter().map(str::to_owned)).output();
        for word in ["whatif", "simulate", "price-per-device-hour", "memory-gb"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn amounts_that_are_none_are_told_as_what_they_are() {
    for (argument, problem) in [
        ("--batch -5", "'-5' for '--batch <ROWS>': a batch has a positive whole number of rows"),
        ("--batch 0", "'0' for '--batch <ROWS>': a batch has a positive whole number of rows"),
        ("--batch 4 --memory-gb -1", "'-1' for '--memory-gb <GIB>': it must be a positive number of GiB"),
        ("--batch 4 --time-limit -1", "'-1' for '--time-limit <SECONDS>': it must be a positive number of seconds"),
    ] {
        let line = format!("plan graph.json --cluster H200x8 {argument}");
        let seen = rannc(line.split(' ').map(str::to_owned));
        assert_eq!(seen.code, 2);
        assert!(seen.err.starts_with(&format!("error: invalid value {problem}\n")), "{}", seen.err);
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
