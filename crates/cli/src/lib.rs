//! The `rannc` command as a function of its arguments and its two streams.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong arguments.

mod args;
mod cluster;
mod commands;
mod files;
mod printer;
mod progress;
mod search;

use std::ffi::OsString;
use std::io::{self, Write};

use clap::Parser;

use crate::args::Args;
use crate::printer::Printer;

const FAILED: i32 = 1;
const WRONG_ARGUMENTS: i32 = 2;

/// Runs the command with `args` (the program's name first), writes to `out` and `err`, and returns the
/// exit code. Progress is drawn on stderr, if that is a terminal, so `err` must not keep stderr locked.
pub fn run(args: impl Iterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> i32 {
    let parsed = match Args::try_parse_from(args) {
        Ok(parsed) => parsed,
        Err(help) if !help.use_stderr() => return written(write!(out, "{help}")),
        Err(error) => {
            // Nothing is left to be done when even the message cannot be written.
            let _ = write!(err, "{error}");
            return WRONG_ARGUMENTS;
        }
    };
    match commands::execute(parsed) {
        Ok(Printer { out: text, notes, .. }) => {
            let code = written(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
            let _ = err.write_all(notes.as_bytes());
            code
        }
        Err(error) => {
            let _ = writeln!(err, "error: {error}");
            FAILED
        }
    }
}

/// The exit code after writing: a reader that closed its end, such as `head`, has seen enough.
fn written(result: io::Result<()>) -> i32 {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => FAILED,
        _ => 0,
    }
}
