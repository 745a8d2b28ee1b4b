//! The `rannc` command as a function of its arguments and what is around it.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted.

mod args;
mod cluster;
mod commands;
mod context;
mod files;
mod interrupt;
mod kinds;
mod printer;
mod progress;
mod search;
mod terminal;

use std::ffi::OsString;
use std::io::{self, Write};

use clap::{CommandFactory as _, FromArgMatches as _};

use crate::args::Args;
use crate::context::Context;
use crate::printer::Printer;
use crate::progress::ProgressLines;

pub use crate::interrupt::{Ended, until};
pub use crate::terminal::Terminal;

const FAILED: i32 = 1;
const WRONG_ARGUMENTS: i32 = 2;
/// As shells report a program that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// What a command has around it.
pub struct Around<'a> {
    /// Where results go.
    pub out: &'a mut dyn Write,
    /// Where remarks and errors go. Progress is drawn on stderr, if that is a terminal, so this must not keep stderr
    /// locked.
    pub err: &'a mut dyn Write,
    /// How much room there is.
    pub terminal: Terminal,
    /// Asked several times a second; once it says true, the command ends.
    pub interrupted: &'a dyn Fn() -> bool,
}

/// Runs the command with `args` (the program's name first) and returns the exit code. What it computes when it is
/// interrupted goes on, unseen, until the process ends.
pub fn run(args: impl Iterator<Item = OsString>, around: Around<'_>) -> i32 {
    let Around { out, err, terminal, interrupted } = around;
    let parsed = match parse(args, terminal) {
        Ok(parsed) => parsed,
        Err(help) if !help.use_stderr() => return written(write!(out, "{help}")),
        Err(error) => {
            // Nothing is left to be done when even the message cannot be written.
            let _ = write!(err, "{error}");
            return WRONG_ARGUMENTS;
        }
    };
    let lines = ProgressLines::default();
    let context = Context { width: terminal.width(), progress: lines.clone() };
    match until(interrupted, move || commands::execute(parsed, &context)) {
        Ended::Done(Ok(Printer { out: text, notes, .. })) => {
            let code = written(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
            let _ = err.write_all(notes.as_bytes());
            code
        }
        Ended::Done(Err(error)) => {
            let _ = err.write_all(message(&format!("error: {error}"), terminal).as_bytes());
            FAILED
        }
        Ended::Interrupted => {
            lines.end();
            let _ = err.write_all(b"interrupted\n");
            INTERRUPTED
        }
    }
}

fn parse(args: impl Iterator<Item = OsString>, terminal: Terminal) -> Result<Args, clap::Error> {
    let mut command = Args::command().term_width(terminal.width());
    let matches = command.try_get_matches_from_mut(args)?;
    Args::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// A message for people, its last line ended.
fn message(text: &str, terminal: Terminal) -> String {
    terminal.breaks_at().map_or_else(|| format!("{text}\n"), |width| rannc_report::paragraph(text, width))
}

/// The exit code after writing: a reader that closed its end, such as `head`, has seen enough.
fn written(result: io::Result<()>) -> i32 {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => FAILED,
        _ => 0,
    }
}
