//! The speed of EntroKV: quantised matrix products, paged attention and everything else on the token path.
//!
//! Safe functions check shapes, then call the implementation of the instruction set at hand; this is the only crate of
//! the workspace with `unsafe` in it. Promises kept by every kernel: f32 accumulation in a fixed order, so that the
//! same token gets the same bits whatever the thread count, the batch it travels in and the chunk it arrives with.

pub mod activation;
pub mod activations;
pub mod arena;
pub mod attention;
pub mod codes;
pub mod compute;
pub mod dequantize;
mod disjoint;
pub mod heap;
pub mod isa;
pub mod matmul;
pub mod matrix;
pub mod moments;
pub mod norm;
pub mod page;
pub mod rope;
mod simd;
pub mod speed;
pub mod threads;
pub mod two_way;
pub mod weight_type;
