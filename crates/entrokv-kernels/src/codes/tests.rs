//! Codes against their f64 definition, the golden vectors, and each instruction set against the others.

use half::f16;

use super::encode::{Columns, EncodeStrip, decode};
use super::packing::{Part, StripLayout};
use super::*;
use crate::isa::Isa;
use crate::simd::{LANES, dispatch};

/// How far a ratio may lie from a boundary for its code to be decided by rounding: the tolerance of the format's definition.
pub(super) const BOUNDARY: f64 = 1e-4;

const CODES: [Code; 4] =
    [Code::Q8, Code::Rotated(Rotated::Tq4), Code::Rotated(Rotated::Tq3), Code::Rotated(Rotated::Tq2)];

const ROTATED: [Rotated; 3] = [Rotated::Tq4, Rotated::Tq3, Rotated::Tq2];

/// SplitMix64 and what is drawn from it.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Box and Muller.
    pub(super) fn normal(&mut self) -> f32 {
        let (a, b) = (self.uniform(), self.uniform());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    pub(super) fn vectors(&mut self, head_dim: usize, size: f32) -> Vec<Vec<f32>> {
        (0..LANES).map(|_| (0..head_dim).map(|_| self.normal() * size).collect()).collect()
    }

    fn constants(&mut self, head_dim: usize) -> KeyConstants {
        let centre = (0..head_dim).map(|_| self.normal() * 3.0).collect();
        KeyConstants::new(centre, (0..head_dim).map(|_| self.normal().abs() + 0.1).collect())
    }
}

/// Encodes up to 16 vectors as a strip.
fn encode(isa: Isa, code: Code, part: Part, constants: Option<&KeyConstants>, vectors: &[Vec<f32>]) -> Vec<u8> {
    let layout = StripLayout { code, head_dim: vectors[0].len() };
    let mut columns = Columns::new();
    for (lane, vector) in vectors.iter().enumerate() {
        for (column, x) in columns.x(layout.head_dim).iter_mut().zip(vector) {
            column[lane] = *x;
        }
    }
    let mut strip = vec![0xff; layout.bytes()];
    dispatch(isa, EncodeStrip { layout, part, constants, columns: &mut columns, strip: &mut strip });
    strip
}

fn decoded(code: Code, part: Part, constants: Option<&KeyConstants>, strip: &[u8], slot: usize, d: usize) -> Vec<f32> {
    let mut x = vec![f32::NAN; d];
    decode(StripLayout { code, head_dim: d }, part, constants, strip, slot, &mut x);
    x
}

/// `|a - b| / |b - centre|`.
fn relative_error<'a>(pairs: impl Iterator<Item = (&'a [f32], &'a [f32])>, centre: &[f32]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (a, b) in pairs {
        for ((a, b), centre) in a.iter().zip(b).zip(centre) {
            error += (f64::from(*a) - f64::from(*b)).powi(2);
            size += (f64::from(*b) - f64::from(*centre)).powi(2);
        }
    }
    (error / size).sqrt()
}

/// Whether two f16 are at most one step apart.
pub(super) fn one_step(a: f16, b: f16) -> bool {
    a.to_bits().abs_diff(b.to_bits()) <= 1
}

#[test]
fn codes_are_those_of_the_f64_definition() {
    let mut random = Random(1);
    for head_dim in [32, 64, 96, 128, 256, 512] {
        for size in [1e-3, 1.0, 300.0] {
            let constants = random.constants(head_dim);
            let (zero, one) = (vec![0.0; head_dim], vec![1.0; head_dim]);
            for (part, centre, scale) in
                [(Part::Keys, constants.centre(), constants.channel_scale()), (Part::Values, &zero[..], &one[..])]
            {
                let vectors = random.vectors(head_dim, size);
                for rotated in ROTATED {
                    let code = Code::Rotated(rotated);
                    let layout = StripLayout { code, head_dim };
                    let strip = encode(Isa::detect(), code, part, Some(&constants), &vectors);
                    for (slot, vector) in vectors.iter().enumerate() {
                        let y = naive::rotate(vector, centre, scale);
                        let want = naive::encode(rotated.codebook(), &y);
                        for (dim, (code, distance)) in want.codes.iter().zip(&want.distances).enumerate() {
                            let got = layout.code_at(part, &strip, slot, dim);
                            assert!(got == *code || *distance < BOUNDARY, "{rotated:?} {part:?} {slot} {dim}: {got}");
                        }
                        let got = layout.scale_at(&strip, slot, 0);
                        assert!(one_step(got, f16::from_f64(want.scale)), "{got} instead of {}", want.scale);
                    }
                }
            }
        }
    }
}

