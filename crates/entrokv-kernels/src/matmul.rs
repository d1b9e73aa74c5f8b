//! Products of activations with packed weights: `out[token, row] = sum over cols of weight[row, col] * x[token, col]`.
//!
//! Promise: the bits of `out[token, row]` depend on the weights of that row and the activations of that token alone. Not
//! on how many tokens are multiplied at once, nor on a token's place among them, nor on the threads, nor on the
//! instruction set. It holds because every path does the same operations on one (row, token) in the same order:
//!
//! 1. Quantised weights, int8 activations, step by step of 32 columns and unit by unit within: an exact integer dot
//!    product `i` of codes (less the offset times the sum of the activations' codes, where the type has an offset), then
//!    `sum = fma(i, scale * x_scale, sum)`, then `sum = fma(min, x_scale * x_sum, sum)` where the type has minima. Scales of
//!    activations have so few bits that the factors are exact, whichever two of `i`, `scale` and `x_scale` are multiplied
//!    first: each instruction set does what it does best.
//! 2. Float weights, and all weights with `Arithmetic::F32`: per 32 columns a fresh partial sum
//!    `part = fma(weight, x, part)` in column order, then `sum = sum + part`.
//!
//! Few tokens run over packed tiles with their sums in registers: bound by memory. Many share a stretch of two tiles that is
//! unpacked once, to bytes and f32 scales in the first-level cache: bound by integer dot products.
//!
//! Non-finite scales and sums beyond f32 give infinities and NaN by the rules of IEEE 754, in that order of operations.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
mod kernels;
mod layout;
mod output;
mod scalar;

use crate::activations::{Activations, PANEL_TOKENS, Panel, PanelStep, Rounding, WIDE_PANEL_TOKENS};
use crate::compute::Compute;
use crate::matrix::packing::STEP_COLS;
use crate::matrix::{Matrix, TILE_ROWS};
use crate::simd::tiles::bytes::ByteTiles;

use float::{FLOAT_COLS, FLOAT_TOKENS, FloatTile};
use kernels::{FloatKernels, Kernels, Unpacking};
use layout::{PAIR, Scratch};
use output::Output;

/// The sums of one row tile for one token.
type Sums = [f32; TILE_ROWS];

/// The sums of a pair of tiles for a wide panel of tokens.
type PanelSums = [[Sums; WIDE_PANEL_TOKENS]; PAIR];

/// What sums are added to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Nothing: what is there is not read.
    Zero,
    /// The sums that are there.
    Sums,
}

/// Bytes of packed tiles that all tokens pass before the next tiles come: these stay in the second-level cache.
const GROUP_BYTES: usize = 256 * 1024;

/// Panels that pass an unpacked tile before the next one comes: their sums stay in the second-level cache.
const SPAN_PANELS: usize = 32;

/// Parts that a thread's share of the tiles is cut into, so that a thread that was interrupted is helped.
const TASKS_PER_THREAD: usize = 8;

/// Tiles of a task at most: with many tokens these share the activations found in the second-level cache.
const MAX_TASK_TILES: usize = 64;

/// Multiplies `x` [tokens, cols] with the transpose of `w` [rows, cols] into `out` [tokens, rows].
///
/// # Panics
/// If `x` has other columns than `w`, `out` is not `tokens * rows` long, or `x` was made by
/// [`Activations::for_weights`] for other types than that of `w`.
pub fn matmul(compute: &Compute, w: &Matrix, x: &Activations, out: &mut [f32]) {
    multiply(compute, &[Product::new(compute, w, x, out)], x);
}

/// [`matmul`] of one `x` with several matrices, each into its own `out`: the same bits for one fork and join instead of
/// several, which one token notices.
///
/// # Panics
/// As [`matmul`].
pub fn matmul_each<const N: usize>(compute: &Compute, x: &Activations, products: [(&Matrix, &mut [f32]); N]) {
    multiply(compute, &products.map(|(w, out)| Product::new(compute, w, x, out)), x);
}

