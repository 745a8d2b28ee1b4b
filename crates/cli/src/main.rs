//! The `rannc` command.

use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let code = rannc_cli::run(std::env::args_os(), &mut io::stdout().lock(), &mut io::stderr());
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