#[test]
fn q8_is_off_by_at_most_half_a_step() {
    let mut random = Random(2);
    for head_dim in [32, 96, 128] {
        for part in [Part::Keys, Part::Values] {
            for size in [1e-2, 1.0, 1000.0] {
                let vectors = random.vectors(head_dim, size);
                let strip = encode(Isa::detect(), Code::Q8, part, None, &vectors);
                for (slot, vector) in vectors.iter().enumerate() {
                    let got = decoded(Code::Q8, part, None, &strip, slot, head_dim);
                    for (got, want) in got.chunks(BLOCK_LEN).zip(vector.chunks(BLOCK_LEN)) {
                        let largest = want.iter().fold(0f32, |a, b| a.max(b.abs()));
                        // The rounding of the scale moves the largest element by another 127 / 2048 of a step.
                        let bound = largest / 127.0 * 0.57;
                        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() <= bound), "{part:?} {size}");
                    }
                }
            }
        }
    }
}

#[test]
fn normal_vectors_have_the_error_of_lloyd_and_max() {
    let mut random = Random(3);
    let head_dim = 256;
    for (rotated, want) in [(Rotated::Tq4, 0.0975), (Rotated::Tq3, 0.186), (Rotated::Tq2, 0.343)] {
        let code = Code::Rotated(rotated);
        let (mut vectors, mut back) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            let some = random.vectors(head_dim, 1.0);
            let strip = encode(Isa::detect(), code, Part::Values, None, &some);
            back.extend((0..LANES).map(|slot| decoded(code, Part::Values, None, &strip, slot, head_dim)));
            vectors.extend(some);
        }
        let pairs = back.iter().zip(&vectors).map(|(a, b)| (&a[..], &b[..]));
        let got = relative_error(pairs, &vec![0.0; head_dim]);
        assert!((got / want - 1.0).abs() < 0.01, "{rotated:?}: {got} instead of {want}");
    }
}

