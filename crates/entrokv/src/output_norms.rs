//! What a token's value adds to a layer's output: the norm of its way through the output projection.

use entrokv_kernels::activations::{Activations, Arithmetic};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::matmul::matmul;
use entrokv_kernels::matrix::{Matrix, WeightMemory};
use entrokv_kernels::weight_type::WeightType;

/// Tokens multiplied at a time, which bounds what the products take.
const BLOCK_TOKENS: usize = 256;

/// `[KV heads][tokens]`: the mean over the heads of a group of `|W_O,q^T v|_1`, `W_O,q` being the columns of `output`
/// `[embedding_len, num_heads * head_dim]` that head `q` meets; `values[h]` is `[tokens, head_dim]`.
///
/// Weights of any type are read as f32 and values are not rounded. Sums run in f64 by ascending output, so that neither the other
/// tokens nor threads show. What follows the projection (a bias, Gemma's norm) is left out.
pub(crate) fn output_norms(
    compute: &Compute,
    output: &Matrix,
    group_size: usize,
    head_dim: usize,
    values: &[&[f32]],
) -> Vec<Vec<f32>> {
    let mut weights = vec![0.0; output.rows() * output.cols()];
    compute.threads.for_each_chunk(&mut weights, output.cols(), |row, out| output.dequantize_row(row, out));
    let mut input = Activations::new(Arithmetic::F32);
    let mut products = Vec::new();
    let of_group = |(kv_head, values): (usize, &&[f32])| {
        let mut sums = vec![0.0_f64; values.len() / head_dim];
        for head in kv_head * group_size..(kv_head + 1) * group_size {
            let part = head_matrix(compute, &weights, output, head * head_dim..(head + 1) * head_dim);
            let blocks = values.chunks(BLOCK_TOKENS * head_dim).zip(sums.chunks_mut(BLOCK_TOKENS));
            for (values, sums) in blocks {
                products.resize(sums.len() * part.rows(), 0.0);
                input.load(compute, values, head_dim);
                matmul(compute, &part, &input, &mut products);
                for (sum, product) in sums.iter_mut().zip(products.chunks_exact(part.rows())) {
                    *sum += product.iter().map(|y| f64::from(y.abs())).sum::<f64>();
                }
            }
        }
        sums.into_iter().map(|sum| (sum / group_size as f64) as f32).collect()
    };
    values.iter().enumerate().map(of_group).collect()
}

/// The given columns of `output`, whose `weights` are `[rows, cols]`.
fn head_matrix(compute: &Compute, weights: &[f32], output: &Matrix, columns: std::ops::Range<usize>) -> Matrix {
    let rows = weights.chunks_exact(output.cols()).flat_map(|row| &row[columns.clone()]);
    let bytes: Vec<u8> = rows.flat_map(|weight| weight.to_le_bytes()).collect();
    let memory = &mut WeightMemory::new();
    Matrix::pack(compute, memory, WeightType::F32, output.rows(), columns.len(), &bytes)
        .expect("columns of a matrix that was packed are whole, and no larger than it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use entrokv_kernels::isa::Isa;
    use std::num::NonZeroUsize;

    #[test]
    fn norms_are_those_of_the_definition_whatever_the_type_and_threads() {
        // Two KV heads of two query heads of 32, into 40 outputs.
        let (group_size, head_dim, rows, cols) = (2, 32, 40, 128);
        let noise = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
        // Q8_0: a half of scale and 32 codes.
        let bytes: Vec<u8> = (0..rows * cols / 32)
            .flat_map(|block| {
                let scale = half::f16::from_f32(0.01 + block as f32 * 1e-4).to_le_bytes();
                scale.into_iter().chain((0..32).map(move |i| (block * 32 + i) as u8))
            })
            .collect();
        let values: Vec<Vec<f32>> =
            [300, 3].map(|tokens| (0..tokens * head_dim).map(|i| noise(i + tokens)).collect()).into();
        let mut all = Vec::new();
        for threads in [1, 3] {
            let compute = Compute::new(Isa::detect(), NonZeroUsize::new(threads).unwrap());
            let memory = &mut WeightMemory::new();
            let output = Matrix::pack(&compute, memory, WeightType::Q8_0, rows, cols, &bytes).unwrap();
            let slices: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
            let norms = output_norms(&compute, &output, group_size, head_dim, &slices);
            let mut weights = vec![0.0; cols];
            for (kv_head, (values, norms)) in values.iter().zip(&norms).enumerate() {
                let mut expected = vec![0.0; norms.len()];
                for row in 0..rows {
                    output.dequantize_row(row, &mut weights);
                    for (value, sum) in values.chunks(head_dim).zip(&mut expected) {
                        for head in 0..group_size {
                            let of_head = &weights[(kv_head * group_size + head) * head_dim..][..head_dim];
                            let y: f64 = value.iter().zip(of_head).map(|(v, w)| f64::from(*v) * f64::from(*w)).sum();
                            *sum += y.abs() / group_size as f64;
                        }
                    }
                }
                for (norm, expected) in norms.iter().zip(expected) {
                    assert!((f64::from(*norm) - expected).abs() <= 1e-5 * expected, "{norm} for {expected}");
                }
            }
            all.push(norms);
        }
        assert!(all[0] == all[1], "threads show");
        assert_eq!(all[0].iter().map(Vec::len).collect::<Vec<_>>(), [300, 3]);
    }
}
