//! Codes against their f64 definition, the golden files, and each instruction set against the others.

use std::path::Path;

use serde_json::Value;

use super::*;
use crate::codes::naive;
use crate::codes::tests::{BOUNDARY, Golden, Random, one_step};
use crate::isa::Isa;
use crate::simd::dispatch;

const BITS: [usize; 2] = [4, 2];
const PARTS: [Part; 2] = [Part::Keys, Part::Values];

/// 16 vectors in the rows of a strip.
fn rows(part: Part, vectors: &[Vec<f32>]) -> Vec<[f32; LANES]> {
    let rows_per_slot = vectors[0].len() / LANES;
    let element = |row: usize, lane: usize| match part {
        Part::Keys => vectors[lane][row],
        Part::Values => vectors[row / rows_per_slot][row % rows_per_slot * LANES + lane],
    };
    (0..vectors[0].len()).map(|row| std::array::from_fn(|lane| element(row, lane))).collect()
}

fn encode(isa: Isa, layout: MinMaxStrip, rows: &[[f32; LANES]]) -> Vec<u8> {
    let mut strip = vec![0xff; layout.bytes()];
    dispatch(isa, EncodeMinMax { layout, rows, strip: &mut strip });
    strip
}

fn expand(isa: Isa, layout: MinMaxStrip, strip: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; layout.head_dim * LANES];
    dispatch(isa, ExpandStrip { layout, strip, out: &mut out });
    out
}

/// The codes, the scale and the minimum of a group of rows.
fn group(layout: MinMaxStrip, strip: &[u8], index: usize) -> (Vec<u8>, [f16; 2]) {
    let (codes, numbers) = strip.split_at(layout.code_bytes());
    let first = index * layout.rows_per_group();
    let code = |row: usize, lane: usize| {
        let byte = codes[row / layout.rows_per_plane() * LANES + lane];
        byte >> (row % layout.rows_per_plane() * layout.bits) & layout.largest()
    };
    let codes = (first..first + layout.rows_per_group()).flat_map(|row| (0..LANES).map(move |lane| (row, lane)));
    let numbers = numbers.as_chunks().0;
    let number = |at: usize| f16::from_ne_bytes(numbers[at]);
    (codes.map(|(row, lane)| code(row, lane)).collect(), [number(index), number(numbers.len() / 2 + index)])
}

