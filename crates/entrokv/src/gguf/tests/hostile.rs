//! Files that are cut, invented or damaged: refused in one line, before anything is allocated for what they claim.

use std::{fs, io::Write};

use super::*;

/// Bytes of a header: magic, version and the two counts.
fn header(version: u32, num_tensors: u64, num_entries: u64) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(num_tensors.to_le_bytes());
    bytes.extend(num_entries.to_le_bytes());
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A file with one metadata entry of this type and these bytes, and some room after it.
fn entry(key: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
    [header(3, 0, 1), string(key), value_type.to_le_bytes().to_vec(), value.to_vec(), vec![0; 64]].concat()
}

/// A tensor's entry as the file has it, true or not.
#[derive(Clone, Copy)]
struct Claim<'a> {
    name: &'a str,
    num_dims: u32,
    shape: &'a [u64],
    type_id: u32,
    offset: u64,
}

impl Claim<'_> {
    const GOOD: Claim<'static> = Claim { name: "t", num_dims: 1, shape: &[32], type_id: 0, offset: 0 };

    fn write(&self) -> Vec<u8> {
        let mut bytes = string(self.name);
        bytes.extend(self.num_dims.to_le_bytes());
        bytes.extend(self.shape.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(self.type_id.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes
    }
}

/// A file with these tensor entries and `data` zeros after them.
fn tensors(claims: &[Claim<'_>], data: usize) -> Vec<u8> {
    let mut bytes = header(3, claims.len() as u64, 0);
    bytes.extend(claims.iter().flat_map(Claim::write));
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn every_refused_file_says_why_in_one_line() {
    let good = Claim::GOOD;
    let huge = u64::MAX;
    let mut deep = Vec::new();
    for _ in 0..100 {
        deep.extend(9_u32.to_le_bytes());
        deep.extend(1_u64.to_le_bytes());
    }
    let twice = [header(3, 0, 2), string("k"), vec![0, 0, 0, 0, 1], string("k"), vec![0, 0, 0, 0, 2]].concat();
    let lengths = |id: u32, len: u64| [&id.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        // What is no GGUF file at all.
        (vec![], "not a GGUF file: it is empty"),
        (b"GG".to_vec(), "not a GGUF file: starts with \"GG\" instead of \"GGUF\""),
        (
            b"# A read me\nwith lines".to_vec(),
            "not a GGUF file: starts with \"# A read me\\nwith\" instead of \"GGUF\"",
        ),
        (b"PK\x03\x04\xff".to_vec(), "not a GGUF file: starts with \"PK\\x03\\x04\\xff\" instead of \"GGUF\""),
        (b"GGUF".to_vec(), "the header: truncated or corrupt: the version needs 4 bytes at byte 4, 0 are left"),
        (
            header(3, 0, 0)[..20].to_vec(),
            "the header: truncated or corrupt: the number of metadata entries needs 8 bytes at byte 16, 4 are left",
        ),
        // Versions and byte orders.
        (header(1, 0, 0), "GGUF version 1 is not supported: only versions 2 and 3 are"),
        (header(4, 0, 0), "GGUF version 4 is not supported: only versions 2 and 3 are"),
        (header(0, 0, 0), "GGUF version 0 is not supported: only versions 2 and 3 are"),
        (
            header(3_u32.swap_bytes(), 0, 0),
            "a big-endian GGUF file (its version reads as 3): only little-endian ones are supported",
        ),
        // Counts.
        (header(3, huge, 0), "the header counts 18446744073709551615 tensors, but the 0 bytes after it hold 0 at most"),
        (
            header(3, 0, huge),
            "the header counts 18446744073709551615 metadata entries, but the 0 bytes after it hold 0 at most",
        ),
        (
            [header(3, 1 << 40, 0), vec![0; 100]].concat(),
            "the header counts 1099511627776 tensors, but the 100 bytes after it hold 3 at most",
        ),
        (
            [header(3, 0, 8), vec![0; 100]].concat(),
            "the header counts 8 metadata entries, but the 100 bytes after it hold 7 at most",
        ),
        // Metadata.
        (
            [header(3, 0, 1), huge.to_le_bytes().to_vec(), vec![0; 9]].concat(),
            "metadata entry 1 of 1: truncated or corrupt: its key needs 18446744073709551615 bytes at byte 32, 9 are left",
        ),
        (
            [header(3, 0, 1), 2_u64.to_le_bytes().to_vec(), vec![0xff; 9]].concat(),
            "metadata entry 1 of 1: the name is not valid UTF-8",
        ),
        (entry("k", 13, &[]), "metadata entry 1 of 1 (\"k\"): unknown value type 13: 0 to 12 exist"),
        (entry("k", 7, &[2]), "metadata entry 1 of 1 (\"k\"): a bool of value 2: 0 and 1 are possible"),
        (
            entry("k", 8, &huge.to_le_bytes()),
            "metadata entry 1 of 1 (\"k\"): truncated or corrupt: a string needs 18446744073709551615 bytes at byte 45, 64 are left",
        ),
        (
            entry("k", 9, &lengths(4, huge)),
            "metadata entry 1 of 1 (\"k\"): truncated or corrupt: an array needs 18446744073709551615 bytes at byte 49, 64 are left",
        ),
        (
            entry("k", 9, &lengths(8, 9)),
            "metadata entry 1 of 1 (\"k\"): truncated or corrupt: an array needs 72 bytes at byte 49, 64 are left",
        ),
        (entry("k", 9, &lengths(99, 0)), "metadata entry 1 of 1 (\"k\"): unknown value type 99: 0 to 12 exist"),
        (entry("k", 9, &deep), "metadata entry 1 of 1 (\"k\"): arrays nested more than 4 deep"),
        (entry("a\nb", 13, &[]), "metadata entry 1 of 1 (\"a\\nb\"): unknown value type 13: 0 to 12 exist"),
        (twice, "metadata key \"k\" appears twice"),
        // The alignment.
        (entry("general.alignment", 4, &[0, 0, 0, 0]), "general.alignment is 0: it must be a power of two, 8 or more"),
        (entry("general.alignment", 4, &[4, 0, 0, 0]), "general.alignment is 4: it must be a power of two, 8 or more"),
        (
            entry("general.alignment", 4, &[48, 0, 0, 0]),
            "general.alignment is 48: it must be a power of two, 8 or more",
        ),
        (
            entry("general.alignment", 8, &string("32")),
            "metadata key \"general.alignment\" is a string: an unsigned 32-bit integer is expected",
        ),
        (
            entry("general.alignment", 11, &[0xff; 8]),
            "metadata key \"general.alignment\" is -1: it does not fit an unsigned 32-bit integer",
        ),
        // Tensors.
        (
            tensors(&[Claim { num_dims: 0, shape: &[], ..good }], 128),
            "tensor \"t\" has 0 dimensions: 1 to 4 are possible",
        ),
        (
            tensors(&[Claim { num_dims: 5, shape: &[1; 5], ..good }], 128),
            "tensor \"t\" has 5 dimensions: 1 to 4 are possible",
        ),
        (
            tensors(&[Claim { num_dims: u32::MAX, ..good }], 128),
            "tensor \"t\" has 4294967295 dimensions: 1 to 4 are possible",
        ),
        (
            tensors(&[Claim { num_dims: 2, shape: &[32, 0], ..good }], 128),
            "tensor \"t\" has the impossible shape [32, 0]",
        ),
        (
            tensors(&[Claim { num_dims: 2, shape: &[1 << 32, 1 << 32], ..good }], 128),
            "tensor \"t\" has the impossible shape [4294967296, 4294967296]",
        ),
        (
            tensors(&[Claim { num_dims: 4, shape: &[1 << 16; 4], ..good }], 128),
            "tensor \"t\" has the impossible shape [65536, 65536, 65536, 65536]",
        ),
        (
            tensors(&[Claim { shape: &[huge], ..good }], 128),
            "tensor \"t\" has the impossible shape [18446744073709551615]",
        ),
        (
            tensors(&[Claim { shape: &[33], type_id: 8, ..good }], 128),
            "tensor \"t\" of type Q8_0 has rows of 33 elements: they must be a multiple of 32",
        ),
        (
            tensors(&[Claim { shape: &[32], type_id: 12, ..good }], 128),
            "tensor \"t\" of type Q4_K has rows of 32 elements: they must be a multiple of 256",
        ),
        (
            tensors(&[Claim { offset: 16, ..good }], 256),
            "tensor \"t\" starts at offset 16, which is no multiple of the alignment 32",
        ),
        (
            tensors(&[Claim { offset: huge - 31, ..good }], 128),
            "tensor \"t\" has the impossible offset 18446744073709551584",
        ),
        (
            tensors(&[Claim { offset: 1 << 62, ..good }], 128),
            "truncated: tensor \"t\" ends at byte 4611686018427388096, the file at byte 192 (4611686018427387904 bytes missing for this tensor, 4611686018427387904 for the file)",
        ),
        (
            tensors(&[good, Claim { name: "u", offset: 96, ..good }], 256),
            "tensors \"t\" and \"u\" overlap: the second starts 32 bytes before the first ends",
        ),
        (
            tensors(&[Claim { offset: 64, ..good }, Claim { name: "u", ..good }], 256),
            "tensors \"u\" and \"t\" overlap: the second starts 64 bytes before the first ends",
        ),
        (tensors(&[good, Claim { offset: 128, ..good }], 256), "tensor \"t\" appears twice"),
    ];
    for (bytes, expected) in cases {
        assert_eq!(refusal(bytes), format!("the model in memory: {expected}"));
    }
}

#[test]
fn an_unsupported_tensor_type_is_named_with_its_tensor() {
    let known = "only F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K are";
    for (id, name) in [
        (23, "IQ4_XS (number 23)"),
        (34, "TQ1_0 (number 34)"),
        (39, "MXFP4 (number 39)"),
        (26, "I32 (number 26)"),
        (777, "number 777, which is unknown"),
    ] {
        let message = refusal(tensors(&[Claim { name: "blk.0.ffn_up.weight", type_id: id, ..Claim::GOOD }], 128));
        assert_eq!(
            message,
            format!(
                "the model in memory: tensor \"blk.0.ffn_up.weight\" has type {name}, which is not supported: {known}"
            )
        );
    }
}

#[test]
fn a_truncated_file_names_the_tensor_and_the_missing_bytes() {
    let whole = bytes_of(&sample());
    // "matrix" is the second of four tensors: cut into its last row, 10 bytes before its end.
    let model = opened(whole.clone());
    let base = model.parts[0].as_ptr() as usize;
    let end = |name: &str| {
        let data = model.tensor(name).expect("it is there").data;
        data.as_ptr() as usize - base + data.len()
    };
    let (cut, last) = (end("matrix") - 10, end("k"));
    let message = refusal(whole[..cut].to_vec());
    let expected = format!(
        "the model in memory: truncated: tensor \"matrix\" ends at byte {}, the file at byte {cut} (10 bytes missing for this tensor, {} for the file)",
        cut + 10,
        last - cut
    );
    assert_eq!(message, expected);
}

#[test]
fn no_prefix_of_a_file_is_a_file() {
    let whole = bytes_of(&sample());
    // The padding after the last tensor may be missing: some writers leave it out.
    let needed = whole.len() - whole.iter().rev().take_while(|&&byte| byte == 0).count();
    for len in 0..needed {
        refusal(whole[..len].to_vec());
    }
    for len in needed..whole.len() {
        assert_eq!(opened(whole[..len].to_vec()).tensors().len(), 4);
    }
}

#[test]
fn files_on_disk_are_refused_like_files_in_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let written = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::File::create(&path).and_then(|mut file| file.write_all(bytes)).expect("a writable folder");
        path
    };
    let whole = bytes_of(&sample());
    assert_eq!(Gguf::open(&written("whole.gguf", &whole)).expect("a good file").file_bytes(), whole.len() as u64);
    let cases = [
        (written("empty.gguf", b""), "not a GGUF file: it is empty".to_owned()),
        (written("text.gguf", b"hello"), "not a GGUF file: starts with \"hello\" instead of \"GGUF\"".to_owned()),
    ];
    for (path, expected) in cases {
        let message = Gguf::open(&path).expect_err("the file must be refused").to_string();
        assert_eq!(message, format!("{}: {expected}", path.display()));
    }
    let absent = folder.path().join("absent.gguf");
    let message = Gguf::open(&absent).expect_err("there is none").to_string();
    assert!(message.starts_with(&format!("cannot open {}: ", absent.display())), "{message}");
    let message = Gguf::open(folder.path()).expect_err("a folder is no model").to_string();
    assert_eq!(message, format!("cannot open {}: it is no regular file", folder.path().display()));
}

#[test]
fn a_sparse_file_of_a_billion_entries_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("sparse.gguf");
    let mut file = fs::File::create(&path).expect("a writable folder");
    // Zeros read as entries with empty keys: 13 bytes each, as many as the header says.
    file.write_all(&header(3, 0, 1 << 30)).and_then(|()| file.set_len(14 << 30)).expect("a sparse file");
    let message = Gguf::open(&path).expect_err("the file must be refused").to_string();
    let expected = "the header counts 1073741824 metadata entries: 1048576 at most are read";
    assert_eq!(message, format!("{}: {expected}", path.display()));
}

