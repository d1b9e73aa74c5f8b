//! Gates of heads that come as a table: a line a layer, a number a KV head.

use std::path::Path;

use super::GateSizes;
use super::error::GatesError;

/// The gates `[layers, num_kv_heads]` in `text`, numbers parted by white space as DuoAttention's patterns are published, drawn into
/// 0 to 1.
pub(super) fn parse(path: &Path, text: &str, num_layers: usize, sizes: GateSizes) -> Result<Vec<f32>, GatesError> {
    let mut gates = Vec::with_capacity(num_layers * sizes.num_kv_heads);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.len() != num_layers {
        return Err(GatesError::TableLayers { path: path.to_owned(), got: lines.len(), wanted: num_layers });
    }
    for (layer, line) in lines.into_iter().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.len() != sizes.num_kv_heads {
            let (got, wanted) = (words.len(), sizes.num_kv_heads);
            return Err(GatesError::TableHeads { path: path.to_owned(), layer, got, wanted });
        }
        for (kv_head, word) in words.into_iter().enumerate() {
            let Some(gate) = word.parse().ok().filter(|gate: &f32| gate.is_finite()) else {
                return Err(GatesError::TableNumber { path: path.to_owned(), layer, kv_head, got: word.to_owned() });
            };
            gates.push(gate.clamp(0.0, 1.0));
        }
    }
    Ok(gates)
}