fn bits_of(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn codes_are_those_of_the_f64_definition() {
    let mut random = Random(41);
    for head_dim in [32, 64, 96, 128, 256, 512] {
        for size in [1e-3, 1.0, 300.0] {
            let vectors = random.vectors(head_dim, size);
            for part in PARTS {
                let rows = rows(part, &vectors);
                for bits in BITS {
                    let layout = MinMaxStrip { bits, part, head_dim };
                    for isa in Isa::available() {
                        let strip = encode(isa, layout, &rows);
                        for (index, rows) in rows.chunks(layout.rows_per_group()).enumerate() {
                            let x: Vec<f64> = rows.as_flattened().iter().map(|x| f64::from(*x)).collect();
                            let want = naive::min_max(&x, bits as u32);
                            let (codes, [scale, minimum]) = group(layout, &strip, index);
                            let what = format!("{isa} {layout:?} {size}, group {index}");
                            assert!(one_step(scale, f16::from_f64(want.scale)), "{what}: {scale} for {}", want.scale);
                            assert_eq!(minimum.to_f64(), want.minimum, "{what}");
                            // A scale on the other side of the middle between two f16 moves levels by a 2,048th.
                            let bound = if scale.to_f64() == want.scale { BOUNDARY } else { 0.01 };
                            for ((got, want), distance) in codes.iter().zip(&want.codes).zip(&want.distances) {
                                assert!(got == want || *distance < bound, "{what}: {got} instead of {want}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_makes_the_same_codes_and_reads_the_same_elements() {
    let mut random = Random(42);
    for head_dim in [32, 64, 96, 128, 256] {
        let mut vectors = random.vectors(head_dim, 2.0);
        vectors[5].fill(0.0);
        vectors[6].fill(-0.0);
        vectors[7].fill(1e-30);
        let finite = vectors.clone();
        vectors[3][5] = f32::INFINITY;
        vectors[4][6] = f32::NAN;
        vectors[8].fill(3e38);
        vectors[9][7] = f32::NEG_INFINITY;
        for vectors in [finite, vectors] {
            for part in PARTS {
                let rows = rows(part, &vectors);
                for bits in BITS {
                    let layout = MinMaxStrip { bits, part, head_dim };
                    let strip = encode(Isa::SCALAR, layout, &rows);
                    // One element at a time, in the order of a plain page.
                    let of_slots: Vec<Vec<f32>> = (0..LANES)
                        .map(|slot| {
                            let mut x = vec![f32::NAN; head_dim];
                            layout.decode(&strip, slot, &mut x);
                            x
                        })
                        .collect();
                    let want = super::tests::rows(part, &of_slots).concat();
                    for isa in Isa::available() {
                        assert_eq!(encode(isa, layout, &rows), strip, "{isa} {layout:?}");
                        let got = expand(isa, layout, &strip);
                        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        assert!(got.iter().zip(&want).all(same), "{isa} {layout:?}");
                    }
                }
            }
        }
    }
}

/// The bits that `tools/golden/min_max.py` finds for real keys and values of two models, one of whose keys have channels of up
/// to 145 beside others of 1.
#[test]
fn real_vectors_get_the_bits_of_the_reference() {
    let file: Value = serde_json::from_str(include_str!("../../../tests/fixtures/min-max.json")).unwrap();
    for (name, golden) in Golden::all() {
        for row in file[name].as_array().unwrap() {
            let bits = row["bits"].as_u64().unwrap() as usize;
            for (part, letter, vectors) in [(Part::Keys, "k", &golden.keys), (Part::Values, "v", &golden.values)] {
                let layout = MinMaxStrip { bits, part, head_dim: vectors[0].len() };
                let of = |key: &str| row[format!("{letter}_{key}")].as_array().unwrap();
                let hex = |value: &Value| u32::from_str_radix(value.as_str().unwrap(), 16).unwrap();
                let groups_per_strip = layout.head_dim / layout.rows_per_group();
                let num_strips = of("codes").len() / groups_per_strip;
                assert!(num_strips >= 2, "{name}");
                for (index, vectors) in vectors.chunks(LANES).take(num_strips).enumerate() {
                    for isa in Isa::available() {
                        let strip = encode(isa, layout, &rows(part, vectors));
                        for i in 0..groups_per_strip {
                            let (codes, numbers) = group(layout, &strip, i);
                            let at = index * groups_per_strip + i;
                            let digits: String = codes.iter().map(|code| format!("{code:x}")).collect();
                            let what = format!("{isa} {name} {layout:?}, group {at}");
                            assert_eq!(digits, of("codes")[at], "{what}");
                            let want = ["scales", "minima"].map(|key| hex(&of(key)[at]));
                            assert_eq!(numbers.map(|number| u32::from(number.to_bits())), want, "{what}");
                        }
                        let mut last = vec![f32::NAN; layout.head_dim];
                        layout.decode(&strip, LANES - 1, &mut last);
                        let digits: String = bits_of(&last).iter().map(|bits| format!("{bits:08x}")).collect();
                        assert_eq!(digits, of("last_slots")[index], "{isa} {name} {layout:?}");
                    }
                }
            }
        }
    }
}

/// The oracle itself, against the reference of the policies (`tools/golden/policies`), in groups of 8.
#[test]
fn the_definition_is_that_of_the_policies_reference() {
    fn floats(value: &Value) -> Vec<f64> {
        match value {
            Value::Array(items) => items.iter().flat_map(floats).collect(),
            number => vec![number.as_f64().unwrap()],
        }
    }
    let golden = |name: &str| -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../entrokv-cache/tests/golden/policies");
        serde_json::from_str(&std::fs::read_to_string(path.join(format!("{name}.json"))).unwrap()).unwrap()
    };
    let (file, inputs) = (golden("kivi"), golden("inputs"));
    let mut compared = 0;
    for case in file["cases"].as_array().unwrap().iter().filter(|case| case.get("keys").is_some()) {
        let bits = case["options"]["bits"].as_u64().unwrap() as u32;
        let group_len = case["options"]["group"].as_u64().unwrap() as usize;
        for (part, tensor) in [("keys", "k"), ("values", "v")] {
            for (head, vectors) in inputs[tensor].as_array().unwrap().iter().enumerate() {
                let vectors: Vec<Vec<f64>> = vectors.as_array().unwrap().iter().map(floats).collect();
                for (row, groups) in case[part]["codes"][head].as_array().unwrap().iter().enumerate() {
                    for (place, codes) in groups.as_array().unwrap().iter().enumerate() {
                        let at = |i: usize| match part {
                            "keys" => vectors[place * group_len + i][row],
                            _ => vectors[row][place * group_len + i],
                        };
                        let got = naive::min_max(&(0..group_len).map(at).collect::<Vec<_>>(), bits);
                        let codes: Vec<u8> = floats(codes).into_iter().map(|code| code as u8).collect();
                        let what = format!("{part}, {bits} bits, head {head}, {row}, {place}");
                        assert_eq!(got.codes, codes, "{what}");
                        let number = |key: &str| case[part][key][head][row][place].as_f64().unwrap();
                        // The file has them in decimal digits of f32.
                        let same = |a: f64, b: f64| f16::from_f64(a) == f16::from_f64(b);
                        assert!(same(got.scale, number("scale")) && same(got.minimum, number("minimum")), "{what}");
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 300, "{compared}");
    let equals = file["cases"].as_array().unwrap().iter().find(|case| case["name"] == "group of equals").unwrap();
    let got = naive::min_max(&[0.75; 8], 2);
    assert_eq!((got.codes, vec![got.scale]), (vec![0; 8], floats(&equals["scale"])));
    assert_eq!(floats(&equals["codes"]), [0.0; 8]);
}

#[test]
fn what_is_encoded_comes_back_within_half_a_step() {
    let mut random = Random(43);
    for head_dim in [32, 96, 128] {
        for size in [1e-2, 1.0, 1000.0] {
            // Some channels lie far from 0, as those of keys do.
            let mut vectors = random.vectors(head_dim, size);
            vectors.iter_mut().for_each(|vector| vector[3] += 20.0 * size);
            for part in PARTS {
                let rows = rows(part, &vectors);
                for bits in BITS {
                    let layout = MinMaxStrip { bits, part, head_dim };
                    let got = expand(Isa::detect(), layout, &encode(Isa::detect(), layout, &rows));
                    let len = LANES * layout.rows_per_group();
                    for (got, want) in got.chunks(len).zip(rows.as_flattened().chunks(len)) {
                        let low = want.iter().copied().fold(f32::INFINITY, f32::min);
                        let high = want.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                        // An f16 is off by a 2,048th at most, of the minimum and of up to 15 scales.
                        let rounded = (low.abs() + high - low) / 2048.0;
                        let bound = (high - low) / f32::from(layout.largest()) / 2.0 + rounded;
                        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() <= bound), "{layout:?} {size}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_group_with_what_is_not_finite_becomes_nan_and_no_other() {
    let mut random = Random(44);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38, -7e4] {
        for part in PARTS {
            for bits in BITS {
                let layout = MinMaxStrip { bits, part, head_dim: 64 };
                let mut vectors = random.vectors(64, 1.0);
                vectors[2][40] = bad;
                let got = expand(Isa::detect(), layout, &encode(Isa::detect(), layout, &rows(part, &vectors)));
                let group_len = LANES * layout.rows_per_group();
                // Channel 40 of all slots; channels 32 to 63 of slot 2.
                let poisoned = if part == Part::Keys { 40 } else { 2 * 2 + 1 };
                for (index, group) in got.chunks(group_len).enumerate() {
                    let as_it_should_be = |x: &f32| if index == poisoned { x.is_nan() } else { x.is_finite() };
                    assert!(group.iter().all(as_it_should_be), "{layout:?} {bad}, group {index}");
                }
            }
        }
    }
}

#[test]
fn equals_come_back_as_they_were() {
    for part in PARTS {
        for bits in BITS {
            let layout = MinMaxStrip { bits, part, head_dim: 32 };
            for x in [0.0, -0.0, 0.75, -65504.0] {
                let strip = encode(Isa::detect(), layout, &[[x; LANES]; 32]);
                assert_eq!(
                    group(layout, &strip, 0),
                    (vec![0; LANES * layout.rows_per_group()], [f16::ONE, f16::from_f32(x + 0.0)])
                );
                assert_eq!(expand(Isa::detect(), layout, &strip), [x; LANES * 32]);
            }
        }
    }
}
