//! The `rannc` command.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rannc_cli::{Around, Terminal};

fn main() -> ExitCode {
    let interrupted = Arc::new(AtomicBool::new(false));
    // Without a handler the signal ends the process, which is next best.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&interrupted));
    let around = Around {
        out: &mut io::stdout().lock(),
        err: &mut io::stderr(),
        terminal: Terminal::of_stdout(),
        interrupted: &|| interrupted.load(Ordering::Relaxed),
    };
    ExitCode::from(u8::try_from(rannc_cli::run(std::env::args_os(), around)).unwrap_or(1))
}