/// Shares the tiles of `products`, all with the activations `x`, among the threads.
fn multiply(compute: &Compute, products: &[Product<'_>], x: &Activations) {
    if x.num_tokens() == 0 {
        return;
    }
    let num_tiles: usize = products.iter().map(|product| product.w.num_tiles()).sum();
    let task_tiles = num_tiles.div_ceil(compute.threads.num_threads() * TASKS_PER_THREAD);
    // Whole pairs: a tile alone shares its activations with no other.
    let task_tiles = task_tiles.next_multiple_of(PAIR).min(MAX_TASK_TILES);
    let num_tasks = |product: &Product<'_>| product.w.num_tiles().div_ceil(task_tiles);
    compute.threads.for_each(products.iter().map(num_tasks).sum(), |mut task| {
        let mut products = products.iter();
        // The task's product: tasks are numbered through all of them.
        let product = loop {
            let product = products.next().expect("there are as many tasks as the products have together");
            match task.checked_sub(num_tasks(product)) {
                Some(rest) => task = rest,
                None => break product,
            }
        };
        let tiles = task * task_tiles..product.w.num_tiles().min((task + 1) * task_tiles);
        let part = ProductPart { product, tiles };
        match (product.kernels, x.rounded()) {
            (Some(kernels), Some(Rounding::Few(panels))) => part.packed(kernels, panels),
            (Some(kernels), Some(Rounding::Many(steps))) => {
                let mut registers = ByteTiles::configure(compute.isa);
                part.unpacked(kernels.unpacking(), registers.as_mut(), steps, x.num_tokens());
            }
            _ => part.floats(product.float_kernels, x),
        }
    });
}

/// A product to be computed.
struct Product<'a> {
    w: &'a Matrix,
    output: Output<'a>,
    kernels: Option<Kernels>,
    float_kernels: FloatKernels,
}

impl<'a> Product<'a> {
    fn new(compute: &Compute, w: &'a Matrix, x: &Activations, out: &'a mut [f32]) -> Self {
        assert_eq!(x.cols(), w.cols(), "activations and weights must have the same columns");
        assert_eq!(out.len(), x.num_tokens() * w.rows(), "the output is [tokens, rows]");
        Self {
            w,
            output: Output::new(out, w.rows()),
            kernels: Kernels::of(compute.isa, w.weight_type()),
            float_kernels: FloatKernels::of(compute.isa, w.weight_type()),
        }
    }
}

/// What one task computes of a product: some row tiles, all tokens.
struct ProductPart<'a> {
    product: &'a Product<'a>,
    tiles: std::ops::Range<usize>,
}