#[test]
fn every_instruction_set_makes_the_same_codes() {
    let mut random = Random(4);
    for head_dim in [32, 64, 96, 128, 256] {
        let constants = random.constants(head_dim);
        let mut vectors = random.vectors(head_dim, 2.0);
        vectors[3][5] = f32::INFINITY;
        vectors[4][6] = f32::NAN;
        vectors[5].fill(0.0);
        vectors[6].fill(1e-30);
        vectors[7].fill(3e38);
        for code in CODES {
            for part in [Part::Keys, Part::Values] {
                for constants in [None, Some(&constants)] {
                    let want = encode(Isa::SCALAR, code, part, constants, &vectors);
                    for isa in Isa::available() {
                        assert_eq!(encode(isa, code, part, constants, &vectors), want, "{isa} {code:?} {part:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn vectors_that_are_not_finite_decode_to_what_is_not() {
    let mut random = Random(5);
    let mut vectors = random.vectors(64, 1.0);
    vectors[0][40] = f32::INFINITY;
    vectors[1][41] = f32::NAN;
    vectors[2][42] = f32::NEG_INFINITY;
    vectors[3].fill(0.0);
    for code in CODES {
        for part in [Part::Keys, Part::Values] {
            let strip = encode(Isa::detect(), code, part, None, &vectors);
            for slot in 0..3 {
                let back = decoded(code, part, None, &strip, slot, 64);
                assert!(back[32..].iter().all(|x| !x.is_finite()), "{code:?} {part:?} {slot}");
            }
            assert_eq!(decoded(code, part, None, &strip, 3, 64), [0.0; 64], "{code:?} {part:?}");
            assert!((4..16).all(|slot| decoded(code, part, None, &strip, slot, 64).iter().all(|x| x.is_finite())));
        }
    }
}

#[test]
fn packed_codes_are_found_where_they_were_put() {
    let mut random = Random(6);
    for code in CODES {
        for part in [Part::Keys, Part::Values] {
            let layout = StripLayout { code, head_dim: 96 };
            let mask = ((1u16 << code.bits()) - 1) as u8;
            let codes: Vec<[u8; LANES]> =
                (0..96).map(|_| std::array::from_fn(|_| random.next() as u8 & mask)).collect();
            let scales: Vec<[u16; LANES]> =
                (0..code.num_scales(96)).map(|_| std::array::from_fn(|_| random.next() as u16)).collect();
            let mut strip = vec![0xff; layout.bytes()];
            layout.pack(part, &codes, &scales, &mut strip);
            for slot in 0..LANES {
                for (dim, codes) in codes.iter().enumerate() {
                    assert_eq!(layout.code_at(part, &strip, slot, dim), codes[slot], "{code:?} {part:?} {slot} {dim}");
                }
                for (index, scales) in scales.iter().enumerate() {
                    assert_eq!(layout.scale_at(&strip, slot, index).to_bits(), scales[slot]);
                }
            }
        }
    }
}

/// Real keys, values and a query, and what the f64 reference makes of them.
pub(super) struct Golden {
    pub(super) keys: Vec<Vec<f32>>,
    pub(super) values: Vec<Vec<f32>>,
    query: Vec<f32>,
    json: serde_json::Value,
}

impl Golden {
    pub(super) fn all() -> [(&'static str, Golden); 2] {
        macro_rules! golden {
            ($name:literal) => {
                ($name, {
                    let json = include_str!(concat!("../../tests/fixtures/page-formats-", $name, ".json"));
                    Golden::new(json)
                })
            };
        }
        [golden!("qwen25_05b-layer0"), golden!("smollm2_135m-layer12")]
    }

    fn new(json: &str) -> Golden {
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        let [num_tokens, head_dim] = ["num_tokens", "head_dim"].map(|key| json[key].as_u64().unwrap() as usize);
        let float =
            |digits: &[u8; 8]| f32::from_bits(u32::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap());
        let mut vectors = json["vectors"].as_array().unwrap().iter().map(|digits| {
            let vector: Vec<f32> = digits.as_str().unwrap().as_bytes().as_chunks().0.iter().map(float).collect();
            assert_eq!(vector.len(), head_dim);
            vector
        });
        let keys = vectors.by_ref().take(num_tokens).collect();
        let values = vectors.by_ref().take(num_tokens).collect();
        let query = vectors.next().unwrap();
        assert_eq!(vectors.next(), None);
        drop(vectors);
        Golden { keys, values, query, json }
    }

    fn floats(value: &serde_json::Value) -> Vec<f32> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }

    fn constants(&self) -> KeyConstants {
        let [mean, std, rms] = ["key_mean", "key_std", "query_rms"].map(|key| Self::floats(&self.json[key]));
        KeyConstants::from_moments(&mean, &std, &rms)
    }
}

#[test]
fn constants_of_real_keys_are_those_of_the_reference() {
    for (name, golden) in Golden::all() {
        let constants = golden.constants();
        for (key, got) in [("centre", constants.centre()), ("channel_scale", constants.channel_scale())] {
            for (i, (got, want)) in got.iter().zip(Golden::floats(&golden.json[key])).enumerate() {
                assert!((got - want).abs() <= 1e-6 * want.abs(), "{name} {key} {i}: {got} instead of {want}");
            }
        }
    }
}

#[test]
fn real_vectors_get_the_codes_of_the_reference() {
    for (name, golden) in Golden::all() {
        let d = golden.query.len();
        let [centre, scale] = ["centre", "channel_scale"].map(|key| Golden::floats(&golden.json[key]));
        let constants = KeyConstants::new(centre, scale);
        for row in golden.json["rows"].as_array().unwrap() {
            let code = Code::Rotated(match row["bits"].as_u64() {
                Some(4) => Rotated::Tq4,
                Some(3) => Rotated::Tq3,
                _ => Rotated::Tq2,
            });
            let layout = StripLayout { code, head_dim: d };
            for (part, letter, vectors) in [(Part::Keys, "k", &golden.keys), (Part::Values, "v", &golden.values)] {
                let what = format!("{name} {code:?} {part:?}");
                let of = |key: &str| &row[format!("{letter}_{key}")];
                let scales = Golden::floats(of("scales"));
                let undecided: Vec<Vec<usize>> = serde_json::from_value(of("near_boundary").clone()).unwrap();
                let mut back = Vec::new();
                for (strip_index, vectors) in vectors.chunks(LANES).enumerate() {
                    let strip = encode(Isa::detect(), code, part, Some(&constants), vectors);
                    for slot in 0..vectors.len() {
                        let token = strip_index * LANES + slot;
                        let digits = of("codes")[token].as_str().unwrap();
                        for (dim, digit) in digits.chars().enumerate() {
                            let got = u32::from(layout.code_at(part, &strip, slot, dim));
                            let same = Some(got) == digit.to_digit(16) || undecided.contains(&vec![token, dim]);
                            assert!(same, "{what}: token {token}, dim {dim}: {got} instead of {digit}");
                        }
                        let got = layout.scale_at(&strip, slot, 0);
                        let want = f16::from_f32(scales[token]);
                        assert!(one_step(got, want), "{what}: scale of {token}: {got} instead of {want}");
                        back.push(decoded(code, part, Some(&constants), &strip, slot, d));
                    }
                }
                let centre = if part == Part::Keys { constants.centre().to_vec() } else { vec![0.0; d] };
                let pairs = back.iter().zip(vectors).map(|(a, b)| (&a[..], &b[..]));
                let (got, want) = (relative_error(pairs, &centre), of("relative_error").as_f64().unwrap());
                assert!((got / want - 1.0).abs() < 1e-3, "{what}: relative error {got} instead of {want}");
                if part == Part::Keys {
                    let logits = Golden::floats(&row["logits"]);
                    let largest = logits.iter().fold(0f32, |a, b| a.max(b.abs()));
                    for (back, want) in back.iter().zip(&logits) {
                        let got: f64 = back.iter().zip(&golden.query).map(|(a, b)| f64::from(a * b)).sum();
                        assert!((got - f64::from(*want)).abs() < 1e-3 * f64::from(largest), "{what}: {got}, {want}");
                    }
                }
            }
        }
    }
}
