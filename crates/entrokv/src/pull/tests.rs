//! Pulls against fakes: a fake pip, a loopback server, a loopback hub. One test pulls the default model for real.

#[cfg(unix)] // the fake pip is a shell script
mod named;
mod places;
#[cfg(unix)]
mod shelf;
