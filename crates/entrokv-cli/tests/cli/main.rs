//! The program as its users meet it: arguments in, text, JSON, exit codes and one-line errors out.
//!
//! Everything but the demo runs on tiny models and loopback servers, without network or download.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod bad_input;
mod bad_models;
mod chatting;
mod help;
#[cfg(unix)]
mod interrupts;
mod json_shapes;
mod kv_files;
mod needle;
mod program;
mod prompts;
#[cfg(unix)]
mod pulling;
mod server;
mod thirty_turns;
