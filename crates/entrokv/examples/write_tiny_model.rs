//! Writes a tiny model to a file, to be opened with this program or another engine:
//! `cargo run --release -p entrokv --example write_tiny_model -- ARCHITECTURE FILE.gguf [untied]`

use std::{env, error::Error, fs};

use entrokv::tiny::{TinyArchitecture, TinyModel};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (architecture, path, tied) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [architecture, path] => (architecture, path, true),
        [architecture, path, "untied"] => (architecture, path, false),
        _ => return Err("usage: write_tiny_model ARCHITECTURE FILE.gguf [untied]".into()),
    };
    let architecture: TinyArchitecture = architecture.parse()?;
    fs::write(path, TinyModel { tied, ..TinyModel::new(architecture) }.gguf()?)?;
    Ok(())
}
