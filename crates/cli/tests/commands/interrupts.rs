//! Ctrl-C.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rannc_ir::testing::mlp;

use crate::folder::Folder;

/// The real command takes far longer than that to search.
const HEAD_START: Duration = Duration::from_millis(700);
/// Ten times what it takes, for machines that do much else.
const AT_ONCE: Duration = Duration::from_secs(2);

#[test]
fn an_interrupt_ends_a_search_at_once() {
    let folder = Folder::new("interrupt");
    folder.write("large.json", &mlp(600, 64).to_json());
    let batches = (1..400).map(|rows| (1000 + rows).to_string()).collect::<Vec<_>>().join(",");
    let search = ["--cluster", "H200x8x32", "--memory-gb", "1.7"];
    for (command, batch) in [("plan", "4096"), ("explain", "4096"), ("whatif", &batches)] {
        let running = Command::new(env!("CARGO_BIN_EXE_rannc"))
            .args([command, &folder.path("large.json").display().to_string(), "--batch", batch])
            .args(search)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut running = running.expect("the command starts");
        sleep(HEAD_START);
        assert!(running.try_wait().expect("a child").is_none(), "{command} is not long enough to be interrupted");
        let interrupted = Instant::now();
        let kill = Command::new("kill").args(["-INT", &running.id().to_string()]).status();
        assert!(kill.expect("kill runs").success());
        let seen = running.wait_with_output().expect("the command ends");
        assert!(interrupted.elapsed() < AT_ONCE, "{command} took {:?} to end", interrupted.elapsed());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        assert_eq!(
            (seen.status.code(), text(seen.stdout), text(seen.stderr)),
            (Some(130), String::new(), "interrupted\n".to_owned()),
            "{command}"
        );
    }
}