/// A small generator with a printed state, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }
}

/// Touches everything that a file offers.
fn walk(model: &Gguf) -> usize {
    let printed: usize = model.metadata().iter().map(|(key, value)| key.len() + value.to_string().len()).sum();
    let arrays: usize =
        model.metadata().iter().filter_map(|(key, _)| model.metadata().array(key).ok()).map(|a| a.iter().count()).sum();
    let data: usize =
        model.tensors().map(|t| t.rows() * t.cols() + t.data.iter().map(|&b| usize::from(b)).sum::<usize>()).sum();
    printed + arrays + data
}

#[test]
fn damaged_files_are_refused_or_read_but_never_panic() {
    let whole = bytes_of(&sample());
    let lengths =
        [0, 1, 8, 31, 255, 1 << 20, u64::from(u32::MAX), 1 << 40, 1 << 61, u64::MAX / 2, u64::MAX - 31, u64::MAX];
    let (mut refused, mut read) = (0, 0);
    for seed in 0..6_000 {
        let mut dice = Dice(seed);
        let mut bytes = whole.clone();
        for _ in 0..=dice.roll(3) {
            let at = dice.roll(bytes.len());
            match dice.roll(4) {
                0 => bytes[at] ^= 1 << dice.roll(8),
                1 => bytes[at] = dice.roll(256) as u8,
                2 => {
                    let length = lengths[dice.roll(lengths.len())].to_le_bytes();
                    let end = (at + 8).min(bytes.len());
                    bytes[at..end].copy_from_slice(&length[..end - at]);
                }
                _ => bytes.truncate(at.max(1)),
            }
        }
        match Gguf::from_bytes(bytes) {
            Ok(model) => {
                read += usize::from(walk(&model) > 0);
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!message.contains('\n') && message.len() < 1000, "seed {seed}: {message}");
                refused += 1;
            }
        }
    }
    // Both happen often: the damage is neither always fatal nor always harmless.
    assert!(refused > 1_000 && read > 1_000, "{refused} refused, {read} read");
}