impl ProductPart<'_> {
    /// Panels of tokens straight over packed tiles: a few tiles stay in the second-level cache while all panels pass, a
    /// panel in the first-level one while these tiles pass, and a token's outputs are written side by side.
    fn packed(self, kernels: Kernels, panels: &[Panel]) {
        let w = self.product.w;
        let group_tiles = (GROUP_BYTES / w.tile(0).len()).max(1);
        let mut sums = [[0.0; TILE_ROWS]; PANEL_TOKENS];
        for first_tile in self.tiles.clone().step_by(group_tiles) {
            let tiles = first_tile..self.tiles.end.min(first_tile + group_tiles);
            for (index, panel) in panels.iter().enumerate() {
                for tile in tiles.clone() {
                    sums[..panel.num_tokens].fill([0.0; TILE_ROWS]);
                    kernels.tokens(w.tile(tile), panel, &mut sums);
                    self.write(index * PANEL_TOKENS, tile, &sums[..panel.num_tokens]);
                }
            }
        }
    }

    /// Stretch by stretch of a pair of tiles: unpacked once, then all panels of a span of tokens. `x` is [panels, steps].
    fn unpacked(self, unpacking: Unpacking, mut registers: Option<&mut ByteTiles>, x: &[PanelStep], num_tokens: usize) {
        let num_steps = self.product.w.cols() / STEP_COLS;
        let stretch_steps = Scratch::stretch_steps(num_steps, unpacking.block_steps());
        let mut scratch = [const { Scratch::zeroed() }; PAIR];
        let mut sums = [[[[0.0; TILE_ROWS]; WIDE_PANEL_TOKENS]; PAIR]; SPAN_PANELS];
        for (span, x) in x.chunks(SPAN_PANELS * num_steps).enumerate() {
            let first_token = span * SPAN_PANELS * WIDE_PANEL_TOKENS;
            for first_tile in self.tiles.clone().step_by(PAIR) {
                let tiles = first_tile..self.tiles.end.min(first_tile + PAIR);
                let scratch = &mut scratch[..tiles.len()];
                for first_step in (0..num_steps).step_by(stretch_steps) {
                    let steps = first_step..num_steps.min(first_step + stretch_steps);
                    for (tile, scratch) in tiles.clone().zip(&mut *scratch) {
                        unpacking.unpack(self.product.w.tile(tile), steps.clone(), scratch);
                    }
                    let start = if first_step == 0 { Start::Zero } else { Start::Sums };
                    let is_last = steps.end == num_steps;
                    let mut panels = x.chunks_exact(num_steps).map(|panel| &panel[steps.clone()]).peekable();
                    for (index, sums) in sums.iter_mut().enumerate() {
                        let Some(panel) = panels.next() else { break };
                        let first_token = first_token + index * WIDE_PANEL_TOKENS;
                        if is_last {
                            // The outputs of a panel's tokens lie a row apart from each other, which no hardware foresees.
                            for token in first_token..first_token + WIDE_PANEL_TOKENS {
                                tiles.clone().for_each(|tile| self.product.output.prefetch(token, tile));
                            }
                        }
                        unpacking.tokens(
                            registers.as_deref_mut(),
                            scratch,
                            panel,
                            panels.peek().unwrap_or(&panel),
                            start,
                            sums,
                        );
                        if is_last {
                            let num_tokens = WIDE_PANEL_TOKENS.min(num_tokens - first_token);
                            for (tile, sums) in tiles.clone().zip(sums) {
                                self.write(first_token, tile, &sums[..num_tokens]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// All tokens in f32, stretch by stretch of a tile.
    fn floats(self, kernels: FloatKernels, x: &Activations) {
        let floats = x.floats().expect("activations are kept for the types that meet them, as documented");
        let cols = self.product.w.cols();
        let mut weights = FloatTile::zeroed();
        for tile in self.tiles.clone() {
            for first_col in (0..cols).step_by(FLOAT_COLS) {
                let stretch = first_col..cols.min(first_col + FLOAT_COLS);
                kernels.weights(self.product.w, tile, stretch.clone(), &mut weights);
                for (index, rows) in floats.chunks(FLOAT_TOKENS * cols).enumerate() {
                    let num_tokens = rows.len() / cols;
                    let mut sums = [[0.0; TILE_ROWS]; FLOAT_TOKENS];
                    if first_col > 0 {
                        self.read(index * FLOAT_TOKENS, tile, &mut sums[..num_tokens]);
                    }
                    kernels.product(&weights, rows, cols, stretch.clone(), &mut sums);
                    self.write(index * FLOAT_TOKENS, tile, &sums[..num_tokens]);
                }
            }
        }
    }

    /// Writes the sums of `tile`, one of this task's, for consecutive tokens.
    fn write(&self, first_token: usize, tile: usize, sums: &[Sums]) {
        assert!(self.tiles.contains(&tile));
        for (token, sums) in sums.iter().enumerate() {
            // SAFETY: the tile is this task's (line above), and tasks have disjoint tiles.
            unsafe { self.product.output.write(first_token + token, tile, sums) };
        }
    }

    /// Reads what [`Self::write`] wrote.
    fn read(&self, first_token: usize, tile: usize, sums: &mut [Sums]) {
        assert!(self.tiles.contains(&tile));
        for (token, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the tile is this task's (line above), and tasks have disjoint tiles.
            unsafe { self.product.output.read(first_token + token, tile, sums) };
        }
    }
}
